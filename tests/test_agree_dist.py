"""Real processes that share plans over gloo; one run of 2 processes and one of 4 serve all tests."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from launch import torchrun

from gpusampler.broadcast import HEADER

pytestmark = pytest.mark.dist
BOTH = ("plans", "state", "generators", "differences", "failing", "dropped", "leaks", "silent", "interleaved")
SCENARIOS = {
    2: (*BOTH, "slow_root", "skewed_loaders", "unknown_skew", "left_behind", "stuck"),
    4: (*BOTH, "subgroup", "mesh"),
}
Answers = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What every rank of a run found, by the number of processes; each run starts once."""

    @functools.cache
    def run(world: int) -> list[dict[str, Any]]:
        return torchrun("agree", world, tmp_path_factory.mktemp(f"world{world}"), *SCENARIOS[world], timeout=150)

    return run


def samples(ranks: list[dict[str, Any]], run: int) -> Counter[int]:
    return Counter(i for rank in ranks for m in rank["runs"][run]["yields"] for i in m)


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_take_the_plans_of_the_root_which_are_those_they_would_have_made(answers: Answers, world: int):
    ranks = [answer["plans"] for answer in answers(world)]
    for run in range(8):
        got = [rank["runs"][run] for rank in ranks]
        assert all(rank["same"] for rank in got)
        assert {rank["len"] for rank in got} == {len(rank["yields"]) for rank in got} == {got[0]["len"]}
        assert all(m for rank in got for m in rank["yields"])
        counts = samples(ranks, run)
        assert set(counts.values()) == {1}
        assert len(counts) == (1003 if run in (2, 3) else 960)


@pytest.mark.parametrize("world", [2, 4])
def test_one_broadcast_a_chunk_of_at_most_8_bytes_a_sample(answers: Answers, world: int):
    for rank, answer in enumerate(answers(world)):
        found = [run["stats"] for run in answer["plans"]["runs"] if "stats" in run]
        for stats in found:
            assert (stats["plan_seconds"] > 0) == (rank == 0)
            assert stats["iterations"] == 2
            assert stats["steps"] in (30, 32)
            # a chunk that is not planned yet when its turn comes costs a message more
            assert stats["chunks"] <= stats["messages"] <= 3 * stats["chunks"] + 4
            most = max(8 * stats["chunk_samples"], 4096) + 4 * HEADER
            assert stats["bytes_broadcast"] <= stats["messages"] * most


@pytest.mark.parametrize("world", [2, 4])
def test_L45_resume_is_exact_and_other_layouts_continue_with_the_other_rows(answers: Answers, world: int):
    ranks = [answer["state"] for answer in answers(world)]
    assert all(rank["exact"] == [True] * 4 for rank in ranks)
    taken = Counter(i for rank in ranks for i in rank["taken"])
    assert len(taken) == 5 * 64
    for rank in ranks:  # all were data-parallel rank 0 of 1 when they continued
        assert sum((taken + Counter(rank["rest"])).values()) == 960
        assert set((taken + Counter(rank["rest"])).values()) == {1}


@pytest.mark.parametrize("world", [2, 4])
def test_L45_states_that_differ_between_ranks_are_refused_on_all(answers: Answers, world: int):
    ranks = [answer["state"] for answer in answers(world)]
    others = "rank 1" if world == 2 else "ranks 1, 2, 3"
    only, differ, epochs = ranks[0]["errors"]
    assert f"position is 10 on rank 0 and 0 on {others}" in only
    assert "position is 10 on rank 0 and 12 on rank 1" in differ
    assert "epoch is 0 on rank 0 and 1 on rank 1" in epochs
    assert "load the same state on every rank or on none" in only
    assert all(rank["errors"] == ranks[0]["errors"] for rank in ranks)
    assert all(rank["again"] for rank in ranks)


