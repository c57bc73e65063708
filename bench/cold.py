"""Seconds to compile the kernels of one shape on one core, with the cache as it is: `python -m bench.cold B D G`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from bench.compile_stats import compile_ahead
from bench.estimate import CHIP, plan_steps
from bench.record import ROOT


def compile_seconds(size: int, dp_size: int, slots: int) -> tuple[float, float]:
    """Seconds with an empty cache, and again with what that left in it."""
    command = [sys.executable, "-m", "bench.cold", str(size), str(dp_size), str(slots)]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_CACHE_DIR": cache}
        cold, cached = (
            float(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
    return cold, cached


def main(size: int, dp_size: int, slots: int) -> float:
    """Compile here, on one core; returns the seconds."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    for step in plan_steps(size, dp_size, slots, 1, 1):
        compile_ahead(step.variant, CHIP)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(main(*(int(number) for number in sys.argv[1:])))
