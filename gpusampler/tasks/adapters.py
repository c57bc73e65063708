"""Two front ends that make sources of data: in-memory arrays, and record stores on disk.

Both only find systems and the length of each of their frames; filtering, batching, counting and the choice of systems
are shared (`make_source`), and batches are always counted by a sampler that the caller's function builds over the
frames that stay. What differs is the legacy size, because it differed: arrays counted systems, a record store counted
records. A record store is an SQLite file (or a folder of them) with one row a frame.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.tasks.source import Source
from gpusampler.tasks.systems import SystemGroup

Lengths: TypeAlias = NDArray[np.int64]
MakeSampler: TypeAlias = Callable[[Lengths], Sized]


@dataclass(frozen=True, eq=False)
class System:
    """A system: frames that are read together.

    Attributes:
        name: Where it was found.
        lengths: Length of each frame (atoms, tokens, ...), int64.
        is_records: Whether the legacy policy counts its frames; else it counts 1.
    """

    name: str
    lengths: Lengths
    is_records: bool = False


def array_systems(data: Any, name: str = "") -> list[System]:
    """Systems in arrays, found recursively in mappings, lists and tuples, in their order.

    Args:
        data: An array of shape [frames, length, ...], or a 1-D integer array with the length of each frame, or any
            nesting of these.
        name: Prefix of the names.

    Raises:
        ParameterError: Something in it is neither an array nor a container.

    Example:
        >>> found = array_systems({"bulk": np.zeros((3, 64, 3)), "clusters": [np.array([5, 7]), np.array([9])]})
        >>> [(system.name, system.lengths.tolist()) for system in found]
        [('bulk', [64, 64, 64]), ('clusters/0', [5, 7]), ('clusters/1', [9])]
    """
    if isinstance(data, Mapping):
        parts: list[tuple[Any, Any]] = list(data.items())
    elif isinstance(data, (list, tuple)):
        parts = list(enumerate(data))
    else:
        return [System(name or "array", _frame_lengths(data, name or "array"))]
    return [system for key, part in parts for system in array_systems(part, f"{name}/{key}" if name else str(key))]


def _frame_lengths(array: Any, name: str) -> Lengths:
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        raise ParameterTypeError(f"{name} must be an array with a frame dimension, got {quote(array)}")
    if len(shape) > 1:
        return np.full(shape[0], shape[1], dtype=np.int64)
    values = np.asarray(array)
    if values.dtype.kind not in "iu":
        raise ParameterTypeError(f"{name} must hold integer lengths if it is 1-D, got dtype {values.dtype}")
    lengths = values.astype(np.int64, copy=False)
    bad = np.flatnonzero(lengths < 0)  # also an unsigned length of 2**63 or more
    if len(bad):
        raise ParameterError(f"{name}[{bad[0]}] must be a length from 0 to 2**63 - 1, got {values[bad[0]]}")
    return lengths


def record_systems(
    path: str | Path, *, table: str = "records", system: str = "system", length: str = "length", pattern: str = "*.db"
) -> list[System]:
    """Systems in a record store, in the order of their first records.

    Args:
        path: An SQLite file, or a folder that is searched recursively.
        table: Table with one row a frame.
        system: Column with the name of the frame's system.
        length: Column with the length of the frame.
        pattern: Files of a folder that are record stores.

    Raises:
        ParameterError: There is no store, or it lacks the table or a column.
    """
    if not isinstance(path, (str, Path)):
        raise ParameterTypeError(f"path must be a string or a Path, got {quote(path)}")
    for what, value in (("table", table), ("system", system), ("length", length), ("pattern", pattern)):
        if not isinstance(value, str):
            raise ParameterTypeError(f"{what} must be a string, got {quote(value)}")
    root = Path(path)
    try:
        files = [file for file in sorted(root.rglob(pattern) if root.is_dir() else [root]) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise ParameterError(f"pattern must match names of files below {str(path)!r}, got {quote(pattern)}") from error
    if not files:
        raise ParameterError(f"path must be a record store or a folder with files {pattern!r}, got {str(path)!r}")
    return [found for file in files for found in _systems_of_file(file, root, table, system, length)]


def _systems_of_file(file: Path, root: Path, table: str, system: str, length: str) -> list[System]:
    # qualified: SQLite takes an unknown name in double quotes for a string
    columns = ", ".join(f"{_quoted(table)}.{_quoted(name)}" for name in (system, length))
    connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute(f"SELECT {columns} FROM {_quoted(table)} ORDER BY rowid").fetchall()
    except sqlite3.Error as error:
        raise ParameterError(
            f"record store {file.name!r} has no {system!r}, {length!r} in {table!r}: {error}"
        ) from error
    finally:
        connection.close()
    frames: dict[str, list[int]] = {}
    for row, (key, value) in enumerate(rows):
        if not isinstance(key, (str, int)):
            raise ParameterTypeError(f"{system} of row {row} in {file.name!r} must be text or an int, got {quote(key)}")
        frames.setdefault(str(key), []).append(check_int(f"{length} of row {row} in {file.name!r}", value, minimum=0))
    prefix = "" if file == root else f"{file.relative_to(root).with_suffix('').as_posix()}/"
    return [System(prefix + key, np.array(found, dtype=np.int64), True) for key, found in frames.items()]


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def make_source(
    systems: Sequence[System],
    make_sampler: MakeSampler,
    *,
    prob: float | None = None,
    max_length: int | None = None,
    auto_prob: str = "prob_sys_size",
    sys_probs: Sequence[float] | None = None,
    name: str | None = None,
    legacy_size: int | None = None,
) -> Source:
    """A source that draws among systems, each with a sampler over the frames that stay.

    Args:
        systems: What `array_systems` or `record_systems` found.
        make_sampler: Builds the batch sampler of one system from the lengths of its frames; called for systems with
            frames, once, when their number of batches is first needed.
        prob: Probability of the source in its task.
        max_length: Longer frames are left out. A system that loses all keeps its position and has no batches.
        auto_prob: Choice of systems, as in `SystemGroup`.
        sys_probs: Choice of systems, as in `SystemGroup`.
        name: What errors and reports call the source.
        legacy_size: What the legacy policy counts; by default records that stay, or systems of arrays that keep frames.

    Raises:
        ParameterError: A value is out of range; on first use, a sampler or a probability cannot be had.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> systems = array_systems({"a": np.zeros((10, 64, 3)), "b": np.zeros((5, 96, 3))})
        >>> source = make_source(systems, lambda lengths: BatchSampler(range(len(lengths)), 4, False))
        >>> source.num_steps, source.legacy_size
        (5, 2)
    """
    if max_length is not None:
        check_int("max_length", max_length, minimum=1)
    if not callable(make_sampler):
        raise ParameterTypeError(f"make_sampler must be callable, got {quote(make_sampler)}")
    workloads: list[int | Callable[[], Sized]] = []
    names: list[str] = []
    counted = 0
    for index, system in enumerate(systems):
        if not isinstance(system, System):
            raise ParameterTypeError(f"systems[{index}] must be a System, got {quote(system)}")
        kept = system.lengths if max_length is None else system.lengths[system.lengths <= max_length]
        workloads.append(partial(make_sampler, kept) if len(kept) else 0)
        names.append(f"system {system.name!r} with {len(kept)} frames")
        counted += len(kept) if system.is_records else min(len(kept), 1)
    group = SystemGroup(workloads, auto_prob, sys_probs, names=names)
    return Source(group, prob, name=name, legacy_size=counted if legacy_size is None else legacy_size)
