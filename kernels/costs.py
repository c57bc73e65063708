"""Integer costs of each sorted row, and what the search reads of them: reciprocals, suffix sums, counts under the cap.

The unit of a row is 2**-shift with the largest shift at which the row's total stays below 2**62, so that sums are exact
and equal on every device (`spec.scale_lengths`, `spec.scale_costs`). For lengths [2, 3, 1] with alpha = 1, at a cap of
4 tokens and the shift that the row allows, 40:

    f [12, 6, 2] * 2**40    tail [20, 8, 2, 0] * 2**40    most [1, 2, 3]

One program a row, in turns of BLOCK samples from the last, with the sum so far carried along. O(B / BLOCK) turns. Most
samples under the cap are cut at B, which no plan can tell. Limits: those of `spec`; a row beyond them gets a status,
`BAD_LENGTHS` or `OUT_OF_RANGE`, and nothing else: on the host such rows never reach a planner.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch, spec
from gpusampler.kernels.jit import FLAGS, kernel

_MAX_SHIFT: tl.constexpr = tl.constexpr(spec.MAX_SHIFT)
_MIN_SHIFT: tl.constexpr = tl.constexpr(spec.MIN_SHIFT)
_BAD_LENGTHS: tl.constexpr = tl.constexpr(spec.BAD_LENGTHS)
_BAD_COSTS: tl.constexpr = tl.constexpr(spec.BAD_COSTS)
_OUT_OF_RANGE: tl.constexpr = tl.constexpr(spec.OUT_OF_RANGE)
_MIN_ALPHA_UNITS: tl.constexpr = tl.constexpr(spec.MIN_ALPHA_UNITS)


@triton.jit
def power(exponent):
    """2.0 to an integer in [-1022, 1023], as float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _shift_for_lengths(longest, alphas_ptr, limit):
    """`spec.shift_for_lengths`, every shift in a lane of its own."""
    shift = tl.arange(0, 64)
    alpha = tl.load(alphas_ptr + shift, mask=shift <= _MAX_SHIFT, other=0)
    fits = (shift <= _MAX_SHIFT) & (longest <= limit >> shift)
    room = limit - (tl.where(fits, longest, 0) << tl.where(fits, shift, 0))
    fits &= (alpha <= 0) | (longest * longest <= room // tl.maximum(alpha, 1))
    return tl.max(tl.where(fits, shift, -1), 0)


@triton.jit
def _shift_for_costs(largest, size):
    """`spec.shift_for_costs`, every shift in a lane of its own."""
    shift = tl.arange(0, 128) + _MIN_SHIFT
    fits = largest * power(shift) <= power(tl.full([], 61, tl.int32)) / size.to(tl.float64)
    return tl.max(tl.where(fits & (shift <= _MAX_SHIFT), shift, _MIN_SHIFT), 0)


@triton.jit
def _nearest(x):
    """`x` >= 0 rounded to the nearest int64, halves to even."""
    whole = x.to(tl.int64)
    rest = x - whole.to(tl.float64)
    return whole + ((rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))).to(tl.int64)


@triton.jit
def _check_costs(custom_ptr, order_ptr, row, size, BLOCK: tl.constexpr):
    """`BAD_COSTS` unless the costs of a row are positive and finite and do not rise along the order, else 0."""
    good = tl.full([], 1, tl.int32)
    for turn in range(tl.cdiv(size, BLOCK)):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        here = tl.load(order_ptr + row + at, mask=inside, other=0)
        after = tl.load(order_ptr + row + at + 1, mask=at + 1 < size, other=0)
        cost = tl.load(custom_ptr + row + here, mask=inside, other=1.0)
        next_cost = tl.load(custom_ptr + row + after, mask=at + 1 < size, other=0.0)
        fine = (cost > 0) & (cost < float("inf")) & (next_cost <= cost)
        good = tl.minimum(good, tl.min((fine | (at >= size)).to(tl.int32), 0))
    return tl.where(good == 1, 0, _BAD_COSTS)


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
    status_ptr,
    size: tl.int32,
    max_tokens: tl.int64,
    limit: tl.int64,
    longest_allowed: tl.int64,
    CUSTOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * size
    first = tl.load(order_ptr + row)
    longest = tl.load(lengths_ptr + row + first).to(tl.int64)
    shortest = tl.load(lengths_ptr + row + tl.load(order_ptr + row + size - 1)).to(tl.int64)
    status = tl.where((shortest < 1) | (longest > longest_allowed), _BAD_LENGTHS, 0)
    if CUSTOM:
        status = tl.where(status == 0, _check_costs(custom_ptr, order_ptr, row, size, BLOCK), status)
        shift = _shift_for_costs(tl.load(custom_ptr + row + first), size)
        unit = power(shift)
    else:
        shift = _shift_for_lengths(tl.where(status == 0, longest, 1), alphas_ptr, limit.to(tl.int64))
        alpha = tl.load(alphas_ptr + tl.maximum(shift, 0))
        coarse = (shift < _MAX_SHIFT) & (alpha < _MIN_ALPHA_UNITS) & (tl.load(alphas_ptr + _MAX_SHIFT) > 0)
        status = tl.where((status == 0) & ((shift < 0) | coarse), _OUT_OF_RANGE, status)
    tl.store(status_ptr + program, status.to(tl.int64))
    tl.store(shift_ptr + program, shift)
    tail_row = program * (size.to(tl.int64) + 1)
    tl.store(tail_ptr + tail_row + size, tl.zeros([], tl.int64))
    total = tl.zeros([], tl.int64)
    turns = tl.where(status == 0, tl.cdiv(size, BLOCK), 0)
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
    max_tokens: int,
    longest_allowed: int,
    by_length: torch.Tensor,
    status: torch.Tensor,
) -> Costs:
    """Costs of the rows `lengths` [W, B] in the order `by_length`; the arguments are those of `engine.plan_rows`.

    `status`, int64 [W], out, is 0 in rows that can be planned.
    """
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
        status,
        size,
        max_tokens,
        (1 << 62) // size - 1,
        longest_allowed,
        CUSTOM=custom is not None,
        BLOCK=launch.COSTS.block,
        num_warps=launch.COSTS.num_warps,
        **FLAGS,
    )
    return costs
