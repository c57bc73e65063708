"""`gpusampler tasks CONFIG`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest

from gpusampler.tasks.cli import register


def call(tmp_path, config, *options):
    path = tmp_path / "tasks.json"
    text = config if isinstance(config, (str, bytes)) else json.dumps(config)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["tasks", str(path), *options])
    return arguments.func(arguments)


WATER = [{"batches": 30, "prob": 0.75}, {"batches": 10, "prob": 0.25}, {"batches": 1000, "prob": 0}]
ALLOY = {"sources": [{"systems": [2, 1, 3], "auto_prob": "prob_sys_size;0:1:0.5;1:3:0.5", "name": "phases"}]}


def test_report_in_text(tmp_path, capsys):
    config = {"policy": "epoch", "policy_version": 1, "num_steps": 4800, "tasks": {"water": WATER, "alloy": ALLOY}}
    assert call(tmp_path, config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy epoch (version 1), draw iid, seed 0, 4800 steps"
    cells = [line.split() for line in lines[2:-1]]
    assert [c[:4] for c in cells] == [
        ["water", "0.833333", "40", "4000.0"],
        ["water/0", "0.625000", "30", "3000.0"],
        ["water/1", "0.208333", "10", "1000.0"],
        ["water/2", "0.000000", "0", "0.0"],
        ["alloy", "0.166667", "8", "800.0"],
    ]
    assert [c[5] for c in cells] == ["100", "100", "100", "0", "100"]


def test_report_in_json_and_the_default_policy(tmp_path, capsys):
    assert call(tmp_path, {"tasks": {"water": WATER, "alloy": ALLOY}}, "--num-steps", "600", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["policy"], report["policy_version"], report["num_steps"]) == ("legacy", 1, 600)
    assert report["probabilities"] == {"water": "1/2", "alloy": "1/2"}  # three sources, three systems
    assert [row["visits"] for row in report["expected"] if row["source"] is None] == [300.0, 300.0]


def test_epochs_decide_the_budget_and_tasks_can_be_excluded(tmp_path, capsys):
    tasks = {"water": WATER, "alloy": ALLOY, "none": []}
    config = {
        "num_epoch_dict": {"water": 2, "alloy": 0.5},
        "exclude": ["none"],
        "draw": "low_discrepancy",
        "tasks": tasks,
    }
    assert call(tmp_path, config) == 0
    out = capsys.readouterr().out
    assert "policy num_epoch_dict (version 1), draw low_discrepancy, seed 0, 84 steps" in out
    assert "excluded: none" in out


def test_the_report_in_the_documentation_is_what_its_configuration_gives(tmp_path, capsys):
    text = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
    (config,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"\$ gpusampler tasks tasks.json\n(.*?)```", text, re.DOTALL)
    assert call(tmp_path, config) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "Expecting property name"),
        ([], "configuration must be a mapping"),
        ({"tasks": {"a": [{"batches": 3}]}, "polcy": "epoch"}, "configuration has unknown keys ['polcy']"),
        ({"tasks": [1]}, "tasks must map names to tasks"),
        ({"tasks": {"a": 3}}, "task 'a' must be a mapping"),
        ({"tasks": {"a": {"sources": 3}}}, "sources of task 'a' must be a list"),
        ({"tasks": {"a": [{"prob": 1}]}}, "source 0 of task 'a' must have one of"),
        ({"tasks": {"a": [{"batches": 3, "systems": [1]}]}}, "must have one of"),
        ({"tasks": {"a": [{"batches": "3"}]}}, "source 0 of task 'a': batches must be an int, got '3'"),
        ({"tasks": {"a": [{"batches": 3, "auto_prob": "x"}]}}, "a source with batches has unknown keys ['auto_prob']"),
        ({"tasks": {"a": [{"systems": 3}]}}, "systems must be a list of ints"),
        ({"tasks": {"a": [{"systems": [1], "auto_prob": "x"}]}}, "source 0 of task 'a': auto_prob must be"),
        ({"tasks": {"a": [{"lengths": 3, "sampler": {}}]}}, "a path must be a string, got 3"),
        ({"tasks": {"a": [{"lengths": "no.npy", "sampler": {}}]}}, "lengths must be an .npy file"),
        ({"tasks": {"a": [{"records": "no.db", "sampler": {}}]}}, "path must be a record store"),
        ({"tasks": {"a": [{"batches": 3}]}}, "num_steps must be given"),
        ({"tasks": {"a": [{"batches": 0}]}, "num_steps": 1}, "task 'a' has no batches"),
        ({"tasks": {"a": [{"batches": 1}]}, "num_steps": 1, "policy_version": 7}, "policy_version must be 1"),
    ],
)
def test_bad_configurations_are_one_line_and_exit_code_2(tmp_path, capsys, config, message):
    assert call(tmp_path, config) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_a_missing_file_is_exit_code_2(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["tasks", str(tmp_path / "none.json")])
    assert arguments.func(arguments) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tasks": {"a": [{"batches": 3}], "a": [{"batches": 4}]}}', "'a' occurs twice in one object"),
        ('{"tasks": {"a": [{"batches": 3, "prob": 1, "prob": 2}]}}', "'prob' occurs twice"),
        (b'{"tasks": {"\xff": []}}', "can't decode byte 0xff"),
        ('{"num_steps": 1%s, "tasks": {"a": [{"batches": 3}]}}' % ("0" * 5000), "Exceeds the limit"),
        ("[" * 100_000, "recursion"),
        ('{"num_steps": 1%s, "tasks": {"a": [{"batches": 3}]}}' % ("0" * 400), "num_steps must be at most"),
        ('{"num_steps": 9, "tasks": {"a": [{"batches": 1%s}]}}' % ("0" * 400), "batches of the source must be at most"),
        (
            '{"num_steps": 9, "tasks": {"a": [{"batches": 3, "prob": 1%s}]}}' % ("0" * 400),
            "prob must be at most 1.8e308",
        ),
        (
            '{"num_steps": 9, "model_prob": {"a": 1%s}, "tasks": {"a": [{"batches": 3}]}}' % ("0" * 400),
            "model_prob['a']",
        ),
        (
            '{"num_epoch_dict": {"a": 1e300}, "tasks": {"a": [{"batches": 3}]}}',
            "steps of num_epoch_dict must be at most",
        ),
        ('{"num_steps": 9, "exclude": [["a"]], "tasks": {"a": [{"batches": 3}]}}', "exclude[0] must be the name of"),
        (
            '{"num_steps": 9, "exclude": ["b", 3, null], "tasks": {"a": [{"batches": 3}]}}',
            "exclude[1] must be the name",
        ),
        ('{"num_steps": 9, "exclude": 5, "tasks": {"a": [{"batches": 3}]}}', "exclude must be a list"),
        ('{"num_steps": 9, "tasks": {"a": [{"systems": [1, 2], "sys_probs": 5}]}}', "sys_probs must be a list, got 5"),
        ('{"num_steps": 9, "tasks": {"a": [{"batches": [1, 2]}]}}', "batches must be an int, got [1, 2] of type list"),
        ('{"num_steps": 9, "tasks": {"a": [{"batches": {"b": 1}}]}}', "batches must be an int, got {'b': 1}"),
        (
            '{"num_steps": 9, "tasks": {"a": [{"systems": [1, [2]]}]}}',
            "systems[1] must be an int, got [2] of type list",
        ),
        ('{"num_steps": 9, "tasks": {"a": [{"batches": 3, "name": 5}]}}', "name of a source must be a string, got 5"),
        ('{"num_steps": 9, "tasks": {"\\ud800": [{"batches": 3}]}}', "name of a task must be text"),
        ('{"num_steps": 9, "policy_version": true, "tasks": {"a": [{"batches": 3}]}}', "policy_version must be an int"),
        ('{"num_steps": 9, "tasks": {"a": [{"systems": [0, 0]}]}}', "task 'a' has no batches to draw"),
    ],
)
def test_hostile_files_are_one_line_and_exit_code_2(tmp_path, capsys, text, message):
    assert call(tmp_path, text) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize("budget", [{"num_steps": 9}, {"num_epoch_dict": {"a": 3}}])
def test_a_budget_is_given_once(tmp_path, capsys, budget):
    assert call(tmp_path, {**budget, "tasks": {"a": [{"batches": 3}]}}, "--num-steps", "10") == 2
    message = "--num-steps 10 is for configurations without a budget; this one has 9 steps"
    assert message in capsys.readouterr().err


def test_a_task_can_be_excluded_that_cannot_be_read_or_filters_to_nothing(tmp_path, capsys):
    np.save(tmp_path / "long.npy", np.array([500, 600]))
    gone = {"lengths": "long.npy", "max_length": 100, "sampler": {"effective_batch_size": 1}}
    config = {"num_steps": 9, "tasks": {"full": [{"batches": 3}], "gone": [gone]}}
    assert call(tmp_path, config) == 2
    assert "task 'gone' has no batches to draw" in capsys.readouterr().err
    for exclude in ("empty", ["gone"]):
        assert call(tmp_path, {**config, "exclude": exclude}) == 0
        assert "excluded: gone" in capsys.readouterr().out
    config["tasks"]["gone"] = [{"lengths": "missing.npy"}]
    assert call(tmp_path, {**config, "exclude": ["gone"]}) == 0
    assert "excluded: gone" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01", b"PK\x03\x04", b"text"])
def test_a_file_that_is_no_array_is_named(tmp_path, capsys, content):
    (tmp_path / "l.npy").write_bytes(content)
    config = {"num_steps": 9, "tasks": {"a": [{"lengths": "l.npy", "sampler": {"effective_batch_size": 1}}]}}
    assert call(tmp_path, config) == 2
    assert "source 0 of task 'a': lengths must be an .npy file of one length a sample" in capsys.readouterr().err


def test_names_stay_on_one_line_and_sources_are_shown_by_theirs(tmp_path, capsys):
    tasks = {
        "a\nb": [{"batches": 3, "name": "bulk\r"}, {"batches": 1, "name": "ice cubes"}, {"batches": 1}],
        "\x1b[31mred": [{"batches": 1}],
        "out\n": [],
    }
    config = {"policy": "epoch", "num_steps": 60, "exclude": ["out\n"], "tasks": tasks}
    assert call(tmp_path, config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +\d", line)[0] for line in lines[2:-1]] == [
        r"'a\nb'",
        r"  'a\nb'/'bulk\r'",
        r"  'a\nb'/ice cubes",
        r"  'a\nb'/2",
        r"'\x1b[31mred'",
        r"excluded: 'out\n'",
    ]
    assert call(tmp_path, config, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["expected"]
    assert [(row["task"], row["source"], row["name"]) for row in rows] == [
        ("a\nb", None, None),
        ("a\nb", 0, "bulk\r"),
        ("a\nb", 1, "ice cubes"),
        ("a\nb", 2, None),
        ("\x1b[31mred", None, None),
    ]


def test_the_legacy_size_of_data_can_be_given(tmp_path, capsys):
    np.save(tmp_path / "l.npy", np.arange(1, 50))
    data = {"lengths": "l.npy", "sampler": {"effective_batch_size": 7}}
    for given, expected in (({}, "1/4"), ({"legacy_size": 9}, "3/4")):
        config = {"num_steps": 5, "tasks": {"a": [{**data, **given}], "b": [{"systems": [1, 1, 1]}]}}
        assert call(tmp_path, config, "--json") == 0
        assert json.loads(capsys.readouterr().out)["probabilities"]["a"] == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ([{"batches": 3, "prob": 1e-300}, {"batches": 1, "prob": 1}], "source 0 of task 'a'"),
        ([{"systems": [3, 1], "sys_probs": [1e-300, -1]}], "system 0"),
    ],
)
def test_an_epoch_that_no_run_could_have_is_named(tmp_path, capsys, source, name):
    for policy in ("epoch", "legacy"):
        assert call(tmp_path, {"policy": policy, "num_steps": 9, "tasks": {"a": source}}) == 2
        message = f"{name} has 3 batches at probability 1e-300: a nominal epoch must be at most {2**63 - 1} steps"
        assert message in capsys.readouterr().err
