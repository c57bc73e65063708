"""Several processes: one sequence whatever their generators, and one error when they do not agree."""

from __future__ import annotations

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

from gpusampler.tasks import MultiTaskBatchSampler, Task, resolve_task_schedule


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
    budget = caught(lambda: resolve_task_schedule([Task("a", [10])], num_steps=9 + rank))
    schedule = resolve_task_schedule(
        [Task("a", [BatchSampler(range(6 + rank), 1, False)])], num_steps=9, process_group=None
    )
    sampler = caught(lambda: MultiTaskBatchSampler(schedule))
    group = dist.new_group([0])
    alone = resolve_task_schedule([Task("a", [3])], num_steps=9, process_group=group if rank == 0 else None)
    return {"differ": differ, "one": one, "budget": budget, "sampler": sampler, "alone": alone.num_steps}


def run(world: int, mode: str, folder: Path) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, mode, str(folder)], check=True, timeout=120, env=environment, capture_output=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_L35c_ranks_with_different_generators_draw_one_sequence(world, tmp_path):
    ranks = run(world, "same_sequence", tmp_path)
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
def test_L35c_ranks_that_would_differ_raise_before_step_1_with_both_tables(tmp_path):
    ranks = run(2, "disagreement", tmp_path)
    for answer in ranks:
        assert "rank 0 has {" in answer["differ"]
        assert "'a': '1/2'" in answer["differ"]
        assert "'a': '11/21'" in answer["differ"]
        assert "rank 0 has {" in answer["budget"]
        assert "'a/0': [6, 1]" in answer["sampler"]
        assert "'a/0': [7, 1]" in answer["sampler"]
        assert answer["alone"] == 9
    assert ranks[1]["one"].startswith("task 'a' has no batches to draw")
    assert ranks[0]["one"].startswith("rank 1 cannot resolve the task schedule: task 'a' has no batches to draw")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    own = dist.get_rank()
    answer = {"same_sequence": same_sequence, "disagreement": disagreement}[sys.argv[1]](own)
    (Path(sys.argv[2]) / f"{own}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()
