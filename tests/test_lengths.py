"""Ingest of lengths: the same result from every container, nothing copied that need not be, bad values named."""

import array
import collections
import decimal
import doctest
import enum
import math
import multiprocessing
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusampler.kernels.checks
import gpusampler.lengths
from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.kernels.checks import DIGEST_MASK, MAX_LENGTH, digest_term, scan_lengths
from gpusampler.lengths import Lengths, as_lengths, explain_bad_length

VALUES = [5, 9, 2, 130, 7, 7, 1]
MIB = 1 << 20

length_lists = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=40)


def reference_digest(values: Sequence[int]) -> int:
    """Return the digest as its definition says, in Python integers."""
    total = 0
    for index, length in enumerate(values):
        key = ((index << 31) + length) % 2**63
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**63
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**63
        total += key ^ key >> 31
    return total % 2**63


class Positions(Sequence):
    """A sequence that takes single positions only."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: int) -> int:
        if not isinstance(position, int):
            raise AssertionError(f"position {position}")
        return self.values[position]


class Short(Positions):
    """A sequence with fewer items than it says."""

    def __len__(self) -> int:
        return len(self.values) + 2


class Size(enum.IntEnum):
    """Integers with names."""

    SMALL = 3


def column(values: list[Any], **format_options: Any) -> Any:
    dataset = datasets.Dataset.from_dict({"text": ["x"] * len(values), "n": values})
    return (dataset.with_format(**format_options) if format_options else dataset)["n"]


def selected_column(values: list[int]) -> Any:
    dataset = datasets.Dataset.from_dict({"n": [*values[::-1], 1000]})
    return dataset.select(range(len(values) - 1, -1, -1))["n"]


def concatenated_column(values: list[int]) -> Any:
    parts = [datasets.Dataset.from_dict({"n": part}) for part in (values[:2], values[2:])]
    return datasets.concatenate_datasets(parts)["n"]


def nested_column(values: list[int]) -> Any:
    return datasets.Dataset.from_dict({"meta": [{"n": value} for value in values]})["meta"]["n"]


CONTAINERS: dict[str, tuple[Callable[[list[int]], Any], str]] = {
    "list": (list, "int32"),
    "tuple": (tuple, "int32"),
    "list of numpy": (lambda v: list(np.array(v)), "int32"),
    "list of tensors": (lambda v: list(torch.tensor(v)), "int32"),
    "list of floats": (lambda v: [float(x) for x in v], "int32"),
    "mixed list": (lambda v: [np.int16(v[0]), float(v[1]), torch.tensor(v[2]), *v[3:]], "int32"),
    "deque": (collections.deque, "int32"),
    "sequence": (Positions, "int32"),
    "array.array": (lambda v: array.array("H", v), "int32"),
    "memoryview": (lambda v: memoryview(array.array("q", v)), "int32"),
    "numpy int64": (lambda v: np.array(v, np.int64), "int64"),
    "numpy int32": (lambda v: np.array(v, np.int32), "int32"),
    "numpy uint8": (lambda v: np.array(v, np.uint8), "uint8"),
    "numpy uint64": (lambda v: np.array(v, np.uint64), "uint64"),
    "numpy int16, big-endian": (lambda v: np.array(v, ">i2"), "int32"),
    "numpy unaligned": (lambda v: np.frombuffer(b"\0" + np.array(v, "<i8").tobytes(), "<i8", offset=1), "int32"),
    "numpy reversed": (lambda v: np.array(v[::-1], np.int64)[::-1], "int64"),
    "numpy table column": (lambda v: np.array([v, v], np.int16).T[:, 0], "int16"),
    "numpy record field": (lambda v: np.array([(0, x) for x in v], [("a", "u1"), ("n", "i4")])["n"], "int32"),
    "numpy float16": (lambda v: np.array(v, np.float16), "int32"),
    "numpy float64": (lambda v: np.array(v, np.float64), "int32"),
    "numpy object": (lambda v: np.array(v, object), "int32"),
    "numpy masked, none masked": (lambda v: np.ma.array(v, np.int32, mask=[False] * len(v)), "int32"),
    "torch int64": (torch.tensor, "int64"),
    "torch uint16": (lambda v: torch.tensor(v, dtype=torch.uint16), "uint16"),
    "torch strided": (lambda v: torch.tensor([[x, 0] for x in v])[:, 0], "int64"),
    "torch float": (lambda v: torch.tensor([float(x) for x in v], requires_grad=True), "int32"),
    "torch bfloat16": (lambda v: torch.tensor(v, dtype=torch.bfloat16), "int32"),
    "pyarrow array": (lambda v: pyarrow.array(v, pyarrow.int16()), "int16"),
    "pyarrow slice": (lambda v: pyarrow.array([0, *v, 0])[1:-1], "int64"),
    "pyarrow float": (lambda v: pyarrow.array(v, pyarrow.float32()), "int32"),
    "pyarrow one chunk": (lambda v: pyarrow.chunked_array([[], v], pyarrow.uint32()), "uint32"),
    "pyarrow chunks": (lambda v: pyarrow.chunked_array([v[:1], [], v[1:5], v[5:]], pyarrow.int64()), "int32"),
    "pandas": (pandas.Series, "int64"),
    "pandas index": (pandas.Index, "int64"),
    "pandas nullable": (lambda v: pandas.Series(v, dtype="Int64"), "int32"),
    "pandas arrow": (lambda v: pandas.Series(v, dtype="int64[pyarrow]"), "int32"),
    "pandas, other index": (lambda v: pandas.Series(v, index=[0.5 - i for i in range(len(v))]), "int64"),
    "datasets column": (column, "int32"),
    "datasets column, numpy": (lambda v: column(v, type="numpy"), "int32"),
    "datasets column, torch": (lambda v: column(v, type="torch"), "int32"),
    "datasets column, arrow": (lambda v: column(v, type="arrow"), "int64"),
    "datasets column, selected": (selected_column, "int32"),
    "datasets column, concatenated": (concatenated_column, "int32"),
    "datasets column, nested": (nested_column, "int32"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_L22_every_container_gives_the_same_lengths(kind: str) -> None:
    make, dtype = CONTAINERS[kind]
    result = as_lengths(make(VALUES))
    assert (result.values.tolist(), result.values.dtype) == (VALUES, np.dtype(dtype))
    assert (result.minimum, result.maximum, result.total, len(result)) == (1, 130, 161, 7)
    assert result.digest == reference_digest(VALUES)
    assert [type(x) for x in (result.minimum, result.maximum, result.total, result.digest)] == [int] * 4


def test_L22_range_gives_the_same_lengths() -> None:
    for lengths in (range(3, 30, 4), range(5, 0, -1), range(1, 2), range(MAX_LENGTH, MAX_LENGTH - 4, -3)):
        result = as_lengths(lengths)
        assert result.values.tolist() == list(lengths)
        assert result.digest == reference_digest(lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_L22_cuda_tensor_gives_the_same_lengths() -> None:
    result = as_lengths(torch.tensor(VALUES, device="cuda"))
    assert (result.values.tolist(), result.values.dtype) == (VALUES, np.dtype(np.int64))
    assert result.digest == reference_digest(VALUES)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_integer_arrays_are_used_where_they_are(dtype: str) -> None:
    values = np.array([3, 1, 4, 1, 5], dtype)
    for lengths in (values, values[1:4], values[::2], values[::-1], torch.from_numpy(values)):
        result = as_lengths(lengths)
        assert np.shares_memory(result.values, values)
        assert (result.values.dtype, result.values.tolist()) == (np.dtype(dtype), list(lengths))
        assert not result.values.flags.writeable
    values[0] = 9  # the caller's own array stays writable


def test_pyarrow_pandas_and_masked_arrays_are_used_where_they_are(tmp_path: Any) -> None:
    table = pyarrow.table({"n": VALUES})
    with pyarrow.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    mapped = pyarrow.ipc.open_file(pyarrow.memory_map(str(tmp_path / "t.arrow"))).read_all()["n"]
    for arrow in (mapped, mapped.chunk(0), table["n"].chunk(0)):
        chunk = arrow.chunk(0) if isinstance(arrow, pyarrow.ChunkedArray) else arrow
        assert as_lengths(arrow).values.ctypes.data == chunk.buffers()[1].address
    series = pandas.Series(VALUES)
    assert np.shares_memory(as_lengths(series).values, series.to_numpy())
    masked = np.ma.array(VALUES)
    assert np.shares_memory(as_lengths(masked).values, masked.data)


def test_lengths_are_returned_as_they_are() -> None:
    first = as_lengths(VALUES)
    assert as_lengths(first) is first


def test_L23_sums_and_digest_do_not_wrap_in_small_dtypes() -> None:
    lengths = [46341] * 2 + [32768] * 4
    result = as_lengths(np.array(lengths, np.int32))
    assert (result.total, result.digest) == (223754, reference_digest(lengths))
    assert as_lengths(np.full(1000, 255, np.uint8)).total == 255_000
    assert as_lengths(np.full(1000, 127, np.int8)).total == 127_000
    assert as_lengths(np.full(5, MAX_LENGTH, np.int32)).total == 5 * MAX_LENGTH


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8", "f8"])
def test_longest_length_that_is_accepted(dtype: str) -> None:
    assert as_lengths(np.array([MAX_LENGTH], dtype)).maximum == MAX_LENGTH
    if dtype != "i4":
        with pytest.raises(
            ParameterError, match=r"lengths\[0\] = 2147483648(\.0)? is over 2147483647 \(1 of 1 is bad\)"
        ):
            as_lengths(np.array([MAX_LENGTH + 1], dtype))


NAN, INF = math.nan, math.inf
BAD: dict[str, tuple[Any, ...]] = {
    "zero": ([0, 5, 7, 3], "1 of 4 is", "[0] = 0 is not positive"),
    "nan": (
        [3.2, NAN, 1.5, 2.0],
        "3 of 4 are",
        "[0] = 3.2 is not an integer",
        "[1] = nan is not finite",
        "[2] = 1.5 is not an integer",
    ),
    "inf": ([3, INF, 1, 2], "1 of 4 is", "[1] = inf is not finite"),
    "minus inf": (np.array([3, -INF], np.float32), "1 of 2 is", "[1] = -inf is not finite"),
    "None": ([3, None, 1, 2], "1 of 4 is", "[1] = None is missing"),
    "negative": (np.array([3, -4, 1], np.int8), "1 of 3 is", "[1] = -4 is not positive"),
    "negative tensor": (torch.tensor([3, -4, 0]), "2 of 3 are", "[1] = -4 is not positive", "[2] = 0 is not positive"),
    "zero float": (torch.tensor([3.0, 0.0]), "1 of 2 is", "[1] = 0.0 is not positive"),
    "half": (np.array([0.5, 1.0], np.float16), "1 of 2 is", "[0] = 0.5 is not an integer"),
    "bool": (
        [True, 2, False],
        "2 of 3 are",
        "[0] = True is a bool, not an integer",
        "[2] = False is a bool, not an integer",
    ),
    "numpy bool": ([3, np.True_], "1 of 2 is", "[1] = True is a bool, not an integer"),
    "tensor bool": ([3, torch.tensor(True)], "1 of 2 is", "[1] = True is a bool, not an integer"),
    "string": (["3", 4], "1 of 2 is", "[0] = '3' is a str, not an integer"),
    "complex": ([1, 2j], "1 of 2 is", "[1] = 2j is a complex, not an integer"),
    "decimal": ([decimal.Decimal(3)], "1 of 1 is", "[0] = Decimal('3') is a Decimal, not an integer"),
    "nested": ([[1, 2], 3], "1 of 2 is", "[0] = [1, 2] is a list, not an integer: give its length"),
    "nested array": ([4, np.array([7])], "1 of 2 is", "[1] = array([7]) is a ndarray, not an integer: give its length"),
    "nested tensor": (
        [4, torch.tensor([7])],
        "1 of 2 is",
        "[1] = tensor([7]) is a Tensor, not an integer: give its length",
    ),
    "huge": (
        [1, 2**63, 2**64],
        "2 of 3 are",
        "[1] = 9223372036854775808 is over 2147483647",
        "[2] = 18446744073709551616 is over 2147483647",
    ),
    "huge negative": ([-(2**70)], "1 of 1 is", "[0] = -1180591620717411303424 is not positive"),
    "huge beside float": (
        [10**30, 2.5],
        "2 of 2 are",
        f"[0] = {10**30} is over 2147483647",
        "[1] = 2.5 is not an integer",
    ),
    "uint64": (
        np.array([2**64 - 1, 5, 2**63], np.uint64),
        "2 of 3 are",
        "[0] = 18446744073709551615 is over 2147483647",
        "[2] = 9223372036854775808 is over 2147483647",
    ),
    "range": (range(3, -1, -1), "1 of 4 is", "[3] = 0 is not positive"),
    "huge range": (range(2**70, 2**70 + 1), "1 of 1 is", "[0] = 1180591620717411303424 is over 2147483647"),
    "object": (
        np.array([3, "x", None], object),
        "2 of 3 are",
        "[1] = 'x' is a str, not an integer",
        "[2] = None is missing",
    ),
    "masked": (np.ma.array([5, 9, 2], mask=[0, 1, 0]), "1 of 3 is", "[1] = masked is missing"),
    "masked float": (np.ma.array([5.0, 9, 2], mask=[0, 0, 1]), "1 of 3 is", "[2] = masked is missing"),
    "pyarrow null": (pyarrow.array([1, None, 3]), "1 of 3 is", "[1] = None is missing"),
    "pyarrow null in chunk": (pyarrow.chunked_array([[1], [2, None]]), "1 of 3 is", "[2] = None is missing"),
    "pyarrow zero": (pyarrow.chunked_array([[1], [2, 0]]), "1 of 3 is", "[2] = 0 is not positive"),
    "pandas NA": (pandas.Series([1, None], dtype="Int64"), "1 of 2 is", "[1] = <NA> is a NAType, not an integer"),
    "pandas nan": (pandas.Series([1, None]), "1 of 2 is", "[1] = nan is not finite"),
    "column None": (column([4, None]), "1 of 2 is", "[1] = None is missing"),
    "column None, numpy": (column([4, None], type="numpy"), "1 of 2 is", "[1] = nan is not finite"),
    "column of lists, numpy": (
        column([[5, 6], [7, 8]], type="numpy"),
        "2 of 2 are",
        "[0] = array([5, 6]) is a ndarray, not an integer: give its length",
        "[1] = array([7, 8]) is a ndarray, not an integer: give its length",
    ),
    "column of bools, torch": (column([True], type="torch"), "1 of 1 is", "[0] = True is a bool, not an integer"),
    "column of lists": (
        column([[5, 6], [7]]),
        "2 of 2 are",
        "[0] = [5, 6] is a list, not an integer: give its length",
        "[1] = [7] is a list, not an integer: give its length",
    ),
    "three, then not finite": (
        [0, 0, 0, 0.5, NAN, INF],
        "6 of 6 are",
        "[0] = 0 is not positive",
        "[1] = 0 is not positive",
        "[4] = nan is not finite",
    ),
    "four": (
        np.zeros(4, np.int64),
        "4 of 4 are",
        "[0] = 0 is not positive",
        "[1] = 0 is not positive",
        "[2] = 0 is not positive",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_L29_bad_lengths_are_named_with_index_value_and_reason(kind: str) -> None:
    lengths, count, *examples = BAD[kind]
    with pytest.raises(ParameterError) as caught:
        as_lengths(lengths)
    expected = "; ".join(f"lengths{example}" for example in examples)
    assert str(caught.value) == f"lengths must be positive integers: {expected} ({count} bad)"
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (np.array([True, False]), "sizes must be positive integers: sizes[0] = True is of type bool"),
        (np.array([1, 2j]), "sizes must be positive integers: sizes[0] = (1+0j) is of type complex128"),
        (np.array(["3"]), "sizes must be positive integers: sizes[0] = '3' is of type <U1"),
        (torch.tensor([True]), "sizes must be positive integers: sizes[0] = True is of type bool"),
        (pyarrow.array([True]), "sizes must be positive integers: sizes[0] = True is of type bool"),
        (pyarrow.array([[1, 2]]), "sizes must be positive integers: sizes[0] = [1, 2] is of type list<item: int64>"),
        (pyarrow.array(["3"]), "sizes must be positive integers: sizes[0] = '3' is of type string"),
        (np.ones((2, 3), np.int64), "sizes must be one-dimensional, one length a sample, got shape (2, 3)"),
        (torch.ones((2, 1)), "sizes must be one-dimensional, one length a sample, got shape (2, 1)"),
        (np.ones((0, 3)), "sizes must be one-dimensional, one length a sample, got shape (0, 3)"),
        ([], "sizes is empty: at least one length is needed"),
        (np.array([]), "sizes is empty: at least one length is needed"),
        (range(0), "sizes is empty: at least one length is needed"),
        (torch.tensor([]), "sizes is empty: at least one length is needed"),
        (pyarrow.chunked_array([], pyarrow.int64()), "sizes is empty: at least one length is needed"),
        (column([]), "sizes is empty: at least one length is needed"),
        (Short([5, 6]), "sizes has len() 4, but holds 2 lengths"),
    ],
)
def test_wrong_dtype_shape_and_size(lengths: Any, expected: str) -> None:
    with pytest.raises(ParameterError) as caught:
        as_lengths(lengths, name="sizes")
    assert str(caught.value) == expected


class Map(torch.utils.data.Dataset):
    """A dataset passed instead of its lengths."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index + 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (iter([1, 2]), "list_iterator: pass list(...) of it"),
        ((x for x in [1, 2]), "generator: pass list(...) of it"),
        (map(int, [1]), "map: pass list(...) of it"),
        ({1, 2}, "set: pass list(...) of it"),
        ({0: 5}.values(), "dict_values: pass list(...) of it"),
        ({0: 5}, "dict: pass its values as a list, in sample order"),
        (collections.UserDict(length=[5]), "collections.UserDict: pass its values as a list, in sample order"),
        (5, "5 of type int: pass a list or an array"),
        (2.5, "2.5 of type float: pass a list or an array"),
        (None, "NoneType: pass a list or an array"),
        (np.array(5), "numpy.ndarray: pass a list or an array"),
        (torch.tensor(5), "torch.Tensor: pass a list or an array"),
        ("567", "'567' of type str: pass a list of integers"),
        (b"567", "b'567' of type bytes: pass a list of integers"),
        (Map(), f"{__name__}.Map: pass its column of lengths, or [len(x) for x in dataset]"),
        (
            datasets.Dataset.from_dict({"n": [5]}),
            "datasets.arrow_dataset.Dataset: pass its column of lengths, or [len(x) for x in dataset]",
        ),
        (
            datasets.Dataset.from_dict({"n": [5]}).to_iterable_dataset(),
            "datasets.iterable_dataset.IterableDataset: pass its column of lengths, or [len(x) for x in dataset]",
        ),
        (pyarrow.table({"n": [5]}), "pyarrow.lib.Table: pass its column of lengths, or [len(x) for x in dataset]"),
    ],
)
def test_wrong_containers_say_what_to_pass(lengths: Any, expected: str) -> None:
    with pytest.raises(ParameterTypeError) as caught:
        as_lengths(lengths)
    assert str(caught.value) == f"lengths must be a sequence of integers, got {expected}"


