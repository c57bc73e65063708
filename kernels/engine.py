"""The whole planner on the GPU: what `spec.plan_rows` does, over tensors that stay on the device.

Every launch depends on shapes and options alone, nothing is read back, and no memory is asked for but from torch's
allocator: a call can be captured in a CUDA graph once one with the same shapes has run, which compiles the kernels and
makes the tables. The plan of a row is that of `spec`, bit for bit.
"""

import contextlib
from functools import cache
from typing import Any

import numpy as np
import torch

from gpusampler.errors import ParameterError
from gpusampler.kernels import launch, spec
from gpusampler.kernels.checks import MAX_LENGTH
from gpusampler.kernels.costs import scale_rows
from gpusampler.kernels.deal import deal
from gpusampler.kernels.emit import Plan, emit
from gpusampler.kernels.fill import fill_slots
from gpusampler.kernels.improve import improve
from gpusampler.kernels.jit import is_interpreted
from gpusampler.kernels.search import _min_max_kernel, min_max
from gpusampler.kernels.sort import sort_rows
from gpusampler.kernels.waste import equal_waste, limit_peak

_OLDEST_CHIP = (8, 0)


def obstacle(device: torch.device, dp_size: int, slots: int) -> str | None:
    """Why the kernels cannot plan on a device with so many ranks and slots, or None if they can."""
    if device.type == "cpu":
        if is_interpreted(_min_max_kernel):
            return _too_many(dp_size, slots)
        return "the kernels run on CPU tensors only under TRITON_INTERPRET=1, set before triton is imported"
    if device.type != "cuda":
        return f"the kernels run on cuda devices, not on {device.type}"
    if is_interpreted(_min_max_kernel):
        return "TRITON_INTERPRET is set: the kernels are interpreted, on CPU tensors"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    chip = torch.cuda.get_device_capability(device)
    if chip < _OLDEST_CHIP:
        return f"compute capability {chip[0]}.{chip[1]} is below {_OLDEST_CHIP[0]}.{_OLDEST_CHIP[1]}"
    return _too_many(dp_size, slots)


def _too_many(dp_size: int, slots: int) -> str | None:
    if dp_size * slots > launch.MAX_GROUPS:
        return f"dp_size * grad_accum = {dp_size * slots} is above {launch.MAX_GROUPS}"
    if slots > launch.MAX_SLOTS:
        return f"grad_accum = {slots} is above {launch.MAX_SLOTS}"
    return None


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`spec.TARGETS`, `spec.RAISES`, and both lists of waste caps in one, on a device."""
    caps = np.concatenate([spec.WASTE_CAPS, spec.STEP_WASTE_CAPS])
    targets, raises, waste_caps = (torch.from_numpy(table).to(device) for table in (spec.TARGETS, spec.RAISES, caps))
    return targets, raises, waste_caps


def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a program; for a chip that is not in the table, the least there is."""
    known = launch.SHARED_BYTES
    if device.type != "cuda":
        return max(known.values())
    major, minor = torch.cuda.get_device_capability(device)
    return known.get(10 * major + minor, min(known.values()))


def plan_rows(
    lengths: torch.Tensor,
    custom: torch.Tensor | None,
    alphas: torch.Tensor,
    dp_size: int,
    slots: int,
    max_tokens: int,
    per_step: bool,
    longest_allowed: int = MAX_LENGTH,
) -> Plan:
    """Plan each row of `lengths` on its own, without waiting for the device.

    Args:
        lengths: int32 or int64 [W, B], B at least `dp_size * slots`; on a CUDA device, or on the CPU under
            `TRITON_INTERPRET=1`.
        custom: float64 [W, B], the cost of each sample, not falling with its length, or None for
            `length + alpha * length**2`.
        alphas: int64 [spec.MAX_SHIFT + 1], alpha times 2**shift, rounded.
        dp_size: ranks, D.
        slots: accumulation slots, G.
        max_tokens: largest n * longest of a micro-batch, 0 for none; a longer sample goes alone.
        per_step: ranks meet once a step rather than in every slot.
        longest_allowed: lengths above it, or below 1, give their row the status `spec.BAD_LENGTHS`.

    Returns:
        order int32 [W, B], offsets int32 [W, K + 1], costs float64 [W, G, D], tokens int64 [W, G, D], bounds
        float64 [W, 2] and status int64 [W] of `spec.plan_rows`, on the device of `lengths`; a status may also be one
        of the negative ones of `spec`.

    Raises:
        ParameterError: if the kernels cannot plan there (`obstacle`).
    """
    reason = obstacle(lengths.device, dp_size, slots)
    if reason is not None:
        raise ParameterError(f"engine='triton' on {lengths.device}: {reason}")
    guard: Any = torch.cuda.device(lengths.device) if lengths.is_cuda else contextlib.nullcontext()
    with guard:
        return _plan_rows(
            lengths.contiguous(),
            None if custom is None else custom.contiguous(),
            alphas,
            dp_size,
            slots,
            max_tokens,
            per_step,
            longest_allowed,
        )


def _plan_rows(
    lengths: torch.Tensor,
    custom: torch.Tensor | None,
    alphas: torch.Tensor,
    dp_size: int,
    slots: int,
    max_tokens: int,
    per_step: bool,
    longest_allowed: int,
) -> Plan:
    num_rows, size = lengths.shape
    groups = dp_size * slots
    device = lengths.device
    targets, raises, caps = _tables(device)
    raises = raises if slots > 1 and size < spec.SCARCE * groups else raises[:0]
    caps = caps[: len(caps) if per_step else len(spec.WASTE_CAPS)] if slots > 1 else caps[:0]
    num_tried = 1 + len(raises) + min(len(caps), len(spec.WASTE_CAPS))
    counts = torch.empty((num_rows, 1 + len(raises) + len(caps), groups), dtype=torch.int32, device=device)
    usable = torch.empty(counts.shape[:2], dtype=torch.int32, device=device)
    status = torch.empty(num_rows, dtype=torch.int64, device=device)
    peak = torch.empty(num_rows, dtype=torch.int64, device=device)
    by_length = sort_rows(lengths, longest_allowed, _shared_bytes(device))
    costs = scale_rows(lengths, custom, alphas, max_tokens, longest_allowed, by_length, status)
    if num_rows > 0:
        min_max(costs, groups, counts, status, peak)
    if num_rows > 0 and slots > 1:
        limit_peak(costs, groups, status, peak)
        if len(raises) > 0:
            fill_slots(costs, dp_size, slots, status, raises, counts, usable)
        equal_waste(costs, groups, status, caps, counts, usable)
        improve(costs, dp_size, slots, status, counts, usable, num_tried, targets)
    dealt = deal(costs, dp_size, slots, per_step, status, counts, usable, num_tried)
    return emit(costs, by_length, counts, dealt, status, dp_size, slots)
