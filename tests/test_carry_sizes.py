"""Batch sizes that change under a balancing sampler: a slot keeps its samples, or the change is refused."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from carry_loops import GRID, make_loop
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.carry import CarryLoop, ode_renoise
from gpusampler.errors import ParameterError


def test_a_changed_batch_size_without_ids_is_refused_with_both_sizes() -> None:
    loop, calls = make_loop(num_slots=2)
    loop.step({"x": torch.zeros(3)})
    loop.step({"x": torch.zeros(5)})
    before = len(calls)
    with pytest.raises(ParameterError, match="slot 0 carries a batch of 3 samples and the new one has 5"):
        loop.step({"x": torch.zeros(5)})
    with pytest.raises(ParameterError, match="carries a batch of 3 samples and the new one has 1"):
        loop.step({"x": torch.zeros(1)})  # 1 would broadcast
    assert len(calls) == before
    assert loop.step({"x": torch.zeros(3)}).state.shape == (3,)


def test_with_ids_a_slot_keeps_its_samples_whatever_the_new_size() -> None:
    loop, _ = make_loop(num_slots=2)
    plan = [[4, 9, 2], [7], [0], [3, 1, 5, 8], [6, 10], [11], [12, 13], [14], [15], [16]]
    steps = [loop.step({"x": torch.tensor(ids, dtype=torch.float32)}, sample_ids=ids) for ids in plan]
    # slot 0 walks rungs 0 1 2 3 with its first batch; slot 1 starts on rung 1 and is done a call earlier
    assert [step.sample_ids for step in steps[::2]] == [(4, 9, 2)] * 4 + [(15,)]
    assert [step.sample_ids for step in steps[1::2]] == [(7,)] * 3 + [(14,)] * 2
    for step in steps:
        assert step.raw_batch["x"].tolist() == list(step.sample_ids or ())
        assert step.state.shape == step.pred.shape == step.raw_batch["x"].shape


def test_ids_have_to_come_with_the_first_batch_too() -> None:
    loop, _ = make_loop()
    loop.step({"x": torch.zeros(2)})
    with pytest.raises(ParameterError, match="2 samples and the new one has 1"):
        loop.step({"x": torch.zeros(1)}, sample_ids=[7])


def test_ids_of_another_batch_are_refused() -> None:
    loop, _ = make_loop()
    with pytest.raises(ParameterError, match="sample_ids has 1 ids for a batch of 2 samples"):
        loop.step({"x": torch.zeros(2)}, sample_ids=[7])


def test_packed_batches_say_their_size() -> None:
    loop, _ = make_loop(batch_size=lambda batch: len(batch["cu_seqlens"]) - 1)
    step = loop.step({"x": torch.zeros(10), "cu_seqlens": [0, 4, 10]}, sample_ids=torch.tensor([3, 8]))
    assert step.sample_ids == (3, 8)
    with pytest.raises(ParameterError, match="sample_ids has 2 ids for a batch of 3 samples"):
        loop.step({"x": torch.zeros(10), "cu_seqlens": [0, 4, 6, 10]}, sample_ids=[1, 2])


@dataclasses.dataclass(slots=True)
class Slotted:
    prompts: tuple[str, ...]


class Outer:
    def __init__(self, size: int) -> None:
        self.inner = types.SimpleNamespace(x=torch.zeros(size))


SIZED: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: torch.zeros(n, 2),
    "list of tensors": lambda n: [torch.zeros(2)] * n,
    "collated pair": lambda n: [torch.zeros(n, 3), torch.zeros(n)],
    "text and a scalar": lambda n: {"prompt": "text", "t": torch.tensor(1.0), "x": torch.zeros(n, 2)},
    "object": lambda n: (types.SimpleNamespace(x=torch.zeros(n)), 1),
    "object in an object": Outer,
    "slots dataclass": lambda n: Slotted(tuple("a" * n)),
    "tuple of strings": lambda n: tuple("a" * n),
    "deque": lambda n: collections.deque("a" * n),
    "set": lambda n: set(range(n)),
    "dict of dicts of tuples": lambda n: {"a": {"b": ("x",) * n, "c": (1, 2)}},
    "constant before": lambda n: {"scale": torch.ones(1), "x": torch.zeros(n)},
    "constant of three": lambda n: {"mean": np.zeros(3), "x": torch.zeros(n, 3)},
    "constant after": lambda n: (torch.zeros(n), torch.ones(4)),
    "object array": lambda n: np.array([None] * n, dtype=object),
    "sparse": lambda n: torch.zeros(n, 2).to_sparse(),
    "jagged": lambda n: torch.nested.nested_tensor([torch.ones(2)] * n, layout=torch.jagged),
}


def stay(state: torch.Tensor, timestep: float, raw_batch: Any) -> torch.Tensor:
    return state


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED.keys())
@pytest.mark.parametrize(("old", "new"), [(4, 7), (4, 1), (1, 4), (3, 0)])
def test_a_change_of_size_is_seen_in_any_batch(make: Callable[[int], Any], old: int, new: int) -> None:
    if make is SIZED["jagged"] and new == 0:
        return  # no such tensor
    loop = CarryLoop(stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    loop.step(make(old))
    with pytest.raises(ParameterError, match=f"a batch of {old} samples and the new one has {new}"):
        loop.step(make(new))
    assert loop.step(make(old)).rung == 1
    keyed = CarryLoop(stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    for size in (old, new, old, new):
        assert keyed.step(make(size), sample_ids=range(size)).sample_ids == tuple(range(old))


@pytest.mark.parametrize("batch", [{}, None])
def test_a_walk_without_data(batch: Any) -> None:
    loop = CarryLoop(stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    assert [loop.step(batch).rung for _ in range(5)] == [0, 1, 2, 3, 0]
    with pytest.raises(ParameterError, match="carries a batch of no samples and the new one has 3"):
        loop.step({"x": torch.zeros(3)})


@pytest.mark.parametrize("batch", ["text", 5, {"n": 2}, {"t": torch.tensor(1.0)}, types.SimpleNamespace(n=2)], ids=repr)
def test_batches_that_show_no_length_need_ids_or_a_size(batch: Any) -> None:
    loop = CarryLoop(stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    for _ in range(2):
        with pytest.raises(ParameterError, match=r"shows no length.*pass sample_ids on every call, or give batch_size"):
            loop.step(batch)
    assert [loop.step(batch, sample_ids=[1, 2]).rung for _ in range(2)] == [0, 1]
    with pytest.raises(ParameterError, match="shows no length"):
        loop.step(batch)
    loop = CarryLoop(
        stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1, batch_size=lambda batch: 2
    )
    assert [loop.step(batch).rung for _ in range(2)] == [0, 1]


def test_batches_of_other_keys_compare_as_a_whole() -> None:
    loop = CarryLoop(stay, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    loop.step({"video": torch.zeros(4), "note": "a"})
    assert loop.step({"image": torch.zeros(4), "mask": torch.zeros(4)}).rung == 1
    with pytest.raises(ParameterError, match="a batch of 4 samples and the new one has 9, by batch"):
        loop.step({"image": torch.zeros(9)})


def test_a_batch_size_of_the_callers_has_the_last_word() -> None:
    loop, _ = make_loop(batch_size=lambda batch: len(batch["lengths"]))
    loop.step({"x": torch.zeros(10), "lengths": [4, 6]})
    assert loop.step({"x": torch.zeros(12), "lengths": [4, 8]}).rung == 1
    with pytest.raises(ParameterError, match="a batch of 2 samples and the new one has 3"):
        loop.step({"x": torch.zeros(10), "lengths": [4, 3, 3]})
    for size in (True, 2.0, None, -1):
        loop, _ = make_loop(batch_size=lambda batch, size=size: size)
        with pytest.raises(ParameterError, match=r"batch_size\(batch\)"):
            loop.step({"x": torch.zeros(2)})


# With a loader


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples, dtype=torch.float32), "ids": samples}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_uneven_micro_batches_from_a_real_loader(num_workers: int) -> None:
    grad_accum = 2
    plan = [[0, 1, 2], [3], [4], [5, 6, 7], [8, 9], [10, 11], [12], [13, 14], [15], [16, 17, 18]]
    loader = DataLoader(range(19), batch_sampler=plan, collate_fn=collate, num_workers=num_workers)  # type: ignore[arg-type]
    loop, _ = make_loop(num_slots=grad_accum)
    steps = [loop.step(batch, slot=k % grad_accum, sample_ids=batch["ids"]) for k, batch in enumerate(loader)]
    assert [step.sample_ids for step in steps[::2]] == [(0, 1, 2)] * 4 + [(15,)]
    assert [step.sample_ids for step in steps[1::2]] == [(3,)] * 3 + [(13, 14)] * 2
    assert [step.raw_batch["x"].tolist() for step in steps] == [[float(i) for i in s.sample_ids or ()] for s in steps]


@pytest.mark.parametrize("rank", [0, 1])
def test_uneven_micro_batches_of_the_balancing_sampler(rank: int) -> None:
    lengths = [1 + (37 * i * i) % 211 for i in range(128)]

    def make_sampler() -> GPUBatchRebalanceSampler:
        return GPUBatchRebalanceSampler(lengths, 16, dp_size=2, grad_accum=2, rank=rank, process_group=None)

    sampler = make_sampler()
    plan = list(sampler)
    assert len({len(ids) for ids in plan}) > 1  # sizes do change
    loop, _ = make_loop(num_slots=2)
    loader = DataLoader(range(128), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    adopted: dict[int, tuple[int, ...]] = {}
    for index, batch in enumerate(loader):
        step = loop.step(batch, slot=index % 2, sample_ids=batch["ids"])
        if step.fresh:
            adopted[step.slot] = tuple(plan[index])
        assert step.sample_ids == adopted[step.slot]
        assert step.raw_batch["x"].tolist() == [float(i) for i in adopted[step.slot]]
        assert step.state.shape == step.pred.shape == (len(adopted[step.slot]),)
    loop.restart(5)  # a resume in mid-step, at the second slot
    assert [loop.step(collate(ids), sample_ids=ids).slot for ids in plan[5:]] == [1, 0] * 5 + [1]