def test_data_frame_is_a_wrong_container() -> None:
    with pytest.raises(ParameterTypeError, match=r"DataFrame: pass its column of lengths"):
        as_lengths(pandas.DataFrame({"n": [5]}))


@pytest.mark.parametrize("lengths", [torch.empty(3, device="meta"), torch.tensor([1, 0, 2]).to_sparse()])
def test_tensors_without_values_on_the_host(lengths: torch.Tensor) -> None:
    with pytest.raises(ParameterTypeError, match=r"^lengths of type torch.Tensor cannot be read on the host: "):
        as_lengths(lengths)


def test_integers_with_names_are_integers() -> None:
    assert as_lengths([Size.SMALL, 4]).values.tolist() == [3, 4]


@pytest.mark.parametrize("convert", [list, np.array, lambda v: np.array(v, float), pyarrow.array, column])
def test_blocks_are_joined_and_indices_run_on(convert: Callable[[list[int]], Any]) -> None:
    values = (np.arange(2**20 + 3) % 997 + 1).tolist()
    result = as_lengths(convert(values))
    assert result.digest == as_lengths(np.array(values, np.int16)).digest
    assert result.values.tolist() == values
    assert (result.minimum, result.maximum, result.total) == (1, 997, sum(values))
    values[7] = values[2**20 + 1] = 0
    with pytest.raises(ParameterError) as caught:
        as_lengths(convert(values))
    message = str(caught.value).replace("0.0", "0")
    assert "lengths[7] = 0 is not positive; lengths[1048577] = 0 is not positive (2 of 1048579 are bad)" in message


