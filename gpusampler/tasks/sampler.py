"""Iterates a task schedule over the tasks' own samplers: one task each optimizer step, each sampler in its own epochs.

Every rank holds the same schedule and its own rank's samplers, so all ranks train the same task in the same step and
collectives inside the samplers keep their order. The place of every sampler is a function of the step (how often the
schedule has read it before), which is what a resume restores: O(samplers) for samplers with states, else one skip
within an epoch each. Ranks compare schedules, lengths and accumulations once, in the constructor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.handout import Consumer, Handout
from gpusampler.tasks.agree import ProcessGroup, agreed
from gpusampler.tasks.iterate import Place, TaskBatch, TaskBatches, refuse_dealing
from gpusampler.tasks.place import check_place
from gpusampler.tasks.reader import SamplerReader
from gpusampler.tasks.schedule import Drawn, TaskSchedule
from gpusampler.tasks.systems import SystemGroup

STATE_FORMAT = 1


class MultiTaskBatchSampler:
    """Yields (task, indices): `grad_accum` micro-batches of one task each optimizer step.

    In a `DataLoader` it goes where a sampler goes, and the dataset is indexed with the pair:
    `DataLoader(dataset, sampler=MultiTaskBatchSampler(schedule), batch_size=None)`.

    A pass is `schedule.num_steps` steps. Iterating starts the pass that `set_epoch` chose (0 at first) at its
    beginning, or, once after `load_state_dict`, where the state was taken. The tasks' own epochs go on from pass to
    pass.

    Args:
        schedule: With a step budget, and a sampler behind every source (or system) that it can draw.
        process_group: Processes that must agree; "auto" is the world when torch.distributed runs with more than one
            process.

    Raises:
        ParameterError: The schedule cannot be iterated, or (on every rank) the ranks do not agree.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from gpusampler.tasks import Task, resolve_task_schedule
        >>> water, alloy = BatchSampler(range(4), 2, False), BatchSampler(range(3), 3, False)
        >>> tasks = [Task("water", [water]), Task("alloy", [alloy])]
        >>> schedule = resolve_task_schedule(tasks, "epoch", num_steps=4, draw="low_discrepancy")
        >>> list(MultiTaskBatchSampler(schedule))
        [('water', [0, 1]), ('water', [2, 3]), ('alloy', [0, 1, 2]), ('water', [0, 1])]
    """

    def __init__(self, schedule: TaskSchedule, *, process_group: ProcessGroup = "auto") -> None:
        if not isinstance(schedule, TaskSchedule):
            raise ParameterTypeError(f"schedule must be a TaskSchedule, got {quote(schedule)}")
        if schedule.num_steps is None:
            raise ParameterError("schedule must have a step budget to be iterated: give num_steps or num_epoch_dict")
        self.schedule = schedule
        self.num_steps: int = schedule.num_steps
        self.epoch = 0
        self._process_group = process_group
        self._readers = agreed(lambda: _readers(schedule), lambda readers: _view(schedule, readers), process_group)
        self._step = 0
        self._micro_batch = 0
        self._resumed = False
        self._iteration: TaskBatches | None = None
        self._is_chosen = False
        self._epoch_before_load = 0
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        """Micro-batches of the current pass, the same on every rank; of every pass if all samplers accumulate alike."""
        accumulations = {reader.grad_accum for reader in self._readers.values()}
        if len(accumulations) == 1:
            return self.num_steps * accumulations.pop()
        if self.epoch not in self._lengths:
            start = self.epoch * self.num_steps
            self._lengths[self.epoch] = sum(self._read_between(start, start + self.num_steps).values())
        return self._lengths[self.epoch]

    def __iter__(self) -> TaskBatches:
        """Micro-batches of this rank, from the start of the pass or from where a state was loaded; its first item ends
        an iteration that was begun before.

        Raises:
            ParameterError: Lightning would deal the micro-batches out over ranks.
        """
        refuse_dealing(self)
        consumer = Consumer(self)
        return TaskBatches(self, Handout(0, consumer, skipped=consumer.skips or 0))

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass that the next iteration runs; the pass of a loaded state keeps its place, and choosing one
        before it is a warning.

        Args:
            epoch: From 0.
        """
        check_int("epoch", epoch, minimum=0)
        if epoch != self.epoch:
            if self._resumed and epoch < self.epoch:
                message = (
                    f"set_epoch({epoch}) forgets the place that was loaded in pass {self.epoch}: go on with that pass"
                )
                warnings.warn(message, stacklevel=2)
            self.epoch = int(epoch)
            self._resumed = False
            self._is_chosen = True

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Place of the schedule and of every sampler, in plain types.

        Args:
            consumed: Micro-batches of this pass, from its first, that training has used. Default: counted, which is
                right for a plain loop and for a torch `DataLoader`, with workers too; give it when something else reads
                ahead.

        Raises:
            ParameterError: `consumed` is more than was handed out.
        """
        here = self._here()
        if self._is_chosen:  # and has not begun
            here = Place(start := self.epoch * self.num_steps, 0, self.schedule.draws.counts(start))
        if consumed is not None:
            place = self._after(check_int("consumed", consumed, minimum=0))
            if place[:2] > here[:2]:
                raise ParameterError(f"consumed must be at most what this pass handed out, got {consumed}")
        elif self._iteration is not None and not self._is_chosen and (unused := self._iteration.unused()):
            return self._state(self.epoch, unused[0][0], Counter(drawn for _, drawn in unused))
        else:
            place = here
        return self._state(self.epoch, place, self._read_since(place))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the samplers of a schedule that draws the same.

        The step budget may differ: a longer run continues a shorter one. Ranks and accumulation may differ between two
        steps, if the samplers keep their steps. A state taken after the last item of a pass ends that pass: the next
        iteration yields nothing, and the one after it, or after `set_epoch`, is a whole pass.

        Raises:
            ParameterError: The state is of another format, policy, version, seed or table, or its place is none of this
                schedule; the message names the field.
        """
        if not isinstance(state, Mapping):
            raise ParameterTypeError(f"state must be a mapping from state_dict, got {quote(state)}")
        required = {"format": STATE_FORMAT, **self.schedule.table()}
        for field, value in required.items():
            if state.get(field) != value:
                raise ParameterError(
                    f"state has {field} {quote(state.get(field), 400)}, this schedule has {quote(value, 400)}"
                )
        step, micro_batch, pass_ended = check_place(state, {reader.label for reader in self._readers.values()})
        self.schedule.draws.resume(step, state["draw_counts"])  # first: the draw of this step then replays nothing
        grad_accum = self._readers[self.schedule.draw_at(step)].grad_accum
        if micro_batch >= grad_accum:
            raise ParameterError(
                f"state has micro_batch {micro_batch}, this schedule has grad_accum {grad_accum} there"
            )
        for drawn, reader in self._readers.items():
            read = state["read"][reader.label] * reader.grad_accum + self._partial(drawn, step, micro_batch)
            reader.seek(read, state["samplers"][reader.label])
        self._step, self._micro_batch = step, micro_batch
        self._epoch_before_load = self.epoch
        self.epoch = step // self.num_steps - (pass_ended and step % self.num_steps == 0)
        self._resumed = True
        self._is_chosen = False
        self._iteration = None

    def _begin(self, iteration: TaskBatches) -> int:
        """Let `iteration`, and no other, read on from here or from the start of the pass, which is returned."""
        if not self._resumed:
            self._go_to(self.epoch * self.num_steps)
        self._resumed, self._is_chosen = False, False
        self._iteration = iteration
        return self.epoch

    def _agree(self, epoch: int) -> None:
        """Raise on every rank if one is elsewhere: it would train other tasks in the same collectives."""
        place = {"pass": epoch, "step": self._step, "micro_batch": self._micro_batch}
        agreed(lambda: place, lambda _: place, self._process_group, "are at different places of the task schedule")

    def _here(self) -> Place:
        """Where the samplers are."""
        return Place(self._step, self._micro_batch, self.schedule.draws.counts(self._step))

    def _read(self) -> tuple[TaskBatch, Drawn]:
        """The micro-batch at this place, and where it comes from."""
        drawn = self.schedule.draw_at(self._step)
        reader = self._readers[drawn]
        task = self.schedule.tasks[drawn.task].name
        batch = TaskBatch(task, reader.next(), self._step, drawn.source, drawn.system)
        self._micro_batch += 1
        if self._micro_batch == reader.grad_accum:
            self._step, self._micro_batch = self._step + 1, 0
        return batch, drawn

    def _state(self, epoch: int, place: Place, ahead: Mapping[Drawn, int]) -> dict[str, Any]:
        """State at `place`, beyond which `ahead` micro-batches of each sampler have been read."""
        read, samplers = {}, {}
        for drawn, reader in self._readers.items():
            more = ahead.get(drawn, 0)
            read[reader.label] = (reader.micro_batches - more) // reader.grad_accum
            samplers[reader.label] = None if more else reader.sampler_state()
        return {
            "format": STATE_FORMAT,
            **self.schedule.table(),
            "num_steps": self.num_steps,
            "epoch": epoch,
            "step": place.step,
            "micro_batch": place.micro_batch,
            "draw_counts": place.draw_counts,
            "read": read,
            "samplers": samplers,
        }

    def _after(self, count: int) -> Place:
        """The place `count` micro-batches after the start of the pass."""
        step = self.epoch * self.num_steps
        while count and count >= (size := self._readers[self.schedule.draw_at(step)].grad_accum):
            step, count = step + 1, count - size
        return Place(step, count, self.schedule.draws.counts(step))

    def _read_since(self, place: Place) -> dict[Drawn, int]:
        """Micro-batches of each sampler from `place` to here, negative where `place` lies ahead."""
        sign = 1 if place.step <= self._step else -1
        read = self._read_between(min(place.step, self._step), max(place.step, self._step))
        return {
            drawn: sign * count
            + self._partial(drawn, self._step, self._micro_batch)
            - self._partial(drawn, place.step, place.micro_batch)
            for drawn, count in read.items()
        }

    def _partial(self, drawn: Drawn, step: int, micro_batch: int) -> int:
        """Micro-batches that an unfinished step has read of one sampler."""
        return micro_batch if micro_batch and self.schedule.draw_at(step) == drawn else 0

    def _read_between(self, start: int, stop: int) -> dict[Drawn, int]:
        """Micro-batches that steps [start, stop) read of each sampler: O(stop - start)."""
        read = dict.fromkeys(self._readers, 0)
        for step in range(start, stop):
            drawn = self.schedule.draw_at(step)
            read[drawn] += self._readers[drawn].grad_accum
        return read

    def _go_to(self, step: int) -> None:
        """Bring every sampler to where it is before `step`: nothing to do between passes, else O(steps from here)."""
        if (self._step, self._micro_batch) == (step, 0):
            return
        for drawn, micro_batches in self._read_since(Place(step, 0, None)).items():
            reader = self._readers[drawn]
            reader.seek(reader.micro_batches - micro_batches)
        self._step, self._micro_batch = step, 0


