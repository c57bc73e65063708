"""accelerate on several processes: coverage, epochs, skipping, resume and gradients."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from dist_integrations.common import (
    LENGTHS,
    Rows,
    TokenModel,
    answer,
    caught,
    collate,
    flat_gradient,
    full_gradient,
    rows_of,
)
from torch.utils.data import DataLoader

from gpusampler import GPUBatchRebalanceSampler, microbatch_weight
from gpusampler.integrations.accelerate import prepare
from gpusampler.streaming import BalancedStream


def make(accelerator, lengths=LENGTHS, batch=8, slots=2, plain=False, **loader):
    """Through `prepare`, or `plain` through accelerate's own, with the sampler registered for checkpoints."""
    sampler = GPUBatchRebalanceSampler(lengths, batch, dp_size=2, grad_accum=slots)  # no rank: preparing gives it
    data = DataLoader(Rows(list(lengths)), batch_sampler=sampler, collate_fn=collate, **loader)
    if not plain:
        return prepare(accelerator, data), sampler
    accelerator.register_for_checkpointing(sampler)
    return accelerator.prepare(data), sampler


def read(loader):
    return [rows_of(batch["input_ids"]) for batch in loader]


def small(rank):
    """L01."""
    found = {}
    for even in (True, False):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        for name, wrap in (("ours", lambda a, x: prepare(a, x)), ("plain", lambda a, x: a.prepare(x))):
            for drop in (True, False):
                sampler = GPUBatchRebalanceSampler(range(10, 26), 8, dp_size=2, rank=rank, drop_last=drop)
                loader = DataLoader(Rows(list(range(10, 26))), batch_sampler=sampler, collate_fn=collate)
                prepared = wrap(accelerator, loader)
                lens = [len(loader), len(prepared)]
                found[f"{name} {drop} {even}"] = {"len": lens, "rows": read(prepared)}
    return found


def gathered():
    """What `gather_for_metrics` leaves of an epoch with a plain `accelerator.prepare`."""
    accelerator = Accelerator(cpu=True)
    sampler = GPUBatchRebalanceSampler(range(1, 16), 8, dp_size=2, rank=0, drop_last=False)
    loader = accelerator.prepare(DataLoader([float(i) for i in range(15)], batch_sampler=sampler))
    return [i for batch in loader for i in accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)]


def epochs(rank):
    """L14, L41: by set_epoch and by accelerate's own count."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = {}
    for name, options in {
        "plain": {},
        "fork": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
        "spawn": {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
        "own prepare": {"plain": True},
        "own prepare, fork": {"plain": True, "num_workers": 2, "persistent_workers": True},
    }.items():
        loader, _ = make(accelerator, **options)
        found[name] = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            found[name].append(read(loader))
    for name, plain in (("counted", False), ("own prepare, counted", True)):
        loader, _ = make(accelerator, plain=plain)
        found[name] = [read(loader) for _ in range(3)]
    return found


def resume(folder, workers, plain=False):
    """L43, L44: stop in epoch 1 behind 3 batches; go on by load_state, by skip_first_batches, and by both."""
    options = {"num_workers": workers, "prefetch_factor": 2} if workers else {}
    options["plain"] = plain
    found = {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, sampler = make(accelerator, **options)
    read(loader)
    loader.set_epoch(1)
    for taken, _ in enumerate(loader, 1):
        if taken == 3:
            break
    found["consumed"] = sampler.state_dict()["consumed"]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # only the first process writes the positions
    for name in ("load", "skip", "both"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader, sampler = make(accelerator, **options)
        if name != "skip":
            accelerator.load_state(folder)
        if name == "skip" or plain:
            loader.set_epoch(1)
        rest = loader if name == "load" else accelerator.skip_first_batches(loader, 3)
        if name == "skip":
            loader.set_epoch(0)
            rest.set_epoch(1)  # reaches the sampler through the loader that skips as well
        iterator = iter(rest)
        batches = [rows_of(next(iterator)["input_ids"])]
        found[f"{name} consumed"] = sampler.state_dict()["consumed"]
        batches += [rows_of(batch["input_ids"]) for batch in iterator]
        found[name] = batches
        loader.set_epoch(2)
        found[f"{name} next"] = read(loader)
    return found


def stateful(folder):
    """Resume behind 3 batches of epoch 1 where accelerate uses torchdata's loader, which keeps the position."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    found = {}
    for name in ("ours", "own prepare"):
        for resumed in (False, True):
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=2, grad_accum=2)
            loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)
            if name == "ours":
                loader = prepare(accelerator, loader, check_accumulation=False)
            else:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    loader = accelerator.prepare(loader)
                found["said"] = [str(warning.message) for warning in said if "own prepare" in str(warning.message)]
            if resumed:
                accelerator.load_state(f"{folder}/{name}")
            else:
                read(loader)  # the epoch before
            loader.set_epoch(1)
            batches = zip(range(12 if resumed else 3), loader, strict=False)
            found[name] = [rows_of(batch["input_ids"]) for _, batch in batches]
            if not resumed:
                accelerator.save_state(f"{folder}/{name}")
                accelerator.wait_for_everyone()
    return found


