"""Rounds of candidates that lower the summed levels of the slots of a plan.

A level is the largest group cost of a slot once the groups are dealt by cost. A round walks every candidate vector of
levels at every target side by side, a lane each (`spec.propose`, `spec.walk_slots`), then takes what the sequential
rule of `spec.improve` would: in order, a candidate that fits at the smallest target not yet reached is tried at the
next. For three candidates and three targets that fit as

    candidate 0: [1, 0, 1]    candidate 1: [1, 1, 0]    candidate 2: [0, 0, 1]

candidate 0 reaches target 0, candidate 1 target 1, candidate 2 target 2, and wins.

Three kernels. `_start_kernel` picks the first of the partitions it is given whose levels sum to least. Per round,
`_walk_kernel` walks LANES lanes a program over K groups and writes whether each fits and its group sizes, and
`_settle_kernel` picks the winner and sorts its costs into levels. All state is in memory, so that a round is two
launches. Limits: slots <= 256, K <= 2048.
"""

import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch, spec
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.jit import FLAGS, is_interpreted, kernel
from gpusampler.kernels.search import quotient
from gpusampler.kernels.shuffle import mix32
from gpusampler.kernels.sort import sort_keys

_HUGE: tl.constexpr = tl.constexpr(2**63 - 1)
_UNIT: tl.constexpr = tl.constexpr(65536)
_NOISE: tl.constexpr = tl.constexpr(spec.NOISE)


@triton.jit
def _noise(step, candidate, slot):
    """`spec.noise` as int64."""
    mixed = step.to(tl.uint32) * 0x9E3779B1 + candidate.to(tl.uint32) * 0x85EBCA77 + slot.to(tl.uint32) * 0xC2B2AE3D
    return (mix32(mixed + _NOISE) >> 16).to(tl.int64)


@triton.jit
def _fraction(value, ratio):
    """`spec.fraction`, given the ratio in 1 / 2**24."""
    return (value >> 24) * ratio + (((value & 0xFFFFFF) * ratio) >> 24)


