"""Measured records: checked arrays of them, and files.

A file has named columns of csv, tsv, jsonl, or json (a list of objects), or is a npy array; csv and tsv without a
header, and npy, are taken by position. Memory O(file).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.regression import Floats

Row = Mapping[str, Any]

SAMPLES = ("samples", "micro_batch", "num_samples", "batch_size", "n")
LENGTH = ("length", "padded_length", "seq_len", "max_length")
SECONDS = ("seconds", "micro_step_s", "time", "time_s")
TOKENS = ("tokens", "padded_tokens")
BYTES = ("bytes", "peak_bytes", "allocated", "peak")
_LEAST, _MOST = 1e-15, 1e18  # of any measured value: squares stay within float64
_KINDS = (".csv", ".tsv", ".jsonl", ".json", ".npy")


def check_records(records: Any, names: tuple[str, ...], whole: int) -> Floats:
    """Check measured records and return them as float64 [n, len(names)].

    Args:
        records: array, tensor, or iterable of rows.
        names: of the columns, for messages.
        whole: this many columns from the left must be whole numbers, 1 to 1e18; the others numbers
            from 1e-15 to 1e18.

    Raises:
        ParameterError: not such records; it names the row, the column and the value.
    """
    what = f"records must be [n, {len(names)}] numbers ({', '.join(names)})"
    if isinstance(records, torch.Tensor):
        if records.layout != torch.strided or records.is_meta:
            raise ParameterTypeError(f"records must be a dense tensor with values, got {quote(records)}")
        records = records.detach().cpu().to(torch.float64).numpy()
    elif isinstance(records, (str, bytes)) or not isinstance(records, Iterable):
        raise ParameterTypeError(f"{what}, got {quote(records)}")
    rows = records if isinstance(records, np.ndarray) else list(records)
    try:
        values = np.ma.filled(rows, np.nan) if isinstance(rows, np.ma.MaskedArray) else np.asarray(rows)
        if values.size and values.dtype.kind not in "iufO":
            raise ParameterTypeError(f"{what}: of numbers, got values of {values.dtype.type.__name__}")
        table = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"{what}, got {quote(rows)}: {error}") from error
    if table.ndim != 2 or table.shape[1] != len(names):
        if table.size == 0:
            raise ParameterError(f"{what}, got none")
        raise ParameterError(f"{what}, got shape {table.shape}")
    good = (table >= _LEAST) & (table <= _MOST)
    good[:, :whole] &= table[:, :whole] == np.rint(table[:, :whole])
    if not good.all():
        row, column = (int(i) for i in np.argwhere(~good)[0])
        kind = "a whole number of at least 1" if column < whole else f"a number from {_LEAST} to {_MOST}"
        raise ParameterError(f"records[{row}, {column}] ({names[column]}) must be {kind}, got {table[row, column]}")
    return table


def read_records(
    path: Path, layouts: Sequence[Sequence[Sequence[str]]], where: Mapping[str, str] | None = None
) -> list[list[float]]:
    """Read the rows of a file.

    Args:
        path: by its extension: .csv, .tsv, .jsonl, .json or .npy. A json object may hold the rows under "peaks" or
            "records".
        layouts: choices of columns, the first that a file has is taken; a column is a list of names it may have.
        where: keep the rows whose columns have these values, as text.

    Returns:
        One list of numbers a row, in the order of the layout.

    Raises:
        ParameterError: no such file, column or rows, or a value that is not a number; it names the row and the column.
    """
    rows = _read(path)
    if not rows or not isinstance(rows[0], Mapping):
        if where:
            raise ParameterError(f"{path} has no names of columns to select rows by")
        return [_numbers(path, i, row) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ParameterError(f"{path}, record {i}: it must have names of columns as record 0 has, got {quote(row)}")
    for name, wanted in (where or {}).items():
        if name not in rows[0]:
            raise ParameterError(f"{path} has no column {name!r}, it has {quote(list(rows[0]), 200)}")
        rows = [row for row in rows if str(row.get(name)) == wanted]
        if not rows:
            raise ParameterError(f"{path} has no rows with {name}={wanted}")
    names = _choose(path, list(rows[0]), layouts)
    for i, row in enumerate(rows):
        for name in names:
            if name not in row:
                raise ParameterError(f"{path}, record {i}: it has no {name!r}, got {quote(row)}")
    return [_numbers(path, i, [row[name] for name in names]) for i, row in enumerate(rows)]


def _read(path: Path) -> list[Any]:
    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise ParameterError(f"{path} must end in {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    try:
        if kind == ".npy":
            table = np.load(path, allow_pickle=False)
            if table.ndim != 2:
                raise ParameterError(f"its array must be [n, columns], it has the shape {table.shape}")
            return list(table.tolist())
        text = path.read_text(encoding="utf-8-sig")
        if kind == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        if kind == ".json":
            found = json.loads(text)
            if isinstance(found, Mapping):
                found = found.get("peaks", found.get("records"))
            if not isinstance(found, list):
                raise ParameterError("it must hold a list of records")
            return found
        return _read_table(text, "\t" if kind == ".tsv" else ",")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from error


def _read_table(text: str, delimiter: str) -> list[Any]:
    lines = csv.reader(text.splitlines(), delimiter=delimiter)
    rows = [[cell.strip() for cell in row] for row in lines if row]
    if not rows:
        return []
    try:
        float(rows[0][0])
    except ValueError:
        names = rows[0]
    else:
        return rows
    if len(set(names)) < len(names):
        raise ParameterError(f"two of its columns have one name: {quote(names, 200)}") from None
    for i, row in enumerate(rows[1:]):
        if len(row) != len(names):
            raise ParameterError(f"record {i} has {len(row)} cells, and there are {len(names)} columns: {quote(row)}")
    return [dict(zip(names, row, strict=True)) for row in rows[1:]]


def _choose(path: Path, names: list[str], layouts: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    for layout in layouts:
        chosen = [next((name for name in choices if name in names), None) for choices in layout]
        if None not in chosen:
            return [name for name in chosen if name is not None]
    wanted = " or ".join(", ".join(choices[0] for choices in layout) for layout in layouts)
    raise ParameterError(f"{path} must have the columns {wanted}, it has {quote(names, 200)}")


def _numbers(path: Path, place: int, row: Any) -> list[float]:
    if not isinstance(row, list):
        raise ParameterError(f"{path}, record {place}: it must be a list of numbers, got {quote(row)}")
    found = []
    for value in row:
        try:
            if isinstance(value, bool):
                raise TypeError
            found.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise ParameterError(f"{path}, record {place}: {quote(value)} is not a number") from error
    return found
