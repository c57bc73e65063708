"""Soak: many steps on several processes; memory, file descriptors, threads and process groups must not grow.

Epoch after epoch over shared plans, with a collective every few steps, a state saved and an iteration left early now
and then, and a sampler replaced by a new one every other epoch. Counts are taken at the end of each epoch; those of the
last are compared with those after a tenth of the steps, when every buffer and cache has been made.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import options
from bench.ranks import answer, arguments, launch
from bench.record import Record
from gpusampler import GPUBatchRebalanceSampler

_BATCH, _SLOTS, _EPOCHS, _PLAN_AHEAD = 16, 2, 50, 32
MEMORY_MB = 4.0


def counts() -> dict[str, float]:
    """Resident memory in MB, open files, operating system threads and process groups of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory MB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def train(steps: int) -> dict[str, Any]:
    """One rank's part."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    epoch_steps = steps // _EPOCHS
    lengths = np.random.default_rng(0).integers(1, 2048, epoch_steps * _BATCH, dtype=np.int32)
    seen, done, gradient = [], 0, torch.ones(64)
    sampler = None
    for epoch in range(_EPOCHS):
        if sampler is None or epoch % 2 == 0:
            sampler = GPUBatchRebalanceSampler(lengths, _BATCH, world, _SLOTS, rank=rank, plan_ahead=_PLAN_AHEAD)
        sampler.set_epoch(epoch)
        for _ in range(3):
            next(iter(sampler))
        for call, _ in enumerate(sampler):
            if call % (_SLOTS * 16) == 0:
                dist.all_reduce(gradient)
            if call % 1000 == 0:
                sampler.state_dict()
        done += epoch_steps
        seen.append({"steps": done, **counts()})
    dist.destroy_process_group()
    return {"rank": rank, "seen": seen}


def run(argv: list[str]) -> int:
    """Run the bench; returns 1 if anything grew."""
    parser = options.parser("soak", __doc__ or "")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--steps", type=int, default=100_000, help="optimizer steps (100000)")
    args = parser.parse_args(argv)
    if args.steps < 20 * _EPOCHS:
        raise SystemExit(f"bench: --steps of at least {20 * _EPOCHS} are needed")
    record = Record("soak", argv)
    record.say(f"{args.ranks} ranks, {args.steps} steps in {_EPOCHS} epochs.")
    found = launch("bench.soak", args.ranks, {"steps": args.steps}, timeout=3600)
    rows: list[list[Any]] = []
    grown: dict[str, float] = {}
    for rank, figures in enumerate(found):
        seen = figures["seen"]
        warm, last = seen[_EPOCHS // 10 - 1], seen[-1]
        rows += [[f"rank {rank}", *at.values()] for at in (warm, seen[_EPOCHS // 2], last)]
        for name in ("memory MB", "files", "threads", "groups"):
            grown[name] = max(grown.get(name, 0.0), last[name] - warm[name])
    record.table(["", *found[0]["seen"][0]], rows)
    record.figures["seen"] = [figures["seen"] for figures in found]
    reached = [
        record.target(f"growth of {name} <= {limit:g}", grown[name] <= limit, f"{grown[name]:.2f}")
        for name, limit in (("memory MB", MEMORY_MB), ("files", 0), ("threads", 0), ("groups", 0))
    ]
    record.write(args.results)
    return 0 if all(reached) else 1


if __name__ == "__main__":
    measured = train(**arguments())
    answer(measured["rank"], measured)
