"""The batch sampler shipped in transformers (5.24 or later), driven on one window. The one copy, for tests and benches.

It plans in Python, from equal counts, by moving one sample at a time from the dearest group to the cheapest. Its cost
constant is a class attribute, so that a subclass plans with another.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np

from bench.exact import Groups, IntArray

SHIPPED_UNIT = 1000  # its QUADRATIC_COST_COEF is 0.001


def transformers_version() -> str | None:
    """Version of the installed transformers if it ships the sampler, else None."""
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler  # noqa: F401
    except ImportError:
        return None
    return importlib.metadata.version("transformers")


def transformers_sampler(lengths: IntArray, dp_size: int, grad_accum: int, unit: int) -> Any:
    """Their sampler over one window, not shuffled, for rank 0, with the cost constant 1 / unit.

    `list()` of it is what each rank pays to plan one optimizer step.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    same_cost = type("SameCostSampler", (BatchRebalanceSampler,), {"QUADRATIC_COST_COEF": 1 / unit})
    return same_cost(lengths.tolist(), len(lengths), dp_size, grad_accum, shuffle=False)


def transformers_groups(lengths: IntArray, dp_size: int, grad_accum: int, unit: int) -> Groups:
    """Their groups of one window, dealt: slot-major, group `slot * dp_size + rank`.

    One call of the method that every rank's iteration calls; iterating a sampler a rank would plan the same D times.
    """
    sampler = transformers_sampler(lengths, dp_size, grad_accum, unit)
    by_rank = sampler._assign(list(range(len(lengths))), lengths.tolist())
    return [np.array(by_rank[rank][slot]) for slot in range(grad_accum) for rank in range(dp_size)]