@settings(deadline=None)  # the first call compiles
@given(length_lists, st.data())
def test_digest_follows_its_definition_and_sees_every_change(values: list[int], data: st.DataObject) -> None:
    digest = as_lengths(values).digest
    assert digest == reference_digest(values)
    assert 0 <= digest < 2**63
    position = data.draw(st.integers(0, len(values) - 1))
    changed = data.draw(st.integers(1, MAX_LENGTH).filter(lambda x: x != values[position]))
    assert as_lengths([*values[:position], changed, *values[position + 1 :]]).digest != digest
    other_order = data.draw(st.permutations(values))
    assert (as_lengths(other_order).digest == digest) == (other_order == values)
    assert as_lengths([*values, 1]).digest != digest


@settings(deadline=None)  # the first call compiles
@given(length_lists, st.integers(0, 40))
def test_parts_of_blocks_combine_in_any_order(values: list[int], cut: int) -> None:
    bad_at = np.empty(4, np.int64)
    block = np.array(values)
    whole = scan_lengths(block, 0, bad_at)
    parts = [(block[cut:], cut), (block[:cut], 0)]
    scans = [scan_lengths(part, start, bad_at) for part, start in parts if len(part)]
    bad, minimum, maximum, total, digest = zip(*scans, strict=True)
    assert whole == (sum(bad), min(minimum), max(maximum), sum(total), sum(digest) & DIGEST_MASK)


