"""Quality: step cost of our plans on every known window, beside the lower bound, the best known and a peer.

Both cost constants and both syncs. Every figure is recomputed from the groups in integers after the plan has been
checked, see `bench.exact`. The peer is the transformers sampler given the same cost constant; where transformers is not
installed, its stored values stand in. Targets:

- never worse than the peer, on any window;
- mean <= 1.003 x best known for G > 1; equal to it for G = 1, and equal to brute force over all partitions;
- with ranks that meet once a step, mean <= 1.03 x lower bound where B >= 512, G >= 2 and no sample is above a rank's
  fair share.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from tqdm import tqdm

from bench import options
from bench.exact import (
    SYNCS,
    Groups,
    IntArray,
    WrongPlanError,
    check_groups,
    check_plan,
    group_costs,
    is_share_bound,
    lower_bound,
    peak_tokens,
    step_cost,
)
from bench.inputs import UNITS, Window, windows
from bench.peers import transformers_groups, transformers_version
from bench.record import Record
from gpusampler import CostModel, plan_batches

BEST_KNOWN_MEAN = 1.003
STEP_MEAN = 1.03


@dataclass(frozen=True)
class Result:
    """Step cost of one window under one cost and sync, in integers of that cost, and peak tokens of the plans."""

    window: Window
    unit: int
    sync: str
    ours: int
    peer: int
    bound: int
    peak: int
    peer_peak: int | None

    @property
    def best(self) -> int | None:
        """The best known, where there is one."""
        return self.window.best_known if (self.unit, self.sync) == (UNITS[0], "microbatch") else None

    @property
    def counts_for_step_target(self) -> bool:
        """Whether the target of sync "step" is about this window."""
        size, dp_size, grad_accum = self.window.shape
        return (
            self.sync == "step"
            and size >= 512
            and grad_accum >= 2
            and is_share_bound(self.window.lengths, dp_size, self.unit)
        )


def plan_windows(known: list[Window], unit: int, sync: str) -> Iterator[tuple[Window, Groups]]:
    """Plan windows, all of one trace and shape at once, and check the plans; yields each with its groups.

    Raises:
        WrongPlanError: a plan is not a partition, or its own figures are not those of its groups.
    """
    for (trace, shape), same in itertools.groupby(known, key=lambda window: (window.trace, window.shape)):
        rows = list(same)
        lengths = np.stack([window.lengths for window in rows])
        _, dp_size, grad_accum = shape
        plan = plan_batches(torch.from_numpy(lengths), dp_size, grad_accum, cost=CostModel(alpha=1 / unit), sync=sync)
        try:
            yield from zip(rows, check_plan(lengths, plan, unit), strict=True)
        except WrongPlanError as error:
            raise WrongPlanError(f"{trace} {shape} {sync} alpha {1 / unit}: {error}") from None


def run_peer(known: list[Window]) -> dict[tuple[Window, int], Groups]:
    """Checked groups of the transformers sampler, by window and unit."""
    groups = {}
    for window in tqdm(known, desc="transformers sampler", unit="window", leave=False, disable=None):
        size, dp_size, grad_accum = window.shape
        for unit in UNITS:
            made = transformers_groups(window.lengths, dp_size, grad_accum, unit)
            check_groups(made, size, dp_size * grad_accum)
            groups[window, unit] = made
    return groups


def measure(known: list[Window], peers: dict[tuple[Window, int], Groups]) -> list[Result]:
    """Plan every window with both costs and syncs, and compare; stored figures stand in for a peer that was not run."""
    return [
        compare(window, unit, sync, groups, peers.get((window, unit)))
        for unit in UNITS
        for sync in SYNCS
        for window, groups in plan_windows(known, unit, sync)
    ]


def compare(window: Window, unit: int, sync: str, groups: Groups, peer: Groups | None) -> Result:
    """Recompute the step cost of our groups and the peer's."""
    _, dp_size, _ = window.shape

    def cost(of: Groups) -> int:
        return step_cost(group_costs(window.lengths, of, unit), dp_size, sync)

    return Result(
        window=window,
        unit=unit,
        sync=sync,
        ours=cost(groups),
        peer=window.peer[unit, sync] if peer is None else cost(peer),
        bound=lower_bound(window.lengths, dp_size, unit),
        peak=peak_tokens(window.lengths, groups),
        peer_peak=None if peer is None else peak_tokens(window.lengths, peer),
    )


def all_partitions(size: int, num_groups: int) -> Iterator[list[list[int]]]:
    """Every partition of `range(size)` into `num_groups` groups, none empty: restricted growth strings."""

    def extend(groups: list[list[int]], item: int) -> Iterator[list[list[int]]]:
        if num_groups - len(groups) > size - item:
            return
        if item == size:
            yield groups
            return
        for k in range(len(groups)):
            yield from extend([*groups[:k], [*groups[k], item], *groups[k + 1 :]], item + 1)
        if len(groups) < num_groups:
            yield from extend([*groups, [item]], item + 1)

    return extend([], 0)


def brute_force(lengths: IntArray, num_groups: int, unit: int) -> int:
    """Least largest group cost over all partitions."""
    return min(int(group_costs(lengths, groups, unit).max()) for groups in all_partitions(len(lengths), num_groups))


