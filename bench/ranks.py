"""Benches of several processes: start this folder's modules under torchrun, collect what the ranks measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.record import ROOT


def launch(module: str, world: int, settings: dict[str, Any], timeout: float) -> list[Any]:
    """Run `python -m <module> <folder> <settings>` on each of `world` ranks; returns what each hands to `answer`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += ["-m", module, folder, json.dumps(settings)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{module} failed on {world} ranks:\n{done.stderr[-4000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def arguments() -> dict[str, Any]:
    """Settings, on a rank."""
    settings: dict[str, Any] = json.loads(sys.argv[2])
    return settings


def answer(rank: int, found: Any) -> None:
    """Hand in what a rank measured."""
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
