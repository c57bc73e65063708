"""Sources (the second level: groups within a task) and tasks, with their nominal epochs.

A source counts its batches once, when they are first needed. A task's nominal epoch is the number of optimizer steps
after which every source that is drawn is expected to have been seen in full: `ceil(max(n_i / p_i))` over the sources
with `p_i > 0`; with no probabilities given, simply the sum of their batches. O(sources).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sized
from fractions import Fraction
from functools import cached_property
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.tasks.count import Batches, check_batches, count_steps, resolve_batches
from gpusampler.tasks.draws import IndependentDraws, check_step, mix, name_key
from gpusampler.tasks.exact import exact_float, nominal_epoch, share_rest
from gpusampler.tasks.systems import SystemGroup

_SOURCE_LEVEL = 2


class EmptyTaskError(ParameterError):
    """A task has nothing to draw."""


class Source:
    """A group of batches within a task.

    Args:
        batches: Optimizer steps of one pass: an int, a callable that returns it (called once, when first needed), or a
            sampler, whose own length is divided by its accumulation. A `SystemGroup` adds the third level.
        prob: Probability of this source within its task, in proportion to those of the others when all have one.
            Sources without one share what the others leave of 1, in proportion to their batches. A source of
            probability 0 counts nothing, is never drawn, and is never asked for its length.
        name: What errors and reports call it; its position in the task by default.
        grad_accum: Micro-batches an optimizer step, for a sampler that does not say; a `SystemGroup` has its own.
        legacy_size: What the legacy policy counts, where its own rule (see `legacy_size`) does not fit.

    Raises:
        ParameterError: A value is out of range.

    Example:
        >>> Source(12, prob=0.25).num_steps, Source(range(9), grad_accum=2).num_steps
        (12, 5)
    """

    def __init__(
        self,
        batches: Batches,
        prob: float | None = None,
        *,
        name: str | None = None,
        grad_accum: int | None = None,
        legacy_size: int | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ParameterTypeError(f"name of a source must be a string, got {quote(name)}")
        self.name = name
        check_batches(batches, self._label)
        self.batches = batches
        self.exact_prob = None if prob is None else exact_float("prob", prob, minimum=0.0)
        self.prob = None if self.exact_prob is None else float(self.exact_prob)
        self.grad_accum = None if grad_accum is None else check_int("grad_accum", grad_accum, minimum=1)
        self._check_grad_accum(batches)
        self._legacy_size = None if legacy_size is None else check_int("legacy_size", legacy_size, minimum=0)

    @property
    def _label(self) -> str:
        return "the source" if self.name is None else f"source {self.name!r}"

    @cached_property
    def workload(self) -> int | Sized:
        """The count or sampler, a callable called once."""
        workload = resolve_batches(self.batches, self._label)
        self._check_grad_accum(workload)
        return workload

    def _check_grad_accum(self, workload: Any) -> None:
        if self.grad_accum is not None and isinstance(workload, (numbers.Integral, SystemGroup)):
            raise ParameterError(
                f"grad_accum of {self._label} is {self.grad_accum}, but its batches are optimizer steps"
            )

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of one pass, counted once."""
        if isinstance(self.workload, SystemGroup):
            return self.workload.num_steps
        return count_steps(self.workload, self._label, self.grad_accum)

    @cached_property
    def legacy_size(self) -> int:
        """What task weights of old count: the data's `get_nsystems()`, else its length, else 1.

        The data is the `dataset` of a loader, else what was given as batches. The unit is systems, files, frames or
        micro-batches, as the data happens to count; an int or a callable has no data and counts 1.
        """
        if self._legacy_size is not None:
            return self._legacy_size
        data: Any = getattr(self.batches, "dataset", self.batches)
        if hasattr(data, "get_nsystems"):
            return check_int(f"get_nsystems() of {self._label}", data.get_nsystems(), minimum=0)
        try:
            return len(data)
        except (TypeError, NotImplementedError):
            return 1
        except (ValueError, OverflowError) as error:
            raise ParameterError(f"data of {self._label} have no length ({error}): give legacy_size") from error


