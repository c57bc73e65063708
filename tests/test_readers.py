"""Readers: every format gives the same lengths, and errors say what is wrong where."""

import csv
import doctest
import fcntl
import gzip
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import gpusampler.readers
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.lengths import as_lengths
from gpusampler.readers import FORMATS, read_lengths

VALUES = [5, 9, 2, 130, 7]
LISTS = [[0] * value for value in VALUES]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_parquet(path: str, columns: dict[str, Any], **options: Any) -> None:
    parquet.write_table(pyarrow.table(columns), path, **options)


def records(**columns: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def json_lines(items: list[Any]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


NAMES = ["a", "b", "c", "d", "e"]
TABLE = "".join(f"{name},{value}\n" for name, value in zip(NAMES, VALUES, strict=True))

TEXTS: dict[str, tuple[str, str, str | int | None]] = {
    "text": ("f.txt", "5\n9\n2\n130\n7\n", None),
    "text without a last newline": ("f.txt", "5\n 9 \n2.0\n130\n7", None),
    "text with blanks at the end": ("f.txt", "5\r\n9\r\n2\r\n1.3e2\r\n+7\r\n\r\n \r\n", None),
    "csv, known column": ("f.csv", "id,Length\n" + TABLE, None),
    "csv, byte order mark": ("f.csv", "\ufefflength,id\n5,a\n9,b\n2,c\n130,d\n7,e\n", None),
    "csv, named column": ("f.csv", "id,size\n" + TABLE, "size"),
    "csv, numbered column": ("f.csv", "id,size\n" + TABLE, 2),
    "csv, number as text": ("f.csv", "id,size\n" + TABLE, "2"),
    "csv, name before number": ("f.csv", "2,length\n5,x\n9,x\n2,x\n130,x\n7,x\n", "2"),
    "csv, no header, one column": ("f.csv", "5\n9\n2\n130\n7\n", None),
    "csv, no header, numbered": ("f.csv", TABLE, 2),
    "csv, header, one column": ("f.csv", "anything\n5\n9\n2\n130\n7\n", None),
    "csv, header with a number": ("f.csv", "2024,length\n" + TABLE, None),
    "csv, semicolons": ("f.csv", "id;length\n" + TABLE.replace(",", ";"), None),
    "csv, quotes": ("f.csv", 'text,length\n"x, ""y""\nz",5\n"",9\n,"2"\nd,130\ne,7\n\n', None),
    "csv, long field": ("f.csv", "text,length\n" + "x" * 200_000 + ",5\n,9\n,2\n,130\n,7\n", None),
    "tsv": ("f.tsv", "id\tlength\n" + TABLE.replace(",", "\t"), None),
    "tsv, commas": ("f.tsv", "length\ttext\n5\ta,b\n9\t,\n2\t\n130\t\n7\t\n", None),
    "json, numbers": ("f.json", json.dumps(VALUES), None),
    "json, objects": ("f.json", json.dumps(records(id=NAMES, length=VALUES), indent=1), None),
    "json, lists": ("f.json", json.dumps(records(input_ids=LISTS, id=NAMES)), None),
    "json, columns": ("f.json", json.dumps({"id": NAMES, "length": VALUES}), None),
    "json, list columns": ("f.json", json.dumps({"a": NAMES, "input_ids": LISTS}), None),
    "json, lines": ("f.json", json_lines(records(length=VALUES)), None),
    "jsonl, numbers": ("f.jsonl", "5\n9\n2.0\n130\n7\n\n", None),
    "jsonl, known column": ("f.jsonl", json_lines(records(id=NAMES, num_tokens=VALUES, input_ids=LISTS)), None),
    "jsonl, only column": ("f.ndjson", json_lines(records(size=VALUES)), None),
    "jsonl, lists": ("f.jsonl", json_lines(records(text=NAMES, input_ids=LISTS)), None),
    "jsonl, named lists": ("f.jsonl", json_lines(records(length=[1] * 5, frames=LISTS)), "frames"),
    "jsonl, key order": ("f.jsonl", '{"a": 1, "n": 5}\n{"n": 9, "a": 1}\n{"n": 2}\n{"n": 130}\n{"n": 7}\n', 2),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", TEXTS)
def test_text_formats(kind: str, packed: bool) -> None:
    path, content, column = TEXTS[kind]
    data = content.encode()
    if packed:
        path, data = f"{path}.gz", gzip.compress(data)
    Path(path).write_bytes(data)
    lengths = read_lengths(path, column=column)
    assert (lengths.tolist(), lengths.dtype, type(lengths)) == (VALUES, np.dtype(np.int32), np.ndarray)
    assert csv.field_size_limit() == 131_072
    format = {"f.txt": "text", "f.ndjson": "jsonl"}.get(TEXTS[kind][0], TEXTS[kind][0][2:])
    with open(path, "rb") as stream:
        assert read_lengths(stream, column=column, format=format).tolist() == VALUES
        assert not stream.closed
    if not packed:
        content = content.removeprefix("\ufeff")
        assert read_lengths(io.StringIO(content), column=column, format=format).tolist() == VALUES


def test_npy_is_mapped_and_keeps_its_dtype() -> None:
    np.save("f.npy", np.array(VALUES, np.uint16))
    lengths = read_lengths(Path("f.npy"))
    assert isinstance(lengths, np.memmap)
    assert (lengths.tolist(), lengths.dtype) == (VALUES, np.dtype(np.uint16))
    with open("f.npy", "rb") as stream:
        assert read_lengths(stream).tolist() == VALUES


def test_npy_field() -> None:
    np.save("f.npy", np.array(list(zip(VALUES, VALUES[::-1], strict=True)), [("n", "i4"), ("length", "u1")]))
    for column, expected in ((None, VALUES[::-1]), ("n", VALUES), (1, VALUES), (2, VALUES[::-1])):
        lengths = read_lengths("f.npy", column=column)
        assert (lengths.tolist(), as_lengths(lengths).values.tolist()) == (expected, expected)


def test_npz() -> None:
    np.savez("one.npz", anything=np.array(VALUES))
    np.savez_compressed("two.npz", ids=np.arange(3), lengths=np.array(VALUES, np.int16))
    assert read_lengths("one.npz").tolist() == VALUES
    assert read_lengths("two.npz").dtype == np.int16
    assert read_lengths("two.npz").tolist() == VALUES
    assert read_lengths("two.npz", column="ids").tolist() == [0, 1, 2]
    assert read_lengths("two.npz", column="1").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("type_", "dtype"), [("int64", "int64"), ("uint8", "uint8"), ("float", "float32"), ("halffloat", "float16")]
)
def test_parquet_numbers(type_: str, dtype: str) -> None:
    save_parquet("f.parquet", {"text": NAMES, "length": pyarrow.array(VALUES, type_)}, row_group_size=2)
    lengths = read_lengths("f.parquet")
    assert (lengths.tolist(), lengths.dtype) == (VALUES, np.dtype(dtype))
    with open("f.parquet", "rb") as stream:
        assert read_lengths(stream).tolist() == VALUES


@pytest.mark.parametrize("type_", [pyarrow.list_(pyarrow.int32()), pyarrow.large_list(pyarrow.int64())])
def test_parquet_lists(type_: pyarrow.DataType) -> None:
    save_parquet("f.pq", {"text": NAMES, "input_ids": pyarrow.array(LISTS, type_)}, row_group_size=2)
    assert read_lengths("f.pq").tolist() == VALUES
    assert read_lengths("f.pq", column=2).dtype == np.int32


def test_parquet_odd_columns() -> None:
    fixed = pyarrow.array([[1, 2, 3]] * 5, pyarrow.list_(pyarrow.int8(), 3))
    save_parquet("f.parquet", {"a.b": VALUES, "a": pyarrow.array([1] * 5), "fixed": fixed})
    assert read_lengths("f.parquet", column="a.b").tolist() == VALUES
    assert read_lengths("f.parquet", column="a").tolist() == [1] * 5
    assert read_lengths("f.parquet", column="fixed").tolist() == [3] * 5


def test_parquet_missing_row_is_counted_over_batches() -> None:
    rows = [[1]] * 5000
    rows[4998] = None
    save_parquet("f.parquet", {"input_ids": rows}, row_group_size=3000)
    with pytest.raises(ParameterError, match=r"^f\.parquet, row 4999: 'input_ids' is missing$"):
        read_lengths("f.parquet")


def test_parquet_streams_in_batches() -> None:
    rows = 100_000
    counts = np.arange(rows) % 50 + 1
    ids = pyarrow.ListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]), np.zeros(counts.sum(), np.int64))
    save_parquet("f.parquet", {"length": counts, "input_ids": ids}, row_group_size=10_000)
    assert read_lengths("f.parquet").tolist() == counts.tolist()
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        lengths = read_lengths("f.parquet", column="input_ids")
    finally:
        pyarrow.set_memory_pool(usual)
    assert lengths.tolist() == counts.tolist()
    assert 0 < pool.max_memory() < ids.nbytes / 2


