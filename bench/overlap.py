"""Overlap: what planning and broadcasting cost training ranks, and where in time they happen.

Several gloo processes train: a step is a sleep, as the host's part of an accelerator's step is waiting, and a gradient
collective. The root plans on its thread. Three settings: planning much faster than the steps, planning made slower than
they are, and planning in the loop, on every rank, for comparison. Each `next()` is timed. Of the time spent planning,
the share under steps of the training thread is measured from spans, which are kept as a trace for chrome://tracing or
Perfetto. Before timing, the ranks' micro-batches are compared with those planned without communication.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import options
from bench.ranks import answer, arguments, launch
from bench.record import Record
from gpusampler import GPUBatchRebalanceSampler
from gpusampler.group import PlanGroup
from gpusampler.pipeline import PlanAhead
from gpusampler.plan import Partition

Span = tuple[str, float, float]
SETTINGS = {
    "faster than the step": {"row_ms": 0.0, "threaded": True},
    "slower than the step": {"row_ms": 15.0, "threaded": True},
    "in the loop": {"row_ms": 0.0, "threaded": False},
}
HIDDEN = 0.95
_BATCH, _SLOTS, _PLAN_AHEAD, _TRACED = 1024, 4, 16, 400


class _Traced(GPUBatchRebalanceSampler):
    """A sampler that keeps the spans of its planning, and plans more slowly by some seconds a row."""

    spans: list[Span]
    delay = 0.0

    def _plan_chunk(self, epoch: int, step: int, count: int, partition: Partition) -> Any:
        began = time.perf_counter()
        chunk = super()._plan_chunk(epoch, step, count, partition)
        time.sleep(self.delay * count)
        self.spans.append(("plan", began, time.perf_counter()))
        return chunk


def hidden_share(spans: list[Span]) -> float:
    """Share of the planning after the first `next()` that lies within steps of the training thread."""
    steps = [(began, ended) for name, began, ended in spans if name == "step"]
    start = min(began for began, _ in steps)
    plans = [(max(start, began), ended) for name, began, ended in spans if name == "plan" and ended > start]
    covered = sum(max(0.0, min(e, end) - max(b, begin)) for begin, end in plans for b, e in steps)
    return covered / sum(end - begin for begin, end in plans) if plans else 1.0


def events(spans: list[Span], rank: int) -> list[dict[str, Any]]:
    """The first spans in Chrome's trace format, the planning thread on a line of its own."""
    first = min(began for _, began, _ in spans)
    made = [
        {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": "planning" if name == "plan" else "training",
            "ts": round((began - first) * 1e6),
            "dur": round((ended - began) * 1e6),
        }
        for name, began, ended in sorted(spans, key=lambda span: span[1])
    ]
    return made[:_TRACED]


def train(steps: int, step_ms: float, row_ms: float, threaded: bool) -> dict[str, Any]:
    """One rank's part."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not threaded:
        PlanAhead._submit = lambda self, depth: None  # type: ignore[method-assign]
    lengths = np.random.default_rng(0).lognormal(6, 1, (steps + 1) * _BATCH).clip(1, 8192).astype(np.int32)
    group = PlanGroup() if threaded else None
    options_ = {"rank": rank, "plan_ahead": _PLAN_AHEAD}
    sampler = _Traced(lengths, _BATCH, world, _SLOTS, process_group=group, **options_)
    alone = GPUBatchRebalanceSampler(lengths, _BATCH, world, _SLOTS, process_group=None, **options_)
    sampler.spans = []
    if any(a != b for a, b in zip(itertools.islice(sampler, 200), alone, strict=False)):
        raise AssertionError("micro-batches differ from those planned without communication")
    before = sampler.stats()
    sampler.spans, sampler.delay = [], row_ms / 1e3
    spans, calls = [], []
    iterator = iter(sampler)
    gradient = torch.ones(1024)
    for call in range(steps * _SLOTS):
        began = time.perf_counter()
        next(iterator)
        ended = time.perf_counter()
        time.sleep(step_ms / 1e3 / _SLOTS)
        if (call + 1) % _SLOTS == 0:
            dist.all_reduce(gradient)
        spans += [("next", began, ended), ("step", ended, time.perf_counter())]
        calls.append(ended - began)
    stats = sampler.stats()
    spans += sampler.spans
    dist.destroy_process_group()
    later = np.array(calls[1:]) * 1e3
    total = max(ended for _, _, ended in spans) - min(began for _, began, _ in spans)
    return {
        "share": (stats.waits - before.waits - 1) / steps,
        "p50": float(np.median(later)),
        "p99": float(np.percentile(later, 99)),
        "longest": float(later.max()),
        "first": calls[0] * 1e3,
        "plan": stats.plan_seconds - before.plan_seconds,
        "hidden": hidden_share(spans),
        "step": total / steps * 1e3,
        "messages": stats.messages - before.messages,
        "bytes_a_sample": (stats.bytes_broadcast - before.bytes_broadcast) / (steps * _BATCH),
        "trace": events(spans, rank),
        "rank": rank,
    }


def run(argv: list[str]) -> int:
    """Run the bench; returns 1 if less than `HIDDEN` of fast planning is hidden under steps."""
    parser = options.parser("overlap", __doc__ or "")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each setting (400)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step, all slots together (10)")
    args = parser.parse_args(argv)
    record = Record("overlap", argv)
    record.say(
        f"{args.ranks} ranks, {args.steps} steps of {args.step_ms:g} ms and a collective, B {_BATCH}, G {_SLOTS}, "
        f"{_PLAN_AHEAD} steps a chunk.",
        "`next()` in ms without the first of the epoch; waits: share of steps at which the training thread waited.",
        f"One `next()` of {_PLAN_AHEAD * _SLOTS // 2} cuts half a chunk, and may take a plan: p99 is theirs.",
    )
    rows: list[list[Any]] = []
    for name, setting in SETTINGS.items():
        settings = {**setting, "steps": args.steps, "step_ms": args.step_ms}
        found = launch("bench.overlap", args.ranks, settings, timeout=900)
        for rank, figures in enumerate(found):
            trace = figures.pop("trace")
            if rank == 0 and setting["threaded"]:
                args.results.mkdir(parents=True, exist_ok=True)
                file = args.results / f"overlap-{name.split()[0]}-trace.json"
                file.write_text(json.dumps({"traceEvents": trace}))
            record.figures[f"{name}, rank {rank}"] = figures
            shown = [figures[key] for key in ("share", "p50", "p99", "longest", "plan", "hidden", "step")]
            rows.append([f"{name}, rank {rank}", *shown])
    record.table(["planning", "waits", "p50", "p99", "longest", "planning s", "hidden", "step ms"], rows)
    hidden = record.figures["faster than the step, rank 0"]["hidden"]
    reached = record.target(f"planning hidden under steps >= {HIDDEN}", hidden >= HIDDEN, f"{hidden:.3f}")
    record.write(args.results)
    return 0 if reached else 1


if __name__ == "__main__":
    measured = train(**arguments())
    answer(measured["rank"], measured)
