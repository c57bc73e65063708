"""The online recorder: real clocks, boundaries, state, and processes that wait for each other.

Run by torchrun, this file is also the program of the processes; each writes what it saw to a file of its own.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpusampler import CostModel, GPUBatchRebalanceSampler, plan_batches
from gpusampler import recorder as recorder_module
from gpusampler.calibrate import fit_cost
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.recorder import CostRecorder
from gpusampler.slowest import slowest_shapes
from gpusampler.traces import load_trace

TRUE = CostModel(alpha=1e-3, intercept=500.0)
TOKEN = 2e-7  # seconds


def units(samples: int, length: int) -> float:
    """Cost of a micro-batch under the true model."""
    return TRUE.intercept + samples * float(TRUE(torch.tensor(length)))


class Clock:
    """A clock that work moves on, with some noise: the cores that tests run on are shared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.random = np.random.default_rng(0)
        monkeypatch.setattr(recorder_module, "perf_counter", lambda: self.now)

    def work(self, samples: int, length: int) -> None:
        self.now += TOKEN * units(samples, length) * float(np.exp(self.random.normal(0, 0.02)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lengths(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    random = np.random.default_rng(seed)
    return np.clip(np.exp(random.normal(5.5, 1.0, count)), 8, 4000).astype(np.int64)


def train(
    clock: Clock, sampler: GPUBatchRebalanceSampler, recorder: CostRecorder, steps: int | None = None
) -> list[list[int]]:
    """Run the sampler's micro-batches, or those of some steps."""
    taken = []
    for micro_batch in sampler:
        longest = int(max(sampler.lengths.values[micro_batch]))
        with recorder.measure(len(micro_batch), longest):
            clock.work(len(micro_batch), longest)
        taken.append(micro_batch)
        if steps is not None and len(taken) == steps * sampler.grad_accum:
            break
    return taken


def test_recorded_times_give_the_true_model_at_the_end_of_an_epoch(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4, cost=CostModel(alpha=1e-5))
    recorder = CostRecorder(sampler)
    train(clock, sampler, recorder)
    assert len(recorder) == len(sampler) - 8
    refit = recorder.refit()
    assert refit.applied, refit
    assert sampler.partition.cost == refit.model
    assert refit.model.alpha == pytest.approx(TRUE.alpha, rel=0.05)
    assert refit.model.intercept == pytest.approx(TRUE.intercept, rel=0.2)
    assert refit.calibration is not None
    assert len(recorder) == 0
    # the next epoch is planned with it
    sampler.set_epoch(1)
    expected = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4, cost=refit.model)
    expected.set_epoch(1)
    assert list(sampler) == list(expected)


def test_a_refit_within_an_epoch_is_at_a_window_only_and_loses_no_sample(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4)
    recorder = CostRecorder(sampler, window=5)
    before = sampler.partition.cost
    for steps in (4, 6):
        sampler.load_state_dict(sampler.state_dict(0))
        train(clock, sampler, recorder, steps)
        with pytest.raises(ParameterError, match=f"multiple of window=5 steps .* 0 micro-batches into step {steps}"):
            recorder.refit()
    sampler.load_state_dict(sampler.state_dict(0))
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(ParameterError, match="1 micro-batches into step 0"):
        recorder.refit()
    assert sampler.partition.cost == before
    sampler.load_state_dict(sampler.state_dict(0))
    taken = train(clock, sampler, recorder, 10)
    refit = recorder.refit()
    assert refit.applied, refit
    taken += train(clock, sampler, recorder)
    assert len(taken) == len(sampler)
    assert Counter(i for micro_batch in taken for i in micro_batch) == Counter(range(800))
    fresh = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4, cost=refit.model)
    assert taken[40:] == list(fresh)[40:]


def test_what_does_not_suffice_changes_nothing(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler([64] * 64, 16)
    recorder = CostRecorder(sampler, warmup=0)
    before = sampler.partition.cost
    refit = recorder.refit()
    assert (refit.applied, refit.model) == (False, before)
    assert "got 0 records" in refit.reason
    train(clock, sampler, recorder)
    refit = recorder.refit()
    assert not refit.applied
    assert "at least 3 distinct shapes" in refit.reason
    assert sampler.partition.cost is before
    assert len(recorder) == 4  # kept for a later refit


def test_an_uncertain_fit_is_not_applied() -> None:
    sampler = GPUBatchRebalanceSampler([*range(10, 74), 10**6], 8, drop_last=False)
    recorder = CostRecorder(sampler, warmup=0)
    for n, length, off in ((1, 20, 1.0), (20, 40, 1.3), (400, 70, 0.8), (100, 70, 1.2), (300, 30, 0.75), (50, 20, 1.1)):
        recorder._records.append((len(recorder), n, length, TOKEN * off * units(n, length)))
    refit = recorder.refit()
    assert not refit.applied
    assert "the cost of the longest sample is uncertain by" in refit.reason
    assert refit.calibration is not None


def test_state_restores_the_model_and_makes_a_resume_within_a_step_exact(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4)
    recorder = CostRecorder(sampler)
    train(clock, sampler, recorder)
    assert recorder.refit().applied
    sampler.set_epoch(1)
    iterator = iter(sampler)
    for _ in range(7):
        next(iterator)
    state = pickle.loads(pickle.dumps({"sampler": sampler.state_dict(), "recorder": recorder.state_dict()}))
    rest = list(iterator)

    resumed = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4)
    other = CostRecorder(resumed)
    with pytest.raises(ParameterError, match="cost was"):
        resumed.load_state_dict(state["sampler"])
    other.load_state_dict(state["recorder"])
    resumed.load_state_dict(state["sampler"])
    assert resumed.partition.cost == sampler.partition.cost
    assert list(resumed) == rest


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "no field 'format'"),
        ({"format": 1, "alpha": 1e-4}, "no field 'intercept'"),
        ({"format": 2, "alpha": 1e-4, "intercept": 0.0}, "format 2, this version reads format 1"),
        ({"format": 1, "alpha": -1.0, "intercept": 0.0}, "alpha must be at least 0"),
        ([], "state must be the mapping"),
    ],
)
def test_bad_states(state: Any, message: str) -> None:
    recorder = CostRecorder(GPUBatchRebalanceSampler([1, 2, 3], 2))
    with pytest.raises(ParameterError, match=message):
        recorder.load_state_dict(state)


