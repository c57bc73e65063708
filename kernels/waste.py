"""Partitions whose groups all waste the same on padding: the shape of least padding, a start of the search.

The waste of a group is its size times its largest cost, less the sum of its costs. For costs [5, 4, 4, 3, 1, 1] and
three groups whose cost is not bounded:

    sizes [2, 2, 2], wastes [1, 1, 0]

Two kernels. `_limit_kernel` lowers the number of samples a group may hold so that no group peaks far above the min-max
partition (`spec.limit_peak`). `_waste_kernel` finds the bound of waste by the bisection of `spec.equal_waste`, to 12
bits. Whether a bound is enough is monotone in it, so the midpoints that a bisection would meet, in whatever way it
turned, form a tree; a turn walks the nodes of its first six levels side by side, and ends in the same interval. A
group's size is found digit by digit in base 32: waste grows with the size. K * log32(B) dependent steps a turn.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch, spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.jit import FLAGS, kernel
from gpusampler.kernels.search import quotient

_PRECISION: tl.constexpr = tl.constexpr(12)
BASE_BITS = 5
_BASE_BITS: tl.constexpr = tl.constexpr(BASE_BITS)
_BASE: tl.constexpr = tl.constexpr(1 << BASE_BITS)
_PEAK_GROUPS: tl.constexpr = tl.constexpr(spec.PEAK_GROUPS)


@kernel
def _limit_kernel(sorted_ptr, most_ptr, status_ptr, peak_ptr, size: tl.int32, groups: tl.int32, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(status_ptr + program) == 0, size, 0)
    peak = tl.load(peak_ptr + program)
    peak += peak * groups // _PEAK_GROUPS
    place = program * size + at
    length = tl.load(sorted_ptr + place, mask=inside, other=1).to(tl.int64)
    most = tl.load(most_ptr + place, mask=inside, other=1).to(tl.int64)
    tl.store(most_ptr + place, tl.minimum(most, tl.maximum(peak // length, 1)).to(tl.int32), mask=inside)


@triton.jit
def _most(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _group_sizes(bound, level, i, spare, alive, row, tail_row, f_ptr, inverse_ptr, tail_ptr, most_ptr, digits):
    """Most samples from `i` on, `spare` at most, that cost at most `level` and waste at most `bound`, a lane each."""
    cost = tl.load(f_ptr + row + i, mask=alive, other=1)
    inverse = tl.load(inverse_ptr + row + i, mask=alive, other=1.0)
    most = tl.load(most_ptr + row + i, mask=alive, other=1)
    left = tl.load(tail_ptr + tail_row + i, mask=alive, other=0)
    held, _ = quotient(level, level.to(tl.float64), cost, inverse)
    limit = tl.where(alive, tl.minimum(tl.minimum(most, spare).to(tl.int64), held), 0)
    count = tl.where(alive, 1, 0).to(tl.int64)
    tried = tl.arange(0, _BASE)[None, :]
    for back in range(1, digits + 1):
        shift = _BASE_BITS * (digits - back)
        more = count + (tried.to(tl.int64) << shift)
        within = more <= limit
        after = tl.load(tail_ptr + tail_row + i + more, mask=within, other=0)
        fits = within & (more * cost - left + after <= bound)
        digit = tl.sum(fits.to(tl.int32), 1)[:, None] - 1
        count += tl.maximum(digit, 0).to(tl.int64) << shift
    return count.to(tl.int32)


@triton.jit
def _node(low, high, lane, DEPTH: tl.constexpr):
    """The midpoint that node `lane` of the bisection tree tests, and whether the bisection would get there."""
    node_low = low + tl.zeros_like(lane)
    node_high = high + tl.zeros_like(lane)
    open_node = lane >= 1
    for level in tl.static_range(1, DEPTH):
        digit = DEPTH - 1 - level
        below = (lane >> (digit + 1)) > 0
        open_node &= (below == 0) | (node_high - node_low > 1 + (node_high >> _PRECISION))
        middle = node_low + ((node_high - node_low) >> 1)
        right = ((lane >> digit) & 1) == 1
        node_low = tl.where(below & right, middle, node_low)
        node_high = tl.where(below & (right == 0), middle, node_high)
    open_node &= node_high - node_low > 1 + (node_high >> _PRECISION)
    return node_low + ((node_high - node_low) >> 1), open_node


@kernel
def _waste_kernel(
    f_ptr,
    inverse_ptr,
    tail_ptr,
    most_ptr,
    status_ptr,
    caps_ptr,
    counts_ptr,
    usable_ptr,
    size: tl.int32,
    groups: tl.int32,
    digits: tl.int32,
    num_parts: tl.int32,
    DEPTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = program * size
    tail_row = row + program
    lane = tl.arange(0, 1 << DEPTH).to(tl.int64)[:, None]
    fits_row = tl.load(status_ptr + program) == 0
    longest = tl.load(f_ptr + row)
    cap = tl.load(caps_ptr + part)
    shared = tl.load(tail_ptr + tail_row) // groups // 4 * cap
    level = tl.where(cap == 0, longest * size, tl.maximum(longest, shared))
    high = longest * size
    low = tl.full([], -1, tl.int64)
    first = low < 0
    usable = fits_row
    while usable & (first | (high - low > 1 + (high >> _PRECISION))):
        bound, tested = _node(low, high, lane, DEPTH)
        bound = tl.where(lane == 0, high, bound)
        tested |= lane == tl.where(first, 0, -1)
        i = tl.where(tested, 0, size).to(tl.int32)
        for k in range(groups):
            spare = size - i - (groups - 1 - k)
            i += _group_sizes(
                bound, level, i, spare, tested, row, tail_row, f_ptr, inverse_ptr, tail_ptr, most_ptr, digits
            )
        fits = tested & (i == size)
        usable &= (first == 0) | (_most(tl.where(lane == 0, fits.to(tl.int32), 0)) == 1)
        high = tl.minimum(high, -_most(-tl.where(fits, bound, high)))
        low = tl.maximum(low, _most(tl.where(tested & (fits == 0), bound, low)))
        first = low > high
    place = program * num_parts + num_parts - tl.num_programs(1) + part
    if usable:
        one = lane == 0
        bound = tl.where(one, high, 0)
        i = tl.where(one, 0, size).to(tl.int32)
        for k in range(groups):
            spare = size - i - (groups - 1 - k)
            count = _group_sizes(
                bound, level, i, spare, one, row, tail_row, f_ptr, inverse_ptr, tail_ptr, most_ptr, digits
            )
            tl.store(counts_ptr + place * groups + k + lane, count, mask=one)
            i += count
    tl.store(usable_ptr + place, usable.to(tl.int32))


def digits(size: int, groups: int) -> int:
    """Digits of the number of samples that the largest group may have, less one.

    Example:
        >>> digits(size=1024, groups=64), digits(size=5, groups=5)
        (2, 0)
    """
    return -(-(size - groups).bit_length() // BASE_BITS)


def limit_peak(costs: Costs, groups: int, status: torch.Tensor, peak: torch.Tensor) -> None:
    """Lower `costs.most` as `spec.limit_peak` does, given what `search.min_max` found."""
    num_rows, size = costs.f.shape
    block, num_warps = launch.COSTS
    _limit_kernel[(num_rows, triton.cdiv(size, block))](
        costs.lengths, costs.most, status, peak, size, groups, BLOCK=block, num_warps=num_warps, **FLAGS
    )


def equal_waste(
    costs: Costs, groups: int, status: torch.Tensor, caps: torch.Tensor, counts: torch.Tensor, usable: torch.Tensor
) -> None:
    """Write an equal-waste partition of each row for each bound in `caps`.

    Args:
        costs: the rows, after `limit_peak`.
        groups: K.
        status: int64 [W], 0 in the rows to work on.
        caps: int64, at most P - 1 bounds of a group's cost in quarters of the mean; 0 is none.
        counts: int32 [W, P, K], out: the sizes, in the last partitions; left alone where there is no such partition.
        usable: int32 [W, P], out: whether there is one.
    """
    num_rows, size = costs.f.shape
    _waste_kernel[(num_rows, len(caps))](
        costs.f,
        costs.inverse,
        costs.tail,
        costs.most,
        status,
        caps,
        counts,
        usable,
        size,
        groups,
        digits(size, groups),
        counts.shape[1],
        DEPTH=launch.WASTES.block.bit_length() - 1,
        num_warps=launch.WASTES.num_warps,
        **FLAGS,
    )
