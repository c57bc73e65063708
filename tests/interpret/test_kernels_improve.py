"""The rounds of candidates against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SENTINEL, few, giant, prepare, skewed

from gpusampler.kernels import improve, launch, spec
from gpusampler.kernels.fill import fill_slots
from gpusampler.kernels.jit import FLAGS
from gpusampler.kernels.search import min_max
from gpusampler.kernels.waste import equal_waste, limit_peak


def check(lengths: np.ndarray, dp_size: int, slots: int, max_tokens: int = 0) -> None:
    costs = prepare(lengths, max_tokens)
    rows, groups = len(lengths), dp_size * slots
    caps = torch.from_numpy(spec.WASTE_CAPS)
    raises = torch.from_numpy(spec.RAISES if lengths.shape[1] < spec.SCARCE * groups else spec.RAISES[:0])
    parts = 1 + len(raises) + len(caps)
    counts = torch.full((rows, parts, groups), SENTINEL, dtype=torch.int32)
    usable = torch.full((rows, parts), SENTINEL, dtype=torch.int32)
    status, peak = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), SENTINEL)
    before = costs.most.numpy().astype(np.int64)
    min_max(costs, groups, counts, status, peak)
    limit_peak(costs, groups, status, peak)
    if len(raises) > 0:
        fill_slots(costs, dp_size, slots, status, raises, counts, usable)
    equal_waste(costs, groups, status, caps, counts, usable)
    improve.improve(costs, dp_size, slots, status, counts, usable, parts, torch.from_numpy(spec.TARGETS))
    for w in range(rows):
        expected = np.full(groups, SENTINEL)
        row = costs.lengths[w].numpy().astype(np.int64)
        arrays = (costs.f[w].numpy(), costs.inverse[w].numpy(), costs.tail[w].numpy(), before[w])
        assert spec.search_row(row, *arrays, dp_size, slots, expected) == (status[w] == spec.OK)
        assert counts[w, 0].tolist() == expected.tolist()


def test_the_example():
    fits = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 0, 1]], dtype=torch.int32)
    walked = torch.arange(18, dtype=torch.int32).reshape(1, 9, 2)
    counts = torch.full((1, 1, 2), SENTINEL, dtype=torch.int32)
    levels, total = torch.zeros((1, 2), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    f = torch.tensor([list(range(100, 60, -1))])
    improve._settle_kernel[(1,)](
        f,
        torch.tensor([0]),
        fits,
        walked,
        counts,
        levels,
        total,
        0,
        40,
        1,
        2,
        2,
        3,
        3,
        6,
        CANDIDATES=4,
        TARGETS=4,
        BLOCK=64,
        **FLAGS,
    )
    assert counts.tolist() == [[[16, 17]]]  # of candidate 2 at target 2
    assert levels.tolist() == [[1600, 17 * 84]]
    assert total.tolist() == [1600 + 17 * 84]


@pytest.mark.parametrize(
    ("make", "size", "dp_size", "slots"),
    [(skewed, 40, 2, 2), (giant, 12, 3, 2), (skewed, 9, 2, 4), (few, 7, 1, 5)],
)
def test_shapes(make, size: int, dp_size: int, slots: int):
    check(make(size), dp_size, slots)


def test_caps():
    lengths = skewed(30, seed=1)
    check(lengths, 1, 2, int(lengths.max() * 16))


@pytest.mark.parametrize("lanes", [64])
def test_lanes_over_several_programs_in_any_order(lanes: int, program_order: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "walk_shape", lambda slots, interpreted: launch.WalkShape(lanes, 2, 1))
    check(skewed(20), 1, 2)


def test_rows_in_several_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "WORKSPACE_BYTES", 4 * 2 * spec.CANDIDATES * len(spec.TARGETS))
    assert launch.rows_at_once(2, spec.CANDIDATES * len(spec.TARGETS)) == 1
    check(skewed(15, rows=3), 1, 2)
