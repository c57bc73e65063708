"""The sort on the GPU against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_spec import SHARED_BYTES, few, giant, skewed

from gpusampler.kernels import sort, spec
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.kernels.sort import key_bits, sort_rows

NO_ROOM = 8


def by_spec(lengths: np.ndarray) -> np.ndarray:
    order = np.empty(lengths.shape, np.int64)
    for row, out in zip(lengths, order, strict=True):
        spec.sort_row(row, out)
    return order


def test_L16_ties_go_to_the_smaller_position():
    row = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    for longest in (9, MAX_LENGTH):
        assert sort_rows(row, longest, SHARED_BYTES).tolist() == [[5, 7, 4, 8, 2, 0, 6, 1, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("make", [skewed, few, giant])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 100, 127, 128, 129, 1000])
def test_any_size(size: int, make, dtype: torch.dtype):
    lengths = make(size)
    for longest, shared_bytes in (
        (int(lengths.max()), SHARED_BYTES),
        (MAX_LENGTH, SHARED_BYTES),
        (MAX_LENGTH, NO_ROOM),
    ):
        order = sort_rows(torch.from_numpy(lengths).to(dtype), longest, shared_bytes)
        assert order.dtype == torch.int32
        np.testing.assert_array_equal(order.numpy(), by_spec(lengths))


@pytest.mark.parametrize(
    ("size", "longest", "way"),
    [
        (16384, MAX_LENGTH, "_sort_rows_kernel"),
        (16385, MAX_LENGTH, "_sort_long_rows"),
        (16384, 3, "_sort_rows_kernel"),
        (16385, 3, "_sort_halves_kernel"),
        (30000, 3, "_sort_halves_kernel"),
        (32768, 3, "_sort_halves_kernel"),
        (32769, 3, "_sort_long_rows"),
    ],
)
def test_the_longest_row_of_each_way_and_the_next(size: int, longest: int, way: str, monkeypatch: pytest.MonkeyPatch):
    for other in {"_sort_rows_kernel", "_sort_halves_kernel", "_sort_long_rows"} - {way}:
        monkeypatch.setattr(sort, other, None)
    lengths = np.concatenate([few(size, rows=1), np.sort(few(size, rows=1))])
    order = sort_rows(torch.from_numpy(lengths), longest, SHARED_BYTES)
    np.testing.assert_array_equal(order.numpy(), by_spec(lengths))


def test_extreme_lengths():
    lengths = np.array([[2**31 - 1, 1, 2**31 - 2, 2**31 - 1, 1]])
    assert sort_rows(torch.from_numpy(lengths), MAX_LENGTH, SHARED_BYTES).tolist() == [[0, 3, 2, 1, 4]]


@pytest.mark.parametrize("size", [1, 2, 8, 1000, 1024])
def test_keys_are_packed_as_long_as_they_fit(size: int):
    bits = (size - 1).bit_length()
    longest = (1 << 31 - bits) - 2
    assert (key_bits(size, longest), key_bits(size, longest + 1)) == (bits, 31)
    for longest_allowed in (longest, longest + 1):
        lengths = few(size)
        lengths[:, -1] = longest_allowed
        order = sort_rows(torch.from_numpy(lengths), longest_allowed, SHARED_BYTES)
        np.testing.assert_array_equal(order.numpy(), by_spec(lengths))


@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES, NO_ROOM])
@pytest.mark.parametrize("longest", [7, MAX_LENGTH])
def test_lengths_that_are_not_allowed_come_to_the_ends(longest: int, shared_bytes: int):
    lengths = torch.tensor([[7, longest + 1, 3, 0], [2**62, 7, -(2**62), 7]])
    assert sort_rows(lengths, longest, shared_bytes).tolist() == [[1, 0, 2, 3], [0, 1, 3, 2]]


def test_no_rows():
    assert sort_rows(torch.zeros((0, 5), dtype=torch.int64), 9, SHARED_BYTES).shape == (0, 5)


def test_programs_in_any_order(program_order: str):
    lengths = skewed(70, rows=5)
    order = sort_rows(torch.from_numpy(lengths), MAX_LENGTH, SHARED_BYTES)
    np.testing.assert_array_equal(order.numpy(), by_spec(lengths))
