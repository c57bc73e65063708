"""Reads one sampler a step at a time, through its own epochs, and restores its place.

The sampler's length must be what it yields in every epoch: nominal epochs are made of it, so a sampler that stops early
or runs on is an error and not a shorter epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from inspect import signature
from itertools import islice
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.tasks.count import accumulation

_END = object()


class SamplerReader:
    """Micro-batches of one sampler, epoch after epoch.

    Args:
        sampler: Iterable with a length in micro-batches; `set_epoch`, `state_dict` and `load_state_dict` are used if
            there.
        label: What errors and states call it.
        grad_accum: Micro-batches an optimizer step; by default what the sampler says.

    Raises:
        ParameterError: It cannot be iterated, or its length is not a whole number of steps.
    """

    def __init__(self, sampler: Any, label: str, grad_accum: int | None = None) -> None:
        if not isinstance(sampler, Iterable) or not isinstance(sampler, Sized):
            raise ParameterTypeError(
                f"{label} must be a sampler to be iterated, got {quote(sampler)}: counts only plan"
            )
        self.sampler: Any = sampler
        self.label = label
        self.grad_accum = accumulation(sampler) if grad_accum is None else grad_accum
        self.length = len(sampler)
        if self.length == 0 or self.length % self.grad_accum:
            raise ParameterError(
                f"{label} has {self.length} micro-batches, not a positive multiple of its grad_accum {self.grad_accum}"
            )
        self.epoch = 0
        self.consumed = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches read since the first of epoch 0."""
        return self.epoch * self.length + self.consumed

    def next(self) -> Any:
        """The next micro-batch; the first of the next epoch after the last of one."""
        if self.consumed == self.length:
            if self._iterator is not None and next(self._iterator, _END) is not _END:
                raise RuntimeError(f"{self.label} yields more than its length of {self.length} micro-batches")
            self.seek(self.micro_batches)
        if self._iterator is None:
            self._set_epoch()
            self._iterator = iter(self.sampler)
        batch = next(self._iterator, _END)
        if batch is _END:
            raise RuntimeError(
                f"{self.label} ended epoch {self.epoch} after {self.consumed} of {self.length} micro-batches"
            )
        self.consumed += 1
        return batch

    def seek(self, micro_batches: int, state: Mapping[str, Any] | None = None) -> None:
        """Go to a place: by a state of the sampler, or one that it can make for any place, else by skipping in its
        epoch.

        Args:
            micro_batches: Micro-batches since the first of epoch 0.
            state: State of the sampler at this place.
        """
        self.epoch, self.consumed = divmod(micro_batches, self.length)
        self._iterator = None
        if state is not None:
            self.sampler.load_state_dict(state)
        if not self.consumed:
            return
        skip = 0
        if state is None:
            self._set_epoch()
            if "consumed" in signature(getattr(self.sampler, "state_dict", _keeps_no_state)).parameters:
                self.sampler.load_state_dict(self.sampler.state_dict(consumed=self.consumed))
            else:
                skip = self.consumed
        self._iterator = iter(self.sampler)
        if sum(1 for _ in islice(self._iterator, skip)) < skip:
            raise RuntimeError(f"{self.label} has fewer than {skip} of its {self.length} micro-batches")

    def sampler_state(self) -> Any:
        """State of the sampler at the current place, or None if it keeps none."""
        return self.sampler.state_dict() if hasattr(self.sampler, "load_state_dict") else None

    def _set_epoch(self) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)


def _keeps_no_state() -> None:
    """Stands in for the `state_dict` of a sampler without one."""
