"""States of the multi-task batch sampler: what is refused, and where a pass has ended."""

from __future__ import annotations

import json

import pytest
from test_tasks_sampler import batches, make
from torch.utils.data import BatchSampler, SequentialSampler

from gpusampler.errors import ParameterError
from gpusampler.tasks import MultiTaskBatchSampler, SystemGroup, Task, resolve_task_schedule


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"policy": "legacy"}, "policy"),
        ({"seed": 2}, "seed"),
        ({"draw": "low_discrepancy"}, "draw"),
        ({"model_prob": {"a": 1, "b": 1}}, "policy"),
        ({"sizes": (4, 6)}, "epoch_lengths"),
        ({"names": "ba", "sizes": (4, 6)}, "tasks"),  # the same table, drawn otherwise
    ],
)
def test_a_state_of_another_schedule_is_refused_by_field(other, field):
    def build(sizes=(6, 4), names="ab", **keywords):
        tasks = [Task(name, [batches(size, 1)]) for name, size in zip(names, sizes, strict=True)]
        return MultiTaskBatchSampler(
            resolve_task_schedule(tasks, **{"policy": "epoch", "num_steps": 5, "seed": 1, **keywords})
        )

    state = build().state_dict()
    with pytest.raises(ValueError, match=f"state has {field} "):
        build(**other).load_state_dict(state)
    with pytest.raises(ValueError, match="state has policy_version 2, this schedule has 1"):
        build().load_state_dict({**state, "policy_version": 2})
    with pytest.raises(ValueError, match="state has format None"):
        build().load_state_dict({})
    with pytest.raises(ValueError, match="state must be a mapping"):
        build().load_state_dict(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step of the state must be at least 0, got -1"),
        ({"step": 2.0}, "step of the state must be an int, got 2.0"),
        ({"step": True}, "step of the state must be an int"),
        ({"step": 10**30}, "read . steps of its samplers, but is at step 1000"),
        ({"epoch": 1}, "state has step 3 and micro_batch 0, no place in its epoch 1 of 10 steps"),
        ({"num_steps": 2}, "no place in its epoch 0 of 2 steps"),
        ({"num_steps": None}, "num_steps of the state must be an int"),
        ({"micro_batch": -1}, "micro_batch of the state must be at least 0, got -1"),
        ({"micro_batch": 7}, "state has micro_batch 7, this schedule has grad_accum"),
        ({"read": None}, "state has read of None, this schedule has samplers"),
        ({"read": {"x": 3}}, r"state has read of \['x'\], this schedule has samplers"),
        (
            {"read": {"water/0": 3, "water/1": -1, "alloy/0/0": 1, "alloy/0/1": 0}},
            r"read\['water/1'\] of the state must be",
        ),
        (
            {"read": {"water/0": 9, "water/1": 0, "alloy/0/0": 0, "alloy/0/1": 0}},
            "read 9 steps of its samplers, but is at step 3",
        ),
        ({"samplers": {}}, r"state has samplers of \[\], this schedule has samplers"),
    ],
)
def test_a_state_whose_place_is_none_is_refused_and_moves_nothing(change, message):
    sampler = make(10, draw="low_discrepancy")
    for item in sampler:
        if item.step == 3:
            break
    state = json.loads(
        json.dumps(sampler.state_dict(consumed=sum(1 for i in make(10, draw="low_discrepancy") if i.step < 3)))
    )
    assert (state["step"], state["micro_batch"], state["epoch"]) == (3, 0, 0)
    resumed = make(10, draw="low_discrepancy")
    with pytest.raises(ParameterError, match=message):
        resumed.load_state_dict({**state, **change})
    for key in ("num_steps", "epoch", "step", "micro_batch", "draw_counts", "read", "samplers"):
        with pytest.raises(ParameterError, match=rf"state has no \['{key}'\]"):
            resumed.load_state_dict({k: v for k, v in state.items() if k != key})
    assert list(resumed) == list(make(10, draw="low_discrepancy"))


def test_a_state_after_the_last_item_ends_its_pass():
    whole = list(make(30))
    sampler = make(10)
    passes = [[item for item in whole if item.step // 10 == epoch] for epoch in range(3)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == passes[epoch]
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = make(10)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert resumed.state_dict() == state
        assert list(resumed) == []
        resumed.set_epoch(epoch + 1)
        assert list(resumed) == passes[epoch + 1]
        direct = make(10)
        direct.load_state_dict(state)
        direct.set_epoch(epoch + 1)
        assert list(direct) == passes[epoch + 1]
    longer = make(30)
    longer.load_state_dict(state)
    assert list(longer) == passes[2]


def test_a_sampler_whose_length_changes_after_counting_is_an_error():
    class Growing(BatchSampler):
        more = 0

        def __len__(self) -> int:
            return super().__len__() + self.more

    for wrap in (lambda sampler: sampler, lambda sampler: SystemGroup([sampler])):
        sampler = Growing(SequentialSampler(range(3)), 1, False)
        schedule = resolve_task_schedule([Task("t", [wrap(sampler)])], num_steps=4)
        sampler.more = 1
        with pytest.raises(ParameterError, match="has 4 micro-batches, and had 3 steps of 1 when the schedule counted"):
            MultiTaskBatchSampler(schedule)


def test_loading_an_even_sequence_replays_nothing(monkeypatch):
    def build():
        tasks = [Task(name, [batches(3, 1)]) for name in "abc"]
        weights = {"a": 0.3127, "b": 0.2891, "c": 0.3982}
        return MultiTaskBatchSampler(
            resolve_task_schedule(tasks, num_steps=6000, model_prob=weights, draw="low_discrepancy")
        )

    sampler = build()
    for item in sampler:
        if item.step == 5000:
            break
    state, rest = sampler.state_dict(), list(sampler)
    resumed = build()
    advanced = []
    original = resumed.schedule.draws._advance
    monkeypatch.setattr(resumed.schedule.draws, "_advance", lambda: advanced.append(1) or original())
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert len(advanced) <= 1
    assert len(rest) == 6000
    assert list(resumed) == rest[state["step"] :]


def test_choosing_an_earlier_pass_than_the_loaded_one_says_what_it_forgets():
    sampler = make(10)
    sampler.set_epoch(2)
    next(iter(sampler))
    resumed = make(10)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) forgets the place that was loaded in pass 2"):
        resumed.set_epoch(0)
    assert list(resumed) == list(make(10))
