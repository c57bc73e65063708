"""Several processes: one sequence whatever their generators, and one error when they do not agree."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.tasks import MultiTaskBatchSampler, Source, Task, array_systems, make_source, resolve_task_schedule


def per_rank(frames: int, size: int) -> BatchSampler:
    return BatchSampler(DistributedSampler(range(frames), seed=5), size, False)


def same_sequence(rank: int) -> dict:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    tasks = [Task("a", [per_rank(50, 2)]), Task("b", [per_rank(21, 4), per_rank(9, 1)]), Task("c", [4])]
    iid = resolve_task_schedule(tasks, "epoch", num_steps=1000)
    even = resolve_task_schedule(tasks, "epoch", num_steps=1000, draw="low_discrepancy")
    read = MultiTaskBatchSampler(resolve_task_schedule(tasks[:2], "epoch", num_steps=200))
    items = list(read)
    return {
        "table": iid.table(),
        "iid": [iid.task_at(step) for step in range(1000)],
        "even": [even.task_at(step) for step in range(1000)],
        "read": [(item.step, item.task, item.source) for item in items],
        "indices": [item.indices for item in items],
    }


def caught(make) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def disagreement(rank: int) -> dict:
    differ = caught(
        lambda: resolve_task_schedule([Task("a", [10 + (rank == 1)]), Task("b", [10])], "epoch", num_steps=9)
    )
    one = caught(lambda: resolve_task_schedule([Task("a", [0 if rank == 1 else 10])], "epoch", num_steps=9))
    pair = [Task("a", [10]), Task("b", [20])]
    order = caught(lambda: resolve_task_schedule(pair if rank != 1 else pair[::-1], "epoch", num_steps=9))
    systems = array_systems({"bulk": np.ones(4, int), "cluster": np.ones(4, int)})
    swapped = make_source(systems if rank != 1 else systems[::-1], len, name="frames")
    names = caught(lambda: resolve_task_schedule([Task("a", [swapped])], "epoch", num_steps=9))
    left_out = caught(lambda: resolve_task_schedule([*pair, Task("c", [rank])], "epoch", num_steps=9, exclude="empty"))
    budget = caught(lambda: resolve_task_schedule([Task("a", [10])], num_steps=9 + rank))
    schedule = resolve_task_schedule(
        [Task("a", [BatchSampler(range(6 + rank), 1, False)])], num_steps=9, process_group=None
    )
    sampler = caught(lambda: MultiTaskBatchSampler(schedule))
    both = resolve_task_schedule([Task("a", [BatchSampler(range(6), 1, False)])], num_steps=9, process_group=None)
    elsewhere = MultiTaskBatchSampler(both)
    elsewhere.set_epoch(int(rank == 1))
    passes = [caught(lambda: next(iter(elsewhere))) for _ in range(2)]
    elsewhere.set_epoch(1)
    iterator = iter(elsewhere)
    taken = [next(iterator) for _ in range(2 + (rank == 1))]
    elsewhere.load_state_dict(elsewhere.state_dict())
    places = caught(lambda: next(iter(elsewhere)))
    group = dist.new_group([0])
    alone = resolve_task_schedule([Task("a", [3])], num_steps=9, process_group=group if rank == 0 else None)
    return {
        "differ": differ,
        "order": order,
        "names": names,
        "left_out": left_out,
        "one": one,
        "budget": budget,
        "sampler": sampler,
        "passes": passes,
        "places": places,
        "taken": len(taken),
        "alone": alone.num_steps,
    }


def shared_plans(rank: int, world: int) -> list:
    rng = np.random.default_rng(0)
    data = [rng.integers(1, 512, count) for count in (70, 64, 48)]
    samplers = [GPUBatchRebalanceSampler(lengths, 16, dp_size=world, grad_accum=2, rank=rank) for lengths in data]
    tasks = [Task("a", samplers[:1]), Task("b", [Source(sampler, prob=0.5) for sampler in samplers[1:]])]
    sampler = MultiTaskBatchSampler(resolve_task_schedule(tasks, "epoch", 30))
    return [(item.step, item.task, item.source, item.indices) for item in sampler]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What every rank of a real run of 2 or 4 processes found; each run starts once."""

    @functools.cache
    def run(world: int) -> list[dict]:
        folder = tmp_path_factory.mktemp(f"world{world}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(folder)], check=True, timeout=180, env=environment, capture_output=True)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    return run


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_L35c_ranks_with_different_generators_draw_one_sequence(world, answers):
    ranks = [answer["same"] for answer in answers(world)]
    for rank in ranks[1:]:
        for key in ("table", "iid", "even", "read"):
            assert rank[key] == ranks[0][key], key
    per_step = {2: (13, 3, 5), 4: (7, 2, 3)}[world]  # 25 / 2, 11 / 4, 5 / 1 and 13 / 2, 6 / 4, 3 / 1, rounded up
    assert ranks[0]["table"]["epoch_lengths"] == {"a": per_step[0], "b": per_step[1] + per_step[2], "c": 4}
    assert {"a", "b", "c"} == set(ranks[0]["iid"]) == set(ranks[0]["even"])
    assert ranks[0]["indices"] != ranks[1]["indices"]
    first = next(i for i, (_, task, _) in enumerate(ranks[0]["read"]) if task == "a")
    assert len({index for rank in ranks for index in rank["indices"][first]}) == 2 * world


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_L35c_ranks_that_would_differ_raise_before_step_1_with_both_tables(world, answers):
    ranks = [answer["differ"] for answer in answers(world)]
    for answer in ranks:
        assert "rank 0 has {" in answer["differ"]
        assert "'a': '1/2'" in answer["differ"]
        assert "'a': '11/21'" in answer["differ"]
        assert "rank 0 has {" in answer["budget"]
        assert "['a', 'b']" in answer["order"]
        assert "['b', 'a']" in answer["order"]
        assert "['a', 'b']" in answer["left_out"]
        assert "['a', 'b', 'c']" in answer["left_out"]
        assert (
            "ranks resolve different task schedules, by names: rank 0 has {'names': {'a': [['frames',"
            in answer["names"]
        )
        for before, after in ("bulk", "cluster"), ("cluster", "bulk"):
            assert f"[\"system '{before}' with 4 frames\", \"system '{after}' with 4 frames\"]" in answer["names"]
        assert "'a/0': [6, 1]" in answer["sampler"]
        assert "'a/0': [7, 1]" in answer["sampler"]
        for found in answer["passes"]:
            assert found.startswith(
                "ranks are at different places of the task schedule, by pass, step: rank 0 has {'pass': 0,"
            )
            assert "rank 1 has {'pass': 1, 'step': 9, 'micro_batch': 0}" in found
        assert (
            "by step: rank 0 has {'step': 11, 'pass': 1, 'micro_batch': 0}, rank 1 has {'step': 12," in answer["places"]
        )
        assert answer["alone"] == 9
    empty = "task 'a' has no batches to draw"
    for rank, answer in enumerate(ranks):
        start = empty if rank == 1 else f"rank 1 cannot resolve the task schedule: {empty}"
        assert answer["taken"] == 2 + (rank == 1)
        assert answer["one"].startswith(start)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_balancing_samplers_of_all_ranks_split_each_step(world, answers):
    ranks = [answer["plans"] for answer in answers(world)]
    assert all([item[:3] for item in rank] == [item[:3] for item in ranks[0]] for rank in ranks)
    for step in range(30):
        indices = [index for rank in ranks for item in rank if item[0] == step for index in item[3]]
        assert len(indices) == len(set(indices)) == 16


if __name__ == "__main__":
    dist.init_process_group("gloo")
    own, size = dist.get_rank(), dist.get_world_size()
    found = {"same": same_sequence(own), "differ": disagreement(own), "plans": shared_plans(own, size)}
    (Path(sys.argv[1]) / f"{own}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
