"""Front ends: in-memory arrays and a record store on disk, with the same results."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, WeightedRandomSampler

from gpusampler.errors import ParameterError
from gpusampler.tasks import (
    EmptyTaskError,
    MultiTaskBatchSampler,
    Source,
    Task,
    array_systems,
    make_source,
    record_systems,
    resolve_task_schedule,
)

# frames of each system, by their lengths
DATA = {"bulk": [64] * 10, "surface": [96] * 4 + [128] * 3, "cluster": [5, 7, 5, 200]}


def write_store(path, data):
    connection = sqlite3.connect(path)
    connection.execute('CREATE TABLE "records" (system TEXT, length INTEGER, payload BLOB)')
    rows = [(name, length, b"x") for name, lengths in data.items() for length in lengths]
    connection.executemany('INSERT INTO "records" VALUES (?, ?, ?)', rows)
    connection.commit()
    connection.close()
    return path


def of(size, drop_last=False):
    return lambda lengths: BatchSampler(SequentialSampler(range(len(lengths))), size, drop_last)


def rank_of_four(size):
    return lambda lengths: BatchSampler(DistributedSampler(range(len(lengths)), 4, 1), size, False)


def resampled(size):
    return lambda lengths: BatchSampler(WeightedRandomSampler([1.0] * len(lengths), 3 * len(lengths)), size, False)


@pytest.mark.parametrize(
    ("make_sampler", "keywords", "epoch_length"),
    [
        (of(4), {}, 3 + 2 + 1),
        (of(4, drop_last=True), {}, 2 + 1 + 1),
        (of(4), {"max_length": 100}, 3 + 1 + 1),  # 10, 4 and 3 frames stay
        (of(4), {"max_length": 64, "auto_prob": "prob_sys_size"}, 3 + 0 + 1),
        (of(4), {"auto_prob": "prob_uniform"}, 9),  # 3 / (1/3)
        (of(4), {"auto_prob": "prob_sys_size;0:1:0.25;1:3:0.75"}, 12),  # 3 / 0.25
        (of(4), {"auto_prob": "prob_sys_size;1:3:1"}, 3),  # the first is never drawn
        (of(4), {"sys_probs": [0.5, -1, -1]}, 6),  # 3 / 0.5, 2 / (1/3), 1 / (1/6)
        (rank_of_four(2), {}, 2 + 1 + 1),  # 3, 2 and 1 frames on each of four ranks
        (resampled(4), {}, 8 + 6 + 3),  # 30, 21 and 12 frames
    ],
)
def test_two_front_ends_find_the_same_epochs_and_draws(tmp_path, make_sampler, keywords, epoch_length):
    arrays = {name: np.array(lengths) for name, lengths in DATA.items()}
    fronts = (array_systems(arrays), record_systems(write_store(tmp_path / "train.db", DATA)))
    assert [[s.name for s in front] for front in fronts] == [list(DATA)] * 2
    tables, sequences = [], []
    for front in fronts:
        tasks = [
            Task("found", [make_source(front, make_sampler, **keywords)]),
            Task("other", [Source(of(1)(range(5)))]),
        ]
        schedule = resolve_task_schedule(tasks, policy="epoch", num_steps=40, seed=2)
        assert schedule.epoch_lengths == {"found": epoch_length, "other": 5}
        assert schedule.probabilities["found"] == epoch_length / (epoch_length + 5)
        tables.append(schedule.table())
        torch.manual_seed(len(tables) if make_sampler.__qualname__.startswith("resampled") else 0)
        sequences.append([(item.step, item.task, item.source, item.system) for item in MultiTaskBatchSampler(schedule)])
    assert tables[0] == tables[1]
    assert sequences[0] == sequences[1]


def test_legacy_sizes_of_the_front_ends_are_pinned(tmp_path):
    arrays = {name: np.array(lengths) for name, lengths in DATA.items()}
    store = write_store(tmp_path / "train.db", DATA)
    for max_length, systems, records in ((None, 3, 21), (100, 3, 17), (64, 2, 13), (6, 1, 2)):
        sizes = [
            make_source(f, of(4), max_length=max_length).legacy_size
            for f in (array_systems(arrays), record_systems(store))
        ]
        assert sizes == [systems, records]
    tasks = [
        Task("arrays", [make_source(array_systems(arrays), of(4))]),
        Task("store", [make_source(record_systems(store), of(4))]),
    ]
    assert resolve_task_schedule(tasks, num_steps=1).probabilities == {"arrays": 3 / 24, "store": 21 / 24}
    assert resolve_task_schedule(tasks, "epoch", num_steps=1).probabilities == {"arrays": 0.5, "store": 0.5}


def test_mixed_sources_in_one_task(tmp_path):
    task = Task(
        "mixed",
        [
            make_source(array_systems({"a": np.zeros((12, 8, 3))}), of(4), prob=0.5),  # 3 steps
            make_source(record_systems(write_store(tmp_path / "r.db", DATA)), of(4), prob=0.25),  # 6 steps
            Source(of(1)(range(2)), prob=0.25),
            Source(1000, prob=0),
        ],
    )
    assert task.epoch_length == 24  # max(3 / 0.5, 6 / 0.25, 2 / 0.25)


def test_arrays_are_found_recursively():
    data = {"x": [np.zeros((3, 64, 3)), {"y": torch.zeros(2, 5, 3)}], "z": np.array([4, 9], dtype=np.uint8), "none": ()}
    found = {system.name: system.lengths.tolist() for system in array_systems(data)}
    assert found == {"x/0": [64, 64, 64], "x/1/y": [5, 5], "z": [4, 9]}
    assert array_systems(np.zeros((2, 3)))[0].name == "array"
    tasks = [Task("found", [make_source(array_systems(data), of(2))]), Task("other", [2])]
    assert resolve_task_schedule(tasks, "epoch").probabilities == {"found": 2 / 3, "other": 1 / 3}  # 2 + 1 + 1 steps
    assert resolve_task_schedule(tasks).probabilities == {"found": 3 / 4, "other": 1 / 4}  # 3 systems, a count


def test_stores_are_found_recursively(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    write_store(tmp_path / "b" / "deep" / "two.db", {"s": [3, 4], "t": [5]})
    write_store(tmp_path / "one.db", {"s": [7]})
    found = {system.name: system.lengths.tolist() for system in record_systems(tmp_path)}
    assert found == {"b/deep/two/s": [3, 4], "b/deep/two/t": [5], "one/s": [7]}
    assert all(system.is_records for system in record_systems(tmp_path))
    tasks = [Task("found", [make_source(record_systems(tmp_path), of(2))]), Task("other", [6])]
    assert resolve_task_schedule(tasks, "epoch").probabilities == {"found": 1 / 3, "other": 2 / 3}  # 1 + 1 + 1 steps
    assert resolve_task_schedule(tasks).probabilities == {"found": 4 / 5, "other": 1 / 5}  # 4 records, a count


def test_bad_data_raises(tmp_path):
    with pytest.raises(ValueError, match="a/0 must be an array with a frame dimension, got 3"):
        array_systems({"a": [3]})
    with pytest.raises(ValueError, match="a must hold integer lengths if it is 1-D, got dtype float64"):
        array_systems({"a": np.array([1.5])})
    with pytest.raises(ParameterError, match="path must be a record store"):
        record_systems(tmp_path / "missing.db")
    with pytest.raises(ParameterError, match="path must be a record store"):
        record_systems(tmp_path)
    store = write_store(tmp_path / "train.db", DATA)
    with pytest.raises(ParameterError, match=r"record store 'train\.db' has no 'system', 'natoms' in 'records'"):
        record_systems(store, length="natoms")
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at by a library" * 20)
    with pytest.raises(ParameterError, match=r"record store 'text\.db'"):
        record_systems(tmp_path / "text.db")
    with pytest.raises(ValueError, match=r"length of row 0 in 'bad\.db' must be an int, got None"):
        record_systems(write_store(tmp_path / "bad.db", {"s": [None]}))
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        make_source(array_systems(np.array([3])), of(1), max_length=0)
    with pytest.raises(ValueError, match=r"a/0\[1\] must be a length from 0 to 2\*\*63 - 1, got -4"):
        array_systems({"a": [np.array([3, -4])]})
    with pytest.raises(ValueError, match="got 9223372036854775808"):
        array_systems(np.array([2**63], dtype=np.uint64))


def test_an_error_of_the_sampler_names_the_system():
    def refuse(lengths):
        raise ParameterError(f"too few rows: {len(lengths)}")

    with pytest.raises(ParameterError, match="system 'a' with 2 frames: too few rows: 2"):
        resolve_task_schedule([Task("t", [make_source(array_systems({"a": np.array([3, 4])}), refuse)])])


@pytest.mark.parametrize("front", ["arrays", "store", "none"])
@pytest.mark.parametrize("policy", ["epoch", "legacy"])
def test_a_source_that_filters_to_nothing_is_an_empty_task(tmp_path, front, policy):
    systems = {
        "arrays": lambda: array_systems({name: np.array(lengths) for name, lengths in DATA.items()}),
        "store": lambda: record_systems(write_store(tmp_path / "train.db", DATA)),
        "none": list,
    }[front]()
    tasks = [Task("full", [4]), Task("gone", [make_source(systems, of(4), max_length=1, auto_prob="prob_uniform")])]
    with pytest.raises(EmptyTaskError, match="task 'gone' has no batches to draw"):
        resolve_task_schedule(tasks, policy, num_steps=5)
    for exclude in (["gone"], "empty"):
        schedule = resolve_task_schedule(tasks, policy, num_steps=5, exclude=exclude)
        assert (schedule.excluded, schedule.probabilities) == (("gone",), {"full": 1.0})


def test_what_is_wrong_with_an_excluded_task_does_not_matter():
    def refuse(lengths):
        raise ParameterError("never")

    partly = make_source(array_systems({"a": np.array([3]), "b": np.array([9])}), of(1), max_length=5, sys_probs=[0, 1])
    tasks = [
        Task("full", [4]),
        Task("refused", [make_source(array_systems(np.array([3])), refuse)]),
        Task("partly", [partly]),
    ]
    with pytest.raises(ParameterError, match="source 0 of task 'refused': system 'array' with 1 frames: never"):
        resolve_task_schedule(tasks, num_steps=1, exclude=["partly"])
    with pytest.raises(ParameterError, match="source 0 of task 'partly': system 'b' with 0 frames is drawn"):
        resolve_task_schedule(tasks, num_steps=1, exclude=["refused"])
    assert resolve_task_schedule(tasks, num_steps=1, exclude=["partly", "refused"]).probabilities == {"full": 1.0}


def test_an_empty_source_beside_a_full_one_is_never_drawn():
    gone = make_source(array_systems(np.array([30])), of(1), max_length=5)
    task = Task("t", [gone, Source(of(1)(range(3)))])
    schedule = resolve_task_schedule([task], "epoch", num_steps=20)
    assert schedule.epoch_lengths == {"t": 3}
    assert {item.source for item in MultiTaskBatchSampler(schedule)} == {1}
    with pytest.raises(ParameterError, match="none of the 1 systems has batches to draw"):
        gone.workload.system_at(0, 1)


def test_a_folder_named_like_a_store_is_passed_over(tmp_path):
    (tmp_path / "a.db").mkdir()
    write_store(tmp_path / "b.db", {"s": [3]})
    assert [system.name for system in record_systems(tmp_path)] == ["b/s"]


def test_arguments_of_the_front_ends_are_named(tmp_path):
    store = write_store(tmp_path / "train.db", {"s": [3]})
    for keywords in ({"table": 3}, {"system": None}, {"length": b"n"}, {"pattern": 5}):
        with pytest.raises(ParameterError, match=f"{next(iter(keywords))} must be a string, got "):
            record_systems(store, **keywords)
    with pytest.raises(ParameterError, match=r"pattern must match names of files below .*, got '/x'"):
        record_systems(tmp_path, pattern="/x")
    with pytest.raises(ParameterError, match="path must be a string or a Path, got 3"):
        record_systems(3)
    connection = sqlite3.connect(store)
    connection.execute("INSERT INTO records (system, length) VALUES (NULL, 4)")
    connection.commit()
    connection.close()
    with pytest.raises(ParameterError, match=r"system of row 1 in 'train\.db' must be text or an int, got None"):
        record_systems(store)
    with pytest.raises(ParameterError, match=r"systems\[0\] must be a System, got array"):
        make_source([np.array([3])], of(1))
    with pytest.raises(ParameterError, match="make_sampler must be callable, got 3"):
        make_source(array_systems(np.array([3])), 3)
