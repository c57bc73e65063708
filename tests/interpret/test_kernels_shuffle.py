"""The shuffle on the GPU against the specification."""

from __future__ import annotations

import numpy as np
import pytest

from gpusampler.kernels import launch, spec
from gpusampler.kernels.shuffle import shuffle_places

BLOCK = launch.SHUFFLE.block


def by_spec(start: int, count: int, keys: np.ndarray, size: int) -> list[int]:
    out = np.empty(count, np.int64)
    spec.shuffle(start, keys, size, out)
    return out.tolist()


def test_the_example():
    assert shuffle_places(0, 5, spec.round_keys(42, 0), 10, "cpu").tolist() == [4, 2, 9, 3, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 1000, 65537, 2**31 + 5, 2**40 + 1])
def test_any_part_is_that_of_the_specification(size: int):
    keys = spec.round_keys(7, 3)
    count = min(size, 300)
    for start in (0, size - count):
        assert shuffle_places(start, count, keys, size, "cpu").tolist() == by_spec(start, count, keys, size)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_counts_around_a_block(count: int):
    keys = spec.round_keys(-1, 2**63)
    assert shuffle_places(3, count, keys, 5000, "cpu").tolist() == by_spec(3, count, keys, 5000)


def test_each_sample_once(program_order: str):
    places = shuffle_places(0, 777, spec.round_keys(1, 1), 777, "cpu").numpy()
    np.testing.assert_array_equal(np.bincount(places, minlength=777), np.ones(777))


def test_places_beyond_2_to_31():
    keys = spec.round_keys(0, 0)
    start = 2**32 - 2
    assert shuffle_places(start, 5, keys, 2**33, "cpu").tolist() == by_spec(start, 5, keys, 2**33)
