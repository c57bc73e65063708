"""The carry's parts: slots, ranks, settings. Expected values are counted by hand."""

from __future__ import annotations

import copy
import doctest
import importlib
import io
import pickle
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusampler.carry import (
    TrajectoryCarry,
    carry_rank_world,
    parse_carry_slots,
    stagger_rank_and_groups,
)
from gpusampler.errors import ParameterError

PAGE = Path(__file__).parent.parent / "docs" / "carry.md"
BAD_COUNTS = [True, False, 0, -1, 2.0, 1.5, "2", None, Fraction(2), float("nan")]


@pytest.mark.parametrize("name", ["loop", "ranks", "renoise", "slots", "snapshot", "streams", "visit"])
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"gpusampler.carry.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_page() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


# Slots


@pytest.mark.parametrize("count", BAD_COUNTS, ids=repr)
def test_L05_bad_slot_counts(count: Any) -> None:
    with pytest.raises(ValueError, match="num_slots"):
        TrajectoryCarry(count)


def test_slot_counts_of_other_integral_types() -> None:
    assert TrajectoryCarry(np.int64(3)).num_slots == 3


def test_L05_stored_state_is_a_copy() -> None:
    state, batch = torch.zeros(3), {"x": torch.zeros(2)}
    carry = TrajectoryCarry(2)
    carry.set(0, state=state, rung=1, raw_batch=batch)
    state.add_(1)
    batch["x"].add_(1)
    assert carry.slots[0] is not None
    assert carry.slots[0]["state"].tolist() == [0.0, 0.0, 0.0]
    assert carry.slots[0]["raw_batch"]["x"].tolist() == [0.0, 0.0]
    assert carry.slots[1] is None


def test_L05_state_alone() -> None:
    state = torch.zeros(3)
    carry = TrajectoryCarry(1)
    carry.set(0, state=state)
    state.add_(1)
    assert carry.slots == [{"state": carry.slots[0]["state"], "rung": 0, "raw_batch": None}]
    assert carry.slots[0]["state"].tolist() == [0.0, 0.0, 0.0]


def test_stored_state_is_detached_and_views_do_not_keep_their_base() -> None:
    weight = torch.ones(1000, requires_grad=True)
    carry = TrajectoryCarry(1)
    carry.set(0, state=(weight * 2)[::500], rung=2, raw_batch={})
    state = carry.slots[0]["state"]
    assert not state.requires_grad
    assert state.untyped_storage().nbytes() == 8


def test_a_batch_the_slot_holds_is_not_copied_again() -> None:
    carry = TrajectoryCarry(1)
    carry.set(0, state=torch.zeros(1), rung=0, raw_batch={"x": torch.zeros(2)})
    kept = carry.slots[0]["raw_batch"]
    carry.set(0, state=torch.ones(1), rung=1, raw_batch=kept)
    assert carry.slots[0]["raw_batch"] is kept


