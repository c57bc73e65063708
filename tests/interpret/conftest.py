"""Kernels under Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest tests/interpret`.

The variable must be set before Triton is imported, and the process cannot compile kernels any more. Without it every
test here is skipped, which says so.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SENTINEL = -7


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start: `make interpret`")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives holds a sentinel, so that nothing passes by what memory happened to hold."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(SENTINEL))


@pytest.fixture(autouse=True, scope="session")
def patched_once() -> Iterator[None]:
    """Patch `triton.language` once a launch, not again at each call of a helper: a third of the time."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    active: list[set[int]] = []

    class Scope:
        def __init__(self, scope: object) -> None:
            self.scope = scope

        def restore(self) -> None:
            active.clear()
            self.scope.restore()

    class Nothing:
        def restore(self) -> None:
            pass

    def patch_once(function: Callable[..., object]) -> object:
        modules = {
            id(value) for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)
        }
        if modules <= set().union(*active):
            return Nothing()
        scope = patch(function)
        active.append(modules)
        return Scope(scope)

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch


@pytest.fixture(params=["forward", "reversed", "random"])
def program_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the programs of a launch in this order."""
    from triton.runtime.interpreter import interpreter_builder

    place = interpreter_builder.set_grid_idx
    rng = np.random.default_rng(0)
    orders: dict[tuple[int, ...], np.ndarray] = {}

    def permuted(x: int, y: int, z: int) -> None:
        grid = tuple(interpreter_builder.grid_dim)
        size = int(np.prod(grid))
        if (x, y, z) == (0, 0, 0):
            forward = np.arange(size)
            orders[grid] = {"forward": forward, "reversed": forward[::-1]}.get(request.param, rng.permutation(size))
        at = np.unravel_index(orders[grid][np.ravel_multi_index((x, y, z), grid)], grid)
        place(*(int(index) for index in at))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", permuted)
    return request.param
