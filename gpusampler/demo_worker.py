"""One process of the demo: trains a small transformer once with each way to make micro-batches, and times the steps.

Started by torchrun, with the paths of two JSON files: `DemoSettings` to read, results to write. What is timed is
ordinary: a `DataLoader` with a worker process and a `batch_sampler`, DistributedDataParallel that averages gradients
in every micro-batch, a loss weighted by `microbatch_weight`, AdamW. The strategies take turns, a step each, so that a
machine that slows down slows them all; each has a model of its own, from the same start.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from gpusampler.cost import CostModel
from gpusampler.demo_model import IGNORED, CountingData, TinyTransformer, pad
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.strategies import make_strategy
from gpusampler.traces import load_trace
from gpusampler.weights import microbatch_weight

_FEWEST_STEPS, _MOST_STEPS = 8, 400
_POOL_STEPS = 64
_REPEATS = 4


@dataclass(frozen=True)
class DemoSettings:
    """What to train; see `gpusampler.demo.run_demo`."""

    trace: str
    mean_length: int
    longest: int
    dp_size: int
    grad_accum: int
    batch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    strategies: tuple[str, ...]
    num_steps: int | None
    seconds: float
    seed: int
    device: str


def demo_lengths(settings: DemoSettings, num_steps: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths of `num_steps` steps' samples: drawn from the trace, scaled to the mean length, clipped."""
    trace = load_trace(settings.trace)
    drawn = np.random.default_rng(settings.seed).choice(trace, num_steps * settings.batch_size)
    lengths: np.ndarray[Any, np.dtype[np.float64]] = np.rint(drawn * (settings.mean_length / trace.mean()))
    return lengths.clip(2, settings.longest).astype(np.int64)


def demo_sampler(
    settings: DemoSettings, lengths: np.ndarray[Any, Any], cost: CostModel, rank: int
) -> GPUBatchRebalanceSampler:
    """The sampler of one rank."""
    return GPUBatchRebalanceSampler(
        lengths,
        settings.batch_size,
        settings.dp_size,
        settings.grad_accum,
        seed=settings.seed,
        rank=rank,
        cost=cost,
        process_group=None,
    )


