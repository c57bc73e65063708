"""Launch shapes of the kernels: block sizes and warps from the sizes of a problem, and nothing else.

Fixed rather than tuned: a tuned choice would differ between ranks and stall the first steps. All are powers of two,
with a floor, so that few variants are compiled. No result depends on any of them.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_SORT = 16384
"""Most keys that are sorted at once, where the chip's shared memory holds them: 16 a thread, more would spill."""
MAX_GROUPS = 2048
"""Most groups of a row: one program sorts their costs."""
MAX_SLOTS = 256
"""Most accumulation slots: one program weighs them all for a candidate."""
WORKSPACE_BYTES = 1 << 27
"""Most memory that the candidates of one launch write their groups to."""

SHARED_BYTES = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
"""Shared memory that one program can have, by compute capability."""

_MIN_BLOCK = 64
_INTERPRETED = 8192


class Shape(NamedTuple):
    """A block size and the warps that share it."""

    block: int
    num_warps: int


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`.

    Example:
        >>> [power_of_two(size) for size in (1, 2, 3, 1024, 1025)]
        [1, 2, 4, 1024, 2048]
    """
    return 1 << max(0, size - 1).bit_length()


def _shape(size: int, per_thread: int, most_warps: int) -> Shape:
    block = max(_MIN_BLOCK, power_of_two(size))
    return Shape(block, max(1, min(most_warps, block // (32 * per_thread))))


def sort_shape(size: int, key_bytes: int, shared_bytes: int) -> Shape | None:
    """Shape of the sort of `size` keys at once, or None if they are too many for a program of a chip.

    Example:
        >>> sort_shape(1000, key_bytes=4, shared_bytes=232448), sort_shape(16385, key_bytes=8, shared_bytes=232448)
        (Shape(block=1024, num_warps=16), None)
    """
    shape = _shape(size, 2, 32)
    return None if shape.block > MAX_SORT or shape.block * key_bytes > shared_bytes else shape


HALF = Shape(MAX_SORT, 32)
"""Keys of half a row that is sorted by halves: 64 KiB of int32, which all chips hold."""
SHUFFLE = Shape(256, 4)
"""Elements of a permutation that one program computes: small, since a program waits for its slowest lane."""
COSTS = Shape(1024, 8)
"""Samples of a row that one turn of the cost scan takes."""
PROBES = Shape(128, 4)
"""Levels that one turn of an exact min-max search tries."""
WASTES = Shape(64, 16)
"""Nodes of the bisection tree, plus one, that one turn of an equal-waste search tries."""
COPY = Shape(128, 1)
"""Positions that one turn of the copy of a group takes."""


def group_shape(groups: int) -> Shape:
    """Shape of the kernels that hold all groups of a row.

    Example:
        >>> group_shape(64), group_shape(1024)
        (Shape(block=64, num_warps=4), Shape(block=1024, num_warps=16))
    """
    block, num_warps = _shape(groups, 1 if groups <= 256 else 2, 32)
    return Shape(block, max(4, num_warps))


class WalkShape(NamedTuple):
    """Candidates of one program, slots of a candidate, and the warps that share them."""

    lanes: int
    slots: int
    num_warps: int


def walk_shape(slots: int, interpreted: bool = False) -> WalkShape:
    """Shape of the walk of candidates: a slot of a candidate a thread, 256 threads; more if interpreted.

    Example:
        >>> walk_shape(4), walk_shape(6)
        (WalkShape(lanes=64, slots=4, num_warps=8), WalkShape(lanes=32, slots=8, num_warps=8))
    """
    padded = max(2, power_of_two(slots))
    return WalkShape(max(1, (_INTERPRETED if interpreted else 256) // padded), padded, 8)


def rows_at_once(groups: int, lanes: int) -> int:
    """Rows whose candidates can be walked in one launch: each lane writes an int32 a group.

    Example:
        >>> rows_at_once(groups=64, lanes=320)
        1638
    """
    return max(1, WORKSPACE_BYTES // (4 * groups * lanes))
