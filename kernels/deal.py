"""Groups to slots and ranks: `spec.deal_microbatch`, and `spec.deal_step` for ranks that meet once a step.

By cost, D a slot, the costliest slot first; in a slot the dearest group goes to the rank with least so far. Groups of
cost [7, 5, 5, 3, 2, 1] on two ranks in three slots:

    place [0, 1, 3, 2, 4, 5], rank totals 12 and 11

Ties: the earlier group counts as dearer, the smaller rank as lighter. For ranks that meet once a step, `_even_kernel`
then makes the exchanges of `spec.swap_ranks`, each the best there is (first of equals, by slot of the heavy rank and
place of the other), and orders every rank's groups costliest first.

One program a row and partition, all groups in registers: sorting K pairs, then D pairs a slot; an exchange compares K
groups with each of the heavy rank's. Limits: K <= 2048.
"""

import torch
import triton.language as tl

from gpusampler.kernels import launch, spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.jit import FLAGS, kernel
from gpusampler.kernels.sort import sort_pairs

_HUGE: tl.constexpr = tl.constexpr(2**63 - 1)
_SWAPS: tl.constexpr = tl.constexpr(spec.SWAPS)


@kernel
def _deal_kernel(
    f_ptr,
    status_ptr,
    usable_ptr,
    counts_ptr,
    place_ptr,
    dealt_ptr,
    height_ptr,
    size: tl.int32,
    dp_size: tl.int32,
    slots: tl.int32,
    num_parts: tl.int32,
    skipped: tl.int32,
    log_size: tl.int32,
    log_ranks: tl.int32,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    part = program * num_parts + tl.where(number > 0, number + skipped, 0)
    usable = tl.load(usable_ptr + part, mask=number > 0, other=1)
    usable = tl.where(tl.load(status_ptr + program) == 0, usable, 0)
    groups = dp_size * slots
    index = tl.arange(0, BLOCK)
    inside = index < tl.where(usable == 1, groups, 0)
    counts = tl.load(counts_ptr + part * groups + index, mask=inside, other=0)
    starts = tl.cumsum(counts, 0) - counts
    f = tl.load(f_ptr + program * size + starts, mask=inside, other=0)
    negated, group = sort_pairs(-(counts.to(tl.int64) * f), index, index, log_size)
    total = tl.sum(tl.where(index % dp_size == 0, -negated, 0), 0)
    tl.store(height_ptr + program * tl.num_programs(1) + number, tl.where(usable == 1, total, _HUGE))
    is_rank = index < dp_size
    load = tl.where(is_rank, 0, _HUGE)
    rank = index
    place = (program * tl.num_programs(1) + number) * groups
    for s in range(tl.where(usable == 1, slots, 0)):
        at = tl.minimum(s * dp_size + index, BLOCK - 1)
        cost = -tl.gather(negated, at, 0)
        tl.store(place_ptr + place + s * dp_size + rank, tl.gather(group, at, 0), mask=is_rank)
        tl.store(dealt_ptr + place + s * dp_size + rank, cost, mask=is_rank)
        load += tl.where(is_rank, cost, 0)
        load, rank = sort_pairs(load, rank, index, log_ranks)


@kernel
def _even_kernel(
    height_ptr,
    place_ptr,
    dealt_ptr,
    dp_size: tl.int32,
    slots: tl.int32,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    groups = tl.where(tl.load(height_ptr + program) < _HUGE, dp_size * slots, 0)
    index = tl.arange(0, BLOCK)
    inside = index < groups
    row = program * dp_size * slots
    rank = index % dp_size
    group = tl.load(place_ptr + row + index, mask=inside, other=0)
    cost = tl.load(dealt_ptr + row + index, mask=inside, other=0)
    load = tl.zeros_like(cost)
    for s in range(slots):
        load += tl.gather(cost, s * dp_size + rank, 0)
    load = tl.where(inside, load, -1)
    turn = tl.zeros([], tl.int32)
    last = tl.where(groups > 0, _SWAPS, 0)
    while turn < last:
        top = tl.max(load, 0)
        heavy = tl.min(tl.where(load == top, rank, BLOCK), 0)
        lowest = tl.zeros_like(cost) + _HUGE
        giver = tl.zeros_like(index)
        for s in range(slots):
            less = tl.sum(tl.where(index == s * dp_size + heavy, cost, 0), 0) - cost
            height = tl.maximum(top - less, load + less)
            better = inside & (less > 0) & (rank != heavy) & (height < lowest)
            lowest = tl.where(better, height, lowest)
            giver = tl.where(better, s, giver)
        low = tl.min(lowest, 0)
        chosen = tl.min(tl.where(lowest == low, giver * BLOCK + index, BLOCK * BLOCK), 0)
        give = chosen // BLOCK * dp_size + heavy
        take = chosen % BLOCK
        going = low < top
        last = tl.where(going, last, 0)
        give = tl.where(going, give, BLOCK)
        take = tl.where(going, take, BLOCK)
        give_cost = tl.sum(tl.where(index == give, cost, 0), 0)
        take_cost = tl.sum(tl.where(index == take, cost, 0), 0)
        give_group = tl.sum(tl.where(index == give, group, 0), 0)
        take_group = tl.sum(tl.where(index == take, group, 0), 0)
        less = tl.where(inside, give_cost - take_cost, 0)
        load += tl.where(rank == take % dp_size, less, 0) - tl.where(rank == heavy, less, 0)
        cost = tl.where(index == give, take_cost, tl.where(index == take, give_cost, cost))
        group = tl.where(index == give, take_group, tl.where(index == take, give_group, group))
        turn += 1
    before = tl.zeros_like(index)
    for s in range(slots):
        other = tl.gather(cost, s * dp_size + rank, 0)
        other_group = tl.gather(group, s * dp_size + rank, 0)
        before += ((other > cost) | ((other == cost) & (other_group < group))).to(tl.int32)
    tl.store(place_ptr + row + before * dp_size + rank, group, mask=inside)
    tl.store(dealt_ptr + row + before * dp_size + rank, cost, mask=inside)
    tl.store(height_ptr + program, tl.max(load, 0), mask=groups > 0)


class Deal:
    """Dealt partitions of the rows, on the device.

    Attributes:
        place: int32 [W, P, K], the group at each place, `slot * D + rank`.
        dealt: int64 [W, P, K], its cost.
        height: int64 [W, P], the step cost; 2**63 - 1 where there is no partition.
        skipped: partitions after the first one that were not dealt.
    """

    def __init__(self, num_rows: int, num_dealt: int, groups: int, skipped: int, device: torch.device) -> None:
        self.place = torch.empty((num_rows, num_dealt, groups), dtype=torch.int32, device=device)
        self.dealt = torch.empty((num_rows, num_dealt, groups), dtype=torch.int64, device=device)
        self.height = torch.empty((num_rows, num_dealt), dtype=torch.int64, device=device)
        self.skipped = skipped


def deal(
    costs: Costs,
    dp_size: int,
    slots: int,
    per_step: bool,
    status: torch.Tensor,
    counts: torch.Tensor,
    usable: torch.Tensor,
    num_tried: int,
) -> Deal:
    """Deal the first partition of each row and, if ranks meet once a step, those after the first `num_tried`.

    Args:
        costs: the rows.
        dp_size: ranks, D.
        slots: accumulation slots, G.
        per_step: ranks meet once a step.
        status: int64 [W], 0 in the rows to work on.
        counts: int32 [W, P, K], sizes of the groups of each partition.
        usable: int32 [W, P]: whether there is a partition, from the second on; the first there always is.
        num_tried: partitions that the search has been through.
    """
    num_rows, num_parts, groups = counts.shape
    num_dealt = 1 + num_parts - num_tried if per_step else 1
    result = Deal(num_rows, num_dealt, groups, num_tried - 1, counts.device)
    block, num_warps = launch.group_shape(groups)
    _deal_kernel[(num_rows, num_dealt)](
        costs.f,
        status,
        usable,
        counts,
        result.place,
        result.dealt,
        result.height,
        costs.f.shape[1],
        dp_size,
        slots,
        num_parts,
        result.skipped,
        block.bit_length() - 1,
        (dp_size - 1).bit_length(),
        BLOCK=block,
        num_warps=num_warps,
        **FLAGS,
    )
    if per_step:
        _even_kernel[(num_rows, num_dealt)](
            result.height, result.place, result.dealt, dp_size, slots, BLOCK=block, num_warps=num_warps, **FLAGS
        )
    return result
