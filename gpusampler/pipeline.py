"""Planning ahead: chunks of steps are planned on a thread while earlier ones are consumed.

The planner releases the GIL, so that the training thread runs on. The first chunk is planned where it is asked for,
without a thread: a process that forks workers before it iterates has none to lose. Results do not depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk")


class PlanAhead(Generic[Chunk]):
    """Iterate over chunks, keeping up to `depth` later ones planned or in the making.

    Args:
        starts: first step of each chunk, with the number of steps in it, in order.
        plan: makes a chunk; called once each, in order.
        depth: chunks in flight besides the one being consumed, >= 1.

    An error in `plan` is raised when its chunk is reached, and ends the iteration.
    """

    def __init__(self, starts: Iterator[tuple[int, int]], plan: Callable[[int, int], Chunk], depth: int = 2) -> None:
        """Set up; nothing is planned before the first `next`."""
        self._starts = starts
        self._plan = plan
        self._depth = depth
        self._pending: deque[Future[Chunk]] = deque()
        self._executor: ThreadPoolExecutor | None = None

    def __iter__(self) -> PlanAhead[Chunk]:
        """Return itself."""
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk, waiting for it if it is not ready."""
        try:
            chunk = self._pending.popleft().result() if self._pending else self._plan(*next(self._starts))
        except BaseException:
            self.close()
            raise
        self._fill()
        return chunk

    def _fill(self) -> None:
        while len(self._pending) < self._depth:
            start = next(self._starts, None)
            if start is None:
                break
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpusampler-plan")
            self._pending.append(self._executor.submit(self._plan, *start))
        if not self._pending:
            self.close()

    def close(self) -> None:
        """Drop what is planned and let the thread end; a chunk in the making is finished first, in the background."""
        self._pending.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
