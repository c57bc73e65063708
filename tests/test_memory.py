"""Memory reports and the tracker: figures beside each other, reasons for what is missing, nothing raised."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_nvml import GIB, FakeLibrary, Gpu, install
from torch import nn

from gpusampler import measure_cli
from gpusampler.errors import ParameterError
from gpusampler.memory import MemoryReport, MemoryTracker, memory_report

A, B = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "ab")


class FakeAllocator:
    """torch's CUDA allocator and runtime, as this package asks it, on a machine without CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = (A,)) -> None:
        self.now = self.peak = self.pool = self.pool_peak = 0
        self.resets = 0
        self.runtime: tuple[int, int] | None = (30 * GIB, 80 * GIB)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i].removeprefix("GPU-"))
        )
        monkeypatch.setattr(cuda, "memory_stats", self.stats)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(cuda, "mem_get_info", self.info)

    def stats(self, index: int) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.now,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.pool,
            "reserved_bytes.all.peak": self.pool_peak,
        }

    def reset(self, index: int) -> None:
        self.resets += 1
        self.peak, self.pool_peak = self.now, self.pool

    def info(self, index: int) -> tuple[int, int]:
        if self.runtime is None:
            raise RuntimeError("CUDA error: unknown error")
        return self.runtime

    def hold(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)
        self.pool = max(self.pool, self.now)
        self.pool_peak = max(self.pool_peak, self.pool)


def check_complete(report: MemoryReport) -> None:
    for name, value in report.to_dict().items():
        if name not in ("device", "reasons"):
            assert (value is None) == (name in report.reasons), name
    assert all(report.reasons.values())


def test_figures_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, processes={os.getpid(): 12 * GIB})]))
    allocator = FakeAllocator(monkeypatch)
    allocator.hold(10 * GIB)
    allocator.hold(-2 * GIB)
    report = memory_report()
    check_complete(report)
    assert report.reasons == {}
    assert (report.total, report.free, report.used, report.reserved) == (80 * GIB, 50 * GIB, 30 * GIB, GIB // 2)
    assert (report.allocated, report.allocated_peak, report.pool, report.pool_peak) == tuple(
        n * GIB for n in (8, 10, 10, 10)
    )
    assert (report.process, report.outside, report.elsewhere) == (12 * GIB, 2 * GIB, 20 * GIB)
    assert report.found_by == "uuid"
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    lines = report.table().splitlines()
    assert any(line.split() == ["outside", "2.000", "GiB"] for line in lines)


def test_L37_without_nvml_the_runtime_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, FakeLibrary([Gpu(A)]))
    library.fail["nvmlDeviceGetMemoryInfo_v2"] = 3
    allocator = FakeAllocator(monkeypatch)
    allocator.hold(GIB)
    report = memory_report()
    check_complete(report)
    assert (report.api, report.total, report.free, report.used) == ("cudaMemGetInfo", 80 * GIB, 30 * GIB, 50 * GIB)
    assert report.reasons["reserved"] == "NVML error 3: Not Supported"
    assert report.elsewhere == 49 * GIB
    allocator.runtime = None
    report = memory_report()
    check_complete(report)
    assert report.reasons["used"] == report.reasons["total"] == "NVML error 3: Not Supported"


def test_the_runtime_is_not_asked_about_a_device_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, FakeLibrary([Gpu(A)]))
    library.fail["nvmlInitWithFlags"] = 18
    FakeAllocator(monkeypatch)
    report = memory_report()
    check_complete(report)
    assert report.total is None
    assert "NVML error 18" in report.reasons["total"]


def test_figures_that_contradict_each_other_are_not_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, processes={os.getpid(): GIB})]))
    FakeAllocator(monkeypatch).hold(2 * GIB)
    report = memory_report()
    check_complete(report)
    assert report.outside is None
    assert "not read at one moment" in report.reasons["outside"]


