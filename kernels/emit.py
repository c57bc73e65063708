"""The plan in the layout that `BatchPlan` has: order, offsets, costs, tokens, bounds.

Sizes [2, 1, 3] of the groups of a sorted row [4, 0, 5, 1, 2, 3] and places [2, 0, 1] give

    order [1, 2, 3, 4, 0, 5] and offsets [0, 3, 5, 6]

`_places_kernel`, one program a row, takes the dealt partition of least step cost, the first of equals, and writes all
that is one number a group; `_copy_kernel`, one program a group, copies its positions. O(K) and O(B). A row without a
plan gets order -1, offsets and tokens 0, costs and bounds nan.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.costs import Costs, power
from gpusampler.kernels.deal import Deal
from gpusampler.kernels.jit import FLAGS, kernel

_HUGE: tl.constexpr = tl.constexpr(2**63 - 1)


class Plan(NamedTuple):
    """What `spec.plan_rows` writes, on the device; a negative status is one of `spec` too."""

    order: torch.Tensor
    offsets: torch.Tensor
    costs: torch.Tensor
    tokens: torch.Tensor
    bounds: torch.Tensor
    status: torch.Tensor


@kernel
def _places_kernel(
    sorted_ptr,
    f_ptr,
    tail_ptr,
    shift_ptr,
    status_ptr,
    counts_ptr,
    place_ptr,
    dealt_ptr,
    height_ptr,
    starts_ptr,
    offsets_ptr,
    costs_ptr,
    tokens_ptr,
    bounds_ptr,
    size: tl.int32,
    groups: tl.int32,
    dp_size: tl.int32,
    num_parts: tl.int32,
    num_dealt: tl.int32,
    skipped: tl.int32,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * size
    height = tl.full([], _HUGE, tl.int64)
    chosen = tl.zeros([], tl.int32)
    for number in range(num_dealt):
        tried = tl.load(height_ptr + program * num_dealt + number)
        chosen = tl.where(tried < height, number, chosen)
        height = tl.minimum(height, tried)
    part = program * num_parts + tl.where(chosen > 0, chosen + skipped, 0)
    dealt = (program * num_dealt + chosen) * groups
    planned = tl.load(status_ptr + program) == 0
    index = tl.arange(0, BLOCK)
    within = index < groups
    inside = index < tl.where(planned, groups, 0)
    counts = tl.load(counts_ptr + part * groups + index, mask=inside, other=0)
    group = tl.load(place_ptr + dealt + index, mask=inside, other=0)
    cost = tl.load(dealt_ptr + dealt + index, mask=inside, other=0)
    start = tl.gather(tl.cumsum(counts, 0) - counts, group, 0)
    count = tl.where(inside, tl.gather(counts, group, 0), 0)
    longest = tl.load(sorted_ptr + row + start, mask=inside, other=0)
    place = program * groups + index
    tl.store(starts_ptr + place, start, mask=inside)
    tl.store(offsets_ptr + place + program + 1, tl.cumsum(count, 0), mask=within)
    tl.store(offsets_ptr + program * (groups + 1), 0)
    unit = tl.where(planned, power(-tl.load(shift_ptr + program)), float("nan"))
    tl.store(costs_ptr + place, cost.to(tl.float64) * unit, mask=within)
    tl.store(tokens_ptr + place, count.to(tl.int64) * longest, mask=within)
    total = tl.load(tail_ptr + row + program, mask=planned, other=0)
    bound = tl.maximum((total + dp_size - 1) // dp_size, tl.load(f_ptr + row, mask=planned, other=0))
    tl.store(bounds_ptr + program * 2, bound.to(tl.float64) * unit)
    tl.store(bounds_ptr + program * 2 + 1, height.to(tl.float64) * unit)


@kernel
def _copy_kernel(by_length_ptr, starts_ptr, offsets_ptr, status_ptr, order_ptr, size: tl.int32, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    groups = tl.num_programs(1)
    place = tl.program_id(1)
    planned = tl.load(status_ptr + program) == 0
    offset_at = offsets_ptr + program * (groups + 1) + place
    share = tl.cdiv(size, groups)
    first = tl.load(offset_at, mask=planned, other=tl.minimum(place * share, size))
    count = tl.load(offset_at + 1, mask=planned, other=tl.minimum((place + 1) * share, size)) - first
    start = tl.load(starts_ptr + program * groups + place, mask=planned, other=0)
    row = program * size
    for turn in range(tl.cdiv(count, BLOCK)):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(by_length_ptr + row + start + at, mask=at < tl.where(planned, count, 0), other=-1)
        tl.store(order_ptr + row + first + at, position, mask=at < count)


def emit(
    costs: Costs,
    by_length: torch.Tensor,
    counts: torch.Tensor,
    dealt: Deal,
    status: torch.Tensor,
    dp_size: int,
    slots: int,
) -> Plan:
    """Write the plan of each row whose `status` is 0, and what `spec.plan_rows` writes in the others."""
    num_rows, size = by_length.shape
    groups = dp_size * slots
    device = by_length.device
    plan = Plan(
        order=torch.empty((num_rows, size), dtype=torch.int32, device=device),
        offsets=torch.empty((num_rows, groups + 1), dtype=torch.int32, device=device),
        costs=torch.empty((num_rows, slots, dp_size), dtype=torch.float64, device=device),
        tokens=torch.empty((num_rows, slots, dp_size), dtype=torch.int64, device=device),
        bounds=torch.empty((num_rows, 2), dtype=torch.float64, device=device),
        status=status,
    )
    starts = torch.empty((num_rows, groups), dtype=torch.int32, device=device)
    block, num_warps = launch.group_shape(groups)
    _places_kernel[(num_rows,)](
        costs.lengths,
        costs.f,
        costs.tail,
        costs.shift,
        status,
        counts,
        dealt.place,
        dealt.dealt,
        dealt.height,
        starts,
        plan.offsets,
        plan.costs,
        plan.tokens,
        plan.bounds,
        size,
        groups,
        dp_size,
        counts.shape[1],
        dealt.height.shape[1],
        dealt.skipped,
        BLOCK=block,
        num_warps=num_warps,
        **FLAGS,
    )
    _copy_kernel[(num_rows, groups)](
        by_length,
        starts,
        plan.offsets,
        status,
        plan.order,
        size,
        BLOCK=launch.COPY.block,
        num_warps=launch.COPY.num_warps,
        **FLAGS,
    )
    return plan
