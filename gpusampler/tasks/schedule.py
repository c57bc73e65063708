"""A resolved schedule: which task, source and system every optimizer step reads.

The three levels draw apart: each has its own key, so that what a task holds never moves the draws between tasks, and
one task's sources never move another's. Independent draws are O(log tasks) at any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from gpusampler.tasks.draws import Draws, check_step, make_draws, mix, name_key
from gpusampler.tasks.source import Task
from gpusampler.tasks.systems import SystemGroup

_TASK_LEVEL = 1


class Drawn(NamedTuple):
    """What a step reads: positions of a task, of a source in it, and of a system in that (None without systems)."""

    task: int
    source: int
    system: int | None


@dataclass(frozen=True, eq=False)
class TaskSchedule:
    """Which task every optimizer step trains; made by `resolve_task_schedule`.

    Attributes:
        tasks: The tasks that take part, in the order given.
        policy: "legacy", "epoch", "model_prob" or "num_epoch_dict".
        policy_version: Version of the policy's meaning.
        epoch_lengths: Optimizer steps in a nominal epoch of each task.
        probabilities: Probability of each task, as floats to read.
        exact: The same, as the rationals that decide.
        num_steps: Step budget; None where none was given.
        draw: "iid" or "low_discrepancy".
        seed: Seed of all draws.
        excluded: Tasks left out when asked, by name.
    """

    tasks: tuple[Task, ...]
    policy: str
    policy_version: int
    epoch_lengths: dict[str, int]
    probabilities: dict[str, float]
    exact: dict[str, Fraction]
    num_steps: int | None
    draw: str
    seed: int
    excluded: tuple[str, ...]

    @cached_property
    def draws(self) -> Draws:
        """The draws of the first level."""
        key = mix(self.seed, _TASK_LEVEL, *(name_key(task.name) for task in self.tasks))
        return make_draws(self.draw, list(self.exact.values()), key)

    def draw_at(self, step: int) -> Drawn:
        """Positions of the task, source and system that optimizer step `step` reads: one level after another."""
        index = self.draws.at(check_step(step))
        task = self.tasks[index]
        source = task.source_at(step, self.seed)
        group = task.sources[source].workload
        if not isinstance(group, SystemGroup):
            return Drawn(index, source, None)
        return Drawn(index, source, group.system_at(step, mix(task.source_key(self.seed), source)))

    def task_at(self, step: int) -> str:
        """Name of the task that optimizer step `step` trains: a function of (seed, step), the same on every rank.

        Args:
            step: From 0; steps beyond `num_steps` are answered too: they belong to later passes.
        """
        return self.tasks[self.draws.at(check_step(step))].name

    def count_tasks(self, start: int, stop: int) -> dict[str, int]:
        """Steps of each task in [start, stop): O(stop - start)."""
        counts = dict.fromkeys(self.epoch_lengths, 0)
        for step in range(check_step(start), check_step(stop)):
            counts[self.task_at(step)] += 1
        return counts

    def table(self) -> dict[str, Any]:
        """What decides the draws, in plain JSON types: ranks compare it, and states carry it."""
        return {
            "policy": self.policy,
            "policy_version": self.policy_version,
            "seed": self.seed,
            "draw": self.draw,
            "tasks": [task.name for task in self.tasks],  # draws depend on their order, which mappings do not compare
            "epoch_lengths": dict(self.epoch_lengths),
            "probabilities": {name: str(p) for name, p in self.exact.items()},
            "sources": {task.name: self._source_table(task) for task in self.tasks},
        }

    def compared(self) -> dict[str, Any]:
        """What ranks compare: the table, the budget, and the names, of which the positions that are drawn stand for."""
        names = {task.name: self._source_names(task) for task in self.tasks}
        return {**self.table(), "num_steps": self.num_steps, "names": names}

    def _source_names(self, task: Task) -> list[Any]:
        rows: list[Any] = [source.name for source in task.sources]
        for index, source in enumerate(task.sources if self.exact[task.name] else ()):
            if source.prob != 0 and isinstance(source.workload, SystemGroup):
                rows[index] = [rows[index], list(source.workload.names)]
        return rows

    def _source_table(self, task: Task) -> list[Any]:
        if not self.exact[task.name]:
            return []
        rows: list[Any] = [str(p) for p in task.probabilities]
        for index, source in enumerate(task.sources):
            if source.prob != 0 and isinstance(source.workload, SystemGroup):
                rows[index] = [rows[index], [str(p) for p in source.workload.exact]]
        return rows
