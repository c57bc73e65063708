"""The balanced partition: exact values, properties, and the differencing method in plain Python beside it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition import differencing
from gpusampler.kernels import partition as kernel
from gpusampler.kernels.partition import groups_needed, partition, partition_capped


def loads(costs: np.ndarray, group_of: np.ndarray, groups: int) -> np.ndarray:
    """Summed cost of each group, and that each holds a sample."""
    assert group_of.shape == costs.shape
    assert np.bincount(group_of, minlength=groups).min() > 0
    assert len(np.bincount(group_of, minlength=groups)) == groups
    return np.bincount(group_of, weights=costs, minlength=groups).astype(np.int64)


def test_values_computed_by_hand() -> None:
    # largest first 5+4 | 5+3+3, then 5 for 4
    assert partition(np.array([5, 5, 4, 3, 3]), 2).tolist() == [0, 0, 1, 1, 1]
    # one group, as many groups as samples
    assert partition(np.array([2, 7, 1]), 1).tolist() == [0, 0, 0]
    assert sorted(partition(np.array([2, 7, 1]), 3).tolist()) == [0, 1, 2]
    # 12 | 3+3+3+3 of free size, with equal sizes 12+3+3 | 3+3+3
    costs = np.array([12, 3, 3, 3, 3])
    assert partition(costs, 2).tolist() == [0, 1, 1, 1, 1]
    assert partition(np.array([12, 3, 3, 3, 3, 3]), 2, equal_size=True).tolist() == [0, 1, 1, 1, 0, 0]
    # 4, 4 | 3, 3, 2 fill two groups of 8; three of five samples of 5 need a group each
    assert groups_needed(np.array([4, 4, 3, 3, 2]), 8) == 2
    assert groups_needed(np.array([5, 3, 5, 3, 5]), 8) == 3


def test_ties_go_to_the_smaller_sample_and_group() -> None:
    assert partition(np.full(6, 3), 3).tolist() == [0, 1, 2, 0, 1, 2]
    assert partition(np.full(6, 3), 3, equal_size=True).tolist() == [0, 1, 2, 0, 1, 2]


def test_the_differencing_start_wins_where_largest_first_is_stuck() -> None:
    # largest first ends at 12+6+4 | 10+9+1, where no exchange helps; differencing finds 12+9 | 10+6+4+1
    costs = np.array([12, 10, 9, 6, 4, 1])
    group_of = np.empty(6, np.int64)
    kernel.place_largest_first(costs, costs, kernel.NO_CAP, np.arange(6), 2, False, group_of)
    assert group_of.tolist() == [0, 1, 1, 0, 0, 1]
    assert kernel.improve(costs, costs, kernel.NO_CAP, 2, False, group_of) == 22
    assert loads(costs, partition(costs, 2), 2).tolist() == [21, 21]


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 7, 64, 128])
def test_differencing_equals_plain_python(groups: int, equal_size: bool) -> None:
    rng = np.random.default_rng(groups)
    costs = rng.integers(1, 1 << 40, groups * (256 // groups))  # without ties: one answer
    group_of = np.empty(len(costs), np.int64)
    kernel.difference(costs, kernel.largest_first(costs), groups, equal_size, group_of)
    theirs = sorted(sum(int(costs[i]) for i in group) for group in differencing(costs.tolist(), groups, equal_size))
    assert sorted(loads(costs, group_of, groups).tolist()) == theirs


@pytest.mark.parametrize("equal_size", [False, True])
def test_never_worse_than_differencing_on_traces(equal_size: bool) -> None:
    rng = np.random.default_rng(0)
    for scale in (0.1, 0.5, 0.9, 1.5):
        costs = np.exp(rng.normal(6, scale, 128)).astype(np.int64) + 1
        theirs = max(sum(int(costs[i]) for i in group) for group in differencing(costs.tolist(), 32, equal_size))
        group_of = partition(costs, 32, equal_size=equal_size)
        assert loads(costs, group_of, 32).max() <= theirs
        assert not equal_size or set(np.bincount(group_of)) == {4}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_properties(data: st.DataObject) -> None:
    costs = np.array(data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=40)))
    groups = data.draw(st.integers(1, len(costs)))
    result = partition(costs, groups)
    largest = loads(costs, result, groups).max()
    floor = max(costs.max(), -(-costs.sum() // groups))
    # largest first is within 4/3 - 1/(3K) of the least possible, which is at most twice the floor
    assert floor <= largest <= max(costs.max(), costs.sum() / groups + costs.max())
    assert np.array_equal(result, partition(costs.copy(), groups))
    if len(costs) % groups == 0:
        equal = partition(costs, groups, equal_size=True)
        assert set(np.bincount(equal, minlength=groups)) == {len(costs) // groups}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cap_is_kept_for_every_number_of_groups(data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=30)))
    costs = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=len(sizes), max_size=len(sizes))))
    cap = data.draw(st.integers(int(sizes.max()), 300))
    least = groups_needed(sizes, cap)
    optimum = -(-int(sizes.sum()) // cap)
    assert optimum <= least <= 2 * optimum
    for groups in range(least, len(sizes) + 1):
        group_of = partition_capped(costs, sizes, cap, groups)
        assert loads(sizes, group_of, groups).max() <= cap


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=3, max_size=8))
def test_near_the_optimum_of_small_inputs(costs: list[int]) -> None:
    best = min(
        max(sum(c for c, g in zip(costs, where, strict=True) if g == k) for k in range(3))
        for where in product(range(3), repeat=len(costs))
        if set(where) == {0, 1, 2}
    )
    largest = loads(np.array(costs), partition(np.array(costs), 3), 3).max()
    assert best <= largest <= best * 11 / 9


def test_work_is_bounded_for_many_samples() -> None:
    costs = np.random.default_rng(1).integers(1, 1000, 20_000)
    largest = loads(costs, partition(costs, 5000), 5000).max()
    assert largest <= 1.1 * costs.sum() / 5000


def test_sums_near_the_limit_do_not_overflow() -> None:
    costs = np.full(8, (1 << 61) // 8, np.int64)
    assert loads(costs // 1024, partition(costs, 4), 4).tolist() == [(1 << 61) // 4 // 1024] * 4
