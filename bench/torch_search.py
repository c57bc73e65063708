"""The min-max search of one slot in batched eager torch: what the Triton search is measured against.

All rows and `PROBES` levels a turn side by side, K dependent steps a turn, the interval cut to one of its parts each
time; the same levels as `kernels.spec.min_max`, for rows without a cap.
"""

from __future__ import annotations

import torch

PROBES = 64


def min_max_levels(f: torch.Tensor, groups: int) -> torch.Tensor:
    """The smallest level that `groups` groups of each row can keep.

    Args:
        f: int64 [W, B], costs of the samples, largest first; B >= groups.
        groups: K.

    Returns:
        int64 [W].

    Example:
        >>> min_max_levels(torch.tensor([[5, 4, 4, 3, 1, 1]]), 3).tolist()
        [9]
    """
    high = f[:, 0] * f.shape[1]
    low = torch.maximum(f[:, 0], -(-f.sum(dim=1) // groups)) - 1
    parts = torch.arange(1, PROBES + 1, device=f.device)
    while bool((high - low > 1).any()):
        step = torch.clamp((high - low) // (PROBES + 1), min=1)
        levels = torch.minimum(low[:, None] + step[:, None] * parts, torch.maximum(high - 1, low + 1)[:, None])
        fits = _fits(levels, f, groups)
        high = torch.where(fits, levels, high[:, None]).amin(dim=1)
        low = torch.where(fits, low[:, None], levels).amax(dim=1)
        low = torch.minimum(low, high - 1)
    return high


def _fits(levels: torch.Tensor, f: torch.Tensor, groups: int) -> torch.Tensor:
    size = f.shape[1]
    at = torch.zeros_like(levels)
    alive = torch.ones_like(levels, dtype=torch.bool)
    for k in range(groups):
        cost = f.gather(1, at.clamp(max=size - 1))
        count = torch.minimum(levels // cost, size - at - (groups - 1 - k))
        alive &= count >= 1
        at = torch.where(alive, at + count, at)
    return alive & (at == size)
