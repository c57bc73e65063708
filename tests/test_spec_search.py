"""The planner's search and deal, against brute force over all partitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from brute_force import (
    LIMIT,
    SENTINEL,
    Row,
    best_of_all,
    costs_of,
    cuts,
    lengths_of_any_kind,
    make_row,
    wide_rows,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusampler.kernels import spec


@settings(deadline=None, max_examples=300)
@given(lengths_of_any_kind, st.integers(1, 5), st.sampled_from([0, 3, 12, 40, 6000]))
@example([7] * 7, 4, 7)
@example([7] * 4, 4, 7)
@example([5], 1, 3)
def test_min_max_is_the_least_over_all_set_partitions(lengths: list[int], groups: int, cap: int):
    groups = min(groups, len(lengths))
    row = make_row(lengths, cap=cap)
    counts = np.full(groups, SENTINEL, np.int64)
    level = spec.min_max(row.f, row.inverse, row.most, groups, counts)
    best, _ = best_of_all(row.f.tolist(), groups, cap)
    assert level == best
    if level < 0:
        assert spec.least_groups(row.most) > groups
    else:
        assert max(costs_of(row.f, counts)) == level
        assert all(n >= 1 for n in counts)


@settings(deadline=None, max_examples=200)
@given(lengths_of_any_kind, st.integers(1, 5))
def test_contiguous_groups_and_the_least_padding_are_optimal(lengths: list[int], groups: int):
    groups = min(groups, len(lengths))
    row = make_row(lengths)
    best_max, best_sum = best_of_all(row.f.tolist(), groups)
    contiguous = [costs_of(row.f, counts) for counts in cuts(len(lengths), groups)]
    assert min(map(max, contiguous)) == best_max
    assert min(map(sum, contiguous)) == best_sum == spec.least_padded(row.f, groups)


@pytest.mark.parametrize("groups", [1, 2, 17, 63, 64])
def test_least_padded_equals_the_plain_recurrence(groups: int):
    draw = np.random.default_rng(groups)
    f = np.sort(draw.pareto(1.0, 64) * 100 + 1).astype(np.int64)[::-1].copy()
    best = [0] + [LIMIT] * 64
    for _ in range(groups):
        best = [LIMIT] + [min(best[i] + (end - i) * int(f[i]) for i in range(end)) for end in range(1, 65)]
    assert spec.least_padded(f, groups) == best[64]


@settings(deadline=None, max_examples=150)
@given(lengths_of_any_kind, st.sampled_from([1, 3, 12, 40, 6000]))
def test_least_groups_under_a_cap(lengths: list[int], cap: int):
    row = make_row(lengths, cap=cap)
    needed = spec.least_groups(row.most)
    assert spec.groups_needed(np.array([lengths], np.int64), cap).tolist() == [needed]
    assert best_of_all(row.f.tolist(), needed, cap)[0] >= 0
    if needed > 1:
        assert best_of_all(row.f.tolist(), needed - 1, cap)[0] < 0


def test_min_max_at_the_end_of_the_range():
    size, groups = 8, 3
    f = [(LIMIT - 1) // size] * size
    row = make_row([1] * size, costs=f)
    counts = np.full(groups, SENTINEL, np.int64)
    assert spec.min_max(row.f, row.inverse, row.most, groups, counts) == 3 * f[0]
    assert sorted(counts.tolist()) == [2, 3, 3]


@settings(deadline=None, max_examples=150)
@given(lengths_of_any_kind, st.integers(1, 5), st.sampled_from([0, 40, 6000]))
def test_equal_waste_is_the_least_largest_waste(lengths: list[int], groups: int, cap: int):
    groups = min(groups, len(lengths))
    row = make_row(lengths, cap=cap)
    size = len(lengths)

    def largest_waste(counts: Sequence[int]) -> int:
        edges = np.cumsum([0, *counts])
        return max(
            int(n * row.f[a] - (row.tail[a] - row.tail[b])) for n, a, b in zip(counts, edges, edges[1:], strict=False)
        )

    def allowed(counts: Sequence[int]) -> bool:
        edges = np.cumsum([0, *counts])
        return all(n <= row.most[a] for n, a in zip(counts, edges, strict=False))

    counts = np.full(groups, SENTINEL, np.int64)
    fits = spec.equal_waste(int(row.f[0]) * size, row.f, row.tail, row.most, groups, counts)
    wastes = [largest_waste(c) for c in cuts(size, groups) if allowed(c)]
    assert fits == bool(wastes)
    if fits:
        assert allowed(counts.tolist())
        assert sum(counts) == size
        assert largest_waste(counts.tolist()) - min(wastes) <= 1 + (min(wastes) >> 11)


@settings(deadline=None, max_examples=150)
@given(lengths_of_any_kind, st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 40]), st.integers(0, 8))
@example([9, 4, 4, 1, 1], 1, 4, 0, 0)
def test_slots_are_filled_as_low_as_what_is_left_allows(
    lengths: list[int], dp_size: int, slots: int, cap: int, eighths: int
):
    groups = dp_size * slots
    row = make_row(lengths + [1] * (groups - len(lengths)), cap=cap)
    counts = np.full(groups, SENTINEL, np.int64)
    if spec.least_groups(row.most) > groups:
        return
    assert spec.fill_slots(eighths, row.f, row.inverse, row.most, dp_size, counts)
    assert counts.min() >= 1
    assert counts.sum() == len(row.f)
    edges = np.cumsum([0, *counts])
    for first in range(0, groups, dp_size):
        at = edges[first]
        level, _ = best_of_all(row.f[at:].tolist(), groups - first, 0) if cap == 0 and len(row.f) < 9 else (None, None)
        for k in range(first, first + dp_size):
            assert counts[k] <= row.most[edges[k]]
            if level is not None:
                raised = level + level // 8 * eighths
                more = counts[k] + 1
                assert counts[k] * row.f[edges[k]] <= raised
                assert more * row.f[edges[k]] > raised or more > len(row.f) - edges[k] - (groups - 1 - k)


@pytest.mark.parametrize("groups", [2, 7, 20])
@pytest.mark.parametrize("seed", range(5))
def test_equal_waste_is_found_to_12_bits(groups: int, seed: int):
    size = 300
    row = make_row(np.random.default_rng(seed).integers(1, 10**9, size).tolist())
    ends = np.arange(size + 1)
    waste = (ends - ends[:size, None]) * row.f[:, None] - (row.tail[:size, None] - row.tail)
    waste[ends <= ends[:size, None]] = LIMIT
    best = np.append(0, np.full(size, LIMIT))  # least largest waste of the samples up to here
    for _ in range(groups):
        best = np.maximum(best[:size, None], waste).min(axis=0)
    counts = np.full(groups, SENTINEL, np.int64)
    assert spec.equal_waste(int(row.f[0]) * size, row.f, row.tail, row.most, groups, counts)
    edges = np.cumsum([0, *counts])
    worst = max(waste[a, b] for a, b in itertools.pairwise(edges))
    assert best[size] <= worst <= best[size] + 1 + (best[size] >> 11)


@settings(deadline=None, max_examples=100)
@given(wide_rows, st.integers(1, 8), st.integers(1, 8))
def test_equal_waste_keeps_its_level(lengths: list[int], groups: int, quarters: int):
    groups = min(groups, len(lengths))
    row = make_row(lengths)
    level = spec.waste_level(quarters, row.f, row.tail, groups)
    counts = np.full(groups, SENTINEL, np.int64)
    if spec.equal_waste(level, row.f, row.tail, row.most, groups, counts):
        assert max(costs_of(row.f, counts)) <= level
        assert min(counts) >= 1
    else:
        exact = np.empty(groups, np.int64)
        assert spec.min_max(row.f, row.inverse, row.most, groups, exact) > level


def walk(row: Row, levels: Sequence[int], dp_size: int, by_ratio: bool) -> Any:
    """Counts of `walk_slots`, or None where the levels do not hold the row."""
    slots = len(levels)
    counts = np.full(slots * dp_size, SENTINEL, np.int64)
    scratch = [np.full(slots, SENTINEL, np.int64) for _ in range(3)]
    shift = max(0, sum(levels).bit_length() - 31)
    scaled = np.full(slots, np.nan)
    level = np.array(levels, np.int64)
    fits = spec.walk_slots(
        level, by_ratio, shift, row.f, row.inverse, row.tail, row.most, dp_size, counts, *scratch, scaled
    )
    return counts if fits else None


def test_walk_fills_the_level_that_is_wasted_least():
    # levels 10 and 7, a rank each: 5 wastes 0 of 10 (two of them) and 2 of 7; then 3 wastes 1 of 7
    row = make_row([5, 5, 3, 2])
    assert walk(row, [10, 7], 1, by_ratio=False).tolist() == [2, 2]
    assert walk(row, [7, 10], 1, by_ratio=True).tolist() == [2, 2]
    assert walk(row, [10, 5], 1, by_ratio=False) is None
    assert walk(make_row([4, 1, 1, 1]), [5, 4], 1, by_ratio=False).tolist() == [1, 3]
    # two of 4 waste nothing of 8, nor does one of 4; the tie goes to the earlier slot
    assert walk(make_row([4, 4, 2, 2]), [8, 4], 1, by_ratio=False).tolist() == [2, 2]
    assert walk(make_row([4, 4, 2, 2]), [4, 8], 1, by_ratio=False) is None
    # three of 9 leave 3 of 30, one leaves 2 of 11: less in part, more in number
    assert walk(make_row([9, 9, 9, 5]), [30, 11], 1, by_ratio=True).tolist() == [3, 1]
    assert walk(make_row([9, 9, 9, 5]), [30, 11], 1, by_ratio=False).tolist() == [1, 3]


@settings(deadline=None, max_examples=100)
@given(wide_rows, st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_walk_over_equal_levels_is_exact(lengths: list[int], dp_size: int, slots: int, by_ratio: bool):
    groups = dp_size * slots
    if len(lengths) < groups:
        lengths = lengths * groups
    row = make_row(lengths)
    counts = np.full(groups, SENTINEL, np.int64)
    level = int(spec.min_max(row.f, row.inverse, row.most, groups, counts))
    assert walk(row, [level] * slots, dp_size, by_ratio).tolist() == counts.tolist()
    assert walk(row, [level - 1] * slots, dp_size, by_ratio) is None


@settings(deadline=None, max_examples=200)
@given(wide_rows, st.integers(1, 3), st.integers(1, 4), st.booleans(), st.sampled_from([0, 1000, 9000]), st.data())
def test_walk_keeps_its_levels(lengths: list[int], dp_size: int, slots: int, by_ratio: bool, cap: int, data: Any):
    groups = dp_size * slots
    if len(lengths) < groups:
        lengths = lengths * groups
    row = make_row(lengths, cap=cap)
    mean = int(row.tail[0]) // groups
    levels = [int(row.f[0]) + data.draw(st.integers(0, 3 * mean))]
    levels += [data.draw(st.integers(1, 3 * mean + 1)) for _ in range(slots - 1)]
    counts = walk(row, levels, dp_size, by_ratio)
    if counts is not None:
        assert min(counts) >= 1
        edges = np.cumsum([0, *counts])
        assert all(n <= row.most[a] for n, a in zip(counts, edges, strict=False))
        got = sorted(costs_of(row.f, counts), reverse=True)
        allowed = sorted(levels * dp_size, reverse=True)
        assert all(cost <= level for cost, level in zip(got, allowed, strict=True))


@settings(deadline=None, max_examples=100)
@given(wide_rows, st.integers(1, 4), st.integers(2, 4), st.integers(0, 50))
def test_improvement_never_worsens(lengths: list[int], dp_size: int, slots: int, scale: int):
    groups = dp_size * slots
    if len(lengths) < groups:
        lengths = lengths * groups
    ordered = sorted(lengths, reverse=True)
    shift = min(scale, 61 - (ordered[0] * len(ordered)).bit_length())
    row = make_row(lengths, costs=[x << shift for x in ordered])
    counts = np.full(groups, SENTINEL, np.int64)
    spec.min_max(row.f, row.inverse, row.most, groups, counts)
    costs, levels = np.empty(groups, np.int64), np.empty(slots, np.int64)
    start = spec.slot_levels(row.f, counts, dp_size, costs, levels)
    assert start == sum(sorted(costs_of(row.f, counts), reverse=True)[::dp_size])
    end = spec.improve(row.f, row.inverse, row.tail, row.most, dp_size, counts, levels, start)
    assert end <= start
    assert end == sum(sorted(costs_of(row.f, counts), reverse=True)[::dp_size])


def test_deal_worked_example():
    # by cost 9 8 | 7 5 | 2 2: rank 1 holds 8 < 9 and gets 7, rank 0 gets 5; then 14 < 15
    costs = np.array([2, 9, 5, 8, 7, 2], np.int64)
    place = np.full(6, SENTINEL, np.int64)
    spec.deal_microbatch(costs, 2, 3, place)
    assert costs[place].tolist() == [9, 8, 5, 7, 2, 2]
    assert place.tolist() == [1, 3, 2, 4, 0, 5]
    height = spec.deal_step(costs, 2, 3, place)
    assert height == 17  # 33 in all: 17 and 16
    assert sorted(place.tolist()) == list(range(6))


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_deals_keep_every_group_and_their_order(dp_size: int, slots: int, data: Any):
    groups = dp_size * slots
    values = st.one_of(st.integers(1, 9), st.integers(1, 10**6))
    costs = np.array(data.draw(st.lists(values, min_size=groups, max_size=groups)), np.int64)
    place = np.full(groups, SENTINEL, np.int64)
    spec.deal_microbatch(costs, dp_size, slots, place)
    assert sorted(place.tolist()) == list(range(groups))
    dealt = costs[place].reshape(slots, dp_size)
    best_first = np.sort(costs)[::-1].reshape(slots, dp_size)
    assert (np.sort(dealt, axis=1)[:, ::-1] == best_first).all()
    assert spec.step_cost(costs, dp_size, slots, False, place) == best_first[:, 0].sum()
    plain = dealt.sum(axis=0).max()
    assert spec.step_height(costs, dp_size, slots, place) == plain

    height = spec.deal_step(costs, dp_size, slots, place)
    assert sorted(place.tolist()) == list(range(groups))
    dealt = costs[place].reshape(slots, dp_size)
    assert height == dealt.sum(axis=0).max() == spec.step_cost(costs, dp_size, slots, True, place)
    assert -(-int(costs.sum()) // dp_size) <= height <= plain
    assert (dealt[:-1] >= dealt[1:]).all()


def test_swaps_take_the_best_exchange():
    # ranks hold 8 + 5 and 6 + 1; 8 for 6 would leave 11 and 9, 5 for 1 leaves 9 and 11, 8 for 1 swaps the heights
    costs = np.array([8, 6, 5, 1], np.int64)
    place = np.arange(4)
    spec.swap_ranks(costs, 2, 2, place)
    assert sorted(costs[place].reshape(2, 2).sum(axis=0).tolist()) == [9, 11]
