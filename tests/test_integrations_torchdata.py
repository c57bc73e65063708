"""torchdata's StatefulDataLoader: resume anywhere, with and without workers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from dist_integrations.common import LENGTHS, Rows
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.integrations.torchdata import resume

# torchdata calls it with a torch that has stopped counting
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

WORKERS = [0, 2]


def rows(batch: list[dict[str, Any]]) -> list[int]:
    return [14 * (row["input_ids"][0] - 1) + row["input_ids"][1] - 1 for row in batch]


def make(workers: int, grad_accum: int = 2, **options: Any) -> tuple[GPUBatchRebalanceSampler, StatefulDataLoader]:
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, dp_size=2, grad_accum=grad_accum, rank=1, process_group=None)
    return sampler, StatefulDataLoader(Rows(), batch_sampler=sampler, collate_fn=rows, num_workers=workers, **options)


def bare(epoch: int) -> list[list[int]]:
    sampler, _ = make(0)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (2, {}),
        (2, {"persistent_workers": True}),
        (2, {"persistent_workers": True, "multiprocessing_context": "spawn"}),
    ],
)
def test_l41_every_epoch_has_its_order(workers: int, options: dict[str, Any]):
    sampler, loader = make(workers, **options)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(loader) == bare(epoch)
    assert bare(0) != bare(1) != bare(2)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 7, 8])
def test_l43_l44_resume_twice_in_the_second_epoch(workers: int, stop: int):
    sampler, loader = make(workers)
    sampler.set_epoch(1)
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(stop)]
    assert sampler.state_dict()["consumed"] == stop
    state = loader.state_dict()
    sampler, loader = make(workers)
    assert resume(loader, state) == 1
    iterator = iter(loader)
    more = min(2, 8 - stop)
    taken += [next(iterator) for _ in range(more)]
    assert sampler.state_dict()["consumed"] == stop + more
    state = loader.state_dict()
    sampler, loader = make(workers)
    assert resume(loader, state) == 1
    assert taken + list(loader) == bare(1)
    sampler.set_epoch(2)
    assert list(loader) == bare(2)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (2, {}),
        (1, {"snapshot_every_n_steps": 3}),
        (2, {"snapshot_every_n_steps": 5, "persistent_workers": True, "prefetch_factor": 1}),
    ],
)
@pytest.mark.parametrize("helper", [False, True])
def test_a_finished_epoch_is_followed_by_the_next(workers: int, options: dict[str, Any], helper: bool):
    sampler, loader = make(workers, **options)
    sampler.set_epoch(1)
    list(loader)
    state = loader.state_dict()
    sampler, loader = make(workers, **options)
    if helper:
        assert resume(loader, state) == 2
    else:
        loader.load_state_dict(state)
        sampler.set_epoch(2)
    assert list(loader) == bare(2)
    sampler.set_epoch(3)
    assert list(loader) == bare(3)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("steps", [2, 3])
def test_accumulation_may_change_between_steps(workers: int, steps: int):
    _, loader = make(workers)
    iterator = iter(loader)
    for _ in range(2 * steps):
        next(iterator)
    sampler, more = make(workers, grad_accum=3)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    assert resume(more, state) == 0
    assert state == before
    iterator = iter(more)
    rest = [next(iterator)]
    assert sampler.state_dict()["consumed"] == 3 * steps + 1
    rest += iterator
    fresh, _ = make(0, grad_accum=3)
    assert rest == list(fresh)[3 * steps :]


def test_a_position_in_another_epoch_than_the_chosen_one_is_a_warning():
    sampler, loader = make(0)
    sampler.set_epoch(2)
    next(iter(loader))
    state = loader.state_dict()
    sampler, loader = make(0)
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    with pytest.warns(UserWarning, match=r"a position in epoch 2, but set_epoch chose 1: .* begin with set_epoch\(2\)"):
        assert list(loader) == bare(2)[1:]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_epoch_that_is_set_too_late_is_a_warning(workers: int):
    sampler, loader = make(workers)
    loader.state_dict()  # begins an iteration
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) does not reach the iteration .* goes through epoch 0"):
        sampler.set_epoch(1)
    assert list(loader) == bare(0)
    sampler.set_epoch(2)
    assert list(loader) == bare(2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows())


def test_l25_an_iterable_dataset_is_refused():
    with pytest.raises(ValueError, match="IterableDataset"):
        StatefulDataLoader(Stream(), batch_sampler=make(0)[0])


def test_a_state_that_does_not_fit_is_refused_at_once():
    _, loader = make(0)
    next(iter(loader))
    state = loader.state_dict()
    other = GPUBatchRebalanceSampler(LENGTHS, 12, seed=1, dp_size=2, grad_accum=2, rank=1)
    with pytest.raises(ValueError, match="seed was 42 when the state was saved and is 1 now"):
        resume(StatefulDataLoader(Rows(), batch_sampler=other), state)
    with pytest.raises(ValueError, match="num_workers was 0 when the state was saved and is 2 now"):
        resume(make(2)[1], state)
    _, loader = make(1)
    with pytest.raises(ValueError, match="num_workers was 1 when the state was saved and is 0 now"):
        resume(make(0)[1], loader.state_dict())
    with pytest.raises(ValueError, match="state must be that of a StatefulDataLoader"):
        resume(make(0)[1], {})
    with pytest.raises(ValueError, match="state has no field 'format'"):
        resume(make(0)[1], StatefulDataLoader(Rows(), batch_size=4).state_dict())
    with pytest.raises(TypeError, match="loader must be a StatefulDataLoader"):
        resume(Rows(), state)
