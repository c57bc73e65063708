"""Positions of each row, longest first, ties by smaller position.

    [3, 1, 4, 1, 5, 9, 2, 6, 5] -> [5, 7, 4, 8, 2, 0, 6, 1, 3]

A key is (2**31 - 1 - length) << 31 | position: keys differ, so that any sort gives the stable order. One program sorts
a row by a bitonic network whose stages are a loop, an element's partner fetched by `tl.gather`: 100 to 350
instructions, where the unrolled `tl.sort` of 4096 keys is 3000 to 11000 and takes 6 to 40 s to compile. Rows that do
not fit one program go to `torch.sort`, with the same result. O(log(B)**2) steps of B / threads exchanges. Limits:
lengths in [0, 2**31), rows below 2**31.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.jit import FLAGS, kernel

_LONGEST = 2**31 - 1
_LONGEST_KEY: tl.constexpr = tl.constexpr(_LONGEST)
_POSITION_BITS: tl.constexpr = tl.constexpr(31)
_PADDING: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def sort_keys(keys, index, log_size):
    """Sort each aligned run of 2**log_size keys; `index` is their arange. The first run ascends."""
    for stage in range(1, log_size + 1):
        for back in range(1, stage + 1):
            bit = stage - back
            partner = tl.gather(keys, index ^ (1 << bit), 0)
            keep_less = (((index >> stage) ^ (index >> bit)) & 1) == 0
            keys = tl.where((keys > partner) == keep_less, partner, keys)
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
            take = greater == ((((index >> stage) ^ (index >> bit)) & 1) == 0)
            first = tl.where(take, partner_first, first)
            second = tl.where(take, partner_second, second)
    return first, second


@kernel
def _sort_rows_kernel(lengths_ptr, order_ptr, size: tl.int32, log_size: tl.int32, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    length = tl.load(lengths_ptr + row + at, mask=inside, other=0).to(tl.int64)
    keys = tl.where(inside, ((_LONGEST_KEY - length) << _POSITION_BITS) | at, _PADDING)
    keys = sort_keys(keys, at, log_size)
    tl.store(order_ptr + row + at, (keys & _LONGEST_KEY).to(tl.int32), mask=inside)


def sort_rows(lengths: torch.Tensor, shared_bytes: int) -> torch.Tensor:
    """Positions of each row of `lengths` [W, B], int32 or int64, longest first: int32 [W, B]."""
    num_rows, size = lengths.shape
    order = torch.empty((num_rows, size), dtype=torch.int32, device=lengths.device)
    if lengths.numel() == 0:
        return order
    shape = launch.sort_shape(size, shared_bytes)
    if shape is None:
        return order.copy_(_sort_long_rows(lengths))
    _sort_rows_kernel[(num_rows,)](
        lengths,
        order,
        size,
        shape.block.bit_length() - 1,
        BLOCK=shape.block,
        num_warps=shape.num_warps,
        **FLAGS,
    )
    return order


def _sort_long_rows(lengths: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(lengths.shape[1], dtype=torch.int64, device=lengths.device)
    keys = (_LONGEST - lengths.to(torch.int64)) << 31 | positions
    return keys.sort(dim=1).values & _LONGEST