def save_bad_files() -> None:
    Path("empty.txt").write_text("")
    Path("blank.txt").write_text("\n\n")
    Path("empty.npy").write_bytes(b"")
    Path("empty.json").write_text("[]")
    Path("empty.parquet").write_bytes(b"")
    Path("header.csv").write_text("length\n")
    Path("f.txt").write_text("5\n7\n")
    Path("f.dat").write_text("5\n7\n")
    Path("noise.npy").write_bytes(bytes(range(200)))
    Path("noise.npz").write_bytes(b"PK\x03\x04" + bytes(range(200)))
    Path("noise.parquet").write_bytes(bytes(range(200)))
    Path("cut.txt.gz").write_bytes(gzip.compress(b"5\n" * 1000)[:-12])
    Path("broken.txt.gz").write_bytes(gzip.compress(b"5\n" * 1000)[:12] + b"\xff" * 30)
    Path("folder.csv").mkdir()
    Path("numbers.csv").write_text("5,6\n7,8\n")
    Path("names.csv").write_text("id,size\na,5\n")
    Path("both.csv").write_text("length,num_tokens\n5,6\n")
    Path("twice.csv").write_text("n,n\n5,6\n")
    Path("ragged.csv").write_text("id,length\na,5\nb\n")
    np.savez("two.npz", a=[1], b=[2])
    np.save("plain.npy", np.array([5, 6]))
    np.save("zero.npy", np.array([], np.int32))
    np.save("table.npy", np.ones((2, 3), np.int32))
    np.save("object.npy", np.array([1, None], object), allow_pickle=True)
    nothing = pyarrow.array([], pyarrow.int64())
    save_parquet("zero.parquet", {"length": nothing})
    save_parquet("null.parquet", {"length": [1, 2, None, 4], "ids": [[1], None, [2], [3]], "text": list("abcd")})
    Path("lines.jsonl").write_text('{"length": 5}\n{"size": 6}\n')
    Path("cut.json").write_text('{"length": [5,\n 7')
    Path("scalar.json").write_text('{"length": 5, "x": [1]}')


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("gone.txt", {}, "no such file: gone.txt"),
        ("https://example.org/f.csv", {}, "no such file: https://example.org/f.csv"),
        ("folder.csv", {}, "folder.csv is a directory: give one file"),
        ("f.dat", {}, "f.dat has no known extension (.npy, .npz, .csv, .tsv, .json, .jsonl, .ndjson, .parquet, .pq, "
         ".txt): give format, one of npy, npz, csv, tsv, json, jsonl, parquet, text"),
        ("f.dat", {"format": "excel"}, "format must be one of 'npy', 'npz', 'csv', 'tsv', 'json', 'jsonl', 'parquet', "
         "'text', got 'excel'"),
        ("empty.txt", {}, "empty.txt holds no lengths"),
        ("blank.txt", {}, "blank.txt holds no lengths"),
        ("empty.json", {}, "empty.json holds no lengths"),
        ("header.csv", {}, "header.csv holds no lengths"),
        ("zero.npy", {}, "zero.npy holds no lengths"),
        ("zero.parquet", {}, "zero.parquet holds no lengths"),
        ("f.txt", {"column": "n"}, "f.txt is read as text, without columns, got column 'n': give format"),
        ("plain.npy", {"column": 1}, "plain.npy is one array without columns, got column 1"),
        ("table.npy", {}, "table.npy must hold one length a sample, got an array of shape (2, 3)"),
        ("two.npz", {}, "two.npz: which column holds the lengths? Give column, one of: 'a', 'b'"),
        ("two.npz", {"column": "c"}, "two.npz has no column 'c'; it has: 'a', 'b'"),
        ("numbers.csv", {}, "numbers.csv: which column holds the lengths? Give column, one of: '1', '2'"),
        ("numbers.csv", {"column": 3}, "numbers.csv has no column 3, they count from 1; it has: '1', '2'"),
        ("names.csv", {}, "names.csv: which column holds the lengths? Give column, one of: 'id', 'size'"),
        ("names.csv", {"column": "length"}, "names.csv has no column 'length'; it has: 'id', 'size'"),
        ("names.csv", {"column": "0"}, "names.csv has no column '0', they count from 1; it has: 'id', 'size'"),
        ("names.csv", {"column": -1}, "names.csv has no column -1, they count from 1; it has: 'id', 'size'"),
        ("names.csv", {"column": "id"}, "names.csv, line 2: 'a' is not a number"),
        ("both.csv", {}, "both.csv: which column holds the lengths? Give column, one of: 'length', 'num_tokens'"),
        ("twice.csv", {"column": "n"}, "twice.csv has several columns 'n': give the number, one of 1, 2"),
        ("ragged.csv", {}, "ragged.csv, line 3 has 1 columns, the lengths are in column 2"),
        ("null.parquet", {}, "null.parquet, row 3: 'length' is missing"),
        ("null.parquet", {"column": "ids"}, "null.parquet, row 2: 'ids' is missing"),
        ("null.parquet", {"column": "text"}, "null.parquet: column 'text' holds string, not numbers or lists"),
        ("lines.jsonl", {}, "lines.jsonl, line 2 has no column 'length'"),
        ("scalar.json", {}, "scalar.json: 'length' is 5, not a list"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(path: str, options: dict[str, Any], expected: str) -> None:
    save_bad_files()
    with pytest.raises(ParameterError) as caught:
        read_lengths(path, **options)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "path",
    ["empty.npy", "empty.parquet", "noise.npy", "noise.npz", "noise.parquet", "object.npy", "cut.txt.gz",
     "broken.txt.gz", "cut.json"],
)  # fmt: skip
def test_broken_files(path: str) -> None:
    save_bad_files()
    kind = {"txt.gz": "text"}.get(path.partition(".")[2], path.partition(".")[2])
    with pytest.raises(ParameterError) as caught:
        read_lengths(path)
    assert str(caught.value).startswith(f"{path} cannot be read as {kind}: ")


