"""Balance on real windows: beside the transformers sampler at the same cost, the best known, and the lower bound.

`tests/data` holds the windows, see `bench.inputs`. Every step cost is recomputed from the groups, in integers.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.exact import SYNCS, check_groups, check_plan, group_costs, step_cost
from bench.inputs import UNITS, Window, windows
from bench.peers import transformers_groups, transformers_version
from bench.quality import (
    BEST_KNOWN_MEAN,
    STEP_MEAN,
    Result,
    all_partitions,
    brute_force,
    compare,
    plan_windows,
)
from gpusampler import CostModel, plan_batches

WINDOWS = windows()
CASES = [(unit, sync) for unit in UNITS for sync in SYNCS]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Result]]:
    """Every window, planned at both costs for both syncs."""
    return {
        (unit, sync): [
            compare(window, unit, sync, groups, None) for window, groups in plan_windows(WINDOWS, unit, sync)
        ]
        for unit, sync in CASES
    }


def test_there_are_237_windows_of_eight_traces_in_six_shapes() -> None:
    assert len(WINDOWS) == 237
    assert len({window.trace for window in WINDOWS}) == 8
    assert {window.shape for window in WINDOWS} == {
        (64, 4, 2),
        (128, 8, 2),
        (256, 8, 4),
        (512, 16, 4),
        (1024, 64, 1),
        (2048, 64, 2),
    }
    assert all(len(window.lengths) == window.shape[0] for window in WINDOWS)


@pytest.mark.parametrize(("unit", "sync"), CASES)
def test_step_cost_is_never_below_the_lower_bound(
    results: dict[tuple[int, str], list[Result]], unit: int, sync: str
) -> None:
    assert [r.window.name for r in results[unit, sync] if r.ours < r.bound] == []


@pytest.mark.parametrize(("unit", "sync"), CASES)
def test_never_worse_than_the_transformers_sampler_at_the_same_cost(
    results: dict[tuple[int, str], list[Result]], unit: int, sync: str
) -> None:
    assert [(r.window.name, r.ours, r.peer) for r in results[unit, sync] if r.ours > r.peer] == []


@pytest.mark.skipif(transformers_version() is None, reason="transformers does not ship the sampler here")
def test_small_made_up_windows_beside_the_transformers_sampler() -> None:
    """600 windows of few samples a group and many ties, of which few may be dearer, by little."""
    draw = np.random.default_rng(7)
    ratios = []
    for _ in range(600):
        dp_size, grad_accum = (int(number) for number in draw.integers((1, 2), (9, 7)))
        size = int(dp_size * grad_accum * draw.choice([1.0, 1.1, 1.3, 1.6, 2, 3, 4, 6])) + int(draw.integers(0, 3))
        unit = int(draw.choice(UNITS))
        made = [draw.lognormal(6, 1, size), draw.integers(1, 4096, size), 2.0 ** draw.integers(4, 13, size)]
        lengths = np.clip(made[int(draw.integers(3))].astype(np.int64), 1, 100_000)
        plan = plan_batches(torch.from_numpy(lengths[None]), dp_size, grad_accum, cost=CostModel(alpha=1 / unit))
        (groups,) = check_plan(lengths[None], plan, unit)
        theirs = transformers_groups(lengths, dp_size, grad_accum, unit)
        ours, peer = (step_cost(group_costs(lengths, each, unit), dp_size, SYNCS[0]) for each in (groups, theirs))
        ratios.append(ours / peer)
    assert fmean(ratios) <= 0.97
    assert fmean(ratio > 1 for ratio in ratios) <= 0.015
    assert max(ratios) <= 1.03


def test_mean_over_best_known_with_several_slots(results: dict[tuple[int, str], list[Result]]) -> None:
    ratios = [r.ours / r.best for r in results[UNITS[0], "microbatch"] if r.best and r.window.shape[2] > 1]
    assert len(ratios) == 197
    assert fmean(ratios) <= BEST_KNOWN_MEAN


def test_exact_with_one_slot(results: dict[tuple[int, str], list[Result]]) -> None:
    one = [r for r in results[UNITS[0], "microbatch"] if r.window.shape[2] == 1]
    assert len(one) == 40
    assert all(r.window.exact for r in one)
    assert [(r.window.name, r.ours, r.best) for r in one if r.ours != r.best] == []


@pytest.mark.parametrize("unit", UNITS)
def test_step_sync_is_close_to_the_lower_bound(results: dict[tuple[int, str], list[Result]], unit: int) -> None:
    part = [r for r in results[unit, "step"] if r.counts_for_step_target]
    assert len(part) == {10_000: 70, 1_000: 61}[unit]
    assert fmean(r.ours / r.bound for r in part) <= STEP_MEAN


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=7),
    num_groups=st.integers(1, 4),
    unit=st.sampled_from(UNITS),
)
def test_one_slot_equals_brute_force_over_all_partitions(lengths: list[int], num_groups: int, unit: int) -> None:
    row = np.array(lengths + [1] * (num_groups - len(lengths)))
    plan = plan_batches(torch.from_numpy(row[None]), num_groups, cost=CostModel(alpha=1 / unit))
    (groups,) = check_plan(row[None], plan, unit)
    assert group_costs(row, groups, unit).max() == brute_force(row, num_groups, unit)


def test_all_partitions_counts_stirling_numbers() -> None:
    assert [sum(1 for _ in all_partitions(5, k)) for k in range(1, 6)] == [1, 15, 25, 10, 1]


def _spread(count: int) -> list[Window]:
    small = [window for window in WINDOWS if window.shape[0] <= 512]
    return small[:: len(small) // count]


@pytest.mark.skipif(transformers_version() is None, reason="transformers does not ship the sampler here")
@pytest.mark.parametrize("window", _spread(12), ids=lambda window: window.name)
def test_stored_figures_of_the_transformers_sampler(window: Window) -> None:
    size, dp_size, grad_accum = window.shape
    for unit in UNITS:
        groups = transformers_groups(window.lengths, dp_size, grad_accum, unit)
        check_groups(groups, size, dp_size * grad_accum)
        costs = group_costs(window.lengths, groups, unit)
        assert {sync: step_cost(costs, dp_size, sync) for sync in SYNCS} == {
            sync: window.peer[unit, sync] for sync in SYNCS
        }
