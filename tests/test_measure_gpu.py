"""Measurements on a CUDA device: the driver's figures beside the allocator's, event timing, a dry run to the target."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.calibrate import fit_cost
from gpusampler.demo_model import TinyTransformer
from gpusampler.dry_run import is_out_of_memory, measure_memory
from gpusampler.fit_memory import fit_memory
from gpusampler.memory import MemoryTracker, memory_report
from gpusampler.recorder import CostRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONGEST = 4096


class Step:
    """Training steps of a small decoder on the GPU."""

    def __init__(self, hidden_size: int = 256) -> None:
        torch.manual_seed(0)
        self.model = TinyTransformer(hidden_size, 4, hidden_size // 64, longest=LONGEST).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self, samples: int, length: int) -> None:
        tokens = torch.zeros(samples, length, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.model(tokens)
        nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_asking_creates_no_context() -> None:
    program = """
import torch
from gpusampler.memory import MemoryTracker, memory_report
report = memory_report()
with MemoryTracker(interval=0.01) as tracker, tracker.microbatch(1, 1):
    pass
assert not torch.cuda.is_initialized()
torch.zeros(1, device="cuda")
after = memory_report()
assert after.allocated, after
assert after.uuid == report.uuid or report.uuid is None, (report, after)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_figures_agree_with_each_other() -> None:
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    report = memory_report()
    assert None not in (report.allocated, report.pool, report.used, report.total, report.free), report.reasons
    assert held.nbytes <= report.allocated <= report.pool <= report.used <= report.total
    assert report.found_by == "uuid" or "found_by" in report.reasons
    properties: Any = torch.cuda.get_device_properties(0)
    assert report.total == pytest.approx(properties.total_memory, rel=0.05)
    if report.process is not None:
        assert report.process >= report.pool
    for name, value in report.to_dict().items():
        assert value is not None or report.reasons[name]


def test_peaks_are_exact() -> None:
    torch.zeros(1, device="cuda")
    base = torch.cuda.memory_allocated()
    tracker = MemoryTracker(interval=None)
    with tracker.microbatch(1, 7):
        temporary = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del temporary
    with tracker.microbatch(1, 3):
        temporary = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
        del temporary
    assert [peak.allocated - base for peak in tracker.peaks] == [64 << 20, 16 << 20]


def test_the_timeline_sees_an_allocation() -> None:
    with MemoryTracker(interval=0.01) as tracker:
        torch.cuda._sleep(1)
        held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        while len(tracker.timeline) < 8:
            torch.cuda._sleep(1_000_000)
        del held
    used = [moment.used for moment in tracker.timeline if moment.used is not None]
    assert not used or max(used) >= 2 << 30


def test_a_tracker_does_not_synchronise() -> None:
    tracker = MemoryTracker(interval=None)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with tracker.microbatch(1, 1):
            torch.ones(1024, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(tracker.peaks) == 1


def test_events_are_read_without_waiting_and_give_a_model() -> None:
    random = np.random.default_rng(0)
    sampler = GPUBatchRebalanceSampler(random.integers(64, LONGEST, 512), 64, grad_accum=4, device="cpu")
    recorder = CostRecorder(sampler)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for micro_batch in sampler:
            longest = int(max(sampler.lengths.values[micro_batch]))
            with recorder.measure(len(micro_batch), longest):
                torch.cuda._sleep(10_000 * len(micro_batch) * (1 + longest // 256))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(recorder) == len(sampler) - 8
    assert recorder.refit().applied


def test_times_predict_held_out_shapes() -> None:
    # wide enough for the kernels, not the launching of them, to take the time
    step = Step(hidden_size=1024)

    def best(samples: int, length: int) -> float:
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(samples, length)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    seen = [(n, length) for length in (1024, 2048, 4096) for n in (4, 8, 16)]
    held_out = [(6, 1536), (12, 1536), (6, 3000), (14, 3500)]
    found = fit_cost([(n, length, best(n, length)) for n, length in seen])
    errors = [abs(1 - found.seconds(*shape) / best(*shape)) for shape in held_out]
    assert float(np.median(errors)) < 0.10, (errors, found.table())


def test_a_dry_run_reaches_the_target_and_cleans_up() -> None:
    step = Step()
    found = measure_memory(step, [512, LONGEST], target_bytes=8 << 30)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(found.max_tokens // LONGEST, LONGEST)
    assert 0.7 * (8 << 30) < torch.cuda.max_memory_reserved() <= 8 << 30
    tracked = MemoryTracker(interval=None)
    for samples in (1, 2, 4, 8):
        with tracked.microbatch(samples, LONGEST):
            step(samples, LONGEST)
    assert fit_memory(tracked.records(), 8 << 30).max_tokens > 8 * LONGEST


def test_running_out_of_memory_is_caught_and_given_back() -> None:
    step = Step()
    step(1, 64)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (2 << 30)
    total: int = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(10_000, LONGEST)
        assert is_out_of_memory(caught.value)
        del caught
        step.optimizer.zero_grad()
        found = measure_memory(step, [512], target_bytes=100 << 30, max_samples=1 << 14)
        assert any(note.startswith("out of memory with") for note in found.notes)
        step(found.max_tokens // 512, 512)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
