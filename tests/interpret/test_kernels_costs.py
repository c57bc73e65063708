"""Costs, reciprocals, suffix sums and counts under the cap against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SHARED_BYTES, alphas, few, giant, prepare, skewed

from gpusampler.kernels import launch, spec
from gpusampler.kernels.costs import Costs, scale_rows
from gpusampler.kernels.sort import sort_rows

BLOCK = launch.COSTS.block


def check(lengths: np.ndarray, custom: np.ndarray | None, intercept: float, max_tokens: int, alpha: float) -> Costs:
    rows = torch.from_numpy(lengths)
    by_length = sort_rows(rows, SHARED_BYTES)
    table = alphas(alpha)
    on_device = None if custom is None else torch.from_numpy(custom)
    got = scale_rows(rows, on_device, torch.from_numpy(table), intercept, max_tokens, by_length)
    size = lengths.shape[1]
    for w, order in enumerate(by_length.numpy().astype(np.int64)):
        f = np.empty(size, np.int64)
        row = lengths[w][order]
        if custom is None:
            shift = spec.scale_lengths(row, table, intercept, f)
        else:
            shift = spec.scale_costs(custom[w], order, intercept, f)
        assert got.shift[w] == shift
        np.testing.assert_array_equal(got.lengths[w].numpy(), row)
        np.testing.assert_array_equal(got.f[w].numpy(), f)
        np.testing.assert_array_equal(got.inverse[w].numpy(), 1.0 / f)
        np.testing.assert_array_equal(got.tail[w].numpy(), np.append(np.cumsum(f[::-1])[::-1], 0))
        most = np.maximum(1, max_tokens // row) if max_tokens > 0 else np.full(size, size)
        np.testing.assert_array_equal(got.most[w].numpy(), np.minimum(most, size))
    return got


def test_the_example():
    got = check(np.array([[2, 3, 1]]), None, 0.0, 4, alpha=1.0)
    assert got.shift.tolist() == [40]
    assert (got.f[0] >> 40).tolist() == [12, 6, 2]
    assert (got.tail[0] >> 40).tolist() == [20, 8, 2, 0]
    assert got.most[0].tolist() == [1, 2, 3]


def test_L15_sums_keep_every_token():
    costs = prepare(np.array([[2**24] + [1] * 7]), alpha=0.0)
    assert int(costs.tail[0, 0]) >> int(costs.shift[0]) == 16777223


@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize("size", [1, 2, 37, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_lengths(size: int, make):
    check(make(size), None, 0.0, 0, 1e-4)
    check(make(size), None, 1234.5, 5000, 1e-3)


@pytest.mark.parametrize("intercept", [0.0, 0.25, 1e7])
@pytest.mark.parametrize("scale", [1e-9, 0.3, 1.0, 1e6, 1e12])
def test_custom_costs(scale: float, intercept: float):
    lengths = skewed(65)
    check(lengths, lengths * scale + scale * lengths.astype(np.float64) ** 1.5, intercept, 0, 1e-4)


def test_halves_round_to_even():
    lengths = np.arange(1, 9)[None]
    custom = np.array([[0.5, 1.5, 2.5, 3.5, 4.5, 1e18, 2e18, 2.0**61]])
    check(lengths, custom, 0.0, 0, 1e-4)


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("longest", [1, 1000, 2**20, 2**28])
def test_shifts(longest: int, alpha: float):
    check(np.array([[longest, 1, longest // 2 + 1]]), None, 0.0, 0, alpha)
    check(np.array([[longest, 1, longest // 2 + 1]]), None, 1e9, 2**62, alpha)


def test_programs_in_any_order(program_order: str):
    check(skewed(50, rows=5), None, 0.0, 3000, 1e-4)