@pytest.mark.parametrize("world", [2, 4])
def test_L48_generators_that_differ_between_ranks_do_not_matter(answers: Answers, world: int):
    ranks = [answer["generators"] for answer in answers(world)]
    assert Counter(i for rank in ranks for m in rank for i in m) == Counter(range(12))


@pytest.mark.parametrize("world", [2, 4])
def test_what_differs_between_ranks_is_named_on_all_before_the_first_step(answers: Answers, world: int):
    ranks = [answer["differences"] for answer in answers(world)]
    assert all(rank == ranks[0] for rank in ranks)
    others, odd = ("rank 0", "rank 1") if world == 2 else ("ranks 0, 1, 2", "rank 3")
    for name, text in {
        "lengths": "lengths_digest is ",
        "count": f"num_samples is 1003 on {others} and 1002 on {odd}; lengths_digest is ",
        "seed": f"seed is 3 on {others} and 4 on {odd}",
        "cost": f"cost is 'alpha=0.0001 intercept=0.0' on {others} and 'alpha=0.0002 intercept=0.0' on {odd}",
        "cost_fn": "cost is 'cost_fn=",
        "max_tokens": f"max_tokens is 90000 on {others} and 89999 on {odd}",
        "grad_accum": f"grad_accum is 2 on {others} and 3 on {odd}",
        "sync": f"sync is 'microbatch' on {others} and 'step' on {odd}",
        "plan_ahead": f"plan_ahead is 3 on {others} and 4 on {odd}",
        "shuffle": f"shuffle is True on {others} and False on {odd}",
    }.items():
        assert ranks[0][name].startswith("DistributedError: ranks differ, nothing was handed out: ")
        assert text in ranks[0][name]
    both = rf"lengths_digest is [0-9]+ on {others} and [0-9]+ on {odd}"
    assert all(re.search(both, ranks[0][name]) for name in ("lengths", "count"))
    assert f"rank 1 of {world} is held by 0, rank 0 by {world}" in ranks[0]["rank"]


@pytest.mark.parametrize("world", [2, 4])
def test_an_error_in_planning_is_raised_on_all_ranks_at_its_chunk(answers: Answers, world: int):
    for rank, answer in enumerate(answers(world)):
        found = answer["failing"]
        for bad in (0, 6):
            taken, text, cause, more = found[str(bad)]
            assert (taken, more) == (bad, 0)
            assert text == f"planning failed on rank 0: ZeroDivisionError: no plan for step {bad}, \u00e9t\u00e9"
            assert cause == ("ZeroDivisionError" if rank == 0 else "NoneType")
            assert found[f"{bad} again"]
        own = "ValueError: this rank cannot"
        others = f"DistributedError: 1 of {world} ranks cannot begin the epoch. rank {world - 1}: {own}"
        assert found["one"] == (own if rank == world - 1 else others)
        own = "ValueError: the table of costs is gone"
        others = f"DistributedError: 1 of {world} ranks cannot begin the epoch. rank 0: {own}"
        assert found["cost"] == (own if rank == 0 else others)


@pytest.mark.parametrize("world", [2, 4])
def test_iterations_left_early_do_not_confuse_the_next(answers: Answers, world: int):
    for answer in answers(world):
        found = answer["dropped"]
        assert all(head and whole for _, head, whole in found["found"])
        assert found["older"] == "a later iteration over this sampler has begun; ranks share one at a time"
        assert found["newer"] == 61  # of 62, one was taken before


@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_left_of_samplers_that_are_gone(answers: Answers, world: int):
    for answer in answers(world):
        found = answer["leaks"]
        assert found["before"] == found["after"]
        assert found["open"][2] == found["before"][2] + 2
        assert found["again"]
        assert found["planning"] == []


@pytest.mark.parametrize("world", [2, 4])
def test_without_a_group_there_is_no_communication(answers: Answers, world: int):
    for rank, answer in enumerate(answers(world)):
        found = answer["silent"]
        assert found["count"] == (15 if rank == 0 else 0)
        assert found["messages"] == found["bytes_broadcast"] == found["groups"] == 0


