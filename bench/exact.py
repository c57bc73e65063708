"""What a plan costs and whether it is one, recomputed from its groups in integers.

A bench that trusted `BatchPlan.costs` would measure the planner's opinion of itself. Here a sample costs
`unit * length + length**2`, which is `length + alpha * length**2` times `unit = 1 / alpha`: int64, no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Groups = list[IntArray]

SYNCS = ("microbatch", "step")


class WrongPlanError(Exception):
    """A plan is not one: timing it would mean nothing."""


def sample_costs(lengths: IntArray, unit: int) -> IntArray:
    """Cost of each sample, in 1 / unit of a token."""
    wide = lengths.astype(np.int64)
    return unit * wide + wide * wide


def group_costs(lengths: IntArray, groups: Sequence[Any], unit: int) -> IntArray:
    """Padded cost of each group, int64 [K]: its size times the cost of its longest sample.

    [8, 1, 2] in groups [0], [1, 2] at unit 10: 1 * (80 + 64) and 2 * (20 + 4).
    """
    costs = sample_costs(lengths, unit)
    return np.array([len(group) * costs[group].max() for group in groups], dtype=np.int64)


def peak_tokens(lengths: IntArray, groups: Sequence[Any]) -> int:
    """Padded tokens of the largest group: its size times its longest sample."""
    return max(len(group) * int(lengths[group].max()) for group in groups)


def step_cost(costs: IntArray, dp_size: int, sync: str) -> int:
    """Step cost of slot-major group costs [K]: what the slowest rank makes the others wait for."""
    slots = costs.reshape(-1, dp_size)
    return int(slots.sum(axis=0).max()) if sync == "step" else int(slots.max(axis=1).sum())


def lower_bound(lengths: IntArray, dp_size: int, unit: int) -> int:
    """No grouping has a smaller step cost: a rank's fair share, or the dearest sample."""
    costs = sample_costs(lengths, unit)
    return max(-(-int(costs.sum()) // dp_size), int(costs.max()))


def is_share_bound(lengths: IntArray, dp_size: int, unit: int) -> bool:
    """Whether no sample costs more than a rank's fair share."""
    costs = sample_costs(lengths, unit)
    return int(costs.max()) * dp_size <= int(costs.sum())


def check_groups(groups: Sequence[Any], size: int, num_groups: int) -> None:
    """Refuse groups that are not a partition of `range(size)` into `num_groups`, none of them empty.

    Raises:
        WrongPlanError: it says what is wrong.
    """
    if len(groups) != num_groups:
        raise WrongPlanError(f"{len(groups)} groups instead of {num_groups}")
    empty = [k for k, group in enumerate(groups) if len(group) == 0]
    if empty:
        raise WrongPlanError(f"group {empty[0]} is empty")
    positions = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])
    outside = positions[(positions < 0) | (positions >= size)]
    if len(outside):
        raise WrongPlanError(f"position {outside[0]} is outside a row of {size}")
    counts = np.bincount(positions, minlength=size)
    if (counts != 1).any():
        position = int(np.flatnonzero(counts != 1)[0])
        raise WrongPlanError(f"position {position} is there {counts[position]} times")


def groups_of(plan: Any, w: int) -> Groups:
    """Slot-major groups of row `w` of a `BatchPlan`, cut from its order and offsets.

    Raises:
        WrongPlanError: the offsets do not cut the row.
    """
    order, offsets = plan.order[w].cpu().numpy(), plan.offsets[w].cpu().numpy()
    if offsets[0] != 0 or offsets[-1] != len(order) or (np.diff(offsets) < 0).any():
        raise WrongPlanError(f"offsets {offsets[0]} to {offsets[-1]} do not cut a row of {len(order)} in order")
    return [order[start:end].astype(np.int64) for start, end in pairwise(offsets)]


def check_plan(lengths: IntArray, plan: Any, unit: int) -> list[Groups]:
    """Refuse a `BatchPlan` of rows `lengths` [W, B] that is not one, or whose own figures are not those of its groups.

    Returns:
        The groups of each row.

    Raises:
        WrongPlanError: it names the row.
    """
    rows = []
    for w, row in enumerate(lengths):
        try:
            groups = groups_of(plan, w)
            check_groups(groups, len(row), plan.dp_size * plan.grad_accum)
            tokens = [len(group) * int(row[group].max()) for group in groups]
            if plan.tokens[w].reshape(-1).tolist() != tokens:
                raise WrongPlanError("tokens are not those of the groups")
            # the planner rounds alpha to a power of two times an integer
            if not np.allclose(plan.costs[w].reshape(-1).cpu() * unit, group_costs(row, groups, unit), rtol=1e-5):
                raise WrongPlanError("costs are not those of the groups")
        except WrongPlanError as error:
            raise WrongPlanError(f"row {w}: {error}") from None
        rows.append(groups)
    return rows
