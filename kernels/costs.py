"""Integer costs of each sorted row, and what the search reads of them: reciprocals, suffix sums, counts under the cap.

The unit of a row is 2**-shift with the largest shift at which the row's total stays below 2**62, so that sums are exact
and equal on every device (`spec.scale_lengths`, `spec.scale_costs`). For lengths [2, 3, 1] with alpha = 1, without an
intercept, at a cap of 4 tokens and the shift that the row allows, 40:

    f [12, 6, 2] * 2**40    tail [20, 8, 2, 0] * 2**40    most [1, 2, 3]

One program a row, in turns of BLOCK samples from the last, with the sum so far carried along. O(B / BLOCK) turns. Most
samples under the cap are cut at B, which no plan can tell. Limits: those of `spec`.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch, spec
from gpusampler.kernels.jit import FLAGS, float_bits, kernel

_MAX_SHIFT: tl.constexpr = tl.constexpr(spec.MAX_SHIFT)
_MIN_SHIFT: tl.constexpr = tl.constexpr(spec.MIN_SHIFT)


@triton.jit
def power(exponent):
    """2.0 to an integer in [-1022, 1023], as float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _shift_for_lengths(longest, alphas_ptr, intercept, limit):
    """`spec.shift_for_lengths`, every shift in a lane of its own."""
    shift = tl.arange(0, 64)
    alpha = tl.load(alphas_ptr + shift, mask=shift <= _MAX_SHIFT, other=0)
    constant = intercept * power(shift)
    fits = (shift <= _MAX_SHIFT) & (constant < limit.to(tl.float64))
    room = limit - tl.where(fits, constant, 0.0).to(tl.int64) - 1
    fits &= longest <= room >> shift
    room -= tl.where(fits, longest, 0) << tl.where(fits, shift, 0)
    fits &= (alpha <= 0) | (longest * longest <= room // tl.maximum(alpha, 1))
    return tl.max(tl.where(fits, shift, -1), 0)


@triton.jit
def _shift_for_costs(largest, intercept, size):
    """`spec.shift_for_costs`, every shift in a lane of its own."""
    shift = tl.arange(0, 128) + _MIN_SHIFT
    fits = (largest + intercept) * power(shift) <= power(tl.full([], 61, tl.int32)) / size.to(tl.float64)
    return tl.max(tl.where(fits & (shift <= _MAX_SHIFT), shift, _MIN_SHIFT), 0)


@triton.jit
def _nearest(x):
    """`x` >= 0 rounded to the nearest int64, halves to even."""
    whole = x.to(tl.int64)
    rest = x - whole.to(tl.float64)
    return whole + ((rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))).to(tl.int64)


@kernel
def _costs_kernel(
    lengths_ptr,
    custom_ptr,
    order_ptr,
    alphas_ptr,
    sorted_ptr,
    f_ptr,
    inverse_ptr,
    tail_ptr,
    most_ptr,
    shift_ptr,
    size: tl.int32,
    max_tokens: tl.int64,
    limit: tl.int64,
    intercept_bits: tl.int64,
    CUSTOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * size
    intercept = intercept_bits.to(tl.int64).to(tl.float64, bitcast=True)
    first = tl.load(order_ptr + row)
    if CUSTOM:
        shift = _shift_for_costs(tl.load(custom_ptr + row + first), intercept, size)
        unit = power(shift)
    else:
        longest = tl.load(lengths_ptr + row + first).to(tl.int64)
        shift = _shift_for_lengths(longest, alphas_ptr, intercept, limit.to(tl.int64))
        alpha = tl.load(alphas_ptr + shift)
    tl.store(shift_ptr + program, shift)
    tail_row = program * (size.to(tl.int64) + 1)
    tl.store(tail_ptr + tail_row + size, tl.zeros([], tl.int64))
    total = tl.zeros([], tl.int64)
    turns = tl.cdiv(size, BLOCK)
    for turn in range(turns):
        at = (turns - 1 - turn) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        position = tl.load(order_ptr + row + at, mask=inside, other=0)
        length = tl.load(lengths_ptr + row + position, mask=inside, other=1).to(tl.int64)
        if CUSTOM:
            cost = tl.load(custom_ptr + row + position, mask=inside, other=0.0)
            f = tl.maximum(_nearest(cost * unit), 1)
        else:
            f = (length << shift) + alpha * length * length
        f = tl.where(inside, f, 0)
        tl.store(sorted_ptr + row + at, length.to(tl.int32), mask=inside)
        tl.store(f_ptr + row + at, f, mask=inside)
        tl.store(inverse_ptr + row + at, 1.0 / tl.where(inside, f, 1).to(tl.float64), mask=inside)
        block_sum = tl.sum(f, 0)
        before = tl.cumsum(f, 0) - f
        tl.store(tail_ptr + tail_row + at, total + block_sum - before, mask=inside)
        total += block_sum
        capped = tl.maximum(tl.minimum(max_tokens.to(tl.int64) // length, size), 1)
        tl.store(most_ptr + row + at, tl.where(max_tokens > 0, capped, size).to(tl.int32), mask=inside)


class Costs:
    """What the search reads of the rows, on the device.

    Attributes:
        lengths: int32 [W, B], of the sorted samples.
        f: int64 [W, B], their costs.
        inverse: float64 [W, B], reciprocals of the costs.
        tail: int64 [W, B + 1], the sum of the costs from each sample on.
        most: int32 [W, B], samples from each one on that a group may hold under the cap.
        shift: int32 [W], the unit is 2**-shift.
    """

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.lengths = torch.empty((num_rows, size), dtype=torch.int32, device=device)
        self.f = torch.empty((num_rows, size), dtype=torch.int64, device=device)
        self.inverse = torch.empty((num_rows, size), dtype=torch.float64, device=device)
        self.tail = torch.empty((num_rows, size + 1), dtype=torch.int64, device=device)
        self.most = torch.empty((num_rows, size), dtype=torch.int32, device=device)
        self.shift = torch.empty(num_rows, dtype=torch.int32, device=device)


def scale_rows(
    lengths: torch.Tensor,
    custom: torch.Tensor | None,
    alphas: torch.Tensor,
    intercept: float,
    max_tokens: int,
    by_length: torch.Tensor,
) -> Costs:
    """Costs of the rows `lengths` [W, B] in the order `by_length`; the arguments are those of `engine.plan_rows`."""
    num_rows, size = lengths.shape
    costs = Costs(num_rows, size, lengths.device)
    if lengths.numel() == 0:
        return costs
    _costs_kernel[(num_rows,)](
        lengths,
        alphas if custom is None else custom,
        by_length,
        alphas,
        costs.lengths,
        costs.f,
        costs.inverse,
        costs.tail,
        costs.most,
        costs.shift,
        size,
        max_tokens,
        (1 << 62) // size - 1,
        float_bits(intercept),
        CUSTOM=custom is not None,
        BLOCK=launch.COSTS.block,
        num_warps=launch.COSTS.num_warps,
        **FLAGS,
    )
    return costs
