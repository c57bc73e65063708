"""The deal against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SENTINEL, prepare

from gpusampler.kernels import spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.deal import deal


def as_groups(group_costs: np.ndarray) -> Costs:
    """Rows of one sample a group, so that the groups have these costs, in order."""
    costs = prepare(np.ones_like(group_costs))
    costs.f.copy_(torch.from_numpy(group_costs))
    return costs


def run(group_costs: np.ndarray, dp_size: int, slots: int, per_step: bool):
    rows, groups = group_costs.shape
    counts = torch.ones((rows, 1, groups), dtype=torch.int32)
    usable = torch.full((rows, 1), SENTINEL, dtype=torch.int32)
    status = torch.zeros(rows, dtype=torch.int64)
    return deal(as_groups(group_costs), dp_size, slots, per_step, status, counts, usable, 1)


def check(group_costs: np.ndarray, dp_size: int, slots: int, per_step: bool) -> None:
    got = run(group_costs, dp_size, slots, per_step)
    for w, row in enumerate(group_costs):
        place = np.full(dp_size * slots, SENTINEL)
        if per_step:
            height = spec.deal_step(row, dp_size, slots, place)
        else:
            spec.deal_microbatch(row, dp_size, slots, place)
            height = spec.step_cost(row, dp_size, slots, False, place)
        assert got.place[w, 0].tolist() == place.tolist()
        assert got.dealt[w, 0].tolist() == row[place].tolist()
        assert got.height[w, 0] == height


def test_the_example():
    got = run(np.array([[7, 5, 5, 3, 2, 1]]), 2, 3, per_step=False)
    assert got.place.tolist() == [[[0, 1, 3, 2, 4, 5]]]
    assert got.dealt.view(3, 2).sum(0).tolist() == [12, 11]
    assert got.height.tolist() == [[7 + 5 + 2]]


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("highest", [4, 2**61])
@pytest.mark.parametrize(("dp_size", "slots"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 4), (9, 7), (64, 1), (1, 65)])
def test_shapes(dp_size: int, slots: int, highest: int, per_step: bool):
    rng = np.random.default_rng(dp_size * 100 + slots)
    highest = min(highest, 2**61 // (dp_size * slots))
    check(rng.integers(1, highest + 1, (2, dp_size * slots)), dp_size, slots, per_step)


@pytest.mark.parametrize("per_step", [False, True])
def test_programs_in_any_order(program_order: str, per_step: bool):
    check(np.random.default_rng(1).integers(1, 50, (5, 12)), 4, 3, per_step)


def test_an_exchange_that_the_deal_alone_misses():
    group_costs = np.array([[10, 9, 8, 7, 6, 5, 4, 3]])
    assert run(group_costs, 2, 4, per_step=True).height.tolist() == [[26]]
