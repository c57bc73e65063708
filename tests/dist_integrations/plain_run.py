"""Plain loops on several processes: DDP with and without no_sync, FSDP2."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from dist_integrations.common import LENGTHS, Rows, TokenModel, answer, collate, full_gradient, rows_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.torchdata import resume

SLOTS = 3


def ddp():
    return DistributedDataParallel(TokenModel())


def fsdp():
    model = TokenModel()
    fully_shard(model.head)
    return fully_shard(model)


def gradient(model, weighted=True, defer=True):
    """Of the first step, accumulated over the slots and averaged over the ranks."""
    sampler = GPUBatchRebalanceSampler(LENGTHS, 15, grad_accum=SLOTS)
    step = sampler.indices(0).tolist()
    tokens = sum(LENGTHS[i] for i in step)
    loader = iter(DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate))
    for slot in range(SLOTS):
        batch = next(loader)
        weight = microbatch_weight(int((batch["labels"] != -100).sum()), tokens, dp_size=dist.get_world_size())
        wait = defer and slot < SLOTS - 1
        context = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel):
            context = model.no_sync() if wait else context
        else:
            model.set_requires_gradient_sync(not wait)
        with context:
            (model(**batch)["loss"] * (weight if weighted else 1 / SLOTS)).backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, torch.distributed.tensor.DTensor):
            parameter.grad = parameter.grad.full_tensor()
    wanted = full_gradient(TokenModel(), step)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return float((found - wanted).abs().max() / wanted.abs().max())


def epochs():
    """What this rank sees in three epochs of a loader with workers."""
    sampler = GPUBatchRebalanceSampler(LENGTHS, 15, grad_accum=SLOTS, drop_last=False)
    loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=2, persistent_workers=True)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found.append([rows_of(batch["input_ids"]) for batch in loader])
    return found


def stateful():
    """Three epochs of a StatefulDataLoader, and the rest of the second from the state behind 3 micro-batches."""
    found = {"epochs": []}
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, grad_accum=2)
    loader = StatefulDataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found["epochs"].append([])
        for number, batch in enumerate(loader):
            found["epochs"][-1].append(rows_of(batch["input_ids"]))
            if (epoch, number) == (1, 2):
                state = loader.state_dict()
    sampler = GPUBatchRebalanceSampler(LENGTHS, 12, grad_accum=2)
    loader = StatefulDataLoader(Rows(), batch_sampler=sampler, collate_fn=collate, num_workers=2)
    found["epoch"] = resume(loader, state)
    found["rest"] = [rows_of(batch["input_ids"]) for batch in loader]
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {
        "no_sync": gradient(ddp()),
        "sync": gradient(ddp(), defer=False),
        "unweighted": gradient(ddp(), weighted=False),
        "epochs": epochs(),
        "stateful": stateful(),
    }
    if torch.__version__ >= "2.7":  # which FSDP2 needs on CPUs
        found |= {"fsdp2 deferred": gradient(fsdp()), "fsdp2": gradient(fsdp(), defer=False)}
    answer(sys.argv[1], dist.get_rank(), found)
    dist.destroy_process_group()
