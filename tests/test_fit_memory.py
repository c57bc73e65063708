"""Caps on padded tokens: exact and noisy peaks, a dry run of a real model, steps that exceed the cap."""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_nvml import GIB, FakeLibrary, Gpu, install
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpusampler import GPUBatchRebalanceSampler, measure_cli
from gpusampler.demo_model import VOCABULARY, TinyTransformer
from gpusampler.dry_run import CudaMeter, is_out_of_memory, measure_memory
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.fit_memory import fit_memory, target_for
from gpusampler.memory import MemoryReport
from gpusampler.over_cap import steps_over

TOKENS = (1000, 2000, 3000, 5000, 8000)


def straight(base: float, token: float, tokens: Any = TOKENS) -> list[tuple[int, float]]:
    return [(count, base + token * count) for count in tokens]


@settings(max_examples=40, deadline=None)
@given(base=st.integers(0, 10**11), token=st.integers(10**4, 10**8), room=st.floats(1.5, 50.0))
def test_exact_peaks_give_the_exact_cap(base: int, token: int, room: float) -> None:
    target = base + room * 8000 * token
    found = fit_memory(straight(base, token), target)
    exact = int(room * 8000)
    assert exact * (1 - 1e-4) - 1 <= found.max_tokens <= exact * (1 + 1e-6) + 1
    assert found.expected_bytes <= target * (1 + 1e-9)


def test_cap_by_hand() -> None:
    found = fit_memory(straight(2e9, 1e6), 12e9)
    assert found.max_tokens == 10_000
    assert (found.base_bytes, found.bytes_per_token, found.bytes_per_token2) == (
        pytest.approx(2e9),
        pytest.approx(1e6),
        0.0,
    )
    assert found.margin_bytes == pytest.approx(0, abs=2)
    assert found.notes == ()  # 10,000 is exactly 1.25 times the largest measured
    assert fit_memory(straight(2e9, 1e6), 12.1e9).notes == (
        "the cap is 1.3 times the largest measured micro-batch: measure one of 10100 tokens",
    )


def test_quadratic_attention_is_told_from_shapes_and_bounds_the_longest_sample() -> None:
    shapes = [(n, length) for n in (1, 2, 4, 8) for length in (128, 512, 2048)]
    records = [(n, length, 1e9 + n * length * (1e5 + 300 * length)) for n, length in shapes]
    found = fit_memory(records, 11e9)
    assert found.bytes_per_token2 == pytest.approx(300)
    assert found.max_tokens == int(1e10 / (1e5 + 300 * 2048))
    assert fit_memory(records, 11e9, longest=4096).max_tokens == int(1e10 / (1e5 + 300 * 4096))
    # any shape within the cap and no longer than the longest stays within the target
    for length in (1, 100, 1000, 2048):
        assert found.expected(found.max_tokens, length) <= 11e9


def test_noise_leaves_a_margin_and_new_peaks_stay_within_the_target() -> None:
    random = np.random.default_rng(0)
    above = 0
    for _ in range(40):
        tokens = random.integers(500, 9000, 30)
        peaks = (3e9 + 1e6 * tokens) * np.exp(random.normal(0, 0.01, 30))
        found = fit_memory(np.stack([tokens, peaks], axis=1), 12e9)
        assert 8000 < found.max_tokens < 9000
        assert found.margin_bytes > 0
        fresh = (3e9 + 1e6 * found.max_tokens) * np.exp(random.normal(0, 0.01, 100))
        above += int((fresh > 12e9).sum())
    assert above <= 12  # 0.1 % of 4000, with some chance


def test_margin_grows_with_confidence_and_noise() -> None:
    random = np.random.default_rng(1)
    tokens = np.arange(500, 9000, 250)
    noise = random.normal(0, 1, len(tokens))
    caps = [
        fit_memory(
            np.stack([tokens, (3e9 + 1e6 * tokens) * (1 + size * noise)], axis=1), 12e9, confidence=confidence
        ).max_tokens
        for size, confidence in ((0.001, 0.9), (0.01, 0.9), (0.01, 0.9999))
    ]
    assert caps[0] > caps[1] > caps[2]


