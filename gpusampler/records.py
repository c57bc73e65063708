"""Measured records from a file: named columns of csv, tsv, jsonl, or json (a list of objects), or a npy array.

csv and tsv without a header, and npy, are taken by position. For the command line; memory O(file).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpusampler.errors import ParameterError, quote

Row = Mapping[str, Any]

SAMPLES = ("samples", "micro_batch", "num_samples", "batch_size", "n")
LENGTH = ("length", "padded_length", "seq_len", "max_length")
SECONDS = ("seconds", "micro_step_s", "time", "time_s")
TOKENS = ("tokens", "padded_tokens")
BYTES = ("bytes", "peak_bytes", "allocated", "peak")


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
        return [list(map(_number, row)) for row in rows]
    for name, wanted in (where or {}).items():
        if name not in rows[0]:
            raise ParameterError(f"{path} has no column {name!r}, it has {quote(list(rows[0]), 200)}")
        rows = [row for row in rows if str(row.get(name)) == wanted]
        if not rows:
            raise ParameterError(f"{path} has no rows with {name}={wanted}")
    names = _choose(path, list(rows[0]), layouts)
    found = []
    for i, row in enumerate(rows):
        try:
            found.append([_number(row[name]) for name in names])
        except (KeyError, ParameterError) as error:
            raise ParameterError(f"{path}, record {i}: {error}") from error
    return found


def _read(path: Path) -> list[Any]:
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            return list(np.load(path, allow_pickle=False).tolist())
        text = path.read_text(encoding="utf-8-sig")
        if kind == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        if kind == ".json":
            found = json.loads(text)
            if isinstance(found, Mapping):
                found = found.get("peaks", found.get("records"))
            if not isinstance(found, list):
                raise ParameterError(f"{path} must hold a list of records")
            return found
        if kind in (".csv", ".tsv"):
            return _read_table(text, "\t" if kind == ".tsv" else ",")
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from error
    raise ParameterError(f"{path} must end in .csv, .tsv, .jsonl, .json or .npy")


def _read_table(text: str, delimiter: str) -> list[Any]:
    rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if row]
    if not rows:
        return []
    try:
        float(rows[0][0])
    except ValueError:
        return [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]
    return rows


def _choose(path: Path, names: list[str], layouts: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    for layout in layouts:
        chosen = [next((name for name in choices if name in names), None) for choices in layout]
        if None not in chosen:
            return [name for name in chosen if name is not None]
    wanted = " or ".join(", ".join(choices[0] for choices in layout) for layout in layouts)
    raise ParameterError(f"{path} must have the columns {wanted}, it has {quote(names, 200)}")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{quote(value)} is not a number") from error
