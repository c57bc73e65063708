"""Planning on a GPU: the shuffle, the lengths and the plans live there, samples and group ends come back.

A chunk is a run of kernel launches on a stream of its own and copies to pinned memory behind them; nothing waits until
the chunk is needed. `Lengths` take 4 bytes a sample on the device. All calls come from the thread that iterates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpusampler.compose import Composition
from gpusampler.errors import ParameterError
from gpusampler.kernels import spec
from gpusampler.lengths import Lengths
from gpusampler.pipeline import Chunk, Pending, PlanAhead
from gpusampler.plan import Partition
from gpusampler.plan_kernels import launch_plan, scale_by_row, to_device
from gpusampler.stats import PlanStats

_COPIED_SAMPLES = 1 << 24
_INT32_MAX = (1 << 31) - 1


class DevicePlans:
    """Chunks of plans of one dataset, made on one device.

    Args:
        device: a CUDA device, or the CPU under `TRITON_INTERPRET=1`.
        lengths: of the dataset.
        composition: of its epochs.
    """

    def __init__(self, device: torch.device, lengths: Lengths, composition: Composition) -> None:
        """Copy the lengths to the device."""
        self.device = device
        self._composition = composition
        self._longest, self._shortest = lengths.maximum, lengths.minimum
        self._module = torch.get_device_module(device)
        with self._guard():
            self._stream = self._module.Stream()
        with self._guard(), self._module.stream(self._stream):
            self._lengths = torch.empty(len(lengths), dtype=torch.int32, device=device)
            for start in range(0, len(lengths), _COPIED_SAMPLES):
                block = lengths.values[start : start + _COPIED_SAMPLES].astype(np.int32)
                self._lengths[start : start + len(block)] = torch.from_numpy(block).to(device)
        self._table: tuple[Partition, torch.Tensor] | None = None

    def begin(self, epoch: int, step: int, count: int, partition: Partition) -> PendingChunk:
        """Launch the planning of `count` steps of one size, without waiting for it."""
        with self._guard(), self._module.stream(self._stream):
            samples = self._samples(epoch, step, count)
            rows = self._lengths[samples]
            plan = launch_plan(partition, rows, self._custom(partition, rows), self._longest)
            placed = samples.gather(1, plan.order.clamp(min=0).long())
            if self._composition.num_samples <= _INT32_MAX:
                placed = placed.to(torch.int32)
            results = [self._to_host(tensor) for tensor in (placed, plan.offsets, plan.status)]
            event = self._module.Event()
            event.record(self._stream)
        return PendingChunk(event, epoch, step, partition, results)

    def _guard(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _samples(self, epoch: int, step: int, count: int) -> torch.Tensor:
        """Samples of the steps, int64 [count, B] on the device."""
        composition = self._composition
        if step >= composition.full_steps:
            return to_device(composition.indices(epoch, step), self.device)
        start, size = step * composition.batch_size, count * composition.batch_size
        if composition.shuffle:
            from gpusampler.kernels.shuffle import shuffle_places

            keys = spec.round_keys(composition.seed, epoch)
            places = shuffle_places(start, size, keys, composition.num_samples, self.device)
        else:
            places = torch.arange(start, start + size, device=self.device)
        return places.view(count, composition.batch_size)

    def _custom(self, partition: Partition, rows: torch.Tensor) -> torch.Tensor | None:
        """Costs of a `cost_fn` in units of a power of two near each row's largest, looked up in its table."""
        if partition.cost.cost_fn is None:
            return None
        if self._table is None or self._table[0] is not partition:
            costs = partition.cost(torch.arange(self._shortest, self._longest + 1))
            self._table = (partition, costs.to(self.device))
        return scale_by_row(self._table[1][(rows - self._shortest).long()])[0]

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


class PendingChunk:
    """A chunk on its way from the device."""

    def __init__(self, event: Any, epoch: int, step: int, partition: Partition, results: list[torch.Tensor]) -> None:
        self._event, self._results = event, results
        self._epoch, self._step, self._partition = epoch, step, partition

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return bool(self._event.query())

    def result(self, timeout: float | None = None) -> Chunk:
        """Wait for the chunk, at most `timeout` seconds.

        Raises:
            TimeoutError: it is not there yet.
            ParameterError: a step cannot be planned; it names the step.
        """
        if timeout is None:
            self._event.synchronize()
        deadline = time.monotonic() + (timeout or 0.0)
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(5e-5)
        samples, offsets, status = (tensor.numpy() for tensor in self._results)
        self._partition.raise_for(status, lambda row: f"step {self._step + row} of epoch {self._epoch}")
        return Chunk(self._step, samples, offsets[:, 1:])


class DeviceAhead(PlanAhead):
    """Plan chunks ahead on a device; see `PlanAhead`.

    Args:
        starts: as there.
        plan: as there; used from then on if the device fails at its first chunk and `fall_back` is set.
        stats: as there; planning time is what launching and the last wait take the host.
        depth: as there.
        begin: `DevicePlans.begin` of an epoch and a partition.
        fall_back: called with the error if the first chunk cannot be begun; None: it is raised.
    """

    def __init__(
        self,
        starts: Iterator[tuple[int, int]],
        plan: Callable[[int, int], Chunk],
        stats: PlanStats,
        depth: int,
        begin: Callable[[int, int], PendingChunk],
        fall_back: Callable[[Exception], None] | None,
    ) -> None:
        """Set up; nothing is planned before the first chunk is asked for."""
        super().__init__(starts, plan, stats, depth)
        self._begin_on_device: Callable[[int, int], PendingChunk] | None = begin
        self._fall_back = fall_back

    def _begin(self, start: int, count: int) -> Pending:
        return self._launch(start, count) or super()._begin(start, count)

    def _plan_now(self, start: int, count: int) -> Chunk:
        pending = self._launch(start, count)
        return super()._plan_now(start, count) if pending is None else pending.result()

    def _launch(self, start: int, count: int) -> PendingChunk | None:
        if self._begin_on_device is None:
            return None
        began = time.perf_counter()
        try:
            pending = self._begin_on_device(start, count)
        except ParameterError:
            raise
        except Exception as error:
            if self._fall_back is None:
                raise
            self._fall_back(error)
            self._begin_on_device = None
            return None
        finally:
            self._stats.plan_seconds += time.perf_counter() - began
        self._fall_back = None
        return pending
