"""A training run that is killed and resumed: `torchrun train.py FOLDER RUN BATCH SAMPLES KILL_AT`.

Each rank writes `step sample sample ...` per step to `<folder>/<run>-<rank>.txt`; rank 0 keeps the state of the last
step that all ranks have ended in `<folder>/state.json`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpusampler import GPUBatchRebalanceSampler

SLOTS = 4  # ranks * grad_accum, whatever the number of ranks

if __name__ == "__main__":
    folder, run, batch, samples, kill_at = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = random.Random(7)
    lengths = [draw.randint(1, 300) for _ in range(samples)]
    sampler = GPUBatchRebalanceSampler(lengths, batch, grad_accum=SLOTS // world, plan_ahead=8)
    state = folder / "state.json"
    if state.exists():
        sampler.load_state_dict(json.loads(state.read_text()))
    position = sampler.state_dict()["consumed"]
    victim = random.Random(run).randrange(world)
    with (folder / f"{run}-{rank}.txt").open("w") as log:
        for count, micro_batch in enumerate(sampler, start=position):
            step, slot = divmod(count, SLOTS // world)
            print(step, *micro_batch, file=log, flush=True)
            if step == kill_at and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(8))
            if slot == SLOTS // world - 1 and rank == 0:
                new = folder / "state.new"
                new.write_text(json.dumps(sampler.state_dict()))
                new.replace(state)
    dist.destroy_process_group()
