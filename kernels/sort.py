"""Positions of each row, longest first, ties by smaller position.

    [3, 1, 4, 1, 5, 9, 2, 6, 5] -> [5, 7, 4, 8, 2, 0, 6, 1, 3]

A key is (top - length) << bits | position, with `top` one above the longest length allowed: keys differ, so that any
sort gives the stable order, and lengths beyond [1, longest] come to the ends. Keys are int32 where that is enough,
else int64. One program sorts a row by a bitonic network whose stages are a loop, an element's partner fetched by
`tl.gather`: 100 to 800 instructions, where the unrolled `tl.sort` of 4096 keys is 3000 to 11000 and takes 6 to 40 s to
compile. Up to 16384 keys are sorted by one program; up to 32768 int32 keys by halves, one ascending, one descending,
which are then merged. Longer rows go to `torch.sort`, with the same result. O(log(B)**2) steps of B / threads
exchanges. Limits: lengths allowed up to 2**31 - 1, rows below 2**31.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.jit import FLAGS, kernel

_LONG_BITS = 31
_PADDING: tl.constexpr = tl.constexpr(2**63 - 1)
_PACKED_PADDING: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def sort_keys(keys, index, log_size):
    """Sort each aligned run of 2**log_size keys; `index` is their arange. The first run ascends."""
    stage = tl.full([], 1, tl.int32)
    bit = tl.zeros([], tl.int32)
    while stage <= log_size:
        partner = tl.gather(keys, index ^ (1 << bit), 0)
        descends = (index & (1 << stage)) != 0
        is_second = (index & (1 << bit)) != 0
        keys = tl.where((keys > partner) ^ descends ^ is_second, partner, keys)
        stage += (bit == 0).to(tl.int32)
        bit = tl.where(bit == 0, stage, bit) - 1
    return keys


@triton.jit
def _merge_keys(keys, index, log_size):
    """Sort 2**log_size keys that ascend, then descend, or are a part of such a sequence."""
    bit = tl.zeros([], tl.int32) + log_size - 1
    while bit >= 0:
        partner = tl.gather(keys, index ^ (1 << bit), 0)
        is_second = (index & (1 << bit)) != 0
        keys = tl.where((keys > partner) ^ is_second, partner, keys)
        bit -= 1
    return keys


@triton.jit
def sort_pairs(first, second, index, log_size):
    """Sort pairs by `first`, then `second`, as `sort_keys` does keys; no two pairs are equal."""
    for stage in range(1, log_size + 1):
        for back in range(1, stage + 1):
            bit = stage - back
            other = index ^ (1 << bit)
            partner_first = tl.gather(first, other, 0)
            partner_second = tl.gather(second, other, 0)
            greater = (first > partner_first) | ((first == partner_first) & (second > partner_second))
            descends = (index & (1 << stage)) != 0
            is_second = (index & (1 << bit)) != 0
            take = greater ^ descends ^ is_second
            first = tl.where(take, partner_first, first)
            second = tl.where(take, partner_second, second)
    return first, second


@kernel
def _sort_rows_kernel(
    lengths_ptr,
    order_ptr,
    size: tl.int32,
    log_size: tl.int32,
    top: tl.int64,
    bits: tl.int32,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + row + at, mask=at < size, other=0).to(tl.int64)
    less = top.to(tl.int64) - tl.minimum(tl.maximum(length, 0), top.to(tl.int64))
    if PACKED:
        keys = tl.where(at < size, (less.to(tl.int32) << bits) | at, _PACKED_PADDING)
    else:
        keys = tl.where(at < size, (less << bits) | at, _PADDING)
    keys = sort_keys(keys, at, log_size)
    position = keys.to(tl.int32) & ((1 << bits) - 1)
    tl.store(order_ptr + row + at, position, mask=at < size)


@kernel
def _sort_halves_kernel(
    lengths_ptr,
    packed_ptr,
    size: tl.int32,
    log_size: tl.int32,
    top: tl.int32,
    bits: tl.int32,
    BLOCK: tl.constexpr,
):
    # Keys lie at the end of two blocks, behind padding that sorts before them.
    row = tl.program_id(0).to(tl.int64) * size
    half = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    at = index + (half * BLOCK + size - 2 * BLOCK)
    length = tl.load(lengths_ptr + row + at, mask=at >= 0, other=0)
    less = top - tl.minimum(tl.maximum(length, 0), top).to(tl.int32)
    keys = tl.where(at >= 0, (less << bits) | at, -1)
    keys = sort_keys(keys ^ -half, index, log_size) ^ -half  # the inverse of what ascends descends
    at = tl.arange(0, BLOCK) + (half * BLOCK + size - 2 * BLOCK)
    tl.store(packed_ptr + row + at, keys, mask=at >= 0)


@kernel
def _merge_halves_kernel(
    packed_ptr, order_ptr, size: tl.int32, log_size: tl.int32, bits: tl.int32, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    half = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    at = index + (size - 2 * BLOCK)
    first = tl.load(packed_ptr + row + at, mask=at >= 0, other=-1)
    second = tl.load(packed_ptr + row + BLOCK + at)
    keys = tl.where((first > second) ^ (half == 1), second, first)
    keys = _merge_keys(keys, index, log_size)
    at += half * BLOCK
    tl.store(order_ptr + row + at, keys & ((1 << bits) - 1), mask=at >= 0)


def key_bits(size: int, longest_allowed: int) -> int:
    """Bits of a key that hold the position: those that rows of `size` need if the whole then fits an int32, else 31.

    Example:
        >>> key_bits(1024, longest_allowed=131072), key_bits(1024, longest_allowed=2**31 - 1)
        (10, 31)
    """
    bits = (size - 1).bit_length()
    return bits if (longest_allowed + 2) << bits <= 1 << _LONG_BITS else _LONG_BITS


def sort_rows(lengths: torch.Tensor, longest_allowed: int, shared_bytes: int) -> torch.Tensor:
    """Positions of each row of `lengths` [W, B], int32 or int64, longest first: int32 [W, B].

    Lengths above `longest_allowed` come first, those below 1 last, in any order among themselves.
    """
    num_rows, size = lengths.shape
    order = torch.empty((num_rows, size), dtype=torch.int32, device=lengths.device)
    if lengths.numel() == 0:
        return order
    bits = key_bits(size, longest_allowed)
    packed = bits != _LONG_BITS
    shape = launch.sort_shape(size, 4 if packed else 8, shared_bytes)
    if shape is None and packed and launch.HALF.block < size <= 2 * launch.HALF.block:
        return _sort_by_halves(lengths, order, longest_allowed + 1, bits)
    if shape is None:
        return order.copy_(_sort_long_rows(lengths, longest_allowed + 1))
    _sort_rows_kernel[(num_rows,)](
        lengths,
        order,
        size,
        shape.block.bit_length() - 1,
        longest_allowed + 1,
        bits,
        PACKED=packed,
        BLOCK=shape.block,
        num_warps=shape.num_warps,
        **FLAGS,
    )
    return order


def _sort_by_halves(lengths: torch.Tensor, order: torch.Tensor, top: int, bits: int) -> torch.Tensor:
    num_rows, size = lengths.shape
    block, num_warps = launch.HALF
    log_size = block.bit_length() - 1
    keys = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    _sort_halves_kernel[(num_rows, 2)](
        lengths, keys, size, log_size, top, bits, BLOCK=block, num_warps=num_warps, **FLAGS
    )
    _merge_halves_kernel[(num_rows, 2)](keys, order, size, log_size, bits, BLOCK=block, num_warps=num_warps, **FLAGS)
    return order


def _sort_long_rows(lengths: torch.Tensor, top: int) -> torch.Tensor:
    positions = torch.arange(lengths.shape[1], dtype=torch.int64, device=lengths.device)
    keys = (top - lengths.to(torch.int64).clamp(0, top)) << _LONG_BITS | positions
    return keys.sort(dim=1).values & ((1 << _LONG_BITS) - 1)
