"""The carry's parts: slots, streams and their coverage, settings. Expected values are counted by hand."""

from __future__ import annotations

import copy
import doctest
import importlib
import io
import math
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
    stagger_offset,
    stagger_rank_and_groups,
    validate_carry_coverage,
)
from gpusampler.carry.snapshot import held_bytes
from gpusampler.errors import ParameterError

PAGE = Path(__file__).parent.parent / "docs" / "carry.md"
BAD_COUNTS = [True, False, 0, -1, 2.0, 1.5, "2", None, Fraction(2), float("nan")]


@pytest.mark.parametrize("name", ["loop", "ranks", "renoise", "slots", "snapshot", "streams"])
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"gpusampler.carry.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_page() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_pictures_on_the_page() -> None:
    rows = [line.split()[-9:] for line in PAGE.read_text().splitlines() if "  rung " in line]
    walks = [rungs_by_round(TrajectoryCarry(2), stagger_rank=rank, num_steps=4, rounds=9) for rank in (0, 1)]
    at_step = [walks[0][step] + walks[1][step] for step in range(9)]  # the rungs of streams A, B, C, D
    assert rows[:4] == [["ABCD"[rungs.index(rung)] for rungs in at_step] for rung in range(4)]
    alone = rungs_by_round(TrajectoryCarry(1), stagger_rank=0, num_steps=4, rounds=9)
    assert rows[4:] == [["A" if rungs == [rung] else "." for rungs in alone] for rung in range(4)]


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


@pytest.mark.parametrize("ids", ["abc", 5, [[1]]])
def test_bad_sample_ids(ids: Any) -> None:
    with pytest.raises(ValueError, match="sample_ids"):
        TrajectoryCarry(1).set(0, state=torch.zeros(1), sample_ids=ids)


def test_restart_takes_up_the_accumulation_index() -> None:
    carry = TrajectoryCarry(4)
    carry.set(0, state=torch.zeros(1))
    carry.restart(10)
    assert (carry.slots, carry.seeded) == ([None] * 4, [False] * 4)
    assert [(carry.rounds, carry.next_slot()) for _ in range(4)] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="micro_batch"):
        carry.restart(-1)


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


def test_memory_is_reported_and_bounded() -> None:
    carry = TrajectoryCarry(2, max_bytes=100)
    batch = {"x": torch.zeros(5), "ids": np.zeros(3, dtype=np.int32), "text": "a"}
    carry.set(0, state=torch.zeros(4), raw_batch=batch)  # 16 + 20 + 12
    carry.set(1, state=torch.zeros(10, dtype=torch.float16))  # 20
    memory = carry.memory()
    assert (memory.total, memory.per_slot, memory.by_device) == (68, (48, 20), {"cpu": 68})
    with pytest.raises(
        ParameterError, match="slot 1 would hold 56 bytes, the other slots hold 48: above max_bytes=100"
    ):
        carry.set(1, state=torch.zeros(14))
    assert carry.memory() == memory
    carry.set(1, state=torch.zeros(13))
    assert carry.memory().total == 100
    carry.clear(0)
    assert carry.memory().per_slot == (0, 52)
    with pytest.raises(ValueError, match="max_bytes"):
        TrajectoryCarry(1, max_bytes=0)


def test_memory_stays_the_same_over_a_run() -> None:
    carry = TrajectoryCarry(2)
    for call in range(20):
        slot = carry.next_slot()
        carry.set(slot, state=torch.zeros(4), rung=call // 2, raw_batch={"x": torch.zeros(4)})
        assert carry.memory().total == 32 * min(call + 1, 2)


def test_held_bytes_counts_shared_and_sparse_tensors_once() -> None:
    shared = torch.zeros(4)
    value = {"a": shared, "b": [shared, (shared,)], "coo": torch.eye(2).to_sparse(), "o": np.array([None, {}])}
    # 16 bytes shared; 2 float32 values and 4 int64 indices; 2 pointers
    assert held_bytes(value) == {"cpu": 16 + 8 + 32 + 16}


# Streams


def test_stagger_offsets() -> None:
    found = [[stagger_offset(stagger_rank=r, num_slots=2, slot=s, num_steps=5) for s in (0, 1)] for r in range(4)]
    assert found == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert stagger_offset(stagger_rank=10**12, num_slots=3, slot=2, num_steps=7) == (3 * 10**12 + 2) % 7


@pytest.mark.parametrize("name", ["stagger_rank", "num_slots", "slot", "num_steps"])
@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None])
def test_stagger_offset_refuses_bad_counts(name: str, value: Any) -> None:
    good: dict[str, Any] = {"stagger_rank": 1, "num_slots": 2, "slot": 1, "num_steps": 4}
    with pytest.raises(ValueError, match=name):
        stagger_offset(**{**good, name: value})


@pytest.mark.parametrize(("name", "value"), [("num_slots", 0), ("num_steps", 0), ("slot", 2)])
def test_stagger_offset_refuses_counts_out_of_range(name: str, value: int) -> None:
    good = {"stagger_rank": 1, "num_slots": 2, "slot": 1, "num_steps": 4}
    with pytest.raises(ValueError, match=name):
        stagger_offset(**{**good, name: value})