@triton.jit
def _propose(step, step_size, candidate, slot, slots, num_lowered, best, total, target, longest):
    """`spec.propose`: levels [LANES, SLOTS], 0 from `slots` on.

    `best` is [1, SLOTS]; `candidate` and `target` are [LANES, 1].
    """
    zero = tl.zeros_like(slot)
    cut = total - target
    lowered = tl.where(slot == candidate, tl.maximum(best - cut, 1), best)

    noise = _noise(step, candidate, slot)
    first_noise = tl.sum(tl.where(slot == 0, noise, 0), 1)[:, None]
    low = tl.maximum(longest, target // slots // 8 * 5)
    high = tl.maximum(low, target // 8 * 7)
    first = low + _fraction(high - low, first_noise << 8)
    share = tl.where((slot >= 1) & (slot < slots), _UNIT + noise, 0)
    shares = tl.sum(share, 1)[:, None]
    scanned = tl.where(slot == 0, first, _fraction(target - first, (share << 24) // tl.maximum(shares, 1)))

    down = (_noise(step, candidate, zero + 1) * slots) >> 16
    up = (down + 1 + ((_noise(step, candidate, zero + 2) * (slots - 1)) >> 16)) % slots
    best_up = tl.sum(tl.where(slot == up, best, 0), 1)[:, None]
    change = _fraction(best_up, ((step_size * first_noise) >> 16) << 8)
    moved = tl.where(slot == up, best + change, best)
    moved = tl.where(slot == down, tl.maximum(best - change - cut, 1), moved)

    levels = tl.where(candidate % 2 == 0, scanned, moved)
    levels = tl.where(candidate < num_lowered, lowered, levels)
    return tl.where(slot < slots, levels, 0)


@kernel
def _walk_kernel(
    f_ptr,
    inverse_ptr,
    tail_ptr,
    most_ptr,
    status_ptr,
    levels_ptr,
    total_ptr,
    targets_ptr,
    fits_ptr,
    walked_ptr,
    first_row: tl.int32,
    size: tl.int32,
    dp_size: tl.int32,
    slots: tl.int32,
    num_lanes: tl.int32,
    num_targets: tl.int32,
    num_lowered: tl.int32,
    step: tl.int32,
    step_size: tl.int32,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    source = program + first_row
    row = source * size
    tail_row = row + source
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    candidate = lane // num_targets
    total = tl.load(total_ptr + source)
    part = tl.load(targets_ptr + lane % num_targets)
    target = total - (total >> 16) * part
    best = tl.load(levels_ptr + source * slots + slot, mask=slot < slots, other=0)
    level = _propose(
        step, step_size.to(tl.int64), candidate, slot, slots, num_lowered, best, total, target, tl.load(f_ptr + row)
    )
    shift = tl.sum((total >> tl.arange(0, 64) >= 2147483648).to(tl.int32), 0)
    ratio = (1 << 46) // tl.maximum(level >> shift, 1)
    weight = tl.where((candidate // 3) % 2 == 0, ratio, 1)
    scaled = level.to(tl.float64)
    zero = tl.zeros_like(slot)
    quota = tl.where(slot < slots, dp_size, 0) + tl.zeros_like(candidate)
    room = tl.sum(level, 1)[:, None] * dp_size
    groups = tl.where(tl.load(status_ptr + source) == 0, dp_size * slots, 0)
    alive = lane < num_lanes
    i = tl.zeros_like(lane)
    for k in range(groups):
        alive &= tl.load(tail_ptr + tail_row + i, mask=alive, other=0) <= room
        cost = tl.load(f_ptr + row + i, mask=alive, other=1)
        inverse = tl.load(inverse_ptr + row + i, mask=alive, other=1.0)
        most = tl.load(most_ptr + row + i, mask=alive, other=0)
        limit = tl.minimum(most, size - groups + 1 + k - i).to(tl.int64)
        count, _ = quotient(level, scaled, cost, inverse)
        count = tl.minimum(count, limit)
        waste = ((level - count * cost) >> shift) * weight
        key = tl.where((count >= 1) & (quota > 0), waste * SLOTS + slot, _HUGE)
        least = tl.min(key, 1)[:, None]
        alive &= least < _HUGE
        taken = (key == least) & (key < _HUGE)
        quota -= taken.to(tl.int32)
        room -= tl.sum(tl.where(taken, level, 0), 1)[:, None]
        held = tl.sum(tl.where(taken, count, 0).to(tl.int32), 1)[:, None]
        i += tl.where(alive, held, 0)
        place = (program * num_lanes + lane) * groups + k + zero
        tl.store(walked_ptr + place, count.to(tl.int32), mask=taken & alive)
    # A lane that gives up stops before the end of the row. Lane and place agree; written so, they share a layout.
    place = program * num_lanes + candidate * num_targets + lane % num_targets + zero
    tl.store(fits_ptr + place, (i == size).to(tl.int32), mask=(lane < num_lanes) & (slot == 0))


@triton.jit
def _sorted_costs(counts, index, groups, row, f_ptr, log_size):
    """Costs of groups of sizes `counts`, dearest first, negated; then zeros."""
    starts = tl.cumsum(counts, 0) - counts
    inside = index < groups
    f = tl.load(f_ptr + row + starts, mask=inside, other=0)
    return sort_keys(-(counts.to(tl.int64) * f), index, log_size)


@kernel
def _start_kernel(
    f_ptr,
    status_ptr,
    usable_ptr,
    counts_ptr,
    levels_ptr,
    total_ptr,
    size: tl.int32,
    dp_size: tl.int32,
    slots: tl.int32,
    num_parts: tl.int32,
    num_tried: tl.int32,
    log_size: tl.int32,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    groups = dp_size * slots
    index = tl.arange(0, BLOCK)
    inside = index < tl.where(tl.load(status_ptr + program) == 0, groups, 0)
    is_level = inside & (index % dp_size == 0)
    place = program * num_parts
    total = tl.full([], _HUGE, tl.int64)
    for part in range(num_tried):
        counts = tl.load(counts_ptr + (place + part) * groups + index, mask=inside, other=0)
        usable = tl.load(usable_ptr + place + part, mask=part > 0, other=1)
        costs = -_sorted_costs(counts, index, groups, program * size, f_ptr, log_size)
        part_total = tl.sum(tl.where(is_level, costs, 0), 0)
        part_total = tl.where(usable == 1, part_total, _HUGE)
        kept = tl.where(part_total < total, index, BLOCK)
        tl.store(counts_ptr + place * groups + kept, counts, mask=inside & (kept < BLOCK))
        tl.store(levels_ptr + program * slots + kept // dp_size, costs, mask=is_level & (kept < BLOCK))
        total = tl.minimum(total, part_total)
    tl.store(total_ptr + program, total)


@kernel
def _settle_kernel(
    f_ptr,
    status_ptr,
    fits_ptr,
    walked_ptr,
    counts_ptr,
    levels_ptr,
    total_ptr,
    first_row: tl.int32,
    size: tl.int32,
    dp_size: tl.int32,
    slots: tl.int32,
    counts_stride: tl.int32,
    num_candidates: tl.int32,
    num_targets: tl.int32,
    log_size: tl.int32,
    CANDIDATES: tl.constexpr,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    source = program + first_row
    num_lanes = num_candidates * num_targets
    candidate = tl.arange(0, CANDIDATES)
    target = tl.arange(0, TARGETS)[None, :]
    inside = (candidate[:, None] < num_candidates) & (target < num_targets)
    lane = candidate[:, None] * num_targets + target
    fits = tl.load(fits_ptr + program * num_lanes + lane, mask=inside, other=0)
    bits = tl.sum(fits << target, 1)
    reached = tl.zeros([], tl.int32)
    winner = tl.where(tl.load(status_ptr + source) == 0, 0, CANDIDATES)
    last = tl.full([], -1, tl.int32)
    for _ in range(num_targets):
        fitting = (((bits >> reached) & 1) == 1) & (candidate >= winner)
        winner = tl.min(tl.where(fitting, candidate, CANDIDATES), 0)
        last = tl.where(winner < CANDIDATES, winner * num_targets + reached, last)
        reached += tl.where(winner < CANDIDATES, 1, 0)
    groups = dp_size * slots
    index = tl.arange(0, BLOCK)
    kept = index < tl.where(last >= 0, groups, 0)
    counts = tl.load(walked_ptr + (program * num_lanes + last) * groups + index, mask=kept, other=0)
    costs = -_sorted_costs(counts, index, tl.where(last >= 0, groups, 0), source * size, f_ptr, log_size)
    is_level = kept & (index % dp_size == 0)
    total = tl.sum(tl.where(is_level, costs, 0), 0)
    tl.store(counts_ptr + source * counts_stride + index, counts, mask=kept)
    tl.store(levels_ptr + source * slots + index // dp_size, costs, mask=is_level)
    tl.store(total_ptr + source, total, mask=last >= 0)


def improve(
    costs: Costs,
    dp_size: int,
    slots: int,
    status: torch.Tensor,
    counts: torch.Tensor,
    usable: torch.Tensor,
    num_tried: int,
    targets: torch.Tensor,
) -> None:
    """Write to `counts[:, 0]` the best partition that the rounds reach from the best of the first `num_tried`.

    Args:
        costs: the rows.
        dp_size: ranks, D.
        slots: accumulation slots, G, at least 2.
        status: int64 [W], 0 in the rows to work on.
        counts: int32 [W, P, K], in and out.
        usable: int32 [W, P]: whether there is a partition, from the second on; the first there always is.
        num_tried: partitions to start from.
        targets: int64, `spec.TARGETS` on the device.
    """
    num_rows, size = costs.f.shape
    groups = dp_size * slots
    device = costs.f.device
    levels = torch.empty((num_rows, slots), dtype=torch.int64, device=device)
    total = torch.empty(num_rows, dtype=torch.int64, device=device)
    block, num_warps = launch.group_shape(groups)
    log_size = block.bit_length() - 1
    _start_kernel[(num_rows,)](
        costs.f,
        status,
        usable,
        counts,
        levels,
        total,
        size,
        dp_size,
        slots,
        counts.shape[1],
        num_tried,
        log_size,
        BLOCK=block,
        num_warps=num_warps,
        **FLAGS,
    )
    many = slots > 2 and groups <= spec.SMALL_K
    candidates = spec.MANY_CANDIDATES if many else spec.CANDIDATES
    lanes = candidates * len(targets)
    walk = launch.walk_shape(slots, interpreted=is_interpreted(_walk_kernel))
    most_rows = launch.rows_at_once(groups, lanes)
    fits = torch.empty((min(num_rows, most_rows), lanes), dtype=torch.int32, device=device)
    walked = torch.empty((min(num_rows, most_rows), lanes, groups), dtype=torch.int32, device=device)
    for first_row in range(0, num_rows, most_rows):
        num_now = min(most_rows, num_rows - first_row)
        for step in range(spec.ROUNDS):
            _walk_kernel[(num_now, triton.cdiv(lanes, walk.lanes))](
                costs.f,
                costs.inverse,
                costs.tail,
                costs.most,
                status,
                levels,
                total,
                targets,
                fits,
                walked,
                first_row,
                size,
                dp_size,
                slots,
                lanes,
                len(targets),
                min(slots, candidates // 4),
                step,
                int(spec.STEPS[step]),
                LANES=walk.lanes,
                SLOTS=walk.slots,
                num_warps=walk.num_warps,
                **FLAGS,
            )
            _settle_kernel[(num_now,)](
                costs.f,
                status,
                fits,
                walked,
                counts,
                levels,
                total,
                first_row,
                size,
                dp_size,
                slots,
                counts.stride(0),
                candidates,
                len(targets),
                log_size,
                CANDIDATES=launch.power_of_two(max(spec.CANDIDATES, spec.MANY_CANDIDATES)),
                TARGETS=launch.power_of_two(len(targets)),
                BLOCK=block,
                num_warps=num_warps,
                **FLAGS,
            )