def _readers(schedule: TaskSchedule) -> dict[Drawn, SamplerReader]:
    """A reader for everything that the schedule can draw."""
    readers: dict[Drawn, SamplerReader] = {}
    owners: dict[int, str] = {}
    for t, task in enumerate(schedule.tasks):
        if not schedule.exact[task.name]:
            continue
        for s, (source, p) in enumerate(zip(task.sources, task.probabilities, strict=True)):
            group = source.workload
            leaves: list[tuple[int | None, Any, int]] = [(None, group, source.num_steps)]
            grad_accum = source.grad_accum
            if isinstance(group, SystemGroup):
                grad_accum = group.grad_accum_of_systems
                systems = zip(group.workloads, group.sizes, strict=True)
                leaves = [(i, system, size) for i, (system, size) in enumerate(systems) if group.exact[i]]
            for system, sampler, counted in leaves if p else []:
                label = f"{task.name}/{s}" if system is None else f"{task.name}/{s}/{system}"
                reader = readers[Drawn(t, s, system)] = SamplerReader(sampler, label, grad_accum)
                if reader.length != counted * reader.grad_accum:
                    raise ParameterError(
                        f"{label} has {reader.length} micro-batches, and had {counted} steps of {reader.grad_accum} "
                        "when the schedule counted them"
                    )
                owner = owners.setdefault(id(sampler), label)
                if owner != label:
                    raise ParameterError(f"{owner} and {label} share one sampler: each needs its own epochs")
    return readers


def _view(schedule: TaskSchedule, readers: Mapping[Drawn, SamplerReader]) -> dict[str, Any]:
    """What ranks must have in common."""
    shapes = {reader.label: [reader.length, reader.grad_accum] for reader in readers.values()}
    return {**schedule.compared(), "samplers": shapes}