def test_L05_coverage() -> None:
    validate_carry_coverage(streams=2, num_steps=4, interval=2, owner="DMD2")
    with pytest.raises(ValueError, match="DMD2 would never update 2 of the 4 rungs") as error:
        validate_carry_coverage(streams=1, num_steps=4, interval=2, owner="DMD2")
    for part in ("num_steps=4", "interval=2", "gcd(4, 2) = 2", "streams=1", "at least 2 streams", "such as 3"):
        assert part in str(error.value)


def test_coverage_message_uses_the_names_of_the_configuration_and_a_change_that_works() -> None:
    names = {"num_steps_name": "denoising_steps", "interval_name": "generator_update_interval"}
    with pytest.raises(ValueError, match="denoising_steps=12 and generator_update_interval=6") as error:
        validate_carry_coverage(streams=3, num_steps=12, interval=6, owner="Method", **names)
    assert "gcd(12, 6) = 6" in str(error.value)
    assert "another generator_update_interval, such as 7" in str(error.value)
    validate_carry_coverage(streams=3, num_steps=12, interval=7, owner="Method", **names)
    validate_carry_coverage(streams=6, num_steps=12, interval=6, owner="Method", **names)


@pytest.mark.parametrize("name", ["streams", "num_steps", "interval"])
@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_coverage_refuses_bad_counts(name: str, value: Any) -> None:
    good: dict[str, Any] = {"streams": 2, "num_steps": 4, "interval": 2}
    with pytest.raises(ValueError, match=name):
        validate_carry_coverage(**{**good, name: value}, owner="DMD2")


def rungs_by_round(carry: TrajectoryCarry, *, stagger_rank: int, num_steps: int, rounds: int) -> list[list[int]]:
    """Walk a carry by hand as its users do; per round, the rung of each slot that had its turn."""
    found: list[list[int]] = [[] for _ in range(rounds)]
    for _ in range(rounds * carry.num_slots):
        now = carry.rounds
        slot = carry.next_slot()
        held = carry.slots[slot]
        if held is None:
            first = not carry.seeded[slot]
            start = stagger_offset(stagger_rank=stagger_rank, num_slots=carry.num_slots, slot=slot, num_steps=num_steps)
            rung = (start + now) % num_steps if first else 0
        else:
            rung = held["rung"]
        if now < rounds:
            found[now].append(rung)
        if rung + 1 == num_steps:
            carry.clear(slot)
            carry.seeded[slot] = True
        else:
            carry.set(slot, state=None, rung=rung + 1, raw_batch=None)
    return found


def is_accepted(streams: int, num_steps: int, interval: int) -> bool:
    try:
        validate_carry_coverage(streams=streams, num_steps=num_steps, interval=interval, owner="test")
    except ParameterError:
        return False
    return True


@pytest.mark.parametrize("num_steps", range(1, 13))
def test_L05_coverage_is_exact_for_all_configurations_up_to_12(num_steps: int) -> None:
    every = set(range(num_steps))
    for slots in range(1, 13):
        walks = []
        for rank in range(12):
            walk = rungs_by_round(TrajectoryCarry(slots), stagger_rank=rank, num_steps=num_steps, rounds=num_steps + 1)
            assert walk[0] == walk[num_steps]  # a stream's next rung follows from its rung, so this repeats for ever
            assert all({rungs[slot] for rungs in walk} == every for slot in range(slots))  # each stream walks all rungs
            walks.append(walk)
        for interval in range(1, 13):
            updated: set[int] = set()
            for groups, walk in enumerate(walks, start=1):
                updates = range(0, num_steps * interval, interval)
                updated |= {rung for update in updates for rung in walk[update % num_steps]}
                assert (updated == every) == is_accepted(groups * slots, num_steps, interval)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_coverage_holds_after_a_restart_at_any_micro_batch(num_steps: int) -> None:
    every = set(range(num_steps))
    for slots in range(1, 5):
        for micro_batch in range(2 * slots):
            walks = []
            for rank in range(3):
                carry = TrajectoryCarry(slots)
                carry.restart(micro_batch)
                assert carry.upcoming_slot == micro_batch % slots
                walks.append(rungs_by_round(carry, stagger_rank=rank, num_steps=num_steps, rounds=44))
            for interval in range(1, 7):
                for groups in range(1, 4):
                    # from the second round on, because the first one may be partial
                    updated = {r for walk in walks[:groups] for rungs in walk[interval:43:interval] for r in rungs}
                    assert (updated == every) == is_accepted(groups * slots, num_steps, interval)


def test_accepted_exactly_from_the_gcd_on() -> None:
    for num_steps in range(1, 40):
        for interval in range(1, 40):
            classes = math.gcd(num_steps, interval)
            assert is_accepted(classes, num_steps, interval)
            assert classes == 1 or not is_accepted(classes - 1, num_steps, interval)


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