def test_digest_terms_differ_between_neighbours_and_swaps() -> None:
    terms = {digest_term(index, length) for index in range(300) for length in range(1, 301)}
    assert len(terms) == 90_000
    swaps = {digest_term(0, a) + digest_term(1, b) & DIGEST_MASK for a in range(1, 201) for b in range(1, 201)}
    assert len(swaps) == 40_000


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=2)), min_size=1))
def test_any_items_are_accepted_or_named(items: list[Any]) -> None:
    reasons = {i: reason for i, item in enumerate(items) if (reason := explain_bad_length(item)) is not None}
    if not reasons:
        assert as_lengths(items).values.tolist() == items
        return
    with pytest.raises(ParameterError) as caught:
        as_lengths(items)
    first = min(reasons)
    assert f"lengths[{first}] = " in str(caught.value)
    assert f"{reasons[first]}" in str(caught.value)
    assert f"({len(reasons)} of {len(items)} {'is' if len(reasons) == 1 else 'are'} bad)" in str(caught.value)


@pytest.fixture
def mapped(tmp_path: Any) -> np.memmap:
    np.save(tmp_path / "lengths.npy", np.arange(1, 100_001, dtype=np.int32))
    return np.load(tmp_path / "lengths.npy", mmap_mode="r")


def test_mapped_array_stays_mapped_and_pickles_as_a_reference(mapped: np.memmap) -> None:
    for view in (mapped, mapped[5:], np.asarray(mapped)[7:90_000], mapped[99_999:]):
        lengths = as_lengths(view)
        assert np.shares_memory(lengths.values, mapped)
        data = pickle.dumps(lengths)
        assert len(data) < 1000
        copy = pickle.loads(data)
        assert isinstance(copy, Lengths)
        assert isinstance(copy.values, np.memmap)
        assert not copy.values.flags.writeable
        np.testing.assert_array_equal(copy.values, view, strict=False)
        assert vars(copy).keys() == vars(lengths).keys()
        assert all(getattr(copy, name) == getattr(lengths, name) for name in ("minimum", "maximum", "total", "digest"))
        assert len(pickle.dumps(copy)) < 1000


