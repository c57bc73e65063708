"""Loss weights that undo the bias of uneven micro-batches.

Data-parallel training averages gradients over ranks, and accumulation sums or averages them over slots. When
micro-batches hold different numbers of tokens (or samples), the mean of their mean losses is not the mean over the
global batch: a token counts more in a small micro-batch. One factor a micro-batch repairs it.
"""

from __future__ import annotations

from typing import Any

import torch

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote

Count = int | torch.Tensor


def microbatch_weight(
    num_items: Count, num_items_in_batch: Count, dp_size: int = 1, grad_accum: int = 1
) -> float | torch.Tensor:
    """Factor for a micro-batch's mean loss that makes the training step use the mean over the global batch.

    Multiply the mean loss of each micro-batch by it before `backward()`. The gradient that is accumulated over the
    slots and averaged over the ranks then equals the gradient of the mean over all items of the step.

    Args:
        num_items: items that the micro-batch's loss is a mean over: tokens with a label, or samples; >= 0. An int or
            an integer tensor. Tensors on the CPU are checked; those on a device are not, which would wait for it.
        num_items_in_batch: items in the whole step, over all ranks and slots; >= 1.
        dp_size: ranks that gradients are averaged over; 1 if they are summed.
        grad_accum: the number that the training loop divides each loss by; 1 if it does not divide.

    Returns:
        `num_items * dp_size * grad_accum / num_items_in_batch`; a float for ints, else a tensor of the default dtype.

    Raises:
        ParameterError: a count or size out of range.

    Example:
        Rank 0 has 8192 tokens of loss 1.0, rank 1 has 5120 of loss 3.0; the mean over tokens is 1.7692, not 2.0:

        >>> weights = [microbatch_weight(n, 8192 + 5120, dp_size=2) for n in (8192, 5120)]
        >>> round((weights[0] * 1.0 + weights[1] * 3.0) / 2, 6)
        1.769231
    """
    scale = check_int("dp_size", dp_size, minimum=1) * check_int("grad_accum", grad_accum, minimum=1)
    if isinstance(num_items, torch.Tensor) or isinstance(num_items_in_batch, torch.Tensor):
        return _tensor_weight(num_items, num_items_in_batch, scale)
    items = check_int("num_items", num_items, minimum=0)
    total = check_int("num_items_in_batch", num_items_in_batch, minimum=1)
    if items > total:
        raise ParameterError(f"num_items must be at most num_items_in_batch = {total}, got {items}")
    return items * scale / total


def _tensor_weight(num_items: Any, num_items_in_batch: Any, scale: int) -> torch.Tensor:
    """In float64, so that no product wraps around in a small integer type."""
    items, total = _wide("num_items", num_items, 0), _wide("num_items_in_batch", num_items_in_batch, 1)
    if items.device.type == total.device.type == "cpu" and bool((items > total).any()):
        raise ParameterError(
            f"num_items must be at most num_items_in_batch = {quote(num_items_in_batch)}, got {quote(num_items)}"
        )
    return (items * scale / total).to(torch.get_default_dtype())


def _wide(name: str, count: Any, minimum: int) -> torch.Tensor:
    if not isinstance(count, torch.Tensor):
        return torch.tensor(check_int(name, count, minimum), dtype=torch.float64)
    if count.is_floating_point() or count.is_complex() or count.dtype == torch.bool:
        raise ParameterTypeError(f"{name} must be an int or an integer tensor, got a tensor of {count.dtype}")
    if count.device.type == "cpu" and bool((count < minimum).any()):
        raise ParameterError(f"{name} must be at least {minimum}, got {quote(count)}")
    return count.to(torch.float32 if count.device.type == "mps" else torch.float64)
