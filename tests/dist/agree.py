"""Scenarios in which ranks share plans: `torchrun agree.py FOLDER SCENARIO ...`; each rank writes what it found."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from gpusampler import CostModel, DistributedError, GPUBatchRebalanceSampler, PlanGroup, from_device_mesh
from helpers import half_square

LENGTHS = np.random.default_rng(0).integers(1, 512, 1003)
Sampler = GPUBatchRebalanceSampler


def alone(sampler: Sampler) -> list[list[int]]:
    """What a sampler without communication yields in the same place."""
    twin = Sampler(
        sampler.lengths,
        sampler.effective_batch_size,
        sampler.dp_size,
        sampler.grad_accum,
        sampler.shuffle,
        sampler.seed,
        sampler.rank,
        sampler.drop_last,
        cost=sampler.partition.cost,
        max_tokens=sampler.partition.max_tokens,
        sync=sampler.partition.sync,
        process_group=None,
    )
    twin.set_epoch(sampler.epoch)
    return list(twin)


def caught(sampler: Sampler) -> str:
    """The error of an iteration, with its class; empty if there is none."""
    try:
        list(sampler)
    except (DistributedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resources() -> list[int]:
    """Open files, operating system threads and process groups of this process."""
    gc.collect()
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")] + [
        len(dist.distributed_c10d._world.pg_map)
    ]


@contextmanager
def slow_planning(seconds: float) -> Iterator[None]:
    """Make planning take so long a chunk, where a sampler plans here."""
    plan = Sampler._plan_chunk

    def slow(self: Sampler, *place: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return plan(self, *place, **named)

    Sampler._plan_chunk = slow
    try:
        yield
    finally:
        Sampler._plan_chunk = plan


def plans(rank: int, world: int) -> dict[str, Any]:
    """Guarantees 1 to 3: several epochs and options, plans of the root beside this rank's own."""
    found = []
    for options in (
        {"grad_accum": 2, "plan_ahead": 3},
        {"drop_last": False, "sync": "step", "max_tokens": 20_000, "grad_accum": 3},
        {"shuffle": False, "cost": CostModel(alpha=1e-3, intercept=5.0), "plan_ahead": 1},
        {"cost": CostModel(cost_fn=half_square), "plan_ahead": 2, "seed": 5},
    ):
        sampler = Sampler(LENGTHS, 64, **options)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            got = list(sampler)
            found.append({"yields": got, "same": got == alone(sampler), "len": len(sampler)})
        stats = sampler.stats()
        found[-1]["stats"] = {**vars(stats), "chunk_samples": 64 * min(sampler.plan_ahead, 15)}
    return {"runs": found}


def state(rank: int, world: int) -> dict[str, Any]:
    """L45, guarantee 6: exact at any micro-batch, other layouts between steps, refusals on all ranks."""
    sampler = Sampler(LENGTHS, 64, grad_accum=2, plan_ahead=4)
    full = list(sampler)
    exact = []
    for taken in (1, 7, 8, 29):
        iterator = iter(sampler)
        head = list(itertools.islice(iterator, taken))
        resumed = Sampler(LENGTHS, 64, grad_accum=2, plan_ahead=4)
        resumed.load_state_dict(sampler.state_dict())
        exact.append(head + list(resumed) == full)
    saved = sampler.state_dict(consumed=10)
    wide = Sampler(LENGTHS, 64, dp_size=1, grad_accum=4, rank=0)
    wide.load_state_dict(saved)
    rest = list(wide)
    only_root = Sampler(LENGTHS, 64, grad_accum=2)
    if rank == 0:
        only_root.load_state_dict(saved)
    differ = Sampler(LENGTHS, 64, grad_accum=2)
    differ.load_state_dict(sampler.state_dict(consumed=10 + 2 * rank))
    epochs = Sampler(LENGTHS, 64, grad_accum=2)
    epochs.set_epoch(rank)
    errors = [caught(each) for each in (only_root, differ, epochs)]
    epochs.set_epoch(5)
    return {
        "exact": exact,
        "taken": [sample for micro_batch in full[:10] for sample in micro_batch],
        "rest": [sample for micro_batch in rest for sample in micro_batch],
        "errors": errors,
        "again": list(epochs) == alone(epochs),
    }


