"""Lengths of a dataset's samples, without decoding more than that takes.

| dataset                                    | how                                                                    |
|--------------------------------------------|------------------------------------------------------------------------|
| `datasets.Dataset`, pyarrow table or array | an integer column as it is; list columns by their offsets, no values    |
| file(s): Arrow, Feather                    | the same, memory-mapped                                                |
| file(s): parquet, csv, json, npy, ...      | `readers.read_lengths`: one column, batch by batch                     |
| mapping of columns, pandas DataFrame       | one column                                                             |
| map-style dataset, list of samples         | each sample is read once, in parallel in `num_workers` processes       |
| `datasets.Dataset` with a transform        | the same: the transform may change lengths                             |

The result is checked, and can be kept on disk under a fingerprint of what it was read from. O(N) time and memory; a
million list offsets take a few milliseconds, reading samples takes what the dataset takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from gpusampler import lengths_cache
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.lengths import as_lengths
from gpusampler.lengths_columns import from_arrow, from_columns, from_datasets
from gpusampler.readers import read_lengths
from gpusampler.sample_length import SampleLength, check_column, sample_length

_Array = np.ndarray[Any, Any]
_Path = str | os.PathLike[str]

_ARROW_EXTENSIONS = (".arrow", ".feather", ".ipc")
_SAMPLES_A_TASK = 64


def lengths_from(
    dataset: Any,
    *,
    column: str | int | None = None,
    fn: Callable[[Any], int] | None = None,
    num_workers: int = 0,
    cache: _Path | None = None,
    fingerprint: str | None = None,
    progress: bool | None = None,
) -> _Array:
    """Read the length of each sample.

    Args:
        dataset: see the table above; one path or several (their samples follow each other). An iterable dataset has no
            order to take lengths in and is refused.
        column: name of the column, key or position in a sample that counts: integers are lengths, sequences have one.
            Default: the only one of integers with a usual name of a length (`length`, `num_tokens`, ...), else the
            first of sequences among `input_ids`, `token_ids`, `tokens`, `input_values`, `inputs_embeds`, `labels`.
        fn: returns the length of a sample, instead of `column`; samples are read then, even of a `datasets.Dataset`.
        num_workers: processes that read samples; 0 reads them here. Columns do not need any.
        cache: folder where the result is kept and found again. A damaged file or one of another dataset is read anew,
            with a warning.
        fingerprint: names the dataset (and `fn`) in the cache; needed where nothing else does. A `datasets.Dataset` has
            a fingerprint of its own, files have their sizes and times.
        progress: show a progress bar on standard error; None shows it on a terminal, after a second.

    Returns:
        Read-only integer array [N], each from 1 to 2**31 - 1, in the order of the dataset.

    Raises:
        ParameterTypeError: an iterable dataset, a dict of splits, or something else without samples by index.
        ParameterError: unclear which column, a sample without it, a length that is not a positive integer (named with
            its index), another number of lengths than samples, or lengths that are all 1.

    Example:
        >>> lengths_from([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]).tolist()
        [3, 1]
        >>> lengths_from({"text": ["a", "b"], "input_ids": [[1, 2, 3], [4]]}).tolist()
        [3, 1]
    """
    num_workers = check_int("num_workers", num_workers, minimum=0)
    check_column(column)
    if fn is not None and column is not None:
        raise ParameterError(f"give column or fn, not both, got column={column!r}")
    if fn is not None and not callable(fn):
        raise ParameterTypeError(f"fn must be callable, got {quote(fn)}")
    paths = _paths_of(dataset, fn)
    if not paths:
        _refuse_unordered(dataset)
    if _is_from("pandas", dataset) and not hasattr(dataset, "columns"):
        dataset = dataset.tolist()  # a Series is a column: of lengths, or of samples
    count = None if paths or isinstance(dataset, Mapping) else len(dataset)

    def read() -> _Array:
        made = _from_files(paths, column, progress) if paths else _read(dataset, column, fn, num_workers, progress)
        return _checked(made, count, column)

    if cache is None:
        return read()
    about = lengths_cache.describe(dataset, paths, column, fn, fingerprint)
    file = lengths_cache.file_for(cache, about)
    lengths = lengths_cache.load(file, about)
    if lengths is None:
        lengths = read()
        lengths_cache.save(file, about, lengths)
    return _checked(lengths, count, column)


def _checked(lengths: Any, count: int | None, column: Any) -> _Array:
    """Positive integers, as many as samples, and not all 1."""
    name = "lengths" if column is None else f"lengths of {column!r}"
    checked = as_lengths(lengths, name=name)
    if count is not None and len(checked) != count:
        raise ParameterError(f"{name}: {len(checked)} for {count} samples")
    if checked.maximum == 1 and len(checked) > 1:
        raise ParameterError(
            f"{name} are all 1 ({len(checked)} samples): they count something else than tokens; give column or fn"
        )
    return checked.values


def _paths_of(dataset: Any, fn: Any) -> list[_Path]:
    """The paths, where the dataset is one or a list of them; else nothing. With `fn`, strings are samples."""
    if isinstance(dataset, (str, os.PathLike)):
        if fn is not None:
            raise ParameterError("fn takes samples, which a file does not give: use column")
        return [dataset]
    is_list = isinstance(dataset, (list, tuple)) and len(dataset) > 0 and fn is None
    return list(dataset) if is_list and isinstance(dataset[0], (str, os.PathLike)) else []


def _refuse_unordered(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        if _is_from("datasets", dataset):
            raise ParameterTypeError(f"dataset is a {kind} of splits {', '.join(map(repr, dataset))}: pass one of them")
        return
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (IterableDataset, bytes)) or not sized:
        advice = ": gpusampler.streaming balances an iterable dataset" if hasattr(dataset, "__iter__") else ""
        raise ParameterTypeError(f"dataset must give samples by index, got {kind}{advice}")


def _read(dataset: Any, column: Any, fn: Any, num_workers: int, progress: bool | None) -> Any:
    is_table = isinstance(dataset, Mapping) or _is_from("pyarrow", dataset) or _is_from("pandas", dataset)
    if fn is not None:
        if is_table:
            raise ParameterError(f"fn takes samples, which a {type(dataset).__name__} does not give: use column")
    elif _is_from("datasets", dataset) and hasattr(dataset, "column_names"):
        if dataset.format["type"] != "custom":
            return from_datasets(dataset, column)
        try:
            return _from_samples(dataset, column, fn, num_workers, progress)
        except ParameterError as error:
            advice = "the dataset's transform makes the samples; dataset.with_format(None) has the stored columns"
            raise ParameterError(f"{error} ({advice})") from error
    elif _is_from("pyarrow", dataset):
        return from_arrow(dataset, column)
    elif is_table:
        return from_columns(dataset, column)
    elif column is None and _holds_numbers(dataset):
        return dataset
    return _from_samples(dataset, column, fn, num_workers, progress)


def _holds_numbers(dataset: Any) -> bool:
    """Whether this is a column of lengths already."""
    if isinstance(dataset, torch.utils.data.Dataset) or len(dataset) == 0:
        return False
    first = dataset[0]
    return getattr(first, "ndim", 0) == 0 and isinstance(getattr(first, "item", lambda: first)(), (int, float))


def _from_files(paths: list[_Path], column: Any, progress: bool | None) -> _Array:
    return np.concatenate([_from_file(os.fspath(path), column, progress) for path in paths])


def _from_file(path: str, column: Any, progress: bool | None) -> Any:
    if not path.lower().endswith(_ARROW_EXTENSIONS):
        return read_lengths(path, column=column, progress=progress)
    import pyarrow as pa

    try:
        mapped = pa.memory_map(path)
        try:
            table = pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_stream(pa.memory_map(path)).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ParameterError(f"{path} cannot be read as Arrow: {error}") from error
    return np.asarray(from_arrow(table, column))


class _Samples(torch.utils.data.Dataset[Any]):
    """The lengths of a dataset's samples, as a dataset that workers can read; errors come as text."""

    def __init__(self, dataset: Any, length: SampleLength) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int | str:
        try:
            sample = self.dataset[index]
        except Exception as error:
            return f"dataset has len {len(self)}, but sample {index} cannot be read: {type(error).__name__}: {error}"
        try:
            return self.length(sample)
        except Exception as error:
            kind = "" if isinstance(error, ParameterError) else f"{type(error).__name__}: "
            return f"sample {index}: {kind}{error}"