def forgotten(folder):
    """What is said when a loader of `accelerator.prepare` starts over from epoch 0 behind a loaded position."""
    accelerator = Accelerator(cpu=True)
    loader, _ = make(accelerator, plain=True)
    accelerator.load_state(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read(loader)
    return [str(warning.message) for warning in said if "forgets" in str(warning.message)]


def finished(folder):
    """The state of a finished epoch starts the next one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, _ = make(accelerator)
    read(loader)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # only the first process writes the positions
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, _ = make(accelerator)
    accelerator.load_state(folder)
    return read(loader)


def gradients():
    """Accumulated under no_sync and averaged by DDP, weighted: the gradient of the batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = TokenModel()
    wanted = full_gradient(model, GPUBatchRebalanceSampler(LENGTHS, 8).indices(0).tolist())
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=2, grad_accum=2)
    loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=collate)
    model, loader = prepare(accelerator, model, loader)
    tokens = int(sum(LENGTHS[i] for i in sampler.indices(0).tolist()))
    for batch, _ in zip(loader, range(2), strict=False):
        with accelerator.accumulate(model):
            items = int((batch["labels"] != -100).sum())
            loss = model(**batch)["loss"] * microbatch_weight(items, tokens, dp_size=2, grad_accum=2)
            accelerator.backward(loss)
    return float((flat_gradient(accelerator.unwrap_model(model)) - wanted).abs().max())


def refused():
    found = {}
    for name in ("dispatch_batches", "split_batches"):
        config = DataLoaderConfiguration(**{name: True})
        for plain in (False, True):
            found[f"{name} {plain}"] = caught(
                lambda c=config, p=plain: read(make(Accelerator(cpu=True, dataloader_config=c), slots=1, plain=p)[0])
            )
    accelerator = Accelerator(cpu=True)
    found["gradient_accumulation_steps"] = caught(lambda: make(accelerator))
    sampler = GPUBatchRebalanceSampler(LENGTHS, 8, dp_size=1, rank=0)
    loader = DataLoader(Rows(), batch_sampler=sampler)
    found["dp_size"] = caught(lambda: prepare(accelerator, loader))
    found["dp_size plain"] = caught(lambda: accelerator.prepare(loader))
    around = accelerator.skip_first_batches(DataLoader(Rows(), batch_sampler=GPUBatchRebalanceSampler(LENGTHS, 8)), 1)
    found["shard"] = caught(lambda: list(accelerator.prepare(around)))
    stream = BalancedStream([Rows()[i] for i in range(48)], 8, sharded=False)
    streaming = accelerator.prepare(DataLoader(stream, batch_size=None, collate_fn=collate))
    found["stream"] = caught(lambda: list(streaming))
    found["objects"] = caught(lambda: prepare(accelerator, DataLoader(Rows())))
    return found


if __name__ == "__main__":
    folder = sys.argv[1]
    rank = Accelerator(cpu=True).process_index
    report = {"small": small(rank), "epochs": epochs(rank), "gradient": gradients(), "refused": refused()}
    report["gathered"] = gathered()
    for n in (0, 2):
        report[f"resume {n}"] = resume(str(Path(folder) / f"state{n}"), n)
        report[f"resume {n} own prepare"] = resume(str(Path(folder) / f"plain{n}"), n, plain=True)
    report["stateful"] = stateful(str(Path(folder) / "stateful"))
    report["forgotten"] = forgotten(str(Path(folder) / "plain0"))
    report["finished"] = finished(str(Path(folder) / "finished"))
    answer(folder, rank, report)
    torch.distributed.destroy_process_group()
