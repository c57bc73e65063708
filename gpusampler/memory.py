"""Memory over a training run: the peak of each micro-batch with its shape, and a timeline of the device.

Peaks are those of torch's allocator, exact and without a synchronisation: the allocator counts when work is queued. The
device's own figures have no peak counter: a thread polls them, and what is shorter than the polling interval may be
missed. Off, a tracker costs a tenth of a microsecond a micro-batch. See `memory_report` for the meaning of the figures.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from gpusampler.errors import ParameterError, check_bool, check_float, check_int
from gpusampler.memory_report import GIB, MemoryReport, allocator, cell, device_index, memory_report, report_on
from gpusampler.nvml import Nvml, cuda_started
from gpusampler.regression import Floats
from gpusampler.tables import as_table

__all__ = ["MemoryReport", "MemoryTracker", "Moment", "Peak", "memory_report"]

_MOST_SECONDS = 1e6
_OFF: AbstractContextManager[None] = nullcontext()


class Peak(NamedTuple):
    """One micro-batch: its shape, and the most that the allocator had allocated and held while it ran."""

    samples: int
    length: int
    allocated: int
    pool: int


class Moment(NamedTuple):
    """One poll: seconds since the tracker was made, and the device's, the process's and the allocator's bytes."""

    seconds: float
    used: int | None
    process: int | None
    pool: int | None


