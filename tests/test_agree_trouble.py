"""Real processes in situations they get into by mistake or bad luck: they go on, or say what is wrong, in time."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from launch import DIST, environment, torchrun

pytestmark = pytest.mark.dist
SCENARIOS = {
    2: (
        *("skew", "early_collective", "loader_dies", "loop_raises", "state_alone", "one_more_epoch", "stopped"),
        *("slow_steps", "two_samplers", "copies", "forked", "in_workers", "cost_replaced", "ended"),
        "odd_state",  # the last: one rank alone makes groups, which torch counts
    ),
    4: ("kinds", "reversed_ranks", "two_groups", "meshes"),
}
NOT_TAKEN = "DistributedError: a plan was not taken by all ranks within 2 s: a rank is dead or stuck"
NOT_BEGUN = "DistributedError: a rank did not begin the iteration within 2 s: every rank of the group (0, 1) must"
Found = Callable[[str, int], list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of a scenario found; each number of processes is started once."""

    @functools.cache
    def run(world: int) -> list[dict[str, Any]]:
        return torchrun("trouble", world, tmp_path_factory.mktemp(f"world{world}"), *SCENARIOS[world], timeout=150)

    return lambda name, world: [answer[name] for answer in run(world)]


@pytest.mark.parametrize("name", ["kinds", "reversed_ranks"])
def test_what_need_not_be_alike_on_ranks(found: Found, name: str) -> None:
    assert found(name, 4) == [True] * 4


def test_two_groups_side_by_side(found: Found) -> None:
    assert found("two_groups", 4) == [[[True, True], 2, place] for place in (0, 0, 1, 1)]


def test_L53_coordinates_in_meshes_of_real_processes(found: Found) -> None:
    for rank, places in enumerate(found("meshes", 4)):
        major, minor = divmod(rank, 2)
        outside = f"ParameterError: mesh must contain this process, of rank {rank} in the world"
        known = "the mesh has 'dp_replicate', 'cp', 'dp_shard'"
        assert places == {
            "major": [2, major],
            "both": [4, rank],
            "turned": [4, 2 * minor + major],
            "one": [1, 0],
            "flat": [4, rank],
            "flat and one": [4, rank],
            "part": [2, minor],
            "half": outside if minor else [2, major],
            "unknown": f"ParameterError: dims has 'tp', {known}",
            "twice": "ParameterError: dims must be names of mesh dimensions, each once, got ('dp_shard', 'dp_shard')",
            "within": "ParameterError: dims must split the data in different ways, 'dp_shard' overlaps another",
            "none": "ParameterError: dims must be names of mesh dimensions, each once, got ()",
            "nothing": f"ParameterError: dims has None, {known}",
            "number": f"ParameterError: dims has 0, {known}",
            "unnamed": "ParameterError: dims has 'dp', the mesh has no names",
            "no mesh": "ParameterTypeError: mesh must be a DeviceMesh, got 'mesh' of type str",
            "same": True,
        }


def test_L53_the_example_of_a_device_mesh() -> None:
    script = str(DIST.parent.parent / "examples" / "device_mesh.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script]
    done = subprocess.run(command, timeout=90, env=environment(), capture_output=True, text=True)
    assert done.stdout.startswith("processes [0, 1] train the same "), done.stderr[-3000:]


def test_loaders_with_and_without_workers_leave_resume_and_begin_again_together(found: Found) -> None:
    assert found("skew", 2) == [[True] * 6] * 2


def test_a_collective_before_the_first_batch_of_loaders_that_differ_ends_in_an_error(found: Found) -> None:
    assert all(error.startswith(NOT_BEGUN) for error in found("early_collective", 2))


def test_a_killed_worker_is_named_on_its_rank_and_missed_on_the_other(found: Found) -> None:
    (other, seconds), (own, _) = found("loader_dies", 2)
    assert own.startswith("RuntimeError: DataLoader worker (pid")
    assert other.startswith(NOT_TAKEN)
    assert seconds < 8


def test_a_loop_that_raises_on_one_rank(found: Found) -> None:
    other, own = found("loop_raises", 2)
    assert other[0].startswith(NOT_TAKEN)
    assert own[0] == "ArithmeticError: loss is not finite"
    assert other[1]
    assert own[1]


def test_saving_needs_nobody_else(found: Found) -> None:
    assert found("state_alone", 2) == [True, True]


def test_L45_a_state_that_only_one_rank_refuses_keeps_all_from_beginning(found: Found) -> None:
    other, own = found("odd_state", 2)
    assert own == ["ParameterError: state has format 2, this version reads format 1", None]
    assert other[0] is None
    assert other[1].startswith(NOT_BEGUN)


def test_an_epoch_that_only_one_rank_begins(found: Found) -> None:
    assert found("one_more_epoch", 2)[0] == [15]
    count, error = found("one_more_epoch", 2)[1]
    assert count == 15
    assert error.startswith(NOT_BEGUN)


def test_a_stopped_rank_is_an_error_within_the_timeout(found: Found) -> None:
    error, seconds = found("stopped", 2)[0]
    assert error.startswith(NOT_TAKEN)
    assert 1.9 < seconds < 6


def test_steps_longer_than_the_timeout_are_no_failure(found: Found) -> None:
    assert found("slow_steps", 2) == [True, True]


def test_a_second_sampler_within_an_epoch_works_and_the_same_one_is_refused_on_all(found: Found) -> None:
    error = "DistributedError: a later iteration over this sampler has begun; ranks share one at a time"
    assert found("two_samplers", 2) == [[True, error, True]] * 2


def test_copies_make_groups_of_their_own(found: Found) -> None:
    assert found("copies", 2) == [[True, True]] * 2


def test_an_iteration_does_not_go_on_in_a_forked_process(found: Found) -> None:
    assert found("forked", 2) == [[[0, 0], True]] * 2


def test_workers_cannot_agree(found: Found) -> None:
    for error, count in found("in_workers", 2):
        assert "process_group must be None where a DataLoader's worker iterates the sampler" in error
        assert count == 15


def test_an_iteration_keeps_its_cost_model(found: Found) -> None:
    assert found("cost_replaced", 2) == [[True, "alpha=0.0001 intercept=0.0", True]] * 2


def test_groups_that_have_ended(found: Found) -> None:
    gone = "ParameterError: process_group has been destroyed, or was made before torch.distributed last began"
    for before, made, within, anew in found("ended", 2):
        assert (before, made, anew) == (gone, gone, True)
        assert within.startswith("DistributedError: plans cannot be broadcast any more: ")