def generators(rank: int, world: int) -> list[list[int]]:
    """L48: whatever the global generators of a rank hold."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    return list(Sampler(range(5, 17), 4, seed=None))


def differences(rank: int, world: int) -> dict[str, str]:
    """Guarantee 8: what differs is named on all ranks, before the first micro-batch."""
    odd = rank == world - 1
    changed = LENGTHS.copy()
    changed[17] += odd
    cases: dict[str, dict[str, Any]] = {
        "lengths": {"lengths": changed},
        "count": {"lengths": LENGTHS[: 1003 - odd]},
        "seed": {"seed": 3 + odd},
        "cost": {"cost": CostModel(alpha=1e-4 * (1 + odd))},
        "cost_fn": {"cost": CostModel(cost_fn=half_square if odd else lambda n: n)},
        "max_tokens": {"max_tokens": 90_000 - odd},
        "grad_accum": {"grad_accum": 2 + odd},
        "sync": {"sync": "step" if odd else "microbatch"},
        "plan_ahead": {"plan_ahead": 3 + odd},
        "shuffle": {"shuffle": not odd},
        "rank": {"rank": 0},
    }
    return {name: caught(Sampler(**{"lengths": LENGTHS, "effective_batch_size": 64, **c})) for name, c in cases.items()}


def failing(rank: int, world: int) -> dict[str, Any]:
    """Planning fails on the root, at once and in a later chunk; a rank fails before the first."""
    found: dict[str, Any] = {}
    plan = Sampler._plan_chunk
    for bad in (0, 6):

        def fail(self: Sampler, epoch: int, step: int, *more: Any, bad: int = bad, **named: Any) -> Any:
            if step == bad:
                raise ZeroDivisionError(f"no plan for step {step}, \u00e9t\u00e9")
            return plan(self, epoch, step, *more, **named)

        Sampler._plan_chunk = fail
        try:
            sampler = Sampler(LENGTHS, 64, plan_ahead=2)
            iterator = iter(sampler)
            taken = 0
            try:
                for _ in iterator:
                    taken += 1
            except DistributedError as error:
                cause = type(error.__cause__).__name__
                found[str(bad)] = [taken, str(error), cause, len(list(iterator))]
        finally:
            Sampler._plan_chunk = plan
        found[f"{bad} again"] = list(sampler) == alone(sampler)
    capped = Sampler(LENGTHS, 64, max_tokens=20_000, drop_last=False)
    if rank == world - 1:
        capped._check_cap = lambda epoch: (_ for _ in ()).throw(ValueError("this rank cannot"))  # type: ignore[method-assign]
        capped._cap_error = lambda epoch: ValueError("this rank cannot")  # type: ignore[method-assign]
    found["one"] = caught(capped)
    broken = Sampler(LENGTHS, 64, cost=CostModel(cost_fn=half_square))
    if rank == 0:
        broken.partition = dataclasses.replace(broken.partition, cost=CostModel(cost_fn=no_table))
    found["cost"] = caught(broken)
    return found


def no_table(lengths: torch.Tensor) -> torch.Tensor:
    """A cost that fails from some time on."""
    raise ValueError("the table of costs is gone")


def slow_root(rank: int, world: int) -> dict[str, Any]:
    """Planning a chunk takes longer than the timeout; the root is alive."""
    lengths = np.arange(1, (1 << 13) * 7 + 6)  # chunks of 2, 4 and 1 steps, and the tail
    sampler = Sampler(lengths, 1 << 13, process_group=PlanGroup(timeout=0.8), plan_ahead=16, drop_last=False)
    with slow_planning(1.7):
        began = time.monotonic()
        got = list(sampler)
    stats = sampler.stats()
    return {
        "same": got == alone(sampler),
        "seconds": time.monotonic() - began,
        "waits": stats.waits,
        "longest": stats.max_wait_seconds,
        "messages": stats.messages,
    }


def skewed_loaders(rank: int, world: int) -> dict[str, Any]:
    """Each rank's loader prefetches differently, while every step ends in a collective of all."""
    found = []
    for leader in range(2):
        workers = 4 if rank == leader else rank % 2
        options = {"num_workers": workers, "prefetch_factor": 5} if workers else {}
        for seconds in (0.0, 0.05):
            sampler = Sampler(LENGTHS, 32, grad_accum=2, plan_ahead=1, process_group=PlanGroup(timeout=20.0))
            got = []
            with slow_planning(seconds):
                for batch in DataLoader(range(1003), batch_sampler=sampler, collate_fn=list, **options):
                    dist.all_reduce(torch.ones(1))
                    got.append(batch)
            found.append(got == alone(sampler))
    return {"same": found}


