"""What a cap on padded tokens would cost: the same steps planned under several values of `max_tokens`.

A lower cap takes less memory; below some value the samples of a step
no longer fit into K of them, and `grad_accum` has to grow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gpusampler.evaluate import Ints
from gpusampler.kernels import spec
from gpusampler.plan import Partition

_SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)


@dataclass(frozen=True)
class CapCost:
    """One cap, over some steps.

    Attributes:
        max_tokens: the cap, or None for no cap.
        peak: largest padded tokens of a micro-batch, in the plans that `relative` is of.
        unfit: share of steps that do not fit into the micro-batches there are.
        grad_accum: the least that all the steps fit with, not below the one in use; None if no value would do, as each
            micro-batch needs a sample.
        relative: step cost with that `grad_accum` over step cost without a cap.
    """

    max_tokens: int | None
    peak: int | None
    unfit: float
    grad_accum: int | None
    relative: float | None

    def to_dict(self) -> dict[str, Any]:
        """Fields as builtin values."""
        return asdict(self)


def cap_costs(rows: Ints, longest: int, partition: Partition) -> list[CapCost]:
    """Cost of some caps from the peak without one down to the longest sample, and of the partition's own.

    Args:
        rows: lengths of steps, int64 [W, B].
        longest: longest sample of the dataset; a lower cap would be refused.
        partition: ranks, slots, cost model, cap and sync.

    Returns:
        No cap first, then falling caps.
    """
    plan = replace(partition, max_tokens=None).plan(rows)
    peak, cost = int(plan.tokens.max()), float(plan.step_cost.sum())
    caps = {max(_round(share * peak), longest) for share in _SHARES} | {longest}
    caps.add(partition.max_tokens or longest)
    return [
        CapCost(None, peak, 0.0, partition.grad_accum, 1.0),
        *(_cap_cost(rows, cap, partition, cost) for cap in sorted(caps, reverse=True)),
    ]


def _cap_cost(rows: Ints, cap: int, partition: Partition, uncapped: float) -> CapCost:
    needed = spec.groups_needed(rows, cap)
    slots = max(partition.grad_accum, -(-int(needed.max()) // partition.dp_size))
    unfit = float((needed > partition.groups).mean())
    if slots * partition.dp_size > rows.shape[1]:
        return CapCost(cap, None, unfit, None, None)
    plan = replace(partition, grad_accum=slots, max_tokens=cap).plan(rows)
    return CapCost(cap, int(plan.tokens.max()), unfit, slots, float(plan.step_cost.sum()) / uncapped)


def _round(tokens: float) -> int:
    """Down to two digits."""
    unit: int = 10 ** max(0, len(str(int(tokens))) - 2)
    return int(tokens) // unit * unit
