"""The smallest level that K groups of a sorted row can keep, exactly, and the sizes of its groups.

For costs [5, 4, 4, 3, 1, 1] two groups need a level of 15, sizes [3, 3]: costs 15 and 9, where [2, 4] has 10 and 16.

    min-max of [5, 4, 4, 3, 1, 1] in 3 groups -> 9 with sizes [1, 2, 3]

A turn probes PROBES levels side by side: each lane walks K groups, as many samples in each as its level holds, and
learns two numbers beside whether the row fits. A lane that fits knows the largest cost its groups reached, a level that
also fits. A lane that does not fit knows the least level at which one of its groups would hold one more; below it
nothing changes. So the interval closes on the answer after a few turns, long before its width is one (Pinar and
Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004). The answer is unique, so it is that of
`spec.min_max`. The first turn spaces its levels by the cube, since the answer lies near the lower end; later ones
evenly.

K dependent steps a turn and for the last walk. Where the cap forbids K groups, `status` gets the least number it
allows.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.jit import FLAGS, kernel

_HUGE: tl.constexpr = tl.constexpr(2**62)


@triton.jit
def quotient(level, scaled, cost, inverse):
    """`level // cost` and the remainder, exactly; `scaled` is `level` as float64. The estimate errs by one at most."""
    count = (scaled * inverse).to(tl.int64)
    rest = level - count * cost
    below = rest < 0
    above = rest >= cost
    count += above.to(tl.int64) - below.to(tl.int64)
    rest += tl.where(below, cost, 0) - tl.where(above, cost, 0)
    return count, rest


@triton.jit
def _probe(level, row, f_ptr, inverse_ptr, most_ptr, size, groups):
    """Walk a lane a level: whether the row fits, the largest cost reached, the least level that changes the walk."""
    scaled = level.to(tl.float64)
    i = tl.zeros_like(level).to(tl.int32)
    alive = level >= 0
    reached = tl.zeros_like(level)
    next_level = tl.zeros_like(level) + _HUGE
    for k in range(groups):
        cost = tl.load(f_ptr + row + i, mask=alive, other=1)
        inverse = tl.load(inverse_ptr + row + i, mask=alive, other=1.0)
        most = tl.load(most_ptr + row + i, mask=alive, other=1)
        count, rest = quotient(level, scaled, cost, inverse)
        limit = tl.minimum(most, size - i - (groups - 1 - k)).to(tl.int64)
        held_by_level = alive & (count < limit)
        next_level = tl.where(held_by_level, tl.minimum(next_level, level - rest + cost), next_level)
        count = tl.minimum(count, limit)
        alive = alive & (count >= 1)
        i += tl.where(alive, count, 0).to(tl.int32)
        reached = tl.maximum(reached, tl.where(alive, count * cost, 0))
    return alive & (i == size), reached, next_level


@triton.jit
def _spread(low, high, turn, lane, PROBES: tl.constexpr):
    """Levels of a turn, strictly above `low`, at most `high`; the last of the first turn is `high`."""
    span = high - low
    number = lane.to(tl.int64) + 1
    cubes = (span // (PROBES * PROBES * PROBES)) * number * number * number
    steps = 1 + lane * tl.maximum(1, (span - 1) // PROBES)
    level = tl.minimum(low + tl.where(turn == 0, tl.maximum(cubes, number), steps), tl.maximum(high - 1, low + 1))
    return tl.where((turn == 0) & (lane == PROBES - 1), high, level)


@triton.jit
def least_level(row, tail_row, size, groups, usable, f_ptr, inverse_ptr, tail_ptr, most_ptr, PROBES: tl.constexpr):
    """The least level that `groups` groups of the `size` samples from `row` on can keep, and whether there is one."""
    lane = tl.arange(0, PROBES)
    longest = tl.load(f_ptr + row)
    high = longest * size
    low = tl.maximum(longest, tl.cdiv(tl.load(tail_ptr + tail_row), groups)) - 1
    turn = tl.zeros([], tl.int32)
    possible = usable
    while possible & ((turn == 0) | (high - low > 1)):
        level = _spread(low, high, turn, lane, PROBES)
        fits, reached, next_level = _probe(level, row, f_ptr, inverse_ptr, most_ptr, size, groups)
        possible = (turn > 0) | (tl.max(tl.where(lane == PROBES - 1, fits.to(tl.int32), 0), 0) == 1)
        high = tl.minimum(high, tl.min(tl.where(fits, reached, high), 0))
        low = tl.maximum(low, tl.max(tl.where(fits, low, tl.minimum(next_level, high) - 1), 0))
        turn += 1
    return high, possible


@triton.jit
def _least_groups(row, most_ptr, size):
    """Groups of a greedy walk under the cap alone."""
    i = tl.zeros([], tl.int32)
    groups = tl.zeros([], tl.int64)
    while i < size:
        i += tl.load(most_ptr + row + i)
        groups += 1
    return groups


@kernel
def _min_max_kernel(
    sorted_ptr,
    f_ptr,
    inverse_ptr,
    tail_ptr,
    most_ptr,
    counts_ptr,
    status_ptr,
    peak_ptr,
    size: tl.int32,
    groups: tl.int32,
    counts_stride: tl.int32,
    PROBES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * size
    usable = tl.load(status_ptr + program) == 0
    high, possible = least_level(
        row, row + program, size, groups, usable, f_ptr, inverse_ptr, tail_ptr, most_ptr, PROBES
    )
    if possible:
        i = tl.zeros([], tl.int32)
        peak = tl.zeros([], tl.int64)
        for k in range(groups):
            cost = tl.load(f_ptr + row + i)
            count, _ = quotient(high, high.to(tl.float64), cost, tl.load(inverse_ptr + row + i))
            limit = tl.minimum(tl.load(most_ptr + row + i), size - i - (groups - 1 - k))
            held = tl.minimum(count, limit.to(tl.int64)).to(tl.int32)
            tl.store(counts_ptr + program * counts_stride + k, held)
            peak = tl.maximum(peak, held.to(tl.int64) * tl.load(sorted_ptr + row + i))
            i += held
        tl.store(peak_ptr + program, peak)
    elif usable:
        tl.store(status_ptr + program, _least_groups(row, most_ptr, size))


def min_max(costs: Costs, groups: int, counts: torch.Tensor, status: torch.Tensor, peak: torch.Tensor) -> None:
    """Write the sizes of the groups of the min-max partition of each row, or the number of groups that it needs.

    Args:
        costs: the rows.
        groups: K, at most B.
        counts: int32 [W, P, K], out: written at [:, 0]; left alone in rows that do not fit.
        status: int64 [W], in and out: rows where it is 0 are worked on; the least number of groups under the cap, if
            that is above K.
        peak: int64 [W], out: largest size times length of a group; left alone in rows that do not fit.
    """
    num_rows, size = costs.f.shape
    _min_max_kernel[(num_rows,)](
        costs.lengths,
        costs.f,
        costs.inverse,
        costs.tail,
        costs.most,
        counts,
        status,
        peak,
        size,
        groups,
        counts.stride(0),
        PROBES=launch.PROBES.block,
        num_warps=launch.PROBES.num_warps,
        **FLAGS,
    )
