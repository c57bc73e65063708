"""One rank dies while the others iterate: `faults.py FOLDER WHO`; the survivors write what they were told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gpusampler import DistributedError, GPUBatchRebalanceSampler, PlanGroup

TIMEOUT = 4.0

if __name__ == "__main__":
    folder, who = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    sampler = GPUBatchRebalanceSampler(
        range(1, 4001), 8, plan_ahead=1, process_group=PlanGroup(timeout=TIMEOUT), drop_last=False
    )
    error, began, steps = "", time.monotonic(), 0
    try:
        for _ in sampler:
            steps += 1
            if rank == who and steps == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            time.sleep(0.01)
    except DistributedError as problem:
        error = str(problem)
    answer = {"error": error, "seconds": time.monotonic() - began, "steps": steps}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    os._exit(0)
