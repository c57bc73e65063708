"""Errors that users see, and the argument checks that raise them.

Every message names the parameter and quotes the value (and the index, where the value sits in a sequence).
The classes derive from the builtin that a caller would catch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any


class ParameterError(ValueError):
    """A parameter has a value that cannot be honoured."""


class ParameterTypeError(ParameterError, TypeError):
    """A parameter has a type that cannot be honoured (also a `ValueError`: one `except` serves both)."""


class NotAvailableError(ParameterError, NotImplementedError):
    """A documented option that this version does not have yet."""


class DistributedError(RuntimeError):
    """The ranks of a process group cannot go on together: they disagree, one failed, or one does not answer."""


def quote(value: object, limit: int = 80) -> str:
    """`repr(value)`, cut to `limit` characters: a message never dumps a tensor."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError) as error:  # an int of too many digits, a value nested too deep
        text = f"a value of type {type(value).__name__} that cannot be shown ({error})"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_int(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as a builtin int; numpy and other integral types pass, bool and float do not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ParameterTypeError(f"{name} must be an int, got {quote(value)} of type {type(value).__name__}")
    result = int(value)
    if minimum is not None and result < minimum:
        raise ParameterError(f"{name} must be at least {minimum}, got {quote(result)}")
    if maximum is not None and result > maximum:
        raise ParameterError(f"{name} must be at most {maximum}, got {quote(result)}")
    return result


def check_float(name: str, value: Any, minimum: float | None = None) -> float:
    """Return `value` as a finite builtin float of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterTypeError(f"{name} must be a number, got {quote(value)} of type {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:
        raise ParameterError(f"{name} must be at most 1.8e308, got {quote(value)}") from None
    if not math.isfinite(result):
        raise ParameterError(f"{name} must be finite, got {result}")
    if minimum is not None and result < minimum:
        raise ParameterError(f"{name} must be at least {minimum}, got {result}")
    return result


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; numpy's bool passes, 0 and 1 do not."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ParameterTypeError(f"{name} must be True or False, got {quote(value)} of type {type(value).__name__}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}, got {quote(value)}")
    return value
