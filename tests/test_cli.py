"""The command line: what goes where, and how users' mistakes look."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from gpusampler import __version__
from gpusampler.cli import main

LENGTHS = np.random.default_rng(2).integers(1, 500, 400)
SHAPE = ["--dp-size", "4", "--grad-accum", "2", "--batch-size", "40"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, LENGTHS)
    return str(path)


def report(capsys, *arguments):
    """The JSON that a report prints; nothing else may be on standard output."""
    assert main(["report", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, *arguments):
    """The one line that a mistake prints."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpusampler: error: ")
    assert err.count("\n") == 1
    return err


def without_times(found):
    for each in found["strategies"]:
        del each["planning_ms"]
    return found


def test_report_table(file, capsys):
    assert main(["report", file, *SHAPE]) == 0
    out, err = capsys.readouterr()
    assert "400 samples of 2 to 499 tokens" in out
    assert "40 samples in 8 micro-batches: 4 ranks x 2 slots" in out
    assert "all 10 of epoch 0 (seed 42)" in out
    names = [line.split("  ")[0] for line in out.splitlines()]
    for name in ("random", "length-grouped", "transformers", "transformers, alpha", "gpusampler", "max_tokens"):
        assert name in names
    assert "\r" not in err  # no progress bar where there is no terminal


def test_report_json_has_the_settings_and_is_the_same_again(file, capsys):
    options = [file, *SHAPE, "--sync", "step", "--alpha", "0.01", "--intercept", "7", "--seed", "5", "--epoch", "2"]
    options += ["--keep-last", "--max-tokens", "5000", "--steps", "4"]
    found = without_times(report(capsys, *options))
    assert found["settings"] == {
        "effective_batch_size": 40, "dp_size": 4, "grad_accum": 2, "sync": "step", "max_tokens": 5000, "alpha": 0.01,
        "intercept": 7.0, "shuffle": True, "seed": 5, "epoch": 2, "drop_last": False, "steps": 10,
    }  # fmt: skip
    assert found["lengths"]["count"] == 400
    assert [each["steps"] for each in found["strategies"]] == [4] * 5
    assert found["strategies"][-1]["micro_batches_over_cap"] == 0
    assert 5000 in [cap["max_tokens"] for cap in found["caps"]]
    assert without_times(report(capsys, *options)) == found


def test_report_reads_standard_input_and_columns(file, tmp_path, capsys, monkeypatch):
    expected = without_times(report(capsys, file, *SHAPE))
    for name in ("-", None):
        stdin = io.TextIOWrapper(io.BytesIO("".join(f"{length}\n" for length in LENGTHS).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert without_times(report(capsys, *([] if name is None else [name]), *SHAPE)) == expected
    table = tmp_path / "table.data"
    table.write_text("id,size\n" + "".join(f"{i},{length}\n" for i, length in enumerate(LENGTHS)))
    assert without_times(report(capsys, str(table), "--format", "csv", "--column", "size", *SHAPE)) == expected


def test_report_without_shuffle(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in [9] * 8 + [1] * 8))
    found = report(capsys, str(path), "--dp-size", "2", "--batch-size", "8", "--no-shuffle")
    assert found["strategies"][-1]["mean_length_spread"] == 0.8  # steps of nines and of ones: 4 / 5
    assert found["strategies"][0]["padding_share"] == 0.0


def test_report_of_a_shipped_trace_with_a_models_config(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}))
    found = report(capsys, "--trace", "mooncake_conversation", *SHAPE, "--steps", "3", "--config", str(config))
    assert found["lengths"]["longest"] == 126_527
    assert 1e-5 < found["settings"]["alpha"] < 1e-4


def test_report_picture(file, tmp_path, capsys):
    path = tmp_path / "report.png"
    assert main(["report", file, *SHAPE, "--plot", str(path)]) == 0
    assert path.read_bytes()[1:4] == b"PNG"


def test_oversize_alone_warns_in_one_line(file, capsys):
    options = ["report", file, *SHAPE, "--max-tokens", "490"]
    assert "--max-tokens=490 is below lengths[" in fails(capsys, *options)