class _Training:
    """One strategy's model, loader and record."""

    def __init__(self, name: str, settings: DemoSettings, sampler: GPUBatchRebalanceSampler) -> None:
        self.name = name
        self.settings = settings
        self.model = _build_model(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        loader = DataLoader(
            CountingData(sampler.lengths.values, settings.seed),
            batch_sampler=make_strategy(name, sampler).batch_sampler(),
            collate_fn=pad,
            num_workers=1,
            prefetch_factor=2 * settings.grad_accum,
        )
        self.micro_batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(loader)
        self.ready = self._fetch()

    def _fetch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The next step's micro-batches: the weights need to know all of a step's targets."""
        return [pair for _, pair in zip(range(self.settings.grad_accum), self.micro_batches, strict=False)]

    def step(self) -> None:
        """One optimizer step and the fetch of the next, timed together."""
        dist.barrier()
        start = perf_counter()
        loss = train_step(self.model, self.ready, self.settings)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ready = self._fetch()
        loss_now = float(loss)  # waits for a GPU
        self.seconds.append(perf_counter() - start)
        self.losses.append(loss_now / self.settings.dp_size)


def train_step(
    model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]], settings: DemoSettings
) -> torch.Tensor:
    """Gradients of the mean loss over all targets of a step; returns `dp_size` times that mean, summed over ranks."""
    device = torch.device(settings.device)
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    total = torch.tensor(sum(counts), device=device)
    dist.all_reduce(total)
    summed = torch.zeros((), device=device)
    for (tokens, targets), count in zip(micro_batches, counts, strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(tokens.to(device))
        loss = functional.cross_entropy(
            scores.float().flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED
        )
        loss = loss * microbatch_weight(count, int(total), dp_size=settings.dp_size)
        loss.backward()  # type: ignore[no-untyped-call]
        summed += loss.detach()
    dist.all_reduce(summed)
    return summed


def _build_model(settings: DemoSettings) -> DistributedDataParallel:
    torch.manual_seed(settings.seed)
    model = TinyTransformer(settings.hidden_size, settings.num_layers, settings.num_heads, settings.longest)
    return DistributedDataParallel(model.to(settings.device))


def calibrate(settings: DemoSettings) -> tuple[CostModel, float]:
    """Fit the cost model to this machine: time micro-batches of several shapes, on all ranks at once.

    The fastest of some repeats of each shape are fitted, as other work on the machine only adds to a time; what it adds
    in the middle is in the unit.

    Returns:
        The model, the same on every rank, and the seconds that one unit of its cost takes.
    """
    model = _build_model(settings)
    longest = settings.longest
    shapes = [(1, 16), (8, 16), (32, 16), (4, longest // 8), (4, longest // 4), (1, longest)]
    seconds = np.empty((1 + _REPEATS, len(shapes)))
    for times in seconds:
        for i, (n, length) in enumerate(shapes):
            batch = pad([torch.zeros(length, dtype=torch.int64)] * n)
            dist.barrier()
            start = perf_counter()
            float(train_step(model, [batch], settings))
            times[i] = perf_counter() - start
    fastest = seconds[1:].min(axis=0)
    slowdown = float(np.median(seconds[1:] / fastest))
    fit = torch.tensor(fit_cost(shapes, (slowdown * fastest).tolist()), dtype=torch.float64, device=settings.device)
    dist.broadcast(fit, 0)
    fixed, linear, square = fit.tolist()
    return CostModel(alpha=square / linear, intercept=fixed / linear), linear


def fit_cost(shapes: list[tuple[int, int]], seconds: list[float]) -> list[float]:
    """Seconds a micro-batch, a token and a squared token of a sample: least squares of relative errors, none negative.

    Example:
        >>> shapes = [(1, 10), (2, 10), (1, 100), (3, 50)]
        >>> [round(x, 9) for x in fit_cost(shapes, [0.5 + 0.01 * n * l + 0.0001 * n * l * l for n, l in shapes])]
        [0.5, 0.01, 0.0001]
    """
    n, length = np.array(shapes, dtype=np.float64).T
    terms = np.stack([np.ones_like(n), n * length, n * length**2], axis=1) / np.array(seconds)[:, None]
    used = [0, 1, 2]
    while True:
        part = np.linalg.lstsq(terms[:, used], np.ones(len(n)), rcond=None)[0]
        if part.min() >= 0 or used == [1]:
            break
        # the linear term stays: it is the unit of the cost
        used.remove(min((term for term in used if term != 1), key=lambda term: part[used.index(term)]))
    fit = [0.0, 0.0, 0.0]
    for term, value in zip(used, part.tolist(), strict=True):
        fit[term] = value
    return fit


def choose_steps(settings: DemoSettings, cost: CostModel, unit: float) -> int:
    """As many steps as all strategies together can train in the time given, if the model is right."""
    if settings.num_steps is not None:
        return settings.num_steps
    from gpusampler.report import report_sampler

    sampler = demo_sampler(settings, demo_lengths(settings, _POOL_STEPS), cost, 0)
    report = report_sampler(sampler, peers=settings.strategies[:-1])
    a_step = unit * sum(float(each.figures.cost.mean()) for each in report.strategies)
    return min(max(int(settings.seconds / a_step), _FEWEST_STEPS), _MOST_STEPS)


def train(settings: DemoSettings) -> dict[str, Any]:
    """Train with each strategy in turns; returns what the output file holds."""
    rank = dist.get_rank()
    if rank == 0:
        print("fitting the cost model to this machine", file=sys.stderr, flush=True)
    cost, unit = calibrate(settings)
    steps = torch.tensor(choose_steps(settings, cost, unit) if rank == 0 else 0, device=settings.device)
    dist.broadcast(steps, 0)
    num_steps = int(steps)
    lengths = demo_lengths(settings, num_steps)
    runs = []
    for name in settings.strategies:
        runs.append(_Training(name, settings, demo_sampler(settings, lengths, cost, rank)))
    terminal = sys.stderr.isatty()
    with tqdm(
        total=num_steps * len(runs),
        desc="training",
        unit=" steps",
        disable=rank != 0,
        mininterval=0.2 if terminal else 10.0,
    ) as bar:
        for step in range(num_steps):
            for place in range(len(runs)):
                runs[(place + step) % len(runs)].step()
                bar.update()
    return {
        "alpha": cost.alpha,
        "intercept": cost.intercept,
        "seconds_a_token": unit,
        "runs": [{"name": run.name, "seconds": run.seconds, "losses": run.losses} for run in runs],
    }


def main(given: str, written: str) -> None:
    """Run one process, with settings from one file; rank 0 writes the results to the other."""
    with open(given, encoding="utf-8") as file:
        settings = DemoSettings(**json.load(file))
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    result = train(settings)
    if dist.get_rank() == 0:
        with open(written, "w", encoding="utf-8") as file:
            json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
