"""Kernels: times of the planner on the GPU beside `torch.sort`, the CPU engine and the targets, after a check of its
plans.

With a GPU: the plans of every shape are compared with the specification's bit for bit, then the pipeline is timed
eagerly and as a replayed CUDA graph, with host synchronisations forbidden, each kernel by the profiler, launches
counted, and bytes moved set against the memory's rate. Beside it, on the same rows: `torch.sort` alone (CUB on a GPU),
the search of one slot in batched eager torch (`bench.torch_search`), and the CPU engine. Without a GPU: those are timed
on the CPU, the kernels' times are estimated from the compiled code (`bench.estimate`), labelled so, with the turns of
the searches counted under the interpreter, and what was left out is said. Compile times are measured either way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cold import compile_seconds
from bench.estimate import estimate, plan_steps
from bench.record import RESULTS, Record
from bench.torch_search import min_max_levels
from bench.turns import count_turns
from gpusampler.kernels import spec

SHAPES = (
    (1, 256, 8, 1),
    (1, 1024, 64, 1),
    (1, 1024, 16, 4),
    (1, 4096, 64, 4),
    (2441, 4096, 64, 1),
    (2441, 4096, 16, 4),
)
"""Rows W, samples B, ranks D, slots G."""
TARGETS_MICROSECONDS = {
    (1, 1024, 64, 1): 60.0,
    (1, 1024, 16, 4): 250.0,
    (2441, 4096, 64, 1): 50e3,
    (2441, 4096, 16, 4): 50e3,
}
MEMORY_BYTES_A_MICROSECOND = 4.3e6
COLD_SHAPE = (1024, 16, 4)
COLD_SECONDS = 20.0
_REPEATS = 20
_CPU_ROWS = 3


def make_inputs(rows: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lognormal lengths and the table of alphas."""
    lengths = np.random.default_rng(0).lognormal(6.0, 0.9, (rows, size)).astype(np.int64)
    alphas = np.array([round(1e-4 * 2.0**shift) for shift in range(spec.MAX_SHIFT + 1)], np.int64)
    return np.clip(lengths, 1, 131072), alphas


def _by_spec(lengths: np.ndarray[Any, Any], alphas: np.ndarray[Any, Any], dp_size: int, slots: int) -> tuple[Any, ...]:
    rows, size = lengths.shape
    outputs = (
        np.zeros((rows, size), np.int32),
        np.zeros((rows, dp_size * slots + 1), np.int32),
        np.zeros((rows, slots, dp_size)),
        np.zeros((rows, slots, dp_size), np.int64),
        np.zeros((rows, 2)),
        np.zeros(rows, np.int64),
    )
    spec.plan_rows(lengths, np.empty((0, 0)), alphas, dp_size, slots, 0, False, *outputs)
    return outputs


def _cpu_microseconds(rows: int, size: int, dp_size: int, slots: int) -> float:
    """Median time of the CPU engine for all rows; of many rows, a few are timed."""
    lengths, alphas = make_inputs(min(rows, _CPU_ROWS), size)
    _by_spec(lengths[:1], alphas, dp_size, slots)
    times = []
    for row in lengths if rows > 1 else [lengths[0]] * 5:
        began = time.perf_counter()
        _by_spec(row[None], alphas, dp_size, slots)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * rows * 1e6


def _costs(lengths: np.ndarray[Any, Any], alphas: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Costs of each row as the search reads them: longest first."""
    f = np.empty(lengths.shape, np.int64)
    for row, out in zip(-np.sort(-lengths, axis=1), f, strict=True):
        spec.scale_lengths(row, alphas, out)
    return f


def _check_torch_search(f: np.ndarray[Any, Any], groups: int) -> None:
    """Both searches find the same levels."""
    most, counts = np.full(f.shape[1], f.shape[1], np.int64), np.empty(groups, np.int64)
    expected = [spec.min_max(row, 1.0 / row, most, groups, counts) for row in f]
    np.testing.assert_array_equal(min_max_levels(torch.from_numpy(f), groups).numpy(), expected)


def _torch_microseconds(rows: int, size: int, groups: int) -> tuple[float, float]:
    """Times of `torch.sort` and, on one row, of the batched search, on the CPU."""
    lengths, alphas = make_inputs(min(rows, _CPU_ROWS), size)
    f = _costs(lengths, alphas)
    _check_torch_search(f, groups)
    times: list[list[float]] = [[], []]
    on_host, costs = torch.from_numpy(lengths), torch.from_numpy(f[:1])
    for _ in range(5):
        for kept, run in zip(
            times,
            (lambda: on_host.sort(dim=1, descending=True, stable=True), lambda: min_max_levels(costs, groups)),
            strict=True,
        ):
            began = time.perf_counter()
            run()
            kept.append(time.perf_counter() - began)
    scale = rows / len(lengths) * 1e6
    return float(np.median(times[0])) * scale, float(np.median(times[1])) * rows * 1e6


def _gpu_microseconds(run: Callable[[], object]) -> float:
    """Median time between events around a call."""
    times = []
    for _ in range(_REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return float(np.median(times))


def _moved_bytes(rows: int, size: int, groups: int) -> int:
    """Least bytes that the steps read and write: lengths and order thrice, costs twice, the plan once."""
    return rows * (size * (8 + 3 * 4 + 2 * (4 + 8 + 8 + 8 + 4) + 4) + groups * 40)


def _measure(rows: int, size: int, dp_size: int, slots: int) -> dict[str, Any]:
    """Check and time one shape on the GPU."""
    from gpusampler.kernels import engine

    host, alphas = make_inputs(rows, size)
    lengths, table = torch.from_numpy(host).cuda(), torch.from_numpy(alphas).cuda()

    def run() -> engine.Plan:
        return engine.plan_rows(lengths, None, table, dp_size, slots, 0, False)

    scaled = _costs(host, alphas)
    _check_torch_search(scaled[:_CPU_ROWS], dp_size * slots)
    costs = torch.from_numpy(scaled).cuda()
    began = time.perf_counter()
    plan = run()
    torch.cuda.synchronize()
    cold = time.perf_counter() - began
    checked = min(rows, 64)
    for got, expected in zip(plan, _by_spec(host[:checked], alphas, dp_size, slots), strict=True):
        np.testing.assert_array_equal(got[:checked].cpu().numpy(), expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, plan, strict=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    launches = 0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time
            launches += 1
    return {
        "cold_seconds": cold,
        "eager": _gpu_microseconds(run),
        "graph": _gpu_microseconds(graph.replay),
        "torch_sort": _gpu_microseconds(lambda: lengths.sort(dim=1, descending=True, stable=True)),
        "torch_search": _gpu_microseconds(lambda: min_max_levels(costs, dp_size * slots)) if slots == 1 else None,
        "launches": launches,
        "kernels": kernels,
    }


def run(argv: list[str]) -> int:
    """Entry point; returns the exit status, 1 if a target was measured and missed."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes, from the smallest")
    options = parser.parse_args(argv)
    record = Record("kernels", argv)
    shapes = SHAPES[: options.shapes]
    reached = _with_gpu(record, shapes) if torch.cuda.is_available() else _without_gpu(record, shapes)
    cold, cached = compile_seconds(*COLD_SHAPE)
    record.figures["compile_seconds"] = {"cold": cold, "cached": cached}
    what = f"compiling the kernels of B x D x G {COLD_SHAPE} for sm_90 on one core within {COLD_SECONDS:.0f} s"
    reached &= record.target(what, cold <= COLD_SECONDS, f"{cold:.1f} s, {cached:.1f} s from the cache")
    record.write(options.results)
    return 0 if reached else 1