@pytest.mark.filterwarnings("default")
def test_oversize_alone(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in [100] + [5] * 39))
    options = ["report", str(path), *SHAPE, "--max-tokens", "50", "--oversize", "alone"]
    assert main(options) == 0
    err = capsys.readouterr().err
    assert err.startswith("gpusampler: warning: 1 samples are longer than --max-tokens=50")
    assert "File" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --batch-size"),
        (["--batch-size", "forty"], "argument --batch-size: invalid int value: 'forty'"),
        (
            ["--batch-size", "4", *SHAPE[:4]],
            "--batch-size must be at least --dp-size * --grad-accum = 4 * 2 = 8, got 4",
        ),
        ([*SHAPE, "--dp-size", "0"], "--dp-size must be at least 1, got 0"),
        ([*SHAPE, "--steps", "0"], "--steps must be at least 1, got 0"),
        ([*SHAPE, "--epoch", "-1"], "epoch must be at least 0, got -1"),
        ([*SHAPE, "--batch-size", "500"], "at least --batch-size = 500 samples without --keep-last"),
        ([*SHAPE, "--alpha", "nan"], "alpha must be finite, got nan"),
        ([*SHAPE, "--alpha", "1", "--config", "x"], "not allowed with argument --alpha"),
        ([*SHAPE, "--config", "/no/config.json"], "config '/no/config.json' cannot be read"),
        ([*SHAPE, "--max-tokens", "500"], "--max-tokens=500 cannot be met in step 6 of epoch 0: it needs at least 32"),
        ([*SHAPE, "--column", "size"], "one array without columns"),
        ([*SHAPE, "--plot", "report.doc"], "plot must end in one of"),
        ([*SHAPE, "--sync", "never"], "argument --sync: invalid choice: 'never'"),
        ([*SHAPE, "--trace", "alpaca_eval_rollouts"], "give FILE or --trace, not both"),
        ([*SHAPE, "--trac", "alpaca_eval_rollouts"], "unrecognized arguments: --trac"),
    ],
)
def test_mistakes_are_one_line(file, capsys, options, message):
    assert message in fails(capsys, "report", file, *options)


@pytest.mark.parametrize(
    ("content", "message"),
    [("3\n0\n5\n", "line 2: 0 is not positive"), ("", "holds no lengths"), ("3\nnan\n", "line 2: nan is not finite")],
)
def test_L29_bad_lengths_are_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert message in fails(capsys, "report", str(path), *SHAPE)


def test_other_mistakes(tmp_path, capsys, monkeypatch):
    assert "no such file: nowhere.npy" in fails(capsys, "report", "nowhere.npy", *SHAPE)
    assert "no such file: max_tokens.npy" in fails(capsys, "report", "max_tokens.npy", *SHAPE)
    assert "required: COMMAND" in fails(capsys)
    assert "invalid choice: 'rapport'" in fails(capsys, "rapport")
    assert "--world-size must be at least 1, got 0" in fails(
        capsys, "demo", "--world-size", "0", "--output", str(tmp_path)
    )
    assert "--steps must be at least 1, got 0" in fails(capsys, "demo", "--steps", "0", "--output", str(tmp_path))
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert "cannot be made" in fails(capsys, "demo", "--output", str(occupied))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = fails(capsys, "report", "nowhere.npy", *SHAPE, "--plot", "report.png")
    assert "pip install 'gpusampler[report]'" in message


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpusampler {__version__}\n"
    for command in ([], ["report"], ["demo"], ["tasks"]):
        assert main([*command, "--help"]) == 0
        assert "usage: gpusampler" in capsys.readouterr().out


def test_tasks_command(tmp_path, capsys):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"tasks": {"a": [{"batches": 3}], "b": [{"batches": 1}]}, "num_steps": 8}))
    assert main(["tasks", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 8


def test_reader_of_the_output_that_leaves(file):
    command = f"{sys.executable} -m gpusampler.cli report {file} {' '.join(SHAPE)} --steps 2 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.startswith("lengths   400 samples")
