"""Chunks for every rank of a group: the root plans them on its thread, all take them from broadcasts.

All collectives are posted by the thread that iterates, at micro-batches that are the same on every rank: one a chunk
when `fill` is called, `depth` chunks ahead, and one more whenever the next chunk is needed and none of the messages
posted holds it. What a message holds is the root's choice, the next chunk or "not ready", but every rank draws the same
conclusion from it; so all post the same number of messages without talking about it. The root never waits for its
planner except where all ranks wait for the same chunk, and then says every `interval` seconds that it is alive.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from gpusampler.broadcast import Channel, Message, Status, pack
from gpusampler.errors import DistributedError
from gpusampler.pipeline import Chunk, PlanAhead
from gpusampler.stats import PlanStats


class SharedPlans:
    """The chunks of one iteration over a group.

    Args:
        channel: of the group.
        planner: makes the chunks on the root; None on other ranks.
        epoch: of the iteration.
        step: the first that is left; every chunk is checked to be the next.
        chunks: how many there are.
        stats: where messages are counted.
        depth: messages ahead of need; the channel has more slots than that.
        interval: seconds between signs of life.

    An error in planning is raised on every rank when its chunk is reached.
    """

    def __init__(
        self,
        channel: Channel,
        planner: PlanAhead | None,
        epoch: int,
        step: int,
        chunks: int,
        stats: PlanStats,
        depth: int,
        interval: float,
    ) -> None:
        """Set up; nothing is posted before the first chunk is asked for."""
        self.waited = False
        self._channel, self._planner, self._stats = channel, planner, stats
        self._step, self._left, self._epoch, self._generation = step, chunks, epoch, channel.generation
        self._depth, self._interval = depth, interval
        self._posted: deque[tuple[int, Message | None]] = deque()
        self._failure: Exception | None = None

    def __next__(self) -> Chunk:
        """Return the next chunk, waiting for it if it has not arrived."""
        if not self._left:
            raise StopIteration
        self._refuse_older()
        self.waited = False
        while True:
            if not self._posted:
                self.waited = True
                self._post(self._interval)
            chunk = self._receive()
            if chunk is not None:
                if self._planner is not None:
                    self._planner.fill()
                self._left -= 1
                self._step = chunk.step + len(chunk.samples)
                return chunk

    def fill(self) -> None:
        """Post messages for later chunks."""
        self._refuse_older()
        while len(self._posted) < min(self._depth, self._left):
            self._post(0.0)
        if self._planner is not None:
            self._planner.fill()

    def finish(self) -> None:
        """See that what was sent has left before the loop goes on, perhaps to end the process."""
        self._channel.flush()

    def close(self) -> None:
        """End the planning thread; messages posted stay for the next iteration to match."""
        if self._planner is not None:
            self._planner.close()

    def _refuse_older(self) -> None:
        if self._channel.generation != self._generation:
            raise DistributedError("a later iteration over this sampler has begun; ranks share one at a time")

    def _post(self, patience: float) -> None:
        message = None if self._planner is None else self._make(self._planner, patience)
        number = self._channel.post(None if message is None else partial(pack, message))
        self._posted.append((number, message))
        self._stats.messages += 1
        self._stats.bytes_broadcast += self._channel.message_bytes

    def _make(self, planner: PlanAhead, patience: float) -> Message:
        status, chunk, text = Status.NOT_READY, None, ""
        if self._failure is None:
            try:
                chunk = planner.poll(patience)
                status = Status.NOT_READY if chunk is None else Status.CHUNK
            except Exception as error:
                self._failure = error
                status, text = Status.FAILED, f"{type(error).__name__}: {error}"
        return Message(status, self._generation, self._epoch, chunk, text)

    def _receive(self) -> Chunk | None:
        number, message = self._posted.popleft()
        if message is None:
            self.waited |= not self._channel.arrived(number)
            message = self._channel.receive(number)
        step = self._step if message.chunk is None else message.chunk.step
        got, expected = (message.generation, message.epoch, step), (self._generation, self._epoch, self._step)
        if got != expected:
            raise DistributedError(f"expected the plan of (iteration, epoch, step) {expected}, got that of {got}")
        if message.status == Status.FAILED:
            self._left = 0
            raise DistributedError(f"planning failed on rank {self._channel.root}: {message.text}") from self._failure
        return message.chunk
