"""The memory a carry reports and bounds: all that it holds, and nothing that it shares."""

from __future__ import annotations

import array
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from gpusampler.carry import CarryLoop, TrajectoryCarry, ode_renoise
from gpusampler.carry.visit import held_bytes
from gpusampler.errors import ParameterError


def test_memory_is_reported_and_bounded() -> None:
    carry = TrajectoryCarry(2, max_bytes=1000)
    batch = {"x": torch.zeros(5), "ids": np.zeros(3, dtype=np.int32), "text": "a"}
    held = 16 + 20 + 12 + sys.getsizeof(batch) + sys.getsizeof("a")
    carry.set(0, state=torch.zeros(4), raw_batch=batch)
    carry.set(1, state=torch.zeros(10, dtype=torch.float16))  # 20
    memory = carry.memory()
    assert (memory.total, memory.per_slot, memory.by_device) == (held + 20, (held, 20), {"cpu": held + 20})
    with pytest.raises(
        ParameterError, match=f"slot 1 would hold 1000 bytes, the other slots hold {held}: above max_bytes=1000"
    ):
        carry.set(1, state=torch.zeros(250))
    assert carry.memory() == memory
    carry.set(1, state=torch.zeros(1000 - held, dtype=torch.int8))
    assert carry.memory().total == 1000
    carry.clear(0)
    assert carry.memory().per_slot == (0, 1000 - held)
    with pytest.raises(ValueError, match="max_bytes"):
        TrajectoryCarry(1, max_bytes=0)


def test_memory_stays_the_same_over_a_run() -> None:
    carry = TrajectoryCarry(2)
    for call in range(20):
        slot = carry.next_slot()
        carry.set(slot, state=torch.zeros(4), rung=call // 2, raw_batch=(torch.zeros(4),))
        assert carry.memory().total == (32 + sys.getsizeof((1,))) * min(call + 1, 2)


def test_memory_counts_all_that_a_batch_holds() -> None:
    carry = TrajectoryCarry(1, max_bytes=10**6)
    held: list[tuple[Any, int]] = [
        (b"x" * 10**5, 10**5),
        ("y" * 10**5, 10**5),
        (bytearray(10**5), 10**5),
        (array.array("b", bytes(10**5)), 10**5),
        ([bytes(10**5), bytes(10**5)], 2 * 10**5),
        (list(range(1000, 11000)), 10**4 * (8 + 28)),  # a pointer and an int each
        (types.SimpleNamespace(text="y" * 10**5), 10**5),
        ({"module": torch.nn.Linear(1000, 1000)}, 0),  # stays the caller's
    ]
    for batch, size in held:
        carry.set(0, state=torch.zeros(1), raw_batch=batch)
        assert 0 <= carry.memory().total - size < 1000, type(batch)
    for batch in (bytes(10**6), "y" * 10**6, bytearray(10**6), {"a": ["b", [b"c" * 10**6]]}, list(range(10**5))):
        with pytest.raises(ParameterError, match="above max_bytes=1000000"):
            carry.set(0, state=torch.zeros(1), raw_batch=batch)


def test_a_batch_that_stays_is_counted_again_in_each_call() -> None:
    carry = TrajectoryCarry(1)
    carry.set(0, state=torch.zeros(1), raw_batch=(torch.zeros(4),))
    before = carry.memory()
    for rung in range(1, 4):
        carry.set(0, state=torch.zeros(1), rung=rung, raw_batch=carry.slots[0]["raw_batch"])
        assert carry.memory() == before
    carry.clear(0)
    carry.set(0, state=torch.zeros(1))
    assert carry.memory().total == 4


def test_held_bytes_counts_shared_and_sparse_tensors_once() -> None:
    shared = torch.zeros(4)
    value = {"a": shared, "b": [shared, (shared,)], "coo": torch.eye(2).to_sparse(), "o": np.array([None, {}])}
    containers = sum(map(sys.getsizeof, (value, value["b"], value["b"][1], {})))
    # 16 bytes shared; 2 float32 values and 4 int64 indices; 2 pointers
    assert held_bytes(value) == {"cpu": 16 + 8 + 32 + 16 + containers}


def make_loop(max_bytes: int) -> CarryLoop:
    return CarryLoop(
        lambda state, timestep, batch: state * 0.5,
        [1.0, 0.75, 0.5, 0.25],
        start=lambda batch: torch.ones_like(batch["x"]),
        renoise=ode_renoise(),
        num_slots=2,
        max_bytes=max_bytes,
    )


def test_memory_held_by_a_walk_is_bounded() -> None:
    bound = 2 * (16 + sys.getsizeof({"x": 0}))  # two slots, each a state and a batch of two floats
    loop = make_loop(bound)
    for call in range(20):
        loop.step({"x": torch.full((2,), float(call))})
        assert loop.carry.memory().total <= bound, call
    loop = make_loop(bound - 1)
    loop.step({"x": torch.zeros(2)})
    with pytest.raises(ParameterError, match=f"above max_bytes={bound - 1}"):
        loop.step({"x": torch.zeros(2)})