def test_raw_mapped_file_at_an_offset_pickles_as_a_reference(tmp_path: Any) -> None:
    values = np.arange(1, 5001, dtype=np.int64)
    (tmp_path / "raw").write_bytes(b"x" * 8200 + values.tobytes())
    lengths = as_lengths(np.memmap(tmp_path / "raw", np.int64, "r+", 8200)[10:])
    data = pickle.dumps(lengths)
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data).values, values[10:])


def test_values_that_are_not_one_run_of_a_file_pickle_by_value(mapped: np.memmap, tmp_path: Any) -> None:
    private = np.load(tmp_path / "lengths.npy", mmap_mode="c")
    private[0] = 77
    for lengths in (as_lengths(mapped[::2]), as_lengths(private), as_lengths(VALUES), as_lengths(mapped.astype(float))):
        copy = pickle.loads(pickle.dumps(lengths))
        assert type(copy.values) is np.ndarray
        assert not copy.values.flags.writeable
        np.testing.assert_array_equal(copy.values, lengths.values)
        assert (copy.values.dtype, copy.digest) == (lengths.values.dtype, lengths.digest)


def test_reference_to_a_file_that_is_gone_or_shorter(mapped: np.memmap, tmp_path: Any) -> None:
    file = tmp_path / "lengths.npy"
    data = pickle.dumps(as_lengths(mapped))
    file.rename(tmp_path / "moved.npy")
    with pytest.raises(ParameterError, match=r"lengths were pickled as a part of .*lengths\.npy: "):
        pickle.loads(data)
    by_value = pickle.dumps(as_lengths(mapped))  # the file has no name any more
    assert pickle.loads(by_value).maximum == 100_000
    file.write_bytes(b"short")
    with pytest.raises(ParameterError, match=r"lengths were pickled as a part of .*lengths\.npy: "):
        pickle.loads(data)


