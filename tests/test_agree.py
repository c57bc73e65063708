"""What can be seen of agreement in one process: messages, options, coordinates, what carries plans."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpusampler import DistributedError, GPUBatchRebalanceSampler, PlanGroup, PlanStats, from_device_mesh, plan_batches
from gpusampler.agree import Agreement
from gpusampler.broadcast import HEADER, TEXT_BYTES, Message, Status, message_size, pack, unpack
from gpusampler.compose import Composition
from gpusampler.group import transport
from gpusampler.iterate import Spans
from gpusampler.pipeline import Chunk
from gpusampler.plan import Partition


@pytest.fixture
def world() -> Iterator[Any]:
    """Starts one process of a world of a given size that communicates with nobody."""

    def start(size: int, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def chunk(rows: int, size: int, groups: int) -> Chunk:
    samples = np.arange(rows * size, dtype=np.int64).reshape(rows, size)
    ends = np.tile(np.linspace(1, size, groups).astype(np.int32), (rows, 1))
    return Chunk(7, samples, ends)


@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 40),
    groups=st.integers(1, 40),
    dtype=st.sampled_from([np.int32, np.int64]),
    generation=st.integers(0, 1 << 40),
    epoch=st.integers(0, 1 << 40),
)
def test_a_message_is_read_as_it_was_written(
    rows: int, size: int, groups: int, dtype: type, generation: int, epoch: int
) -> None:
    low = (1 << 31) - 1
    sent = chunk(rows, size, min(size, groups))
    buffer = np.full(message_size(rows, size, groups, torch.from_numpy(np.empty(0, dtype)).dtype), -1, dtype=dtype)
    pack(Message(Status.CHUNK, generation, epoch, sent), buffer)
    got = unpack(buffer)
    assert (got.status, got.generation, got.epoch) == (Status.CHUNK, generation & low, epoch & low)
    assert got.chunk is not None
    assert got.chunk.step == 7
    assert got.chunk.samples.tolist() == sent.samples.tolist()
    assert got.chunk.ends.tolist() == sent.ends.tolist()
    buffer[:] = 0  # what was read does not alias the buffer
    assert got.chunk.samples.tolist() == sent.samples.tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("text", ["x", "ParameterError: \u00e9t\u00e9", "long " * 2000])
def test_an_error_is_read_as_it_was_written(dtype: type, text: str) -> None:
    buffer = np.zeros(HEADER + TEXT_BYTES // np.dtype(dtype).itemsize, dtype=dtype)
    pack(Message(Status.FAILED, 1, 0, None, text), buffer)
    assert unpack(buffer).text == text[:TEXT_BYTES].rstrip()


@pytest.mark.parametrize("place", [0, HEADER, HEADER + 3, HEADER + 10])
def test_a_damaged_message_is_refused(place: int) -> None:
    buffer = np.zeros(2000, dtype=np.int32)
    pack(Message(Status.CHUNK, 1, 0, chunk(2, 4, 2)), buffer)
    buffer[place] += 1
    with pytest.raises(DistributedError, match="a plan arrived damaged"):
        unpack(buffer)


def test_a_message_takes_at_most_8_bytes_a_sample() -> None:
    for batch, groups in ((1024, 64), (64, 64), (4096, 256)):
        rows = (1 << 14) // batch
        size = 4 * message_size(rows, batch, groups, torch.int32)
        assert size <= 8 * rows * batch + 4 * HEADER


@pytest.mark.parametrize("plan_ahead", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("samples", "drop_last"), [(8, True), (100, True), (103, False), (3, False)])
def test_chunks_cover_the_rest_of_the_epoch(samples: int, drop_last: bool, plan_ahead: int) -> None:
    composition = Composition(samples, 4, 2, shuffle=False, seed=0, drop_last=drop_last)
    for step in range(composition.steps + 1):
        spans = Spans.cut(step, composition, plan_ahead)
        rows = list(spans)
        assert len(rows) == len(spans)
        assert [i for start, count in rows for i in range(start, start + count)] == list(range(step, composition.steps))
        assert all(1 <= count <= plan_ahead for _, count in rows)
        assert all(composition.size(start) == composition.size(start + count - 1) for start, count in rows)
        assert spans.message_size(torch.int32) == max(
            [message_size(count, composition.size(start), 2, torch.int32) for start, count in rows] or [HEADER + 1024]
        )


@pytest.mark.parametrize(
    ("batch", "steps", "counts"),
    [
        (4096, 300, [4, 8, 16, 32, 64, 88, 88]),
        (4096, 5, [4, 1]),
        (4096, 4, [4]),
        (1 << 14, 9, [1, 2, 4, 2]),
        (1 << 17, 9, [1, 2, 4, 2]),
        (128, 300, [100, 100, 100]),
        (129, 300, [127, 87, 86]),
    ],
)
def test_chunks_of_large_steps_grow_from_a_short_first_one(batch: int, steps: int, counts: list[int]) -> None:
    composition = Composition(batch * steps, batch, 2, shuffle=False, seed=0, drop_last=True)
    assert [count for _, count in Spans.cut(0, composition, plan_ahead=128)] == counts
    assert len(Spans.cut(3, Composition(10**12, 1, 1, shuffle=False, seed=0, drop_last=True), 1)) == 10**12 - 3


def test_chunks_that_grow_are_planned_while_steps_half_as_fast_run() -> None:
    class Slow(GPUBatchRebalanceSampler):
        def _plan_chunk(self, epoch: int, step: int, count: int, partition: Partition) -> Chunk:
            time.sleep(0.004 * count)
            return super()._plan_chunk(epoch, step, count, partition)

    sampler = Slow(np.ones(4096 * 60, dtype=np.int32), 4096)
    for _ in sampler:
        time.sleep(0.012)
    assert sampler.stats().waits == 1
    assert sampler.stats().chunks == 4


def test_L07_the_backend_decides_where_plans_are_sent_from() -> None:
    assert transport("cuda:nccl") == ("cuda", "nccl")
    assert transport("cpu:gloo,cuda:nccl") == (("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo"))
    assert transport("cpu:gloo") == ("cpu", "gloo")
    assert transport("cpu:gloo,cuda:gloo,mps:gloo") == ("cpu", "gloo")
    assert transport("cpu:mpi") == ("cpu", "mpi")


def test_L53_coordinates_in_a_mesh_of_8(world: Any) -> None:
    world(8, 5)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert from_device_mesh(mesh, "dp") == (2, 1)
    assert from_device_mesh(mesh, ("tp",)) == (4, 1)
    assert from_device_mesh(mesh, ("dp", "tp")) == (8, 5)
    assert from_device_mesh(mesh, ("tp", "dp")) == (8, 3)


@pytest.mark.parametrize(
    ("dims", "message"), [("cp", "'cp', the mesh has 'dp', 'tp'"), ((), "got"), (("dp", "dp"), "each once")]
)
def test_L53_dimensions_that_are_not_there(world: Any, dims: Any, message: str) -> None:
    world(8, 5)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=message):
        from_device_mesh(mesh, dims)


def test_L53_parts_are_counted_by_data_parallel_ranks_not_by_the_world(world: Any) -> None:
    world(64, 63)
    sampler = GPUBatchRebalanceSampler(range(1, 1601), 160, 8, rank=7)
    assert sampler.partition.groups == 8
    assert (
        sampler.plan(0).offsets.shape == plan_batches(torch.ones(1, 160, dtype=torch.int64), 8).offsets.shape == (1, 9)
    )


@pytest.mark.parametrize(("size", "dp_size"), [(6, 4), (4, 8), (64, 24)])
def test_L53_sizes_that_do_not_divide(world: Any, size: int, dp_size: int) -> None:
    world(size, 1)
    with pytest.raises(ValueError, match=rf"dp_size={dp_size} does not divide the {size} processes of process_group"):
        GPUBatchRebalanceSampler(range(1, 1001), 64, dp_size, rank=0)
    GPUBatchRebalanceSampler(range(1, 1001), 64, dp_size, rank=0, process_group=None)


def test_a_rank_that_cannot_be_known_is_asked_for(world: Any) -> None:
    world(8, 5)
    with pytest.raises(ValueError, match="rank must be given: dp_size is 2, but process_group has 8 processes"):
        GPUBatchRebalanceSampler(range(1, 1001), 64, 2)
    sampler = GPUBatchRebalanceSampler(range(1, 1001), 64)
    assert (sampler.dp_size, sampler.rank) == (8, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 3}, "process_group must be 'auto', None, a torch.distributed.ProcessGroup or a PlanGroup, got 3"),
        ({"group": "world"}, "process_group must be"),
        ({"timeout": 0.0}, "timeout must be above 0 seconds, got 0"),
        ({"timeout": "1"}, "timeout must be a number"),
        ({"max_ctas": 0}, "max_ctas must be at least 1, got 0"),
        ({"loader_ahead": -1}, "loader_ahead must be at least 0, got -1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanGroup(**options)


def test_one_process_agrees_with_itself_in_silence() -> None:
    for group in ("auto", None, PlanGroup(timeout=3.0)):
        sampler = GPUBatchRebalanceSampler(range(1, 101), 10, 2, rank=1, plan_ahead=2, process_group=group)
        assert len(list(sampler)) == 10
        stats = sampler.stats()
        assert (stats.messages, stats.bytes_broadcast, stats.iterations) == (0, 0, 1)
        assert (stats.chunks, stats.steps) == (5, 10)
        assert stats.plan_seconds > 0
        assert 1 <= stats.waits <= 5
        assert 0 < stats.max_wait_seconds <= stats.wait_seconds
        sampler.close()


def test_stats_are_a_copy() -> None:
    sampler = GPUBatchRebalanceSampler(range(1, 101), 10)
    before = sampler.stats()
    list(sampler)
    assert before == PlanStats()
    assert before.wait_share == 0.0


def test_samplers_with_a_group_can_be_copied_and_say_why_they_cannot_be_pickled(world: Any) -> None:
    world(2, 0)
    sampler = GPUBatchRebalanceSampler(range(1, 101), 10, process_group=PlanGroup(dist.group.WORLD, timeout=5.0))
    assert copy.deepcopy(sampler).process_group is sampler.process_group
    with pytest.raises(TypeError, match="a sampler with a ProcessGroup as process_group cannot be pickled"):
        pickle.dumps(sampler)
    twin = pickle.loads(pickle.dumps(GPUBatchRebalanceSampler(range(1, 101), 10, process_group=PlanGroup(max_ctas=1))))
    assert twin.process_group == PlanGroup(max_ctas=1)


def test_a_process_outside_the_group_is_told(world: Any) -> None:
    world(4, 3)
    with pytest.raises(ValueError, match="process_group must contain this process: new_group gave it no group"):
        GPUBatchRebalanceSampler(range(1, 101), 10, process_group=dist.new_group([0, 1]))


def test_a_sampler_that_took_itself_for_alone_does_not_train_every_rank_on_everything(world: Any) -> None:
    early, told, silent = (
        GPUBatchRebalanceSampler(range(1, 101), 10, **options)
        for options in ({}, {"dp_size": 2, "rank": 1}, {"process_group": None})
    )
    world(2, 1)
    with pytest.raises(ValueError, match=r"dp_size was taken to be 1, as .* was not initialized"):
        next(iter(early))
    assert told.process_group.resolve() is dist.group.WORLD
    assert len(list(silent)) == 10


def test_L53_processes_of_torchrun_without_a_rank_are_not_all_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    guessed, told, placed = (
        GPUBatchRebalanceSampler(range(1, 101), 10, 2, rank=rank, process_group=None) for rank in (None, 0, None)
    )
    with pytest.raises(ValueError, match="rank must be given with dp_size=2, or init_process_group called before"):
        iter(guessed)
    placed.rank = 1
    assert len(list(told)) == len(list(placed)) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_position_survives_a_loader_that_calls_iter_twice(workers: int) -> None:
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    whole = list(sampler)
    sampler.load_state_dict(sampler.state_dict(consumed=5))
    loader = torch.utils.data.DataLoader(range(32), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    assert list(loader) == whole[5:]
    assert list(loader) == whole


def test_a_position_loaded_while_an_iterator_waits_is_kept() -> None:
    sampler = GPUBatchRebalanceSampler(range(1, 33), 4)
    whole = list(sampler)
    waiting = iter(sampler)
    sampler.load_state_dict(sampler.state_dict(consumed=5))
    assert list(itertools.islice(waiting, 2)) == whole[:2]
    assert list(sampler) == whole[5:]


def test_an_agreement_ends_with_the_world(world: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    agreement = Agreement(dist.group.WORLD, PlanGroup(timeout=5.0))
    assert (agreement.ranks, agreement.root, agreement.timeout, agreement.alive) == ([0], 0, 5.0, True)
    assert agreement.begin({"dp_size": 1, "epoch": 0}, rank=0, ahead=3, error=None) == 0
    dist.destroy_process_group()
    assert not agreement.alive
    agreement.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not agreement.alive