def _with_gpu(record: Record, shapes: tuple[tuple[int, int, int, int], ...]) -> bool:
    rows = []
    reached = True
    for shape in shapes:
        figures = _measure(*shape)
        record.figures[str(shape)] = figures
        limit = _moved_bytes(shape[0], shape[1], shape[2] * shape[3]) / MEMORY_BYTES_A_MICROSECOND
        rows.append(
            [
                "x".join(map(str, shape)),
                f"{figures['graph']:.0f}",
                f"{figures['eager']:.0f}",
                f"{limit:.1f}",
                f"{figures['torch_sort']:.0f}",
                "" if figures["torch_search"] is None else f"{figures['torch_search']:.0f}",
                f"{_cpu_microseconds(*shape):.0f}",
                str(figures["launches"]),
                f"{figures['cold_seconds']:.1f}",
            ]
        )
        if shape in TARGETS_MICROSECONDS:
            limit = TARGETS_MICROSECONDS[shape]
            reached &= record.target(
                f"{shape} within {limit:.0f} us", figures["graph"] <= limit, f"{figures['graph']:.0f}"
            )
    record.say("", "Microseconds. Plans were compared with the specification's first; no host synchronisation.")
    header = ["W x B x D x G", "graph", "eager", "memory limit", "torch.sort", "torch search", "CPU engine"]
    header += ["launches", "cold s"]
    record.table(header, rows)
    return reached


def _without_gpu(record: Record, shapes: tuple[tuple[int, int, int, int], ...]) -> bool:
    record.say(
        "No GPU here. Left out: checks on the GPU, eager and graph times, profiles, launches and synchronisations as",
        "counted, torch on the GPU. **ESTIMATES** from the code compiled for sm_90, no measurement: one row by",
        "following a warp's walk through the code, many rows by instructions issued (`bench/estimate.py`).",
        "Microseconds.",
    )
    turns = count_turns([shape[1:] for shape in shapes])
    rows = []
    for shape in shapes:
        count, size, dp_size, slots = shape
        kernels = estimate(plan_steps(size, dp_size, slots, *turns[shape[1:]]))
        one = sum(kernel.microseconds for kernel in kernels)
        many = max(one, count * sum(kernel.many_rows_microseconds for kernel in kernels))
        torch_sort, torch_search = _torch_microseconds(count, size, dp_size * slots)
        figures = {"estimates": [kernel._asdict() for kernel in kernels], "estimated": many, "turns": turns[shape[1:]]}
        record.figures[str(shape)] = figures | {"torch_sort": torch_sort, "torch_search": torch_search}
        target = TARGETS_MICROSECONDS.get(shape)
        rows.append(
            [
                "x".join(map(str, shape)),
                f"{one if count == 1 else many:.0f}",
                f"{target:.0f}" if target else "",
                str(sum(kernel.launches for kernel in kernels)),
                f"{_moved_bytes(count, size, dp_size * slots) / MEMORY_BYTES_A_MICROSECOND:.1f}",
                f"{_cpu_microseconds(*shape):.0f}",
                f"{torch_sort:.0f}",
                f"{torch_search:.0f}" if slots == 1 else "",
                ", ".join(
                    f"{kernel.kernel} {kernel.microseconds:.0f}" for kernel in kernels if kernel.microseconds > 5
                ),
            ]
        )
    header = ["W x B x D x G", "ESTIMATE", "target", "launches", "memory limit", "CPU engine"]
    record.table([*header, "CPU torch.sort", "CPU torch search", "estimate of one row"], rows)
    return True