def test_spawned_process_maps_the_same_file(mapped: np.memmap) -> None:
    lengths = as_lengths(mapped)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        digest, kind = pool.apply(digest_again, (lengths,))
    assert (digest, kind) == (lengths.digest, "memmap")


def digest_again(lengths: Lengths) -> tuple[int, str]:
    return as_lengths(lengths.values).digest, type(lengths.values).__name__


def memory_beside(lengths: Any) -> int:
    """Return the peak of what `as_lengths` allocates, less the int32 result where it makes one."""
    as_lengths(lengths[:2])  # compiles
    tracemalloc.start()
    try:
        result = as_lengths(lengths)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    in_place = isinstance(lengths, np.ndarray) and np.shares_memory(result.values, lengths)
    return peak - (0 if in_place else 4 * len(result))


@pytest.mark.parametrize(("dtype", "limit"), [(np.int32, MIB), (np.uint64, MIB), (np.float16, 16 * MIB)])
def test_memory_beside_mapped_lengths_is_constant(dtype: type, limit: int, tmp_path: Any) -> None:
    np.save(tmp_path / "lengths.npy", np.full(10_000_000, 300, dtype))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    assert memory_beside(mapped) < limit
    assert memory_beside(mapped[::2]) < 16 * MIB


def test_memory_beside_other_lengths_is_constant() -> None:
    assert memory_beside([300] * 1_000_000) < 16 * MIB
    half = np.full(5_000_000, 300)
    assert memory_beside(pyarrow.chunked_array([half, half])) < 16 * MIB


def test_progress_shows_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    as_lengths(VALUES)
    assert capsys.readouterr() == ("", "")
    as_lengths(VALUES, name="sizes", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "checking sizes: 100%" in err


@pytest.mark.parametrize("module", [gpusampler.lengths, gpusampler.kernels.checks])
def test_examples(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0
