"""Situations that ranks get into by mistake or bad luck: `torchrun trouble.py FOLDER SCENARIO ...`, as in agree.py."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from agree import LENGTHS, Sampler, alone, main, slow_planning
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpusampler import CostModel, PlanGroup, from_device_mesh


def quick() -> PlanGroup:
    """A group that is soon out of patience, where that is to be seen."""
    return PlanGroup(timeout=2.0)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error with the class."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train(sampler: Sampler, stop: int | None = None, **loader: Any) -> list[list[int]]:
    """Micro-batches of a loop with a collective in each step, left at `stop`."""
    got = []
    for batch in DataLoader(range(len(sampler.lengths)), batch_sampler=sampler, collate_fn=list, **loader):
        dist.all_reduce(torch.ones(1))
        got.append(batch)
        if len(got) == stop:
            break
    return got


def kinds(rank: int, world: int) -> bool:
    """The same lengths, of another type on each rank."""
    kind = (LENGTHS.astype(np.int32), LENGTHS.tolist(), torch.from_numpy(LENGTHS), LENGTHS.astype(np.uint16))[rank]
    sampler = Sampler(kind, 64)
    return list(sampler) == alone(sampler)


def reversed_ranks(rank: int, world: int) -> bool:
    """Data-parallel ranks in another order than those of the group; the root is not rank 0."""
    sampler = Sampler(LENGTHS, 64, world, rank=world - 1 - rank, plan_ahead=2)
    return list(sampler) == alone(sampler)


def two_groups(rank: int, world: int) -> list[Any]:
    """Two groups side by side in one world, in different epochs, with collectives of all between."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    sampler = Sampler(LENGTHS, 32, process_group=groups[rank % 2], plan_ahead=1)
    same = []
    for epoch in range(2):
        sampler.set_epoch(epoch + rank % 2)
        same.append(train(sampler) == alone(sampler))
    return [same, sampler.dp_size, sampler.rank]


def meshes(rank: int, world: int) -> dict[str, Any]:
    """Coordinates in a mesh of three dimensions, flattened ones, and what cannot be asked for."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "cp", "dp_shard"))
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    half = DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
    places: dict[str, Any] = {}
    for name, where, dims in (
        ("major", mesh, "dp_replicate"),
        ("both", mesh, ("dp_replicate", "dp_shard")),
        ("turned", mesh, ["dp_shard", "dp_replicate"]),
        ("one", mesh, "cp"),
        ("flat", mesh, "dp"),
        ("flat and one", mesh, ("dp", "cp")),
        ("part", mesh["cp", "dp_shard"], "dp_shard"),
        ("half", half, "dp"),
        ("unknown", mesh, "tp"),
        ("twice", mesh, ("dp_shard", "dp_shard")),
        ("within", mesh, ("dp", "dp_shard")),
        ("none", mesh, ()),
        ("nothing", mesh, None),
        ("number", mesh, 0),
        ("unnamed", DeviceMesh("cpu", [0, 1, 2, 3]), "dp"),
        ("no mesh", "mesh", "dp"),
    ):
        places[name] = outcome(lambda where=where, dims=dims: from_device_mesh(where, dims))
    dp_size, dp_rank = from_device_mesh(mesh, "dp")
    sampler = Sampler(LENGTHS, 64, dp_size, rank=dp_rank)
    places["same"] = list(sampler) == alone(sampler)
    return places


def skew(rank: int, world: int) -> list[bool]:
    """One rank's loader has four workers that prefetch, the other's none: left at one step, resumed, another epoch."""
    loader = {"num_workers": 4, "prefetch_factor": 4} if rank else {}
    same = []
    for samples, batch, plan_ahead in ((1003, 32, 2), (4096 * 14, 4096, None)):  # the latter's chunks grow
        sampler = Sampler(range(1, samples + 1), batch, grad_accum=2, plan_ahead=plan_ahead)
        with slow_planning(0.02):
            for stop in (7, 8):
                head = train(sampler, stop, **loader)
                sampler.load_state_dict(sampler.state_dict())
                same.append(head + train(sampler, **loader) == alone(sampler))
            sampler.set_epoch(1)
            same.append(train(sampler, **loader) == alone(sampler))
    return same


def early_collective(rank: int, world: int) -> str:
    """A collective between `iter(loader)` and the first batch, workers on one rank: the one case that cannot go on."""
    sampler = Sampler(LENGTHS, 64, process_group=quick())
    loader = DataLoader(range(1003), batch_sampler=sampler, collate_fn=list, num_workers=2 * rank)

    def go() -> None:
        iterator = iter(loader)
        dist.all_reduce(torch.ones(1))
        list(iterator)

    error: str = outcome(go)
    if rank:
        dist.all_reduce(torch.ones(1))
    return error


class Deadly(Dataset[int]):
    """Kills the worker that loads the hundredth of its samples."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, i: int) -> int:
        self.count += 1
        if self.count == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return i


def loader_dies(rank: int, world: int) -> list[Any]:
    """A worker of one rank's loader is killed."""
    sampler = Sampler(LENGTHS, 16, plan_ahead=1, process_group=quick())
    data: Any = Deadly() if rank else range(1003)
    began = time.monotonic()
    found = outcome(lambda: list(DataLoader(data, batch_sampler=sampler, collate_fn=list, num_workers=2)))
    return [found, time.monotonic() - began]


def loop_raises(rank: int, world: int) -> list[Any]:
    """One rank's loop raises and is caught; a new sampler works."""
    sampler = Sampler(LENGTHS, 16, plan_ahead=2, process_group=quick())

    def go() -> None:
        for step, _ in enumerate(sampler):
            if rank and step == 10:
                raise ArithmeticError("loss is not finite")

    found = outcome(go)
    other = Sampler(LENGTHS, 16)
    return [found, list(other) == alone(other)]