def inexact_small_rows(known: list[Window], rows: int = 60, size: int = 7) -> list[str]:
    """Rows cut from the windows, a few samples each, whose plan with one slot is not the best of all partitions."""
    wrong = []
    for index in range(rows):
        window = known[index % len(known)]
        row, num_groups, unit = window.lengths[:size], 2 + index % 3, UNITS[index % 2]
        plan = plan_batches(torch.from_numpy(row[None]), num_groups, cost=CostModel(alpha=1 / unit))
        ours = int(group_costs(row, check_plan(row[None], plan, unit)[0], unit).max())
        best = brute_force(row, num_groups, unit)
        if ours != best:
            wrong.append(f"{row.tolist()} in {num_groups}: {ours}, not {best}")
    return wrong


def by(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Group results by a name, in order of appearance."""
    grouped = defaultdict(list)
    for result in results:
        grouped[key(result)].append(result)
    return dict(grouped)


def _mean(results: list[Result], ratio: Callable[[Result], float]) -> float:
    return fmean(ratio(result) for result in results)


def _table(record: Record, first: str, grouped: dict[str, list[Result]]) -> None:
    header = [
        first,
        "windows",
        "ours / bound",
        "peer / bound",
        "ours / peer",
        "worst",
        "worse",
        "ours / best",
        "worst",
        "peak / peer",
    ]
    rows = []
    for name, results in grouped.items():
        peaks = [result.peak / result.peer_peak for result in results if result.peer_peak]
        with_best = [result.ours / result.best for result in results if result.best]
        rows.append(
            [
                name,
                len(results),
                _mean(results, lambda r: r.ours / r.bound),
                _mean(results, lambda r: r.peer / r.bound),
                _mean(results, lambda r: r.ours / r.peer),
                max(r.ours / r.peer for r in results),
                sum(r.ours > r.peer for r in results),
                fmean(with_best) if with_best else "",
                max(with_best) if with_best else "",
                fmean(peaks) if peaks else "",
            ]
        )
    record.table(header, rows)


def _never_worse(record: Record, results: list[Result]) -> None:
    for (unit, sync), some in itertools.groupby(results, key=lambda r: (r.unit, r.sync)):
        part = list(some)
        worse = sorted((r for r in part if r.ours > r.peer), key=lambda r: r.peer / r.ours)
        text = f"worse on {len(worse)} of {len(part)} windows, mean {_mean(part, lambda r: r.ours / r.peer):.4f}"
        if worse:
            text += "; " + ", ".join(f"{r.window.name} {r.ours / r.peer:.5f}" for r in worse[:5])
        record.target(f"never worse than the peer, alpha {1 / unit:g}, {sync}", not worse, text)


def _against_best(record: Record, results: list[Result]) -> None:
    several = [r.ours / r.best for r in results if r.best and r.window.shape[2] > 1]
    if several:
        mean = fmean(several)
        text = f"{mean:.5f}, worst {max(several):.4f}, below it on {sum(x < 1 for x in several)} of {len(several)}"
        record.target(f"mean <= {BEST_KNOWN_MEAN} x best known, G > 1", mean <= BEST_KNOWN_MEAN, text)
    one = [r for r in results if r.best and r.window.shape[2] == 1]
    if one:
        equal = sum(r.ours == r.best for r in one)
        record.target("equal to the exact best, G = 1", equal == len(one), f"{equal} of {len(one)} windows")


def _step_target(record: Record, results: list[Result]) -> None:
    for unit in UNITS:
        part = [r for r in results if r.unit == unit and r.counts_for_step_target]
        if part:
            mean = _mean(part, lambda r: r.ours / r.bound)
            text = f"{mean:.4f} on {len(part)} windows, peer {_mean(part, lambda r: r.peer / r.bound):.4f}"
            what = f"sync=step mean <= {STEP_MEAN} x bound, alpha {1 / unit:g}, B >= 512, G >= 2, no dominant sample"
            record.target(what, mean <= STEP_MEAN, text)


def run(argv: list[str]) -> int:
    """Print the tables and what of the targets is reached."""
    parser = options.parser("quality", __doc__ or "")
    options.add_traces(parser)
    args = parser.parse_args(argv)
    known = windows(args.traces)
    version = transformers_version()
    record = Record("quality", argv)
    results = measure(known, run_peer(known) if version else {})
    record.say(
        f"Step costs of {len(known)} windows. Bound: a rank's fair share, or the dearest sample. Best: by long search."
    )
    record.say(
        f"Peer: transformers {version}, run now." if version else "Peer: stored values, transformers is not here."
    )
    for (unit, sync), part in itertools.groupby(results, key=lambda r: (r.unit, r.sync)):
        rows = list(part)
        record.say("", f"## alpha {1 / unit:g}, sync={sync}")
        _table(record, "B, D, G", by(rows, lambda r: str(r.window.shape)))
        _table(record, "trace", by(rows, lambda r: r.window.trace))
    record.say("## Targets", "")
    _never_worse(record, results)
    _against_best(record, results)
    wrong = inexact_small_rows(known)
    record.target(
        "equal to brute force over all partitions, G = 1, 7 samples", not wrong, "; ".join(wrong) or "60 of 60"
    )
    _step_target(record, results)
    record.figures["windows"] = [
        {
            "window": r.window.name,
            "alpha": 1 / r.unit,
            "sync": r.sync,
            "ours": r.ours,
            "peer": r.peer,
            "bound": r.bound,
            "best_known": r.best,
            "peak_tokens": r.peak,
            "peer_peak_tokens": r.peer_peak,
        }
        for r in results
    ]
    record.write(args.results)
    return 0
