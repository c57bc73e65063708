"""What the adapters share: the sampler of a loader, its place among the processes, a loader with another sampler."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.sampler import GPUBatchRebalanceSampler

_REPLACED = ("self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def sampler_of(loader: object, name: str = "loader") -> GPUBatchRebalanceSampler:
    """The balancing sampler that a DataLoader iterates.

    Raises:
        ParameterError: `loader` is no DataLoader, or has another batch sampler.
    """
    if not isinstance(loader, DataLoader):
        raise ParameterTypeError(f"{name} must be a torch DataLoader, got {quote(loader)}")
    sampler = loader.batch_sampler
    if not isinstance(sampler, GPUBatchRebalanceSampler):
        raise ParameterError(
            f"{name} must have a GPUBatchRebalanceSampler as its batch_sampler, got {type(sampler).__name__}"
        )
    if len(sampler.lengths) != len(loader.dataset):  # type: ignore[arg-type]
        raise ParameterError(
            f"{name}.dataset has {len(loader.dataset)} samples, "  # type: ignore[arg-type]
            f"but its sampler was given {len(sampler.lengths)} lengths"
        )
    return sampler


def take_place(sampler: GPUBatchRebalanceSampler, processes: int, process: int, replicas: int, where: str) -> None:
    """Check `dp_size` against the processes, and make the sampler yield the micro-batches of this one.

    A sampler that was made before the processes were started cannot have known its rank.

    Args:
        sampler: the sampler.
        processes: all processes.
        process: index of this one.
        replicas: neighbouring processes that run the same micro-batches (tensor or context parallel).
        where: what runs the processes, for the error.

    Raises:
        ParameterError: `dp_size` is not the number of processes that run different micro-batches.
    """
    if sampler.dp_size * replicas != processes:
        shared = f", {replicas} of which share their micro-batches" if replicas > 1 else ""
        raise ParameterError(
            f"dp_size of the sampler is {sampler.dp_size}, but {where} runs {processes} processes{shared}: "
            f"give dp_size={max(1, processes // replicas)}, or make the sampler after the processes are started"
        )
    sampler.rank = process // replicas


def with_batch_sampler(
    loader: DataLoader[Any], batch_sampler: Any, kind: type[DataLoader[Any]] = DataLoader
) -> DataLoader[Any]:
    """A DataLoader of that kind with the dataset and options of `loader` that iterates `batch_sampler`."""
    options = {
        name: getattr(loader, name)
        for name in inspect.signature(DataLoader.__init__).parameters
        if name not in _REPLACED and hasattr(loader, name)
    }
    return kind(loader.dataset, batch_sampler=batch_sampler, **options)