def state_alone(rank: int, world: int) -> bool:
    """One rank saves while it iterates, the other never does."""
    sampler = Sampler(LENGTHS, 16, plan_ahead=2)
    return all(rank or sampler.state_dict()["consumed"] == count for count, _ in enumerate(sampler, start=1))


def odd_state(rank: int, world: int) -> list[Any]:
    """The state of one rank is of another version."""
    sampler = Sampler(LENGTHS, 16, process_group=quick())
    state = {**sampler.state_dict(consumed=3), "format": 1 + rank}
    refused = outcome(lambda: sampler.load_state_dict(state))
    return [refused, None if rank else outcome(lambda: list(sampler))]


def one_more_epoch(rank: int, world: int) -> list[Any]:
    """One rank begins another epoch."""
    sampler = Sampler(LENGTHS, 64, process_group=quick())
    return [outcome(lambda: len(list(sampler))) for _ in range(1 + rank)]


def stopped(rank: int, world: int) -> list[Any]:
    """SIGSTOP for one rank, as a debugger or a full disk would stop it."""
    others: list[Any] = [None] * world
    dist.all_gather_object(others, os.getpid())
    sampler = Sampler(range(1, 2001), 8, plan_ahead=1, process_group=quick())
    began = 0.0

    def go() -> None:
        nonlocal began
        for step, _ in enumerate(sampler):
            began = time.monotonic()
            time.sleep(0.002)
            if rank == 0 and step == 20:
                os.kill(others[1], signal.SIGSTOP)

    found = [outcome(go), time.monotonic() - began]
    if rank == 0:
        os.kill(others[1], signal.SIGCONT)
    return found


def slow_steps(rank: int, world: int) -> bool:
    """Steps that are longer than the timeout, and not equally long."""
    sampler = Sampler(LENGTHS[:64], 16, plan_ahead=1, process_group=PlanGroup(timeout=1.0))
    got = []
    for micro_batch in sampler:
        time.sleep(1.2 + 0.1 * rank)
        dist.all_reduce(torch.ones(1))
        got.append(micro_batch)
    return got == alone(sampler)


def two_samplers(rank: int, world: int) -> list[Any]:
    """Evaluation within a training epoch; then, which cannot be, a sampler within itself."""
    sampler = Sampler(LENGTHS, 64, plan_ahead=1)
    other = Sampler(LENGTHS[:200], 8, plan_ahead=3)
    same = [list(other) == alone(other) for step, _ in enumerate(sampler) if step % 5 == 0]
    nested = outcome(lambda: [list(sampler) for _ in sampler])
    return [all(same), nested, list(sampler) == alone(sampler)]


def copies(rank: int, world: int) -> list[bool]:
    """A sampler that has iterated, copied and pickled."""
    sampler = Sampler(LENGTHS, 64)
    list(sampler)
    return [list(each) == alone(each) for each in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)))]


def forked(rank: int, world: int) -> list[Any]:
    """A process forked within an iteration: it cannot go on there, dropping it there does no harm."""
    sampler = Sampler(LENGTHS, 16, plan_ahead=2)
    iterator = iter(sampler)
    head = list(itertools.islice(iterator, 5))
    exits = []
    for use in (True, False):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            error = outcome(lambda: list(iterator)) if use else ""
            del iterator, sampler
            gc.collect()
            os._exit(0 if not use or str(error).startswith("RuntimeError: an iteration cannot go on in a") else 1)
        exits.append(os.waitpid(child, 0)[1])
    return [exits, head + list(iterator) == alone(sampler)]


class Within(IterableDataset[list[int]]):
    """Iterates a sampler, wherever it is iterated."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


def in_workers(rank: int, world: int) -> list[Any]:
    """A sampler iterated by the workers of a loader."""
    found = []
    for group in (quick(), None):
        sampler = Sampler(LENGTHS, 64, world, rank=rank, process_group=group)
        loader = DataLoader(Within(sampler), batch_size=None, num_workers=1)
        found.append(outcome(lambda loader=loader: len(list(loader))))
    return found


def cost_replaced(rank: int, world: int) -> list[Any]:
    """A cost model that is replaced within an epoch counts from the next iteration on, in the state too."""
    sampler = Sampler(LENGTHS, 16, grad_accum=2, plan_ahead=1)
    before = alone(sampler)
    iterator = iter(sampler)
    head = list(itertools.islice(iterator, 4))
    sampler.partition = replace(sampler.partition, cost=CostModel(alpha=0.1))
    rest = list(iterator)
    state = sampler.state_dict(consumed=5)
    after = list(sampler)
    return [head + rest == before, state["cost"], after == alone(sampler) != before]


def ended(rank: int, world: int) -> list[Any]:
    """A group, then torch.distributed itself, ended before or within an iteration; then begun anew."""
    group = dist.new_group([0, 1])
    sampler = Sampler(LENGTHS, 64, process_group=group)
    dist.destroy_process_group(group)
    found = [outcome(lambda: list(sampler)), outcome(lambda: Sampler(LENGTHS, 64, process_group=group))]
    sampler = Sampler(LENGTHS, 16, plan_ahead=1)
    iterator = iter(sampler)
    next(iterator)
    dist.barrier()
    dist.destroy_process_group()
    found.append(outcome(lambda: list(iterator)))
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=world)
    return [*found, list(sampler) == alone(sampler)]


if __name__ == "__main__":
    main(globals())
