"""One pass over an epoch for one rank: micro-batches cut from chunks of planned steps.

Where the chunks come from is decided at the first micro-batch: planned here, or by the root of a process group. A rank
whose loader runs less far ahead of training than others' takes its chunks that much earlier than it needs them, so that
all ranks wait for a chunk, and post collectives, at the same micro-batch of training: none can be held up in a gradient
collective by a rank that waits for a plan.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpusampler import broadcast
from gpusampler import state as states
from gpusampler.compose import Composition
from gpusampler.errors import check_int
from gpusampler.handout import Handout
from gpusampler.pipeline import Chunk, Source
from gpusampler.shared import SharedPlans

if TYPE_CHECKING:
    from gpusampler.agree import Agreement
    from gpusampler.plan import Partition
    from gpusampler.sampler import GPUBatchRebalanceSampler

_DEPTH = 2
_FIRST_SAMPLES = 1 << 14
_SIGN_OF_LIFE = 30.0
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Spans:
    """Chunks that the steps of an epoch from one on are cut into, and the tail step, of another size.

    The first chunk is waited for, so where steps are large it is short, and chunks grow from there, each at most double
    the one before: planning a chunk ends while the one before is consumed, if it takes less than half of a step's time.

    Attributes:
        step: the first.
        growing: steps in each of the first chunks; none if a chunk of `plan_ahead` steps is not much to wait for.
        rows: steps in a later chunk; the last may have fewer.
        composition: of the epoch.

    Example:
        >>> composition = Composition(num_samples=23, batch_size=2, groups=1, shuffle=False, seed=0, drop_last=False)
        >>> list(Spans.cut(2, composition, plan_ahead=4)), len(Spans.cut(2, composition, plan_ahead=4))
        ([(2, 3), (5, 3), (8, 3), (11, 1)], 4)
    """

    step: int
    growing: tuple[int, ...]
    rows: int
    composition: Composition

    @classmethod
    def cut(cls, step: int, composition: Composition, plan_ahead: int) -> Spans:
        """Few chunks of up to `plan_ahead` steps; those that do not grow any more are nearly equal."""
        left, growing = max(0, composition.full_steps - step), []
        size = max(1, _FIRST_SAMPLES // composition.batch_size)
        while size < min(plan_ahead, left):
            growing.append(size)
            left, size = left - size, 2 * size
        return cls(step, tuple(growing), -(-left // max(1, -(-left // plan_ahead))), composition)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First step and number of steps of each chunk."""
        step, full = self.step, self.composition.full_steps
        for count in self.growing:
            yield step, count
            step += count
        if self.rows:
            for start in range(step, full, self.rows):
                yield start, min(self.rows, full - start)
        if self._tail:
            yield full, 1

    def __len__(self) -> int:
        """Return the number of chunks."""
        left = self.composition.full_steps - self.step - sum(self.growing)
        return len(self.growing) + (-(-left // self.rows) if self.rows else 0) + self._tail

    @property
    def _tail(self) -> bool:
        return bool(self.composition.tail) and self.step <= self.composition.full_steps

    def message_size(self, dtype: torch.dtype) -> int:
        """Integers that hold any of the chunks."""
        groups, full = self.composition.groups, self.composition.full_steps
        most = broadcast.message_size(max(*self.growing, self.rows, 0), self.composition.batch_size, groups, dtype)
        tail = broadcast.message_size(1, self.composition.size(full), groups, dtype)
        return max(most, tail if self._tail else 0)


class MicroBatches(Iterator[list[int]]):
    """Iterator over the micro-batches of one rank, from a position in an epoch on."""

    def __init__(self, sampler: GPUBatchRebalanceSampler, handout: Handout) -> None:
        """Start at what is consumed; plans nothing yet."""
        self._sampler, self._handout = sampler, handout
        self._epoch = self._next_epoch = sampler.epoch
        self._source: Source | None = None
        self._go_to(handout.handed)

    def state_dict(self) -> dict[str, Any]:
        """Position of what was handed out; torchdata's StatefulDataLoader keeps it for each batch under way."""
        sampler, handout = self._sampler, self._handout
        partition = handout.partition or sampler.partition
        state = states.save(self._epoch, handout.handed, sampler.composition, partition, sampler.lengths)
        return {**state, "handed": handout.handed - handout.base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind what was handed out; the loader goes on counting from where it was."""
        sampler = self._sampler
        self._epoch, position = states.load(state, sampler.composition, sampler.partition, sampler.lengths)
        self._handout.handed, self._handout.base = position, position - check_int("state['handed']", state["handed"])
        self._go_to(position)
        chosen = sampler._epoch_before_load
        if chosen < self._epoch:
            warnings.warn(
                f"the loader restores a position in epoch {self._epoch}, but set_epoch chose {chosen}: the rest of "
                f"epoch {self._epoch} follows; begin with set_epoch({self._epoch})",
                stacklevel=2,
            )
        self._next_epoch = max(self._epoch, chosen)
        if position == len(sampler):
            self._go_on()

    def _go_on(self) -> None:
        """A loader that restores a finished epoch asks for the next one, which was chosen before, without a word."""
        sampler = self._sampler
        if sampler.epoch == self._epoch < self._next_epoch:
            sampler._handout = None  # is over, though the loop has taken nothing of it
            sampler.set_epoch(self._next_epoch)

    def __next__(self) -> list[int]:
        """Return the next micro-batch as builtin ints."""
        if not self._queue:
            self._refill()
        handout = self._handout
        handout.handed += 1
        if handout.handed % self._slots == 0:
            self._stats.steps += 1
        return self._queue.popleft()

    def __del__(self) -> None:
        """Let the planning thread end with the iteration."""
        if self._source is not None:
            self._source.close()

    def _go_to(self, position: int) -> None:
        if self._source is not None:
            self._source.close()
        self._source, self._lead, self._handout.partition = None, 0, None
        self._slots, self._stats, self._total = self._sampler.grad_accum, self._sampler._stats, len(self._sampler)
        self._queue: deque[list[int]] = deque()
        self._ready: deque[Chunk] = deque()
        step, self._slot = divmod(position, self._slots)
        self._row = 0
        self._covered = self._due = step * self._slots
        self._fill_at, self._fills = sys.maxsize, False

    def _refill(self) -> None:
        """Cut micro-batches up to where chunks are due, half a chunk at a time, so that handing one out is little."""
        if self._source is None:
            self._open()
        if self._process != os.getpid():
            raise RuntimeError("an iteration cannot go on in a process forked from its own; begin another")
        handed = self._handout.handed
        if handed + self._lead >= self._due:
            self._reach(min(handed + self._lead, self._total - 1))
        if handed >= self._total:
            self._finish()
            self._go_on()
            raise StopIteration
        for _ in range(max(1, min(self._due, self._covered) - self._lead - handed)):
            self._queue.append(self._cut())
        self._fill()

    def _cut(self) -> list[int]:
        chunk = self._ready[0]
        ends = chunk.ends[self._row]
        group = self._slot * self._sampler.dp_size + self._sampler.rank
        begin = ends[group - 1] if group else 0
        micro_batch: list[int] = chunk.samples[self._row, begin : ends[group]].tolist()
        self._slot += 1
        if self._slot == self._slots:
            self._slot = 0
            self._row += 1
            if self._row == len(chunk.samples):
                self._row = 0
                self._ready.popleft()
        return micro_batch

    def _open(self) -> None:
        sampler, epoch, position = self._sampler, self._epoch, self._handout.handed
        step = position // sampler.grad_accum
        spans = Spans.cut(step, sampler.composition, sampler.plan_ahead)
        self._process = os.getpid()
        partition = self._handout.partition = sampler.partition  # which may be replaced between two steps
        sampler._begin(self._handout)
        sampler._stats.iterations += 1
        agreement = sampler._agree()
        if agreement is None:
            self._source = sampler._plan_ahead(epoch, iter(spans), partition, _DEPTH)
        else:
            self._source, self._lead = self._share(agreement, spans, partition)

    def _share(self, agreement: Agreement, spans: Spans, partition: Partition) -> tuple[Source, int]:
        sampler, position = self._sampler, self._handout.handed
        planner, problem = None, sampler._cap_error(self._epoch)
        if agreement.is_root and problem is None:
            try:
                planner = sampler._plan_ahead(self._epoch, iter(spans), partition, _DEPTH)
            except Exception as error:
                problem = error
        ahead = sampler.process_group.loader_ahead
        try:
            cost = states.describe_cost(partition, sampler.lengths)
        except Exception as error:  # of a cost_fn; the other ranks are to hear of it
            problem, cost = problem or error, "unknown"
        fields = states.fingerprint(sampler.composition, partition, sampler.lengths, cost)
        fields |= {"plan_ahead": sampler.plan_ahead, "epoch": self._epoch, "position": position}
        lead = agreement.begin(fields, sampler.rank, self._handout.ahead if ahead is None else ahead, problem)
        dtype = torch.int32 if sampler.composition.num_samples <= _INT32_MAX else torch.int64
        source = SharedPlans(
            agreement.channel(spans.message_size(dtype), dtype, slots=_DEPTH + 2),
            planner,
            epoch=self._epoch,
            step=position // sampler.grad_accum,
            chunks=len(spans),
            stats=sampler._stats,
            depth=_DEPTH,
            interval=min(agreement.timeout / 4, _SIGN_OF_LIFE),
        )
        return source, lead

    def _reach(self, index: int) -> None:
        """Have the chunks of micro-batches up to `index`, and set later ones going half a chunk before they are due."""
        source = self._source
        if source is None:
            return
        stats, began, waited = self._stats, time.perf_counter(), False
        while index >= self._covered:
            chunk = next(source)
            waited |= source.waited
            stats.chunks += 1
            self._ready.append(chunk)
            count = len(chunk.samples) * self._slots
            self._fill_at = self._covered + count // 2
            self._covered += count
        if waited:
            stats.add_wait(time.perf_counter() - began)
        self._fills = index >= self._fill_at
        if self._fills:
            self._fill_at = sys.maxsize
        self._due = min(self._covered, self._fill_at)

    def _fill(self) -> None:
        """Set later chunks going, once there is nothing else to do that the planning thread could hold up."""
        if self._fills and self._source is not None:
            self._fills = False
            self._source.fill()

    def _finish(self) -> None:
        if self._source is not None:
            self._source.finish()
