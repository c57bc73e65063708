"""Slot after slot at the least level that the groups left can keep: a start of the search where groups are small.

For costs [9, 4, 4, 1, 1] on one rank in four slots, levels not raised:

    sizes [1, 1, 1, 2], where the min-max partition has [1, 2, 1, 1]

One program a row and raise (`spec.fill_slots`): a min-max search over what is left of the row, as `search.min_max`
makes it, then D groups at that level, raised by some eighths. G searches of K dependent steps a turn.
"""

import torch
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.costs import Costs
from gpusampler.kernels.jit import FLAGS, kernel
from gpusampler.kernels.search import least_level, quotient


@kernel
def _fill_kernel(
    f_ptr,
    inverse_ptr,
    tail_ptr,
    most_ptr,
    status_ptr,
    raises_ptr,
    counts_ptr,
    usable_ptr,
    size: tl.int32,
    dp_size: tl.int32,
    slots: tl.int32,
    num_parts: tl.int32,
    PROBES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * size
    groups = dp_size * slots
    part = program * num_parts + 1 + tl.program_id(1)
    eighths = tl.load(raises_ptr + tl.program_id(1))
    usable = tl.load(status_ptr + program) == 0
    i = tl.zeros([], tl.int32)
    for s in range(tl.where(usable, slots, 0)):
        level, _possible = least_level(
            row + i,
            row + program + i,
            size - i,
            groups - s * dp_size,
            usable,
            f_ptr,
            inverse_ptr,
            tail_ptr,
            most_ptr,
            PROBES,
        )
        level += level // 8 * eighths
        for d in range(dp_size):
            k = s * dp_size + d
            inverse = tl.load(inverse_ptr + row + i)
            count, _rest = quotient(level, level.to(tl.float64), tl.load(f_ptr + row + i), inverse)
            limit = tl.minimum(tl.load(most_ptr + row + i), size - i - (groups - 1 - k))
            held = tl.maximum(tl.minimum(count, limit.to(tl.int64)), 1).to(tl.int32)
            tl.store(counts_ptr + part * groups + k, held)
            i += held
    tl.store(usable_ptr + part, (usable & (i == size)).to(tl.int32))


def fill_slots(
    costs: Costs,
    dp_size: int,
    slots: int,
    status: torch.Tensor,
    raises: torch.Tensor,
    counts: torch.Tensor,
    usable: torch.Tensor,
) -> None:
    """Write a partition of each row for each raise, from the second partition on.

    Args:
        costs: the rows, after `waste.limit_peak`.
        dp_size: ranks, D.
        slots: accumulation slots, G.
        status: int64 [W], 0 in the rows to work on.
        raises: int64 [R], eighths by which levels are raised.
        counts: int32 [W, P, K], out: the sizes, at [:, 1 : R + 1].
        usable: int32 [W, P], out, at [:, 1 : R + 1]: whether the partition holds all samples.
    """
    num_rows, size = costs.f.shape
    _fill_kernel[(num_rows, len(raises))](
        costs.f,
        costs.inverse,
        costs.tail,
        costs.most,
        status,
        raises,
        counts,
        usable,
        size,
        dp_size,
        slots,
        counts.shape[1],
        PROBES=launch.PROBES.block,
        num_warps=launch.PROBES.num_warps,
        **FLAGS,
    )