@pytest.mark.parametrize(
    ("format", "content", "expected"),
    [
        ("text", "5\n\n7\n", "line 2 is blank"),
        ("text", "5\nseven\n", "line 2: 'seven' is not a number"),
        ("text", "5\n3 4\n", "line 2: '3 4' is not a number"),
        ("text", "5\n0\n", "line 2: 0 is not positive"),
        ("text", "5\n-3\n", "line 2: -3 is not positive"),
        ("text", "3.2\nnan\n", "line 1: 3.2 is not an integer"),
        ("text", "3\nnan\n", "line 2: nan is not finite"),
        ("text", "3\n1e999\n", "line 2: inf is not finite"),
        ("text", "3\n2147483648\n", "line 2: 2147483648 is over 2147483647"),
        ("csv", "length\n5\n\n7\n", "line 3 is blank"),
        ("csv", "id,length\na,5\nb,\nc,7\n", "line 3: '' is not a number"),
        ("csv", "id,length\na,5\n,\n", "line 3: '' is not a number"),
        ("csv", 'text,length\n"a\nb",5\nc,zero\n', "line 4: 'zero' is not a number"),
        ("tsv", "length\tid\n5\ta\nTrue\tb\n", "line 3: 'True' is not a number"),
        ("jsonl", '{"length": 5}\n\n{"length": 6}\n', "line 2 is blank"),
        ("jsonl", '{"length": 5}\n{"length": null}\n', "line 2: None is missing"),
        ("jsonl", '{"length": true}\n', "line 1: True is a bool, not an integer"),
        ("jsonl", '{"length": "5"}\n', "line 1: '5' is not a number"),
        ("jsonl", '{"length": NaN}\n', "line 1: nan is not finite"),
        ("jsonl", '{"length": {"a": 1}}\n', "line 1: {'a': 1} is a dict, not an integer: give its length"),
        ("jsonl", '{"input_ids": [1]}\n{"input_ids": []}\n', "line 2: [] is not positive"),
        ("jsonl", "5\n[1, 2]\n", "line 2: [1, 2] is not an object with columns"),
        ("jsonl", "5\n7,\n", "line 2 is not JSON: Extra data: line 1 column 2 (char 1)"),
        ("json", "[5, 0]", "entry 2: 0 is not positive"),
        ("json", '[{"length": 5}, {"length": "x"}]', "entry 2: 'x' is not a number"),
        ("json", '{"length": [5, 7.5]}', "entry 2: 7.5 is not an integer"),
        ("json", '{"length": 5}\n{"length": 0}\n', "line 2: 0 is not positive"),
        ("json", '"5"', "entry 1: '5' is not a number"),
        ("json", "[[1, 2], [3]]", "entry 1: [1, 2] is not an object with columns"),
    ],
)
def test_L29_bad_values_are_named_with_their_line(format: str, content: str, expected: str) -> None:
    with pytest.raises(ParameterError) as caught:
        read_lengths(io.StringIO(content), format=format)
    separator = "" if expected.startswith(("has", "is")) else ", "
    assert str(caught.value) == f"the stream{separator}{expected}"
    assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((5,), "source must be a path, '-' or an open file, got 5"),
        (([5, 6],), r"source must be a path, '-' or an open file, got \[5, 6\]"),
        (("f.txt", 2.0), "column must be a name or a number, got 2.0"),
        (("f.txt", True), "column must be a name or a number, got True"),
    ],
)
def test_wrong_types(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(ParameterTypeError, match=f"^{expected}$"):
        read_lengths(arguments[0], column=arguments[1] if len(arguments) > 1 else None)


@pytest.mark.parametrize("format", ["npy", "npz", "parquet"])
def test_binary_formats_need_a_binary_stream(format: str) -> None:
    with pytest.raises(ParameterTypeError, match=r"^the stream is open as text, this format needs a binary stream$"):
        read_lengths(io.StringIO("5"), format=format)


def test_packed_binary_formats_are_refused() -> None:
    Path("f.npy.gz").write_bytes(b"")
    with pytest.raises(
        ParameterError, match=r"^f\.npy\.gz: decompress it first, only text formats are read from gzip$"
    ):
        read_lengths("f.npy.gz")


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    save_parquet("f.parquet", {"length": VALUES})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ParameterError, match=r"^reading f\.parquet needs pyarrow: pip install 'gpusampler\[report\]'$"):
        read_lengths("f.parquet")


