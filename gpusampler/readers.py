"""Read lengths from a file or a stream, for the command line.

| format   | extensions      | what holds the lengths                                                         |
|----------|-----------------|--------------------------------------------------------------------------------|
| npy      | .npy            | the array (memory-mapped), or one field of a structured array                  |
| npz      | .npz            | one array of the archive                                                       |
| csv, tsv | .csv .tsv       | one column; the first line is a header if it has no number or a name in COLUMNS |
| json     | .json           | a list of numbers or of objects, an object of columns, or what jsonl takes     |
| jsonl    | .jsonl .ndjson  | a number or an object a line                                                   |
| parquet  | .parquet .pq    | one column, read batch by batch                                                |
| text     | .txt            | a number a line; the default for standard input                                |

Where a column of json or parquet holds lists (`input_ids`), a length is the number of items. Text formats may be
compressed with gzip; they check each value, and the error has its line. Arrays are returned as they are stored, for
`as_lengths` to check. O(N) time, a million lines a second and more; memory is the result and one batch, but a json
document is parsed as a whole.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import IO, Any, Literal

import numpy as np
from tqdm import tqdm

from gpusampler.errors import ParameterError, ParameterTypeError, check_choice, quote
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.lengths import explain_bad_length

COLUMNS = (
    "length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "seq_length", "sequence_length",
    "num_frames", "n_frames",
)  # fmt: skip
"""Columns that are taken without being named, in any letter case."""

LIST_COLUMNS = ("input_ids", "token_ids", "tokens")
"""Columns that are taken, in any letter case, where there is none of `COLUMNS`."""

_EXTENSIONS = {
    ".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".parquet": "parquet", ".pq": "parquet", ".txt": "text",
}  # fmt: skip
FORMATS = tuple(dict.fromkeys(_EXTENSIONS.values()))
"""Names that `format` takes."""

_BATCH_ROWS = 4096
_MOST_NAMES = 20

_Array = np.ndarray[Any, Any]
_Numbered = Iterator[tuple[int, Any]]


def read_lengths(
    source: str | os.PathLike[str] | IO[Any],
    *,
    column: str | int | None = None,
    format: str | None = None,
    progress: bool | None = None,
) -> _Array:
    r"""Read the lengths that a file or a stream holds.

    Args:
        source: a path, "-" for standard input, or an open file (a binary one for npy, npz and parquet).
        column: name of the column, field or array, or its number counted from 1. Default: the only one with a name in
            `COLUMNS`, else the only one there is, else the only one with a name in `LIST_COLUMNS`.
        format: one of `FORMATS`. Default: by the extension; text for a stream without a known one.
        progress: show a progress bar on standard error; None shows it on a terminal, after a second of reading.

    Returns:
        Array [N], N >= 1: int32 from text formats and lists, else of the stored dtype (npy stays mapped).

    Raises:
        ParameterError: no such file or column, an unknown format, a bad value, or no lengths at all.

    Example:
        >>> read_lengths(io.StringIO("id,length\na,5\nb,9\n"), format="csv").tolist()
        [5, 9]
    """
    if not isinstance(source, (str, os.PathLike)) and not hasattr(source, "read"):
        raise ParameterTypeError(f"source must be a path, '-' or an open file, got {quote(source)}")
    if isinstance(column, bool) or not isinstance(column, (str, int, type(None))):
        raise ParameterTypeError(f"column must be a name or a number, got {quote(column)}")
    name, stream = _name_and_stream(source)
    kind = check_choice("format", format, FORMATS) if format is not None else _format_of(name, stream)
    try:
        lengths = _READERS[kind](_Source(name, stream, column, progress))
    except ParameterError:
        raise
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, zipfile.BadZipFile) as error:
        raise ParameterError(f"{name} cannot be read as {kind}: {error}") from error
    if len(lengths) == 0:
        raise ParameterError(f"{name} holds no lengths")
    return lengths


@dataclass
class _Source:
    """What to read, and how its errors call it."""

    name: str
    stream: Any
    column: str | int | None
    progress: bool | None
    unit: str = "line"

    def error(self, number: int, problem: str) -> ParameterError:
        return ParameterError(f"{self.name}, {self.unit} {number}{problem}")

    def bar(self, total: int | None, unit: str) -> Any:
        # disable=None: tqdm hides itself where there is no terminal
        return tqdm(
            total=total,
            desc=f"reading {os.path.basename(self.name)}",
            unit=unit,
            unit_scale=True,
            disable=None if self.progress is None else not self.progress,
            delay=0 if self.progress else 1,
        )

    def binary(self) -> Any:
        """Return a path, or a binary stream that can seek."""
        if self.stream is None:
            return self.name
        if isinstance(self.stream, io.TextIOBase):
            raise ParameterTypeError(f"{self.name} is open as text, this format needs a binary stream")
        return self.stream if self.stream.seekable() else io.BytesIO(self.stream.read())

    def choose(self, names: Sequence[str]) -> int:
        """Return the position of the column that is asked for, or that must be meant."""
        listing = ", ".join(map(repr, names[:_MOST_NAMES])) + (", ..." if len(names) > _MOST_NAMES else "")
        column = self.column
        if column is None:
            lowered = [name.lower() for name in names]
            for known in (COLUMNS, lowered[:1] if len(names) == 1 else (), LIST_COLUMNS):
                found = [position for position, name in enumerate(lowered) if name in known]
                if len(found) == 1:
                    return found[0]
                if found:
                    listing = ", ".join(repr(names[position]) for position in found)
                    break
            raise ParameterError(f"{self.name}: which column holds the lengths? Give column, one of: {listing}")
        found = [position for position, name in enumerate(names) if name == column]
        if len(found) == 1:
            return found[0]
        if found:
            numbers = ", ".join(str(position + 1) for position in found)
            raise ParameterError(f"{self.name} has several columns {column!r}: give the number, one of {numbers}")
        if str(column).isdecimal() and 1 <= int(column) <= len(names):
            return int(column) - 1
        counted = ", they count from 1" if isinstance(column, int) or column.isdecimal() else ""
        raise ParameterError(f"{self.name} has no column {column!r}{counted}; it has: {listing}")


def _name_and_stream(source: Any) -> tuple[str, Any]:
    """Return what to call the source and, unless it is a path, the stream to read."""
    if not isinstance(source, (str, os.PathLike)):
        name = getattr(source, "name", None)
        return (name if isinstance(name, str) else "the stream"), source
    path = os.fspath(source)
    if path == "-":
        return "standard input", getattr(sys.stdin, "buffer", sys.stdin)
    if not os.path.exists(path):
        raise ParameterError(f"no such file: {path}")
    if os.path.isdir(path):
        raise ParameterError(f"{path} is a directory: give one file")
    return path, None


def _format_of(name: str, stream: Any) -> str:
    stem, extension = os.path.splitext(name.lower())
    compressed = extension == ".gz"
    kind = _EXTENSIONS.get(os.path.splitext(stem)[1] if compressed else extension)
    if compressed and kind in ("npy", "npz", "parquet"):
        raise ParameterError(f"{name}: decompress it first, only text formats are read from gzip")
    if kind is None and stream is None:
        formats = ", ".join(FORMATS)
        raise ParameterError(f"{name} has no known extension ({', '.join(_EXTENSIONS)}): give format, one of {formats}")
    return kind or "text"


def _read_numpy(source: _Source) -> _Array:
    file = source.binary()
    with ExitStack() as stack:
        mode: Literal["r"] | None = None
        if isinstance(file, str):
            stream = stack.enter_context(open(file, "rb"))
            mode = "r" if stream.read(6) == np.lib.format.MAGIC_PREFIX else None
            stream.seek(0)
            file = file if mode else stream
        loaded = np.load(file, mmap_mode=mode, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            lengths = loaded[loaded.files[source.choose(loaded.files)]]
        elif loaded.dtype.names:
            lengths = loaded[loaded.dtype.names[source.choose(loaded.dtype.names)]]
        elif source.column is not None:
            raise ParameterError(f"{source.name} is one array without columns, got column {source.column!r}")
        else:
            lengths = loaded
    if lengths.ndim != 1:
        raise ParameterError(f"{source.name} must hold one length a sample, got an array of shape {lengths.shape}")
    return lengths


def _read_parquet(source: _Source) -> _Array:
    try:
        from pyarrow import compute, parquet, types
    except ImportError as error:
        raise ParameterError(f"reading {source.name} needs pyarrow: pip install 'gpusampler[report]'") from error
    source.unit = "row"
    with parquet.ParquetFile(source.binary()) as table:
        names = table.schema_arrow.names
        field = table.schema_arrow.field(source.choose(names))
        lists = types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type)
        if not (lists or types.is_integer(field.type) or types.is_floating(field.type)):
            raise ParameterError(f"{source.name}: column {field.name!r} holds {field.type}, not numbers or lists")
        lengths = np.empty(table.metadata.num_rows, np.int32 if lists else field.type.to_pandas_dtype())
        row = 0
        with source.bar(len(lengths), " rows") as bar:
            for batch in table.iter_batches(_BATCH_ROWS if lists else 16 * _BATCH_ROWS, columns=[field.name]):
                values = compute.list_value_length(batch.column(0)) if lists else batch.column(0)
                if values.null_count:
                    raise source.error(row + values.is_null().index(True).as_py() + 1, f": {field.name!r} is missing")
                lengths[row : row + len(values)] = values
                row += len(values)
                bar.update(len(values))
    return lengths


class _Metered(io.RawIOBase):
    """A binary stream that moves a progress bar as it is read, and stays open when its wrappers close."""

    def __init__(self, stream: Any, bar: Any) -> None:
        self._read = getattr(stream, "read1", stream.read)
        self._bar = bar

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._bar.update(len(data))
        return len(data)


def _read_text(source: _Source, values_of: Callable[[Any, _Source], _Numbered]) -> _Array:
    """Return the values that `values_of` finds in the text; a list counts its items."""
    lengths = array("i")
    with ExitStack() as stack:
        # a csv column beside the lengths may hold whole documents
        stack.callback(csv.field_size_limit, csv.field_size_limit(MAX_LENGTH))
        text = source.stream
        if not isinstance(text, io.TextIOBase):
            stream = stack.enter_context(open(source.name, "rb")) if text is None else text
            bar = stack.enter_context(source.bar(os.path.getsize(source.name) if text is None else None, "B"))
            text = _decoded(io.BufferedReader(_Metered(stream, bar), 1 << 18))
        for number, value in values_of(text, source):
            length = len(value) if isinstance(value, list) else value
            if type(length) is not int or not 1 <= length <= MAX_LENGTH:
                reason = "is not a number" if isinstance(length, str) else explain_bad_length(length)
                if reason is not None:
                    raise source.error(number, f": {quote(value, 40)} {reason}")
            lengths.append(int(length))
    return np.array(lengths, np.int32)


def _decoded(stream: Any) -> io.TextIOWrapper:
    if stream.peek(2)[:2] == b"\x1f\x8b":
        stream = gzip.GzipFile(fileobj=stream)
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")


def _without_blanks(rows: Iterable[tuple[int, Any]], source: _Source, is_blank: Callable[[Any], bool]) -> _Numbered:
    """Drop blank rows at the end; anywhere else one would hide a sample."""
    blank = 0
    for number, row in rows:
        if is_blank(row):
            blank = blank or number
            continue
        if blank:
            raise source.error(blank, " is blank")
        yield number, row


def _number(text: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return text.strip()


def _line_values(text: Any, source: _Source) -> _Numbered:
    if source.column is not None:
        raise ParameterError(
            f"{source.name} is read as text, without columns, got column {source.column!r}: give format"
        )
    for number, row in _without_blanks(enumerate(text, 1), source, str.isspace):
        yield number, _number(row)


def _table_values(text: Any, source: _Source, delimiters: str) -> _Numbered:
    first = text.readline()
    reader = csv.reader(chain([first], text), delimiter=next((d for d in delimiters if d in first), delimiters[0]))
    numbered = ((reader.line_num, row) for row in reader)
    position = None
    for number, row in _without_blanks(numbered, source, lambda row: len(row) < 2 and not "".join(row).strip()):
        if position is None:
            position, is_header = _column_of(row, source)
            if is_header:
                continue
        if position >= len(row):
            raise source.error(number, f" has {len(row)} columns, the lengths are in column {position + 1}")
        yield number, _number(row[position])


def _column_of(row: list[str], source: _Source) -> tuple[int, bool]:
    """Return the position of the column of lengths, and whether this first row is a header."""
    names = [cell.strip() for cell in row]
    by_name = isinstance(source.column, str) and not source.column.isdecimal()
    known = any(name.lower() in COLUMNS for name in names)
    if by_name or known or all(isinstance(_number(name), str) for name in names):
        return source.choose(names), True
    return source.choose([str(number) for number in range(1, len(names) + 1)]), False


def _jsonl_values(text: Any, source: _Source) -> _Numbered:
    def parsed() -> _Numbered:
        for number, row in _without_blanks(enumerate(text, 1), source, str.isspace):
            try:
                yield number, json.loads(row)
            except ValueError as error:
                raise source.error(number, f" is not JSON: {error}") from error

    return _record_values(parsed(), source)


def _json_values(text: Any, source: _Source) -> _Numbered:
    content = text.read()
    try:
        document = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _jsonl_values(io.StringIO(content), source)
        raise
    source.unit = "entry"
    if isinstance(document, dict) and any(isinstance(value, list) for value in document.values()):
        names = list(document)
        name = names[source.choose(names)]
        if not isinstance(document[name], list):
            raise ParameterError(f"{source.name}: {name!r} is {quote(document[name], 40)}, not a list")
        return iter(enumerate(document[name], 1))
    return _record_values(enumerate(document if isinstance(document, list) else [document], 1), source)


def _record_values(records: Iterable[tuple[int, Any]], source: _Source) -> _Numbered:
    key = None
    for number, record in records:
        if isinstance(record, dict):
            if key is None:
                names = list(record)
                key = names[source.choose(names)]
            if key not in record:
                raise source.error(number, f" has no column {key!r}")
            yield number, record[key]
        elif source.column is not None or isinstance(record, list):
            raise source.error(number, f": {quote(record, 40)} is not an object with columns")
        else:
            yield number, record


_READERS: dict[str, Callable[[_Source], _Array]] = {
    "npy": _read_numpy,
    "npz": _read_numpy,
    "parquet": _read_parquet,
    "csv": partial(_read_text, values_of=partial(_table_values, delimiters=",;\t")),
    "tsv": partial(_read_text, values_of=partial(_table_values, delimiters="\t")),
    "json": partial(_read_text, values_of=_json_values),
    "jsonl": partial(_read_text, values_of=_jsonl_values),
    "text": partial(_read_text, values_of=_line_values),
}
