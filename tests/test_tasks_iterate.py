"""One pass of the multi-task batch sampler: who may read, what a loader with its own state keeps, what states cost."""

from __future__ import annotations

import json

import pytest
from test_tasks_sampler import Pairs, batches, make
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpusampler.tasks import MultiTaskBatchSampler, Source, Task, resolve_task_schedule

# torchdata calls it with a torch that has stopped counting
torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def passes(number: int, **keywords) -> list[list[tuple]]:
    """Items of the first passes of 10 steps, as `Pairs` delivers them."""
    items = list(make(10 * number, **keywords))
    return [[(i.task, sum(i.indices), i.step) for i in items if i.step // 10 == epoch] for epoch in range(number)]


def stateful(workers: int, **keywords) -> tuple[MultiTaskBatchSampler, StatefulDataLoader]:
    sampler = make(10, **keywords)
    return sampler, StatefulDataLoader(Pairs(), sampler=sampler, batch_size=None, num_workers=workers, collate_fn=tuple)


@torchdata
@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_twice_in_a_later_pass_by_its_own_state(draw, workers):
    _, second, third = passes(3, draw=draw)
    steps = [step for _, _, step in second] + [20]
    for stop in (0, 1, 4, len(second) - 2):
        sampler, loader = stateful(workers, draw=draw)
        sampler.set_epoch(1)
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(stop)]
        for more in (2, 0):
            state = loader.state_dict()
            sampler, loader = stateful(workers, draw=draw)
            loader.load_state_dict(state)
            iterator = iter(loader)
            taken += [next(iterator) for _ in range(more)]
            place = sampler.state_dict()
            assert (place["epoch"], place["step"]) == (1, steps[len(taken)])
        own = make(10, draw=draw)
        own.load_state_dict(json.loads(json.dumps(place)))
        assert [(i.task, sum(i.indices), i.step) for i in own] == second[len(taken) :]
        assert taken + list(iterator) == second
        sampler.set_epoch(2)
        assert list(loader) == third


@torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_pass_of_torchdata_is_followed_by_the_one_that_is_chosen(workers):
    sampler, loader = stateful(workers)
    assert list(loader) == passes(1)[0]
    state = loader.state_dict()
    sampler, loader = stateful(workers)
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(loader) == passes(2)[1]


def test_an_iteration_ends_when_another_begins_or_a_state_is_loaded():
    whole = list(make())
    sampler = make()
    first = iter(sampler)
    assert next(first) == whole[0]
    unused = iter(sampler)  # begins with its first item, as loaders ask for more iterators than they use
    assert next(first) == whole[1]
    assert next(unused) == whole[0]
    with pytest.raises(RuntimeError, match="another iteration has begun"):
        next(first)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="or a state was loaded"):
        next(unused)
    ended = iter(sampler)
    assert list(ended) == whole[1:]
    assert list(sampler) == whole
    assert list(ended) == []


def test_the_state_of_a_chosen_pass_is_its_start_wherever_the_samplers_are():
    whole = passes(3)
    sampler = make(10)
    list(sampler)
    for epochs in ((1, 0), (1,), (2, 0, 1), (2,)):
        for epoch in epochs:
            sampler.set_epoch(epoch)
        for state in (sampler.state_dict(), sampler.state_dict(consumed=0)):
            resumed = make(10)
            resumed.load_state_dict(state)
            assert [(i.task, sum(i.indices), i.step) for i in resumed] == whole[epochs[-1]]
    iterator = iter(sampler)
    next(iterator)
    rest = list(iterator)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(0)  # the running pass is read to its end; asking for a state moves nothing
    assert sampler.state_dict()["step"] == 0
    assert list(iterator) == rest


def test_lightning_may_not_deal_the_items_out():
    wrapper = pytest.importorskip("lightning.fabric.utilities.distributed").DistributedSamplerWrapper
    sampler = make()
    loader = DataLoader(Pairs(), sampler=wrapper(sampler, num_replicas=2, rank=0), batch_size=None)
    with pytest.raises(ValueError, match="set use_distributed_sampler=False"):
        list(loader)
    assert list(sampler) == list(make())


def test_beginning_a_pass_again_counts_no_draws_before_it(monkeypatch):
    sampler = make(10)
    sampler.set_epoch(30)
    whole = list(sampler)
    assert whole == [item for item in make(310) if item.step >= 300]
    iterator = iter(sampler)
    next(iterator)
    drawn, draw_at = [], type(sampler.schedule).draw_at
    monkeypatch.setattr(type(sampler.schedule), "draw_at", lambda self, step: drawn.append(step) or draw_at(self, step))
    assert list(sampler) == whole
    assert 0 < len(drawn) < 40
    assert min(drawn) == 300


@torchdata
def test_states_at_every_item_replay_nothing(monkeypatch):
    weights = {"a": 0.3127, "b": 0.2891, "c": 0.3982}
    tasks = [Task(name, [Source(batches(6, 1), grad_accum=2)]) for name in weights]
    schedule = resolve_task_schedule(tasks, num_steps=500, model_prob=weights, draw="low_discrepancy")
    sampler = MultiTaskBatchSampler(schedule)
    advanced, drawn = [], []
    advance, draw_at = schedule.draws._advance, type(schedule).draw_at
    monkeypatch.setattr(schedule.draws, "_advance", lambda: advanced.append(1) or advance())
    monkeypatch.setattr(type(schedule), "draw_at", lambda self, step: drawn.append(1) or draw_at(self, step))
    loader = StatefulDataLoader(Pairs(), sampler=sampler, batch_size=None, num_workers=1)
    assert sum(1 for _ in loader) == 1000
    assert len(advanced) <= 501
    assert len(drawn) < 4 * 1000
