"""One table on every rank, or an error on every rank: compared before the first step.

Ranks that drew from different tables would train different tasks in the same collective and never notice. Each gathers
the tables (or errors) of all: one collective of a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist

from gpusampler.errors import ParameterError, ParameterTypeError, quote

ProcessGroup: TypeAlias = "dist.ProcessGroup | Literal['auto'] | None"
T = TypeVar("T")
_LIMIT = 2000


def gather(value: Any, process_group: ProcessGroup) -> list[Any]:
    """`value` of every rank of the group, in rank order; only the own one without a group.

    Args:
        value: Anything that pickles.
        process_group: The processes that must agree; "auto" is the world when torch.distributed runs with more than one
            process; None is this process alone.
    """
    if process_group is None:
        return [value]
    if isinstance(process_group, str):
        if process_group != "auto":
            raise ParameterTypeError(f'process_group must be a group, "auto" or None, got {quote(process_group)}')
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return [value]
        process_group = dist.group.WORLD
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def agreed(
    make: Callable[[], T],
    view: Callable[[T], dict[str, Any]],
    process_group: ProcessGroup,
    differ: str = "resolve different task schedules",
) -> T:
    """What `make` returns, if it succeeds on every rank and `view` of it is the same there.

    Args:
        make: Resolves something on this rank; no rank waits for one on which it raises.
        view: What ranks must have in common, by field.
        process_group: The processes that must agree, as in `gather`.
        differ: What ranks do whose views are not the same.

    Raises:
        ParameterError: Another rank raised, or ranks differ; shows the views of rank 0 and of the first that differs.
    """
    try:
        made = make()
    except Exception as error:
        gather((str(error), None), process_group)
        raise
    answers = gather((None, view(made)), process_group)
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            raise ParameterError(f"rank {rank} cannot resolve the task schedule: {failure}")
    first = answers[0][1]
    for rank, (_, other) in enumerate(answers):
        if other != first:
            differing = [key for key in first if first[key] != other.get(key)]
            shown, others = ({key: table[key] for key in (*differing, *table)} for table in (first, other))
            raise ParameterError(
                f"ranks {differ}, by {', '.join(differing)}: "
                f"rank 0 has {quote(shown, _LIMIT)}, rank {rank} has {quote(others, _LIMIT)}"
            )
    return made
