"""Shared plans on a CUDA device: pinned copies, a side stream and NCCL, beside captured training steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpusampler import GPUBatchRebalanceSampler
from gpusampler.agree import Agreement
from gpusampler.broadcast import Channel, Message, Status, message_size, pack
from gpusampler.group import PlanGroup
from gpusampler.pipeline import Chunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = np.random.default_rng(0).integers(1, 512, 4096)


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl"])
def one_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one process over NCCL, in which samplers communicate all the same."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(PlanGroup, "resolve", lambda self: None if self.group is None else dist.group.WORLD)
    yield
    dist.destroy_process_group()


def samplers(**options: Any) -> list[GPUBatchRebalanceSampler]:
    """One that shares plans and one that does not."""
    return [
        GPUBatchRebalanceSampler(LENGTHS, 32, 1, 2, rank=0, plan_ahead=2, process_group=group, **options)
        for group in (PlanGroup(timeout=30.0, max_ctas=1), None)
    ]


@pytest.mark.usefixtures("one_rank")
def test_L07_plans_are_sent_from_the_local_device_through_pinned_buffers() -> None:
    agreement = Agreement(dist.group.WORLD, PlanGroup(timeout=30.0, max_ctas=1))
    assert agreement.device == torch.device("cuda", torch.cuda.current_device())
    agreement.begin({"dp_size": 1}, rank=0, ahead=0, error=None)
    for dtype in (torch.int32, torch.int64):
        channel = agreement.channel(message_size(4, 32, 2, dtype), dtype, slots=3)
        assert all(slot.host.is_pinned() and slot.device.is_cuda for slot in channel._slots)
        for number in range(10):
            samples = np.arange(128).reshape(4, 32) + number
            message = Message(Status.CHUNK, 1, 0, Chunk(number, samples, np.tile([16, 32], (4, 1))))
            posted = channel.post(lambda out, message=message: pack(message, out))
            got = channel.receive(posted)
            assert got.chunk is not None
            assert got.chunk.samples.tolist() == samples.tolist()
    agreement.close()


def test_what_arrives_on_the_device_is_what_is_read() -> None:
    """The receiving side of a copy, without a second rank: only the device has the message, the host's is poisoned."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        channel = Channel(dist.group.WORLD, 0, device, message_size(4, 32, 2, torch.int32), torch.int32, 3, 30.0)
        channel._sends = False  # copy back, as a receiver does
        slot = channel._slots[0]
        samples = np.arange(128).reshape(4, 32)
        message = Message(Status.CHUNK, 1, 0, Chunk(0, samples, np.tile([16, 32], (4, 1))))
        sent = torch.empty(slot.host.shape, dtype=slot.host.dtype)
        pack(message, sent.numpy())
        slot.device.copy_(sent)
        slot.host.fill_(-1)
        torch.cuda.synchronize()
        got = channel.receive(channel.post(None))
        assert got.chunk is not None
        assert got.chunk.samples.tolist() == samples.tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sampler_over_nccl_yields_what_it_yields_alone() -> None:
    shared, alone = samplers()
    for epoch in range(3):
        shared.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert list(shared) == list(alone)
    stats = shared.stats()
    assert stats.chunks == 3 * 64
    assert stats.messages >= stats.chunks
    shared.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_next_does_not_synchronise_the_device() -> None:
    shared, alone = samplers()
    iterator, expected = iter(shared), iter(alone)
    assert next(iterator) == next(expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = [next(iterator) for _ in range(60)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        del iterator
        shared.close()
    assert taken == [next(expected) for _ in range(60)]


@pytest.mark.usefixtures("one_rank")
def test_a_captured_training_step_runs_beside_the_planner() -> None:
    shared, alone = samplers()
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.zeros(32, 64, device="cuda")
    iterator, expected = iter(shared), iter(alone)
    assert next(iterator) == next(expected)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the planning thread may be at work during the capture
        loss = step()
    for micro_batch, other in zip(iterator, expected, strict=True):
        assert micro_batch == other
        batch[: len(micro_batch)].fill_(len(micro_batch))
        graph.replay()
    assert bool(torch.isfinite(loss))
    shared.close()