def test_a_state_of_a_model_that_these_lengths_cannot_have() -> None:
    sampler = GPUBatchRebalanceSampler([1, 10**7] * 8, 8)
    recorder = CostRecorder(sampler)
    before = sampler.partition.cost
    with pytest.raises(ParameterError, match=r"with alpha 1000000\.0 exceed the integer range"):
        recorder.load_state_dict({"format": 1, "alpha": 1e6, "intercept": 0.0})
    assert sampler.partition.cost is before


def half(values: torch.Tensor) -> torch.Tensor:
    return values / 2


def test_bad_arguments() -> None:
    with pytest.raises(ParameterTypeError, match="sampler must be a GPUBatchRebalanceSampler"):
        CostRecorder([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="without a cost_fn"):
        CostRecorder(GPUBatchRebalanceSampler([1, 2], 2, cost=CostModel(cost_fn=half)))
    with pytest.raises(ParameterError, match="device must be a torch device, got 'gpu7'"):
        CostRecorder(GPUBatchRebalanceSampler([1, 2], 2), device="gpu7")
    sampler = GPUBatchRebalanceSampler([1, 2], 2, dp_size=2, rank=0, process_group=None)
    for name, value in (("capacity", 3), ("warmup", -1), ("window", 0)):
        with pytest.raises(ParameterError, match=f"{name} must be at least"):
            CostRecorder(sampler, **{name: value})
    with pytest.raises(ParameterError, match="its ranks cannot refit together"):
        CostRecorder(sampler).refit()


def test_the_clock_of_this_machine() -> None:
    recorder = CostRecorder(GPUBatchRebalanceSampler([1, 2, 3], 2), warmup=1)
    for milliseconds in (1, 20, 10):
        with recorder.measure(milliseconds, 7):
            time.sleep(milliseconds / 1000)
    times = [record[1:] for record in recorder._records]
    assert [record[:2] for record in times] == [(20, 7), (10, 7)]
    assert times[0][2] >= 0.02
    assert times[1][2] >= 0.01


def test_a_micro_batch_that_fails_is_not_recorded() -> None:
    recorder = CostRecorder(GPUBatchRebalanceSampler([1, 2, 3], 2), warmup=0)
    with pytest.raises(KeyError), recorder.measure(1, 2):
        raise KeyError
    assert len(recorder) == 0


def test_slots_are_known_after_an_epoch_is_left_within_a_step(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4, sync="step")
    recorder = CostRecorder(sampler, warmup=2)
    slots = []
    for epoch, count in ((0, 6), (1, 3), (1, 9), (2, 5)):
        sampler.set_epoch(epoch)
        for slot, micro_batch in enumerate(sampler):
            with recorder.measure(len(micro_batch), 100):
                clock.now += 1.0
            slots.append(slot % 4)
            if slot == count - 1:
                break
    assert [record[0] % 4 for record in recorder._records] == slots[2:]
    numbers = [record[0] for record in recorder._records]
    assert numbers == sorted(set(numbers))


def test_a_time_of_zero_and_no_shape_spoil_nothing(clock: Clock) -> None:
    sampler = GPUBatchRebalanceSampler(lengths(800), 32, grad_accum=4)
    recorder = CostRecorder(sampler)
    train(clock, sampler, recorder)
    with recorder.measure(1, 7):
        pass
    for shape in ((0, 7), (1, 0), (1.5, 7), (1, "7")):
        with pytest.raises(ParameterError, match=r"(samples|length) must be"), recorder.measure(*shape):  # type: ignore[arg-type]
            raise AssertionError
    assert recorder.refit().applied


class Event:
    """A CUDA event on a machine without: over when the stream is told to be."""

    over = False

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return Event.over

    def elapsed_time(self, end: Event) -> float:
        return 7.0


def test_events_are_recorded_where_the_micro_batches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    monkeypatch.setattr(recorder_module, "_event", lambda: events.append(Event()) or events[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    recorder = CostRecorder(GPUBatchRebalanceSampler([1, 2, 3], 2), device="cuda:1", warmup=0)
    monkeypatch.setattr(Event, "over", False)
    with recorder.measure(2, 3):
        pass
    assert len(recorder) == 0  # never waited for
    Event.over = True
    assert len(recorder) == 1
    assert [event.stream for event in events] == [("stream of", torch.device("cuda:1"))] * 2
    assert list(recorder._records) == [(0, 2, 3, 0.007)]


def waiting(alpha: float, true: float, windows: int = 24, dp_size: int = 8, grad_accum: int = 2) -> Any:
    """Shapes and times of ranks that wait for each other, planned with `alpha`, at a true one."""
    random = np.random.default_rng(0)
    batch = random.permutation(load_trace("mooncake_conversation"))[: windows * 256].reshape(windows, 256)
    rows = np.minimum(batch, 30_000).astype(np.int64)
    plan = plan_batches(torch.from_numpy(rows), dp_size, grad_accum, cost=CostModel(alpha=alpha))
    samples = np.diff(plan.offsets.numpy()).reshape(-1, dp_size)
    length = plan.tokens.numpy().reshape(-1, dp_size) // samples
    seconds = (samples * (length + true * length.astype(float) ** 2)).max(axis=1) * np.exp(
        random.normal(0, 0.01, len(samples))
    )
    return np.stack([samples, length, np.broadcast_to(1e-6 * seconds[:, None], samples.shape)], axis=2)


@pytest.mark.parametrize(("alpha", "true"), [(1e-3, 1e-4), (1e-5, 1e-4), (1e-4, 1e-4), (1e-4, 1e-3)])
def test_ranks_that_wait_do_not_confirm_a_wrong_model(alpha: float, true: float) -> None:
    records = waiting(alpha, true)
    found = fit_cost(slowest_shapes(records), intercept=False)
    assert found.model.alpha == pytest.approx(true, rel=0.1)


def test_times_taken_as_each_rank_s_own_would_confirm_it() -> None:
    records = waiting(1e-4, 1e-3, grad_accum=8)
    assert fit_cost(records.reshape(-1, 3)).model.alpha == pytest.approx(1e-4, rel=0.3)
    assert fit_cost(slowest_shapes(records)).model.alpha == pytest.approx(1e-3, rel=0.1)


def test_times_of_slots_that_end_in_waiting_are_left_out() -> None:
    sampler = GPUBatchRebalanceSampler([1] * 16, 8, 2, 4, rank=0, sync="step")
    records = np.array([[number, 1, 10 + number, 1.0] for number in range(8)])
    kept = CostRecorder(sampler)._shapes([records, records])
    assert kept[:, 1].tolist() == [10, 11, 12, 14, 15, 16] * 2
    waits = GPUBatchRebalanceSampler([1] * 16, 8, 2, 4, rank=0)
    other = np.add(records[2:], [0, 0, 5, 0.5])
    together = CostRecorder(waits)._shapes([records, other])
    # micro-batches that both ranks know, the longer shape, the middle of the times
    assert together.tolist() == [[1, 15 + number, 1.25] for number in range(2, 8)]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_all_ranks_take_the_same_model(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for sync in ("microbatch", "step"):
        one, other = (run[sync] for run in seen)
        assert one["model"] == other["model"]
        assert one["model"][0] == pytest.approx(TRUE.alpha, rel=0.1)
        assert one["first"] == other["first"] == [False, 1e-5]  # nothing recorded yet
        assert [one["applied"], other["applied"]] == [True, True]
        assert [one["fitted"], other["fitted"]] == [True, False]
        assert Counter(one["taken"] + other["taken"]) == Counter(range(480))
        # within an epoch too, which then goes on with what is left of it
        assert one["window"] == other["window"]
        assert [applied for applied, _ in one["window"]] == [True]
        assert Counter(one["epoch"] + other["epoch"]) == Counter(range(480))


def refit_together(sync: str) -> dict[str, Any]:
    """Record what ranks would see that wait for each other, in every slot or in the last of a step; then refit."""
    sampler = GPUBatchRebalanceSampler(lengths(480), 32, 2, 4, sync=sync, cost=CostModel(alpha=1e-5))
    recorder = CostRecorder(sampler, window=5)
    first = recorder.refit()
    number = 0
    refits, epoch = [], []

    def measured(micro_batch: list[int]) -> None:
        nonlocal number
        longest = int(max(sampler.lengths.values[micro_batch]))
        cost = torch.tensor(units(len(micro_batch), longest), dtype=torch.float64)
        if sync == "microbatch" or number % 4 == 3:
            dist.all_reduce(cost, op=dist.ReduceOp.MAX)
        noise = float(np.random.default_rng((sampler.rank, number)).normal(0, 0.005))
        # two processes on cores that others use have no clock to rely on: a time is given, not taken
        recorder._records.append((number, len(micro_batch), longest, TOKEN * float(cost) * (1 + noise)))
        epoch.extend(micro_batch)
        number += 1

    for micro_batch in sampler:
        measured(micro_batch)
        if number in (38, 36):
            with pytest.raises(ParameterError, match="multiple of window=5 steps"):
                recorder.refit()
        if number == 40:
            refits.append(recorder.refit())
            break
    for micro_batch in sampler:
        measured(micro_batch)
    refit = recorder.refit()
    sampler.set_epoch(1)
    result = {
        "first": [first.applied, first.model.alpha],
        "window": [[each.applied, each.model.alpha] for each in refits],
        "epoch": epoch,
        "applied": refit.applied,
        "fitted": refit.calibration is not None,
        "model": [sampler.partition.cost.alpha, sampler.partition.cost.intercept],
        "taken": [i for micro_batch in sampler for i in micro_batch],
    }
    sampler.close()
    return result


if __name__ == "__main__":
    dist.init_process_group("gloo")
    answers = {sync: refit_together(sync) for sync in ("microbatch", "step")}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