def test_planning_longer_than_the_timeout_is_no_failure(answers: Answers):
    for answer in answers(2):
        found = answer["slow_root"]
        assert found["same"]
        assert found["seconds"] > 4 * 1.6
        assert found["longest"] > 1.6  # twice the timeout
        assert found["waits"] == 4


def test_loaders_that_prefetch_differently_do_not_hang(answers: Answers):
    for answer in answers(2):
        assert answer["skewed_loaders"]["same"] == [True] * 4


def test_a_consumer_that_is_not_known_ends_in_an_error_that_says_what_to_set(answers: Answers):
    for answer in answers(2):
        found = answer["unknown_skew"]
        assert "process_group=PlanGroup(loader_ahead=...)" in found["False"]["error"]
        assert 1.9 < found["False"]["seconds"] < 6
        assert found["True"] == {"error": "", "seconds": 0.0, "same": True}


def test_a_root_that_leaves_early_is_an_error_within_the_timeout(answers: Answers):
    ranks = [answer["left_behind"] for answer in answers(2)]
    assert "a rank did not begin the iteration within 2 s" in ranks[0]["errors"][0]
    assert "Ranks must leave an epoch at the same micro-batch" in ranks[1]["errors"][0]
    assert all(rank["seconds"] < 8 and rank["other"] for rank in ranks)


def test_a_stuck_rank_is_an_error_within_the_timeout(answers: Answers):
    for rank, answer in enumerate(answers(2)):
        for who, (steps, error, seconds) in enumerate(answer["stuck"]):
            if rank == who:
                assert (steps, error) == (20, "")
            else:
                assert 20 <= steps < 30
                what = "was not taken by all ranks" if rank == 0 else "did not arrive from rank 0"
                assert f"a plan {what} within 2 s: a rank is dead or stuck" in error
                assert seconds < 6


@pytest.mark.parametrize("world", [2, 4])
def test_L08_broadcasts_and_gradient_collectives_interleave_for_500_steps(answers: Answers, world: int):
    ranks = [answer["interleaved"] for answer in answers(world)]
    for rank in ranks:
        assert rank["steps"] == 500
        assert rank["own"]
        assert rank["stats"]["chunks"] == 250
        assert 250 <= rank["stats"]["messages"] <= 500
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)


def test_L07_the_root_of_a_subgroup_is_its_first_member(answers: Answers):
    ranks = [answer["subgroup"] for answer in answers(4)]
    assert ranks[0] == ranks[1] == {"alone": 15}
    for place, rank in enumerate(ranks[2:]):
        assert rank["place"] == [2, place]
        assert rank["same"]
        assert rank["sent"]
        assert all(sent == ["cpu", "torch.int32", 2, [2, 3], "MainThread"] for sent in rank["sent"])
        assert rank["plan"] == (place == 0)


def test_L53_tensor_parallel_peers_train_on_the_same_rows(answers: Answers):
    ranks = [answer["mesh"] for answer in answers(4)]
    assert [rank["place"] for rank in ranks] == [[2, 0], [2, 0], [2, 1], [2, 1]]
    assert [rank["whole"] for rank in ranks] == [[4, 0], [4, 1], [4, 2], [4, 3]]
    assert all(rank["same"] for rank in ranks)
    assert ranks[0]["yields"] == ranks[1]["yields"]
    assert ranks[2]["yields"] == ranks[3]["yields"]
    halves = [{i for m in rank["yields"] for i in m} for rank in (ranks[0], ranks[2])]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 960
    for rank in ranks:
        assert rank["errors"] == [
            "dims has 'cp', the mesh has 'dp', 'tp'",
            "dims must be names of mesh dimensions, each once, got ()",
            "dp_size=3 does not divide the 4 processes of process_group",
            "rank must be given: dp_size is 2, but process_group has 4 processes; from_device_mesh(mesh, dims) tells "
            "both",
        ]
