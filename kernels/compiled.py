"""The decorator that compiles a loop with numba: without the GIL, cached on disk where there is a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call; a read-only installation without a cache folder compiles every time.

    numba's cache watches the file of a function, not the files of those it calls: functions that call each other
    belong in one file.
    """
    try:
        made: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        made = njit(nogil=True, error_model="numpy")(function)
    return made
