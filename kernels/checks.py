"""Check, summarise and fingerprint a block of lengths in one pass.

A training run starts by looking at every length once. That look decides whether they are all usable, and yields the
range, the sum and a digest by which two processes (or a run and its checkpoint) know that they hold the same lengths.

The digest is a sum modulo 2^63 of one term a sample: its index and its length packed into one key, then mixed by a
bijection of 63 bits (the two multiply and xor-shift rounds of Stafford's Mix13, the finaliser of SplitMix64, with the
top bit dropped). So the parts of blocks add up in any order, the container and the dtype do not matter, one changed
length always changes the sum, and the order counts. It is not cryptographic. A 63-bit value fits an int64 tensor.

O(n) time, O(1) memory. Keys are unique for up to 2^32 samples.
"""

from __future__ import annotations

import math

import numpy as np

from gpusampler.kernels.compiled import compiled

MAX_LENGTH = 2**31 - 1
"""Longest length that is accepted: what an int32 holds, so that converted lengths take four bytes each."""

DIGEST_MASK = 2**63 - 1

_MASK = np.uint64(DIGEST_MASK)
_LENGTH_BITS = np.uint64(31)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@compiled
def digest_term(index: int, length: int) -> int:
    """Return the share of one sample in the digest, as uint64 below 2^63.

    Example:
        >>> digest_term(0, 1), digest_term(1, 1)
        (2558316640067307269, 3385339445671049935)
    """
    key = (np.uint64(index) << _LENGTH_BITS | np.uint64(length)) & _MASK
    key = (key ^ key >> _SHIFT_1) * _MULTIPLIER_1 & _MASK
    key = (key ^ key >> _SHIFT_2) * _MULTIPLIER_2 & _MASK
    return key ^ key >> _SHIFT_3


@compiled
def scan_lengths(block: np.ndarray, start: int, bad_at: np.ndarray) -> tuple[int, int, int, int, int]:
    """Return (bad, minimum, maximum, total, digest) of one block, and write where its first bad values are.

    A value is bad unless it is an integer (3.0 counts as one) from 1 to `MAX_LENGTH`. The other four results cover the
    whole block and mean nothing when `bad` is not 0.

    Args:
        block: numeric array [n] of int8..int64, uint8..uint32, float32 or float64, contiguous, n >= 1.
        start: index of the block's first value in the whole array, from which digest keys are made.
        bad_at: int64 array [4] that is written when `bad` is not 0: the positions within the block of its first three
            bad values and of the first that is not finite; -1 where there is none.

    Returns:
        Counts and sums as integers; the digest below 2^63. Parts of several blocks combine by +, min, max, +, and
        + modulo 2^63.

    Example:
        >>> bad_at = np.empty(4, np.int64)
        >>> scan_lengths(np.array([1, 1], np.int32), 0, bad_at)  # 2558316640067307269 + 3385339445671049935
        (0, 1, 1, 2, 5943656085738357204)
        >>> scan_lengths(np.array([3.5, 1, 0, np.inf]), 0, bad_at)[0], bad_at.tolist()
        (3, [0, 2, 3, 3])
    """
    bad, total = 0, 0
    minimum, maximum = np.int64(MAX_LENGTH), np.int64(0)
    digest = np.uint64(0)
    for i in range(block.size):
        value = block[i]
        inside = value >= 1 and value <= MAX_LENGTH
        length = np.int64(value) if inside else np.int64(0)
        bad += not inside or length != value
        minimum = min(minimum, length)
        maximum = max(maximum, length)
        total += length
        digest += digest_term(start + i, length)
    if bad > 0:
        _locate(block, bad_at)
    return bad, minimum, maximum, total, np.int64(digest & _MASK)


@compiled
def _locate(block: np.ndarray, bad_at: np.ndarray) -> None:
    bad_at[:] = -1
    found = 0
    for i in range(block.size):
        value = block[i]
        inside = value >= 1 and value <= MAX_LENGTH
        if not inside or np.int64(value) != value:
            if found < 3:
                bad_at[found] = i
                found += 1
            if bad_at[3] < 0 and not math.isfinite(value):
                bad_at[3] = i


@compiled
def count_above(block: np.ndarray, limit: int) -> tuple[int, int]:
    """Position of the first value above `limit` (-1 if none) and how many there are."""
    first, count = -1, 0
    for i in range(block.size):
        if block[i] > limit:
            if count == 0:
                first = i
            count += 1
    return first, count


@compiled
def _gather(values: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    for i in range(places.size):
        out[i] = values[places[i]]


def gather(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """`values[places]` as int64, without the GIL: `values` may be a mapped file that has to be read."""
    out = np.empty(places.shape, dtype=np.int64)
    _gather(values, places.reshape(-1), out.reshape(-1))
    return out


@compiled
def _reorder(rows: np.ndarray, order: np.ndarray, out: np.ndarray) -> None:
    for w in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            out[w, i] = rows[w, order[w, i]]


def reorder(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`out[w, i] = rows[w, order[w, i]]`, int64 [W, B], without the GIL."""
    out = np.empty_like(rows)
    _reorder(rows, order, out)
    return out