def test_standard_input_from_a_pipe() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array(VALUES))
    code = "from gpusampler.readers import read_lengths; print(read_lengths('-', format='npy').tolist())"
    result = subprocess.run([sys.executable, "-c", code], input=buffer.getvalue(), stdout=subprocess.PIPE, timeout=120)
    assert (result.returncode, result.stdout) == (0, f"{VALUES}\n".encode())


@pytest.mark.parametrize(
    ("data", "format"),
    [(b"5\n9\n", None), (gzip.compress(b"5\n9\n"), "text"), (b'{"length": 5}\n{"length": 9}\n', "jsonl")],
)
def test_standard_input(data: bytes, format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_lengths("-", format=format).tolist() == [5, 9]


def test_standard_input_that_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("id,length\na,5\n"))
    assert read_lengths("-", format="csv").tolist() == [5]


def test_progress_is_on_standard_error_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.txt").write_text("5\n9\n")
    save_parquet("f.parquet", {"length": VALUES})
    for progress in (None, False):
        read_lengths("f.txt", progress=progress)
        read_lengths("f.parquet", progress=progress)
        assert capsys.readouterr() == ("", "")
    read_lengths("f.txt", progress=True)
    read_lengths("f.parquet", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading f.txt: 100%" in err
    assert "4.00/4.00" in err
    assert "reading f.parquet: 100%" in err
    assert "5.00/5.00" in err


def test_progress_shows_itself_on_a_terminal_only_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("f.txt").write_text("5\n9\n")
    terminal, other_end = pty.openpty()
    os.set_blocking(terminal, False)
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(other_end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        read_lengths("f.txt")
        with pytest.raises(BlockingIOError):
            os.read(terminal, 1000)
        read_lengths("f.txt", progress=True)
        shown = b""
        while b"reading f.txt: 100%" not in shown:
            shown += os.read(terminal, 1000)
    os.close(terminal)


def test_memory_of_text_is_the_result_and_a_buffer() -> None:
    Path("f.txt").write_text("1234567\n" * 100_000)
    tracemalloc.start()
    lengths = read_lengths("f.txt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (lengths.min(), lengths.max(), len(lengths)) == (1234567, 1234567, 100_000)
    assert peak < 2.5 * lengths.nbytes + 2**21


def test_formats_are_named() -> None:
    assert FORMATS == ("npy", "npz", "csv", "tsv", "json", "jsonl", "parquet", "text")


def test_examples() -> None:
    results = doctest.testmod(gpusampler.readers)
    assert (results.failed, results.attempted) == (0, 1)
