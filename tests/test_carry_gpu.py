"""The carry on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpusampler.carry import CarryLoop, ode_renoise, snapshot_raw_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GRID = [1.0, 0.75, 0.5, 0.25]


def make_loop(grid: Any = GRID, device: str | None = "cuda") -> CarryLoop:
    """Two slots and a model that halves the state."""
    return CarryLoop(
        lambda state, timestep, batch: state * 0.5,
        grid,
        start=lambda batch: torch.ones_like(batch["x"]),
        renoise=ode_renoise(),
        num_slots=2,
        device=device,
    )


def test_walk_on_a_gpu_agrees_with_the_cpu() -> None:
    there, here = make_loop(), make_loop(device=None)
    for number in range(12):
        batch = {"x": torch.full((3,), float(number))}
        on_gpu, on_cpu = there.step(batch), here.step(batch)
        assert (on_gpu.slot, on_gpu.rung, on_gpu.forwards) == (on_cpu.slot, on_cpu.rung, on_cpu.forwards)
        assert on_gpu.state.device.type == on_gpu.raw_batch["x"].device.type == "cuda"
        torch.testing.assert_close(on_gpu.pred.cpu(), on_cpu.pred)
        for mine in (on_gpu.state, on_gpu.pred, on_gpu.raw_batch["x"]):
            mine.detach().fill_(-1)  # the caller's to change


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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_carried_calls_on_a_gpu_do_not_synchronise() -> None:
    loop = make_loop(torch.tensor(GRID, device="cuda"))
    batch = {"x": torch.zeros(3, device="cuda")}
    loop.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [loop.step(batch) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(step.state.is_cuda for step in steps)


def test_memory_reported_on_a_gpu_is_what_the_allocator_holds() -> None:
    loop = make_loop()
    size = 1 << 20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        loop.step({"x": torch.zeros(size)})
    assert loop.carry.memory().by_device["cuda:0"] == 16 * size  # two states and two batches of floats
    assert torch.cuda.memory_allocated() - before == 16 * size
    for _ in range(20):
        loop.step({"x": torch.zeros(size)})
        assert torch.cuda.memory_allocated() - before <= 16 * size
