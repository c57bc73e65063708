"""What planning with a wrong `alpha` costs: steps of the user's own lengths, planned under several, timed under one.

Ratios are of summed step times as the true model gives them. O(B log B) a step and `alpha`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusampler.cost import CostModel
from gpusampler.errors import check_int
from gpusampler.evaluate import evaluate
from gpusampler.kernels.checks import gather
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.strategies import Rows
from gpusampler.tables import as_table

USUAL = (0.0, 1e-5, 1e-4, 1e-3)


class AlphaPrice(NamedTuple):
    """One `alpha` to plan with: its time, waiting and padding included, over that of planning with the true one."""

    alpha: float
    relative: float
    idle: float


def price_alphas(
    sampler: GPUBatchRebalanceSampler, true: CostModel, alphas: Sequence[float] = USUAL, max_steps: int = 32
) -> list[AlphaPrice]:
    """Step time under `true` of plans made with each `alpha`, and with the true one.

    Args:
        sampler: lengths, batch size, ranks, slots, sync and cap; its own cost model is not used.
        true: the measured cost model.
        alphas: to plan with; the true one is added.
        max_steps: full steps to plan, spread over the epoch.

    Returns:
        By rising `alpha`. `idle` is the share of the ranks' time that is spent waiting.

    Raises:
        ParameterError: an `alpha` that the planner cannot hold for these lengths.

    Example:
        >>> from gpusampler.traces import load_trace
        >>> lengths = load_trace("mooncake_conversation")
        >>> sampler = GPUBatchRebalanceSampler(lengths, 256, dp_size=8, grad_accum=2, rank=0)
        >>> prices = price_alphas(sampler, CostModel(alpha=1e-4), max_steps=4)
        >>> [price.alpha for price in prices if price.relative < 1.0001], prices[-1].relative > 1.1
        ([0.0001], True)
    """
    full = max(1, sampler.composition.full_steps)
    count = min(full, check_int("max_steps", max_steps, minimum=1))
    steps = np.unique(np.linspace(0, full - 1, count).astype(np.int64))
    samples = np.concatenate([sampler.composition.indices(sampler.epoch, int(step)) for step in steps])
    lengths = gather(sampler.lengths.values, samples)
    partition = replace(sampler.partition, cost=true)
    found = []
    for alpha in sorted({*alphas, true.alpha}):
        planner = replace(partition, cost=CostModel(alpha=alpha, intercept=true.intercept))
        planner.check_range(samples.shape[1], sampler.lengths.maximum)
        plan = planner.plan(lengths)
        rows = Rows(np.take_along_axis(samples, plan.order.numpy(), axis=1), plan.offsets.numpy())
        figures = evaluate(rows, sampler.lengths, partition)
        idle = 1.0 - float(figures.work.sum() / figures.cost.sum())
        found.append((alpha, float(figures.cost.sum()), idle))
    best = next(cost for alpha, cost, _ in found if alpha == true.alpha)
    return [AlphaPrice(alpha, cost / best, idle) for alpha, cost, idle in found]


def price_table(prices: Sequence[AlphaPrice], true: CostModel) -> str:
    """Prices as text, the true `alpha` marked."""
    rows = [[_name(price.alpha, true), f"{price.relative:.3f}", f"{price.idle:.1%}"] for price in prices]
    return as_table(("planned with alpha", "step time", "idle"), rows)


def _name(alpha: float, true: CostModel) -> str:
    return f"{alpha:.3g}{' (measured)' if alpha == true.alpha else ''}"
