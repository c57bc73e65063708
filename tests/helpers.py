"""What several test files need: every rank's plan, and the invariants that every plan keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gpusampler import GPUBatchRebalanceSampler


def ranks(
    lengths: Any, batch: int, dp_size: int = 1, grad_accum: int = 1, **options: Any
) -> list[GPUBatchRebalanceSampler]:
    """One sampler a rank."""
    return [
        GPUBatchRebalanceSampler(lengths, batch, dp_size, grad_accum, rank=rank, **options) for rank in range(dp_size)
    ]


def yields(samplers: Sequence[GPUBatchRebalanceSampler]) -> list[list[list[int]]]:
    """What each rank yields in the current epoch."""
    return [list(sampler) for sampler in samplers]


def check_invariants(samplers: Sequence[GPUBatchRebalanceSampler], plans: list[list[list[int]]]) -> Counter[int]:
    """Equal counts, multiples of the slots, nothing empty, builtin ints, each step its samples; returns the counts."""
    first = samplers[0]
    slots, batch, total = first.grad_accum, first.effective_batch_size, len(first.lengths)
    for plan in plans:
        assert len(plan) == len(first)
        assert len(plan) % slots == 0
        assert all(plan)
        assert all(type(i) is int and 0 <= i < total for micro_batch in plan for i in micro_batch)
    steps = len(first) // slots
    for step in range(steps):
        got = Counter(i for plan in plans for slot in range(slots) for i in plan[step * slots + slot])
        assert got == Counter(first.indices(step).tolist())
        assert sum(got.values()) == (batch if step < total // batch else max(total % batch, first.dp_size * slots))
    counts = Counter(i for plan in plans for micro_batch in plan for i in micro_batch)
    if first.drop_last:
        assert sum(counts.values()) == total // batch * batch
        assert set(counts.values()) <= {1}
    else:
        assert set(counts) == set(range(total))
        assert sum(counts.values()) == total + first.repeated
    return counts


def padded_cost(lengths: Sequence[int], micro_batch: Sequence[int], alpha: float) -> float:
    """Cost of a padded micro-batch in floats, for values quoted in reports."""
    longest = max(int(lengths[i]) for i in micro_batch)
    return len(micro_batch) * (longest + alpha * longest * longest)


def step_costs(lengths: Sequence[int], plans: list[list[list[int]]], slots: int, alpha: float) -> list[float]:
    """Sum over slots of the largest cost over ranks, for each step."""
    steps = len(plans[0]) // slots
    return [
        sum(max(padded_cost(lengths, plan[step * slots + slot], alpha) for plan in plans) for slot in range(slots))
        for step in range(steps)
    ]


def peak(lengths: Sequence[int], plans: list[list[list[int]]]) -> int:
    """Largest samples * longest of any micro-batch."""
    return max(len(m) * max(int(lengths[i]) for i in m) for plan in plans for m in plan)


def exact_cost(length: int) -> int:
    """The default cost at alpha = 1e-4, times 10,000: an integer."""
    return 10_000 * length + length * length


def half_square(lengths: torch.Tensor) -> torch.Tensor:
    """A cost function that can be pickled."""
    return lengths + 0.5 * lengths.to(torch.float64) ** 2
