"""Batches of a workload in optimizer steps, from the one place that knows them: the sampler's own length.

A length is already after filtering, batching, internal resampling, distributed splitting and the treatment of the tail,
because it is what iterating will yield. It is in micro-batches, so it is divided by the accumulation, rounded up: a
short last window is still a step.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Set, Sized
from typing import Any, TypeAlias

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.tasks.exact import MAX_STEPS

Batches: TypeAlias = "int | Sized | Callable[[], Any]"


def accumulation(sampler: object) -> int:
    """Micro-batches an optimizer step of `sampler`, or of the batch sampler in a `DataLoader`; 1 if neither says."""
    for holder in (sampler, getattr(sampler, "batch_sampler", None)):
        value = getattr(holder, "grad_accum", None)
        if value is not None:
            return check_int("grad_accum", value, minimum=1)
    return 1


def check_batches(batches: Any, name: str) -> None:
    """Raise unless `batches` is a count, has a length, or can be called for one.

    Args:
        batches: The workload.
        name: What errors call it.

    Raises:
        ParameterError: A count is negative, or the type is none of these.
    """
    if isinstance(batches, numbers.Integral):
        check_int(f"batches of {name}", batches, minimum=0, maximum=MAX_STEPS)
    elif isinstance(batches, (str, bytes, Mapping, Set)) or not (isinstance(batches, Sized) or callable(batches)):
        raise ParameterTypeError(
            f"batches of {name} must be an int, a sampler with a length, or a callable that returns one, "
            f"got {quote(batches)} of type {type(batches).__name__}"
        )


def resolve_batches(batches: Batches, name: str) -> int | Sized:
    """The count or sampler that `batches` is or, called, returns.

    Args:
        batches: The workload.
        name: What errors call it.

    Raises:
        ParameterError: It is, or returns, neither.
    """
    check_batches(batches, name)
    if callable(batches) and not isinstance(batches, Sized):
        try:
            batches = batches()
        except ParameterError as error:
            raise type(error)(f"{name}: {error}") from error
        except Exception as error:
            raise ParameterError(f"the callable of {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(batches, Sized):
            what = f"batches that the callable of {name} returns"
            return check_int(what, batches, minimum=0, maximum=MAX_STEPS)
        check_batches(batches, name)
    return int(batches) if isinstance(batches, numbers.Integral) else batches


def count_steps(batches: Batches, name: str, grad_accum: int | None = None) -> int:
    """Optimizer steps in one pass over `batches`.

    Args:
        batches: An int (already in optimizer steps), a sampler or anything else with a length in micro-batches, or a
            callable that returns one of these.
        name: What errors call it.
        grad_accum: Micro-batches an optimizer step, where a sampler does not say.

    Raises:
        ParameterError: There is no length, or it is negative.

    Example:
        >>> count_steps(12, "a"), count_steps(lambda: 5, "b"), count_steps(range(9), "c", grad_accum=2)
        (12, 5, 5)
    """
    workload = resolve_batches(batches, name)
    if isinstance(workload, int):
        return workload
    try:
        length = len(workload)
    except ParameterError:
        raise
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        raise ParameterError(f"batches of {name} have no length ({error}): give their number as an int") from error
    return -(-length // (accumulation(workload) if grad_accum is None else grad_accum))
