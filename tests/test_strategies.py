"""Ways to make micro-batches: coverage, hand-computed cuts, and equality with the real peers."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.errors import ParameterError
from gpusampler.strategies import STRATEGIES, make_strategy, unavailable

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int64) + 1


def batches(name, rank=0, lengths=LENGTHS, epoch=0, **options):
    sampler = GPUBatchRebalanceSampler(lengths, rank=rank, **options)
    sampler.set_epoch(epoch)
    batch_sampler = make_strategy(name, sampler).batch_sampler()
    result = list(batch_sampler)
    assert len(result) == len(batch_sampler) == len(sampler)
    return result


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_sample_once_and_equal_numbers_of_micro_batches(name, data):
    dp_size, grad_accum = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = data.draw(st.integers(dp_size * grad_accum, 12))
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=size, max_size=40))
    options = {
        "lengths": lengths,
        "effective_batch_size": size,
        "dp_size": dp_size,
        "grad_accum": grad_accum,
        "drop_last": data.draw(st.booleans()),
        "epoch": data.draw(st.integers(0, 2)),
    }
    ranks = [batches(name, rank, **options) for rank in range(dp_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(micro_batch for rank in ranks for micro_batch in rank)
    assert all(type(index) is int for rank in ranks for micro_batch in rank for index in micro_batch)
    used = Counter(index for rank in ranks for micro_batch in rank for index in micro_batch)
    assert set(used) <= set(range(len(lengths)))
    full = len(lengths) // size * size
    if options["drop_last"]:
        assert len(used) == used.total() == full
    else:
        tail = len(lengths) - full
        repeats = max(0, dp_size * grad_accum - tail) if tail else 0
        assert len(used) == len(lengths)
        assert used.total() == len(lengths) + repeats


def test_all_but_length_grouped_have_the_same_samples_in_a_step():
    sampler = GPUBatchRebalanceSampler(LENGTHS, 32, 4, 2)
    steps = np.array([0, 3, 8])
    expected = [sorted(sampler.indices(step).tolist()) for step in steps.tolist()]
    for name in STRATEGIES:
        strategy = make_strategy(name, sampler)
        found = [sorted(row.tolist()) for row in strategy.plan(steps).samples]
        assert (found == expected) == (not strategy.own_steps)


def test_random_cuts_the_order_into_equal_counts():
    options = {"lengths": [9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 4], "effective_batch_size": 11, "dp_size": 2, "grad_accum": 2}
    assert batches("random", 0, shuffle=False, **options) == [[0, 1, 2], [6, 7, 8]]
    assert batches("random", 1, shuffle=False, **options) == [[3, 4, 5], [9, 10]]


def test_length_grouped_sorts_megabatches_of_the_order():
    # a megabatch holds what a rank runs in a step, 2 samples, times 8 // (4 * 2)
    options = {"lengths": [1, 5, 2, 6, 3, 7, 4, 8], "effective_batch_size": 4, "dp_size": 2, "grad_accum": 1}
    assert batches("length-grouped", 0, shuffle=False, **options) == [[1, 0], [5, 4]]
    assert batches("length-grouped", 1, shuffle=False, **options) == [[3, 2], [7, 6]]


@pytest.mark.parametrize(("dp_size", "grad_accum", "size"), [(1, 1, 8), (2, 2, 16), (4, 1, 20)])
def test_length_grouped_is_that_of_transformers(dp_size, grad_accum, size):
    from transformers.trainer_pt_utils import get_length_grouped_indices

    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(5)).numpy()
    theirs = get_length_grouped_indices(
        LENGTHS.tolist(), size // dp_size, generator=torch.Generator().manual_seed(5)
    )  # each rank draws batches of size / dp_size samples a step from it
    longest = int(np.argmax(LENGTHS[theirs]))
    sampler = GPUBatchRebalanceSampler(LENGTHS[order], size, dp_size, grad_accum, shuffle=False)
    samples = make_strategy("length-grouped", sampler).plan(np.arange(len(LENGTHS) // size)).samples
    ours = order[samples.reshape(-1)].tolist()
    # theirs swaps the longest sample of all with the first one
    first = int(np.argmax(LENGTHS[ours]))
    ours[0], ours[first] = ours[first], ours[0]
    assert longest == 0
    assert ours == theirs[: len(ours)]


@pytest.mark.parametrize("name", ["transformers", "transformers, alpha"])
@pytest.mark.parametrize(("dp_size", "grad_accum"), [(2, 1), (2, 3), (4, 2)])
def test_transformers_are_the_micro_batches_that_its_sampler_yields(name, dp_size, grad_accum):
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class Peer(BatchRebalanceSampler):
        QUADRATIC_COST_COEF = 0.02 if "alpha" in name else 0.001

    options = {"effective_batch_size": 32, "dp_size": dp_size, "grad_accum": grad_accum}
    sampler = GPUBatchRebalanceSampler(LENGTHS, cost=CostModel(alpha=0.02), **options)
    order = np.concatenate([sampler.indices(step) for step in range(9)])
    for rank in range(dp_size):
        peer = Peer(LENGTHS[order].tolist(), rank=rank, shuffle=False, **options)
        expected = [order[micro_batch].tolist() for micro_batch in peer]
        assert batches(name, rank, cost=CostModel(alpha=0.02), **options) == expected


def test_gpusampler_is_the_sampler_itself():
    options = {"effective_batch_size": 32, "dp_size": 2, "grad_accum": 2}
    for rank in range(2):
        sampler = GPUBatchRebalanceSampler(LENGTHS, rank=rank, **options)
        strategy = make_strategy("gpusampler", sampler)
        assert strategy.batch_sampler() is sampler
        samples, offsets = strategy.plan(np.arange(9))
        planned = [
            samples[w, offsets[w, group] : offsets[w, group + 1]].tolist()
            for w in range(9)
            for group in (rank, rank + 2)
        ]
        assert planned == list(sampler)


@pytest.mark.parametrize("name", STRATEGIES)
def test_loader_with_workers_and_epochs(name):
    sampler = GPUBatchRebalanceSampler(LENGTHS, 32, 2, 2, rank=1)
    batch_sampler = make_strategy(name, sampler).batch_sampler()
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=batch_sampler, num_workers=2, collate_fn=list)
    epochs = []
    for epoch in range(2):
        batch_sampler.set_epoch(epoch)
        epochs.append(list(loader))
        assert epochs[-1] == list(batch_sampler)
    assert epochs[0] != epochs[1]


def test_missing_transformers_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.trainer_pt_utils", None)
    missing = unavailable(STRATEGIES)
    assert set(missing) == {"transformers", "transformers, alpha"}
    assert "pip install 'gpusampler[demo]'" in missing["transformers"]
    assert unavailable(["random", "gpusampler"]) == {}


def test_another_transformers_is_left_out(monkeypatch):
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    assert unavailable(STRATEGIES) == {}
    monkeypatch.delattr(BatchRebalanceSampler, "_assign")
    assert "another BatchRebalanceSampler" in unavailable(STRATEGIES)["transformers"]


def test_unknown_strategy_is_refused():
    sampler = GPUBatchRebalanceSampler([1, 2], 2)
    with pytest.raises(ParameterError, match=r"strategy must be one of 'random', .*, got 'best'"):
        make_strategy("best", sampler)
