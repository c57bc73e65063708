"""Starting several processes: under torchrun, or one by one where a test is to see what the survivors say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DIST = Path(__file__).parent / "dist"


def environment(**variables: object) -> dict[str, str]:
    """This process's environment with one thread a process and the tests on the path."""
    root = DIST.parent.parent
    path = os.pathsep.join(filter(None, [str(DIST.parent), str(root), os.environ.get("PYTHONPATH")]))
    own = {name: str(value) for name, value in variables.items()}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **own}


def torchrun(worker: str, world: int, folder: Path, *arguments: object, timeout: float = 120) -> list[Any]:
    """What each rank of a run of `tests/dist/<worker>.py <folder> <arguments>` wrote to `<folder>/<rank>.json`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [str(DIST / f"{worker}.py"), str(folder), *map(str, arguments)]
    done = subprocess.run(command, timeout=timeout, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return answers(folder, world)


def start(worker: str, world: int, folder: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start the ranks without an agent that would end them all when one ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world}
    command = [sys.executable, str(DIST / f"{worker}.py"), str(folder), *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env=environment(RANK=rank, LOCAL_RANK=rank, **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def answers(folder: Path, world: int) -> list[Any]:
    """What each rank wrote; None for one that did not come to it."""
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
