"""The decorator that compiles a loop with numba: without the GIL, cached on disk where there is a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` on its first call; a read-only installation without a cache folder compiles every time.

    numba's cache watches the file of a function, not the files of those it calls: functions that call each other
    belong in one file.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)
