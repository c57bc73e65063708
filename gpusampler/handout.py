"""How many micro-batches the training loop has taken, as opposed to how many were handed to a loader.

A DataLoader with workers asks its batch sampler for `num_workers * prefetch_factor` micro-batches ahead. torch's
loaders count the batches they have given to the loop in `_num_yielded`, in every release since 1.4 (torchdata's
StatefulDataLoader does the same); a loader that iterates the sampler itself is read there. Any other consumer is taken
to use what it is handed.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any


class Handout:
    """Counts micro-batches of one iteration over a sampler.

    Args:
        start: micro-batches of the epoch consumed before this iteration.
        frames: how many calls lie between this constructor and whoever iterates the sampler.
    """

    def __init__(self, start: int, frames: int) -> None:
        """Find the loader, if one is iterating; it is not kept alive."""
        self.handed = start
        self._start = start
        self._final: int | None = None
        self._fields: dict[str, Any] | None = None
        caller = sys._getframe(frames + 1)
        loader = caller.f_locals.get("self")
        if isinstance(getattr(loader, "_num_yielded", None), int) and hasattr(loader, "_index_sampler"):
            self._fields = vars(loader)
            self._loader = weakref.ref(loader, self._loader_died)

    @property
    def consumed(self) -> int:
        """Micro-batches of the epoch that the training loop has taken."""
        if self._final is not None:
            return min(self.handed, self._start + self._final)
        if self._fields is not None:
            return min(self.handed, self._start + int(self._fields["_num_yielded"]))
        return self.handed

    def _loader_died(self, _: object) -> None:
        if self._fields is not None:
            self._final = int(self._fields["_num_yielded"])
            self._fields = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain count: a copy has no loader."""
        return _finished, (self.consumed,)


def _finished(consumed: int) -> Handout:
    return Handout(consumed, 0)