def unknown_skew(rank: int, world: int) -> dict[str, Any]:
    """A consumer that nothing is known of takes micro-batches ahead on one rank only; then the sampler is told."""
    found: dict[str, Any] = {}
    ahead = 12 if rank else 0
    for told in (False, True):
        options = PlanGroup(timeout=2.0, loader_ahead=ahead if told else None)
        sampler = Sampler(LENGTHS, 32, plan_ahead=1, process_group=options)
        iterator, got, error, total = iter(sampler), [], "", len(sampler)
        began = time.monotonic()
        with slow_planning(0.01):
            for step in range(total):
                try:
                    while not error and len(got) < min(step + ahead + 1, total):
                        got.append(next(iterator))
                except DistributedError as problem:
                    error, seconds = str(problem), time.monotonic() - began
                dist.all_reduce(torch.ones(1))
        found[str(told)] = {"error": error, "seconds": seconds if error else 0.0, "same": got == alone(sampler)}
    return found


def dropped(rank: int, world: int) -> dict[str, Any]:
    """Iterations left early, at the same micro-batch and at others, and a new one each time."""
    sampler = Sampler(LENGTHS, 32, grad_accum=2, plan_ahead=2)
    whole = alone(sampler)
    found = []
    for taken in (0, 1, 3, 4, 5, 17, 5 + 2 * (rank % 2), 60):  # the seventh of a chunk of four posts a message
        iterator = iter(sampler)
        head = list(itertools.islice(iterator, taken))
        if taken % 2:
            del iterator
        found.append([taken, head == whole[:taken], list(sampler) == whole])
    older, newer = iter(sampler), iter(sampler)
    next(older)
    next(newer)
    try:
        list(older)
        message = ""
    except DistributedError as error:
        message = str(error)
    return {"found": found, "older": message, "newer": len(list(newer))}


def left_behind(rank: int, world: int) -> dict[str, Any]:
    """The root leaves while the others want a chunk that it has not sent: an error on all; another sampler works."""
    sampler = Sampler(LENGTHS, 32, plan_ahead=1, process_group=PlanGroup(timeout=2.0))
    began = time.monotonic()
    errors = []
    with slow_planning(0.5):
        for _ in range(2):
            try:
                for _ in itertools.islice(sampler, 1 if rank == 0 else 4):
                    pass
            except DistributedError as error:
                errors.append(str(error))
    seconds = time.monotonic() - began
    dist.barrier()
    other = Sampler(LENGTHS, 32)
    return {"errors": errors, "seconds": seconds, "other": list(other) == alone(other)}


def stuck(rank: int, world: int) -> list[Any]:
    """One rank, then another, stops iterating without a word; the others hear of it within the timeout."""
    found = []
    for who in range(2):
        sampler = Sampler(range(1, 2001), 8, plan_ahead=1, process_group=PlanGroup(timeout=2.0))
        error, steps, began = "", 0, 0.0
        try:
            for _ in itertools.islice(sampler, 20 if rank == who else None):
                steps += 1
                began = time.monotonic()
                time.sleep(0.005)
        except DistributedError as problem:
            error = str(problem)
        found.append([steps, error, time.monotonic() - began])
        dist.barrier()
    return found


def leaks(rank: int, world: int) -> dict[str, Any]:
    """Samplers made and dropped, threads and groups counted."""

    def once() -> None:
        sampler = Sampler(LENGTHS, 64, plan_ahead=2)
        next(iter(sampler))
        list(sampler)

    once()
    before = resources()
    for _ in range(8):
        once()
    closed = Sampler(LENGTHS, 64)
    list(closed)
    open_ = resources()
    closed.close()
    after = resources()
    again = list(closed) == alone(closed)
    closed.close()
    planning = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpusampler")]
    return {"before": before, "open": open_, "after": after, "again": again, "planning": planning}


