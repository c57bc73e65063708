"""The walk as a whole: order of rungs, forwards, batches, sizes, resume, gradients, and what it saves in training."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpusampler.carry import CarryLoop, CarryStep, ode_renoise, rectified_flow, sde_renoise, snapshot_raw_batch
from gpusampler.errors import ParameterError

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
    # slot 0 begins a round later than the others and so one rung further on
    assert [step.rung for step in steps] == [1, 2, 1, 2, 3, 2, 3]


# Sizes that change under a balancing sampler


def test_a_changed_batch_size_without_ids_is_refused_with_both_sizes() -> None:
    loop, calls = make_loop(num_slots=2)
    loop.step({"x": torch.zeros(3)})
    loop.step({"x": torch.zeros(5)})
    before = len(calls)
    with pytest.raises(ParameterError, match="slot 0 carries a batch of 3 samples and the new one has 5"):
        loop.step({"x": torch.zeros(5)})
    with pytest.raises(ParameterError, match="carries a batch of 3 samples and the new one has 1"):
        loop.step({"x": torch.zeros(1)})  # 1 would broadcast
    assert len(calls) == before
    assert loop.step({"x": torch.zeros(3)}).state.shape == (3,)


def test_with_ids_a_slot_keeps_its_samples_whatever_the_new_size() -> None:
    loop, _ = make_loop(num_slots=2)
    plan = [[4, 9, 2], [7], [0], [3, 1, 5, 8], [6, 10], [11], [12, 13], [14], [15], [16]]
    steps = [loop.step({"x": torch.tensor(ids, dtype=torch.float32)}, sample_ids=ids) for ids in plan]
    # slot 0 walks rungs 0 1 2 3 with its first batch; slot 1 starts on rung 1 and is done a call earlier
    assert [step.sample_ids for step in steps[::2]] == [(4, 9, 2)] * 4 + [(15,)]
    assert [step.sample_ids for step in steps[1::2]] == [(7,)] * 3 + [(14,)] * 2
    for step in steps:
        assert step.raw_batch["x"].tolist() == list(step.sample_ids or ())
        assert step.state.shape == step.pred.shape == step.raw_batch["x"].shape


def test_ids_have_to_come_with_the_first_batch_too() -> None:
    loop, _ = make_loop()
    loop.step({"x": torch.zeros(2)})
    with pytest.raises(ParameterError, match="2 samples and the new one has 1"):
        loop.step({"x": torch.zeros(1)}, sample_ids=[7])


def test_ids_of_another_batch_are_refused() -> None:
    loop, _ = make_loop()
    with pytest.raises(ParameterError, match="sample_ids has 1 ids for a batch of 2 samples"):
        loop.step({"x": torch.zeros(2)}, sample_ids=[7])


def test_packed_batches_say_their_size() -> None:
    loop, _ = make_loop(batch_size=lambda batch: len(batch["cu_seqlens"]) - 1)
    step = loop.step({"x": torch.zeros(10), "cu_seqlens": [0, 4, 10]}, sample_ids=torch.tensor([3, 8]))
    assert step.sample_ids == (3, 8)
    with pytest.raises(ParameterError, match="sample_ids has 2 ids for a batch of 3 samples"):
        loop.step({"x": torch.zeros(10), "cu_seqlens": [0, 4, 6, 10]}, sample_ids=[1, 2])


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(2), torch.zeros(4)], 2),
        ({"prompt": "text", "t": torch.tensor(1.0), "x": torch.zeros(4, 2)}, 4),
        ((types.SimpleNamespace(x=torch.zeros(5)), 1), 5),
        ("text", None),
        ({}, None),
    ],
)
def test_sizes_found_in_batches(batch: Any, size: int | None) -> None:
    def one(state: torch.Tensor, timestep: float, raw_batch: Any) -> torch.Tensor:
        return state

    loop = CarryLoop(one, GRID, start=lambda _: torch.zeros(1), renoise=ode_renoise(), num_slots=1)
    loop.step(batch)
    if size is None:
        loop.step(torch.zeros(7))
    else:
        with pytest.raises(ParameterError, match=f"a batch of {size} samples and the new one has 7"):
            loop.step(torch.zeros(7))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": True}, "num_slots"),
        ({"grid": []}, "schedule must have at least one"),
        ({"grid": "1234"}, "schedule"),
        ({"grid": 4}, "schedule"),
        ({"stagger_rank": 1}, "stagger_rank must be at most 0"),
        ({"stagger_groups": 0}, "stagger_groups"),
        ({"interval": 0}, "interval"),
        ({"interval": 2, "owner": "DMD2"}, "DMD2 would never update 2 of the 4 rungs"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"device": "nowhere"}, "device"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loop(**options)


def test_start_must_return_a_tensor() -> None:
    loop = CarryLoop(lambda *_: torch.zeros(1), GRID, start=lambda _: None, renoise=ode_renoise(), num_slots=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ParameterError, match="start must return a tensor, got None"):
        loop.step({})


def test_memory_held_by_a_walk_is_bounded() -> None:
    loop, _ = make_loop(num_slots=2, max_bytes=32)
    for call, batch in zip(range(20), batches(size=2), strict=False):
        loop.step(batch)
        assert loop.carry.memory().total <= 32, call  # two slots, each a state and a batch of two floats
    loop, _ = make_loop(num_slots=2, max_bytes=31)
    loop.step({"x": torch.zeros(2)})
    with pytest.raises(ParameterError, match="above max_bytes=31"):
        loop.step({"x": torch.zeros(2)})


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
    loop, _ = make_loop(grid=[0.0, 1.0])
    with pytest.raises(ParameterError, match=r"sigma is 0 at timestep 0\.0"):
        loop.step({"x": torch.zeros(1)})


# With a loader


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples, dtype=torch.float32), "ids": samples}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_uneven_micro_batches_from_a_real_loader(num_workers: int) -> None:
    grad_accum = 2
    plan = [[0, 1, 2], [3], [4], [5, 6, 7], [8, 9], [10, 11], [12], [13, 14], [15], [16, 17, 18]]
    loader = DataLoader(range(19), batch_sampler=plan, collate_fn=collate, num_workers=num_workers)  # type: ignore[arg-type]
    loop, _ = make_loop(num_slots=grad_accum)
    steps = [loop.step(batch, slot=k % grad_accum, sample_ids=batch["ids"]) for k, batch in enumerate(loader)]
    assert [step.sample_ids for step in steps[::2]] == [(0, 1, 2)] * 4 + [(15,)]
    assert [step.sample_ids for step in steps[1::2]] == [(3,)] * 3 + [(13, 14)] * 2
    assert [step.raw_batch["x"].tolist() for step in steps] == [[float(i) for i in s.sample_ids or ()] for s in steps]


# A distillation


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


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_walk_on_a_gpu_agrees_with_the_cpu() -> None:
    there, _ = make_loop(num_slots=2, device="cuda")
    here, _ = make_loop(num_slots=2)
    for batch in (batch for _, batch in zip(range(12), batches(3), strict=False)):
        on_gpu, on_cpu = there.step(batch), here.step(batch)
        assert (on_gpu.slot, on_gpu.rung, on_gpu.forwards) == (on_cpu.slot, on_cpu.rung, on_cpu.forwards)
        assert on_gpu.state.device.type == on_gpu.raw_batch["x"].device.type == "cuda"
        torch.testing.assert_close(on_gpu.pred.cpu(), on_cpu.pred)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("place", ["cpu", "pinned", "cuda"])
def test_snapshots_to_a_gpu_never_alias(place: str) -> None:
    source = torch.arange(1 << 20, dtype=torch.float32)
    source = source.pin_memory() if place == "pinned" else source.to(place)
    expected = source.cpu().clone()
    kept = snapshot_raw_batch({"x": source[1:]}, "cuda")["x"]
    source.fill_(-1)  # a loader that fills its pinned buffer at once
    assert kept.is_cuda
    assert torch.equal(kept.cpu(), expected[1:])
    back = snapshot_raw_batch({"x": source}, "cpu")["x"]
    assert not back.is_pinned()
    assert back.data_ptr() != source.data_ptr()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_carried_calls_on_a_gpu_do_not_synchronise() -> None:
    loop, _ = make_loop(num_slots=2, grid=torch.tensor(GRID, device="cuda"), device="cuda")
    batch = {"x": torch.zeros(3, device="cuda")}
    loop.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            loop.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
def test_memory_reported_on_a_gpu_is_what_the_allocator_holds() -> None:
    loop, _ = make_loop(num_slots=2, device="cuda", model=lambda state, timestep, batch: state * 0.5)
    size = 1 << 20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        loop.step({"x": torch.zeros(size)})
    assert loop.carry.memory().by_device == {"cuda:0": 16 * size}  # two states and two batches of floats
    assert torch.cuda.memory_allocated() - before == 16 * size
    for _ in range(20):
        loop.step({"x": torch.zeros(size)})
        assert torch.cuda.memory_allocated() - before <= 16 * size
