"""Ingest of sample lengths: any usual container in, one checked 1-D integer array out.

Everything after this file reads `Lengths.values` and relies on it: integers from 1 to `MAX_LENGTH` (2^31 - 1), at least
one. Integer arrays that lie in memory or in a mapped file are used where they are, whatever their integer dtype; other
containers are converted once, to int32. The values are looked at in blocks, so that checking a mapped file pages
through it: O(N) time (about 0.15 s for 1e8 int32 values on one core), at most 16 MiB beside the result.

The caller must not change an array after handing it over: the digest would no longer describe it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import numbers
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.kernels.checks import DIGEST_MASK, MAX_LENGTH, scan_lengths

_Array = np.ndarray[Any, Any]

_ARRAY_BLOCK = 1 << 20
_ITEM_BLOCK = 1 << 17


@dataclass(frozen=True, eq=False)
class Lengths:
    """Checked lengths of all samples, with what one pass over them tells.

    Attributes:
        values: read-only integer array [N], native byte order, every value from 1 to `MAX_LENGTH`; the caller's own
            memory where that is possible.
        minimum: shortest length.
        maximum: longest length.
        total: sum of all lengths.
        digest: fingerprint of the lengths in their order, from 0 to 2^63 - 1. The same lengths have the same digest in
            any container and dtype; changing any one length changes it.
    """

    values: _Array = field(repr=False)
    minimum: int
    maximum: int
    total: int
    digest: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a mapped file by its name and place, other values by value."""
        values = _file_of(self.values) or np.asarray(self.values)
        return _restore, (values, self.minimum, self.maximum, self.total, self.digest)


def as_lengths(lengths: Any, *, name: str = "lengths", progress: bool = False) -> Lengths:
    """Check lengths and make them one integer array, without copying what need not be copied.

    Args:
        lengths: numpy array (memory-mapped or not), torch tensor (a CUDA tensor is copied to the host once), pyarrow
            array or chunked array, pandas Series, column of a `datasets.Dataset`, list, tuple, range, or another
            sequence. Every length is an integer from 1 to `MAX_LENGTH`; 3.0 counts as an integer. A `Lengths` is
            returned as it is.
        name: what errors call the lengths.
        progress: show a progress bar on standard error.

    Returns:
        The checked lengths.

    Raises:
        ParameterTypeError: the container cannot hold lengths (a generator, a set, a mapping, a whole dataset, ...).
        ParameterError: there are no lengths, or some are bad: the first of them are named with index and value.

    Example:
        >>> lengths = as_lengths([5, 9, 2])
        >>> lengths
        Lengths(minimum=2, maximum=9, total=16, digest=3141394885856335806)
        >>> as_lengths(np.array([5, 9, 2], np.uint8)).digest == lengths.digest
        True
        >>> as_lengths([0, 5], name="sizes")
        Traceback (most recent call last):
            ...
        gpusampler.errors.ParameterError: sizes must be positive integers: sizes[0] = 0 is not positive (1 of 2 is bad)
    """
    if isinstance(lengths, Lengths):
        return lengths
    source = _open(lengths, name)
    size = len(source)
    if size == 0:
        raise ParameterError(f"{name} is empty: at least one length is needed")
    in_place = _usable_in_place(source)
    values = source if in_place else np.empty(size, np.int32)
    scan = _Scan(name, size)
    with tqdm(total=size, desc=f"checking {name}", unit="", unit_scale=True, disable=not progress) as bar:
        for start, items in _blocks(source, name):
            block = _as_numbers(items)
            scan.add(items, block, start)
            if not in_place and not scan.bad:
                values[start : start + len(items)] = block
            bar.update(len(items))
    scan.raise_if_bad()
    return Lengths(_read_only(values), scan.minimum, scan.maximum, scan.total, scan.digest)


def explain_bad_length(value: Any) -> str | None:
    """Return why `value` cannot be a length, or None where it can.

    Example:
        >>> explain_bad_length(7), explain_bad_length(7.5)
        (None, 'is not an integer')
    """
    if value is None or value is np.ma.masked:
        return "is missing"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, float, np.floating)):
        sized = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
        return f"is a {type(value).__name__}, not an integer" + (": give its length" if sized else "")
    if not isinstance(value, numbers.Integral) and not math.isfinite(value):
        return "is not finite"
    whole = int(value)
    if value != whole:
        return "is not an integer"
    if whole < 1:
        return "is not positive"
    return f"is over {MAX_LENGTH}" if whole > MAX_LENGTH else None


