"""What micro-batches cost, whoever made them: one evaluation for every strategy.

A step's figures follow from the samples of its micro-batches and the cost model alone: its cost, how much of that is
padding and how much is waiting, its peak, and the bounds that no grouping of its samples can beat. O(B) a step, but
O(K * B log B) for the tighter bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from gpusampler.kernels import spec
from gpusampler.kernels.checks import gather
from gpusampler.lengths import Lengths
from gpusampler.plan import Partition
from gpusampler.strategies import Rows

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_TIGHT_SCALE = 2.0**60


@dataclass(frozen=True)
class StepFigures:
    """Figures of S steps, one array entry a step; costs in the unit of the cost model.

    Attributes:
        cost: step cost: the sum over slots of the largest cost over ranks (`sync="microbatch"`), or the largest over
            ranks of the sum over slots (`sync="step"`).
        bound: no grouping of the step's samples costs less.
        fair: cost of the samples without padding and waiting, on each rank; `bound` is above it where one sample
            alone costs more.
        work: cost of a rank's micro-batches, padding included, mean over ranks: from `fair` to `cost`.
        longest: share of `fair` that the costliest sample alone takes up.
        tokens: summed lengths.
        padded: summed tokens of the micro-batches, padding included.
        peak: largest padded tokens of a micro-batch.
        over_cap: micro-batches above `max_tokens`; 0 without a cap.
        mean_length: mean length of the step's samples.
    """

    cost: Floats
    bound: Floats
    fair: Floats
    work: Floats
    longest: Floats
    tokens: Ints
    padded: Ints
    peak: Ints
    over_cap: Ints
    mean_length: Floats

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.cost)

    def head(self, count: int) -> StepFigures:
        """Figures of the first steps."""
        return StepFigures(*(getattr(self, each.name)[:count] for each in fields(self)))


def join(parts: list[StepFigures]) -> StepFigures:
    """Figures of several runs of steps as one."""
    return StepFigures(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(StepFigures)))


def evaluate(rows: Rows, lengths: Lengths, partition: Partition) -> StepFigures:
    """Figures of steps whose micro-batches are given.

    Args:
        rows: micro-batches of W steps, none empty.
        lengths: of the dataset that `rows.samples` index.
        partition: ranks, slots, cost model, cap and sync.

    Returns:
        Figures of W steps.

    Example:
        Two ranks, one slot: [5, 9] on one and [2, 3, 4] on the other, padded to 18 and 12 tokens.

        >>> from gpusampler import CostModel
        >>> from gpusampler.lengths import as_lengths
        >>> rows = Rows(np.arange(5)[None], np.array([[0, 2, 5]], np.int32))
        >>> figures = evaluate(rows, as_lengths([5, 9, 2, 3, 4]), Partition(2, 1, CostModel(alpha=0.0)))
        >>> figures.cost.item(), figures.bound.item(), figures.work.item(), figures.peak.item()
        (18.0, 11.5, 15.0, 18)
    """
    row_lengths = gather(lengths.values, rows.samples)
    num_rows, size = row_lengths.shape
    shape = (num_rows, partition.grad_accum, partition.dp_size)
    starts = rows.offsets[:, :-1] + size * np.arange(num_rows)[:, None]
    counts = np.diff(rows.offsets, axis=1).astype(np.int64)
    longest = np.maximum.reduceat(row_lengths.reshape(-1), starts.reshape(-1)).reshape(counts.shape)
    padded = counts * longest
    intercept = partition.cost.intercept
    costs = intercept + (counts * sample_costs(longest, partition)).reshape(shape)
    samples = sample_costs(row_lengths, partition)
    empty = partition.grad_accum * intercept
    fair = empty + samples.sum(axis=1) / partition.dp_size
    alone = empty + samples.max(axis=1)
    cap = partition.max_tokens
    return StepFigures(
        cost=costs.sum(axis=1).max(axis=1) if partition.sync == "step" else costs.max(axis=2).sum(axis=1),
        bound=np.maximum(fair, alone),
        fair=fair,
        work=costs.sum(axis=(1, 2)) / partition.dp_size,
        longest=samples.max(axis=1) / (samples.sum(axis=1) / partition.dp_size),
        tokens=row_lengths.sum(axis=1),
        padded=padded.sum(axis=1),
        peak=padded.max(axis=1),
        over_cap=np.zeros(num_rows, np.int64) if cap is None else (padded > cap).sum(axis=1),
        mean_length=row_lengths.mean(axis=1),
    )


def sample_costs(lengths: Ints, partition: Partition) -> Floats:
    """Cost of one sample at each length, of any shape."""
    return partition.cost(torch.from_numpy(lengths)).numpy()


def tight_bounds(rows: Rows, lengths: Lengths, partition: Partition) -> Floats:
    """Bounds of step cost from the least padding that exactly K groups need, at least `StepFigures.bound`.

    O(K * B log B) a step.

    Example:
        Two ranks, one slot. Padding 9, 5, 4, 3, 2 to two groups takes at least 9 + 4 * 5 = 29 tokens; without
        padding there are 23.

        >>> from gpusampler import CostModel
        >>> from gpusampler.lengths import as_lengths
        >>> rows = Rows(np.arange(5)[None], np.array([[0, 2, 5]], np.int32))
        >>> tight_bounds(rows, as_lengths([5, 9, 2, 3, 4]), Partition(2, 1, CostModel(alpha=0.0))).item()
        14.5
    """
    costs = np.sort(sample_costs(gather(lengths.values, rows.samples), partition), axis=1)[:, ::-1]
    bounds = np.empty(len(costs))
    for w, row in enumerate(costs):
        unit = _TIGHT_SCALE / (row[0] * len(row))
        least = spec.least_padded(np.rint(row * unit).astype(np.int64), partition.groups) / unit
        bounds[w] = max(least / partition.dp_size, row[0])
    return partition.grad_accum * partition.cost.intercept + bounds
