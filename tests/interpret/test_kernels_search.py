"""The exact min-max search against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SENTINEL, few, giant, prepare, skewed

from gpusampler.kernels import spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.search import min_max


def run(costs: Costs, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = len(costs.f)
    counts = torch.full((rows, 2, groups), SENTINEL, dtype=torch.int32)
    status = torch.zeros(rows, dtype=torch.int64)
    peak = torch.full((rows,), SENTINEL)
    min_max(costs, groups, counts, status, peak)
    assert (counts[:, 1] == SENTINEL).all()
    return counts[:, 0], status, peak


def check(lengths: np.ndarray, groups: int, max_tokens: int = 0) -> None:
    costs = prepare(lengths, max_tokens)
    counts, status, peak = run(costs, groups)
    for w in range(len(lengths)):
        expected = np.full(groups, SENTINEL)
        most = costs.most[w].numpy().astype(np.int64)
        level = spec.min_max(costs.f[w].numpy(), costs.inverse[w].numpy(), most, groups, expected)
        if level < 0:
            assert status[w] == spec.least_groups(most)
            assert (counts[w] == SENTINEL).all()
            continue
        assert status[w] == spec.OK
        assert counts[w].tolist() == expected.tolist()
        starts = np.cumsum(expected) - expected
        assert peak[w] == (costs.lengths[w].numpy()[starts].astype(np.int64) * expected).max()


def test_the_example():
    costs = prepare(np.array([[5, 4, 4, 3, 1, 1]]), alpha=0.0)
    assert run(costs, 2)[0].tolist() == [[3, 3]]
    assert run(costs, 3)[0].tolist() == [[1, 2, 3]]
    assert run(costs, 3)[2].tolist() == [9]


@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize(("size", "groups"), [(1, 1), (2, 1), (2, 2), (9, 9), (10, 9), (64, 7), (127, 16), (300, 5)])
def test_sizes(size: int, groups: int, make):
    check(make(size), groups)


@pytest.mark.parametrize("room", [0.2, 0.5, 0.8, 1.0, 1.3])
def test_caps(room: float):
    lengths = skewed(60, rows=3)
    check(lengths, 8, int(lengths.max() * 60 / 8 * room))


def test_a_cap_that_needs_more_groups():
    counts, status, _ = run(prepare(np.array([[5, 4, 4, 3, 1, 1]]), max_tokens=8), 3)
    assert status.tolist() == [4]  # [5], [4, 4], [3, 1], [1]: 8 // 3 is 2
    assert (counts == SENTINEL).all()


def test_programs_in_any_order(program_order: str):
    check(skewed(40, rows=4), 6)


def test_random_rows():
    rng = np.random.default_rng(5)
    for seed in range(12):
        size = int(rng.integers(2, 150))
        groups = int(rng.integers(1, min(size, 12) + 1))
        lengths = skewed(size, seed=seed) if seed % 2 else few(size, seed=seed)
        check(lengths, groups, 0 if seed % 3 else int(lengths.max() * max(1.0, size / groups * rng.uniform(0.3, 1.2))))