class _Scan:
    """What a pass over blocks has seen so far."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.bad = self.total = self.digest = 0
        self.minimum, self.maximum = MAX_LENGTH, 0
        self._first: dict[int, str] = {}
        self._not_finite: dict[int, str] = {}
        self._bad_at = np.empty(4, np.int64)

    def add(self, items: Any, block: _Array, start: int) -> None:
        """Take in the block at index `start`: `items` as the caller gave them, `block` the same as numbers."""
        bad, minimum, maximum, total, digest = scan_lengths(_for_kernel(block), start, self._bad_at)
        if bad:
            *first, not_finite = self._bad_at.tolist()
            for position in first[: min(bad, 3 - len(self._first))]:
                self._note(self._first, items, start, position)
            if not_finite >= 0 and not self._not_finite:
                self._note(self._not_finite, items, start, not_finite)
        self.bad += bad
        self.minimum, self.maximum = min(self.minimum, minimum), max(self.maximum, maximum)
        self.total += total
        self.digest = self.digest + digest & DIGEST_MASK

    def _note(self, notes: dict[int, str], items: Any, start: int, position: int) -> None:
        value = _item(items[position])
        notes[start + position] = f"{self.name}[{start + position}] = {quote(value, 40)} {explain_bad_length(value)}"

    def raise_if_bad(self) -> None:
        """Raise an error that names three bad values: the first ones, but always the first that is not finite."""
        if not self.bad:
            return
        notes = self._first
        if not self._not_finite.keys() <= notes.keys():
            notes = dict(list(notes.items())[:2]) | self._not_finite
        count = f"{self.bad} of {self.size} {'is' if self.bad == 1 else 'are'} bad"
        raise ParameterError(f"{self.name} must be positive integers: {'; '.join(notes.values())} ({count})")


def _open(lengths: Any, name: str) -> Any:
    """Return `lengths` as a numpy array where that takes no copy, else something to read block by block."""
    _reject_wrong_container(lengths, name)
    source = lengths
    try:
        if isinstance(source, torch.Tensor):
            source = _from_tensor(source)
        elif _is_from("pandas", source):
            source = source.to_numpy() if isinstance(source.dtype, np.dtype) else source.array
        elif _is_from("pyarrow", source):
            source = _from_arrow(source)
    except (TypeError, RuntimeError) as error:
        raise ParameterTypeError(f"{name} of type {_type(lengths)} cannot be read on the host: {error}") from error
    if isinstance(source, np.ma.MaskedArray) and not np.ma.is_masked(source):
        source = source.data
    shape = getattr(source, "shape", (0,))
    if len(shape) != 1:
        raise ParameterError(f"{name} must be one-dimensional, one length a sample, got shape {tuple(shape)}")
    dtype = source.dtype if isinstance(source, np.ndarray) else source.type if _is_from("pyarrow", source) else None
    if dtype not in (None, np.dtype(object)) and not _is_numeric(dtype) and len(source):
        first = f"{name}[0] = {quote(_item(source[0]), 40)}"
        raise ParameterError(f"{name} must be positive integers: {first} is of type {dtype}")
    return source


def _reject_wrong_container(lengths: Any, name: str) -> None:
    if isinstance(lengths, torch.utils.data.Dataset) or hasattr(lengths, "column_names") or hasattr(lengths, "columns"):
        advice = "pass its column of lengths, or [len(x) for x in dataset]"
    elif isinstance(lengths, Mapping):
        advice = "pass its values as a list, in sample order"
    elif isinstance(lengths, (str, bytes, bytearray)):
        advice = "pass a list of integers"
    elif hasattr(lengths, "__next__") or not (hasattr(lengths, "__len__") and hasattr(lengths, "__getitem__")):
        advice = "pass list(...) of it" if hasattr(lengths, "__iter__") else "pass a list or an array"
    elif getattr(lengths, "ndim", 1) == 0:
        advice = "pass a list or an array"
    else:
        return
    value = f"{quote(lengths, 40)} of type " if isinstance(lengths, (str, bytes, numbers.Number)) else ""
    raise ParameterTypeError(f"{name} must be a sequence of integers, got {value}{_type(lengths)}: {advice}")


def _usable_in_place(source: Any) -> bool:
    return (
        isinstance(source, np.ndarray)
        and not isinstance(source, np.ma.MaskedArray)
        and source.dtype.kind in "iu"
        and source.dtype.isnative
        and source.flags.aligned
    )


def _blocks(source: Any, name: str) -> Iterator[tuple[int, Any]]:
    """Yield (start, items) over all of `source`."""
    size = len(source)
    step = _ARRAY_BLOCK if isinstance(source, np.ndarray) and source.dtype != object else _ITEM_BLOCK
    iterator = None if _can_slice(source) else iter(source)
    for start in range(0, size, step):
        count = min(step, size - start)
        items = source[start : start + count] if iterator is None else list(islice(iterator, count))
        if len(items) != count:
            raise ParameterError(f"{name} has len() {size}, but holds {start + len(items)} lengths")
        yield start, items


def _can_slice(source: Any) -> bool:
    try:
        return len(source[0:1]) == 1
    except Exception:  # a Sequence need not take slices and may fail in any way; iteration shows errors of its own
        return False


def _as_numbers(items: Any) -> _Array:
    """Return a block as a numeric array, with 0 (a bad length) for what is not a number."""
    if isinstance(items, torch.Tensor):
        items = _from_tensor(items)
    elif isinstance(items, np.ma.MaskedArray):
        items = items.filled(0)
    elif isinstance(items, range) and max(abs(items[0]), abs(items[-1])) <= MAX_LENGTH:
        items = np.arange(items.start, items.stop, items.step)
    elif hasattr(items, "__array__"):
        items = np.asarray(items)
    if isinstance(items, np.ndarray) and items.ndim == 1 and _is_numeric(items.dtype):
        return items
    items = list(items)
    kinds = set(map(type, items))
    if all(issubclass(kind, (int, float, np.number)) and kind is not bool for kind in kinds):
        with contextlib.suppress(OverflowError):  # an int too large for a float among floats
            block = np.array(items)
            if _is_numeric(block.dtype):
                return block
    return np.array([_as_number(_item(item)) for item in items])


def _as_number(value: Any) -> float:
    reason = explain_bad_length(value)
    if reason is None:
        return float(value)
    return math.nan if reason == "is not finite" else 0.0


def _item(value: Any) -> Any:
    """Return an item of a container as a plain Python object, where it is a scalar of numpy, torch or pyarrow."""
    if value is np.ma.masked:
        return value
    if hasattr(value, "as_py"):
        return value.as_py()
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _from_tensor(tensor: torch.Tensor) -> _Array:
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()  # numpy has no bfloat16
    return tensor.numpy(force=True)


def _from_arrow(array: Any) -> Any:
    chunks = [chunk for chunk in getattr(array, "chunks", [array]) if len(chunk)]
    if len(chunks) == 1 and _is_numeric(array.type) and not array.null_count:
        return chunks[0].to_numpy()
    return array


def _is_numeric(dtype: Any) -> bool:
    """Whether a numpy or pyarrow type is one that the scan reads: integers and floats of up to 64 bits."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "iuf" and dtype.itemsize <= 8
    from pyarrow import types

    return bool(types.is_integer(dtype) or types.is_floating(dtype))


