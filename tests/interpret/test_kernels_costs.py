"""Costs, reciprocals, suffix sums and counts under the cap against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SHARED_BYTES, Case, alphas, few, giant, plan_by_kernels, prepare, skewed

from gpusampler.kernels import launch, spec
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.kernels.costs import Costs, scale_rows
from gpusampler.kernels.sort import sort_rows

BLOCK = launch.COSTS.block


def check(lengths: np.ndarray, custom: np.ndarray | None, max_tokens: int, alpha: float) -> Costs:
    rows = torch.from_numpy(lengths)
    by_length = sort_rows(rows, MAX_LENGTH, SHARED_BYTES)
    table = alphas(alpha)
    on_device = None if custom is None else torch.from_numpy(custom)
    status = torch.empty(len(rows), dtype=torch.int64)
    got = scale_rows(rows, on_device, torch.from_numpy(table), max_tokens, MAX_LENGTH, by_length, status)
    assert not status.any()
    size = lengths.shape[1]
    for w, order in enumerate(by_length.numpy().astype(np.int64)):
        f = np.empty(size, np.int64)
        row = lengths[w][order]
        if custom is None:
            shift = spec.scale_lengths(row, table, f)
        else:
            shift = spec.scale_costs(custom[w], order, f)
        assert got.shift[w] == shift
        np.testing.assert_array_equal(got.lengths[w].numpy(), row)
        np.testing.assert_array_equal(got.f[w].numpy(), f)
        np.testing.assert_array_equal(got.inverse[w].numpy(), 1.0 / f)
        np.testing.assert_array_equal(got.tail[w].numpy(), np.append(np.cumsum(f[::-1])[::-1], 0))
        most = np.maximum(1, max_tokens // row) if max_tokens > 0 else np.full(size, size)
        np.testing.assert_array_equal(got.most[w].numpy(), np.minimum(most, size))
    return got


def test_the_example():
    got = check(np.array([[2, 3, 1]]), None, 4, alpha=1.0)
    assert got.shift.tolist() == [40]
    assert (got.f[0] >> 40).tolist() == [12, 6, 2]
    assert (got.tail[0] >> 40).tolist() == [20, 8, 2, 0]
    assert got.most[0].tolist() == [1, 2, 3]


def test_L15_sums_keep_every_token():
    scaled = prepare(np.array([[2**24] + [1] * 7]), alpha=0.0)
    assert int(scaled.tail[0, 0]) >> int(scaled.shift[0]) == 16777223


@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize("size", [1, 2, 37, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_lengths(size: int, make):
    check(make(size), None, 0, 1e-4)
    check(make(size), None, 5000, 1e-3)


@pytest.mark.parametrize("scale", [1e-9, 0.3, 1.0, 1e6, 1e12])
def test_custom_costs(scale: float):
    lengths = skewed(65)
    check(lengths, lengths * scale + scale * lengths.astype(np.float64) ** 1.5, 0, 1e-4)


def test_halves_round_to_even():
    lengths = np.arange(1, 9)[None]
    custom = np.array([[0.5, 1.5, 2.5, 3.5, 4.5, 1e18, 2e18, 2.0**61]])
    check(lengths, custom, 0, 1e-4)


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("longest", [1, 1000, 2**20, 2**27])
def test_shifts(longest: int, alpha: float):
    check(np.array([[longest, 1, longest // 2 + 1]]), None, 0, alpha)
    check(np.array([[longest, 1, longest // 2 + 1]]), None, 2**62, alpha)


@pytest.mark.parametrize(
    ("row", "custom", "alpha", "expected"),
    [
        ([5, 0, 3], None, 1e-4, spec.BAD_LENGTHS),
        ([5, -(2**62), 3], None, 1e-4, spec.BAD_LENGTHS),
        ([5, 2**31, 3], None, 1e-4, spec.BAD_LENGTHS),
        ([5, 2**62, 3], None, 1e-4, spec.BAD_LENGTHS),
        ([2**31 - 1, 2**31 - 1, 2**31], None, 0.0, spec.BAD_LENGTHS),
        ([2**31 - 1, 5, 3], None, 0.0, 0),
        ([2**28, 5, 3], None, 1e-4, spec.OUT_OF_RANGE),
        ([2**31 - 1, 5, 3], None, 1e6, spec.OUT_OF_RANGE),
        ([5, 0, 3], [5.0, 1.0, 3.0], 1e-4, spec.BAD_LENGTHS),
        ([5, 4, 3], [5.0, 3.0, 3.0], 1e-4, 0),
        ([5, 4, 3], [5.0, 3.0, 3.5], 1e-4, spec.BAD_COSTS),
        ([5, 4, 3], [5.0, 0.0, 3.0], 1e-4, spec.BAD_COSTS),
        ([5, 4, 3], [5.0, 4.0, -1.0], 1e-4, spec.BAD_COSTS),
        ([5, 4, 3], [np.inf, 4.0, 1.0], 1e-4, spec.BAD_COSTS),
        ([5, 4, 3], [np.nan, 4.0, 1.0], 1e-4, spec.BAD_COSTS),
        ([5, 4, 3], [5.0, np.nan, 1.0], 1e-4, spec.BAD_COSTS),
    ],
)
def test_rows_that_cannot_be_planned(row: list[int], custom: list[float] | None, alpha: float, expected: int):
    good = skewed(3, rows=1)
    rows = np.concatenate([good, np.array([row]), good])
    given = None if custom is None else np.concatenate([good, np.array([custom]), good]).astype(np.float64)
    plan = plan_by_kernels(Case(rows, 1, 2, custom=given, alpha=alpha))
    assert plan.status.tolist() == [0, expected, 0]
    if expected:
        assert plan.order[1].tolist() == [-1, -1, -1]
        assert not plan.offsets[1].any()
        assert not plan.tokens[1].any()
        assert plan.costs[1].isnan().all()
        assert plan.bounds[1].isnan().all()
    for w in (0, 2):
        assert sorted(plan.order[w].tolist()) == [0, 1, 2]


def test_no_block_hides_a_bad_cost():
    rows = np.sort(skewed(2 * BLOCK + 3, rows=1))[:, ::-1].copy()
    for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 1):
        custom = rows.astype(np.float64)
        custom[0, at + 1] = custom[0, at] + 1.0
        assert plan_by_kernels(Case(rows, 1, 2, custom=custom)).status.tolist() == [spec.BAD_COSTS]


def test_programs_in_any_order(program_order: str):
    check(skewed(50, rows=5), None, 3000, 1e-4)
