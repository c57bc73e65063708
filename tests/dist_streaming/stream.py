"""Two ranks read streams; each writes what it saw. Run by torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpusampler import CostModel, microbatch_weight
from gpusampler.streaming import BalancedStream

COST = CostModel()
PAGE = Path(__file__).parents[2] / "docs" / "streaming.md"


def source(lengths: Any) -> list[dict[str, int]]:
    return [{"place": place, "length": int(length)} for place, length in enumerate(lengths)]


class Resetting:
    """Its state at its end is that of its beginning."""

    def __init__(self, lengths: Any) -> None:
        self.samples, self.at = source(lengths), 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def resume(make: Callable[[], BalancedStream], taken: int) -> list[list[list[int]]]:
    """What a stream gives after `taken` micro-batches, resumed and unbroken."""
    first, second = make(), make()
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    second.load_state_dict(first.state_dict())
    return [[[sample["place"] for sample in micro_batch] for micro_batch in rest] for rest in (second, iterator)]


def walk(stream: BalancedStream, slots: int) -> dict[str, Any]:
    """Run through a stream with a collective a micro-batch, as gradients would."""
    seen: dict[str, Any] = {"count": 0, "places": [], "repeats": 0, "step samples": []}
    met = torch.zeros(1)
    for micro_batch in stream:
        one = torch.ones(1)
        dist.all_reduce(one)
        met += one
        if seen["count"] % slots == 0:
            seen["step samples"].append(stream.step_samples)
        seen["count"] += 1
        for sample, again in zip(micro_batch, stream.repeats, strict=True):
            seen["repeats"] += again
            if not again:
                seen["places"].append(sample["place"])
    return seen | {"met": int(met), "dropped": stream.dropped}


def imbalance(lengths: Any, buffer_size: int) -> float:
    """Summed padded cost of the dearer rank of each micro-batch over that of the mean."""
    stream = BalancedStream(source(lengths), 32, grad_accum=1, sharded=True, buffer_size=buffer_size)
    dearest = mean = 0.0
    for micro_batch in stream:
        cost = len(micro_batch) * COST(torch.tensor([max(sample["length"] for sample in micro_batch)]))
        costs = [torch.zeros_like(cost), torch.zeros_like(cost)]
        dist.all_gather(costs, cost)
        dearest += float(max(costs))
        mean += float(sum(costs)) / 2
    return dearest / mean


class Averaging:
    """Where an optimizer would step: keeps the averaged gradient."""

    def __init__(self) -> None:
        self.weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        self.steps: list[float] = []

    def collate(self, samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        """Sample n has n % 7 tokens without a label, and n as the label of the others."""
        labels = [[-100] * (s["place"] % 7) + [s["place"]] * s["length"] for s in samples]
        return {"labels": torch.tensor([label for row in labels for label in row])}

    def model(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"][batch["labels"] != -100].double()
        return (self.weight * labels).mean()

    def step(self) -> None:
        gradient = self.weight.grad
        dist.all_reduce(gradient)
        self.steps.append(float(gradient) / dist.get_world_size())

    def zero_grad(self) -> None:
        self.weight.grad = None


def mean_over_tokens(lengths: Any) -> tuple[list[float], list[float]]:
    """The gradients of the page's loop over a stream with a tail, and what they should be."""
    blocks = PAGE.read_text().split("```python\n")[1:]
    block = next(block.split("```")[0] for block in blocks if "all_reduce" in block)
    optimizer, wanted = Averaging(), []
    stream = BalancedStream(source(lengths), 16, grad_accum=2, sharded=True, drop_last=False)
    names: dict[str, Any] = {
        "stream": stream,
        "collate": optimizer.collate,
        "model": optimizer.model,
        "optimizer": optimizer,
    }
    names |= {"islice": islice, "torch": torch, "dist": dist, "microbatch_weight": microbatch_weight}
    exec(block, names | {"dp_size": 2, "grad_accum": 2})
    kept: list[list[int]] = []
    for number, micro_batch in enumerate(stream):
        if number % 2 == 0:
            kept.append([])
        kept[-1] += [sample["place"] for sample, again in zip(micro_batch, stream.repeats, strict=True) if not again]
    for places in kept:
        parts = torch.tensor([sum(n * int(lengths[n]) for n in places), sum(int(lengths[n]) for n in places)])
        dist.all_reduce(parts)
        wanted.append(float(parts[0]) / float(parts[1]))
    return optimizer.steps, wanted


def error_of(stream: BalancedStream) -> str:
    try:
        list(stream)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    lengths = np.exp(np.random.default_rng(rank).normal(5, 0.8, (100, 61)[rank])).astype(int) + 1
    seen: dict[str, Any] = {}
    options: dict[str, Any] = {"grad_accum": 2, "sharded": True}
    seen["dropping"] = walk(BalancedStream(source(lengths), 16, **options), 2)
    seen["keeping"] = walk(BalancedStream(source(lengths), 16, drop_last=False, **options), 2)
    many = np.exp(np.random.default_rng(10 + rank).normal(5, 0.8, 640)).astype(int) + 1
    seen["imbalance"] = {"oldest first": imbalance(many, 16), "buffered": imbalance(many, 64)}
    both = np.exp(np.random.default_rng(5).normal(5, 0.8, 100)).astype(int) + 1
    seen["shared"] = walk(BalancedStream(source(both), 16, grad_accum=2, sharded=False), 2)["places"]
    seen["different streams"] = error_of(BalancedStream(source(many), 16, sharded=False))
    seen["different parameters"] = error_of(BalancedStream(source(both), 8 + 2 * rank, sharded=False))
    bad = source([3] * 5 + [0 if rank else 4] + [3] * 20)
    seen["bad sample"] = error_of(BalancedStream(bad, 4, sharded=True))
    seen["empty shard"] = error_of(BalancedStream(source(lengths if rank == 0 else []), 4, **options))
    seen["resumed"], seen["unbroken"] = resume(
        lambda: BalancedStream(source(lengths), 16, drop_last=False, **options), 7
    )
    seen["resumed at the end"], seen["unbroken at the end"] = resume(
        lambda: BalancedStream(Resetting(lengths[:22]), 8, sharded=True), 3
    )
    seen["gradients"], seen["token means"] = mean_over_tokens(lengths)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


main()
