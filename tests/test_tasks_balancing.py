"""The policy over real balancing samplers: lengths, accumulation, epochs, resume, and processes that share plans."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.tasks import (
    MultiTaskBatchSampler,
    Source,
    Task,
    array_systems,
    expected_visits,
    make_source,
    resolve_task_schedule,
)
from gpusampler.tasks.reader import SamplerReader


def lengths(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 512, count)


def balancing(count: int, batch: int, *, rank: int = 0, seed: int = 42, drop_last: bool = False, **keywords):
    options = {"dp_size": 2, "grad_accum": 2, "process_group": None, **keywords}
    return GPUBatchRebalanceSampler(lengths(count, count), batch, rank=rank, seed=seed, drop_last=drop_last, **options)


def tasks_of(rank: int = 0, **keywords) -> list[Task]:
    return [
        Task(
            "water",
            [
                Source(balancing(52, 8, rank=rank, **keywords), prob=0.5),
                Source(balancing(37, 16, rank=rank, **keywords), prob=0.5),
            ],
        ),
        Task("alloy", [Source(balancing(64, 16, rank=rank, **keywords))]),
    ]


def make(num_steps: int = 40, rank: int = 0, **keywords) -> MultiTaskBatchSampler:
    return MultiTaskBatchSampler(resolve_task_schedule(tasks_of(rank), "epoch", num_steps, seed=2, **keywords))


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 7), (True, 6)])
@pytest.mark.parametrize(("dp_size", "grad_accum"), [(1, 1), (2, 2), (4, 2)])
def test_a_source_counts_optimizer_steps_with_tails(drop_last, steps, dp_size, grad_accum):
    sampler = balancing(50, 8, drop_last=drop_last, dp_size=dp_size, grad_accum=grad_accum)
    assert Source(sampler).num_steps == steps
    assert Source(DataLoader(range(50), batch_sampler=sampler)).num_steps == steps
    assert len(sampler) == steps * grad_accum


def test_nominal_epochs_by_hand():
    schedule = resolve_task_schedule(tasks_of(), "epoch", num_steps=2200)
    # water: 52 in batches of 8 are 7 steps, 37 in 16 are 3, at one half each 14; alloy: 4
    assert schedule.epoch_lengths == {"water": 14, "alloy": 4}
    assert schedule.probabilities == {"water": 14 / 18, "alloy": 4 / 18}
    assert [row.visits for row in expected_visits(schedule, 1800) if row.source is None] == [1400.0, 400.0]


def test_arrays_through_balancing_samplers():
    systems = array_systems({"a": lengths(50, 1), "b": lengths(33, 2)})
    source = make_source(systems, lambda kept: balancing(len(kept), 8), auto_prob="prob_uniform")
    assert source.num_steps == 14  # 7 and 5 steps, half each
    with pytest.raises(ValueError, match="system 'b' with 33 frames"):
        len(
            make_source(
                systems, lambda kept: GPUBatchRebalanceSampler(kept, 64 if len(kept) < 50 else 8, process_group=None)
            ).workload
        )


def test_ranks_take_the_parts_of_one_global_batch_and_epochs_advance_apart():
    ranks = [list(make(rank=rank)) for rank in (0, 1)]
    assert [(i.step, i.task, i.source) for i in ranks[0]] == [(i.step, i.task, i.source) for i in ranks[1]]
    assert len(ranks[0]) == len(make()) == 80
    sizes = {("water", 0): (52, 7), ("water", 1): (37, 3), ("alloy", 0): (64, 4)}
    for key, (count, steps) in sizes.items():
        both = [[item for item in rank if (item.task, item.source) == key] for rank in ranks]
        epochs = len(both[0]) // (2 * steps)
        assert epochs >= 2
        seen = []
        for epoch in range(epochs):
            part = [item for rank in both for item in rank[epoch * 2 * steps : (epoch + 1) * 2 * steps]]
            drawn = Counter(index for item in part for index in item.indices)
            assert drawn == Counter(range(count)), (key, epoch)
            seen.append(sorted(frozenset(item.indices) for item in part))
        assert seen[0] != seen[1]


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
def test_resume_is_exact_at_every_step_and_inside_one(draw):
    whole = list(make(draw=draw))
    sampler = make(draw=draw)
    for taken, _ in enumerate(sampler, start=1):
        if taken in (1, 2, 11, 28, 29, 50, 79, 80):
            resumed = make(draw=draw)
            resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
            if taken < 80:
                assert list(resumed) == whole[taken:], taken
                again = make(draw=draw)
                again.load_state_dict(sampler.state_dict(consumed=taken))
                assert list(again) == whole[taken:], taken


def test_ranks_and_accumulation_may_change_between_steps():
    def build(rank, **keywords):
        return MultiTaskBatchSampler(resolve_task_schedule(tasks_of(rank, **keywords), "epoch", 40, seed=2))

    def samples(items):
        steps: dict[int, list[int]] = {}
        for item in items:
            steps.setdefault(item.step, []).extend(item.indices)
        return {step: sorted(indices) for step, indices in steps.items()}

    whole = samples([item for rank in (0, 1) for item in build(rank)])
    two = [build(rank) for rank in (0, 1)]
    iterators = [iter(sampler) for sampler in two]
    head = [next(iterator) for iterator in iterators for _ in range(2 * 23)]
    states = [sampler.state_dict() for sampler in two]
    assert states[0] == states[1]
    one = build(0, dp_size=1, grad_accum=4)
    one.load_state_dict(states[0])
    rest = list(one)
    assert len(rest) == 4 * 17
    assert samples(head) | samples(rest) == whole
    next(iterators[0])
    with pytest.raises(ValueError, match="dp_size was 2 when the state was saved and is 1 now"):
        build(0, dp_size=1, grad_accum=4).load_state_dict(two[0].state_dict())


def test_a_loader_that_reads_ahead_restores_without_replanning():
    sampler = make()
    loader = iter(DataLoader(Items(), sampler=sampler, batch_size=None, num_workers=2, prefetch_factor=3))
    head = [next(loader) for _ in range(29)]
    state = sampler.state_dict()
    assert None in state["samplers"].values()
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert [(item.task, item.indices) for item in make()] == [tuple(item) for item in head] + list(resumed)


class Items:
    """A dataset that gives back the pair it is indexed with."""

    def __getitem__(self, item):
        return item.task, list(item.indices)


def test_a_balancing_sampler_is_taken_to_a_place_without_iterating(monkeypatch):
    reference = SamplerReader(balancing(52, 8), "a")
    expected = [reference.next() for _ in range(40)][37]
    reader = SamplerReader(balancing(52, 8), "a")
    planned = []
    plan_chunk = reader.sampler._plan_chunk
    monkeypatch.setattr(
        reader.sampler, "_plan_chunk", lambda *place, **more: planned.append(place) or plan_chunk(*place, **more)
    )
    reader.seek(37)
    assert reader.next() == expected
    assert planned[0][:2] == (2, 4)  # epoch 2, step 4: 37 is 2 * 14 + 4 * 2 + 1


def test_a_state_of_other_data_is_refused():
    state = make().state_dict()
    changed = [
        Task(t.name, [Source(balancing(52, 8, seed=7), prob=0.5), t.sources[1]] if t.name == "water" else t.sources)
        for t in tasks_of()
    ]
    other = MultiTaskBatchSampler(resolve_task_schedule(changed, "epoch", 40, seed=2))
    with pytest.raises(ValueError, match="seed"):
        other.load_state_dict(state)


def test_a_command_line_configuration_builds_balancing_samplers(tmp_path):
    from gpusampler.tasks import schedule_from_config

    np.save(tmp_path / "lengths.npy", lengths(50, 1))
    options = {"effective_batch_size": 8, "dp_size": 2, "grad_accum": 2, "drop_last": False}
    config = {
        "policy": "epoch",
        "tasks": {"a": [{"lengths": "lengths.npy", "sampler": options}], "b": [{"batches": 3}]},
    }
    assert schedule_from_config(config, tmp_path).epoch_lengths == {"a": 7, "b": 3}
