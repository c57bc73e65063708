"""Filling slot after slot against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SENTINEL, few, giant, prepare, skewed

from gpusampler.kernels import spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.fill import fill_slots
from gpusampler.kernels.search import min_max

RAISES = np.array([0, 1, 8])


def run(costs: Costs, dp_size: int, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, groups = len(costs.f), dp_size * slots
    counts = torch.full((rows, 2 + len(RAISES), groups), SENTINEL, dtype=torch.int32)
    usable = torch.full((rows, 2 + len(RAISES)), SENTINEL, dtype=torch.int32)
    status, peak = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), SENTINEL)
    min_max(costs, groups, counts, status, peak)
    fill_slots(costs, dp_size, slots, status, torch.from_numpy(RAISES), counts, usable)
    assert (usable[:, [0, -1]] == SENTINEL).all()
    assert (counts[:, -1] == SENTINEL).all()
    return counts[:, 1:-1], usable[:, 1:-1], status


def check(lengths: np.ndarray, dp_size: int, slots: int, max_tokens: int = 0) -> None:
    costs = prepare(lengths, max_tokens)
    counts, usable, status = run(costs, dp_size, slots)
    for w in range(len(lengths)):
        if status[w] != spec.OK:
            assert usable[w].tolist() == [0] * len(RAISES)
            continue
        arrays = (costs.f[w].numpy(), costs.inverse[w].numpy(), costs.most[w].numpy().astype(np.int64))
        for part, eighths in enumerate(RAISES):
            expected = np.full(dp_size * slots, SENTINEL)
            assert spec.fill_slots(eighths, *arrays, dp_size, expected) == usable[w, part]
            assert counts[w, part].tolist() == expected.tolist()


def test_the_example():
    costs = prepare(np.array([[9, 4, 4, 1, 1]]), alpha=0.0)
    counts, usable, _ = run(costs, 1, 4)
    assert counts[0, 0].tolist() == [1, 1, 1, 2]
    assert usable.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize(
    ("size", "dp_size", "slots"), [(2, 1, 2), (4, 2, 2), (9, 2, 4), (14, 3, 4), (40, 3, 5), (64, 1, 8)]
)
def test_sizes(size: int, dp_size: int, slots: int, make):
    check(make(size), dp_size, slots)


def test_caps():
    for share in (0.3, 1.0, 2.0):
        lengths = skewed(20, rows=4)
        check(lengths, 2, 3, max_tokens=int(lengths.max() * share))


def test_programs_in_any_order(program_order: str):
    check(skewed(12, rows=3), 2, 2)
