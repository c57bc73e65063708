"""Which micro-batches of a sampler would exceed a measured cap. One plan a step; memory O(micro-batches found)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusampler.errors import check_int
from gpusampler.fit_memory import MemoryFit
from gpusampler.sampler import GPUBatchRebalanceSampler


class OverStep(NamedTuple):
    """A micro-batch above the cap, and its expected peak in bytes."""

    step: int
    slot: int
    rank: int
    tokens: int
    expected_bytes: int


def steps_over(fit: MemoryFit, sampler: GPUBatchRebalanceSampler, max_steps: int = 1000) -> list[OverStep]:
    """Micro-batches of the first steps of the sampler's epoch that exceed the cap, largest first.

    Args:
        fit: the cap.
        sampler: planned as it is; with `max_tokens` set to the cap or below there are none.
        max_steps: steps to look at, from the first.

    Returns:
        One entry a micro-batch, of all ranks.
    """
    found = []
    for step in range(min(sampler.composition.steps, check_int("max_steps", max_steps, minimum=1))):
        tokens = sampler.plan(step).tokens[0].numpy()
        for slot, rank in np.argwhere(tokens > fit.max_tokens).tolist():
            many = int(tokens[slot, rank])
            found.append(OverStep(step, slot, rank, many, round(fit.expected(many, fit.longest))))
    return sorted(found, key=lambda over: -over.tokens)
