"""What a carry saves: a toy diffusion model distilled with full walks and with carried ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gpusampler.carry import CarryLoop, ode_renoise


class Denoiser(nn.Module):
    """A clean prediction for points in the plane, from the noisy point, the time and one of four classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.label = nn.Embedding(4, 8)
        self.layers = nn.Sequential(nn.Linear(11, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, timestep: float | torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        time = torch.as_tensor(timestep, dtype=x.dtype).expand(len(x), 1)
        return self.out(self.layers(torch.cat([x, time, self.label(label)], dim=1)))  # type: ignore[no-any-return]


RUNGS = [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
UPDATES, ROUNDS, SIZE = 250, 2, 128


def labels(generator: torch.Generator, size: int = SIZE) -> dict[str, torch.Tensor]:
    return {"label": torch.randint(4, (size,), generator=generator)}


def train_teacher() -> Denoiser:
    """A diffusion model of four clusters, trained by regression on noised data."""
    generator = torch.Generator().manual_seed(1)
    teacher = Denoiser(64)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(300):
        label = labels(generator, 256)["label"]
        angle = label * (math.pi / 2)
        centre = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
        clean = centre + 0.3 * torch.randn(256, 2, generator=generator)
        time = torch.rand(256, 1, generator=generator)
        noisy = (1 - time) * clean + time * torch.randn(256, 2, generator=generator)
        loss = (teacher(noisy, time, label) - clean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.requires_grad_(False)


class Distillation:
    """A student that learns the teacher's prediction on the states of its own walk."""

    def __init__(self, teacher: Denoiser) -> None:
        torch.manual_seed(2)
        self.teacher, self.student = teacher, Denoiser(32)
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=3e-3)
        self.generator = torch.Generator().manual_seed(3)
        self.forwards = 0

    def predict(self, state: torch.Tensor, timestep: float, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.forwards += 1
        return self.student(state, timestep, batch["label"])  # type: ignore[no-any-return]

    def start(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.randn(len(batch["label"]), 2, generator=self.generator)

    def loss(self, state: torch.Tensor, timestep: float, batch: Any, pred: torch.Tensor) -> torch.Tensor:
        return (pred - self.teacher(state, timestep, batch["label"])).square().mean()

    def full_walk(self, target: int) -> torch.Tensor:
        """The way without a carry: the whole grid for one state to learn from."""
        batch = labels(self.generator)
        state = self.start(batch)
        for rung, timestep in enumerate(RUNGS):
            with torch.set_grad_enabled(rung == target):
                pred = self.predict(state, timestep, batch)
            if rung == target:
                found = self.loss(state, timestep, batch, pred)
            if rung + 1 < len(RUNGS):
                state = ode_renoise()(state, pred.detach(), timestep, RUNGS[rung + 1], batch)
        return found

    def train(self, one_loss: Callable[[], torch.Tensor]) -> None:
        for _ in range(UPDATES):
            self.optimizer.zero_grad()
            for _ in range(ROUNDS):
                (one_loss() / ROUNDS).backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over all rungs of fresh walks."""
        generator = torch.Generator().manual_seed(4)
        batch = labels(generator, 2048)
        state = torch.randn(2048, 2, generator=generator)
        total = 0.0
        for rung, timestep in enumerate(RUNGS):
            pred = self.student(state, timestep, batch["label"])
            total += self.loss(state, timestep, batch, pred).item() / len(RUNGS)
            if rung + 1 < len(RUNGS):
                state = ode_renoise()(state, pred, timestep, RUNGS[rung + 1], batch)
        return total


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations are slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_distillation_reaches_the_loss_of_full_walks_at_an_eighth_of_the_forwards() -> None:
    teacher = train_teacher()
    full, carried = Distillation(teacher), Distillation(teacher)
    untrained = full.evaluate()
    targets = torch.randint(len(RUNGS), (UPDATES * ROUNDS,), generator=torch.Generator().manual_seed(5)).tolist()
    full.train(lambda: full.full_walk(targets.pop()))
    loop = CarryLoop(carried.predict, RUNGS, start=carried.start, renoise=ode_renoise(), num_slots=ROUNDS)

    def one_loss() -> torch.Tensor:
        step = loop.step(labels(carried.generator))
        return carried.loss(step.state, step.timestep, step.raw_batch, step.pred)

    carried.train(one_loss)
    assert full.forwards == UPDATES * ROUNDS * len(RUNGS) == 4000
    assert carried.forwards == loop.forwards == UPDATES * ROUNDS + ROUNDS * (len(RUNGS) - 1) == 514
    full_loss, carried_loss = full.evaluate(), carried.evaluate()
    print(f"loss untrained {untrained:.4f}, full walks {full_loss:.5f}, carried {carried_loss:.5f}")
    assert full_loss < untrained / 50
    assert carried_loss < 1.25 * full_loss
