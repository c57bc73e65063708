"""Planning ahead: the same chunks whatever the timing, errors at their place, no thread left behind."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpusampler import CostModel, GPUBatchRebalanceSampler
from gpusampler.pipeline import PlanAhead


def starts(count: int) -> Iterator[tuple[int, int]]:
    return iter([(step, 1) for step in range(count)])


def planning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpusampler-plan")]


def threads_end(seconds: float = 10.0) -> bool:
    """Whether all planning threads end within some time."""
    deadline = time.monotonic() + seconds
    while planning_threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    return not planning_threads()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    assert threads_end()
    yield
    assert threads_end()


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_every_chunk_once_in_order(count: int, depth: int):
    calls: list[int] = []

    def plan(step: int, size: int) -> Any:
        calls.append(step)
        return step, size

    assert list(PlanAhead(starts(count), plan, depth=depth)) == [(step, 1) for step in range(count)]
    assert calls == list(range(count))


@pytest.mark.parametrize("seed", range(3))
def test_timing_does_not_matter(seed: int):
    draw = random.Random(seed)
    delays = [draw.choice([0, 0, 0.01]) for _ in range(24)]

    def plan(step: int, size: int) -> Any:
        time.sleep(delays[step])
        return step

    got = []
    for chunk in PlanAhead(starts(24), plan, depth=1 + seed):
        time.sleep(draw.choice([0, 0, 0.01]))
        got.append(chunk)
    assert got == list(range(24))


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_chunks_are_planned_ahead(depth: int):
    planned: list[int] = []
    reached = threading.Semaphore(0)

    def plan(step: int, size: int) -> Any:
        planned.append(step)
        reached.release()
        return step

    chunks = PlanAhead(starts(10), plan, depth=depth)
    assert planned == []
    for step in range(4):
        assert next(chunks) == step
        while len(planned) < step + 1 + depth:
            assert reached.acquire(timeout=10)
        time.sleep(0.02)  # time enough for one too many
        assert planned == list(range(step + 1 + depth))
    chunks.close()


def test_only_the_first_chunk_is_planned_by_the_caller():
    chunks = list(PlanAhead(starts(4), lambda step, size: threading.current_thread()))
    assert chunks[0] is threading.current_thread()
    assert {thread.name for thread in chunks[1:]} == {"gpusampler-plan_0"}


@pytest.mark.parametrize("depth", [1, 2, 10])
@pytest.mark.parametrize("bad", [0, 1, 2, 5])
def test_an_error_is_raised_at_its_chunk(bad: int, depth: int):
    def plan(step: int, size: int) -> Any:
        if step == bad:
            raise KeyError(f"step {step}")
        return step

    chunks = PlanAhead(starts(6), plan, depth=depth)
    assert [next(chunks) for _ in range(bad)] == list(range(bad))
    with pytest.raises(KeyError, match=f"step {bad}"):
        next(chunks)
    assert threads_end()
    assert list(chunks) == []


def test_close_ends_the_thread_and_may_be_called_again():
    chunks = PlanAhead(starts(100), lambda step, size: step)
    next(chunks)
    assert len(planning_threads()) == 1
    chunks.close()
    assert threads_end()
    chunks.close()


def test_a_chunk_in_the_making_does_not_block_close():
    started, go_on = threading.Event(), threading.Event()

    def plan(step: int, size: int) -> Any:
        if step == 1:
            started.set()
            go_on.wait(10)
        return step

    chunks = PlanAhead(starts(5), plan)
    next(chunks)
    assert started.wait(10)
    before = time.monotonic()
    chunks.close()
    assert time.monotonic() - before < 5
    go_on.set()
    assert threads_end()


# through the sampler


LENGTHS = [1 + i * 37 % 101 for i in range(240)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("plan_ahead", [1, 2, 3, 7, 1000, None])
def test_results_do_not_depend_on_the_chunk_size(plan_ahead: int | None, drop_last: bool):
    options: dict[str, Any] = {"dp_size": 2, "grad_accum": 3, "rank": 1, "drop_last": drop_last}
    sampler = GPUBatchRebalanceSampler(LENGTHS, 16, plan_ahead=plan_ahead, **options)
    assert list(sampler) == list(GPUBatchRebalanceSampler(LENGTHS, 16, plan_ahead=1, **options))


def test_results_do_not_depend_on_the_speed_of_planning():
    def slow_cost(lengths: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002 * (int(lengths.sum()) % 3))
        return lengths

    options: dict[str, Any] = {"dp_size": 2, "grad_accum": 2, "rank": 0, "plan_ahead": 2}
    slow = GPUBatchRebalanceSampler(LENGTHS, 16, cost=CostModel(cost_fn=slow_cost), **options)
    fast = GPUBatchRebalanceSampler(LENGTHS, 16, cost=CostModel(cost_fn=lambda n: n), **options)
    assert list(slow) == list(fast)


class Trap:
    """A cost function that fails for rows that hold a length of 50, once it is set."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        if self.set and bool((lengths == 50).any()):
            raise RuntimeError("trapped")
        return lengths


@pytest.mark.parametrize(("plan_ahead", "reached"), [(1, 20), (3, 18), (100, 0)])
def test_a_failing_plan_surfaces_in_the_training_loop(plan_ahead: int, reached: int):
    lengths = [1] * 80 + [50] * 4 + [1] * 20  # step 20 of four samples
    trap = Trap()
    sampler = GPUBatchRebalanceSampler(
        lengths, 4, grad_accum=2, shuffle=False, cost=CostModel(cost_fn=trap), plan_ahead=plan_ahead
    )
    trap.set = True
    iterator = iter(sampler)
    assert sum(map(len, itertools.islice(iterator, reached * 2))) == reached * 4
    with pytest.raises(RuntimeError, match="trapped"):
        next(iterator)
    assert threads_end()


def _leave_by_break(sampler: GPUBatchRebalanceSampler) -> None:
    for _ in sampler:
        break


def _leave_by_error(sampler: GPUBatchRebalanceSampler) -> None:
    def train() -> None:
        for _ in sampler:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def _drop_the_iterator(sampler: GPUBatchRebalanceSampler) -> None:
    iterator = iter(sampler)
    next(iterator)
    assert planning_threads()
    del iterator


def _never_start(sampler: GPUBatchRebalanceSampler) -> None:
    iter(sampler)


def _exhaust(sampler: GPUBatchRebalanceSampler) -> None:
    list(sampler)


def _two_at_once(sampler: GPUBatchRebalanceSampler) -> None:
    first, second = iter(sampler), iter(sampler)
    assert [next(first), next(first)] == [next(second), next(second)]


def _through_a_loader(sampler: GPUBatchRebalanceSampler) -> None:
    for _ in DataLoader(range(len(LENGTHS)), batch_sampler=sampler):
        break


@pytest.mark.parametrize(
    "leave",
    [
        _leave_by_break,
        _leave_by_error,
        _drop_the_iterator,
        _never_start,
        _exhaust,
        _two_at_once,
        _through_a_loader,
    ],
)
def test_no_thread_outlives_its_iteration(leave: Callable[[GPUBatchRebalanceSampler], None]):
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, 2, rank=0, plan_ahead=1)
    leave(sampler)
    assert threads_end()
