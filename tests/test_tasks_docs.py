"""What docs/tasks.md says: its examples run, and moving from dataset sizes goes as it describes."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from test_tasks_sampler import batches
from torch.utils.data import DataLoader

from gpusampler.tasks import MultiTaskBatchSampler, Source, SystemGroup, Task, resolve_task_schedule
from gpusampler.tasks.cli import register
from gpusampler.tasks.config import schedule_from_config

PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()


class Frames:
    """A dataset that is indexed with the pair."""

    def __getitem__(self, item):
        return item


def test_the_example_at_the_top_runs_and_gives_what_its_comments_say():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"water_sampler": batches(30, 1), "ice_sampler": batches(40, 4), "alloy_sampler": batches(8, 1)}
    scope = {**names, "DataLoader": DataLoader, "dataset": Frames()}
    exec(example, scope)
    schedule = scope["schedule"]
    assert schedule.epoch_lengths == {"water": 40, "alloy": 8}
    assert schedule.probabilities == pytest.approx({"water": 40 / 48, "alloy": 1 - 40 / 48})
    assert schedule.task_at(12_345) in ("water", "alloy")
    task, indices = next(iter(scope["loader"]))
    assert (task, len(indices) in (1, 4)) == (schedule.task_at(0), True)


@pytest.mark.parametrize(
    ("row", "sources"),
    [
        ("| 30 and 10, no probabilities | 40: every batch once |", [30, 10]),
        ("| 30 at 0.75, 10 at 0.25, 1000 at 0 | 40 |", [Source(30, 0.75), Source(10, 0.25), Source(1000, 0)]),
        ("| 30 at 0.5, 10 at 0.5 | 60: the second is seen three times |", [Source(30, 0.5), Source(10, 0.5)]),
        (
            "| a group of 2, 1, 3 with `0:1:0.5;1:3:0.5` | 8 |",
            [SystemGroup([2, 1, 3], "prob_sys_size;0:1:0.5;1:3:0.5")],
        ),
    ],
)
def test_the_nominal_epochs_of_the_page(row, sources):
    assert row in PAGE
    assert Task("t", sources).epoch_length == int(re.search(r"\| (\d+)[^|]*\|$", row)[1])


@pytest.fixture
def config(tmp_path) -> dict:
    """The folder of 3 systems and the store of 97 records of the page."""
    for system in range(3):
        np.save(tmp_path / f"{system}.npy", np.full(64 << system, 10))
    connection = sqlite3.connect(tmp_path / "train.db")
    connection.execute("CREATE TABLE records (system TEXT, length INTEGER)")
    connection.executemany("INSERT INTO records VALUES (?, ?)", [(f"s{i % 2}", 5) for i in range(97)])
    connection.commit()
    connection.close()
    sampler = {"effective_batch_size": 8}
    folder = [{"lengths": f"{system}.npy", "sampler": sampler} for system in range(3)]
    tasks = {"folder": folder, "store": [{"records": "train.db", "sampler": sampler}]}
    return {"num_steps": 3000, "tasks": tasks}


def report(tmp_path, capsys, config) -> dict:
    (tmp_path / "tasks.json").write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["tasks", str(tmp_path / "tasks.json"), "--json"])
    assert arguments.func(arguments) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("draw", ["iid", "low_discrepancy"])
def test_the_old_balance_can_be_written_down_and_then_nothing_changes(tmp_path, capsys, config, draw):
    config["draw"] = draw
    old = report(tmp_path, capsys, config)
    assert "So a folder of 3 systems and a store of 97 records get 0.03 and 0.97" in PAGE
    assert (old["policy"], old["probabilities"]) == ("legacy", {"folder": "3/100", "store": "97/100"})
    kept = {**config, "model_prob": old["probabilities"]}
    assert report(tmp_path, capsys, kept)["probabilities"] == old["probabilities"]
    before = schedule_from_config(config, tmp_path)
    drawn = [before.draw_at(step) for step in range(3000)]
    after = schedule_from_config(kept, tmp_path)
    in_python = resolve_task_schedule(before.tasks, num_steps=3000, draw=draw, model_prob=before.exact)
    for moved in (after, in_python):
        assert moved.policy == "model_prob"
        assert [moved.draw_at(step) for step in range(3000)] == drawn
    np.save(tmp_path / "more.npy", np.full(80, 10))
    config["tasks"]["folder"].append({"lengths": "more.npy", "sampler": {"effective_batch_size": 8}})
    assert report(tmp_path, capsys, config)["probabilities"]["folder"] == "4/101"
    assert report(tmp_path, capsys, {**kept, "tasks": config["tasks"]})["probabilities"] == old["probabilities"]


def test_the_epoch_policy_changes_the_draws_of_tasks_and_no_others(tmp_path, capsys, config):
    new = {**config, "policy": "epoch", "policy_version": 1}
    table = report(tmp_path, capsys, new)
    assert table["epoch_lengths"] == {"folder": 8 + 16 + 32, "store": 6 + 6}  # of 49 and 48 records, tails dropped
    assert table["probabilities"] == {"folder": "14/17", "store": "3/17"}
    before, after = (schedule_from_config(one, tmp_path) for one in (config, new))
    for old_task, new_task in zip(before.tasks, after.tasks, strict=True):
        assert [old_task.source_at(step) for step in range(500)] == [new_task.source_at(step) for step in range(500)]
    both = [
        (before.draw_at(step), after.draw_at(step))
        for step in range(500)
        if before.task_at(step) == after.task_at(step)
    ]
    assert len(both) > 50
    assert all(old == new for old, new in both)
    epochs = {key: value for key, value in config.items() if key != "num_steps"}
    wanted = report(tmp_path, capsys, {**epochs, "num_epoch_dict": {"folder": 2, "store": 0.5}})
    assert wanted["num_steps"] == 2 * 56 + 6
    with pytest.raises(ValueError, match="excludes num_steps, got 3000"):
        schedule_from_config({**config, "num_epoch_dict": {"folder": 2, "store": 0.5}}, tmp_path)


def test_a_state_of_one_policy_does_not_load_into_another():
    assert "A state of one policy does not load into another." in PAGE

    def build(**keywords):
        tasks = [Task("a", [batches(6, 1)]), Task("b", [batches(6, 1)])]
        return MultiTaskBatchSampler(resolve_task_schedule(tasks, num_steps=9, **keywords))

    kinds = [{}, {"policy": "epoch"}, {"model_prob": {"a": "1/2", "b": "1/2"}}]
    for index, old in enumerate(kinds):
        for new in kinds[:index] + kinds[index + 1 :]:
            with pytest.raises(ValueError, match="state has policy '"):
                build(**new).load_state_dict(build(**old).state_dict())


@pytest.mark.parametrize("value", ["1/0", "1/-2", "-1/2", "0.5", "1 / 2", "", "1/2/3", "9" * 5000, "1/" + "9" * 5000])
def test_text_that_is_no_fraction_is_named(value):
    with pytest.raises(ValueError, match=r"model_prob\['a'\] must be a number, got '"):
        resolve_task_schedule([Task("a", [1])], num_steps=1, model_prob={"a": value})
