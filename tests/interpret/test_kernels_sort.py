"""The sort on the GPU against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SHARED_BYTES, few, giant, skewed

from gpusampler.kernels import launch, spec
from gpusampler.kernels.sort import sort_rows

NO_ROOM = 8


def by_spec(lengths: np.ndarray) -> np.ndarray:
    order = np.empty(lengths.shape, np.int64)
    for row, out in zip(lengths, order, strict=True):
        spec.sort_row(row, out)
    return order


def test_L16_ties_go_to_the_smaller_position():
    row = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    assert sort_rows(row, SHARED_BYTES).tolist() == [[5, 7, 4, 8, 2, 0, 6, 1, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 100, 127, 128, 129, 1000])
def test_any_size(size: int, make, dtype: torch.dtype):
    lengths = make(size)
    for shared_bytes in (SHARED_BYTES, NO_ROOM):
        order = sort_rows(torch.from_numpy(lengths).to(dtype), shared_bytes)
        assert order.dtype == torch.int32
        np.testing.assert_array_equal(order.numpy(), by_spec(lengths))


@pytest.mark.parametrize("size", [launch.MAX_SORT, launch.MAX_SORT + 1])
def test_the_longest_row_of_one_program_and_the_next(size: int):
    lengths = few(size, rows=1)
    np.testing.assert_array_equal(sort_rows(torch.from_numpy(lengths), SHARED_BYTES).numpy(), by_spec(lengths))


def test_extreme_lengths():
    lengths = np.array([[2**31 - 1, 1, 2**31 - 2, 2**31 - 1, 1]])
    assert sort_rows(torch.from_numpy(lengths), SHARED_BYTES).tolist() == [[0, 3, 2, 1, 4]]


def test_no_rows():
    assert sort_rows(torch.zeros((0, 5), dtype=torch.int64), SHARED_BYTES).shape == (0, 5)


def test_programs_in_any_order(program_order: str):
    lengths = skewed(70, rows=5)
    np.testing.assert_array_equal(sort_rows(torch.from_numpy(lengths), SHARED_BYTES).numpy(), by_spec(lengths))
