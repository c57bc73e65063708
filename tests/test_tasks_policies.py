"""Policies: exclusion, bad arguments, epochs, legacy sizes, expectations."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from gpusampler.errors import ParameterError
from gpusampler.tasks import EmptyTaskError, Source, SystemGroup, Task, expected_visits, resolve_task_schedule


def batches(frames: int, size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(frames)), size, drop_last)


def two(a: int, b: int) -> list[Task]:
    return [Task("a", sources=[Source(a)]), Task("b", sources=[Source(b)])]


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
    message = r"weight must be given for every task or for none: \['a'\] have one, \['b'\] not"
    with pytest.raises(ValueError, match=message):
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


HUGE = 10**400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve_task_schedule(None, num_steps=1), "tasks must be a list of Task, got None"),
        (lambda: resolve_task_schedule(two(1, 1), num_steps=HUGE), "num_steps must be at most 9223372036854775807"),
        (
            lambda: resolve_task_schedule(two(1, 1), num_steps=-(10**5000)),
            "num_steps must be at least 1, got a value of",
        ),
        (
            lambda: resolve_task_schedule(two(1, 1), model_prob={"a": HUGE, "b": 1}),
            r"model_prob\['a'\] must be at most 1.8",
        ),
        (
            lambda: resolve_task_schedule(two(1, 1), num_epoch_dict={"a": HUGE, "b": 1}),
            r"num_epoch_dict\['a'\] must be",
        ),
        (
            lambda: resolve_task_schedule(two(1, 1), exclude=[["a"]]),
            r"exclude\[0\] must be the name of a task, got \['a'\]",
        ),
        (
            lambda: resolve_task_schedule(two(1, 1), exclude=["c", None]),
            r"exclude\[1\] must be the name of a task, got None",
        ),
        (lambda: resolve_task_schedule(two(1, 1), policy_version=True), "policy_version must be an int, got True"),
        (lambda: resolve_task_schedule(two(1, 1), policy_version=1.0), "policy_version must be an int, got 1.0"),
        (lambda: Task("\ud800", [1]), "name of a task must be text that UTF-8 can hold, got '"),
        (lambda: Source(3, name=5), "name of a source must be a string, got 5"),
        (lambda: Source({"a": 1}), "batches of the source must be an int, a sampler"),
        (lambda: Source(HUGE), "batches of the source must be at most"),
        (lambda: Source(3, prob=HUGE), "prob must be at most 1.8e308"),
        (
            lambda: Task("t", [Source(1, prob=1e308), Source(1, prob=1e308), 1]).epoch_length,
            "must sum to at most 1, got 1.79",
        ),
        (lambda: expected_visits(resolve_task_schedule(two(1, 1)), HUGE), "num_steps must be at most"),
    ],
)
def test_hostile_arguments_raise_with_their_name(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, ParameterError)


@pytest.mark.parametrize("bad", [-1, math.nan, HUGE, "x", None])
@pytest.mark.parametrize("keyword", ["model_prob", "num_epoch_dict"])
def test_values_of_excluded_tasks_are_checked_too(keyword, bad):
    with pytest.raises(ParameterError, match=rf"{keyword}\['b'\] must be"):
        resolve_task_schedule(two(1, 1), exclude=["b"], **{keyword: {"a": 1, "b": bad}})
    assert resolve_task_schedule(two(1, 1), exclude=["b"], **{keyword: {"a": 1, "b": 2}}).probabilities == {"a": 1.0}


def test_a_callable_that_raises_is_named_and_kept_as_the_cause():
    def broken() -> int:
        return {}["no such key"]

    with pytest.raises(
        ParameterError, match="source 0 of task 't': the callable of the source raised KeyError"
    ) as caught:
        resolve_task_schedule([Task("t", [broken])], num_steps=1)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


def test_float32_weights_mean_the_decimals_they_print():
    low, high = np.float32(0.1), np.float32(0.9)
    assert Task("t", [Source(1, prob=low), Source(9, prob=high)]).epoch_length == 10
    assert SystemGroup([1, 9], sys_probs=np.array([0.1, 0.9], dtype=np.float32)).num_steps == 10
    assert resolve_task_schedule(two(1, 1), model_prob={"a": low, "b": high}).probabilities == {"a": 0.1, "b": 0.9}
    assert resolve_task_schedule(two(100, 10), num_epoch_dict={"a": low, "b": low}).num_steps == 11
    weighted = [Task("a", [1], weight=low), Task("b", [1], weight=np.float16(0.9))]
    assert resolve_task_schedule(weighted).probabilities == {"a": 0.1, "b": 0.9}
