"""Streams over rungs: where each starts, which configurations train every rung, and the pictures of the page."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusampler.carry import CarryLoop, TrajectoryCarry, stagger_offset, validate_carry_coverage
from gpusampler.errors import ParameterError

PAGE = Path(__file__).parent.parent / "docs" / "carry.md"
BAD_COUNTS = [True, False, 0, -1, 2.0, 1.5, "2", None, Fraction(2), float("nan")]


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


@pytest.mark.parametrize("owner", [None, 3, b"DMD2"])
def test_coverage_names_its_owner(owner: Any) -> None:
    with pytest.raises(ValueError, match="owner must be a string"):
        validate_carry_coverage(streams=2, num_steps=4, interval=2, owner=owner)


@pytest.mark.parametrize("name", ["streams", "num_steps", "interval"])
@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_coverage_refuses_bad_counts(name: str, value: Any) -> None:
    good: dict[str, Any] = {"streams": 2, "num_steps": 4, "interval": 2}
    with pytest.raises(ValueError, match=name):
        validate_carry_coverage(**{**good, name: value}, owner="DMD2")


def rungs_by_round(carry: TrajectoryCarry, *, stagger_rank: int, num_steps: int, rounds: int) -> list[list[int]]:
    """Walk a carry by hand as its users do; per round, the rung of each slot that had its turn."""
    found: list[list[int]] = [[] for _ in range(rounds)]
    while carry.rounds < rounds:
        now = carry.rounds
        slot = carry.next_slot()
        held = carry.slots[slot]
        if held is None:
            first = not carry.seeded[slot]
            start = stagger_offset(stagger_rank=stagger_rank, num_slots=carry.num_slots, slot=slot, num_steps=num_steps)
            rung = (start + now) % num_steps if first else 0
        else:
            rung = held["rung"]
        found[now].append(rung)
        if rung + 1 == num_steps:
            carry.clear(slot)
            carry.seeded[slot] = True
        else:
            carry.adopt(slot, state=None, rung=rung + 1, raw_batch=None, sample_ids=None)
    return found


def make_loop(num_steps: int, slots: int, rank: int, groups: int) -> CarryLoop:
    return CarryLoop(
        lambda state, timestep, batch: state,
        range(num_steps),
        start=lambda batch: torch.zeros(1),
        renoise=lambda state, pred, timestep, next_timestep, batch: pred,
        num_slots=slots,
        stagger_rank=rank,
        stagger_groups=groups,
    )


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


def rungs_at(carry: TrajectoryCarry, *, stagger_rank: int, num_steps: int, rounds: int) -> list[list[int]]:
    """`rungs_by_round`, without the rounds that the carry had before."""
    return rungs_by_round(carry, stagger_rank=stagger_rank, num_steps=num_steps, rounds=carry.rounds + rounds)[-rounds:]


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_run_that_resumes_every_few_steps_is_where_an_unbroken_one_is(num_steps: int) -> None:
    every, steps = set(range(num_steps)), 36
    for slots in range(1, 7):
        unbroken = [
            rungs_at(TrajectoryCarry(slots), stagger_rank=rank, num_steps=num_steps, rounds=steps) for rank in range(6)
        ]
        for pieces in range(1, 7):  # steps from one resume to the next
            for rank in range(6):
                walk = []
                for step in range(0, steps, pieces):
                    carry = TrajectoryCarry(slots)
                    carry.restart(step * slots)
                    walk += rungs_at(carry, stagger_rank=rank, num_steps=num_steps, rounds=min(pieces, steps - step))
                assert walk == unbroken[rank]
        for interval in range(1, 7):
            for groups in range(1, 7):
                updated = {r for walk in unbroken[:groups] for rungs in walk[::interval] for r in rungs}
                assert (updated == every) == is_accepted(groups * slots, num_steps, interval)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_loop_goes_on_after_a_resume_at_any_micro_batch(num_steps: int) -> None:
    for slots in range(1, 4):
        for micro_batch in range(3 * slots + 1):
            unbroken, resumed = (make_loop(num_steps, slots, 1, 2) for _ in range(2))
            rungs = [unbroken.step(None).rung for _ in range(micro_batch + 2 * slots)]
            resumed.restart(micro_batch)
            assert [resumed.step(None).rung for _ in range(2 * slots)] == rungs[micro_batch:]


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_streams_stay_level_after_steps_that_broke_off(num_steps: int) -> None:
    for slots in range(1, 5):
        for broken in range(slots):  # micro-batches of the step that broke off
            for rank in range(3):
                loop = make_loop(num_steps, slots, rank, 3)
                for _ in range(2):
                    for slot in range(slots):
                        loop.step(None, slot=slot)
                for slot in range(broken):
                    loop.step(None, slot=slot)
                loop.align()
                steps = [loop.step(None, slot=slot) for _ in range(3) for slot in range(slots)]
                first = [2 + (broken > 0) + rank * slots + slot for slot in range(slots)]
                assert [s.rung for s in steps] == [(rung + now) % num_steps for now in range(3) for rung in first]
                # those who missed a turn walk the grid again, on all ranks alike
                missed = slots - broken if broken else 0
                assert [s.forwards for s in steps[:slots]] == [1] * (slots - missed) + [num_steps] * missed
                assert {s.forwards for s in steps[slots:]} == {1}


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_the_loop_walks_the_rungs_counted_by_hand(num_steps: int) -> None:
    for slots in range(1, 4):
        for groups in range(1, 4):
            for rank in range(groups):
                loop = make_loop(num_steps, slots, rank, groups)
                rungs = [[loop.step(None).rung for _ in range(slots)] for _ in range(num_steps + 2)]
                expected = rungs_by_round(
                    TrajectoryCarry(slots), stagger_rank=rank, num_steps=num_steps, rounds=num_steps + 2
                )
                assert rungs == expected
                assert loop.forwards == slots * (num_steps + 2 + num_steps - 1)


def test_accepted_exactly_from_the_gcd_on() -> None:
    for num_steps in range(1, 40):
        for interval in range(1, 40):
            classes = math.gcd(num_steps, interval)
            assert is_accepted(classes, num_steps, interval)
            assert classes == 1 or not is_accepted(classes - 1, num_steps, interval)


def test_the_pictures_on_the_page() -> None:
    rows = [line.split()[-9:] for line in PAGE.read_text().splitlines() if "  rung " in line]
    walks = [rungs_by_round(TrajectoryCarry(2), stagger_rank=rank, num_steps=4, rounds=9) for rank in (0, 1)]
    at_step = [walks[0][step] + walks[1][step] for step in range(9)]  # the rungs of streams A, B, C, D
    assert rows[:4] == [["ABCD"[rungs.index(rung)] for rungs in at_step] for rung in range(4)]
    alone = rungs_by_round(TrajectoryCarry(1), stagger_rank=0, num_steps=4, rounds=9)
    assert rows[4:] == [["A" if rungs == [rung] else "." for rungs in alone] for rung in range(4)]
