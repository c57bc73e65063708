"""What a run of so many steps can be expected to do: visits and nominal epochs, and how far one run can stray from
them.

Independent draws: visits are binomial; Bernstein's inequality bounds their distance from the mean by t with a
probability of at least 1 - 2 exp(-t^2 / (2 (variance + t / 3))), which holds for any number of steps, also where a
normal approximation does not. The low-discrepancy sequence strays by less than one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from gpusampler.errors import ParameterError, check_int
from gpusampler.tasks.exact import MAX_STEPS
from gpusampler.tasks.schedule import TaskSchedule

# A task's visits stray by more in at most one run in a thousand.
CONFIDENCE = 0.999


@dataclass(frozen=True)
class ExpectedVisits:
    """Expectation for one task, or for one of its sources.

    Attributes:
        task: Name of the task.
        source: Position of the source in the task; None in the row of the task.
        probability: Share of all steps.
        batches: Optimizer steps in a nominal epoch of the task, or in one pass over the source.
        visits: Expected steps.
        passes: Expected nominal epochs of the task, or passes over the source; 0 for a source that is never drawn.
        stray: Steps by which one run's visits can differ from `visits`: a sure bound for low-discrepancy draws of
            tasks, else one that holds in at least 999 of 1000 runs.
        name: Name of the source, None where it has none and in the row of the task.
    """

    task: str
    source: int | None
    probability: float
    batches: int
    visits: float
    passes: float
    stray: float
    name: str | None = None


def stray(num_steps: int, probability: float) -> float:
    """Bound on |visits - expectation| that holds in at least 999 of 1000 runs of independent draws.

    Example:
        >>> round(stray(10_000, 0.5), 1), stray(10_000, 1.0)
        (197.5, 0.0)
    """
    expected = num_steps * probability
    if probability in (0.0, 1.0):
        return 0.0
    log_term = math.log(2 / (1 - CONFIDENCE))
    bound = log_term / 3 + math.sqrt(log_term**2 / 9 + 2 * expected * (1 - probability) * log_term)
    return min(bound, max(expected, num_steps - expected))


def expected_visits(schedule: TaskSchedule, num_steps: int | None = None) -> list[ExpectedVisits]:
    """One row a task, each followed by the rows of its sources where it has more than one.

    Args:
        schedule: A resolved schedule.
        num_steps: Steps of the run; by default the budget of the schedule.

    Raises:
        ParameterError: Neither says how many steps.
    """
    steps = schedule.num_steps if num_steps is None else check_int("num_steps", num_steps, 1, MAX_STEPS)
    if steps is None:
        raise ParameterError("num_steps must be given: the schedule has no budget of its own")
    rows = []
    for task in schedule.tasks:
        share = schedule.exact[task.name]
        sure = schedule.draw == "low_discrepancy"
        rows.append(_row(task.name, None, share, schedule.epoch_lengths[task.name], steps, sure))
        if share > 0 and len(task.sources) > 1:
            for index, (size, p) in enumerate(zip(task.source_sizes, task.probabilities, strict=True)):
                row = _row(task.name, index, share * p, size, steps, sure=False)
                rows.append(replace(row, name=task.sources[index].name))
    return rows


def _row(task: str, source: int | None, share: Fraction, batches: int, steps: int, sure: bool) -> ExpectedVisits:
    visits = share * steps
    return ExpectedVisits(
        task=task,
        source=source,
        probability=float(share),
        batches=batches,
        visits=float(visits),
        passes=float(visits / batches) if batches else 0.0,
        stray=float(0 < share < 1) if sure else stray(steps, float(share)),
    )
