"""Tasks: counting batches, nominal epochs and policies, against values computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from gpusampler.errors import ParameterError
from gpusampler.tasks import (
    Source,
    SystemGroup,
    Task,
    nominal_epoch,
    resolve_task_schedule,
)


def batches(frames: int, size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(frames)), size, drop_last)


def two(a: int, b: int) -> list[Task]:
    return [Task("a", sources=[Source(a)]), Task("b", sources=[Source(b)])]


def test_L35a_probabilities_count_batches_and_not_frames():
    tasks = [Task("one", sources=[Source(batches(100, 1))]), Task("ten", sources=[Source(batches(100, 10))])]
    schedule = resolve_task_schedule(tasks, policy="epoch", num_steps=100)
    assert schedule.epoch_lengths == {"one": 100, "ten": 10}
    assert schedule.probabilities == {"one": 10 / 11, "ten": 1 / 11}
    assert schedule.exact == {"one": Fraction(10, 11), "ten": Fraction(1, 11)}


def test_L35b_zero_probability_group_counts_nothing_and_is_never_drawn():
    def never() -> int:
        raise AssertionError("asked for the length of a source that is never drawn")

    task = Task(
        "t", sources=[Source(30, prob=0.75), Source(10, prob=0.25), Source(1000, prob=0), Source(never, prob=0.0)]
    )
    schedule = resolve_task_schedule([task], policy="epoch", num_steps=2000)
    assert schedule.epoch_lengths == {"t": 40}
    assert {schedule.draw_at(step).source for step in range(2000)} == {0, 1}


@pytest.mark.parametrize("how", ["model_prob", "weight"])
def test_L35d_explicit_weights_are_kept_and_normalised(how):
    def resolve(weights):
        if how == "model_prob":
            return resolve_task_schedule(two(100, 10), policy="epoch", num_steps=10, model_prob=weights)
        tasks = [Task(task.name, task.sources, weight=weights[task.name]) for task in two(100, 10)]
        return resolve_task_schedule(tasks, policy="epoch", num_steps=10)

    assert resolve({"a": 0.3, "b": 0.7}).probabilities == {"a": 0.3, "b": 0.7}
    assert resolve({"a": 1e308, "b": 1e308}).probabilities == {"a": 0.5, "b": 0.5}
    assert resolve({"a": 3, "b": 1}).probabilities == {"a": 0.75, "b": 0.25}
    three = [Task(name, [1]) for name in "abc"]
    given = {"a": 0.1, "b": 0.34, "c": 0.56}  # dividing by the exact sum would move these
    assert resolve_task_schedule(three, num_steps=1, model_prob=given).probabilities == given
    never = resolve({"b": 2, "a": 0})
    assert never.probabilities == {"a": 0.0, "b": 1.0}
    assert never.policy == "model_prob"
    assert {never.task_at(step) for step in range(200)} == {"b"}


@pytest.mark.parametrize(
    ("model_prob", "message"),
    [
        ({"a": -1, "b": 2}, r"model_prob\['a'\] must be at least 0.0, got -1.0"),
        ({"a": math.nan, "b": 2}, r"model_prob\['a'\] must be finite, got nan"),
        ({"a": math.inf, "b": 2}, r"model_prob\['a'\] must be finite, got inf"),
        ({"a": True, "b": 2}, r"model_prob\['a'\] must be a number"),
        ({"a": None, "b": 2}, r"model_prob\['a'\] must be a number"),
        ({"a": 0, "b": 0}, r"model_prob must have a positive sum"),
        ({"a": 1, "b": 2, "c": 1}, r"model_prob must name every task: unknown \['c'\]"),
        ({"a": 1}, r"missing \['b'\]"),
        ({}, r"missing \['a', 'b'\]"),
        ([1, 2], r"model_prob must map task names to numbers"),
    ],
)
def test_L35d_bad_weights_raise(model_prob, message):
    with pytest.raises(ValueError, match=message):
        resolve_task_schedule(two(1, 1), num_steps=10, model_prob=model_prob)


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        (Source(12), 12),
        (Source(np.int64(12)), 12),
        (Source(lambda: 7), 7),
        (Source(lambda: batches(10, 4)), 3),
        (Source(batches(103, 8)), 13),
        (Source(batches(103, 8, drop_last=True)), 12),
        (Source(batches(103, 8), grad_accum=4), 4),
        (Source(DataLoader(range(103), batch_size=8)), 13),
        (Source(DataLoader(range(103), batch_size=8, drop_last=True), grad_accum=3), 4),
        # four ranks: 10 frames are padded to 3 a rank, or cut to 2
        (Source(BatchSampler(DistributedSampler(range(10), 4, 0), 2, False)), 2),
        (Source(BatchSampler(DistributedSampler(range(10), 4, 0), 2, True)), 1),
        (Source(BatchSampler(DistributedSampler(range(10), 4, 0, drop_last=True), 2, False)), 1),
        # 100 frames resampled to 250 inside the sampler
        (Source(BatchSampler(WeightedRandomSampler([1.0] * 100, 250), 10, False)), 25),
        # filtered before it is batched
        (Source(batches(len([n for n in range(100) if n % 3]), 8)), 9),
        (Source(SystemGroup([30, 10], sys_probs=[0.75, 0.25])), 40),
    ],
)
def test_a_source_counts_optimizer_steps_of_what_the_sampler_yields(source, steps):
    assert source.num_steps == steps


def test_accumulation_comes_from_the_sampler_also_inside_a_loader():
    class Accumulating(BatchSampler):
        grad_accum = 4

    sampler = Accumulating(SequentialSampler(range(96)), 8, False)
    assert Source(sampler).num_steps == 3
    assert Source(DataLoader(range(96), batch_sampler=sampler)).num_steps == 3
    assert Source(sampler, grad_accum=2).num_steps == 6


def test_accumulation_belongs_to_samplers():
    assert SystemGroup([batches(12, 1), batches(4, 1)], grad_accum=4).sizes == (3, 1)
    for counted in (8, SystemGroup([8])):
        with pytest.raises(ValueError, match="grad_accum of the source is 2, but its batches are optimizer steps"):
            Source(counted, grad_accum=2)
    with pytest.raises(ValueError, match="its batches are optimizer steps"):
        resolve_task_schedule([Task("t", [Source(lambda: 8, grad_accum=2)])], num_steps=1)


def test_a_callable_is_resolved_once():
    calls = []

    def count() -> int:
        calls.append(1)
        return 5

    tasks = [Task("a", sources=[Source(count), Source(3)]), Task("b", sources=[2])]
    for policy in ("epoch", "legacy", "epoch"):
        resolve_task_schedule(tasks, policy=policy, num_steps=4)
    assert len(calls) == 1


class NoLength(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("bad", [-1, True, 3.0, "ten", None])
def test_a_workload_that_is_none_raises_at_once(bad):
    with pytest.raises(ValueError, match="batches of the source"):
        Source(bad)


class Says:
    """Its length is what it is told."""

    def __init__(self, length) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    "bad",
    [
        lambda: -2,
        lambda: None,
        lambda: 1.5,
        lambda: np.float64(2),
        lambda: True,
        lambda: (n for n in range(3)),
        lambda: 1 / 0,
        BatchSampler,  # a class, called without arguments
        DataLoader(NoLength()),
        Says(-1),
        Says(2**70),
        Says(2.5),
    ],
)
@pytest.mark.parametrize("policy", ["legacy", "epoch"])
def test_a_workload_without_a_count_raises_with_task_and_source(policy, bad):
    with pytest.raises(ParameterError, match="source 'x' of task 't'"):
        resolve_task_schedule([Task("t", [Source(3), Source(bad, name="x")])], policy, num_steps=1)


@pytest.mark.parametrize(
    ("sources", "epoch_length", "probabilities"),
    [
        ([Source(30), Source(10)], 40, [0.75, 0.25]),  # no probabilities: in proportion, every batch once
        ([Source(30, prob=0.5), Source(10, prob=0.5)], 60, [0.5, 0.5]),
        ([Source(30, prob=3), Source(10, prob=1)], 40, [0.75, 0.25]),  # weights are normalised
        ([Source(30, prob=0.5), Source(6), Source(2)], 60, [0.5, 0.375, 0.125]),  # 6 / 0.375 = 16
        ([Source(3, prob=0.3), Source(7, prob=0.7)], 10, [0.3, 0.7]),  # 3 / 0.3 is 10, not 11
        ([Source(1, prob=1 / 3), Source(2, prob=2 / 3)], 3, [1 / 3, 2 / 3]),
        ([Source(7, prob=0.1)], 7, [1.0]),
        ([Source(10, prob=0.3), Source(10, prob=0.7)], 34, [0.3, 0.7]),  # 33.3 rounded up
        ([Source(0), Source(9)], 9, [0.0, 1.0]),
    ],
)
def test_nominal_epoch_by_hand(sources, epoch_length, probabilities):
    task = Task("t", sources=sources)
    assert task.epoch_length == epoch_length
    assert [float(p) for p in task.probabilities] == pytest.approx(probabilities, abs=1e-15)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([Source(5, prob=0.7), Source(5, prob=0.7), Source(1)], "must sum to at most 1"),
        ([Source(5, prob=1.0), Source(1)], "leave nothing for the others"),
        ([Source(5, prob=0.5), Source(0)], "share the remaining 0.5 have no batches"),
        ([Source(0, prob=0.5), Source(4, prob=0.5)], "source 0 of task 't' is drawn with probability 0.5 and has 0"),
    ],
)
def test_group_probabilities_that_cannot_be_honoured_raise(sources, message):
    with pytest.raises(ParameterError, match=message):
        resolve_task_schedule([Task("t", sources)], num_steps=1)


@pytest.mark.parametrize("prob", [-0.25, math.nan, math.inf, True, "0.5"])
def test_a_bad_group_probability_raises_at_once(prob):
    with pytest.raises(ValueError, match="prob must be"):
        Source(3, prob=prob)


def test_nominal_epoch_is_public_and_exact():
    assert nominal_epoch([10**15, 1], [Fraction(1, 3), Fraction(2, 3)], ["a", "b"]) == 3 * 10**15
