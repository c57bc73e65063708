"""Latency: what `next()` costs the training loop while a thread plans later steps.

The main thread asks for a micro-batch, then computes for a few milliseconds: matrix products, which release the GIL as
a training step does. Each `next()` is timed alone, by the clock and by the CPU time of the thread: on a machine whose
cores are all busy the clock also counts waiting for one. The first plans its chunk on the spot, before anything is
planned ahead, and is reported apart; the rest count. At a chunk boundary `next()` takes the planned chunk over, which
is in the figures too. The planning thread competes with the products for cores, as in training on the CPU.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import trange

from bench import options
from bench.inputs import Shape, permuted_traces
from bench.record import Record
from gpusampler import GPUBatchRebalanceSampler

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

P99_MICROSECONDS = 50.0
SHAPES: tuple[Shape, ...] = ((64, 4, 2), (1024, 16, 4), (4096, 64, 4))
_SAMPLES = 1 << 21
_TRACE = "servegen_r1_output"


def _compute(seconds: float) -> tuple[torch.Tensor, int]:
    """A matrix, and how many products of it with itself take about `seconds`."""
    matrix = torch.rand(256, 256)
    torch.mm(matrix, matrix)
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    return matrix, max(1, round(seconds * 20 / (time.perf_counter() - began)))


@dataclass(frozen=True)
class Latency:
    """Microseconds of each timed `next()`, and whether it took over a chunk.

    Attributes:
        first: seconds until the first micro-batch, whose chunk is planned on the spot.
        wall: of the clock.
        cpu: of this thread's CPU time: what is left of `wall` without waiting for a core that others use.
        boundary: whether the call took over a chunk.
    """

    first: float
    wall: FloatArray
    cpu: FloatArray
    boundary: np.ndarray[Any, np.dtype[np.bool_]]


def measure(sampler: GPUBatchRebalanceSampler, calls: int, seconds: float) -> Latency:
    """Time `calls` of `next()` with compute between them.

    Epochs follow one another; the first `next()` of each is left out, as it plans on the spot.
    """
    matrix, products = _compute(seconds)
    began = time.perf_counter()
    iterator = iter(sampler)
    next(iterator)
    first = time.perf_counter() - began
    wall, cpu = np.empty(calls), np.empty(calls)
    place = np.empty(calls, dtype=np.int64)
    at = 1
    for call in trange(calls, unit="call", leave=False, disable=None):
        if at == len(sampler):
            sampler.set_epoch(sampler.epoch + 1)
            iterator = iter(sampler)
            next(iterator)
            at = 1
        for _ in range(products):
            torch.mm(matrix, matrix)
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        next(iterator)
        cpu[call], wall[call] = time.thread_time_ns() - start_cpu, time.perf_counter_ns() - start
        place[call] = at
        at += 1
    boundary = place % (sampler.plan_ahead * sampler.grad_accum) == 0
    return Latency(first, wall / 1e3, cpu / 1e3, boundary)


def _figures(seen: Latency) -> dict[str, float]:
    p50, p99 = np.percentile(seen.wall, (50, 99))
    figures = {"first_ms": seen.first * 1e3, "p50_us": p50, "p99_us": p99, "max_us": seen.wall.max()}
    figures["p99_cpu_us"] = np.percentile(seen.cpu, 99)
    figures["boundaries"] = seen.boundary.mean()
    if seen.boundary.any():
        figures["boundary_p50_us"] = np.median(seen.wall[seen.boundary])
    return {name: float(value) for name, value in figures.items()}


def run(argv: list[str]) -> int:
    """Print percentiles by shape."""
    parser = options.parser("latency", __doc__ or "")
    options.add_traces(parser)
    parser.add_argument("--calls", type=int, default=3000, help="timed calls a shape (3000)")
    parser.add_argument("--compute", type=float, default=5.0, metavar="MS", help="milliseconds between calls (5)")
    parser.add_argument("--samples", type=int, default=_SAMPLES, help=f"size of the dataset ({_SAMPLES})")
    args = parser.parse_args(argv)
    if args.calls < 1 or args.samples < SHAPES[-1][0] or args.compute < 0:
        raise SystemExit(f"bench: --calls >= 1, --samples >= {SHAPES[-1][0]} and --compute >= 0 are needed")
    traces = permuted_traces(args.traces)
    lengths = np.resize(traces.get(_TRACE, next(iter(traces.values()))), args.samples)
    threads = max(1, (os.cpu_count() or 1) - 1)
    torch.set_num_threads(threads)
    record = Record("latency", argv)
    seen = {}
    rows: list[list[object]] = []
    for shape in SHAPES:
        sampler = GPUBatchRebalanceSampler(lengths, *shape, rank=0)
        next(iter(sampler))  # compiled, or loaded from the cache
        figures = seen[str(shape)] = _figures(measure(sampler, args.calls, args.compute / 1e3))
        micro = [f"{figures[name]:.1f}" for name in ("p50_us", "p99_us", "max_us", "p99_cpu_us")]
        boundary = f"{figures['boundaries']:.1%}", f"{figures.get('boundary_p50_us', 0):.1f}"
        rows.append([str(shape), sampler.plan_ahead, f"{figures['first_ms']:.1f}", *micro, *boundary])
    record.say(f"{args.samples} samples, {args.calls} calls a shape, {args.compute:g} ms of products between calls on")
    record.say(f"{threads} of {os.cpu_count()} cores; the planning thread runs beside them. Microseconds.")
    header = ["B, D, G", "steps a chunk", "first, ms", "p50", "p99", "max", "p99 CPU", "at a boundary", "p50 there"]
    record.table(header, rows)
    for name, figures in seen.items():
        p99 = figures["p99_us"]
        text = f"{p99:.1f} us, {figures['p99_cpu_us']:.1f} us of it on the CPU"
        record.target(f"p99 of next() <= {P99_MICROSECONDS:g} us at {name}", p99 <= P99_MICROSECONDS, text)
    record.figures["shapes"] = seen
    record.write(args.results)
    return 0
