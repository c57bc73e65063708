"""What a loop is made of: options and functions, checked when it is made, and the dtype of the states it carries."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from gpusampler.carry import CarryLoop, ode_renoise, sde_renoise
from gpusampler.errors import ParameterError

GRID = [1.0, 0.75, 0.5, 0.25]


def make_loop(
    *, num_slots: Any = 1, grid: Any = GRID, model: Any = None, renoise: Any = None, start: Any = None, **options: Any
) -> CarryLoop:
    return CarryLoop(
        (lambda state, timestep, batch: state * 0.5) if model is None else model,
        grid,
        start=start or (lambda batch: torch.ones_like(batch["x"])),
        renoise=renoise or ode_renoise(),
        num_slots=num_slots,
        **options,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": True}, "num_slots"),
        ({"grid": []}, "schedule must have at least one"),
        ({"grid": "1234"}, "schedule"),
        ({"grid": 4}, "schedule"),
        ({"grid": b"12"}, "schedule"),
        ({"grid": torch.tensor(1.0)}, "schedule"),
        ({"grid": torch.zeros(0)}, "schedule must have at least one"),
        ({"model": 4}, "model must be callable, got 4"),
        ({"renoise": 4}, "renoise must be callable, got 4"),
        ({"batch_size": 4}, "batch_size must be callable, got 4"),
        ({"stagger_rank": 1}, "stagger_rank must be at most 0"),
        ({"stagger_groups": 0}, "stagger_groups"),
        ({"interval": 0}, "interval"),
        ({"interval": 2, "owner": "DMD2"}, "DMD2 would never update 2 of the 4 rungs"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"device": "nowhere"}, "device"),
        ({"device": 10**20}, "device"),
        ({"device": "cuda:99"}, "device names no device of this machine"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loop(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"renoise": ode_renoise}, r"renoise must take \(state, pred, timestep, next_timestep, raw_batch\), got <func"),
        ({"renoise": sde_renoise}, "renoise must take"),
        ({"model": lambda state, timestep: state}, r"model must take \(state, timestep, raw_batch\)"),
        ({"model": lambda *, state, timestep, raw_batch: state}, "model must take"),
        ({"start": lambda: torch.zeros(1)}, r"start must take \(raw_batch\)"),
        ({"batch_size": lambda: 1}, r"batch_size must take \(batch\)"),
    ],
)
def test_functions_that_take_other_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_loop(**options)


def test_functions_of_every_kind_are_taken() -> None:
    @functools.wraps(lambda net, state, timestep, batch: state)  # whose arguments are not the wrapper's
    def wrapped(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        return state

    class Model(nn.Module):
        def forward(self, state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
            return state

    for model in (
        wrapped,
        Model(),
        Model().forward,
        functools.partial(wrapped),
        torch.compile(Model(), backend="eager"),
        max,
    ):
        loop = make_loop(model=model, batch_size=len)
        assert loop.carry.num_slots == 1


@pytest.mark.parametrize(("name", "value"), [("alpha_sigma", torch.Generator()), ("alpha_sigma", 3), ("generator", 3)])
def test_renoising_checks_its_arguments(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"{name} must be"):
        sde_renoise(**{name: value})
    if name == "alpha_sigma":
        with pytest.raises(ParameterError, match=f"{name} must be"):
            ode_renoise(value)


# The dtype of a state


@pytest.mark.parametrize("style", [sde_renoise, ode_renoise])
def test_a_state_keeps_its_dtype_under_autocast(style: Any) -> None:
    net = nn.Linear(4, 4)
    loop = make_loop(model=lambda state, timestep, batch: net(state), renoise=style())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps = [loop.step({"x": torch.ones(2, 4)}) for _ in range(9)]
    assert {step.state.dtype for step in steps} == {torch.float32}
    assert {step.pred.dtype for step in steps} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float64])
def test_a_state_keeps_the_dtype_it_began_with(dtype: torch.dtype, given: torch.dtype) -> None:
    loop = make_loop(
        start=lambda batch: torch.ones(2, dtype=dtype),
        renoise=lambda state, pred, timestep, next_timestep, batch: pred.to(given),
    )
    with torch.inference_mode():
        steps = [loop.step({"x": torch.zeros(2)}) for _ in range(6)]
    assert {step.state.dtype for step in steps} == {dtype}
    assert not any(step.state.is_inference() for step in steps)


@pytest.mark.parametrize(
    "dtypes", [(torch.int64, torch.float32), (torch.float32, torch.int64), (torch.float32, torch.complex64)]
)
def test_another_kind_of_dtype_is_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    loop = make_loop(
        start=lambda batch: torch.ones(2, dtype=dtypes[0]),
        renoise=lambda state, pred, timestep, next_timestep, batch: torch.ones(2, dtype=dtypes[1]),
    )
    with pytest.raises(ParameterError, match=f"renoise must keep the state's dtype {dtypes[0]}, got {dtypes[1]}"):
        loop.step({"x": torch.zeros(2)})
    assert loop.carry.slots == [None]