class MemoryTracker:
    """Peak memory of every micro-batch, and a timeline of the device.

    The peaks are the allocator's, exact and without a synchronisation. Each micro-batch resets torch's peak statistics.
    The timeline is polled by a thread; what is shorter than `interval` may be missed.

    Args:
        device: CUDA device; default: the current one when a micro-batch starts.
        interval: seconds between polls, 0.001 to 1e6; None for no timeline.
        enabled: False makes everything a no-op.
        capacity: micro-batches and polls to keep, the latest.

    Raises:
        ParameterError: an argument out of its range.

    Example:
        >>> with MemoryTracker(interval=None) as tracker:
        ...     with tracker.microbatch(samples=8, length=512):
        ...         pass  # forward and backward
        >>> records = tracker.records()  # for fit_memory
    """

    def __init__(
        self,
        device: int | str | torch.device | None = None,
        *,
        interval: float | None = 0.05,
        enabled: bool = True,
        capacity: int = 100_000,
    ) -> None:
        """Check the arguments; touches no device."""
        self.device = device
        self._index = device_index(device)
        self.interval = None if interval is None else check_float("interval", interval, minimum=0.001)
        if self.interval is not None and self.interval > _MOST_SECONDS:
            raise ParameterError(f"interval must be at most {_MOST_SECONDS:g} seconds, got {interval}")
        self.enabled = check_bool("enabled", enabled)
        self.peaks: deque[Peak] = deque(maxlen=check_int("capacity", capacity, minimum=1))
        self.timeline: deque[Moment] = deque(maxlen=capacity)
        self.reason: str | None = None
        """Why there are no peaks, if there are none."""
        self._began = monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._inside = False

    def microbatch(self, samples: int, length: int) -> AbstractContextManager[None]:
        """Context that notes the peak of one micro-batch; one that fails leaves no peak.

        Within another it notes nothing: the peak of the whole counts.

        Args:
            samples: in the micro-batch, >= 1.
            length: that they are padded to, >= 1.
        """
        if not self.enabled:
            return _OFF
        return self._measure(check_int("samples", samples, minimum=1), check_int("length", length, minimum=1))

    @contextmanager
    def _measure(self, samples: int, length: int) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield from self._note_peak(samples, length)
        finally:
            self._inside = False

    def _note_peak(self, samples: int, length: int) -> Iterator[None]:
        self._index = index = device_index(self.device)
        if index is None:
            self.reason = f"{self.device} is not a CUDA device"
            yield
            return
        if allocator(index)[0]:
            torch.cuda.reset_peak_memory_stats(index)
        yield
        # where this micro-batch was what started CUDA, the peaks began at zero
        after, reason = allocator(index)
        if after:
            self.peaks.append(Peak(samples, length, after["allocated_peak"], after["pool_peak"]))
        else:
            self.reason = reason

    def start(self) -> MemoryTracker:
        """Start the timeline, if it has an interval."""
        if self.enabled and self.interval is not None and self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._poll, name="gpusampler-memory", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the timeline; it stays readable."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def __enter__(self) -> MemoryTracker:
        """Start the timeline."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the timeline."""
        self.stop()

    def _poll(self) -> None:
        known: tuple[int, bool] | None = None
        nvml = None
        while self._index is not None:
            # found anew once CUDA runs, as it then tells which device it is; the current device is that of the training
            # thread, as it was in the last micro-batch
            now = self._index, cuda_started()
            if nvml is None or now != known:
                known, nvml = now, Nvml(self._index)
            report = report_on(nvml)
            self.timeline.append(Moment(monotonic() - self._began, report.used, report.process, report.pool))
            if self._stop.wait(self.interval):
                return

    def records(self) -> Floats:
        """Peaks as float64 [n, 3] of samples, padded length, allocated bytes: what `fit_memory` takes."""
        return np.array([peak[:3] for peak in self.peaks], dtype=np.float64).reshape(-1, 3)

    def to_dict(self) -> dict[str, Any]:
        """Everything tracked, and the device now, as builtin values."""
        return {
            "device": memory_report(self.device).to_dict(),
            "interval_seconds": self.interval,
            "peaks": [peak._asdict() for peak in self.peaks],
            "timeline": [moment._asdict() for moment in self.timeline],
            "reason": self.reason,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)

    def table(self, rows: int = 10) -> str:
        """The device now, the timeline in a line, and the micro-batches with the highest peaks."""
        text = [memory_report(self.device).table(), self.timeline_summary(), ""]
        if not self.peaks:
            return "\n".join([*text, f"no peaks: {self.reason or 'no micro-batch was measured'}"])
        highest = sorted(self.peaks, key=lambda peak: peak.allocated, reverse=True)[:rows]
        cells = [
            [f"{peak.samples} x {peak.length}", str(peak.samples * peak.length), *map(cell, peak[2:])]
            for peak in highest
        ]
        text.append(as_table(("samples x length", "tokens", "allocated", "pool"), cells))
        return "\n".join(text)

    def timeline_summary(self) -> str:
        """How often the device was polled, and the most that was seen."""
        if self.interval is None:
            return "timeline       not polled"
        seen = {name: [getattr(each, name) for each in self.timeline] for name in ("used", "process", "pool")}
        most = {
            name: max((value for value in values if value is not None), default=None) for name, values in seen.items()
        }
        figures = ", ".join(f"{name} {cell(value)}" for name, value in most.items())
        return f"timeline       {len(self.timeline)} polls, {self.interval * 1000:g} ms apart; at most: {figures}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: peaks over padded tokens, and the timeline; its format follows from the extension.

        Raises:
            ParameterError: matplotlib is not installed, or the path cannot be written as a picture.
        """
        from gpusampler.plot import check_plot, new_figure, save_figure

        check_plot(path)
        figure, (peaks, timeline) = new_figure(1, 2, (11, 4.5))
        records = self.records()
        peaks.scatter(records[:, 0] * records[:, 1], records[:, 2] / GIB, s=8)
        peaks.set(xlabel="samples x length of a micro-batch", ylabel="peak allocated, GiB", title="Micro-batches")
        for name in ("used", "process", "pool"):
            points = [(moment.seconds, getattr(moment, name)) for moment in self.timeline]
            known = [(seconds, value / GIB) for seconds, value in points if value is not None]
            if known:
                timeline.plot(*zip(*known, strict=True), label=name)
        if timeline.lines:
            timeline.legend()
        polled = "not polled" if self.interval is None else f"polled every {self.interval * 1000:.0f} ms"
        timeline.set(xlabel="seconds", ylabel="GiB", title=f"Device, {polled}")
        save_figure(figure, path)