def test_one_high_peak_is_believed() -> None:
    records = straight(2e9, 1e6, range(1000, 9000, 200))
    calm = fit_memory(records, 12e9).max_tokens
    records[17] = (records[17][0], records[17][1] * 1.4)
    found = fit_memory(records, 12e9)
    assert found.expected(found.max_tokens, 1) * 1.4 == pytest.approx(12e9, rel=1e-3)
    assert found.max_tokens < calm
    assert any("records 17" in note for note in found.notes)


def test_low_peaks_do_not_raise_the_cap() -> None:
    records = straight(2e9, 1e6, range(1000, 9000, 200))
    records[3] = (records[3][0], 2e8)
    assert fit_memory(records, 12e9).max_tokens == pytest.approx(10_000, abs=2)


@pytest.mark.parametrize(
    ("records", "target", "message"),
    [
        ([], 1e9, r"must be \[n, 2\] numbers \(tokens, bytes\), got none"),
        ([1, 2, 3], 1e10, r"must be \[n, 2\] numbers .* got shape \(3,\)"),
        ({}, 1e10, "got none"),
        (straight(1e9, 1e6)[:2], 1e10, "must be at least 3, .* got 2 from 1000 to 2000 tokens"),
        ([(1000, 1e9)] * 5, 1e10, "got 5 from 1000 to 1000 tokens"),
        (straight(1e9, 0.0), 1e10, "peak that grows with the tokens"),
        (straight(9e9, -1e6), 1e10, "peak that grows with the tokens"),
        (straight(1e9, 1e6), 5e8, "target_bytes must leave room .* 5e"),
        (straight(1e9, 1e6), 0, "target_bytes must be at least 1"),
        (straight(1e9, 1e6), math.nan, "target_bytes must be finite"),
        (straight(1e9, 1e6), 1e300, r"target_bytes must be at most 1e\+18"),
        (
            [(1000, 1e9), (2000, 2.2e9), (4000, 4e9)],
            1e10,
            "is expected, but 3 records that deviate by .* no closer; measure more",
        ),
        ([(1000, 2e9), (2000, 4e9), (4000, 3e9), (8000, 5e9)], 1e10, "peak that grows with the tokens"),
        (np.array(3.0), 1e10, r"must be \[n, 2\] or \[n, 3\] numbers"),
        ([(1000, 10**400)] * 3, 1e10, "too large to convert"),
        ([(1000, 1e9), (0, 1e9), (1, 1)], 1e10, r"records\[1, 0\] \(tokens\) must be a whole number .* got 0.0"),
        (
            [(4, 1000, 1e9), (4, 2000, 0.0), (1, 1, 1.0)],
            1e10,
            r"records\[1, 2\] \(bytes\) must be a number from 1e-15",
        ),
    ],
)
def test_bad_records(records: Any, target: float, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        fit_memory(records, target)


def test_bad_options() -> None:
    with pytest.raises(ParameterTypeError, match="records must be"):
        fit_memory("peaks.csv", 1e9)
    for confidence in (0.2, 1.0):
        with pytest.raises(ParameterError, match="confidence must be"):
            fit_memory(straight(1e9, 1e6), 1e10, confidence=confidence)
    with pytest.raises(ParameterError, match="longest must be at least 1"):
        fit_memory(straight(1e9, 1e6), 1e10, longest=0)


def test_target_by_hand() -> None:
    report = MemoryReport("cuda:0", total=80 * GIB, elsewhere=2 * GIB)
    assert target_for(report, share=0.5) == 38 * GIB
    with pytest.raises(ParameterError, match="share must leave room"):
        target_for(report, share=0.01)
    for share in (0.0, 1.1):
        with pytest.raises(ParameterError, match="share must be above 0"):
            target_for(report, share=share)
    with pytest.raises(ParameterError, match="no figure for elsewhere of cuda:0: NVML error 3"):
        target_for(MemoryReport("cuda:0", total=80 * GIB, reasons={"elsewhere": "NVML error 3"}))


def test_steps_that_exceed_the_cap_by_hand() -> None:
    # steps [8, 2, 2, 2] and [3, 3, 3, 3] on two ranks: 1 x 8 | 3 x 2, then 2 x 3 twice; the fit allows 7 tokens
    sampler = GPUBatchRebalanceSampler(
        [8, 2, 2, 2, 3, 3, 3, 3], 4, dp_size=2, rank=0, shuffle=False, process_group=None
    )
    fit = fit_memory([(1, 110.0), (2, 120.0), (4, 140.0), (6, 160.0)], 170)
    assert fit.max_tokens == 7
    over = steps_over(fit, sampler)
    assert [(each.step, each.slot, each.tokens, each.expected_bytes) for each in over] == [(0, 0, 8, 180)]
    assert steps_over(fit, GPUBatchRebalanceSampler([3] * 8, 4, 2, rank=0, process_group=None)) == []


class ProfiledStep:
    """Training steps of a real model, their peak from torch's profiler, with a limit as a device has one."""

    def __init__(self, limit: float = math.inf) -> None:
        torch.manual_seed(0)
        self.model = TinyTransformer(hidden_size=32, num_layers=2, num_heads=2, longest=512)
        self.limit, self.held, self.calls = limit, 0, list[tuple[int, int]]()
        self.weights = sum(parameter.nbytes for parameter in self.model.parameters())

    def __call__(self, samples: int, length: int) -> None:
        self.calls.append((samples, length))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            tokens = torch.zeros(samples, length, dtype=torch.int64)
            scores = self.model(tokens)
            nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
            self.model.zero_grad()
        changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        self.held = 2 * self.weights + int(np.cumsum(changes).max())
        if self.held > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def reset(self) -> None:
        self.held = 0

    def peak(self) -> int:
        return self.held


def test_dry_run_of_a_real_model_finds_a_cap_that_holds() -> None:
    step = ProfiledStep()
    target = 40e6
    found = measure_memory(step, [64, 256], target_bytes=target, meter=step)
    assert max(n * length for n, length in step.calls) >= found.max_tokens / 1.25
    for length in (64, 256):
        step(found.max_tokens // length, length)
        assert 0.85 * target < step.held <= target
    assert found.notes == ()
    assert VOCABULARY == 256


def test_dry_run_catches_running_out_of_memory() -> None:
    step = ProfiledStep(limit=20e6)
    found = measure_memory(step, [64, 128], target_bytes=60e6, meter=step)
    ran_out = next(note for note in found.notes if note.startswith("out of memory with"))
    assert "x 64" in ran_out
    assert not any("measure one of" in note for note in found.notes)  # it was measured: memory ran out
    for length in (64, 128):
        step(found.max_tokens // length, length)
        assert 0.6 * 20e6 < step.held <= 20e6


def stepping(memory: Callable[[int, int], float], limit: float) -> tuple[Any, Any, list[tuple[int, int]]]:
    calls: list[tuple[int, int]] = []

    class Meter:
        held = 0

        def reset(self) -> None:
            self.held = 0

        def peak(self) -> int:
            return self.held

    meter = Meter()

    def step(samples: int, length: int) -> None:
        calls.append((samples, length))
        meter.held = int(memory(samples, length))
        if meter.held > limit:
            raise RuntimeError("CUDA error: out of memory")

    return step, meter, calls


def test_dry_run_approaches_the_target_from_below() -> None:
    step, meter, calls = stepping(lambda n, length: 2e9 + 1e6 * n * length, limit=10.5e9)
    found = measure_memory(step, [512], target_bytes=10e9, meter=meter)
    assert found.max_tokens == pytest.approx(8000, abs=1)
    assert calls == [(1, 512), (1, 512), (2, 512), (4, 512), (8, 512), (15, 512)]


def test_dry_run_bisects_where_memory_jumps() -> None:
    # a buffer of 6 GB appears above 5000 tokens
    step, meter, calls = stepping(lambda n, length: 1e9 + 1e6 * n * length + 6e9 * (n * length > 5000), limit=10e9)
    found = measure_memory(step, [100], target_bytes=9.5e9, meter=meter)
    assert 4000 <= found.max_tokens <= 5000
    assert max(n for n, _ in calls) <= 85


def test_dry_run_where_memory_ends_early_trusts_the_longest_alone() -> None:
    # attention that is not fused: 64 x 70 tokens run, 9 x 497, fewer, do not
    step, meter, _ = stepping(lambda n, length: 1e9 + 1e5 * n * length * (1 + length / 50), limit=5.7e9)
    with pytest.raises(RuntimeError):
        step(9, 497)
    found = measure_memory(step, [70, 512], target_bytes=20e9, meter=meter)
    assert any(note.endswith("the cap is the largest that ran") for note in found.notes)
    assert found.max_tokens == 8 * 512
    for length in range(1, 513):
        step(found.max_tokens // length, length)


def test_dry_run_whose_longest_runs_out_alone() -> None:
    step, meter, _ = stepping(lambda n, length: 1e9 + 1e6 * n * length, limit=5e9)
    found = measure_memory(step, [512, 8192], target_bytes=20e9, meter=meter)
    assert "the longest sample, 8192 tokens, does not fit even alone" in found.notes
    assert found.max_tokens <= 4000


def test_dry_run_that_leaves_too_little() -> None:
    step, meter, _ = stepping(lambda n, length: 1e9 * n * length, limit=1500e9)
    with pytest.raises(ParameterError, match=r"9e\+09 bytes \(1 x 1000: 1e\+12 bytes\): records must be at least 3"):
        measure_memory(step, [1000], target_bytes=9e9, meter=meter)
    with pytest.raises(ParameterError, match=r"\(1 x 1000: 1e\+12 bytes; out of memory with 2 x 1000\)"):
        measure_memory(step, [1000], target_bytes=9e12, meter=meter)
    step, meter, _ = stepping(lambda n, length: 1e12, limit=1e9)
    with pytest.raises(ParameterError, match="ran out of memory with 1 sample of length 10"):
        measure_memory(step, [10], target_bytes=9e9, meter=meter)


def test_dry_run_lets_other_errors_through() -> None:
    def step(samples: int, length: int) -> None:
        raise RuntimeError("shape mismatch")

    _, meter, _ = stepping(lambda n, length: 1.0, limit=1.0)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        measure_memory(step, [10], target_bytes=1e9, meter=meter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": None}, "step must be a function"),
        ({"lengths": []}, "lengths must have at least one"),
        ({"lengths": [5, 0]}, r"lengths\[1\] must be at least 1, got 0"),
        ({"max_samples": 1}, "max_samples must be at least 2"),
        ({"lengths": 5}, "lengths must be a list of ints, got 5"),
        ({"target_bytes": "8G"}, "^target_bytes must be a number"),
        ({"target_bytes": math.nan}, "^target_bytes must be finite"),
        ({"target_bytes": 0}, "^target_bytes must be at least 1"),
        ({"target_bytes": None, "share": 1.5}, "^share must be above 0 and at most 1"),
        ({"confidence": 1.0}, "^confidence must be below 1"),
    ],
)
def test_bad_arguments_of_a_dry_run(options: dict[str, Any], message: str) -> None:
    _, meter, _ = stepping(lambda n, length: 1.0, limit=1.0)

    def untouched(samples: int, length: int) -> None:
        raise AssertionError

    arguments: dict[str, Any] = {"step": untouched, "lengths": [1], "target_bytes": 1e9, "meter": meter} | options
    with pytest.raises(ParameterError, match=message):
        measure_memory(arguments.pop("step"), arguments.pop("lengths"), **arguments)


def test_a_meter_of_its_own_needs_a_gpu() -> None:
    with pytest.raises(ParameterError, match="device must be a CUDA device that is available"):
        CudaMeter("cpu")


def test_the_host_running_out_is_running_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    measure_cli.register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(argv)
    code: int = arguments.func(arguments)
    return code


@pytest.fixture
def peaks(tmp_path: Path) -> Path:
    path = tmp_path / "peaks.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tokens", "peak_bytes"])
        writer.writerows(straight(2 * GIB, 2**20, (1024, 2048, 4096)))
    return path


def test_command(peaks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["9000", *["100"] * 63]))
    training = ["--lengths", str(lengths), "--batch-size", "64", "--dp-size", "2"]
    assert run("fit-memory", str(peaks), "--target-gib", "10", *training) == 0
    text = capsys.readouterr().out
    assert "max_tokens  8192" in text
    assert "1 micro-batches in 1 of the first 1 steps exceed it" in text
    assert "the cap is 2.0 times the largest measured micro-batch: measure one of 8192 tokens" in text
    assert run("fit-memory", str(peaks), "--target-gib", "10", "--json", *training) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["max_tokens"] == 8192
    assert [(over["step"], over["tokens"]) for over in report["over"]] == [(0, 9000)]


