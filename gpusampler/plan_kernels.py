"""Plans by the Triton kernels: of tensors that are on a device and stay there.

Nothing here waits for the device: what is wrong with a row is told by its status (`BatchPlan.check`).
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpusampler.batch_plan import BatchPlan
from gpusampler.cost import alpha_table
from gpusampler.errors import ParameterError

if TYPE_CHECKING:
    from gpusampler.kernels.emit import Plan
    from gpusampler.plan import Partition


def kernels_obstacle(device: torch.device, dp_size: int, grad_accum: int) -> str | None:
    """Why the kernels cannot plan on a device, or None if they can; a Triton that cannot be imported is a reason."""
    try:
        from gpusampler.kernels import engine
    except Exception as error:  # a broken installation raises whatever it likes
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return engine.obstacle(device, dp_size, grad_accum)


def launch_plan(partition: Partition, rows: torch.Tensor, custom: torch.Tensor | None, longest_allowed: int) -> Plan:
    """Have the kernels plan rows, int32 or int64 [W, B]; `custom` and `longest_allowed` are those of the engine."""
    from gpusampler.kernels import engine

    return engine.plan_rows(
        rows,
        custom,
        alphas_on(partition.cost.alpha, rows.device),
        partition.dp_size,
        partition.grad_accum,
        partition.cap,
        partition.sync == "step",
        longest_allowed,
    )


def plan_on_device(partition: Partition, lengths: torch.Tensor) -> BatchPlan:
    """Plan rows of lengths where they are.

    Args:
        partition: what to plan for.
        lengths: integers [W, B] on a device where `kernels_obstacle` finds none.

    Returns:
        A plan on the device of `lengths`, whose `status` tells bad rows.
    """
    rows = lengths if lengths.dtype in (torch.int32, torch.int64) else lengths.to(torch.int64)
    custom, exponents = None, None
    if partition.cost.cost_fn is not None:
        custom, exponents = scale_by_row(partition.cost.unchecked(rows))
    made = launch_plan(partition, rows, custom, partition.longest_allowed)
    costs, bounds = made.costs, made.bounds
    if exponents is not None:
        costs, bounds = _ldexp(costs, exponents[:, None, None]), _ldexp(bounds, exponents[:, None])
    if partition.cost.intercept:
        costs = costs + partition.cost.intercept
        bounds = bounds + partition.grad_accum * partition.cost.intercept
    ends = (bounds[:, 0].contiguous(), bounds[:, 1].contiguous())
    return BatchPlan(made.order, made.offsets, costs, made.tokens, *ends, made.status, (partition, lengths))


def scale_by_row(costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Costs, float64 [W, B], as parts of the power of two above their row's largest, and its exponents, int32 [W]."""
    exponents = torch.frexp(costs.amax(dim=1)).exponent.clamp(-1074, 1024)
    return _ldexp(costs, -exponents[:, None]), exponents


def _ldexp(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`x * 2.0**exponents`, in two exact steps: the power itself may be out of range."""
    first = exponents // 2
    return x * _power(first) * _power(exponents - first)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


@lru_cache(maxsize=64)
def alphas_on(alpha: float, device: torch.device) -> torch.Tensor:
    """`alpha_table` on a device; waits for the copy, once, as any stream may read it afterwards."""
    return torch.from_numpy(alpha_table(alpha)).to(device)


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def check_engine(engine: str | None, device: torch.device, partition: Partition) -> str:
    """The engine that plans tensors on a device: "cpu" or "triton".

    Raises:
        ParameterError: "triton" is asked for and cannot plan there.
    """
    if engine == "cpu" or (engine is None and device.type == "cpu"):
        return "cpu"
    reason = kernels_obstacle(device, partition.dp_size, partition.grad_accum)
    if reason is None:
        return "triton"
    if engine == "triton":
        raise ParameterError(f"engine='triton' cannot plan on {device}: {reason}")
    warn_once(f"{reason}; this waits for the device")
    return "cpu"


@cache
def warn_once(reason: str) -> None:
    """Warn, once for each reason, that the CPU engine plans what the GPU was to."""
    warnings.warn(f"planning on the CPU instead of the GPU: {reason}", RuntimeWarning, stacklevel=2)
