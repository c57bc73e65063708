"""The policies: how often each task is drawn, and for how many steps.

Each has a version that is part of every schedule and state:

- "legacy" (1, the default): in proportion to the sum of the sources' legacy sizes, whatever their unit;
- "epoch" (1): in proportion to the tasks' nominal epochs E_t, in optimizer steps;
- "model_prob" (1): explicit weights;
- "num_epoch_dict" (1): e_t nominal epochs of task t, so p_t = e_t E_t / sum(e E) and ceil(sum(e E)) steps.

A version never changes what it means; a change of meaning is a new version, and the default stays. Probabilities are
exact rationals; resolving is O(tasks + sources).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from gpusampler.errors import ParameterError, ParameterTypeError, check_choice, check_int, quote
from gpusampler.tasks.agree import ProcessGroup, agreed
from gpusampler.tasks.draws import DRAWS
from gpusampler.tasks.exact import MAX_STEPS, as_floats, exact_float, normalise, round_up
from gpusampler.tasks.schedule import TaskSchedule
from gpusampler.tasks.source import Task

Weight: TypeAlias = "float | Fraction | str"
POLICIES = ("legacy", "epoch")
POLICY_VERSION = 1
_FRACTION = re.compile(r"[0-9]{1,4000}(/0*[1-9][0-9]{0,3999})?")
# Weights whose float sum is 1.0 are shown as they were given; dividing by the exact sum would move last digits.
_FLOAT_SLACK = Fraction(1, 2**53)


def resolve_task_schedule(
    tasks: Iterable[Task] | Task,
    policy: str | None = "legacy",
    num_steps: int | None = None,
    model_prob: Mapping[str, Weight] | None = None,
    num_epoch_dict: Mapping[str, Weight] | None = None,
    seed: int = 0,
    *,
    draw: str = "iid",
    policy_version: int | None = POLICY_VERSION,
    exclude: Collection[str] | str = (),
    process_group: ProcessGroup = "auto",
) -> TaskSchedule:
    """Resolve how often each task is drawn.

    Args:
        tasks: The tasks, with unique names.
        policy: "legacy" (also None) or "epoch"; `model_prob` and `num_epoch_dict`, where given, take its place.
        num_steps: Budget of optimizer steps; may stay open (None) while nothing iterates over it. Not with
            `num_epoch_dict`.
        model_prob: Weight of every task, at least 0; normalised. A task of weight 0 is never drawn. Also fractions,
            as text too: what a report says of another policy.
        num_epoch_dict: Nominal epochs of every task, above 0, fractions allowed. Not with `num_steps` or `model_prob`.
        seed: Seed of all draws.
        draw: "iid" for independent draws; "low_discrepancy" for counts within one step of their expectation at every
            step.
        policy_version: Version of the policy that the configuration was written for; None is 1.
        exclude: Names of tasks to leave out, or "empty" for every task without batches; `excluded` then lists them.
        process_group: Processes that must resolve the same schedule; "auto" is the world when torch.distributed runs
            with more than one process. None resolves for this process alone.

    Raises:
        ParameterError: A value cannot be honoured, a task is empty, or (on every rank) the ranks do not agree.

    Example:
        >>> tasks = [Task("water", sources=[100]), Task("alloy", sources=[10])]
        >>> schedule = resolve_task_schedule(tasks, policy="epoch", num_steps=1000)
        >>> schedule.probabilities == {"water": 10 / 11, "alloy": 1 / 11}
        True
        >>> resolve_task_schedule(tasks, num_epoch_dict={"water": 0.5, "alloy": 3}).num_steps
        80
    """

    def resolve() -> TaskSchedule:
        if policy_version is not None and check_int("policy_version", policy_version) != POLICY_VERSION:
            raise ParameterError(
                f"policy_version must be {POLICY_VERSION}, which this release knows, got {policy_version!r}"
            )
        kept, excluded = _exclude(_check_tasks(tasks), exclude)
        name, weights = _weights(
            kept, excluded, "legacy" if policy is None else policy, num_steps, model_prob, num_epoch_dict
        )
        return _schedule(kept, excluded, name, weights, num_steps, check_int("seed", seed), draw)

    return agreed(resolve, TaskSchedule.compared, process_group)


def _check_tasks(tasks: Iterable[Task] | Task) -> list[Task]:
    if isinstance(tasks, Task):
        tasks = [tasks]
    if not isinstance(tasks, Iterable):
        raise ParameterTypeError(f"tasks must be a list of Task, got {quote(tasks)}")
    listed = list(tasks)
    names: dict[str, int] = {}
    for index, task in enumerate(listed):
        if not isinstance(task, Task):
            raise ParameterTypeError(f"tasks[{index}] must be a Task, got {quote(task)}")
        if task.name in names:
            raise ParameterError(f"tasks[{names[task.name]}] and tasks[{index}] have the same name {task.name!r}")
        names[task.name] = index
    return listed


def _exclude(tasks: list[Task], exclude: Collection[str] | str) -> tuple[list[Task], tuple[str, ...]]:
    if exclude == "empty":
        left_out = {task.name for task in tasks if task.is_empty}
    elif isinstance(exclude, str) or not isinstance(exclude, Collection):
        raise ParameterError(f'exclude must be a list of task names or "empty", got {quote(exclude)}')
    else:
        for index, name in enumerate(exclude):
            if not isinstance(name, str):
                raise ParameterTypeError(f"exclude[{index}] must be the name of a task, got {quote(name)}")
        left_out = set(exclude)
        unknown = left_out - {task.name for task in tasks}
        if unknown:
            raise ParameterError(f"exclude names no task: {sorted(unknown)}; tasks are {[task.name for task in tasks]}")
    kept = [task for task in tasks if task.name not in left_out]
    if not kept:
        raise ParameterError(f"tasks must hold at least one task, got {len(tasks)} of which {len(left_out)} excluded")
    return kept, tuple(task.name for task in tasks if task.name in left_out)


def _weights(
    tasks: list[Task],
    excluded: Sequence[str],
    policy: str,
    num_steps: int | None,
    model_prob: Mapping[str, Weight] | None,
    num_epoch_dict: Mapping[str, Weight] | None,
) -> tuple[str, list[Fraction]]:
    """Name of what decides, and a weight for each task; nominal epochs for "num_epoch_dict"."""
    check_choice("policy", policy, POLICIES)
    weighted = [task.name for task in tasks if task.weight is not None]
    if weighted:
        if model_prob is not None or num_epoch_dict is not None:
            raise ParameterError(f"weight (of tasks {weighted}) excludes model_prob and num_epoch_dict")
        if len(weighted) < len(tasks):
            without = [task.name for task in tasks if task.weight is None]
            raise ParameterError(f"weight must be given for every task or for none: {weighted} have one, {without} not")
        model_prob = {task.name: task.weight for task in tasks if task.weight is not None}
    if num_epoch_dict is not None:
        for name, value in (("num_steps", num_steps), ("model_prob", model_prob)):
            if value is not None:
                raise ParameterError(
                    f"num_epoch_dict decides the steps and probabilities and excludes {name}, got {quote(value)}"
                )
        epochs = _values("num_epoch_dict", num_epoch_dict, tasks, excluded)
        for task, wanted in zip(tasks, epochs, strict=True):
            if wanted == 0:
                raise ParameterError(
                    f"num_epoch_dict[{task.name!r}] must be above 0, got {num_epoch_dict[task.name]!r}"
                )
        return "num_epoch_dict", epochs
    if model_prob is not None:
        return "model_prob", _values("model_prob", model_prob, tasks, excluded)
    return policy, [Fraction(task.legacy_size if policy == "legacy" else task.epoch_length) for task in tasks]


def _values(what: str, values: Mapping[str, Weight], tasks: list[Task], excluded: Sequence[str]) -> list[Fraction]:
    if not isinstance(values, Mapping):
        raise ParameterTypeError(f"{what} must map task names to numbers, got {quote(values)}")
    names = [task.name for task in tasks]
    unknown = [name for name in values if name not in names and name not in excluded]
    missing = [name for name in names if name not in values]
    if unknown or missing:
        raise ParameterError(f"{what} must name every task: unknown {unknown}, missing {missing}; tasks are {names}")
    exact = {name: _number(f"{what}[{name!r}]", value) for name, value in values.items()}
    return [exact[name] for name in names]


def _number(what: str, value: Any) -> Fraction:
    """A number, or a fraction as tables and reports write it."""
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        return Fraction(value)
    return exact_float(what, value, minimum=0.0)


def _schedule(
    tasks: list[Task],
    excluded: tuple[str, ...],
    policy: str,
    weights: list[Fraction],
    num_steps: int | None,
    seed: int,
    draw: str,
) -> TaskSchedule:
    lengths = {}
    for task, weight in zip(tasks, weights, strict=True):
        never_drawn = policy == "model_prob" and weight == 0
        lengths[task.name] = 0 if never_drawn and task.is_empty else task.epoch_length
    if policy == "num_epoch_dict":
        weights = [epochs * lengths[task.name] for task, epochs in zip(tasks, weights, strict=True)]
        num_steps = check_int("steps of num_epoch_dict", round_up(sum(weights, Fraction(0))), maximum=MAX_STEPS)
    exact = normalise(weights, "model_prob" if policy == "model_prob" else f"{policy} weights of the tasks")
    is_kept = policy == "model_prob" and abs(1 - sum(weights, Fraction(0))) <= _FLOAT_SLACK
    floats = as_floats(weights if is_kept else exact)
    names = [task.name for task in tasks]
    return TaskSchedule(
        tasks=tuple(tasks),
        policy=policy,
        policy_version=POLICY_VERSION,
        epoch_lengths=lengths,
        probabilities=dict(zip(names, floats, strict=True)),
        exact=dict(zip(names, exact, strict=True)),
        num_steps=None if num_steps is None else check_int("num_steps", num_steps, minimum=1, maximum=MAX_STEPS),
        draw=check_choice("draw", draw, DRAWS),
        seed=seed,
        excluded=excluded,
    )
