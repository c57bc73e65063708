"""The two ways to move a clean prediction onto the next rung.

A re-noising style is a callable `renoise(state, pred, timestep, next_timestep, raw_batch) -> next state`; models with
a schedule of their own, or with a schedule for each modality, write theirs in that shape. The two here serve any
schedule of the form `x = alpha(t) * clean + sigma(t) * noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpusampler.errors import ParameterError, ParameterTypeError, quote

AlphaSigma = Callable[[Any], tuple[Any, Any]]
Renoise = Callable[[torch.Tensor, torch.Tensor, Any, Any, Any], torch.Tensor]


def rectified_flow(timestep: Any) -> tuple[Any, Any]:
    """(alpha, sigma) of the straight path from data at 0 to noise at 1: (1 - t, t).

    Args:
        timestep: number or tensor in [0, 1].

    Returns:
        (alpha, sigma).

    Example:
        >>> rectified_flow(0.25)
        (0.75, 0.25)
    """
    return 1 - timestep, timestep


def sde_renoise(alpha_sigma: AlphaSigma = rectified_flow, generator: torch.Generator | None = None) -> Renoise:
    """Fresh noise on every rung.

    Args:
        alpha_sigma: the noise schedule.
        generator: source of the noise, on the device of the state; ranks that share a trajectory need equal seeds.

    Returns:
        A re-noising callable; its noise has the dtype of the state.

    Raises:
        ParameterError: `alpha_sigma` is not callable, or `generator` is no generator.

    Example:
        >>> renoise = sde_renoise()
        >>> renoise(torch.zeros(2), torch.tensor([1.0, 2.0]), 0.5, 0.0, None)
        tensor([1., 2.])
    """
    _check_alpha_sigma(alpha_sigma)
    if not isinstance(generator, (torch.Generator, type(None))):
        raise ParameterTypeError(f"generator must be a torch.Generator or None, got {quote(generator)}")

    def renoise(state: torch.Tensor, pred: torch.Tensor, timestep: Any, next_timestep: Any, _: Any) -> torch.Tensor:
        alpha, sigma = alpha_sigma(next_timestep)
        noise = torch.randn(pred.shape, dtype=state.dtype, device=pred.device, generator=generator)
        moved: torch.Tensor = alpha * pred + sigma * noise
        return moved

    return renoise


def ode_renoise(alpha_sigma: AlphaSigma = rectified_flow) -> Renoise:
    """The noise that the state implies, kept: the deterministic step.

    Args:
        alpha_sigma: the noise schedule; sigma must not be 0 on a rung that another one follows.

    Returns:
        A re-noising callable.

    Raises:
        ParameterError: `alpha_sigma` is not callable. Later, where sigma is 0: `CarryLoop` checks its schedule at once.

    Example:
        >>> clean, noise = torch.tensor([1.0]), torch.tensor([3.0])
        >>> ode_renoise()(0.5 * clean + 0.5 * noise, clean, 0.5, 0.25, None)
        tensor([1.5000])
    """
    _check_alpha_sigma(alpha_sigma)
    return _Ode(alpha_sigma)


@dataclass(frozen=True)
class _Ode:
    alpha_sigma: AlphaSigma

    def __call__(
        self, state: torch.Tensor, pred: torch.Tensor, timestep: Any, next_timestep: Any, _: Any
    ) -> torch.Tensor:
        alpha, sigma = self.alpha_sigma(timestep)
        if not isinstance(sigma, torch.Tensor):  # a tensor's value would cost a synchronisation
            _check_sigma(timestep, sigma)
        next_alpha, next_sigma = self.alpha_sigma(next_timestep)
        moved: torch.Tensor = next_alpha * pred + next_sigma * (state - alpha * pred) / sigma
        return moved

    def check_schedule(self, schedule: Sequence[Any]) -> None:
        for timestep in schedule[:-1]:
            _check_sigma(timestep, self.alpha_sigma(timestep)[1])


def _check_sigma(timestep: Any, sigma: Any) -> None:
    if (torch.as_tensor(sigma) == 0).any():
        raise ParameterError(f"sigma is 0 at timestep {quote(timestep)}, so the state implies no noise: drop that rung")


def _check_alpha_sigma(alpha_sigma: Any) -> None:
    if not callable(alpha_sigma):
        raise ParameterTypeError(f"alpha_sigma must be callable, got {quote(alpha_sigma)}")