def _from_samples(dataset: Any, column: Any, fn: Any, num_workers: int, progress: bool | None) -> _Array:
    if len(dataset) == 0:
        raise ParameterError("dataset is empty: at least one sample is needed")
    samples = _Samples(dataset, SampleLength(column, fn))
    if column is None and fn is None:
        samples.length = sample_length(dataset[0])
    lengths = np.empty(len(samples), np.int32)
    shown = None if progress is None else not progress
    with tqdm(
        total=len(samples), desc="reading lengths", unit="", unit_scale=True, disable=shown, delay=0 if progress else 1
    ) as bar:
        for start, block in _blocks(samples, num_workers):
            lengths[start : start + len(block)] = block
            bar.update(len(block))
    return lengths


def _blocks(samples: _Samples, num_workers: int) -> Iterator[tuple[int, list[int]]]:
    loader: DataLoader[Any] = DataLoader(samples, _SAMPLES_A_TASK, num_workers=num_workers, collate_fn=list)
    for number, block in enumerate(loader):
        # raised here and not in a worker: an error with the loader's frames keeps its processes waiting
        for length in block:
            if isinstance(length, str):
                raise ParameterError(length)
        yield number * _SAMPLES_A_TASK, block


def _is_from(package: str, value: object) -> bool:
    return type(value).__module__.partition(".")[0] == package
