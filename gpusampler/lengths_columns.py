"""Lengths of a table's samples from one of its columns: a datasets.Dataset, Arrow data, a mapping, a DataFrame.

Integers are lengths, lists are counted by their offsets, other values one by one. A column that is not named is taken
only if it holds what its name says: numbers in `length`, lists in `labels`, whose integers would be class ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpusampler.errors import ParameterError
from gpusampler.readers import COLUMNS
from gpusampler.sample_length import SIZED_COLUMNS, size_of


def from_datasets(dataset: Any, column: Any) -> Any:
    """Lengths of a `datasets.Dataset`, as its table has them."""
    table = dataset.data
    name = _choose(dataset.column_names, column, lambda name: _is_list(table.column(name).type))
    lengths = _arrow_lengths(table.column(name), name)
    # rows that were selected, shuffled or split off are an index over the table; taking lists by it would copy them
    indices = dataset._indices
    return lengths if indices is None else lengths.take(indices.column(0))


def from_arrow(data: Any, column: Any) -> Any:
    """Lengths of an Arrow table, record batch or array."""
    if not hasattr(data, "column_names") and not hasattr(data, "schema"):
        if column is not None:
            raise ParameterError(f"column={column!r} is for a table, dataset is one column, a {type(data).__name__}")
        return _arrow_lengths(data, "the array")
    name = _choose(data.schema.names, column, lambda name: _is_list(data.column(name).type))
    return _arrow_lengths(data.column(name), name)


def from_columns(columns: Any, column: Any) -> Any:
    """Lengths of a mapping of columns or a DataFrame."""
    names = list(columns.keys())
    name = _choose(names, column, lambda name: _holds_lists(columns[name]))
    values = columns[name]
    if isinstance(columns, Mapping):
        sizes = {other: len(columns[other]) for other in names if _is_column(columns[other])}
        other = next((other for other, size in sizes.items() if size != len(values)), None)
        if other is not None:
            raise ParameterError(
                f"columns must be of equal length: {name!r} has {len(values)} rows, {other!r} {sizes[other]}"
            )
    if hasattr(values, "dtype") and values.ndim == 1 and str(values.dtype) != "object":
        return values
    return [0 if value is None else size_of(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _choose(names: Sequence[Any], column: Any, holds_lists: Callable[[Any], bool]) -> Any:
    if column is not None:
        if column not in names:
            raise ParameterError(f"column {column!r} is not one of {', '.join(map(repr, names))}")
        return column
    counted = [name for name in names if str(name).lower() in COLUMNS and not holds_lists(name)]
    sized = [name for known in SIZED_COLUMNS for name in names if str(name).lower() == known and holds_lists(name)]
    if len(counted) == 1 or (sized and not counted):
        return (counted or sized)[0]
    listing = ", ".join(map(repr, counted or names))
    raise ParameterError(f"which column holds the lengths? Give column, one of: {listing}")


def _arrow_lengths(values: Any, name: str) -> Any:
    """Integers as they are, sizes of lists from their offsets."""
    import pyarrow as pa
    from pyarrow import compute, types

    if isinstance(values.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in getattr(values, "chunks", [values])]
        values = pa.chunked_array(chunks, values.type.storage_type)
    if types.is_integer(values.type) or types.is_floating(values.type):
        return values
    if not _is_list(values.type):
        raise ParameterError(f"column {name!r} holds {str(values.type)[:60]}, neither integers nor lists")
    return compute.list_value_length(values)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)
    return any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _holds_lists(values: Any) -> bool:
    """Whether the first value of a column, but for missing ones, has a size; integers, also as tensors, have none."""
    first = next((value for value in values if value is not None), None)
    return getattr(first, "ndim", 1) > 0 and hasattr(first, "__len__") and not isinstance(first, (str, bytes, Mapping))


def _is_column(values: Any) -> bool:
    return (
        hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0 and not isinstance(values, (str, bytes, Mapping))
    )