def _for_kernel(block: _Array) -> _Array:
    """Return a block as one of the few array types that the kernel is compiled for."""
    if block.dtype == np.float16:
        block = block.astype(np.float32)
    block = np.require(block, block.dtype.newbyteorder("="), ["C", "A", "E"])
    if block.dtype == np.uint64:
        block = block.view(np.int64)  # what is over 2^63 turns negative: bad either way
    return _read_only(block)


def _read_only(values: _Array) -> _Array:
    values = values.view()
    values.flags.writeable = False
    return values


def _is_from(package: str, value: object) -> bool:
    return type(value).__module__.partition(".")[0] == package


def _type(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


class _MappedFile(NamedTuple):
    filename: str
    dtype: np.dtype[Any]
    size: int
    offset: int


def _file_of(values: _Array) -> _MappedFile | None:
    """Return where in which file the values lie, if they are one run of a file that numpy mapped."""
    mapped: np.memmap[Any, Any] | None = None
    base: Any = values
    while isinstance(base, np.ndarray):
        mapped = base if isinstance(base, np.memmap) else mapped
        base = base.base
    # a copy-on-write map (mode "c") may hold values that its file does not
    if mapped is None or not isinstance(base, mmap.mmap) or mapped.mode == "c" or not values.flags.c_contiguous:
        return None
    if mapped.filename is None or not os.path.isfile(mapped.filename):
        return None
    first_byte = np.frombuffer(base, np.uint8, 1).ctypes.data
    offset = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY + values.ctypes.data - first_byte
    return _MappedFile(os.path.abspath(mapped.filename), values.dtype, len(values), offset)


def _restore(values: _Array | _MappedFile, minimum: int, maximum: int, total: int, digest: int) -> Lengths:
    if isinstance(values, _MappedFile):
        file = values
        try:
            values = np.memmap(file.filename, file.dtype, "r", file.offset, (file.size,))
        except (OSError, ValueError) as error:
            raise ParameterError(f"lengths were pickled as a part of {file.filename}: {error}") from error
    return Lengths(_read_only(values), minimum, maximum, total, digest)
