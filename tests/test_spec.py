"""The planner's integers and its plans of whole rows, against what must hold for any input."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from brute_force import LIMIT, LONGEST, SENTINEL, best_of_all, lengths_of_any_kind, make_row, wide_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusampler.cost import alpha_table
from gpusampler.kernels import spec


def test_sort_worked_example():
    order = np.full(9, SENTINEL, np.int64)
    spec.sort_row(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5]), order)
    assert order.tolist() == [5, 7, 4, 8, 2, 0, 6, 1, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 1023, 1024, 1025])
@pytest.mark.parametrize("kind", ["equal", "sorted", "reversed", "ties", "giant", "wide"])
def test_sort_is_stable_longest_first(size: int, kind: str):
    draw = random.Random(size)
    lengths = {
        "equal": [5] * size,
        "sorted": list(range(1, size + 1)),
        "reversed": list(range(size, 0, -1)),
        "ties": [draw.randint(1, 3) for _ in range(size)],
        "giant": [1] * (size - 1) + [LONGEST],
        "wide": [draw.randint(1, LONGEST) for _ in range(size)],
    }[kind]
    order = np.full(size, SENTINEL, np.int64)
    spec.sort_row(np.array(lengths, np.int64), order)
    assert order.tolist() == sorted(range(size), key=lambda i: -lengths[i])


@settings(deadline=None)
@given(st.integers(0, LIMIT - 1), st.integers(0, 2**39 - 2), st.integers(1, 2**39 - 1))
@example(LIMIT - 1, 2**39 - 2, 2**39 - 1)
@example(LIMIT - 1, 1, 1)
def test_fraction_rounds_down_to_24_bits(value: int, part: int, whole: int):
    part = min(part, whole)
    got = spec.fraction(value, part, whole)
    exact = value * part // whole
    assert 0 <= got <= exact
    assert exact - got <= (value >> 24) + 2


@settings(deadline=None)
@given(st.integers(0, LIMIT), st.integers(1, LIMIT))
@example(LIMIT, LIMIT)
@example(LIMIT - 1, LIMIT)
@example(LIMIT, (1 << 31) + 1)
@example(3 * ((1 << 60) // 3), (1 << 60) // 3)
def test_estimate_is_the_quotient(level: int, cost: int):
    got = spec.estimate(level, cost, 1.0 / cost)
    if level // cost < 1 << 51:
        assert got == level // cost
    else:  # never less than any row can hold
        assert got >= 1 << 50


def test_estimate_around_every_multiple():
    draw = random.Random(0)
    for _ in range(2000):
        cost = draw.randrange(1, 1 << draw.randrange(1, 50))
        multiple = draw.randrange(1, min(1 << 31, LIMIT // cost)) * cost
        for level in (multiple - 1, multiple, multiple + 1):
            assert spec.estimate(level, cost, 1.0 / cost) == level // cost


@settings(deadline=None)
@given(
    st.integers(1, LONGEST),
    st.integers(1, 1 << 22),
    st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 1.0, 1e6]),
)
@example(LONGEST, 1, 1e6)
@example(1, 1, 0.0)
def test_lengths_are_scaled_as_far_as_62_bits_allow(longest: int, size: int, alpha: float):
    alphas = alpha_table(alpha)

    def total(shift: int) -> int:
        return size * ((longest << shift) + int(alphas[shift]) * longest**2)

    shift = spec.shift_for_lengths(longest, size, alphas)
    if shift >= 0:
        assert total(shift) < LIMIT
    if shift < spec.MAX_SHIFT:  # one more bit would not fit, but for the rounding of two terms
        assert total(shift + 1) + 2 * size >= LIMIT - size


@settings(deadline=None)
@given(st.floats(1e-12, 1e12), st.integers(1, 1 << 22))
def test_costs_are_scaled_as_far_as_61_bits_allow(largest: float, size: int):
    shift = spec.shift_for_costs(largest, size)
    assert largest * 2.0**shift <= 2.0**61 / size
    assert shift == spec.MAX_SHIFT or largest * 2.0 ** (shift + 1) > 2.0**61 / size


def test_scaled_lengths_are_the_costs():
    lengths = np.array([900, 30, 30, 2, 1], dtype=np.int64)
    f = np.full(5, SENTINEL, np.int64)
    shift = spec.scale_lengths(lengths, alpha_table(1e-3), f)
    assert shift == 40
    assert f.tolist() == [(n << 40) + round(1e-3 * 2**40) * n * n for n in lengths.tolist()]


def test_scaled_costs_are_rounded_and_positive():
    f = np.full(3, SENTINEL, np.int64)
    row = np.array([0.25, 2.0**50, 1e-300])
    shift = spec.scale_costs(row, np.array([1, 0, 2]), f)
    assert shift == 9  # 2**50 * 2**9 * 3 < 2**61
    assert f.tolist() == [2**59, 128, 1]


class Planned(NamedTuple):
    """What `plan_rows` wrote into poisoned arrays."""

    order: Any
    offsets: Any
    costs: Any
    tokens: Any
    bounds: Any
    status: Any


def plan(lengths: Any, dp_size: int, slots: int, alpha: float = 1e-4, **options: Any) -> Planned:
    """Run `plan_rows` with every output poisoned."""
    rows = np.array(lengths, np.int64)
    num_rows, size = rows.shape
    shape = (num_rows, slots, dp_size)
    out = Planned(
        np.full((num_rows, size), SENTINEL, np.int32),
        np.full((num_rows, dp_size * slots + 1), SENTINEL, np.int32),
        np.full(shape, np.nan),
        np.full(shape, SENTINEL, np.int64),
        np.full((num_rows, 2), np.nan),
        np.full(num_rows, SENTINEL, np.int64),
    )
    custom = options.get("custom", np.empty((0, 0)))
    cap, per_step = options.get("cap", 0), options.get("per_step", False)
    spec.plan_rows(rows, custom, alpha_table(alpha), dp_size, slots, cap, per_step, *out)
    return out


def check_row(lengths: Sequence[int], planned: Planned, w: int, alpha: float, cap: int, per_step: bool) -> None:
    """Recompute a row's groups from `order` and `offsets` in exact integers, and compare with everything else."""
    slots, dp_size = planned.costs.shape[1:]
    size = len(lengths)
    order, offsets = planned.order[w].tolist(), planned.offsets[w].tolist()
    assert planned.status[w] == spec.OK
    assert sorted(order) == list(range(size))
    assert offsets[0] == 0
    assert offsets[-1] == size
    shift = spec.shift_for_lengths(max(lengths), size, alpha_table(alpha))
    scale = int(alpha_table(alpha)[shift])
    loads = []
    for k in range(dp_size * slots):
        group = order[offsets[k] : offsets[k + 1]]
        assert group
        assert group == sorted(group, key=lambda i: (-lengths[i], i))
        longest = lengths[group[0]]
        tokens = len(group) * longest
        assert planned.tokens[w, k // dp_size, k % dp_size] == tokens
        assert not cap or tokens <= cap or len(group) == 1
        loads.append(len(group) * ((longest << shift) + scale * longest**2))
        assert planned.costs[w, k // dp_size, k % dp_size] == loads[-1] / 2**shift
    table = np.array(loads, dtype=object).reshape(slots, dp_size)
    cost = max(table.sum(axis=0)) if per_step else sum(table.max(axis=1))
    total = sum((n << shift) + scale * n * n for n in lengths)
    bound = max(-(-total // dp_size), (max(lengths) << shift) + scale * max(lengths) ** 2)
    assert planned.bounds[w].tolist() == [bound / 2**shift, cost / 2**shift]
    assert planned.bounds[w, 0] <= planned.bounds[w, 1]
    if per_step:
        assert (table[:-1] >= table[1:]).all()
    else:
        assert all(min(a) >= max(b) for a, b in itertools.pairwise(table))


ROWS = {
    "equal": [50] * 48,
    "giant and ones": [1] * 47 + [1_000_000],
    "as many samples as groups": [9, 1, 4, 4, 2, 8, 8, 8, 1, 1, 3, 5],
    "one more": [9, 1, 4, 4, 2, 8, 8, 8, 1, 1, 3, 5, 6],
    "sorted": list(range(1, 61)),
    "reversed": list(range(60, 0, -1)),
    "heavy tail": np.exp(np.random.default_rng(0).normal(5, 1.5, 96)).astype(int).clip(1).tolist(),
    "longest": [LONGEST] * 6 + [LONGEST - 1] * 6 + [1] * 12,
}


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize(("dp_size", "slots"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (12, 1), (1, 12)])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind(kind: str, dp_size: int, slots: int, per_step: bool):
    lengths = ROWS[kind]
    alpha = 0.0 if kind == "longest" else 1e-4
    planned = plan([lengths], dp_size, slots, alpha, per_step=per_step)
    check_row(lengths, planned, 0, alpha, 0, per_step)


@settings(deadline=None, max_examples=150)
@given(wide_rows, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from([0, 5000, 20_000]))
def test_any_row_keeps_what_a_plan_promises(lengths: list[int], dp_size: int, slots: int, per_step: bool, cap: int):
    if len(lengths) < dp_size * slots:
        lengths = lengths * (dp_size * slots)
    planned = plan([lengths], dp_size, slots, cap=cap, per_step=per_step)
    needed = int(spec.groups_needed(np.array([lengths]), cap)[0]) if cap else 1
    if needed > dp_size * slots:
        assert planned.status.tolist() == [needed]
    else:
        check_row(lengths, planned, 0, 1e-4, cap, per_step)


@settings(deadline=None, max_examples=60)
@given(lengths_of_any_kind, st.integers(1, 5))
def test_one_slot_is_solved_exactly(lengths: list[int], dp_size: int):
    dp_size = min(dp_size, len(lengths))
    for per_step in (False, True):
        planned = plan([lengths], dp_size, 1, 0.0, per_step=per_step)
        best, _ = best_of_all(lengths, dp_size)
        assert planned.bounds[0, 1] == best


def test_more_slots_are_never_dearer_than_equal_levels():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        lengths = np.exp(draw.normal(6, 1, 128)).astype(int).clip(1).tolist()
        for dp_size, slots in ((4, 2), (2, 8), (8, 4)):
            one_level = plan([lengths], dp_size * slots, 1)
            costs = np.sort(one_level.costs.reshape(-1))[::-1]
            planned = plan([lengths], dp_size, slots)
            assert planned.bounds[0, 1] <= costs[::dp_size].sum() * (1 + 1e-12)


def test_the_step_deal_is_never_above_the_sum_of_slots():
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 3000, 96).tolist()
        apart = plan([lengths], 4, 3).bounds[0, 1]
        assert plan([lengths], 4, 3, per_step=True).bounds[0, 1] <= apart


def test_a_row_too_many_for_the_cap_leaves_the_others_planned():
    rows = [[1, 1, 1, 1], [7, 7, 7, 7], [2, 1, 2, 1]]
    planned = plan(rows, 2, 1, cap=8)
    assert planned.status.tolist() == [spec.OK, 4, spec.OK]
    for w in (0, 2):
        check_row(rows[w], planned, w, 1e-4, 8, False)


def test_peak_stays_near_that_of_equal_levels():
    # K / 32 above the peak of the min-max partition, and no more
    for seed in range(20):
        lengths = np.exp(np.random.default_rng(seed).normal(6, 1, 64)).astype(int).clip(1).tolist()
        equal = plan([lengths], 8, 1).tokens.max()
        assert plan([lengths], 2, 4).tokens.max() <= equal + equal * 8 // spec.PEAK_GROUPS


def test_compiled_and_plain_python_agree():
    row = make_row([900, 801, 700, 650, 30, 20, 20, 20, 5, 1], cap=4000)
    for groups in (1, 3, 10):
        counts, plain = np.full(groups, SENTINEL, np.int64), np.full(groups, SENTINEL, np.int64)
        level = spec.min_max(row.f, row.inverse, row.most, groups, counts)
        assert spec.min_max.py_func(row.f, row.inverse, row.most, groups, plain) == level
        assert (counts == plain).all()
    for value in (0, 1, 0x80000000, 0xFFFFFFFF, 12345678901234567):
        assert spec.mix32(value) == spec.mix32.py_func(value)
    assert [spec.noise(*x) for x in itertools.product(range(3), repeat=3)] == [
        spec.noise.py_func(*x) for x in itertools.product(range(3), repeat=3)
    ]