@pytest.mark.parametrize("error", [KeyError("allocated_bytes.all.current"), RuntimeError("device lost")])
def test_another_allocator_or_a_lost_device(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    FakeAllocator(monkeypatch)

    def fail(index: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "memory_stats", fail)
    report = memory_report()
    check_complete(report)
    assert report.total == 80 * GIB
    assert "torch.cuda.memory_stats" in report.reasons["pool"]
    with MemoryTracker(interval=None) as tracker, tracker.microbatch(1, 2):
        pass
    assert len(tracker.peaks) == 0


def test_L37_training_goes_on_whatever_nvml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [3, 4, 6, 7, 12, 13, 15, 18, 999, 31337]
    library = install(monkeypatch, FakeLibrary([Gpu(A)]))
    names = ("nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetHandleByIndex_v2")
    library.fail = {name: [*codes, *codes] for name in names}
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    with MemoryTracker(interval=0.001) as tracker:
        for step in range(10):
            with tracker.microbatch(8, 4):
                model(torch.ones(8, 4)).sum().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
            check_complete(memory_report())
            assert tracker.to_dict()["device"]["reasons"], step
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("device", "index"), [(None, 0), (1, 1), ("cuda", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)]
)
def test_ways_to_name_a_device(device: Any, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A), Gpu(B)]))
    report = memory_report(device)
    assert (report.device, report.uuid) == (f"cuda:{index}", (A, B)[index])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_a_device_that_is_not_cuda_has_reasons(device: Any) -> None:
    report = memory_report(device)
    check_complete(report)
    assert report.reasons["total"] == f"{device} is not a CUDA device"


@pytest.mark.parametrize("device", ["gpu7", -1, 1.5, True, [0]])
def test_no_device_at_all_is_the_caller_s_mistake(device: Any) -> None:
    for make in (memory_report, MemoryTracker):
        with pytest.raises(ParameterError, match="device must be"):
            make(device)


def test_peaks_of_micro_batches_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    allocator = FakeAllocator(monkeypatch)
    allocator.hold(GIB)  # weights
    tracker = MemoryTracker(interval=None)
    for samples, length, activations in ((8, 512, 4 * GIB), (2, 2048, 3 * GIB)):
        with tracker.microbatch(samples, length):
            allocator.hold(activations)
            allocator.hold(-activations)
    assert list(tracker.peaks) == [(8, 512, 5 * GIB, 5 * GIB), (2, 2048, 4 * GIB, 5 * GIB)]
    assert tracker.records().tolist() == [[8, 512, 5 * GIB], [2, 2048, 4 * GIB]]
    assert allocator.resets == 2
    assert "8 x 512" in tracker.table(rows=1)
    assert "2 x 2048" not in tracker.table(rows=1)


def test_a_micro_batch_within_another_does_not_hide_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    allocator = FakeAllocator(monkeypatch)
    tracker = MemoryTracker(interval=None)
    with tracker.microbatch(8, 512):
        allocator.hold(4 * GIB)
        allocator.hold(-4 * GIB)
        with pytest.raises(KeyError), tracker.microbatch(1, 512):
            raise KeyError
        with tracker.microbatch(1, 512):
            pass
    assert list(tracker.peaks) == [(8, 512, 4 * GIB, 4 * GIB)]
    with tracker.microbatch(2, 512):
        pass
    assert len(tracker.peaks) == 2


def test_a_micro_batch_that_fails_leaves_no_peak_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    FakeAllocator(monkeypatch)
    tracker = MemoryTracker(interval=None)
    with pytest.raises(torch.OutOfMemoryError), tracker.microbatch(8, 512):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert len(tracker.peaks) == 0


def test_capacity_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    FakeAllocator(monkeypatch)
    tracker = MemoryTracker(interval=None, capacity=3)
    for samples in range(1, 6):
        with tracker.microbatch(samples, 10):
            pass
    assert [peak.samples for peak in tracker.peaks] == [3, 4, 5]


def test_timeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(A, processes={os.getpid(): 2 * GIB})
    install(monkeypatch, FakeLibrary([gpu]))
    FakeAllocator(monkeypatch).hold(GIB)
    with MemoryTracker(interval=0.002) as tracker:
        with tracker.microbatch(4, 128):
            while len(tracker.timeline) < 3:
                time.sleep(0.001)
        gpu.free = 20 * GIB
        polled = len(tracker.timeline)
        while len(tracker.timeline) < polled + 2:
            time.sleep(0.001)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpusampler-memory"]
    polled = len(tracker.timeline)
    used = [moment.used for moment in tracker.timeline]
    assert (used[0], used[-1]) == (30 * GIB, 60 * GIB)
    assert {moment.process for moment in tracker.timeline} == {2 * GIB}
    seconds = [moment.seconds for moment in tracker.timeline]
    assert seconds == sorted(seconds)
    assert re.search(rf"timeline +{polled} polls, 2 ms apart; at most: used 60.000 GiB", tracker.table())
    tracker.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    tracker.save(tmp_path / "memory.json")
    saved = json.loads((tmp_path / "memory.json").read_text())
    assert saved["interval_seconds"] == 0.002
    assert len(saved["timeline"]) == polled
    assert saved["peaks"] == [{"samples": 4, "length": 128, "allocated": GIB, "pool": GIB}]


