"""A loop over a model that needs no training, for the tests of the carry."""

from __future__ import annotations

from typing import Any

import torch

from gpusampler.carry import CarryLoop, ode_renoise

GRID = [1.0, 0.75, 0.5, 0.25]


def make_loop(
    num_slots: int = 1, grid: Any = GRID, model: Any = None, renoise: Any = None, **options: Any
) -> tuple[CarryLoop, list[tuple[float, bool, Any]]]:
    """A loop whose model halves the state; `calls` records each forward's timestep, grad mode and batch."""
    calls: list[tuple[float, bool, Any]] = []

    def halve(state: torch.Tensor, timestep: float, batch: Any) -> torch.Tensor:
        calls.append((timestep, torch.is_grad_enabled(), batch))
        return state * 0.5

    loop = CarryLoop(
        model or halve,
        grid,
        start=lambda batch: torch.ones_like(batch["x"]),
        renoise=renoise or ode_renoise(),
        num_slots=num_slots,
        **options,
    )
    return loop, calls
