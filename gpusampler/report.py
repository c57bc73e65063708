"""What a sampler does to an epoch, before training: balance, padding and peak of its steps against their bounds.

Evaluates whole steps, all of the epoch or a random sample of them, for the sampler and for other ways to make
micro-batches; then the floor that the longest samples set and what a cap on `max_tokens` would cost. All figures but
planning times depend on the sampler's settings alone. Time: that of planning the steps once for each strategy, and
O(K * B log B) for each of the few steps that the tighter bound and the caps are computed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from gpusampler.caps import CapCost, cap_costs
from gpusampler.compose import Composition, Indices
from gpusampler.errors import check_int
from gpusampler.evaluate import Floats, Ints, StepFigures, evaluate, join, tight_bounds
from gpusampler.kernels.checks import gather
from gpusampler.lengths import Lengths
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.strategies import Ours, Strategy, make_strategy, step_samples, unavailable

_BLOCK_SAMPLES = 1 << 16
_PEER_SECONDS = 6.0  # estimated planning time that a slow peer may take
_TIGHT_OPERATIONS = 5e8  # a second of the tighter bound, or so
_MOST_TIGHT = 64
_CAP_SAMPLES = 1 << 17
_MOST_LENGTHS = 1 << 22  # for quantiles and a histogram


@dataclass(frozen=True)
class StrategyReport:
    """One strategy's steps.

    Attributes:
        name: of the strategy.
        steps: which steps of the epoch were evaluated, int64 [S].
        figures: of those steps.
        over_tight: step cost over the tighter bound (least padding with exactly K groups), for some of the steps.
        planning_ms: wall time on this machine to plan a step for all ranks, mean.
        relative: summed step cost over that of gpusampler in the same steps.
    """

    name: str
    steps: Indices
    figures: StepFigures
    over_tight: Floats
    planning_ms: float
    relative: float

    @property
    def over_bound(self) -> Floats:
        """Step cost over its lower bound, each step."""
        return self.figures.cost / self.figures.bound

    @property
    def padding(self) -> float:
        """Share of tokens that are padding."""
        return 1.0 - float(self.figures.tokens.sum() / self.figures.padded.sum())

    @property
    def idle(self) -> float:
        """Share of the ranks' time that goes by in waiting for the slowest, if time is as modelled."""
        return 1.0 - float(self.figures.work.sum() / self.figures.cost.sum())

    @property
    def spread(self) -> float:
        """Standard deviation over steps of the mean length of a step's samples, over its mean."""
        return float(self.figures.mean_length.std() / self.figures.mean_length.mean())

    def to_dict(self) -> dict[str, Any]:
        """Summary as builtin values."""
        return {
            "name": self.name,
            "steps": len(self.steps),
            "over_bound_mean": float(self.over_bound.mean()),
            "over_bound_worst": float(self.over_bound.max()),
            "over_tight_bound_mean": float(self.over_tight.mean()),
            "tight_bound_steps": len(self.over_tight),
            "relative_cost": self.relative,
            "padding_share": self.padding,
            "idle_share": self.idle,
            "peak_padded_tokens": int(self.figures.peak.max()),
            "micro_batches_over_cap": int(self.figures.over_cap.sum()),
            "mean_length_spread": self.spread,
            "planning_ms": self.planning_ms,
        }


