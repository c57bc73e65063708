"""Where a sampler's plans are made: on a GPU if there is one on which the kernels can plan, else on a thread.

The choice is made when an iteration begins, so that making a sampler creates no CUDA context, and a process that forks
later has none to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpusampler.compose import Composition
from gpusampler.errors import NotAvailableError, ParameterError, quote
from gpusampler.lengths import Lengths
from gpusampler.on_device import DeviceAhead, DevicePlans, PendingChunk
from gpusampler.pipeline import Chunk, PlanAhead
from gpusampler.plan import Partition
from gpusampler.plan_kernels import kernels_obstacle, warn_once
from gpusampler.stats import PlanStats

MAX_COST_TABLE = 1 << 22
"""Most lengths, from the shortest to the longest, for which a `cost_fn` is tabulated: 32 MiB on the device."""


def check_device(device: Any) -> torch.device | None:
    """The device asked for, or None for a choice when planning begins; creates no CUDA context.

    Raises:
        ParameterError: not a device that plans can be made on, or CUDA where there is none.
    """
    if device is None:
        return None
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError(f"device must be a torch device, got {quote(device)}") from error
    if where.type not in ("cpu", "cuda"):
        raise NotAvailableError(f"device must be on 'cpu' or 'cuda', plans cannot be made on {str(where)!r}")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ParameterError(f"device={str(where)!r}, but torch finds no CUDA device; None plans where it can")
        if where.index is not None and where.index >= torch.cuda.device_count():
            raise ParameterError(f"device={str(where)!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return where


def choose_device(device: torch.device | None, partition: Partition, lengths: Lengths) -> torch.device | None:
    """The CUDA device to plan on, or None for the CPU engine.

    Raises:
        ParameterError: `device` is a CUDA device on which these plans cannot be made.
    """
    if device is not None and device.type == "cpu":
        return None
    if device is None and (torch.utils.data.get_worker_info() is not None or not torch.cuda.is_available()):
        return None
    try:
        index = torch.cuda.current_device() if device is None or device.index is None else device.index
        target = torch.device("cuda", index)
        reason = kernels_obstacle(target, partition.dp_size, partition.grad_accum) or _untabulated(partition, lengths)
    except RuntimeError as error:  # CUDA cannot be used in this process, such as a forked one
        reason = str(error).splitlines()[0]
    if reason is None:
        return target
    if device is not None:
        raise ParameterError(f"device={str(device)!r} cannot plan: {reason}")
    warn_once(reason)
    return None


def _untabulated(partition: Partition, lengths: Lengths) -> str | None:
    span = lengths.maximum - lengths.minimum + 1
    if partition.cost.cost_fn is None or span <= MAX_COST_TABLE:
        return None
    return f"cost_fn over lengths from {lengths.minimum} to {lengths.maximum} is a table of more than {MAX_COST_TABLE}"


def _check_same(got: Chunk, expected: Chunk, device: torch.device) -> None:
    """Have the first step planned by both engines: a GPU that plans otherwise must not go unnoticed."""
    if not (np.array_equal(got.samples, expected.samples) and np.array_equal(got.ends, expected.ends)):
        raise RuntimeError(
            f"{device} plans step {got.step} otherwise than the CPU does, which is a bug: please report it"
        )


class Planner:
    """Plans the chunks of a sampler's iterations: on a GPU, or else on a thread.

    Args:
        device: what the sampler was given.
        lengths: of the dataset.
        composition: of its epochs.

    Raises:
        ParameterError: as `check_device`.
    """

    def __init__(self, device: Any, lengths: Lengths, composition: Composition) -> None:
        """Take no memory and no CUDA context yet."""
        self.device = check_device(device)
        self._lengths, self._composition = lengths, composition
        self._plans: DevicePlans | None = None
        self._gpu_failed = False

    def ahead(
        self,
        spans: Iterator[tuple[int, int]],
        plan: Callable[[int, int], Chunk],
        epoch: int,
        partition: Partition,
        stats: PlanStats,
        depth: int,
    ) -> PlanAhead:
        """Chunks of one iteration; `plan` makes one on the CPU."""
        device = None if self._gpu_failed else choose_device(self.device, partition, self._lengths)
        if device is None:
            return PlanAhead(spans, plan, stats, depth)

        def begin(step: int, count: int) -> PendingChunk:
            if self._plans is None or self._plans.device != device:
                plans = DevicePlans(device, self._lengths, self._composition)
                _check_same(plans.begin(epoch, step, 1, partition).result(), plan(step, 1), device)
                self._plans = plans
            return self._plans.begin(epoch, step, count, partition)

        return DeviceAhead(spans, plan, stats, depth, begin, None if self.device else self._give_up)

    def close(self) -> None:
        """Free the device's memory."""
        self._plans = None

    def _give_up(self, error: Exception) -> None:
        self._plans, self._gpu_failed = None, True
        first_line = (str(error).splitlines() or [""])[0]
        warn_once(f"{type(error).__name__}: {quote(first_line, 200)}")

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is on a device."""
        return {**self.__dict__, "_plans": None}