def silent(rank: int, world: int) -> dict[str, Any]:
    """None: no communication, so that one rank may iterate alone."""
    groups = len(dist.distributed_c10d._world.pg_map)
    sampler = Sampler(LENGTHS, 64, process_group=None, dp_size=world, rank=rank)
    count = len(list(sampler)) if rank == 0 else 0
    return {"count": count, "groups": len(dist.distributed_c10d._world.pg_map) - groups, **vars(sampler.stats())}


def interleaved(rank: int, world: int) -> dict[str, Any]:
    """L08: DDP training whose gradient all-reduces interleave with broadcasts; 500 steps, several chunks under way."""
    steps = 500
    lengths = np.random.default_rng(1).integers(1, 64, steps * 16)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sampler = Sampler(lengths, 16, plan_ahead=2)
    count, groups = 0, []
    for micro_batch in sampler:
        optimizer.zero_grad()
        model(torch.tensor(lengths[micro_batch], dtype=torch.float32)[:, None]).square().mean().backward()
        optimizer.step()
        count += 1
    agreement = sampler._agreement
    assert agreement is not None
    groups = [agreement._plans, agreement._control]
    weights = [float(parameter.detach().sum()) for parameter in model.parameters()]
    return {
        "steps": count,
        "own": all(group is not dist.group.WORLD for group in groups) and groups[0] is not groups[1],
        "weights": weights,
        "stats": vars(sampler.stats()),
    }


def subgroup(rank: int, world: int) -> dict[str, Any]:
    """L07: only ranks 2 and 3 of 4 share plans; their root is 2, not 0; tensors stay on the CPU with gloo."""
    group = dist.new_group([2, 3])
    if rank < 2:
        try:
            Sampler(LENGTHS, 64, process_group=dist.new_group([rank], use_local_synchronization=True))
            return {"alone": len(list(Sampler(LENGTHS, 64, process_group=None)))}
        finally:
            dist.barrier()
    sampler = Sampler(LENGTHS, 64, process_group=group)
    sent: list[list[Any]] = []
    broadcast = dist.broadcast

    def record(tensor: torch.Tensor, src: int, **options: Any) -> Any:
        members, here = dist.get_process_group_ranks(options["group"]), threading.current_thread().name
        sent.append([str(tensor.device), str(tensor.dtype), src, members, here])
        return broadcast(tensor, src=src, **options)

    dist.broadcast = record  # what is recorded is the real broadcast
    try:
        got = list(sampler)
        for _ in range(3):  # groups of a part of the world, again and again
            sampler.close()
            got = list(sampler) if got == alone(sampler) else []
    finally:
        dist.broadcast = broadcast
        dist.barrier()
    place = [sampler.dp_size, sampler.rank]
    return {"sent": sent, "same": got == alone(sampler), "place": place, "plan": sampler.stats().plan_seconds > 0}


def mesh(rank: int, world: int) -> dict[str, Any]:
    """L53: tensor-parallel peers train on the same rows, data-parallel ranks on different ones."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp_size, dp_rank = from_device_mesh(device_mesh, "dp")
    sampler = Sampler(LENGTHS, 64, dp_size, 2, rank=dp_rank)
    got = list(sampler)
    whole = from_device_mesh(device_mesh, ("dp", "tp"))
    errors = []
    for make in (
        lambda: from_device_mesh(device_mesh, "cp"),
        lambda: from_device_mesh(device_mesh, ()),
        lambda: Sampler(LENGTHS, 64, 3, rank=0),
        lambda: Sampler(LENGTHS, 64, 2),
    ):
        try:
            make()
        except ValueError as error:
            errors.append(str(error))
    return {"place": [dp_size, dp_rank], "yields": got, "same": got == alone(sampler), "whole": whole, "errors": errors}


def main(scenarios: dict[str, Any]) -> None:
    """Run those named on the command line, one after another, and write what each returned."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    own, size = dist.get_rank(), dist.get_world_size()
    answer = {}
    for name in names:
        start = time.monotonic()
        answer[name] = scenarios[name](own, size)
        answer[name + "_seconds"] = time.monotonic() - start
        dist.barrier()
    (folder / f"{own}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
