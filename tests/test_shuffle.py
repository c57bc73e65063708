"""The keyed shuffle: a bijection, computable anywhere alone, and statistically a shuffle.

The statistics are of fixed seeds, so that they pass or fail for good; the bound is five standard deviations.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusampler.compose import Composition
from gpusampler.kernels import spec

SENTINEL = -1
SIGMAS = 5.0
GOLDEN = [[4, 2, 9, 3, 0, 8, 7, 1, 6, 5], [7, 2, 1, 9, 0, 3, 6, 4, 8, 5], [289781857760, 31691424898, 884127779658]]


def shuffled(size: int, seed: int = 42, epoch: int = 0, start: int = 0, count: int | None = None) -> Any:
    out = np.full(size if count is None else count, SENTINEL, np.int64)
    spec.shuffle(start, spec.round_keys(seed, epoch), size, out)
    return out


def excess(observed: Any, expected: float, freedom: int) -> float:
    """Chi-square of `observed` counts, in standard deviations above its mean."""
    chi_square = float(((np.asarray(observed) - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 511, 512, 513, 1000, 65535, 65536, 65537])
def test_every_sample_once(size: int, seed: int):
    assert np.bincount(shuffled(size, seed), minlength=size).tolist() == [1] * size


def test_every_size_up_to_600_is_a_bijection():
    for size in range(1, 600):
        assert sorted(shuffled(size, size).tolist()) == list(range(size))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2**40), st.integers(), st.integers(0, 2**63), st.data())
def test_any_stretch_is_computed_alone(size: int, seed: int, epoch: int, data: Any):
    start = data.draw(st.integers(0, size - 1))
    count = min(20, size - start)
    together = shuffled(size, seed, epoch, start, count).tolist()
    alone = [shuffled(size, seed, epoch, start + i, 1).item() for i in range(count)]
    assert together == alone
    assert len(set(together)) == count
    assert all(0 <= x < size for x in together)


def test_worked_example_does_not_change():
    # a saved state is only worth something while this order stays as it is
    assert shuffled(10, 42, 0).tolist() == GOLDEN[0]
    assert shuffled(10, 42, 1).tolist() == GOLDEN[1]
    assert shuffled(10**12, -3, 7, 10**11, 3).tolist() == GOLDEN[2]


def test_seeds_beyond_64_bits_are_taken_modulo():
    for seed in (-1, -(2**70) + 3, 2**64 + 5, 2**200):
        keys = spec.round_keys(seed, 0)
        assert keys.dtype == np.int64
        assert ((keys >= 0) & (keys < 2**32)).all()
        assert (keys == spec.round_keys(seed % 2**64, 0)).all()


def test_seeds_and_epochs_are_not_exchangeable():
    orders = [tuple(shuffled(64, seed, epoch)) for seed, epoch in itertools.product(range(-30, 30), range(60))]
    assert len(set(orders)) == len(orders) == 3600


@pytest.mark.parametrize("over", ["seeds", "epochs"])
@pytest.mark.parametrize(("size", "tries"), [(2, 2000), (3, 6000), (4, 24_000), (5, 36_000)])
def test_all_orders_of_a_small_set_are_equally_likely(size: int, tries: int, over: str):
    counts = Counter(tuple(shuffled(size, i, 0) if over == "seeds" else shuffled(size, 42, i)) for i in range(tries))
    orders = math.factorial(size)
    observed = [counts[order] for order in itertools.permutations(range(size))]
    assert excess(observed, tries / orders, orders - 1) < SIGMAS


@pytest.fixture(scope="module", params=[16, 17, 100, 257])
def many(request: Any) -> Any:
    """Orders of one size over 8000 epochs, int64 [epochs, size]."""
    return np.stack([shuffled(request.param, 7, epoch) for epoch in range(8000)])


def test_every_sample_is_equally_likely_everywhere(many: Any):
    tries, size = many.shape
    observed = np.stack([np.bincount(many[:, place], minlength=size) for place in range(size)])
    assert excess(observed, tries / size, (size - 1) ** 2) < SIGMAS


@pytest.mark.parametrize("gap", [1, 2, 8])
def test_pairs_are_equally_likely(many: Any, gap: int):
    tries, size = many.shape
    pairs = np.bincount((many[:, :-gap] * size + many[:, gap:]).reshape(-1), minlength=size * size)
    off_diagonal = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
    assert pairs.sum() == off_diagonal.sum() == tries * (size - gap)
    assert excess(off_diagonal, off_diagonal.mean(), size * (size - 1) - 1) < SIGMAS


def test_distances_of_neighbours_are_equally_likely(many: Any):
    _, size = many.shape
    distances = np.bincount(((many[:, 1:] - many[:, :-1]) % size).reshape(-1), minlength=size)[1:]
    assert excess(distances, distances.mean(), size - 2) < SIGMAS


def test_epochs_are_not_correlated(many: Any):
    tries, size = many.shape
    same = (many[1:] == many[:-1]).sum(axis=1)  # fixed points of a random order: Poisson with mean 1
    assert abs(same.mean() - 1) < SIGMAS / math.sqrt(tries - 1)
    centred = many - (size - 1) / 2
    correlation = (centred[1:] * centred[:-1]).sum() / (centred**2).sum()
    assert abs(correlation) < SIGMAS / math.sqrt(tries * size)


def test_fixed_points_are_poisson():
    tries = 6000
    fixed = Counter(int((shuffled(50, seed) == np.arange(50)).sum()) for seed in range(tries))
    observed = [fixed[k] for k in range(4)]
    observed.append(tries - sum(observed))
    chances = [math.exp(-1) / math.factorial(k) for k in range(4)]
    chances.append(1 - sum(chances))
    chi_square = sum((n - tries * p) ** 2 / (tries * p) for n, p in zip(observed, chances, strict=True))
    assert (chi_square - 4) / math.sqrt(8) < SIGMAS


@pytest.mark.parametrize("what", ["seed", "epoch"])
def test_every_bit_of_the_key_changes_the_order(what: str):
    size = 4096
    for bit in range(64):
        other = shuffled(size, 42 ^ 1 << bit, 5) if what == "seed" else shuffled(size, 42, 5 ^ 1 << bit)
        same = int((shuffled(size, 42, 5) == other).sum())
        assert same < 12  # Poisson with mean 1: above 11 once in 1e9
        bits = np.unpackbits((shuffled(size, 42, 5) ^ other).astype(">u2").view(np.uint8)).mean() * 16 / 12
        assert abs(bits - 0.5) < SIGMAS * 0.5 / math.sqrt(12 * size)


def test_every_bit_of_the_place_changes_the_image():
    # over a domain of 2**20, each bit of the image flips for half of the places, whichever bit of the place flips
    bits, tries = 20, 4000
    keys = spec.round_keys(1, 0)
    places = np.random.default_rng(0).integers(0, 1 << bits, tries)

    def image(place: int) -> int:
        out = np.empty(1, np.int64)
        spec.shuffle(place, keys, 1 << bits, out)
        return int(out[0])

    images = np.array([image(int(place)) for place in places])
    for bit in range(bits):
        flipped = images ^ np.array([image(int(place) ^ 1 << bit) for place in places])
        for other in range(bits):
            share = float((flipped >> other & 1).mean())
            assert abs(share - 0.5) < SIGMAS * 0.5 / math.sqrt(tries)


def test_samples_share_a_step_as_often_as_by_chance():
    size, batch, tries = 24, 4, 4000
    together = np.zeros((size, size))
    for epoch in range(tries):
        composition = Composition(size, batch, groups=2, shuffle=True, seed=3, drop_last=True)
        for step in composition.indices(epoch, 0, composition.full_steps):
            together[np.ix_(step, step)] += 1
    off_diagonal = together[np.triu_indices(size, 1)]
    chance = (batch - 1) / (size - 1)
    deviations = (off_diagonal - tries * chance) / math.sqrt(tries * chance * (1 - chance))
    assert abs(deviations).max() < SIGMAS
    assert 0.7 < deviations.std() < 1.3


def test_a_dropped_tail_is_spread_over_all_samples():
    size, batch, tries = 23, 5, 6000
    dropped = np.zeros(size)
    composition = Composition(size, batch, groups=1, shuffle=True, seed=0, drop_last=True)
    for epoch in range(tries):
        kept = composition.indices(epoch, 0, composition.full_steps).reshape(-1)
        dropped[np.setdiff1d(np.arange(size), kept)] += 1
    assert dropped.sum() == 3 * tries
    assert excess(dropped, 3 * tries / size, size - 1) < SIGMAS
