"""The benches: their arithmetic by hand, their gate against wrong plans, and each of them run small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import __main__ as command
from bench import latency, memory, quality, scale, speed
from bench.exact import (
    WrongPlanError,
    check_groups,
    check_plan,
    group_costs,
    groups_of,
    is_share_bound,
    lower_bound,
    peak_tokens,
    sample_costs,
    step_cost,
)
from bench.inputs import DATA, cut, permuted, permuted_traces, rows_of, windows
from bench.peers import transformers_groups, transformers_sampler, transformers_version
from bench.record import ROOT, Record
from gpusampler import BatchPlan, plan_batches

needs_peer = pytest.mark.skipif(transformers_version() is None, reason="transformers does not ship the sampler here")


def test_costs_by_hand() -> None:
    lengths = np.array([8, 1, 2, 3])
    assert sample_costs(lengths, 10).tolist() == [144, 11, 24, 39]
    costs = group_costs(lengths, [[0], [1, 2], [3], [2]], 10)
    assert costs.tolist() == [144, 48, 39, 24]
    assert peak_tokens(lengths, [[0], [1, 2], [3], [2]]) == 8
    assert peak_tokens(lengths, [[0], [1, 2, 3]]) == 9
    assert step_cost(costs, 2, "microbatch") == 144 + 39
    assert step_cost(costs, 2, "step") == 144 + 39
    assert step_cost(np.array([7, 3, 1, 6]), 2, "microbatch") == 7 + 6
    assert step_cost(np.array([7, 3, 1, 6]), 2, "step") == 9


def test_costs_do_not_wrap() -> None:
    lengths = np.array([46341, 32768], dtype=np.int32)
    assert sample_costs(lengths, 10_000).tolist() == [46341 * (10_000 + 46341), 32768 * (10_000 + 32768)]


def test_lower_bound_by_hand() -> None:
    assert lower_bound(np.array([8, 1, 2, 3]), 2, 10) == 144
    assert not is_share_bound(np.array([8, 1, 2, 3]), 2, 10)
    assert lower_bound(np.array([2, 1, 1, 1]), 2, 10) == 29  # 57 / 2, rounded up
    assert is_share_bound(np.array([2, 1, 1, 1]), 2, 10)
    assert is_share_bound(np.array([3, 3]), 2, 10)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0], [1]], "2 groups instead of 3"),
        ([[0], [], [1, 2]], "group 1 is empty"),
        ([[0], [1], [1, 2]], "position 1 is there 2 times"),
        ([[0], [1], [3, 2]], "position 3 is outside a row of 3"),
        ([[-1], [1], [0, 2]], "position -1 is outside a row of 3"),
        ([[0], [1], [0]], "position 0 is there 2 times"),
        ([[1], [2], [2]], "position 0 is there 0 times"),
    ],
)
def test_gate_refuses_what_is_no_partition(groups: list[list[int]], message: str) -> None:
    with pytest.raises(WrongPlanError, match=f"^{message}$"):
        check_groups(groups, 3, 3)


def _plan() -> tuple[np.ndarray, BatchPlan]:
    rows = np.array([[5, 9, 2, 7, 4, 8], [1, 1, 3, 1, 1, 1]])
    return rows, plan_batches(torch.from_numpy(rows), 2)


def _changed(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    copy = tensor.clone()
    copy[index] = value
    return copy


def test_gate_accepts_a_plan_and_returns_its_groups() -> None:
    rows, plan = _plan()
    groups = check_plan(rows, plan, 10_000)
    assert [[group.tolist() for group in row] for row in groups] == [
        [[plan.microbatch(w, 0, r).tolist() for r in range(2)][k] for k in range(2)] for w in range(2)
    ]


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("order", (1, 0), 1, "row 1: position . is there"),
        ("offsets", (0, 1), 0, "row 0: group 0 is empty"),
        ("offsets", (0, 1), 7, "row 0: offsets 0 to 6 do not cut a row of 6 in order"),
        ("offsets", (1, 2), 5, "row 1: offsets 0 to 5 do not cut a row of 6 in order"),
        ("offsets", (0, 0), 1, "row 0: offsets 1 to 6 do not cut a row of 6 in order"),
        ("tokens", (1, 0, 1), 1, "row 1: tokens are not those of the groups"),
        ("costs", (0, 0, 1), 10.0, "row 0: costs are not those of the groups"),
    ],
)
def test_gate_refuses_a_broken_plan(field: str, index: tuple[int, ...], value: int, message: str) -> None:
    rows, plan = _plan()
    with pytest.raises(WrongPlanError, match=f"^{message}"):
        check_plan(rows, replace(plan, **{field: _changed(getattr(plan, field), index, value)}), 10_000)


def test_gate_refuses_groups_of_other_lengths() -> None:
    rows, plan = _plan()
    with pytest.raises(WrongPlanError, match=r"^row 0: tokens"):
        check_plan(rows + 1, plan, 10_000)


def test_groups_are_cut_in_slot_major_order() -> None:
    rows, _ = _plan()
    plan = plan_batches(torch.from_numpy(rows), 2, 2)
    assert [group.tolist() for group in groups_of(plan, 0)] == [
        plan.microbatch(0, slot, rank).tolist() for slot in range(2) for rank in range(2)
    ]


def test_windows_are_cut_from_one_permutation() -> None:
    lengths = np.arange(1, 101)
    order = np.random.default_rng(0).permutation(100)
    assert cut(permuted(lengths), 10, 3).tolist() == lengths[order[30:40]].tolist()


def test_windows_clip_lengths() -> None:
    assert sorted(permuted(np.array([0, 5, 40_000])).tolist()) == [1, 5, 32768]


def test_rows_repeat_where_a_trace_is_short() -> None:
    assert rows_of(np.arange(7), 3, 4).tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_traces_of_a_folder_give_the_same_windows(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 3000)
    np.savez(tmp_path / "gsm8k_train.npz", lengths=lengths)
    found = windows(tmp_path)
    assert {window.trace for window in found} == {"gsm8k_train"}
    order = np.random.default_rng(0).permutation(3000)
    first = next(window for window in found if window.shape == (64, 4, 2) and window.index == 2)
    assert first.lengths.tolist() == lengths[order[128:192]].tolist()


def test_an_empty_folder_of_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--traces: no \.npz file"):
        permuted_traces(tmp_path)


def test_stored_data_is_small() -> None:
    assert sum(file.stat().st_size for file in (DATA / "windows.npz", DATA / "windows.json")) < 400_000


@needs_peer
def test_peer_groups_are_those_its_ranks_yield() -> None:
    lengths = windows()[0].lengths
    groups = transformers_groups(lengths, 4, 2, 1000)
    sampler = transformers_sampler(lengths, 4, 2, 1000)
    for rank in range(4):
        sampler.rank = rank
        assert list(sampler) == [groups[slot * 4 + rank].tolist() for slot in range(2)]


@needs_peer
def test_peer_plans_with_the_given_cost() -> None:
    sampler = transformers_sampler(np.array([5, 9]), 1, 1, 10_000)
    assert sampler._cost(2, 100) == 2 * 100 + 2 * 100 * 100 / 10_000
    assert type(sampler).__mro__[1].QUADRATIC_COST_COEF == 0.001


def test_record_is_written_as_markdown_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record("quality", ["--traces", "x"])
    record.table(["name", "figure"], [["a", 1.25], ["long name", 3]])
    assert not record.target("at most 1", False, "2")
    page = record.write(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-quality\.md", page.name)
    text = page.read_text()
    assert "| name      | figure |\n| --------- | -----: |\n| a         | 1.2500 |\n| long name |      3 |" in text
    assert "- command: python -m bench quality --traces x\n" in text
    assert "MISSED" in text
    written = json.loads(page.with_suffix(".json").read_text())
    assert written["figures"]["targets"] == {"at most 1": {"reached": False, "value": "2"}}
    assert {"torch", "numpy", "numba", "gpusampler"} <= written["versions"].keys()
    assert "long name" in capsys.readouterr().out


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_command_lists_benches() -> None:
    listed = _bench("--list")
    assert listed.returncode == 0
    assert all(f"\n{name}" in listed.stdout for name in command.BENCHES)


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "which bench?"), (["nothing"], "no bench is called 'nothing'")]
)
def test_command_names_the_benches_on_a_mistake(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "quality, speed, scale, latency, kernels" in said


def test_command_says_when_a_bench_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.BENCHES, "absent", "not there")
    assert command.main(["absent"]) == 2
    assert "absent is not part of this checkout" in capsys.readouterr().err


def test_quality_without_its_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [window for window in windows() if window.index == 0 and window.trace in ("qm9_atoms", "azure2023_conv")]
    monkeypatch.setattr(quality, "windows", lambda folder: few)
    monkeypatch.setattr(quality, "transformers_version", lambda: None)
    assert quality.run(["--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Peer: stored values" in said
    assert said.count("worse on 0 of 12 windows") == 4
    assert "equal to the exact best, G = 1: 2 of 2 windows" in said


def test_speed_of_one_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert speed.run(["--shape", "64,4,2", "--seconds", "0", "--results", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "| (64, 4, 2) |" in capsys.readouterr().out
    (written,) = tmp_path.glob("*-speed.json")
    assert len(json.loads(written.read_text())["figures"]["timings"]) == 8


@pytest.mark.parametrize("shape", ["64,4", "64,4,x", "64,0,2", "7,4,2", "100000,4,2"])
def test_speed_refuses_an_impossible_shape(shape: str) -> None:
    with pytest.raises(SystemExit, match="--shape"):
        speed.run(["--shape", shape])


def test_scale_measures_a_fresh_process(tmp_path: Path) -> None:
    file = tmp_path / "lengths.npy"
    scale.write_lengths(file, 100_000)
    lengths = np.load(file, mmap_mode="r")
    assert lengths.dtype == np.int32
    assert 1 <= lengths.min() < lengths.max() <= 1 << 17
    figures = scale.run_child(file, (256, 4, 4), 3)
    assert figures["steps"] == 390
    assert len(figures["restore_s"]) == 3
    assert 0 < figures["constructor_s"] < figures["first_s"]
    if sys.platform == "linux":
        assert 0 < figures["memory_mib"] < scale.MEMORY_MIB


def test_scale_reports_a_process_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"):
        scale.run_child(tmp_path / "absent.npy", (256, 4, 4), 1)


def test_latency_counts_boundaries() -> None:
    from gpusampler import GPUBatchRebalanceSampler

    sampler = GPUBatchRebalanceSampler(range(1, 161), 16, 2, 2, rank=0, plan_ahead=3)
    seen = latency.measure(sampler, 45, 0.0)  # epochs of 20 micro-batches, the first of each not counted
    at = [*range(1, 20), *range(1, 20), *range(1, 8)]
    assert seen.boundary.tolist() == [place % 6 == 0 for place in at]
    assert (seen.wall > 0).all()


def test_memory_searches_below_the_batch_that_peaks_are_compared_at() -> None:
    options = SimpleNamespace(batch_size=64, grad_accum=4)
    for largest in (3, 4, 21, 64, 100):
        found = memory._search(lambda batch, largest=largest: batch <= largest, np.ones(200, int), options)
        assert largest - max(1, largest // 16) <= found <= largest if largest >= 4 else found == 0


def test_memory_measures_the_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # what is read from a GPU, by a memory of 1 MB a padded token
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a stand-in")
    monkeypatch.setattr(
        memory, "_trainer", lambda options: lambda shapes: max(n * length for n, length in shapes) << 20
    )
    argv = ["--results", str(tmp_path), "--trace", "azure2023_code", "--trace", "servegen_r1_output", "--steps", "4"]
    assert memory.run([*argv, "--limit-gib", "64"]) == 0
    record = json.loads(next(tmp_path.glob("*.json")).read_text())["figures"]
    targets = record.pop("targets")
    assert len(targets) == 2
    for figures in record.values():
        assert figures["measured_peak_bytes"] == {
            way: peak << 20 for way, peak in figures["planned_peak_tokens"].items()
        }
        assert 0 < figures["largest_batch_measured"]["length-grouped"] < 64  # its peak at 64 is more than 64 GiB
        assert figures["largest_batch_measured"]["gpusampler"] > figures["largest_batch_measured"]["length-grouped"]
    peaks = [figures["measured_peak_bytes"] for figures in record.values()]
    ratio = np.median([peak["gpusampler"] / peak["length-grouped"] for peak in peaks])
    assert next(target["value"] for target in targets.values()) == f"{ratio:.2f}"
