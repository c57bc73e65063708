"""A task schedule as plain configuration (JSON), checked key by key.

Schema: `{"policy", "policy_version", "num_steps", "model_prob", "num_epoch_dict", "seed", "draw", "exclude", "tasks"}`,
where `tasks` maps names to `{"sources": [...], "weight"}` (or just the list). A source has `prob` and `name`, and one
of

- `"batches"`: optimizer steps of one pass;
- `"systems"`: optimizer steps of one pass over each system, with `auto_prob` or `sys_probs`;
- `"lengths"`: an .npy file with one length a sample; `"records"`: a record store or a folder of them. Both take
`sampler`, the
  arguments of `GPUBatchRebalanceSampler` that decide its length, `max_length`, and `auto_prob` or `sys_probs`.

Paths are relative to the folder of the configuration. A configuration that names no policy is "legacy".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.tasks.adapters import Lengths, MakeSampler, System, array_systems, make_source, record_systems
from gpusampler.tasks.policies import resolve_task_schedule
from gpusampler.tasks.schedule import TaskSchedule
from gpusampler.tasks.source import Source, Task
from gpusampler.tasks.systems import SystemGroup

_TOP = ("policy", "policy_version", "num_steps", "model_prob", "num_epoch_dict", "seed", "draw", "exclude", "tasks")
_FORMS = ("batches", "systems", "lengths", "records")
_SAMPLER = ("effective_batch_size", "dp_size", "grad_accum", "drop_last", "max_tokens", "lookahead")


def schedule_from_config(config: Mapping[str, Any], folder: str | Path = ".") -> TaskSchedule:
    """Resolve the schedule that a configuration describes, for this process alone.

    Args:
        config: As read from JSON.
        folder: Where relative paths start.

    Raises:
        ParameterError: A key is unknown, or a value cannot be honoured.

    Example:
        >>> tasks = {"water": [{"batches": 100}], "alloy": [{"batches": 10}]}
        >>> config = {"policy": "epoch", "num_steps": 1000, "tasks": tasks}
        >>> schedule_from_config(config).epoch_lengths
        {'water': 100, 'alloy': 10}
    """
    _check_keys("configuration", config, _TOP)
    tasks = config.get("tasks")
    if not isinstance(tasks, Mapping):
        raise ParameterTypeError(f"tasks must map names to tasks, got {quote(tasks)}")
    exclude = config.get("exclude", ())
    left_out = exclude if isinstance(exclude, list) else ()  # not read: what makes them unusable does not matter
    return resolve_task_schedule(
        [Task(name, []) if name in left_out else _task(name, task, Path(folder)) for name, task in tasks.items()],
        policy=config.get("policy"),
        num_steps=config.get("num_steps"),
        model_prob=config.get("model_prob"),
        num_epoch_dict=config.get("num_epoch_dict"),
        seed=config.get("seed", 0),
        draw=config.get("draw", "iid"),
        policy_version=config.get("policy_version"),
        exclude=exclude,
        process_group=None,
    )


def _check_keys(what: str, given: Any, known: Collection[str]) -> None:
    if not isinstance(given, Mapping):
        raise ParameterTypeError(f"{what} must be a mapping, got {quote(given)}")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ParameterError(f"{what} has unknown keys {unknown}; known are {list(known)}")


def _task(name: str, task: Any, folder: Path) -> Task:
    described: Any = {"sources": task} if isinstance(task, list) else task
    _check_keys(f"task {name!r}", described, ("sources", "weight"))
    sources = described.get("sources", [])
    if not isinstance(sources, list):
        raise ParameterTypeError(f"sources of task {name!r} must be a list, got {quote(sources)}")
    made = [_source(f"source {index} of task {name!r}", source, folder) for index, source in enumerate(sources)]
    return Task(name, made, weight=described.get("weight"))


def _source(what: str, source: Any, folder: Path) -> Source:
    _check_keys(
        what, source, (*_FORMS, "prob", "name", "auto_prob", "sys_probs", "sampler", "max_length", "legacy_size")
    )
    forms = [form for form in _FORMS if form in source]
    if len(forms) != 1:
        raise ParameterError(f"{what} must have one of {list(_FORMS)}, got {forms}")
    try:
        return _BUILDERS[forms[0]](source, folder)
    except ParameterError as error:
        raise ParameterError(f"{what}: {error}") from error


def _counted(source: Mapping[str, Any], folder: Path) -> Source:
    _check_keys("a source with batches", source, ("batches", "prob", "name", "legacy_size"))
    check_int("batches", source["batches"], minimum=0)
    return Source(**source)


def _grouped(source: Mapping[str, Any], folder: Path) -> Source:
    _check_keys("a source with systems", source, ("systems", "prob", "name", "auto_prob", "sys_probs", "legacy_size"))
    if not isinstance(source["systems"], list):
        raise ParameterTypeError(f"systems must be a list of ints, got {quote(source['systems'])}")
    for index, batches in enumerate(source["systems"]):
        check_int(f"systems[{index}]", batches, minimum=0)
    group = SystemGroup(source["systems"], source.get("auto_prob", "prob_sys_size"), source.get("sys_probs"))
    return Source(group, source.get("prob"), name=source.get("name"), legacy_size=source.get("legacy_size"))


def _from_lengths(source: Mapping[str, Any], folder: Path) -> Source:
    path = _path(folder, source["lengths"])
    try:
        lengths = np.lib.format.open_memmap(path, mode="r")  # .npy only: no pickles, no archives
    except (OSError, ValueError) as error:
        raise ParameterError(f"lengths must be an .npy file of one length a sample: {error}") from error
    return _sampled(array_systems(lengths, path.stem), source)


def _from_records(source: Mapping[str, Any], folder: Path) -> Source:
    return _sampled(record_systems(_path(folder, source["records"])), source)


def _path(folder: Path, value: Any) -> Path:
    if not isinstance(value, str):
        raise ParameterTypeError(f"a path must be a string, got {quote(value)}")
    return folder / value


def _sampled(systems: list[System], source: Mapping[str, Any]) -> Source:
    options = source.get("sampler")
    _check_keys("sampler", options, _SAMPLER)
    return make_source(
        systems,
        _balancing(dict(options or {})),
        prob=source.get("prob"),
        max_length=source.get("max_length"),
        auto_prob=source.get("auto_prob", "prob_sys_size"),
        sys_probs=source.get("sys_probs"),
        name=source.get("name"),
        legacy_size=source.get("legacy_size"),
    )


def _balancing(options: dict[str, Any]) -> MakeSampler:
    if "effective_batch_size" not in options:
        raise ParameterError(f"sampler must have effective_batch_size, got {options}")

    def make(lengths: Lengths) -> Any:
        from gpusampler.sampler import GPUBatchRebalanceSampler

        return GPUBatchRebalanceSampler(lengths, **options, rank=0, process_group=None)

    return make


_BUILDERS: dict[str, Callable[[Mapping[str, Any], Path], Source]] = {
    "batches": _counted,
    "systems": _grouped,
    "lengths": _from_lengths,
    "records": _from_records,
}