@dataclass(frozen=True)
class Report:
    """What `report_sampler` found; `str()` is the text for a terminal.

    Attributes:
        settings: what was evaluated, as builtin values.
        lengths: summary of all lengths, as builtin values.
        strategies: peers first, gpusampler last.
        left_out: peers that were not evaluated, with the reason.
        caps: what caps would cost; empty if not asked for.
        cap_steps: steps that `caps` is computed on.
        sample: lengths, evenly thinned if there are many, for a histogram.
    """

    settings: dict[str, Any]
    lengths: dict[str, Any]
    strategies: list[StrategyReport]
    left_out: dict[str, str]
    caps: list[CapCost]
    cap_steps: int
    sample: Ints

    @property
    def ours(self) -> StrategyReport:
        """The sampler's own steps."""
        return self.strategies[-1]

    @property
    def floor(self) -> dict[str, float]:
        """How far the longest samples alone bound the steps.

        `longest_over_fair_mean` and `_worst`: cost of a step's costliest sample over a rank's fair share of the step;
        `bound_share`: share of the steps where it is above 1; `cost`: summed lower bounds over what they would be
        without such samples.
        """
        figures = self.ours.figures
        return {
            "longest_over_fair_mean": float(figures.longest.mean()),
            "longest_over_fair_worst": float(figures.longest.max()),
            "bound_share": float((figures.bound > figures.fair).mean()),
            "cost": float(figures.bound.sum() / figures.fair.sum()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single steps, as builtin values that json takes."""
        return {
            "settings": self.settings,
            "lengths": self.lengths,
            "strategies": [strategy.to_dict() for strategy in self.strategies],
            "left_out": self.left_out,
            "floor": self.floor,
            "caps": [cap.to_dict() for cap in self.caps],
            "cap_steps": self.cap_steps,
        }

    def __str__(self) -> str:
        """Tables and what they mean."""
        from gpusampler.report_text import report_text

        return report_text(self)


def report_sampler(
    sampler: GPUBatchRebalanceSampler,
    *,
    max_steps: int = 1000,
    peers: Sequence[str] = ("random",),
    caps: bool = False,
    progress: bool | None = False,
) -> Report:
    """Evaluate steps of the sampler's current epoch.

    Args:
        sampler: what to report on; its position does not change.
        max_steps: evaluate this many steps at most, a random sample that depends on seed and epoch.
        peers: other strategies to evaluate before it, see `gpusampler.strategies.STRATEGIES`.
        caps: also plan with several values of `max_tokens`.
        progress: show a progress bar on standard error; None shows it on a terminal.

    Returns:
        The report. Peers that are slow to plan are evaluated on fewer steps.

    Raises:
        ParameterError: `max_steps` below 1, or no such peer.

    Example:
        >>> report = GPUBatchRebalanceSampler(range(1, 1001), 100, dp_size=4).report()
        >>> random, ours = (int(each.figures.peak.max()) for each in report.strategies)
        >>> len(report.ours.figures), ours < random
        (10, True)
    """
    steps = _choose(sampler, check_int("max_steps", max_steps, minimum=1))
    peers = [name for name in peers if name != Ours.name]
    left_out = unavailable(peers)
    todo: list[tuple[Strategy, Indices]] = [(Ours(sampler), steps)]
    for peer in [make_strategy(name, sampler) for name in peers if name not in left_out]:
        seconds = peer.seconds_a_step()
        if seconds > _PEER_SECONDS:
            left_out[peer.name] = f"takes about {seconds:.0f} s to plan a step"
        else:
            todo.append((peer, steps[_spread(len(steps), int(_PEER_SECONDS / seconds) if seconds else len(steps))]))
    hide = None if progress is None else not progress
    reports: list[StrategyReport] = []
    with tqdm(total=sum(len(some) for _, some in todo), unit=" steps", disable=hide) as bar:
        for strategy, some in todo:
            reports.append(_evaluate(strategy, some, bar, reports[0] if reports else None))
    rows = _cap_rows(sampler, steps) if caps else np.empty((0, 0), np.int64)
    sample = gather(sampler.lengths.values, _spread(len(sampler.lengths), _MOST_LENGTHS))
    return Report(
        settings=_settings(sampler),
        lengths=_summary(sampler.lengths, sample),
        strategies=[*reports[1:], reports[0]],
        left_out=left_out,
        caps=cap_costs(rows, sampler.lengths.maximum, sampler.partition) if caps else [],
        cap_steps=len(rows),
        sample=sample,
    )


def _choose(sampler: GPUBatchRebalanceSampler, count: int) -> Indices:
    """All steps of the epoch, or a sorted random sample of full ones."""
    composition = sampler.composition
    if composition.steps <= count:
        return np.arange(composition.steps)
    key = [sampler.seed & (1 << 64) - 1, sampler.epoch]
    return np.sort(np.random.default_rng(key).choice(composition.full_steps, count, replace=False))


def _spread(size: int, count: int) -> Indices:
    """At most `count` places in [0, size), evenly spread."""
    count = min(count, size)
    return np.arange(count) * size // count


def _blocks(steps: Indices, composition: Composition) -> Iterator[Indices]:
    """Runs of steps of one size and not too many samples."""
    full = steps[steps < composition.full_steps]
    rows = max(1, _BLOCK_SAMPLES // composition.batch_size)
    for start in range(0, len(full), rows):
        yield full[start : start + rows]
    if len(full) < len(steps):
        yield steps[len(full) :]


def _evaluate(strategy: Strategy, steps: Indices, bar: Any, ours: StrategyReport | None) -> StrategyReport:
    """Plan and evaluate some steps; `ours` is the same of gpusampler, if this is another strategy."""
    sampler = strategy.sampler
    bar.set_description("compiling" if ours is None else strategy.name)
    strategy.plan(steps[:1])  # compiles what is compiled on first use
    bar.set_description(strategy.name)
    seconds, parts = 0.0, []
    for block in _blocks(steps, sampler.composition):
        start = perf_counter()
        rows = strategy.plan(block)
        seconds += perf_counter() - start
        parts.append(evaluate(rows, sampler.lengths, sampler.partition))
        bar.update(len(block))
    figures = join(parts)
    size = sampler.effective_batch_size
    operations = sampler.partition.groups * size * size.bit_length()
    few = _spread(len(steps), max(1, min(_MOST_TIGHT, int(_TIGHT_OPERATIONS / operations))))
    tight = [tight_bounds(strategy.plan(steps[i : i + 1]), sampler.lengths, sampler.partition)[0] for i in few]
    reference = figures.cost if ours is None else ours.figures.cost[np.searchsorted(ours.steps, steps)]
    return StrategyReport(
        name=strategy.name,
        steps=steps,
        figures=figures,
        over_tight=figures.cost[few] / np.array(tight),
        planning_ms=1e3 * seconds / len(steps),
        relative=float(figures.cost.sum() / reference.sum()),
    )


def _cap_rows(sampler: GPUBatchRebalanceSampler, steps: Indices) -> Ints:
    """Lengths of some of the full steps, or of the tail where there is no full one."""
    full = steps[steps < sampler.composition.full_steps]
    full = full if len(full) else steps
    some = full[_spread(len(full), max(4, _CAP_SAMPLES // sampler.effective_batch_size))]
    return gather(sampler.lengths.values, step_samples(sampler, some))


def _settings(sampler: GPUBatchRebalanceSampler) -> dict[str, Any]:
    cost = sampler.partition.cost
    return {
        "effective_batch_size": sampler.effective_batch_size,
        "dp_size": sampler.dp_size,
        "grad_accum": sampler.grad_accum,
        "sync": sampler.partition.sync,
        "max_tokens": sampler.partition.max_tokens,
        "alpha": cost.alpha if cost.cost_fn is None else None,
        "intercept": cost.intercept,
        "shuffle": sampler.shuffle,
        "seed": sampler.seed,
        "epoch": sampler.epoch,
        "drop_last": sampler.drop_last,
        "steps": sampler.composition.steps,
    }


def _summary(lengths: Lengths, sample: Ints) -> dict[str, Any]:
    median, high = np.percentile(sample, (50, 99)).tolist()
    return {
        "count": len(lengths),
        "shortest": lengths.minimum,
        "mean": lengths.total / len(lengths),
        "median": median,
        "p99": high,
        "longest": lengths.maximum,
    }
