"""Speed: planning time of one global batch on one core, beside the transformers sampler on the same windows.

Ours: `plan_batches` on 8 rows a call, time over 8. Peer: one pass of its sampler over one row, what every rank pays a
step. Both in one process and thread; their turns alternate, so that a noisy machine disturbs both alike. Rows are real
windows, in turn; where a trace has fewer than the turns need, they come again. Plans are checked before anything is
timed. Medians, and their ratio; the balance beside it is that of the first row of each trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean, median

import torch
from tqdm import tqdm

from bench import options
from bench.exact import IntArray, check_groups, check_plan, group_costs, step_cost
from bench.inputs import UNITS, Shape, permuted_traces, rows_of
from bench.peers import transformers_groups, transformers_sampler, transformers_version
from bench.record import Record
from gpusampler import BatchPlan, CostModel, plan_batches

ROWS = 8
SHAPES: tuple[Shape, ...] = (
    (64, 4, 2),
    (128, 8, 2),
    (256, 8, 4),
    (512, 16, 4),
    (1024, 64, 1),
    (1024, 16, 4),
    (2048, 64, 2),
    (4096, 64, 4),
)
TARGETS: dict[Shape, int] = {(64, 4, 2): 1, (1024, 16, 4): 20, (4096, 64, 4): 100}
_UNIT = UNITS[0]


@dataclass(frozen=True)
class Timing:
    """Seconds a global batch of one trace and shape, medians, and mean step cost of our plans over the peer's."""

    trace: str
    shape: Shape
    ours: float
    peer: float | None
    cost_ratio: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast."""
        return None if self.peer is None else self.peer / self.ours


def _plan(rows: IntArray, shape: Shape) -> BatchPlan:
    _, dp_size, grad_accum = shape
    return plan_batches(torch.from_numpy(rows), dp_size, grad_accum, cost=CostModel(alpha=1 / _UNIT))


def _cost_ratio(rows: IntArray, shape: Shape, with_peer: bool) -> float | None:
    """Check our plans of `rows`; mean step cost over the peer's on the first of them."""
    size, dp_size, grad_accum = shape
    ours = check_plan(rows, _plan(rows, shape), _UNIT)
    if not with_peer:
        return None
    row = rows[0]
    theirs = transformers_groups(row, dp_size, grad_accum, _UNIT)
    check_groups(theirs, size, dp_size * grad_accum)
    costs = [step_cost(group_costs(row, groups, _UNIT), dp_size, "microbatch") for groups in (ours[0], theirs)]
    return costs[0] / costs[1]


def time_shape(trace: str, lengths: IntArray, shape: Shape, seconds: float, with_peer: bool) -> Timing:
    """Time one trace and shape for about `seconds`, at least 3 turns of each side."""
    size, dp_size, grad_accum = shape
    rows = rows_of(lengths, size, 8 * ROWS)
    cost_ratio = _cost_ratio(rows[:ROWS], shape, with_peer)
    ours, peer = [], []
    turn = 0
    start = time.perf_counter()
    while turn < 3 or time.perf_counter() - start < seconds:
        first = turn * ROWS % len(rows)
        batch = torch.from_numpy(rows[first : first + ROWS])
        began = time.perf_counter()
        plan_batches(batch, dp_size, grad_accum, cost=CostModel(alpha=1 / _UNIT))
        ours.append((time.perf_counter() - began) / ROWS)
        if with_peer:
            sampler = transformers_sampler(rows[turn % len(rows)], dp_size, grad_accum, _UNIT)
            began = time.perf_counter()
            list(sampler)
            peer.append(time.perf_counter() - began)
        turn += 1
    return Timing(trace, shape, median(ours), median(peer) if peer else None, cost_ratio)


def _by_shape(record: Record, timings: list[Timing]) -> None:
    rows = []
    for shape in dict.fromkeys(timing.shape for timing in timings):
        part = [timing for timing in timings if timing.shape == shape]
        ours = median(timing.ours for timing in part)
        row: list[object] = [str(shape), f"{ours * 1e3:.3f}"]
        if all(timing.peer for timing in part):
            ratios = [timing.ratio or 0 for timing in part]
            row += [
                f"{median(timing.peer or 0 for timing in part) * 1e3:.1f}",
                f"{_ratio(part):.1f}",
                f"{min(ratios):.1f}",
                f"{max(ratios):.1f}",
                fmean(timing.cost_ratio or 0 for timing in part),
            ]
        rows.append(row + [""] * (7 - len(row)))
    record.table(["B, D, G", "ours, ms", "peer, ms", "times as fast", "least", "most", "cost ours / peer"], rows)


def _ratio(part: list[Timing]) -> float:
    """Ratio of the medians over traces."""
    return median(timing.peer or 0 for timing in part) / median(timing.ours for timing in part)


def run(argv: list[str]) -> int:
    """Print times and ratios by shape, and by trace."""
    parser = options.parser("speed", __doc__ or "")
    options.add_traces(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="least time a trace and shape (0.5)")
    parser.add_argument("--shape", action="append", metavar="B,D,G", help="only this shape; may be repeated")
    args = parser.parse_args(argv)
    shapes = [_shape(text) for text in args.shape] if args.shape else list(SHAPES)
    version = transformers_version()
    record = Record("speed", argv)
    torch.set_num_threads(1)
    cells = [
        (name, lengths, shape)
        for shape in shapes
        for name, lengths in permuted_traces(args.traces).items()
        if len(lengths) >= shape[0]
    ]
    if not cells:
        raise SystemExit(f"bench: --shape: no trace has {min(shape[0] for shape in shapes)} samples")
    timings = [
        time_shape(name, lengths, shape, args.seconds, version is not None)
        for name, lengths, shape in tqdm(cells, unit="trace", leave=False, disable=None)
    ]
    record.say(f"Milliseconds a global batch, medians over traces of medians; {ROWS} rows a call, one thread.")
    record.say(f"Peer: transformers {version}, one row." if version else "No peer: transformers is not installed.")
    _by_shape(record, timings)
    record.table(
        ["trace", *map(str, shapes)],
        [
            [name, *[_cell(timings, name, shape) for shape in shapes]]
            for name in dict.fromkeys(timing.trace for timing in timings)
        ],
    )
    record.say("By trace: times as fast as the peer (our milliseconds).", "", "## Targets", "")
    for shape, target in TARGETS.items():
        part = [timing for timing in timings if timing.shape == shape]
        if part and version:
            record.target(
                f">= {target} times as fast as the peer at {shape}", _ratio(part) >= target, f"{_ratio(part):.1f}"
            )
    record.figures["timings"] = [timing.__dict__ | {"ratio": timing.ratio} for timing in timings]
    record.write(args.results)
    return 0


def _cell(timings: list[Timing], trace: str, shape: Shape) -> str:
    for timing in timings:
        if (timing.trace, timing.shape) == (trace, shape):
            own = f"{timing.ours * 1e3:.2f}"
            return own if timing.ratio is None else f"{timing.ratio:.1f} ({own})"
    return ""


def _shape(text: str) -> Shape:
    try:
        size, dp_size, grad_accum = (int(part) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"bench: --shape must be three integers B,D,G, got {text!r}") from None
    if min(dp_size, grad_accum) < 1 or size < dp_size * grad_accum:
        raise SystemExit(f"bench: --shape must have B >= D * G >= 1, got {text!r}")
    return size, dp_size, grad_accum
