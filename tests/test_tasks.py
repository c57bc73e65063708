"""Tasks: counting batches, nominal epochs and policies, against values computed by hand."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    EmptyTaskError,
    Source,
    SystemGroup,
    Task,
    expected_visits,
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


@pytest.mark.parametrize("bad", [lambda: -2, lambda: None, lambda: 1.5, DataLoader(NoLength())])
def test_a_workload_without_a_count_raises_with_task_and_source(bad):
    with pytest.raises(ValueError, match="source 'x' of task 't'"):
        resolve_task_schedule([Task("t", [Source(3), Source(bad, name="x")])], num_steps=1)


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


@pytest.mark.parametrize(
    "sources", [[], [Source(0)], [Source(0, prob=1.0)], [Source(5, prob=0)], [Source(batches(3, 4, True))]]
)
@pytest.mark.parametrize("policy", ["epoch", "legacy"])
def test_an_empty_task_raises_or_is_excluded_by_name(sources, policy):
    tasks = [Task("full", [Source(4)]), Task("empty", sources)]
    with pytest.raises(EmptyTaskError, match="task 'empty' has no batches to draw"):
        resolve_task_schedule(tasks, policy=policy, num_steps=5)
    for exclude in (["empty"], "empty"):
        schedule = resolve_task_schedule(tasks, policy=policy, num_steps=5, exclude=exclude)
        assert schedule.excluded == ("empty",)
        assert schedule.probabilities == {"full": 1.0}
        assert schedule.epoch_lengths == {"full": 4}


def test_a_task_of_weight_zero_may_be_empty():
    tasks = [Task("full", [Source(4)]), Task("none", [])]
    schedule = resolve_task_schedule(tasks, num_steps=5, model_prob={"full": 1, "none": 0})
    assert schedule.epoch_lengths == {"full": 4, "none": 0}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"policy": "size"}, "policy must be one of 'legacy', 'epoch', got 'size'"),
        ({"policy_version": 2}, "policy_version must be 1, which this release knows, got 2"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"num_steps": 1.5}, "num_steps must be an int"),
        ({"seed": "x"}, "seed must be an int"),
        ({"draw": "sobol"}, "draw must be one of"),
        ({"exclude": ["c"]}, r"exclude names no task: \['c'\]"),
        ({"exclude": 3}, "exclude must be a list of task names"),
        ({"exclude": "a"}, "exclude must be a list of task names"),
        ({"exclude": ["a", "b"]}, "tasks must hold at least one task"),
        ({"num_epoch_dict": {"a": 1, "b": 1}}, "excludes num_steps, got 10"),
        (
            {"num_epoch_dict": {"a": 1, "b": 1}, "num_steps": None, "model_prob": {"a": 1, "b": 1}},
            "excludes model_prob",
        ),
        ({"num_epoch_dict": {"a": 0, "b": 1}, "num_steps": None}, r"num_epoch_dict\['a'\] must be above 0, got 0"),
        (
            {"num_epoch_dict": {"a": -1, "b": 1}, "num_steps": None},
            r"num_epoch_dict\['a'\] must be at least 0.0, got -1",
        ),
        ({"num_epoch_dict": {"a": None, "b": 1}, "num_steps": None}, r"num_epoch_dict\['a'\] must be a number"),
        ({"num_epoch_dict": {"a": 1}, "num_steps": None}, r"missing \['b'\]"),
        ({"process_group": "world"}, "process_group must be"),
    ],
)
def test_bad_arguments_raise(keywords, message):
    with pytest.raises(ValueError, match=message):
        resolve_task_schedule(two(4, 5), **{"num_steps": 10, **keywords})


def test_bad_tasks_raise():
    with pytest.raises(ValueError, match=r"tasks\[0\] and tasks\[2\] have the same name 'a'"):
        resolve_task_schedule([*two(1, 1), Task("a", [1])], num_steps=1)
    with pytest.raises(ValueError, match=r"tasks\[0\] must be a Task, got 'a'"):
        resolve_task_schedule(["a"], num_steps=1)
    with pytest.raises(ValueError, match="name of a task"):
        Task("", [1])
    with pytest.raises(ValueError, match="sources of task 'a' must be a list"):
        Task("a", "water")
    with pytest.raises(ValueError, match="missing"):
        resolve_task_schedule([Task("a", [1], weight=1), Task("b", [1])], num_steps=1)
    with pytest.raises(ValueError, match=r"weight \(of tasks \['a'\]\) excludes"):
        resolve_task_schedule([Task("a", [1], weight=1)], num_steps=1, model_prob={"a": 1})


@pytest.mark.parametrize(
    ("epochs", "steps", "p_a"),
    [
        ({"a": 2, "b": 3}, 230, 200 / 230),
        ({"a": 0.5, "b": 1}, 60, 50 / 60),
        ({"a": 0.1, "b": 0.1}, 11, 10 / 11),  # 0.1 * 110 is 11 steps, not 12
        ({"a": 0.001, "b": 0.01}, 1, 0.5),  # 0.2 steps rounded up
    ],
)
def test_num_epoch_dict_decides_steps_and_probabilities(epochs, steps, p_a):
    schedule = resolve_task_schedule(two(100, 10), num_epoch_dict=epochs)
    assert schedule.num_steps == steps
    assert schedule.probabilities["a"] == pytest.approx(p_a, abs=1e-15)
    assert schedule.policy == "num_epoch_dict"


class Frames:
    """Data that counts frames, as record stores did."""

    def __init__(self, frames: int) -> None:
        self.frames = frames

    def __len__(self) -> int:
        return self.frames

    def __getitem__(self, index: int) -> int:
        return index


class Systems(Frames):
    """Data that counts systems, as folders of arrays did."""

    def get_nsystems(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (Source(DataLoader(Frames(100), batch_size=10)), 100),  # frames of a sized dataset
        (Source(DataLoader(Systems(100), batch_size=10)), 3),  # systems, where the data has them
        (Source(SystemGroup([30, 10])), 2),
        (Source(batches(100, 10)), 10),  # micro-batches of a sampler, its accumulation ignored
        (Source(batches(100, 10), grad_accum=2), 10),
        (Source(100), 1),  # a count has no data: one
        (Source(lambda: 100), 1),
        (Source(100, prob=0), 1),  # a group that is never drawn counts all the same
        (Source(100, legacy_size=42), 42),
    ],
)
def test_legacy_sizes_are_pinned(source, size):
    assert source.legacy_size == size


def test_legacy_is_the_default_and_mixes_units_as_of_old():
    tasks = [
        Task("folders", [Source(DataLoader(Systems(1000), batch_size=2))]),  # 3 systems, 500 steps
        Task("records", [Source(DataLoader(Frames(97), batch_size=10))]),  # 97 frames, 10 steps
    ]
    default = resolve_task_schedule(tasks, num_steps=10)
    assert (default.policy, default.policy_version) == ("legacy", 1)
    assert default.probabilities == {"folders": 0.03, "records": 0.97}
    assert default.table() == resolve_task_schedule(tasks, policy=None, policy_version=None, num_steps=10).table()
    assert default.table() == resolve_task_schedule(tasks, policy="legacy", num_steps=10).table()
    epoch = resolve_task_schedule(tasks, policy="epoch", num_steps=10)
    assert epoch.probabilities == {"folders": 500 / 510, "records": 10 / 510}
    assert (epoch.table()["policy"], epoch.table()["policy_version"]) == ("epoch", 1)


def test_the_budget_may_stay_open_while_planning():
    schedule = resolve_task_schedule(two(3, 1), policy="epoch")
    assert schedule.num_steps is None
    assert schedule.task_at(10**12) in ("a", "b")
    with pytest.raises(ValueError, match="num_steps must be given"):
        expected_visits(schedule)


def test_expected_visits_by_hand():
    tasks = [
        Task("water", [Source(30, prob=0.75), Source(10, prob=0.25), Source(9, prob=0)]),
        Task("alloy", [Source(10)]),
    ]
    rows = expected_visits(resolve_task_schedule(tasks, policy="epoch", num_steps=1000))
    assert [(r.task, r.source, r.batches, r.visits, r.passes) for r in rows] == [
        ("water", None, 40, 800.0, 20.0),
        ("water", 0, 30, 600.0, 20.0),
        ("water", 1, 10, 200.0, 20.0),
        ("water", 2, 0, 0.0, 0.0),
        ("alloy", None, 10, 200.0, 20.0),
    ]
    even = expected_visits(resolve_task_schedule(tasks, policy="epoch", num_steps=1000, draw="low_discrepancy"))
    assert [row.stray for row in even if row.source is None] == [1.0, 1.0]
    assert rows[0].stray == rows[4].stray > 3 * math.sqrt(1000 * 0.8 * 0.2)


def test_stray_bound_holds_in_999_of_1000_runs():
    tasks = two(9, 1)
    bound = expected_visits(resolve_task_schedule(tasks, policy="epoch", num_steps=100))[1].stray
    runs = [resolve_task_schedule(tasks, policy="epoch", num_steps=100, seed=seed) for seed in range(2000)]
    outside = sum(abs(run.count_tasks(0, 100)["b"] - 10) > bound for run in runs)
    assert outside <= 2


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 1.0)), min_size=1, max_size=6),
    st.sampled_from(["epoch", "legacy"]),
)
def test_a_nominal_epoch_sees_every_source_and_no_step_more(groups, policy):
    task = Task("t", [Source(size, prob=p) for size, p in groups])
    schedule = resolve_task_schedule([task], policy=policy, num_steps=1)
    needed = [size / p for (size, _), p in zip(groups, task.probabilities, strict=True)]
    assert schedule.epoch_lengths["t"] + 1e-6 >= max(needed) > schedule.epoch_lengths["t"] - 1


def test_resolving_reads_and_writes_no_global_generator():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    schedule = resolve_task_schedule(two(3, 1), policy="epoch", num_steps=10)
    drawn = [schedule.task_at(step) for step in range(100)]
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert [schedule.task_at(step) for step in range(100)] == drawn


def test_nominal_epoch_is_public_and_exact():
    assert nominal_epoch([10**15, 1], [Fraction(1, 3), Fraction(2, 3)], ["a", "b"]) == 3 * 10**15
