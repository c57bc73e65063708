"""Equal-waste partitions against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SENTINEL, few, giant, prepare, skewed

from gpusampler.kernels import spec
from gpusampler.kernels.search import min_max
from gpusampler.kernels.waste import equal_waste, limit_peak

CAPS = np.array([0, 5, 6, 12])


def check(lengths: np.ndarray, groups: int, max_tokens: int = 0) -> int:
    costs = prepare(lengths, max_tokens)
    rows = len(lengths)
    counts = torch.full((rows, 1 + len(CAPS), groups), SENTINEL, dtype=torch.int32)
    usable = torch.full((rows, 1 + len(CAPS)), SENTINEL, dtype=torch.int32)
    status, peak = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), SENTINEL)
    before = costs.most.numpy().astype(np.int64)
    min_max(costs, groups, counts, status, peak)
    limit_peak(costs, groups, status, peak)
    equal_waste(costs, groups, status, torch.from_numpy(CAPS), counts, usable)
    found = 0
    for w in range(rows):
        if status[w] != spec.OK:
            assert usable[w, 1:].tolist() == [0] * len(CAPS)
            np.testing.assert_array_equal(costs.most[w].numpy(), before[w])
            continue
        most = before[w]
        spec.limit_peak(costs.lengths[w].numpy().astype(np.int64), most, counts[w, 0].numpy().astype(np.int64))
        np.testing.assert_array_equal(costs.most[w].numpy(), most)
        f, tail = costs.f[w].numpy(), costs.tail[w].numpy()
        for part, cap in enumerate(CAPS, start=1):
            expected = np.full(groups, SENTINEL)
            fits = spec.equal_waste(spec.waste_level(cap, f, tail, groups), f, tail, most, groups, expected)
            assert usable[w, part] == fits
            assert counts[w, part].tolist() == (expected.tolist() if fits else [SENTINEL] * groups)
            found += fits
    return found


def test_the_example():
    costs = prepare(np.array([[5, 4, 4, 3, 1, 1]]), alpha=0.0)
    counts, usable = torch.zeros((1, 2, 3), dtype=torch.int32), torch.zeros((1, 2), dtype=torch.int32)
    equal_waste(costs, 3, torch.tensor([0]), torch.tensor([0]), counts, usable)
    assert usable.tolist() == [[0, 1]]
    assert counts[0, 1].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("size", "groups"), [(2, 2), (3, 2), (17, 4), (18, 2), (60, 7), (270, 3)])
@pytest.mark.parametrize("make", [skewed, few, giant])
def test_sizes(size: int, groups: int, make):
    check(make(size), groups)


def test_caps():
    lengths = skewed(40, rows=3)
    assert check(lengths, 6, int(lengths.max() * 40 / 6 * 0.8)) > 0


def test_programs_in_any_order(program_order: str):
    check(few(12, rows=3), 3)
