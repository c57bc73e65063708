"""Planning ahead: chunks of steps are planned on a thread while earlier ones are consumed.

The planner releases the GIL, so that the training thread runs on. The first chunk is planned where it is asked for,
without a thread: a process that forks workers before it iterates has none to lose. Results do not depend on timing.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpusampler.stats import PlanStats

Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


class Chunk(NamedTuple):
    """Planned steps.

    Attributes:
        step: the first of them.
        samples: [W, B], samples of each step, group after group.
        ends: int32 [W, K], where each group ends in its row.
    """

    step: int
    samples: Integers
    ends: Integers


class Pending(Protocol):
    """A chunk in the making."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self, timeout: float | None = None) -> Chunk:
        """Wait for the chunk; TimeoutError after `timeout` seconds."""
        ...


class Source(Protocol):
    """Where an iteration gets its chunks from, in order.

    Attributes:
        waited: whether the last chunk was not ready when it was asked for.
    """

    waited: bool

    def __next__(self) -> Chunk:
        """Return the next chunk, waiting for it if it is not ready."""
        ...

    def fill(self) -> None:
        """Set later chunks going; called once a chunk, at the same micro-batch on every rank."""
        ...

    def finish(self) -> None:
        """Called at the end of the epoch, before the loop learns of it."""
        ...

    def close(self) -> None:
        """Let go of threads; also called when an iteration is dropped."""
        ...


class PlanAhead:
    """Plan chunks here, keeping up to `depth` later ones planned or in the making.

    Args:
        starts: first step of each chunk, with the number of steps in it, in order.
        plan: makes a chunk; called once each, in order.
        stats: where planning time is counted.
        depth: chunks in flight besides the one being consumed, >= 1.

    An error in `plan` is raised when its chunk is reached, and ends the iteration.
    """

    def __init__(
        self,
        starts: Iterator[tuple[int, int]],
        plan: Callable[[int, int], Chunk],
        stats: PlanStats | None = None,
        depth: int = 2,
    ) -> None:
        """Set up; nothing is planned before the first chunk is asked for."""
        self.waited = False
        self._starts = starts
        self._plan = plan
        self._stats = PlanStats() if stats is None else stats
        self._depth = depth
        self._pending: deque[Pending] = deque()
        self._executor: futures.ThreadPoolExecutor | None = None

    def __iter__(self) -> PlanAhead:
        """Return itself."""
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk, waiting for it if it is not ready."""
        try:
            if self._pending:
                future = self._pending.popleft()
                self.waited = not future.done()
                chunk = future.result()
            else:
                start = next(self._starts)
                self.waited = True
                chunk = self._plan_now(*start)
        except BaseException:
            self.close()
            raise
        self._submit(self._depth)
        return chunk

    def poll(self, patience: float) -> Chunk | None:
        """Return the next chunk, never planned here, or None if it is not ready within `patience` seconds.

        Later chunks are set going by `fill`, when the caller has time for it.
        """
        self._submit(1)
        future = self._pending[0]
        self.waited = not future.done()
        if self.waited and not patience:
            return None
        try:
            chunk = future.result(patience)
        except BaseException as error:
            if isinstance(error, (TimeoutError, futures.TimeoutError)) and not future.done():
                return None
            self.close()
            raise
        self._pending.popleft()
        return chunk

    def fill(self) -> None:
        """Set later chunks going; `next` has done so itself."""
        self._submit(self._depth)

    def finish(self) -> None:
        """Nothing to do: the thread ended with the last chunk."""

    def close(self) -> None:
        """Drop what is planned and let the thread end; a chunk in the making is finished first, in the background."""
        self._pending.clear()
        self._starts = iter(())
        if (
            self._executor is not None and not sys.is_finalizing()
        ):  # at exit, concurrent.futures ends its threads itself
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None

    def _submit(self, depth: int) -> None:
        while len(self._pending) < depth:
            start = next(self._starts, None)
            if start is None:
                break
            self._pending.append(self._begin(*start))
        if not self._pending:
            self.close()

    def _begin(self, start: int, count: int) -> Pending:
        """Set a chunk going."""
        if self._executor is None:
            self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpusampler-plan")
        return self._executor.submit(self._timed_plan, start, count)

    def _plan_now(self, start: int, count: int) -> Chunk:
        """Make a chunk that is waited for."""
        return self._timed_plan(start, count)

    def _timed_plan(self, start: int, count: int) -> Chunk:
        began = time.perf_counter()
        try:
            return self._plan(start, count)
        finally:
            self._stats.plan_seconds += time.perf_counter() - began
