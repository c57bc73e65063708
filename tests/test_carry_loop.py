"""The walk as a whole: order of rungs, forwards, batches, sizes, resume, gradients, and what it saves in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from carry_loops import GRID, make_loop
from torch import nn

from gpusampler.carry import CarryLoop, CarryStep, ode_renoise, rectified_flow, sde_renoise
from gpusampler.errors import ParameterError


def batches(size: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    number = 0
    while True:
        yield {"x": torch.full((size,), float(number))}
        number += 1


def walk(loop: CarryLoop, calls: int) -> list[CarryStep]:
    return [loop.step(batch) for _, batch in zip(range(calls), batches(), strict=False)]


def hops(state: float, count: int) -> float:
    """The deterministic walk of the halving model, by hand: clean = state / 2, noise = (state - (1-t) clean) / t."""
    for rung in range(count):
        clean = state / 2
        noise = (state - (1 - GRID[rung]) * clean) / GRID[rung]
        state = (1 - GRID[rung + 1]) * clean + GRID[rung + 1] * noise
    return state


def test_one_slot_walks_the_grid_and_starts_over() -> None:
    loop, calls = make_loop()
    steps = walk(loop, 9)
    assert [step.rung for step in steps] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [step.timestep for step in steps[:4]] == GRID
    assert [step.forwards for step in steps] == [4, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [step.fresh for step in steps] == [True, False, False, False] * 2 + [True]
    assert loop.forwards == len(calls) == 12
    assert [step.state.item() for step in steps[:4]] == pytest.approx([hops(1.0, count) for count in range(4)])
    assert steps[3].pred.item() == pytest.approx(hops(1.0, 3) / 2)


def test_two_slots_are_staggered_and_take_turns() -> None:
    loop, _ = make_loop(num_slots=2)
    steps = walk(loop, 10)
    assert [step.slot for step in steps] == [0, 1] * 5
    assert [step.rung for step in steps] == [0, 1, 1, 2, 2, 3, 3, 0, 0, 1]
    assert [step.forwards for step in steps] == [4, 4, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [step.raw_batch["x"].item() for step in steps] == [0, 1, 0, 1, 0, 1, 0, 7, 8, 7]
    assert steps[1].state.item() == pytest.approx(hops(1.0, 1))


@pytest.mark.parametrize("stagger_rank", range(5))
def test_each_rank_starts_on_its_own_rung_at_the_same_cost(stagger_rank: int) -> None:
    loop, calls = make_loop(num_slots=2, stagger_rank=stagger_rank, stagger_groups=5)
    steps = walk(loop, 2)
    assert [step.rung for step in steps] == [(stagger_rank * 2) % 4, (stagger_rank * 2 + 1) % 4]
    assert [step.state.item() for step in steps] == pytest.approx([hops(1.0, step.rung) for step in steps])
    assert [step.forwards for step in steps] == [4, 4]
    # the walk over the grid is without gradients, the forward at the stream's rung is not
    assert [call[:2] for call in calls[:4]] == [(1.0, False), (0.75, False), (0.5, False), (GRID[steps[0].rung], True)]


@pytest.mark.parametrize("grid", [[0.5], (0.5,), torch.tensor([0.5])])
def test_a_grid_of_one_rung(grid: Any) -> None:
    loop, _ = make_loop(num_slots=2, grid=grid)
    steps = walk(loop, 5)
    assert [(step.rung, step.forwards, step.fresh) for step in steps] == [(0, 1, True)] * 5
    assert loop.carry.seeded == [True, True]
    assert loop.carry.memory().total == 0


def test_a_stream_that_starts_on_the_last_rung_is_staggered_once() -> None:
    loop, _ = make_loop(stagger_rank=3, stagger_groups=4)
    assert [(step.rung, step.forwards) for step in walk(loop, 6)] == [(3, 4), (0, 1), (1, 1), (2, 1), (3, 1), (0, 1)]


def test_the_carried_batch_is_used_and_the_loader_may_reuse_its_buffer() -> None:
    loop, calls = make_loop()
    buffer = {"x": torch.zeros(1), "prompt": ["first"]}
    seen = []
    for number in range(5):
        buffer["x"].fill_(number)
        buffer["prompt"][0] = f"prompt {number}"
        step = loop.step(buffer)
        seen.append((step.raw_batch["x"].item(), step.raw_batch["prompt"]))
    assert seen == [(0.0, ["prompt 0"])] * 4 + [(4.0, ["prompt 4"])]
    assert all(batch is not buffer for _, _, batch in calls)


def test_gradients_reach_the_model_and_not_the_carried_state() -> None:
    weight = nn.Parameter(torch.tensor(0.5))
    loop, _ = make_loop(model=lambda state, timestep, batch: state * weight)
    first, second = walk(loop, 2)
    first.pred.sum().backward()
    assert weight.grad == 1.0  # the state, and nothing of the walk over the grid
    weight.grad = None
    second.pred.sum().backward()
    assert weight.grad.item() == pytest.approx(hops(1.0, 1))
    with torch.no_grad():
        assert not loop.step({"x": torch.zeros(1)}).pred.requires_grad


def test_renoise_sees_no_graph() -> None:
    weight = nn.Parameter(torch.tensor(0.5))
    seen = []

    def renoise(state: torch.Tensor, pred: torch.Tensor, timestep: float, next_timestep: float, batch: Any) -> Any:
        seen.append((pred.requires_grad, torch.is_grad_enabled(), timestep, next_timestep, batch["x"].item()))
        return pred

    loop, _ = make_loop(model=lambda state, timestep, batch: state * weight, renoise=renoise, grid=[1.0, 0.5])
    assert [step.pred.requires_grad for step in walk(loop, 3)] == [True] * 3
    assert seen == [(False, False, 1.0, 0.5, 0.0)] * 2 + [(False, False, 1.0, 0.5, 2.0)]


def test_a_model_with_static_output_and_inference_mode() -> None:
    output = torch.zeros(1)

    def static(state: torch.Tensor, timestep: float, batch: Any) -> torch.Tensor:
        return torch.mul(state, 0.5, out=output)

    loop, _ = make_loop(model=static, renoise=lambda state, pred, timestep, next_timestep, batch: pred)
    with torch.inference_mode():
        states = [step.state.clone() for step in walk(loop, 4)]
    assert [state.item() for state in states] == [1.0, 0.5, 0.25, 0.125]
    assert loop.carry.slots == [None]


def test_slot_must_be_the_accumulation_index() -> None:
    loop, calls = make_loop(num_slots=3)
    batch = {"x": torch.zeros(1)}
    assert [loop.step(batch, slot=slot).slot for slot in (0, 1, 2, 0)] == [0, 1, 2, 0]
    before = len(calls)
    with pytest.raises(ParameterError, match="slot 0 is not the slot in use, 1 of 3"):
        loop.step(batch, slot=0)
    with pytest.raises(ParameterError, match="slot"):
        loop.step(batch, slot=True)
    assert len(calls) == before
    assert loop.step(batch, slot=1).slot == 1


def test_resume_restarts_streams_at_the_accumulation_index() -> None:
    loop, _ = make_loop(num_slots=3)
    walk(loop, 7)
    loop.restart(7)
    steps = walk(loop, 7)
    assert [step.slot for step in steps] == [1, 2, 0, 1, 2, 0, 1]
    assert [step.fresh for step in steps[:3]] == [True] * 3
    assert [step.forwards for step in steps] == [4, 4, 4, 1, 1, 1, 1]
    # after 2 steps, or 3 for slot 0, each slot is that many rungs further on than at the start of the run
    assert [step.rung for step in steps] == [3, 0, 3, 0, 1, 0, 1]


@pytest.mark.parametrize("shape", [(1,), (2, 2), ()])
def test_a_model_that_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    loop, _ = make_loop(model=lambda state, timestep, batch: torch.zeros(shape))
    with pytest.raises(ParameterError, match=r"model must keep the state's shape \(2,\)"):
        loop.step({"x": torch.zeros(2)})
    loop, _ = make_loop(renoise=lambda state, pred, timestep, next_timestep, batch: torch.zeros(shape))
    with pytest.raises(ParameterError, match=r"renoise must keep the state's shape \(2,\)"):
        loop.step({"x": torch.zeros(2)})
    assert (loop.carry.upcoming_slot, loop.carry.slots) == (0, [None])


def test_a_failed_call_can_be_repeated() -> None:
    fail = [False, False, False, False, True] + [False] * 9

    def fragile(state: torch.Tensor, timestep: float, batch: Any) -> torch.Tensor:
        if fail.pop(0):
            raise RuntimeError("out of memory")
        return state * 0.5

    loop, _ = make_loop(model=fragile)
    batch = {"x": torch.zeros(1)}
    assert loop.step(batch, slot=0).rung == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.step(batch, slot=0)
    step = loop.step(batch, slot=0)
    assert (step.rung, step.forwards) == (1, 1)
    assert step.state.item() == pytest.approx(hops(1.0, 1))


def test_start_must_return_a_tensor() -> None:
    loop = CarryLoop(lambda *_: torch.zeros(1), GRID, start=lambda _: None, renoise=ode_renoise(), num_slots=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ParameterError, match="start must return a tensor, got None"):
        loop.step({})


# Re-noising


def test_ode_keeps_the_noise_of_the_state() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 64, generator=generator)
    for timestep, following in zip(GRID, [*GRID[1:], 0.0], strict=True):
        state = (1 - timestep) * clean + timestep * noise
        moved = ode_renoise()(state, clean, timestep, following, None)
        torch.testing.assert_close(moved, (1 - following) * clean + following * noise)


def test_sde_draws_fresh_noise_from_its_generator() -> None:
    clean = torch.ones(4)
    renoise = sde_renoise(generator=torch.Generator().manual_seed(5))
    expected = torch.Generator().manual_seed(5)
    for _ in range(2):
        moved = renoise(torch.full((4,), 99.0), clean, 1.0, 0.25, None)
        torch.testing.assert_close(moved, 0.75 * clean + 0.25 * torch.randn(4, generator=expected))
    before = torch.get_rng_state()
    renoise(clean, clean, 1.0, 0.25, None)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("style", [sde_renoise, ode_renoise])
def test_other_schedules_and_tensor_timesteps(style: Callable[..., Any]) -> None:
    def variance_preserving(timestep: Any) -> tuple[Any, Any]:
        angle = torch.as_tensor(timestep) * math.pi / 2
        return torch.cos(angle), torch.sin(angle)

    state = variance_preserving(0.5)[0] * torch.ones(3)
    for schedule in (variance_preserving, rectified_flow):
        moved = style(schedule)(state, torch.ones(3), torch.tensor(0.5), torch.tensor(0.0), None)
        torch.testing.assert_close(moved, torch.ones(3))


def test_ode_refuses_a_rung_without_noise() -> None:
    for grid in ([0.0, 1.0], [1.0, 0.0, 0.0], torch.tensor([1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.5])):
        with pytest.raises(ParameterError, match=r"sigma is 0 at timestep .*0"):
            make_loop(grid=grid)
    with pytest.raises(ParameterError, match=r"sigma is 0 at timestep 0\.0"):
        ode_renoise()(torch.zeros(1), torch.zeros(1), 0.0, 1.0, None)
    for grid in ([1.0, 0.0], torch.tensor([1.0, 0.0])):  # nothing follows the last rung
        loop, _ = make_loop(grid=grid)
        assert all(step.state.isfinite().all() for step in walk(loop, 5))
