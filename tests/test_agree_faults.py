"""Ranks that die: an error within the timeout for the others; a job killed and resumed loses nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import DIST, answers, environment, start

pytestmark = pytest.mark.dist
TIMEOUT = 4.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What the survivor found when rank 0, the root, died, and when rank 1 did; both run at once."""
    folders = [tmp_path_factory.mktemp(f"killed{who}") for who in range(2)]
    started = [start("faults", 2, folder, who) for who, folder in enumerate(folders)]
    try:
        for who, processes in enumerate(started):
            processes[1 - who].wait(timeout=90)
        yield [answers(folder, 2)[1 - who] for who, folder in enumerate(folders)]
    finally:
        for process in (process for processes in started for process in processes):
            process.kill()
            process.communicate(timeout=30)


@pytest.mark.parametrize("who", [0, 1])
def test_a_dead_rank_is_an_error_within_the_timeout(outcomes: list[Any], who: int) -> None:
    found = outcomes[who]
    assert found["steps"] < 30  # the 20 steps until then, and what was under way
    what = "did not arrive from rank 0" if who == 0 else "was not taken by all ranks"
    assert f"a plan {what} within 4 s: a rank is dead or stuck" in found["error"]
    assert found["seconds"] < TIMEOUT + 4


def run_once(folder: Path, run: int, world: int, steps: int, kill_at: int) -> int:
    """One torchrun job; returns its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [str(DIST / "train.py"), *map(str, (folder, run, 16, 16 * steps + 5, kill_at))]
    return subprocess.run(command, timeout=120, env=environment(), capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1000])
def test_L45_a_job_killed_and_restarted_on_fewer_and_more_ranks_sees_every_sample_once(
    tmp_path: Path, steps: int
) -> None:
    draw = random.Random(3)
    kills = sorted(draw.sample(range(20, steps - 20), 2))
    worlds = (2, 1, 4)
    for run, (world, kill_at) in enumerate(zip(worlds, [*kills, -1], strict=True)):
        status = run_once(tmp_path, run, world, steps, kill_at)
        assert (status == 0) == (kill_at < 0)
    first = []
    logs = []
    for run, world in enumerate(worlds):
        texts = [(tmp_path / f"{run}-{rank}.txt").read_text() for rank in range(world)]
        logs.append([list(map(int, line.split())) for text in texts for line in text.splitlines()])
        first.append(min(line[0] for line in logs[-1]))
    assert first[0] == 0
    assert all(kill - 1 <= start <= kill for start, kill in zip(first[1:], kills, strict=True))
    seen: Counter[int] = Counter()
    for run, end in enumerate([*first[1:], steps]):
        seen.update(i for step, *micro_batch in logs[run] if step < end for i in micro_batch)
    assert set(seen.values()) == {1}
    assert len(seen) == 16 * steps  # 5 samples are dropped with the incomplete batch
