"""The multi-task batch sampler over real samplers: order, epochs, resume."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from gpusampler.tasks import MultiTaskBatchSampler, Source, SystemGroup, Task, TaskBatch, resolve_task_schedule


def batches(frames: int, size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(frames)), size, False)


class Shuffled(BatchSampler):
    """A real sampler that reshuffles each epoch, with accumulation."""

    grad_accum = 2

    def __init__(self, frames: int, size: int) -> None:
        super().__init__(DistributedSampler(range(frames), 1, 0, seed=3), size, False)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


def make(num_steps: int = 30, **keywords) -> MultiTaskBatchSampler:
    tasks = [
        Task("water", [Source(Shuffled(12, 2), prob=0.75), Source(batches(3, 1), prob=0.25), Source(7, prob=0)]),
        Task("alloy", [SystemGroup([batches(4, 2), batches(2, 1)])]),
    ]
    return MultiTaskBatchSampler(resolve_task_schedule(tasks, "epoch", num_steps, seed=1, **keywords))


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
def test_every_step_reads_the_source_that_the_schedule_draws(draw):
    sampler = make(draw=draw)
    items = list(sampler)
    assert len(items) == len(sampler)
    steps = [item.step for item in items]
    assert sorted(set(steps)) == list(range(30))
    assert steps == sorted(steps)
    for step, count in Counter(steps).items():
        drawn = sampler.schedule.draw_at(step)
        assert count == (2 if drawn == (0, 0, None) else 1)
        assert {(i.task, i.source, i.system) for i in items if i.step == step} == {
            (sampler.schedule.task_at(step), drawn.source, drawn.system)
        }


def test_items_are_pairs():
    for item in make():
        task, indices = item
        assert (task, indices) == (item.task, item.indices) == item
        assert all(type(index) is int for index in indices)
        copy = pickle.loads(pickle.dumps(item))
        assert (copy, copy.step, copy.source, copy.system) == (item, item.step, item.source, item.system)
    assert repr(TaskBatch("a", [1], 0, 0, None)) == "('a', [1])"


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
def test_epochs_of_each_sampler_advance_by_themselves(draw):
    read: dict[tuple, list] = {}
    for item in make(200, draw=draw):
        read.setdefault((item.task, item.source, item.system), []).append(item.indices)
    assert read.keys() == {("water", 0, None), ("water", 1, None), ("alloy", 0, 0), ("alloy", 0, 1)}
    shuffled = Shuffled(12, 2)
    whole = []
    for epoch in range(60):
        shuffled.set_epoch(epoch)
        whole += list(shuffled)
    assert len({str(whole[i : i + 6]) for i in range(0, 60, 6)}) == 10
    water = read["water", 0, None]
    assert len(water) > 60
    assert water == whole[: len(water)]
    for key, expected in (
        (("water", 1, None), [[0], [1], [2]]),
        (("alloy", 0, 0), [[0, 1], [2, 3]]),
        (("alloy", 0, 1), [[0], [1]]),
    ):
        assert len(read[key]) > 6
        assert read[key] == (expected * 200)[: len(read[key])]


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
@pytest.mark.parametrize("taken", [0, 1, 2, 7, 30, 43])
def test_resume_is_exact_at_every_micro_batch(draw, taken):
    whole = list(make(draw=draw))
    assert len(whole) > 43
    first = make(draw=draw)
    iterator = iter(first)
    head = [next(iterator) for _ in range(taken)]
    state = json.loads(json.dumps(first.state_dict()))
    resumed = make(draw=draw)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    rest = list(resumed)
    assert head + rest == whole
    assert [item.step for item in head + rest] == [item.step for item in whole]
    assert list(resumed) == whole  # once: the next iteration is the whole pass


def test_systems_accumulate_too():
    group = SystemGroup([batches(6, 1), batches(12, 1)], grad_accum=3)
    sampler = MultiTaskBatchSampler(resolve_task_schedule([Task("t", [group])], num_steps=6))
    items = list(sampler)
    assert [item.step for item in items] == [step for step in range(6) for _ in range(3)]
    assert len(sampler) == 18
    for system, frames in ((0, 6), (1, 12)):
        read = [item.indices[0] for item in items if item.system == system]
        assert read == [i % frames for i in range(len(read))]


def test_passes_follow_each_other_and_are_functions_of_their_number():
    sampler = make(10)
    passes = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        passes.append(list(sampler))
        assert len(sampler) == len(passes[-1])
    assert [item for one in passes for item in one] == list(make(30))
    sampler.set_epoch(1)
    assert list(sampler) == passes[1]
    fresh = make(10)
    fresh.set_epoch(2)
    assert list(fresh) == passes[2]
    abandoned = make(10)
    next(iter(abandoned))
    assert list(abandoned) == passes[0]


def test_a_state_in_a_later_pass_and_a_longer_budget():
    whole = list(make(40))
    sampler = make(10)
    first_pass = list(sampler)
    sampler.set_epoch(1)
    iterator = iter(sampler)
    head = [next(iterator) for _ in range(5)]
    state = sampler.state_dict()
    same, longer = make(10), make(40)
    same.load_state_dict(state)
    assert head + list(same) == head + list(iterator) == [item for item in whole if 10 <= item.step < 20]
    longer.load_state_dict(state)
    assert list(longer) == whole[len(first_pass) + 5 :]


def test_another_pass_after_a_load_starts_at_its_beginning():
    sampler = make(10)
    next(iter(sampler))
    resumed = make(10)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == [item for item in make(20) if item.step >= 10]


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
@pytest.mark.parametrize("taken", [0, 3, 6, 17])
@pytest.mark.parametrize("counted", [True, False])
def test_a_loader_that_reads_ahead_resumes_at_what_was_consumed(draw, taken, counted):
    whole = [(item.task, sum(item.indices), item.step) for item in make(draw=draw)]
    sampler = make(draw=draw)
    iterator = iter(DataLoader(Pairs(), sampler=sampler, batch_size=None, num_workers=2, prefetch_factor=2))
    head = [tuple(next(iterator)) for _ in range(taken)]
    state = json.loads(json.dumps(sampler.state_dict() if counted else sampler.state_dict(consumed=taken)))
    resumed = make(draw=draw)
    resumed.load_state_dict(state)
    middle_loader = iter(DataLoader(Pairs(), sampler=resumed, batch_size=None, num_workers=2, prefetch_factor=2))
    middle = [tuple(next(middle_loader)) for _ in range(5)]
    last = make(draw=draw)
    last.load_state_dict(resumed.state_dict())
    rest = [tuple(item) for item in DataLoader(Pairs(), sampler=last, batch_size=None)]
    assert head + middle + rest == whole
    with pytest.raises(ValueError, match="consumed must be at most what this pass handed out, got 1000"):
        sampler.state_dict(consumed=1000)


def test_what_was_consumed_equals_what_was_handed_out_where_nothing_reads_ahead():
    sampler = make(10)
    sampler.set_epoch(1)
    for taken, _ in enumerate(sampler, start=1):
        assert sampler.state_dict() == sampler.state_dict(consumed=taken)


def test_a_chosen_pass_is_in_the_state_before_it_begins():
    sampler = make(10)
    list(sampler)
    sampler.set_epoch(3)
    resumed = make(10)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == [item for item in make(40) if item.step >= 30]


def test_accumulation_may_change_between_steps():
    def build(grad_accum):
        tasks = [Task("a", [Source(batches(24, 1), grad_accum=grad_accum)]), Task("b", [Source(batches(3, 1))])]
        return MultiTaskBatchSampler(resolve_task_schedule(tasks, num_steps=20, model_prob={"a": 3, "b": 1}))

    def halved(grad_accum):  # the same steps of 4 frames, in micro-batches of 1 or 2
        size = 4 // grad_accum
        tasks = [Task("a", [Source(batches(24, size), grad_accum=grad_accum)]), Task("b", [batches(3, 1)])]
        return MultiTaskBatchSampler(resolve_task_schedule(tasks, num_steps=20, model_prob={"a": 3, "b": 1}))

    def by_step(items):
        steps = {}
        for item in items:
            steps.setdefault((item.step, item.task), []).extend(item.indices)
        return steps

    first = halved(4)
    iterator = iter(first)
    head = []
    while len({item.step for item in head}) < 7 or first.state_dict()["micro_batch"]:
        head.append(next(iterator))
    second = halved(2)
    second.load_state_dict(first.state_dict())
    assert by_step(head) | by_step(second) == by_step(halved(1))
    while first.state_dict()["micro_batch"] != 2:
        next(iterator)
    with pytest.raises(ValueError, match="state has micro_batch 2, this schedule has grad_accum 1 there"):
        halved(1).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="state has epoch_lengths"):
        build(2).load_state_dict(build(1).state_dict())


def test_what_cannot_be_iterated_is_refused():
    def build(*sources, num_steps=3):
        return MultiTaskBatchSampler(resolve_task_schedule([Task("t", sources)], "epoch", num_steps))

    with pytest.raises(ValueError, match="t/1 must be a sampler to be iterated, got 5"):
        build(batches(3, 1), 5)
    with pytest.raises(ValueError, match="t/0/1 must be a sampler to be iterated, got 2"):
        build(SystemGroup([batches(3, 1), 2]))
    with pytest.raises(ValueError, match="t/0 has 3 micro-batches, not a positive multiple of its grad_accum 2"):
        build(Source(batches(3, 1), grad_accum=2))
    with pytest.raises(ValueError, match="must have a step budget"):
        build(batches(3, 1), num_steps=None)
    shared = batches(3, 1)
    with pytest.raises(ValueError, match="t/0 and t/1 share one sampler"):
        build(shared, shared)
    with pytest.raises(ValueError, match="schedule must be a TaskSchedule"):
        MultiTaskBatchSampler([Task("t", [shared])])


def test_a_callable_may_return_the_sampler():
    task = Task("t", [lambda: batches(3, 1)])
    assert list(MultiTaskBatchSampler(resolve_task_schedule([task], num_steps=4))) == [("t", [i]) for i in (0, 1, 2, 0)]


@pytest.mark.parametrize(
    ("frames", "message"), [(2, "ended epoch 0 after 2 of 3"), (4, "yields more than its length of 3")]
)
def test_a_sampler_whose_length_is_not_what_it_yields_is_an_error(frames, message):
    class Lying(BatchSampler):
        def __len__(self) -> int:
            return 3

    sampler = Lying(SequentialSampler(range(frames)), 1, False)
    with pytest.raises(RuntimeError, match=f"t/0 {message}"):
        list(MultiTaskBatchSampler(resolve_task_schedule([Task("t", [sampler])], num_steps=9)))


class Pairs:
    """A dataset that is indexed with the pair."""

    def __getitem__(self, item: TaskBatch) -> tuple[str, int, int]:
        task, indices = item
        return task, sum(indices), item.step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_real_loader_delivers_the_pairs_in_order(num_workers):
    sampler = make()
    loader = DataLoader(Pairs(), sampler=sampler, batch_size=None, num_workers=num_workers)
    assert len(loader) == len(sampler)
    assert [tuple(item) for item in loader] == [(item.task, sum(item.indices), item.step) for item in make()]