def test_round_robin_set_and_clear() -> None:
    carry = TrajectoryCarry(3)
    assert (carry.slots, carry.seeded) == ([None] * 3, [False] * 3)
    assert [carry.next_slot() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert (carry.upcoming_slot, carry.rounds) == (1, 2)
    carry.set(2, state=torch.zeros(1), rung=3, raw_batch=None, sample_ids=np.array([7, 5]))
    assert (carry.seeded, carry.sample_ids) == ([False, False, True], [None, None, (7, 5)])
    carry.clear(2)
    carry.clear(2)
    assert (carry.slots, carry.seeded, carry.sample_ids) == ([None] * 3, [False, False, True], [None] * 3)


@pytest.mark.parametrize("slot", [2, -1, True, 0.0, None, "0"])
def test_bad_slots(slot: Any) -> None:
    carry = TrajectoryCarry(2)
    with pytest.raises(ValueError, match="slot"):
        carry.set(slot, state=torch.zeros(1), rung=0, raw_batch=None)
    with pytest.raises(ValueError, match="slot"):
        carry.clear(slot)
    assert carry.slots == [None, None]


@pytest.mark.parametrize("rung", [-1, True, 1.0, None])
def test_bad_rungs(rung: Any) -> None:
    with pytest.raises(ValueError, match="rung"):
        TrajectoryCarry(1).set(0, state=torch.zeros(1), rung=rung, raw_batch=None)


@pytest.mark.parametrize("state", [None, "a", 1.0, {}, [None, "a"]], ids=repr)
def test_a_state_holds_a_tensor(state: Any) -> None:
    carry = TrajectoryCarry(1)
    with pytest.raises(ParameterError, match="state must be a tensor or hold one"):
        carry.set(0, state=state)
    assert carry.slots == [None]
    for good in (torch.zeros(1), np.zeros(1), {"video": [torch.zeros(1), "a"]}):
        carry.set(0, state=good)


@pytest.mark.parametrize("ids", ["abc", 5, [[1]]])
def test_bad_sample_ids(ids: Any) -> None:
    with pytest.raises(ValueError, match="sample_ids"):
        TrajectoryCarry(1).set(0, state=torch.zeros(1), sample_ids=ids)


def test_restart_takes_up_the_accumulation_index() -> None:
    carry = TrajectoryCarry(4)
    carry.set(0, state=torch.zeros(1))
    carry.restart(10)
    assert (carry.slots, carry.seeded) == ([None] * 4, [False] * 4)
    assert [(carry.rounds, carry.next_slot()) for _ in range(4)] == [(2, 2), (2, 3), (3, 0), (3, 1)]
    with pytest.raises(ValueError, match="micro_batch"):
        carry.restart(-1)


def test_align_moves_on_and_drops_the_slots_that_miss_their_turn() -> None:
    carry = TrajectoryCarry(4)
    carry.align()
    assert (carry.upcoming_slot, carry.rounds) == (0, 0)
    for _ in range(6):
        carry.set(carry.next_slot(), state=torch.zeros(1), sample_ids=[1])
    carry.align(2)
    assert (carry.upcoming_slot, carry.rounds, carry.seeded) == (2, 1, [True] * 4)
    carry.align()
    assert (carry.upcoming_slot, carry.rounds, carry.seeded) == (0, 2, [True, True, False, False])
    assert [held is None for held in carry.slots] == [False, False, True, True]
    assert carry.sample_ids == [(1,), (1,), None, None]
    for slot in (4, -1, True, 0.0, None):
        with pytest.raises(ValueError, match="slot"):
            carry.align(slot)
    assert carry.upcoming_slot == 0


def test_never_in_a_checkpoint() -> None:
    carry = TrajectoryCarry(2, max_bytes=10**6)
    carry.next_slot()
    carry.set(0, state=torch.full((1000,), 7.0), rung=1, raw_batch={"x": torch.zeros(1000)})
    assert not hasattr(carry, "state_dict")
    data = pickle.dumps(carry)
    assert len(data) < 200
    buffer = io.BytesIO()
    torch.save({"method": carry}, buffer)
    buffer.seek(0)
    for other in (pickle.loads(data), copy.deepcopy(carry), torch.load(buffer, weights_only=False)["method"]):
        assert (other.num_slots, other.max_bytes, other.upcoming_slot) == (2, 10**6, 0)
        assert (other.slots, other.seeded, other.memory().total) == ([None, None], [False, False], 0)
    assert carry.slots[0] is not None


# Ranks


def test_ranks_from_plain_arguments() -> None:
    assert carry_rank_world() == (0, 1)
    assert carry_rank_world(3, 8) == (3, 8)
    assert [carry_rank_world(rank, 8, 4) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert carry_rank_world(rank=5, world_size=6, sp_size=3) == (1, 2)
    assert stagger_rank_and_groups(rank=5, world_size=6, sp_size=3) == (1, 2)
    assert stagger_rank_and_groups(rank=5, world_size=6, sp_size=3, exact_shape=True) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0 and world_size=None"),
        ({"world_size": 2}, "rank=None and world_size=2"),
        ({"rank": 2, "world_size": 2}, "rank must be at most 1"),
        ({"rank": -1, "world_size": 2}, "rank"),
        ({"rank": True, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"rank": 0, "world_size": 6, "sp_size": 4}, "world_size=6, sp_size=4"),
        ({"rank": 0, "world_size": 2, "sp_size": 4}, "world_size=2, sp_size=4"),
        ({"rank": 0, "world_size": 2, "sp_size": 0}, "sp_size"),
        ({"rank": 0, "world_size": 2, "sp_size": 1.0}, "sp_size"),
        ({"peer_dims": ("sp",)}, "peer_dims needs mesh"),
        ({"mesh": (2, 2)}, "mesh must be a DeviceMesh"),
        ({"sp_group": [0, 1]}, "sp_group must be a process group"),
        ({"dp_group": "dp"}, "dp_group must be a process group"),
        ({"mesh": (2, 2), "sp_size": 2}, "described once"),
    ],
)
def test_L53_ranks_that_make_no_groups(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        carry_rank_world(**arguments)
    with pytest.raises(ValueError, match=message):
        stagger_rank_and_groups(**arguments, exact_shape=True)


def test_exact_shape_is_a_bool() -> None:
    with pytest.raises(ValueError, match="exact_shape"):
        stagger_rank_and_groups(0, 1, exact_shape=1)  # type: ignore[arg-type]


# Settings


def test_L05_slots_follow_the_accumulation_rounds() -> None:
    loop = types.SimpleNamespace(gradient_accumulation_steps=2)
    assert parse_carry_slots({}, loop) == 2
    assert parse_carry_slots({"rollout_carry_slots": None}, loop) == 2
    assert parse_carry_slots({"rollout_carry_slots": 2}, loop) == 2
    assert parse_carry_slots(types.SimpleNamespace(my_slots=2), {"gradient_accumulation_steps": 2}, key="my_slots") == 2
    assert parse_carry_slots({}, types.SimpleNamespace(gradient_accumulation_steps=None)) == 1
    with pytest.raises(ValueError, match="rollout_carry_slots=3 and gradient_accumulation_steps=2"):
        parse_carry_slots({"rollout_carry_slots": 3}, loop)
    with pytest.raises(ValueError, match="at most 1048576"):  # as many as a carry takes
        parse_carry_slots({}, {"gradient_accumulation_steps": 2**21})
    with pytest.raises(ValueError, match="key must be a string, got 3"):
        parse_carry_slots(object(), loop, key=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="my_slots=1 and gradient_accumulation_steps=2"):
        parse_carry_slots({"my_slots": 1, "rollout_carry_slots": 2}, loop, key="my_slots")


@pytest.mark.parametrize("count", [count for count in BAD_COUNTS if count is not None], ids=repr)
def test_L05_bad_counts_in_settings(count: Any) -> None:
    with pytest.raises(ValueError, match="rollout_carry_slots"):
        parse_carry_slots({"rollout_carry_slots": count}, {"gradient_accumulation_steps": 2})
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        parse_carry_slots({}, {"gradient_accumulation_steps": count})


@pytest.mark.parametrize("loop", [{}, types.SimpleNamespace(), None])
def test_settings_without_accumulation_rounds(loop: Any) -> None:
    with pytest.raises(ValueError, match="loop_config has no gradient_accumulation_steps"):
        parse_carry_slots({}, loop)