def test_command_takes_the_target_from_the_device(
    peaks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeLibrary([Gpu("GPU-a", total=20 * GIB, free=16 * GIB)]))
    # half of 20 GiB, less the 4 GiB in use: 6 GiB, of which 2 are the base
    assert run("fit-memory", str(peaks), "--share", "0.5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["max_tokens"] == 4096
    with pytest.raises(
        ParameterError, match=r"--share must leave room: 0.1 of 21474836480 bytes is less than the 42949"
    ):
        run("fit-memory", str(peaks), "--share", "0.1")
    with pytest.raises(ParameterError, match=r"share must be above 0 and at most 1, got 1\.5"):
        run("fit-memory", str(peaks), "--share", "1.5")


def test_command_reads_what_a_tracker_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    rows = [{"samples": n, "length": 512, "allocated": 1e9 + n * 1e9, "pool": 0} for n in (1, 2, 4)]
    path.write_text(json.dumps({"device": {}, "peaks": rows}))
    assert run("fit-memory", str(path), "--target-gib", "10", "--json") == 0
    assert json.loads(capsys.readouterr().out)["max_tokens"] == int((10 * GIB - 1e9) / 1e9 * 512)


def test_command_with_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_step.py").write_text("def step(samples, length): pass\n")
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match="device must be a CUDA device that is available"):
            run("fit-memory", "--dry-run", "my_step:step", "--length", "512")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs a FILE of measured peaks, or --dry-run"),
        (["--dry-run", "nothing:step"], "--dry-run needs --length"),
        (["--dry-run", "nothing_here:step", "--length", "5"], "must be MODULE:FUNCTION, got 'nothing_here:step'"),
        (["--dry-run", "json:nothing", "--length", "5"], "has no attribute 'nothing'"),
        (["--dry-run", "", "--length", "5"], "must be MODULE:FUNCTION"),
        (["--dry-run", ".x:step", "--length", "5"], "must be MODULE:FUNCTION"),
        (["x.csv", "--dry-run", "json:dumps"], "not both"),
        (["missing.csv"], "cannot be read"),
    ],
)
def test_bad_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run("fit-memory", *argv)


def test_command_without_a_target(peaks: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ParameterError, match=r"--target-gib must be given: no figures of cuda:0 \(NVML error 12"):
        run("fit-memory", str(peaks))
