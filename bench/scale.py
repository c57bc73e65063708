"""Scale: what a dataset of 1e8 samples costs, its lengths a memory-mapped int32 file that is validated as it streams.

A fresh process on one core constructs the sampler, asks for the first micro-batch, then restores the states of random
steps, in this epoch and others. It is run twice: the first fills an empty numba cache on a small file (compilation,
reported apart), the second is measured. Time counts from after the imports. Memory is the growth of the process's
anonymous memory (RssAnon), read from outside every few milliseconds until the process ends: pages of the mapped file
are the lengths themselves and not counted. The file has just been written, so that it is read from the page cache.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import options
from bench.inputs import Shape
from bench.record import ROOT, Record

MIB = 1 << 20
FIRST_SECONDS, MEMORY_MIB, RESTORE_SECONDS = 2.0, 64, 0.1
_BLOCK = 1 << 22
_SMALL = 200_000
_POLL_SECONDS = 0.002


def write_lengths(file: Path, size: int) -> None:
    """Write lognormal lengths, median 1100 and a heavy tail up to 131072, as an int32 .npy file, block by block."""
    mapped = np.lib.format.open_memmap(file, mode="w+", dtype=np.int32, shape=(size,))
    random_numbers = np.random.default_rng(0)
    for start in range(0, size, _BLOCK):
        block = random_numbers.lognormal(7.0, 1.0, min(_BLOCK, size - start))
        mapped[start : start + len(block)] = np.clip(block, 1, 1 << 17)
    mapped.flush()


def child(file: str, shape: Shape, restores: int) -> None:
    """Measure in this process; prints "ready", waits for a line on standard input, and prints the figures as JSON."""
    from gpusampler import GPUBatchRebalanceSampler

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    lengths = np.load(file, mmap_mode="r")
    sampler = GPUBatchRebalanceSampler(lengths, *shape, rank=0)
    constructed = time.perf_counter()
    first = next(iter(sampler))
    figures: dict[str, Any] = {
        "constructor_s": constructed - began,
        "first_s": time.perf_counter() - began,
        "steps": len(sampler) // shape[2],
        "first_micro_batch": len(first),
        "restore_s": [seconds for seconds, _ in _restores(sampler, restores)],
    }
    print(json.dumps(figures), flush=True)


def _restores(sampler: Any, count: int) -> Iterator[tuple[float, list[int]]]:
    """Load the state of random places of random epochs; yields the time to its next micro-batch, and that."""
    pick = random.Random(0)
    state = sampler.state_dict()
    for epoch in range(count):
        consumed = pick.randrange(len(sampler))
        began = time.perf_counter()
        sampler.load_state_dict(state | {"epoch": epoch, "consumed": consumed})
        iterator = iter(sampler)
        micro_batch = next(iterator)
        seconds = time.perf_counter() - began
        step, slot = divmod(consumed, sampler.grad_accum)
        expected = sampler.indices(step)[sampler.plan(step).microbatch(0, slot, sampler.rank).long()]
        if micro_batch != expected.tolist():
            raise RuntimeError(f"restoring epoch {epoch}, micro-batch {consumed} gave another micro-batch")
        del iterator
        time.sleep(0.1)  # a chunk in the making is finished on the same core
        yield seconds, micro_batch


def _anonymous(pid: int) -> int | None:
    """Anonymous memory of a process in bytes; None once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


def run_child(file: Path, shape: Shape, restores: int, cache: Path | None = None) -> dict[str, Any]:
    """Run `child` in a fresh process, numba's cache in `cache`; its figures, and its peak anonymous memory.

    Raises:
        RuntimeError: the process failed.
    """
    code = f"from bench.scale import child; child({str(file)!r}, {shape!r}, {restores})"
    environment = dict(os.environ) | ({"NUMBA_CACHE_DIR": str(cache)} if cache else {})
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the measured process did not start")
        before = peak = _anonymous(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while (now := _anonymous(process.pid)) is not None and process.poll() is None:
            peak = max(peak or 0, now)
            time.sleep(_POLL_SECONDS)
        output = process.stdout.read()
    if process.returncode or not output:
        raise RuntimeError(f"the measured process ended with status {process.returncode}")
    figures: dict[str, Any] = json.loads(output)
    figures["memory_mib"] = None if before is None or peak is None else (peak - before) / MIB
    return figures


@contextmanager
def _files(size: int, folder: Path | None) -> Iterator[tuple[Path, Path, Path]]:
    """A small and a large file of lengths and a folder for numba's cache, while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-", dir=folder) as made:
        small, large, cache = Path(made) / "small.npy", Path(made) / "large.npy", Path(made) / "cache"
        write_lengths(small, min(size, _SMALL))
        write_lengths(large, size)
        yield small, large, cache


def run(argv: list[str]) -> int:
    """Print times, memory and the targets."""
    parser = options.parser("scale", __doc__ or "")
    parser.add_argument("--n", type=int, default=100_000_000, help="samples (100000000, a file of 400 MB)")
    parser.add_argument("--restores", type=int, default=20, help="states to restore (20)")
    parser.add_argument("--dir", type=Path, help="where the file of lengths is made (the system's temporary folder)")
    args = parser.parse_args(argv)
    shapes: tuple[Shape, ...] = ((1024, 16, 4), (4096, 64, 4))
    if args.n < shapes[-1][0]:
        raise SystemExit(f"bench: --n must be at least {shapes[-1][0]}, got {args.n}")
    record = Record("scale", argv)
    with _files(args.n, args.dir) as (small, large, cache):
        compiling = run_child(small, shapes[0], 1, cache)
        figures = {shape: run_child(large, shape, args.restores, cache) for shape in shapes}
    record.say(
        f"{args.n:.0e} samples, int32 lengths in a mapped file of {args.n * 4 / 1e6:.0f} MB; one core, fresh process."
    )
    record.say(f"With an empty numba cache the first micro-batch of {min(args.n, _SMALL)} samples takes")
    record.say(f"{compiling['first_s']:.1f} s, nearly all of it compilation, once a machine; below the cache is there.")
    rows: list[list[object]] = []
    for shape, seen in figures.items():
        restore = sorted(seen["restore_s"])
        rows.append(
            [
                str(shape),
                f"{seen['constructor_s']:.3f}",
                f"{seen['first_s']:.3f}",
                "?" if seen["memory_mib"] is None else f"{seen['memory_mib']:.1f}",
                f"{restore[len(restore) // 2]:.4f}" if restore else "",
                f"{restore[-1]:.4f}" if restore else "",
            ]
        )
    header = ["B, D, G", "constructor, s", "first micro-batch, s", "memory, MiB", "restore median, s", "restore max, s"]
    record.table(header, rows)
    for shape, seen in figures.items():
        first, memory, slowest = seen["first_s"], seen["memory_mib"], max(seen["restore_s"], default=0.0)
        record.target(f"first micro-batch < {FIRST_SECONDS} s at {shape}", first < FIRST_SECONDS, f"{first:.2f} s")
        if memory is not None:
            what = f"memory beyond the lengths <= {MEMORY_MIB} MiB at {shape}"
            record.target(what, memory <= MEMORY_MIB, f"{memory:.1f} MiB")
        what = f"restoring a random step < {RESTORE_SECONDS} s at {shape}"
        record.target(what, slowest < RESTORE_SECONDS, f"{slowest:.4f} s at most")
    record.figures |= {"compiling": compiling, "shapes": {str(shape): seen for shape, seen in figures.items()}}
    record.write(args.results)
    return 0
