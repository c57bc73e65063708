"""Streams: exact steps, coverage, caps, resume with and without a source's state, equal counts on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.errors import ParameterError
from gpusampler.stream_steps import _alike
from gpusampler.streaming import BalancedStream

PROGRAM = Path(__file__).parent / "dist_streaming" / "stream.py"
LENGTHS = np.exp(np.random.default_rng(0).normal(4, 0.8, 53)).astype(int) + 1


class Numbered(IterableDataset):
    """Samples that know their place; counts how many were read."""

    def __init__(self, lengths: Any) -> None:
        self.lengths, self.reads, self.epoch = [int(n) for n in lengths], 0, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        for place, length in enumerate(self.lengths):
            self.reads += 1
            yield {"place": place, "length": length}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stateful(Numbered):
    """The same with a state of its own, which moves it without reading."""

    at = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        start, self.at = self.at, 0
        for place in range(start, len(self.lengths)):
            self.reads += 1
            self.at = place + 1
            yield {"place": place, "length": self.lengths[place]}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def places(stream: BalancedStream) -> list[list[int]]:
    return [[sample["place"] for sample in micro_batch] for micro_batch in stream]


def streams(lengths: Any, batch: int, dp_size: int, grad_accum: int, **options: Any) -> list[BalancedStream]:
    return [
        BalancedStream(
            Numbered(lengths), batch, dp_size, grad_accum, rank, sharded=False, process_group=None, **options
        )
        for rank in range(dp_size)
    ]


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_shared_stream_is_planned_like_the_sampler(drop_last: bool) -> None:
    for rank, stream in enumerate(streams(LENGTHS, 16, 2, 3, drop_last=drop_last)):
        sampler = GPUBatchRebalanceSampler(LENGTHS, 16, 2, 3, shuffle=False, drop_last=drop_last, rank=rank)
        expected = list(sampler) if drop_last else list(sampler)[:9]
        assert places(stream)[: len(expected)] == expected
    if not drop_last:  # the tail of 5 is filled up to 6 from itself, by the sampler from the start of the epoch
        all_places = Counter(
            i for stream in streams(LENGTHS, 16, 2, 3, drop_last=False) for m in places(stream) for i in m
        )
        assert all_places == Counter([*range(53), 48])


def test_steps_computed_by_hand() -> None:
    stream = BalancedStream(Numbered([8, 1, 2, 7, 1, 1, 5]), 6, grad_accum=2, cost=CostModel(alpha=0.0))
    assert places(stream) == [[0, 3], [2, 1, 4, 5]]
    assert stream.dropped == 1
    stream = BalancedStream(
        Numbered([8, 1, 2, 7, 1, 1, 5]), 6, grad_accum=2, cost=CostModel(alpha=0.0), drop_last=False
    )
    seen = []
    for micro_batch in stream:
        seen.append(([sample["place"] for sample in micro_batch], stream.repeats, stream.step_samples))
    assert seen == [
        ([0, 3], [False, False], 6),
        ([2, 1, 4, 5], [False] * 4, 6),
        ([6], [False], 1),
        ([6], [True], 1),
    ]
    assert stream.dropped == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_L42_counts_coverage_and_cap(lengths: list[int], dp_size: int, grad_accum: int, capped: bool) -> None:
    batch = dp_size * grad_accum + 3
    cap = 150 if capped else None
    ranks = streams(lengths, batch, dp_size, grad_accum, drop_last=False, max_tokens=cap)
    plans, kept = [], Counter()
    for stream in ranks:
        plan = []
        for micro_batch in stream:
            assert micro_batch
            assert cap is None or len(micro_batch) * max(sample["length"] for sample in micro_batch) <= cap
            kept.update(s["place"] for s, again in zip(micro_batch, stream.repeats, strict=True) if not again)
            plan.append(micro_batch)
        plans.append(plan)
    assert kept == Counter(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) % grad_accum == 0


def test_a_step_takes_fewer_samples_where_the_cap_leaves_no_room() -> None:
    stream = BalancedStream(Numbered([10, 10, 10, 10, 1, 1, 1, 1]), 4, grad_accum=2, max_tokens=10)
    # two of 10 fill both slots; then two more; then the rest in one step
    assert [sorted(m) for m in places(stream)] == [[0], [1], [2], [3], [4, 5], [6, 7]]


def test_epochs_and_sources_of_other_kinds() -> None:
    stream = BalancedStream(Numbered(LENGTHS), 16)
    stream.set_epoch(3)
    assert stream.source.epoch == 3
    assert places(stream) == places(stream)
    items = [UserDict(input_ids=[0] * n) for n in (3, 1, 2)]
    assert [len(m) for m in BalancedStream(items, 3)] == [3]
    assert [len(m) for m in BalancedStream(["a b", "c"], 2, fn=lambda text: len(text))] == [2]
    assert [len(m) for m in BalancedStream([([1, 2], 0)], 1, column=0)] == [1]
    loader = DataLoader(BalancedStream(Numbered(LENGTHS), 16, grad_accum=2), batch_size=None, collate_fn=len)
    assert sum(loader) == 48


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (5, {}, "source must be iterable, got int"),
        ([], {}, "gave 0 samples, a step takes 4; can it be iterated more than once"),
        ([{"length": 1}] * 3, {}, "gave 3 samples, a step takes 4; drop_last=False"),
        ([{"length": 1}, {"length": 0}], {}, "sample 1 of the stream: 'length' has length 0, which is not positive"),
        ([{"length": 1}, {"size": 1}], {}, "sample 1 of the stream: no 'length' in a dict with 'size'"),
        ([{"text": "x"}], {}, "sample 0 of the stream: what is the length of a sample"),
        ([{"length": 1}], {"fn": lambda x: None}, "sample 0 of the stream: fn returned None, which is missing"),
        (
            [{"length": 1}, {"length": 9}],
            {"max_tokens": 8},
            "sample 1 of the stream has length 9, above max_tokens=8",
        ),
        ([], {"dp_size": 2}, "rank must be given when dp_size=2"),
        ([], {"dp_size": 2, "rank": 0}, "sharded must be True or False when dp_size is above 1"),
        ([], {"dp_size": 2, "rank": 2, "sharded": False}, "rank must be at most 1, got 2"),
        ([], {"dp_size": 2, "rank": 0, "sharded": True}, "sharded=True needs the 2 ranks in process_group"),
        ([], {"dp_size": 3, "rank": 0, "sharded": True}, "must be a multiple of dp_size=3 if sharded, got 4"),
        ([], {"dp_size": 2, "rank": 0, "sharded": "no"}, "sharded must be True or False, got 'no'"),
        ([], {"grad_accum": 5}, "effective_batch_size must be at least 5, got 4"),
        ([], {"buffer_size": 8}, "buffer_size is for sharded=True"),
        ([], {"process_group": "world"}, "process_group must be"),
        ([], {"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_bad_parameters_and_samples_are_named(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        list(BalancedStream(source, 4, **options))


def test_dataloader_workers_are_refused() -> None:
    loader = DataLoader(BalancedStream(Numbered(LENGTHS), 16), batch_size=None, num_workers=1)
    with pytest.raises(ParameterError, match="put the loader inside"):
        list(loader)


@pytest.mark.parametrize("kind", [Numbered, Stateful])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 9])
def test_resume_continues_exactly(kind: type[Numbered], taken: int) -> None:
    def make() -> BalancedStream:
        return BalancedStream(kind(LENGTHS), 16, grad_accum=3, drop_last=False, max_tokens=2000)

    whole = places(make())
    first = make()
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    state = torch_round_trip(first.state_dict())
    second = make()
    second.load_state_dict(state)
    assert places(second) == whole[taken:]
    assert places(second) == whole  # the next epoch is whole again
    if kind is Stateful and taken:
        resumed = make()
        resumed.load_state_dict(state)
        list(resumed)
        assert resumed.source.reads == 53 - state["buffer"]["read"]


def torch_round_trip(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of plain containers."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_of_the_last_micro_batch_and_of_another_epoch() -> None:
    stream = BalancedStream(Numbered(LENGTHS), 16, grad_accum=2)
    whole = places(stream)
    again = BalancedStream(Numbered(LENGTHS), 16, grad_accum=2)
    again.load_state_dict(stream.state_dict())
    assert places(again) == []
    again.load_state_dict(stream.state_dict())
    again.set_epoch(1)
    assert places(again) == whole


# torchdata 0.11 calls what torch 2.13 deprecates
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["plain", "resets itself", "loader with a worker", "datasets stream"])
@pytest.mark.parametrize("size", [22, 24])
def test_a_state_saved_when_the_source_has_ended_reads_nothing_again(kind: str, size: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def source() -> Any:
        if kind == "datasets stream":
            return datasets.Dataset.from_dict({"place": list(range(size)), "length": [3] * size}).to_iterable_dataset()
        samples = Numbered([3] * size) if kind == "plain" else Stateful([3] * size)
        if kind == "loader with a worker":
            return torchdata.StatefulDataLoader(samples, batch_size=None, num_workers=1)
        return samples

    def make() -> BalancedStream:
        return BalancedStream(source(), 4, drop_last=False)

    stream = make()
    unbroken, states = [], []
    for micro_batch in stream:
        unbroken.append([sample["place"] for sample in micro_batch])
        states.append(torch_round_trip(stream.state_dict()))
    states.append(torch_round_trip(stream.state_dict()))
    for taken, state in zip((4, 5, 6, 6), states[3:], strict=True):
        resumed = make()
        resumed.load_state_dict(state)
        assert places(resumed) == unbroken[taken:]
    assert places(resumed) == unbroken  # the next epoch begins at its beginning


def test_a_forgotten_position_does_not_reach_the_source() -> None:
    stream = BalancedStream(Stateful(LENGTHS), 16)
    next(iter(stream))
    state = stream.state_dict()
    again = BalancedStream(Stateful(LENGTHS), 16)
    again.load_state_dict(state)
    assert again.state_dict() == state  # saved again before it goes on
    again.set_epoch(1)
    assert places(again) == places(BalancedStream(Stateful(LENGTHS), 16))


def test_a_shared_state_serves_other_ranks_at_a_step_boundary() -> None:
    (first,) = streams(LENGTHS, 16, 1, 2)
    iterator = iter(first)
    done = [next(iterator) for _ in range(2)]
    both = streams(LENGTHS, 16, 2, 1)
    for stream in both:
        stream.load_state_dict(first.state_dict())
    rest = Counter(i for stream in both for m in places(stream) for i in m)
    assert rest + Counter(sample["place"] for m in done for sample in m) == Counter(range(48))
    next(iterator)
    with pytest.raises(ParameterError, match="state was saved with dp_size=1, here it is 2"):
        both[0].load_state_dict(first.state_dict())


def test_states_that_do_not_fit_are_refused() -> None:
    stream = BalancedStream(Numbered(LENGTHS), 16)
    next(iter(stream))
    state = stream.state_dict()
    for other, message in [
        (BalancedStream(Numbered(LENGTHS), 8), "effective_batch_size=16, here it is 8"),
        (BalancedStream(Stateful(LENGTHS), 16), "saved with a source that has no state_dict, this one has a one"),
    ]:
        with pytest.raises(ParameterError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ParameterError, match="state must be one of BalancedStream"):
        stream.load_state_dict({"epoch": 1})
    iterator = iter(BalancedStream(Numbered(LENGTHS), 16, grad_accum=2))
    stream = BalancedStream(Numbered(LENGTHS), 16, grad_accum=2)
    next(iter(stream))
    changed = LENGTHS.copy()
    place = next(item[0] for item in stream.state_dict()["step"]["groups"][1])
    changed[place] += 1
    for lengths, message in [(changed, f"sample {place} has length {changed[place]}, it had"), (LENGTHS[:4], "fewer")]:
        other = BalancedStream(Numbered(lengths), 16, grad_accum=2)
        other.load_state_dict(stream.state_dict())
        with pytest.raises(ParameterError, match=message):
            next(iter(other))
    del iterator


# torchdata 0.11 calls what torch 2.13 deprecates
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_stateful_dataloader_with_workers_as_source() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> BalancedStream:
        loader = torchdata.StatefulDataLoader(Stateful(LENGTHS), batch_size=None, num_workers=1)
        return BalancedStream(loader, 16, grad_accum=2, drop_last=False)

    whole = places(make())
    first = make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    del iterator, first
    second = make()
    second.load_state_dict(state)
    assert places(second) == whole[3:]


def test_datasets_stream_as_source() -> None:
    def make() -> BalancedStream:
        rows = datasets.Dataset.from_dict({"place": list(range(53)), "length": LENGTHS.tolist()})
        return BalancedStream(rows.to_iterable_dataset(num_shards=3), 16, grad_accum=2)

    whole = places(make())
    first = make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = make()
    second.load_state_dict(first.state_dict())
    assert places(second) == whole[3:]


def test_choice_of_samples_like_those_of_another_rank() -> None:
    lengths = [5, 40, 9, 7, 90]
    assert _alike(lengths, [8, 80, 4], 3) == [0, 4, 3]  # 5 for 4, then 90 for 80 and 7 for 8 (9 is as near)
    assert _alike(lengths, [5, 40, 9], 3) == [0, 1, 2]
    assert _alike(lengths, [50, 50], 2) == [0, 1]
    assert _alike(lengths, [100], 1) == [0]  # the oldest goes, whatever the others take
    assert sorted(_alike(lengths, [1] * 5, 5)) == [0, 1, 2, 3, 4]
    assert _alike([3, 3, 3, 3], [3, 3], 2) == [0, 1]  # ties: the older
    assert _alike(lengths, [90, 40, 9, 5], 2) == [0, 1]  # of four, the second and the fourth are followed
    rng = np.random.default_rng(0)
    for _ in range(20):
        drawn = np.exp(rng.normal(6, 0.8, (2, 64))).astype(int)
        chosen = _alike(drawn[0].tolist(), drawn[1, :16].tolist(), 16)
        assert len(set(chosen)) == 16
        assert 0 in chosen
        assert sum(sorted(drawn[0][chosen])[:-2]) == pytest.approx(sum(sorted(drawn[1, :16])[:-2]), rel=0.15)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two real processes saw; started once."""
    folder = tmp_path_factory.mktemp("streams")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_L42_uneven_shards_end_together(seen: list[dict[str, Any]]) -> None:
    # 100 and 61 samples, 8 a step on each rank, 2 slots
    assert [run["dropping"]["count"] for run in seen] == [14, 14]
    assert [run["dropping"]["met"] for run in seen] == [28, 28]
    assert [run["dropping"]["dropped"] for run in seen] == [44 - 12, 5]
    assert [run["keeping"]["count"] for run in seen] == [26, 26]
    assert [run["keeping"]["met"] for run in seen] == [52, 52]
    for run, size in zip(seen, (100, 61), strict=True):
        assert sorted(run["keeping"]["places"]) == list(range(size))
    # steps of 8 + 8, rank 1 has 5 in its 8th step and none in 5 more: it repeats its 2 slots
    assert seen[0]["keeping"]["step samples"] == [16] * 7 + [13] + [8] * 4 + [4]
    assert seen[0]["keeping"]["step samples"] == seen[1]["keeping"]["step samples"]
    assert [run["keeping"]["repeats"] for run in seen] == [0, 10]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_the_buffer_balances_ranks(seen: list[dict[str, Any]]) -> None:
    # summed padded cost of the dearer rank over that of the mean: 1.26 and 1.12 for these lengths
    excess = {name: value - 1 for name, value in seen[0]["imbalance"].items()}
    assert excess["buffered"] < 0.5 * excess["oldest first"]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_shared_streams_cover_once_and_differences_raise_everywhere(seen: list[dict[str, Any]]) -> None:
    assert sorted(seen[0]["shared"] + seen[1]["shared"]) == list(range(96))
    for run in seen:
        assert "read different samples of a shared stream" in run["different streams"]
        assert "ranks differ: effective_batch_size is 8 on rank 0 and 10 on rank 1" in run["different parameters"]
    assert "sample 5 of the stream: 'length' has length 0" in seen[1]["bad sample"]
    assert "rank 1 cannot go on with the stream. ParameterError: sample 5" in seen[0]["bad sample"]
    assert all("process 1 in the group gave 0 samples" in run["empty shard"] for run in seen)


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_resume_of_shards(seen: list[dict[str, Any]]) -> None:
    for run in seen:
        assert run["resumed"] == run["unbroken"]
        assert len(run["resumed"]) > 10
        # 22 samples a rank in steps of 4: buffers of 16 have read all of them after step 2
        assert run["resumed at the end"] == run["unbroken at the end"]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_the_loop_of_the_page_trains_on_the_mean_over_tokens(seen: list[dict[str, Any]]) -> None:
    for run in seen:
        assert len(run["gradients"]) == 13
        assert run["gradients"] == pytest.approx(run["token means"], rel=1e-6)