class Task:
    """A task: what it draws from, and optionally how often.

    Args:
        name: Unique among the tasks of a schedule.
        sources: Its sources; anything that a `Source` counts stands for one without a probability.
        weight: Explicit weight of the task. Either every task of a schedule has one or none has; weights then act as
            `model_prob`.

    Raises:
        ParameterError: The name is empty or the weight is out of range.

    Example:
        >>> task = Task("water", sources=[Source(30, prob=0.75), Source(10, prob=0.25), Source(1000, prob=0)])
        >>> task.epoch_length, [float(p) for p in task.probabilities]
        (40, [0.75, 0.25, 0.0])
    """

    def __init__(self, name: str, sources: Iterable[Source | Batches] | Source, *, weight: float | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ParameterTypeError(f"name of a task must be a non-empty string, got {quote(name)}")
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ParameterError(f"name of a task must be text that UTF-8 can hold, got {quote(name)}")
        if isinstance(sources, Source):
            sources = [sources]
        if isinstance(sources, str) or not isinstance(sources, Iterable):
            raise ParameterTypeError(f"sources of task {name!r} must be a list of Source, got {quote(sources)}")
        self.name = name
        self.sources = tuple(source if isinstance(source, Source) else Source(source) for source in sources)
        weighed = None if weight is None else exact_float(f"weight of task {name!r}", weight, minimum=0.0)
        self.weight = None if weighed is None else float(weighed)
        self._draws: tuple[int, IndependentDraws] | None = None

    def _naming(self, index: int) -> str:
        name = self.sources[index].name
        return f"source {index if name is None else repr(name)} of task {self.name!r}"

    @cached_property
    def source_sizes(self) -> tuple[int, ...]:
        """Optimizer steps of one pass over each source; 0 for one of probability 0, which is not counted."""
        return self._of_each(lambda source: 0 if source.prob == 0 else source.num_steps)

    def _of_each(self, size: Callable[[Source], int]) -> tuple[int, ...]:
        sizes = []
        for index, source in enumerate(self.sources):
            try:
                sizes.append(size(source))
            except ParameterError as error:
                raise type(error)(f"{self._naming(index)}: {error}") from error
        return tuple(sizes)

    @property
    def is_empty(self) -> bool:
        """Whether no source has batches to draw."""
        return not any(self.source_sizes)

    @cached_property
    def probabilities(self) -> tuple[Fraction, ...]:
        """Probability of each source within the task, exact.

        Raises:
            EmptyTaskError: No source has batches to draw.
            ParameterError: The probabilities cannot be honoured.
        """
        if self.is_empty:
            counts = [f"{self._naming(i)}: prob {s.prob}, 0 batches" for i, s in enumerate(self.sources)]
            raise EmptyTaskError(f"task {self.name!r} has no batches to draw ({'; '.join(counts) or 'no sources'})")
        given = [source.exact_prob for source in self.sources]
        return share_rest(given, self.source_sizes, f"prob of the sources of task {self.name!r}")

    @cached_property
    def epoch_length(self) -> int:
        """Optimizer steps of a nominal epoch of the task.

        Raises:
            EmptyTaskError: No source has batches to draw.
            ParameterError: A source is drawn and has no batches.
        """
        names = [self._naming(index) for index in range(len(self.sources))]
        return nominal_epoch(self.source_sizes, self.probabilities, names)

    @property
    def legacy_size(self) -> int:
        """Sum of the sources' legacy sizes, those of probability 0 included, as of old."""
        return sum(self._of_each(lambda source: source.legacy_size))

    def source_key(self, seed: int) -> int:
        """Key of the draws inside this task: of the schedule's seed and the task's name, not of its position."""
        return mix(check_int("seed", seed), name_key(self.name), _SOURCE_LEVEL)

    def source_at(self, step: int, seed: int = 0) -> int:
        """Position of the source drawn at `step`, from (seed, step) alone.

        Args:
            step: Global optimizer step.
            seed: Seed of the schedule.
        """
        key = self.source_key(seed)
        if self._draws is None or self._draws[0] != key:
            self._draws = key, IndependentDraws(self.probabilities, key)
        return self._draws[1].at(check_step(step))
