"""Lengths of datasets of every kind: exact values, no decoding, refusals with index and value, and the cache."""

from __future__ import annotations

import os
from collections import UserDict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import Dataset, IterableDataset

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.lengths_from import lengths_from
from gpusampler.sample_length import sample_length, size_of

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]
ROWS = [list(range(n)) for n in LENGTHS]


class Samples(Dataset):
    """A map-style dataset that counts how often it is read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.reads = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.samples[index]


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(ROWS)


def count_words(sample: Any) -> int:
    return len(sample["text"].split())


@pytest.mark.parametrize(
    "dataset",
    [
        datasets.Dataset.from_dict({"text": ["x"] * 8, "input_ids": ROWS}),
        datasets.Dataset.from_dict({"text": ["x"] * 8, "length": LENGTHS, "input_ids": [[1]] * 8}),
        datasets.Dataset.from_dict({"input_ids": ROWS}).with_format("torch"),
        pa.table({"input_ids": ROWS}),
        pa.table({"input_ids": pa.array(ROWS, pa.large_list(pa.int32()))}),
        pa.record_batch({"num_tokens": LENGTHS}),
        pa.array(ROWS),
        pa.chunked_array([ROWS[:3], ROWS[3:]]),
        pd.DataFrame({"input_ids": ROWS}),
        pd.DataFrame({"length": LENGTHS}),
        pd.Series(LENGTHS, index=range(10, 18)),
        pd.Series(ROWS, index=list("abcdefgh")),
        datasets.Dataset.from_dict({"labels": LENGTHS, "input_values": ROWS}),
        {"labels": LENGTHS, "tokens": ROWS, "meta": "one for all"},
        {"text": ["x"] * 8, "input_ids": ROWS},
        UserDict(input_ids=[np.zeros(n) for n in LENGTHS]),
        {"length": torch.tensor(LENGTHS)},
        LENGTHS,
        np.array(LENGTHS, np.int16),
        torch.tensor(LENGTHS),
        datasets.Dataset.from_dict({"length": LENGTHS})["length"],
        datasets.Dataset.from_dict({"input_ids": ROWS})["input_ids"],
        ROWS,
        [torch.zeros(n) for n in LENGTHS],
        [{"input_ids": row} for row in ROWS],
        [{"length": n, "input_ids": [0]} for n in LENGTHS],
        [UserDict(input_ids=row, attention_mask=row) for row in ROWS],
        [{"labels": torch.zeros(n)} for n in LENGTHS],
        [{"input_ids": torch.zeros(1, n)} for n in LENGTHS],
        [{"num_frames": np.int64(n), "audio": "path"} for n in LENGTHS],
        [{"num_tokens": torch.tensor(n)} for n in LENGTHS],
        Samples([{"input_ids": row} for row in ROWS]),
    ],
)
def test_every_kind_of_dataset(dataset: Any) -> None:
    lengths = lengths_from(dataset)
    assert isinstance(lengths, np.ndarray)
    assert lengths.tolist() == LENGTHS
    assert lengths.dtype.kind == "i"
    assert not lengths.flags.writeable


def test_L26_mappings_of_processors() -> None:
    from transformers import BatchEncoding, BatchFeature

    items = [BatchFeature({"input_ids": row}) for row in ROWS * 2]
    assert lengths_from(items).tolist() == LENGTHS * 2
    assert len(lengths_from(Samples(items), num_workers=0)) == 16
    assert lengths_from(BatchEncoding({"input_ids": ROWS, "attention_mask": ROWS})).tolist() == LENGTHS
    batched = [BatchFeature({"input_ids": torch.zeros(1, n, dtype=torch.int64)}) for n in LENGTHS]
    sampler = GPUBatchRebalanceSampler(lengths_from(batched), effective_batch_size=4, dp_size=2, rank=0)
    assert len(list(sampler)) == 2


@pytest.mark.parametrize(
    "dataset",
    [Endless(), datasets.Dataset.from_dict({"input_ids": ROWS}).to_iterable_dataset(), iter(ROWS), (x for x in ROWS)],
)
def test_L25_iterable_datasets_are_refused(dataset: Any) -> None:
    with pytest.raises(ParameterTypeError, match=r"samples by index, got \w+: gpusampler.streaming"):
        lengths_from(dataset)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"a": [1]})), {}, "splits 'train': pass one"),
        (5, {}, "samples by index, got int"),
        (b"abc", {}, "samples by index, got bytes"),
        ([], {}, "dataset is empty"),
        (pa.table({"a": ROWS}), {}, "which column holds the lengths.*'a'"),
        (pa.table({"length": LENGTHS, "num_tokens": LENGTHS}), {}, "one of: 'length', 'num_tokens'"),
        # class ids are not lengths, whatever holds them
        (datasets.Dataset.from_dict({"pixel": ["a"], "labels": [3]}), {}, "which column .* one of: 'pixel', 'labels'"),
        (pa.table({"pixel": ["a"], "labels": [3]}), {}, "which column .* one of: 'pixel', 'labels'"),
        (pd.DataFrame({"text": ["aaa", "b"], "labels": [1, 2]}), {}, "which column .* one of: 'text', 'labels'"),
        ({"text": ["aaa", "b"], "labels": torch.tensor([1, 2])}, {}, "which column .* one of: 'text', 'labels'"),
        ({"text": ["aaa", "b"], "labels": [torch.tensor(1), 2]}, {}, "which column .* one of: 'text', 'labels'"),
        (pa.table({"length": ROWS}), {}, "which column .* one of: 'length'"),
        ({"input_ids": ROWS, "text": ["x"]}, {}, "equal length: 'input_ids' has 8 rows, 'text' 1"),
        (ROWS, {"column": True}, "column must be a name or a position, got True"),
        (pa.table({"a": ROWS}), {"column": 1.5}, "column must be a name or a position, got 1.5"),
        (pa.array(ROWS), {"column": "a"}, "column='a' is for a table, dataset is one column"),
        (pd.Series(ROWS), {"column": "a"}, "sample 0: no 'a' in"),
        (pd.Series([3, 0]), {}, r"lengths\[1\] = 0 is not positive"),
        (pa.table({"a": ROWS}), {"column": "b"}, "column 'b' is not one of 'a'"),
        (pa.table({"a": ["text", "b"]}), {"column": "a"}, "column 'a' holds string, neither integers nor lists"),
        (pa.table({"a": [[1], [], [2]]}), {"column": "a"}, r"lengths of 'a'\[1\] = 0 is not positive"),
        (pa.table({"a": [[1], None, [2]]}), {"column": "a"}, r"lengths of 'a'\[1\] = None is missing"),
        (pa.table({"a": [1, 0, 7]}), {"column": "a"}, r"lengths of 'a'\[1\] = 0 is not positive"),
        (pa.table({"a": [1.0, float("nan")]}), {"column": "a"}, r"lengths of 'a'\[1\] = nan is not finite"),
        (pa.table({"a": [[7]] * 5}), {"column": "a"}, r"lengths of 'a' are all 1 \(5 samples\)"),
        ({"a": [[1, 2], None]}, {"column": "a"}, r"lengths of 'a'\[1\] = 0"),
        ({"a": ["text"]}, {"column": "a"}, r"a\[0\] is 'text' of type str, without a length: characters are not"),
        (pa.table({"a": ROWS}), {"fn": len}, "fn takes samples, which a Table does not give"),
        ("lengths.npy", {"fn": len}, "fn takes samples, which a file does not give"),
        ([{"text": "a b"}], {}, "what is the length of a sample.*a dict with 'text'"),
        ([(torch.zeros(3), 1)], {}, "what is the length of a sample.*type tuple"),
        (["a", "b"], {"column": "x"}, "no such file: a"),
        (Samples(["a", "b"]), {"column": "x"}, "sample 0: no 'x' in 'a' of type str"),
        (Samples([5, 6]), {}, "what is the length of a sample.*5 of type int"),
        ([{"labels": 3}], {}, "what is the length of a sample.*a dict with 'labels'"),
        ([{"input_ids": [1]}, {"ids": [1]}], {}, "sample 1: no 'input_ids' in a dict with 'ids'"),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], {}, "sample 1: 'input_ids' has length 0, which is not positive"),
        ([{"length": 1}, {"length": 2.5}], {}, "sample 1: 'length' is 2.5 of type float, without a length"),
        ([{"input_ids": [1]}] * 3, {}, r"lengths are all 1 \(3 samples\)"),
        (ROWS, {"fn": lambda sample: None}, "sample 0: fn returned None, which is missing"),
        (ROWS, {"fn": lambda sample: 0}, "sample 0: fn returned 0, which is not positive"),
        (ROWS, {"fn": lambda sample: 1.5}, "sample 0: fn returned 1.5, which is not an integer"),
        (ROWS, {"fn": lambda sample: sample}, "sample 0: fn returned .*list"),
        (ROWS, {"fn": lambda sample: sample["x"]}, "sample 0: TypeError: list indices must be integers"),
        (ROWS, {"fn": 3}, "fn must be callable, got 3"),
        (ROWS, {"fn": len, "column": "x"}, "give column or fn, not both"),
        (ROWS, {"num_workers": -1}, "num_workers must be at least 0"),
        (ROWS, {"cache": "x"}, "cache cannot tell one list from another: give fingerprint"),
        (ROWS, {"cache": "x", "fingerprint": 3}, "fingerprint must be a str, got 3"),
        (ROWS, {"cache": 3, "fingerprint": "a"}, "cache must be a folder, got 3"),
    ],
)
def test_L29_bad_datasets_and_lengths_are_named(
    dataset: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=message):
        lengths_from(dataset, **options)


def test_column_and_fn() -> None:
    assert lengths_from(pa.table({"labels": LENGTHS}), column="labels").tolist() == LENGTHS  # who says so is believed
    assert lengths_from(pd.Series(["x " * n for n in LENGTHS]), fn=lambda text: len(text) // 2).tolist() == LENGTHS
    assert lengths_from([(torch.zeros(n), 0) for n in LENGTHS], column=0).tolist() == LENGTHS
    assert lengths_from([{"a": row, "b": [1]} for row in ROWS], column="a").tolist() == LENGTHS
    texts = ["x " * n for n in LENGTHS]
    assert lengths_from([{"text": text} for text in texts], fn=count_words).tolist() == LENGTHS
    assert lengths_from(texts, fn=lambda text: len(text) // 2).tolist() == LENGTHS
    assert lengths_from(datasets.Dataset.from_dict({"text": texts}), fn=count_words).tolist() == LENGTHS


def test_workers_read_each_sample_once_in_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    dataset = Samples([{"input_ids": np.zeros(n)} for n in lengths])
    assert lengths_from(dataset).tolist() == lengths.tolist()
    assert dataset.reads == 300 + 1  # the first one says what counts
    assert lengths_from(dataset, num_workers=2).tolist() == lengths.tolist()
    dataset.samples[150] = {"text": "x"}
    with pytest.raises(ParameterError, match=r"^sample 150: no 'input_ids' in a dict with 'text'$"):
        lengths_from(dataset, num_workers=2)


def test_a_dataset_shorter_than_it_says() -> None:
    class Short(Samples):
        def __len__(self) -> int:
            return 10

    with pytest.raises(ParameterError, match="dataset has len 10, but sample 8 cannot be read: IndexError"):
        lengths_from(Short(ROWS))


def test_rows_that_were_selected_or_transformed() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": ROWS})
    assert lengths_from(dataset.select([5, 0, 6])).tolist() == [9, 3, 2]
    shuffled = dataset.shuffle(seed=1)
    assert lengths_from(shuffled).tolist() == [len(row) for row in shuffled[:]["input_ids"]]
    transformed = dataset.with_transform(lambda batch: {"input_ids": [row * 100 for row in batch["input_ids"]]})
    assert lengths_from(transformed).tolist() == [100 * n for n in LENGTHS]
    assert lengths_from(transformed, column="input_ids").tolist() == [100 * n for n in LENGTHS]
    assert lengths_from(transformed.select([5, 0])).tolist() == [900, 300]
    assert lengths_from(transformed.with_format(None)).tolist() == LENGTHS
    dataset.set_transform(lambda batch: {"pixels": batch["input_ids"]})
    with pytest.raises(ParameterError, match=r"sample 0: no 'input_ids' in .* \(the dataset's transform makes"):
        lengths_from(dataset, column="input_ids")


def test_other_arrow_types() -> None:
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))
    assert lengths_from(pa.table({"input_ids": fixed})).tolist() == [2, 2]
    features = datasets.Features({"frames": datasets.Array2D((None, 3), "float32")})
    frames = [np.zeros((n, 3), np.float32) for n in LENGTHS]
    dataset = datasets.Dataset.from_dict({"frames": frames}, features)
    assert lengths_from(dataset, column="frames").tolist() == LENGTHS


@pytest.mark.parametrize("kind", ["file", "stream", "feather", "parquet", "several", "npy"])
def test_files(kind: str, tmp_path: Path) -> None:
    table = pa.table({"input_ids": ROWS, "other": LENGTHS})
    path: Any = tmp_path / f"data.{ {'parquet': 'parquet', 'npy': 'npy', 'feather': 'feather'}.get(kind, 'arrow') }"
    if kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "npy":
        np.save(path, np.array(LENGTHS))
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table)
    if kind == "several":
        path = [path, str(path)]
    assert lengths_from(path).tolist() == LENGTHS * (2 if kind == "several" else 1)
    if kind != "npy":
        assert lengths_from(path, column="other").tolist() == LENGTHS * (2 if kind == "several" else 1)


def test_bad_files(tmp_path: Path) -> None:
    broken = tmp_path / "a.arrow"
    broken.write_bytes(b"ARROW1 is not enough")
    for path, message in [
        (broken, "a.arrow cannot be read as Arrow"),
        (tmp_path / "b.arrow", "b.arrow cannot be read"),
    ]:
        with pytest.raises(ParameterError, match=message):
            lengths_from(path)


def test_list_offsets_are_read_without_the_values(tmp_path: Path) -> None:
    offsets, values = np.arange(17, dtype=np.int32) * 1_000_000, np.zeros(16_000_000, np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    del table
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    assert set(lengths_from(tmp_path / "a.arrow").tolist()) == {1_000_000}
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert pa.default_memory_pool().max_memory() == peak


def test_cache_of_files_and_datasets(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.npy", tmp_path / "kept"
    np.save(path, np.array(LENGTHS))
    assert lengths_from(path, cache=cache).tolist() == LENGTHS
    (entry,) = cache.iterdir()
    stamp = entry.stat().st_mtime_ns
    assert lengths_from(path, cache=cache).tolist() == LENGTHS
    assert entry.stat().st_mtime_ns == stamp
    np.save(path, np.array(LENGTHS[::-1]))
    os.utime(path, ns=(1, stamp + 1))
    assert lengths_from(path, cache=cache).tolist() == LENGTHS[::-1]
    assert len(list(cache.iterdir())) == 2

    dataset = datasets.Dataset.from_dict({"input_ids": ROWS, "text": ["x " * n for n in LENGTHS]})
    assert lengths_from(dataset, cache=cache).tolist() == LENGTHS
    assert lengths_from(dataset.select([5, 0]), cache=cache).tolist() == [9, 3]
    assert lengths_from(dataset, fn=count_words, cache=cache).tolist() == LENGTHS
    assert lengths_from(dataset, fn=lambda row: 7, cache=cache).tolist() == [7] * 8
    assert len(list(cache.iterdir())) == 6


def test_cache_saves_reading_and_needs_a_fingerprint(tmp_path: Path) -> None:
    dataset = Samples([{"input_ids": row} for row in ROWS])
    lengths_from(dataset, cache=tmp_path, fingerprint="v1")
    reads = dataset.reads
    kept = lengths_from(dataset, cache=tmp_path, fingerprint="v1")
    assert (kept.tolist(), kept.flags.writeable) == (LENGTHS, False)
    assert dataset.reads == reads
    lengths_from(dataset, cache=tmp_path, fingerprint="v2")
    assert dataset.reads > reads


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "text"])
def test_a_damaged_or_foreign_cache_is_replaced(damage: str, tmp_path: Path) -> None:
    dataset = Samples([{"input_ids": row} for row in ROWS])
    lengths_from(dataset, cache=tmp_path, fingerprint="mine")
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(content[:-50])
    elif damage == "text":
        entry.write_bytes(b"hello")
    elif damage == "flip":
        at = content.index(np.array(LENGTHS, np.int32).tobytes())
        entry.write_bytes(content[:at] + b"\x07" + content[at + 1 :])
    else:
        lengths_from(Samples([{"input_ids": row} for row in ROWS[::-1]]), cache=tmp_path, fingerprint="other")
        (other,) = set(tmp_path.iterdir()) - {entry}
        os.replace(other, entry)
    problem = "belongs to another dataset" if damage == "foreign" else "is damaged"
    with pytest.warns(UserWarning, match=f"cached lengths .* are not used, the file {problem}"):
        assert lengths_from(dataset, cache=tmp_path, fingerprint="mine").tolist() == LENGTHS
    assert lengths_from(dataset, cache=tmp_path, fingerprint="mine").tolist() == LENGTHS


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    lengths_from(ROWS, progress=True)
    assert "reading lengths: 100%" in capsys.readouterr().err
    lengths_from(ROWS, progress=False)
    assert capsys.readouterr().err == ""


def test_what_counts_in_a_sample() -> None:
    assert sample_length({"Length": 4, "input_ids": [1]}).column == "Length"
    assert sample_length({"labels": [1, 2], "input_ids": [1]}).column == "input_ids"
    assert sample_length({"length": [1, 2], "tokens": [1, 2, 3]}).column == "tokens"
    assert sample_length([1, 2]).column is None
    assert size_of(torch.zeros(2, 7), "x") == 2
    for sample in ({"length": 3, "num_tokens": 4}, "text", {"input_ids": {"a": 1}}, 3, torch.tensor(3), [[1], [2]]):
        with pytest.raises(ParameterError, match="what is the length of a sample"):
            sample_length(sample)