def test_the_device_is_found_anew_once_cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, free=GIB), Gpu(B, free=2 * GIB)]))
    with MemoryTracker(interval=0.002) as tracker:
        while not tracker.timeline:
            time.sleep(0.001)
        FakeAllocator(monkeypatch, uuids=(B,))
        polled = len(tracker.timeline)
        while len(tracker.timeline) < polled + 3:
            time.sleep(0.001)
    assert (tracker.timeline[0].used, tracker.timeline[-1].used) == (79 * GIB, 78 * GIB)


def test_off_costs_nothing_and_does_nothing() -> None:
    tracker = MemoryTracker(enabled=False)
    with tracker:
        threads = [thread.name for thread in threading.enumerate()]
        with tracker.microbatch(8, 512):
            pass
    assert "gpusampler-memory" not in threads
    assert (len(tracker.peaks), len(tracker.timeline)) == (0, 0)
    seconds = min(timeit.repeat(lambda: tracker.microbatch(8, 512), number=10_000, repeat=5)) / 10_000
    assert seconds < 5e-6


def test_without_cuda_there_are_no_peaks_and_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    tracker = MemoryTracker(interval=None)
    with tracker.microbatch(8, 512):
        pass
    assert tracker.records().shape == (0, 3)
    assert f"no peaks: {tracker.reason}" in tracker.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0.0}, "interval must be at least 0.001"),
        ({"interval": "fast"}, "interval must be a number"),
        ({"interval": 1e300}, r"interval must be at most 1e\+06 seconds, got 1e\+300"),
        ({"enabled": 1}, "enabled must be True or False"),
        ({"capacity": 0}, "capacity must be at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        MemoryTracker(**options)


@pytest.mark.parametrize(("samples", "length", "name"), [(0, 8, "samples"), ("a", 8, "samples"), (8, 1.5, "length")])
def test_shapes_that_are_none_are_refused_before_the_micro_batch(samples: Any, length: Any, name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name} must be"):
        MemoryTracker(interval=None).microbatch(samples, length)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    measure_cli.register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(argv)
    code: int = arguments.func(arguments)
    return code


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A), Gpu(B)]), visible="1,0")
    assert run("memory", "--json") == 0
    assert [report["uuid"] for report in json.loads(capsys.readouterr().out)] == [B, A]
    assert run("memory", "--device", "1") == 0
    text = capsys.readouterr().out
    assert A in text
    assert "\nallocated      - (" in text
    assert "\ntotal            80.000 GiB\n" in text
    plot = tmp_path / "timeline.svg"
    assert run("memory", "--device", "0", "--watch", "0.02", "--interval", "0.002", "--plot", str(plot), "--json") == 0
    watched = json.loads(capsys.readouterr().out)
    assert len(watched["timeline"]) >= 2
    assert plot.read_text().lstrip().startswith("<?xml")
    assert run("memory", "--watch", "0.02", "--interval", "0.002") == 0
    assert re.search(r"timeline +\d+ polls, 2 ms apart; at most: used 30.000 GiB, process -", capsys.readouterr().out)


def test_an_interrupted_watch_tells_what_it_saw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A)]))
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    assert run("memory", "--watch", "100", "--interval", "0.002", "--json") == 0
    timer.join()
    assert len(json.loads(capsys.readouterr().out)["timeline"]) >= 2
    assert not [thread for thread in threading.enumerate() if thread.name == "gpusampler-memory"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plot", "x.png"], "--plot needs --watch"),
        (["--watch", "-1"], "watch must be at least 0"),
        (["--watch", "0", "--interval", "0"], "interval must be at least"),
        (["--device", "-1"], "device must be at least 0"),
        (["--watch", "1e300"], "watch must be at most"),
        (["--watch", "100", "--plot", "x.docx"], "plot must end in one of"),
        (["--watch", "100", "--plot", "missing/x.png"], "no such folder"),
    ],
)
def test_bad_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run("memory", *argv)


def test_no_nvml_at_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run("memory") == 0
    assert "nvidia-ml-py" in capsys.readouterr().out


def test_records_of_a_tracker_have_the_type_that_fits_take() -> None:
    assert MemoryTracker(interval=None).records().dtype == np.float64
