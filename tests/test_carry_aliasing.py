"""L05: nobody but the carry can change what it holds, whatever model, re-noising, start and caller do in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpusampler.carry import CarryLoop, CarryStep, ode_renoise

GRID = [1.0, 0.75, 0.5, 0.25]


def halve(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
    return state * 0.5 + batch["x"]


def move(state: torch.Tensor, pred: torch.Tensor, timestep: Any, next_timestep: Any, batch: Any) -> torch.Tensor:
    return state + next_timestep * pred


def noise(batch: Any) -> torch.Tensor:
    return torch.ones_like(batch["x"])


def walk(
    model: Any = halve,
    renoise: Any = move,
    start: Any = noise,
    grid: Any = GRID,
    after: Callable[[CarryStep, Any], None] = lambda step, batch: None,
) -> list[tuple[int, list[float], list[float], list[float]]]:
    """Nine calls of two staggered slots: what each reported, before `after` may change what it was given."""
    loop = CarryLoop(model, grid, start=start, renoise=renoise, num_slots=2)
    found = []
    for number in range(9):
        batch = {"x": torch.full((2,), float(number)), "names": ["a"]}
        step = loop.step(batch)
        assert len(step.raw_batch["names"]) == 1
        found.append((step.rung, step.state.tolist(), step.pred.tolist(), step.raw_batch["x"].tolist()))
        after(step, batch)
    return found


EXPECTED = walk()


def change_step(step: CarryStep, batch: Any) -> None:
    step.state.mul_(-3)
    step.pred.detach().fill_(99)
    step.raw_batch["x"].fill_(99)
    step.raw_batch["names"].append("b")
    batch["x"].fill_(99)
    batch["names"].clear()


def test_the_caller_may_change_what_a_step_gives() -> None:
    assert walk(after=change_step) == EXPECTED


def test_a_model_may_work_in_place() -> None:
    def in_place(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        return state.mul_(0.5).add_(batch["x"])

    assert walk(model=in_place) == EXPECTED


def change_batch(batch: Any) -> None:
    batch["x"].mul_(-2)
    batch["names"].append("b")
    batch["extra"] = 1


@pytest.mark.parametrize("by", ["model", "renoise", "start, later"])
def test_a_batch_may_be_changed_by_whom_it_is_given_to(by: str) -> None:
    given: list[Any] = []

    def model(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        assert "extra" not in batch
        pred = halve(state, timestep, batch)
        for other in given:
            change_batch(other)
        if by == "model":
            change_batch(batch)
        return pred

    def renoise(state: torch.Tensor, pred: torch.Tensor, timestep: Any, following: Any, batch: Any) -> torch.Tensor:
        assert len(batch["names"]) == 1
        if by == "renoise":
            change_batch(batch)
        return move(state, pred, timestep, following, batch)

    def start(batch: Any) -> torch.Tensor:
        if by == "start, later":
            given[:] = [batch]
        return noise(batch)

    def after(step: CarryStep, batch: Any) -> None:
        assert "extra" not in step.raw_batch

    assert walk(model=model, renoise=renoise, start=start, after=after) == EXPECTED


def test_a_staggered_walk_gives_every_forward_the_same_batch() -> None:
    def doubles(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        clean = batch["x"] * 1.0
        batch["x"].mul_(2)
        return clean

    loop = CarryLoop(doubles, GRID, start=lambda batch: torch.ones(1), renoise=ode_renoise(), num_slots=4)
    states = [loop.step({"x": torch.full((1,), float(number))}).state.item() for number in range(1, 5)]
    assert states == pytest.approx([1.0, 1.25, 2.0, 3.25])


def test_what_start_changes_is_carried() -> None:
    seen: list[Any] = []

    def start(batch: Any) -> torch.Tensor:
        batch["noise"] = torch.full_like(batch["x"], 7.0)
        batch["x"].add_(100)
        return batch["noise"]

    def model(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        seen.append((batch["x"].item(), batch["noise"].item()))
        return state

    def renoise(state: torch.Tensor, pred: torch.Tensor, timestep: Any, following: Any, batch: Any) -> torch.Tensor:
        seen.append((batch["x"].item(), batch["noise"].item()))
        return state

    loop = CarryLoop(model, [1.0, 0.5], start=start, renoise=renoise, num_slots=2)
    for number in range(6):
        batch = {"x": torch.tensor([float(number)])}
        before = len(seen)
        step = loop.step(batch)
        carried = ([0, 1, 0, 3, 4, 3][number] + 100.0, 7.0)
        assert set(seen[before:]) == {carried}
        assert (step.raw_batch["x"].item(), step.raw_batch["noise"].item()) == carried
        assert batch == {"x": torch.tensor([float(number)])}


def test_a_model_may_keep_and_reuse_its_output() -> None:
    output, given = torch.zeros(2), []

    def static(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        for earlier in given:
            earlier.fill_(-1)
        given.append(state)
        return torch.add(state * 0.5, batch["x"], out=output)

    assert walk(model=static) == EXPECTED


def test_a_renoising_may_work_in_place() -> None:
    def in_state(state: torch.Tensor, pred: torch.Tensor, timestep: Any, following: Any, batch: Any) -> torch.Tensor:
        pred.mul_(following)
        return state.add_(pred)

    assert walk(renoise=in_state) == EXPECTED


def test_a_renoising_may_reuse_its_output() -> None:
    output = torch.zeros(2)

    def static(state: torch.Tensor, pred: torch.Tensor, timestep: Any, following: Any, batch: Any) -> torch.Tensor:
        return torch.add(state, following * pred, out=output)

    assert walk(renoise=static) == EXPECTED


@pytest.mark.parametrize("kind", ["buffer", "parameter", "batch"])
def test_a_start_may_give_what_it_will_use_again(kind: str) -> None:
    buffer = torch.ones(2)
    parameter = nn.Parameter(buffer)

    def start(batch: Any) -> torch.Tensor:
        if kind == "batch":
            batch["noise"] = torch.ones_like(batch["x"])
            return batch["noise"]  # type: ignore[no-any-return]
        buffer.fill_(1)
        return parameter if kind == "parameter" else buffer

    def after(step: CarryStep, batch: Any) -> None:
        buffer.fill_(7)

    def in_place(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        pred = halve(state, timestep, batch)
        batch.get("noise", buffer).fill_(3)
        return pred

    assert walk(model=in_place, start=start, after=after) == EXPECTED


def test_the_grid_stays_as_it_was() -> None:
    grid = torch.tensor(GRID)

    def scales(state: torch.Tensor, timestep: torch.Tensor, batch: Any) -> torch.Tensor:
        timestep.mul_(1000)
        grid.fill_(5)
        return halve(state, timestep, batch)

    assert walk(model=scales, grid=grid, after=lambda step, batch: step.timestep.fill_(3)) == EXPECTED


def test_in_place_renoising_leaves_the_graph_of_the_prediction() -> None:
    weight = nn.Parameter(torch.tensor(0.5))

    def squared(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        return (state * weight).exp()  # keeps its output for the gradient

    def in_place(state: torch.Tensor, pred: torch.Tensor, timestep: Any, following: Any, batch: Any) -> torch.Tensor:
        return pred.mul_(following)

    loop = CarryLoop(squared, GRID, start=noise, renoise=in_place, num_slots=1)
    loop.step({"x": torch.zeros(1)}).pred.sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(torch.tensor(0.5).exp().item())


@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_fails_after_changes_can_be_repeated(calls: int) -> None:
    fail = False

    def fragile(state: torch.Tensor, timestep: Any, batch: Any) -> torch.Tensor:
        if fail:
            state.fill_(-1)
            batch["x"].fill_(-1)
            raise RuntimeError("out of memory")
        return halve(state, timestep, batch)

    def steps() -> list[CarryStep]:
        nonlocal fail
        loop = CarryLoop(fragile, GRID, start=noise, renoise=move, num_slots=1)
        found = [loop.step({"x": torch.ones(2)}) for _ in range(calls)]
        if with_failure:
            fail = True
            with pytest.raises(RuntimeError, match="out of memory"):
                loop.step({"x": torch.ones(2)})
            fail = False
        return [*found, loop.step({"x": torch.ones(2)})]

    with_failure = False
    expected = steps()
    with_failure = True
    for got, want in zip(steps(), expected, strict=True):
        assert (got.rung, got.state.tolist(), got.pred.tolist()) == (want.rung, want.state.tolist(), want.pred.tolist())


def test_each_receiver_of_a_batch_costs_one_copy() -> None:
    copies = []

    class Counted:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def clone(self) -> Counted:
            copies.append(1)
            return Counted(self.x.clone())

        def detach(self) -> Counted:
            return self

        def to(self, device: torch.device) -> Counted:
            return self

    loop = CarryLoop(
        lambda state, timestep, batch: state, [1.0, 0.5], start=lambda batch: batch.x, renoise=move, num_slots=1
    )
    counts = []
    for _ in range(4):
        before = len(copies)
        loop.step(Counted(torch.zeros(2)))
        counts.append(len(copies) - before)
    # start and carry; forward and re-noising of the walk over the grid; forward, re-noising and step
    assert counts == [2 + 2 + 3, 2, 2 + 3, 2]
