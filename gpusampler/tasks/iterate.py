"""One pass of a `MultiTaskBatchSampler`: the items, and the state that a loader keeps for each of them.

The sampler holds the place, as its samplers are at one place at a time: the pass that was begun last reads on, and an
older one raises. O(1) an item.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gpusampler.errors import ParameterError, check_int
from gpusampler.handout import Handout
from gpusampler.tasks.schedule import Drawn

if TYPE_CHECKING:
    from gpusampler.tasks.sampler import MultiTaskBatchSampler


class TaskBatch(tuple[str, list[int]]):
    """The pair (task, indices), with where it comes from.

    Attributes:
        step: Global optimizer step.
        source: Position of the source in the task; `indices` count within its data.
        system: Position of the system in the source, None without systems; `indices` then count within its data.
    """

    step: int
    source: int
    system: int | None

    def __new__(cls, task: str, indices: list[int], step: int, source: int, system: int | None) -> TaskBatch:
        """Pair `task` with `indices`."""
        batch = super().__new__(cls, (task, indices))
        batch.step, batch.source, batch.system = step, source, system
        return batch

    @property
    def task(self) -> str:
        """Name of the task."""
        return self[0]

    @property
    def indices(self) -> list[int]:
        """One micro-batch of this rank."""
        return self[1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the attributes: loader workers get batches through a queue."""
        return TaskBatch, (*self, self.step, self.source, self.system)


class Place(NamedTuple):
    """Micro-batch `micro_batch` of optimizer step `step`, before it is read, and what the draws need to go on there."""

    step: int
    micro_batch: int
    draw_counts: list[int] | None


class TaskBatches(Iterator[TaskBatch]):
    """Iterator over the micro-batches of this rank in one pass.

    It begins with its first item, not before: loaders ask for more iterators than they use.

    Args:
        sampler: What it reads.
        handout: Counts what the training loop has taken.
    """

    def __init__(self, sampler: MultiTaskBatchSampler, handout: Handout) -> None:
        self._sampler = sampler
        self._handout = handout
        self._epoch: int | None = None
        self._agreed = False
        self._ended = False
        self._unused: deque[tuple[Place, Drawn]] = deque()

    def __next__(self) -> TaskBatch:
        """Return the next micro-batch.

        Raises:
            ParameterError: On every rank, at the first: ranks are in different passes, or at different places.
            RuntimeError: The sampler has been iterated anew, or has loaded a state, since.
        """
        sampler = self._sampler
        if self._ended:
            raise StopIteration
        epoch = self._begin()
        if sampler._iteration is not self:
            raise RuntimeError("the sampler has moved on: another iteration has begun, or a state was loaded")
        place = sampler._here()
        if not self._agreed:
            sampler._agree(epoch)
            self._agreed = True
        if place.step >= (epoch + 1) * sampler.num_steps:
            self._ended = True
            raise StopIteration
        batch, drawn = sampler._read()
        self._unused.append((place, drawn))
        self._handout.handed += 1
        self.unused()
        return batch

    def unused(self) -> deque[tuple[Place, Drawn]]:
        """Places that were handed out and that training has not used, from the first on, with what they read."""
        while len(self._unused) > self._handout.handed - self._handout.consumed:
            self._unused.popleft()
        return self._unused

    def state_dict(self) -> dict[str, Any]:
        """Place behind what was handed out; torchdata's StatefulDataLoader keeps it for each item under way."""
        state = self._sampler._state(self._begin(), self._sampler._here(), {})
        return {**state, "handed": self._handout.handed - self._handout.base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind what was handed out; the loader goes on counting from where it was."""
        sampler, chosen = self._sampler, self._sampler._epoch_before_load
        handed = check_int("handed of the state", state.get("handed"), minimum=0)
        sampler.load_state_dict(state)
        self._handout.handed = self._handout.base + handed
        self._epoch = sampler._begin(self)
        if sampler._here().step == (self._epoch + 1) * sampler.num_steps:
            sampler.set_epoch(max(self._epoch, chosen))  # a loader that has finished asks for the next pass

    def _begin(self) -> int:
        """Begin if that has not been done; returns the pass."""
        if self._epoch is None:
            self._epoch = self._sampler._begin(self)
        return self._epoch


def refuse_dealing(sampler: object) -> None:
    """Find out whether Lightning iterates `sampler` to deal its items out; to be called from its `__iter__`.

    Raises:
        ParameterError: It does, as with every sampler of a distributed run by default: ranks would train different
            tasks in the same step.
    """
    fields = getattr(sys._getframe(2).f_locals.get("self"), "__dict__", {})
    if fields.get("_sampler") is sampler and "_sampler_list" in fields:
        raise ParameterError(
            "use_distributed_sampler=True cannot be honoured: the sampler yields the micro-batches of this rank "
            "already, and Lightning would shuffle them and deal them out; set use_distributed_sampler=False"
        )
