"""The trajectories one rank keeps between calls: one for each accumulation slot, taken in turn.

A stored trajectory is copied in, so that nothing the caller does later to what it passed can reach it; what `slots`
shows is the carry's own, to read and not to change. Nothing here is ever part of a
checkpoint: the class has no `state_dict`, and a pickled or deep-copied carry is an empty one. After a resume call
`restart` with the number of micro-batches already run, and the slot in use matches the accumulation index again.

Memory held is at most `num_slots` states and batches; `memory` reports it and `max_bytes` bounds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpusampler.carry.snapshot import copy_of
from gpusampler.carry.streams import MAX_SLOTS
from gpusampler.carry.visit import has_data, held_bytes
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote


@dataclass(frozen=True)
class CarryMemory:
    """Bytes held by a carry: tensors and arrays by their elements, other data and its containers by `sys.getsizeof`.

    What a batch shares with its copies, such as a module or a function, counts nothing.

    Attributes:
        total: all slots, all devices.
        per_slot: one number for each slot.
        by_device: one number for each device that holds something; all but tensors counts as "cpu".
    """

    total: int
    per_slot: tuple[int, ...]
    by_device: dict[str, int]


class TrajectoryCarry:
    """One carried trajectory for each accumulation slot.

    Args:
        num_slots: accumulation slots, the sampler's `grad_accum`.
        max_bytes: refuse to hold more than this over all slots; None sets no bound.

    Attributes:
        slots: for each slot None, or a dict with `state`, `rung` (the rung on which `state` is) and `raw_batch`.
        seeded: for each slot whether it ever held a trajectory since the last `restart`; only the first one is
            staggered.
        sample_ids: for each slot the ids of the samples it carries, a tuple, or None if unknown.

    Raises:
        ParameterError: a count that is no int or below 1, or more than 2**20 slots.

    Example:
        >>> carry = TrajectoryCarry(2)
        >>> [carry.next_slot() for _ in range(3)]
        [0, 1, 0]
        >>> carry.set(1, state=torch.zeros(2), rung=3, raw_batch={"prompt": "a"})
        >>> carry.slots[1]
        {'state': tensor([0., 0.]), 'rung': 3, 'raw_batch': {'prompt': 'a'}}
        >>> carry.clear(1)
        >>> carry.slots, carry.seeded
        ([None, None], [False, True])
    """

    slots: list[dict[str, Any] | None]
    seeded: list[bool]
    sample_ids: list[tuple[Hashable, ...] | None]

    def __init__(self, num_slots: int, *, max_bytes: int | None = None) -> None:
        self.num_slots = check_int("num_slots", num_slots, minimum=1, maximum=MAX_SLOTS)
        self.max_bytes = None if max_bytes is None else check_int("max_bytes", max_bytes, minimum=1)
        self.restart()

    def restart(self, micro_batch: int = 0) -> None:
        """Drop every trajectory and start over: each slot is unseeded, and the round-robin begins where asked.

        Args:
            micro_batch: micro-batches this rank has run in the whole run, earlier epochs included. The next slot is
                `micro_batch % num_slots`, and `rounds` goes on from there, so that streams seeded anew are on the
                rungs where they would be without the restart.

        Raises:
            ParameterError: `micro_batch` is no int or negative.
        """
        self._calls = check_int("micro_batch", micro_batch, minimum=0)
        self.slots = [None] * self.num_slots
        self.seeded = [False] * self.num_slots
        self.sample_ids = [None] * self.num_slots
        self._bytes: list[Counter[str]] = [Counter()] * self.num_slots
        self._batch_bytes = self._bytes.copy()

    @property
    def upcoming_slot(self) -> int:
        """The slot that `next_slot` will return."""
        return self._calls % self.num_slots

    @property
    def rounds(self) -> int:
        """Optimizer steps so far, as calls count them: 0 until the round-robin first comes back to slot 0.

        A stream that is seeded late, as all are after a restart, has to start this many rungs further on to be where
        it would have been.
        """
        return self._calls // self.num_slots

    def align(self, slot: int = 0) -> None:
        """Move on to the next turn of `slot`, as after a step that was broken off; nothing happens if it has its turn.

        Slots that miss their turn are dropped and unseeded: seeded anew, they are level with the others, which go on.
        The same slots miss it on every rank that broke off at the same micro-batch.

        Args:
            slot: in [0, num_slots).

        Raises:
            ParameterError: slot out of range.
        """
        slot = self._check_slot(slot)
        while self.upcoming_slot != slot:
            missed = self.next_slot()
            self.clear(missed)
            self.seeded[missed] = False

    def next_slot(self) -> int:
        """The slot of this call; calls take the slots in turn."""
        slot = self.upcoming_slot
        self._calls += 1
        return slot

    def set(
        self,
        slot: int,
        *,
        state: Any,
        rung: int = 0,
        raw_batch: Any = None,
        sample_ids: Iterable[Hashable] | None = None,
    ) -> None:
        """Keep a trajectory in `slot`, in place of what is there.

        Args:
            slot: in [0, num_slots).
            state: tensor or array, or a container of them; copied and detached, on its own device.
            rung: the rung on which `state` is, from 0.
            raw_batch: the conditioning; copied as by `snapshot_raw_batch`, unless it is the very object that the slot
                holds already.
            sample_ids: ids of the samples in `raw_batch`, in its order.

        Raises:
            ParameterError: slot or rung out of range, something that cannot be copied, or more than `max_bytes` to
                hold; the slot keeps what it had.
        """
        slot = self._check_slot(slot)
        rung = check_int("rung", rung, minimum=0)
        ids = as_sample_ids(sample_ids)
        if not has_data(state):
            raise ParameterTypeError(f"state must be a tensor or hold one, got {quote(state)}")
        held = self.slots[slot]
        if held is None or held["raw_batch"] is not raw_batch:
            raw_batch = copy_of(raw_batch, name="raw_batch")
        self.adopt(slot, state=copy_of(state, name="state"), rung=rung, raw_batch=raw_batch, sample_ids=ids)

    def adopt(
        self, slot: int, *, state: Any, rung: int, raw_batch: Any, sample_ids: tuple[Hashable, ...] | None
    ) -> None:
        """`set` without copies and checks of types, for what nobody else holds.

        Args:
            slot: see `set`, as for the others.
            state: see `set`.
            rung: see `set`.
            raw_batch: see `set`.
            sample_ids: see `set`.

        Raises:
            ParameterError: more than `max_bytes` to hold; the slot keeps what it had.
        """
        held = self.slots[slot]
        is_held = held is not None and held["raw_batch"] is raw_batch
        batch_bytes = self._batch_bytes[slot] if is_held else held_bytes(raw_batch)
        size = held_bytes(state) + batch_bytes
        self._check_bytes(slot, size.total())
        self.slots[slot] = {"state": state, "rung": rung, "raw_batch": raw_batch}
        self.sample_ids[slot], self._bytes[slot], self._batch_bytes[slot] = sample_ids, size, batch_bytes
        self.seeded[slot] = True

    def clear(self, slot: int) -> None:
        """Drop the trajectory in `slot`; an empty slot stays empty. The slot stays seeded if it was.

        Args:
            slot: in [0, num_slots).

        Raises:
            ParameterError: slot out of range.
        """
        slot = self._check_slot(slot)
        self.slots[slot], self.sample_ids[slot], self._bytes[slot] = None, None, Counter()

    def memory(self) -> CarryMemory:
        """Bytes held now."""
        by_device: Counter[str] = sum(self._bytes, Counter())
        per_slot = tuple(size.total() for size in self._bytes)
        return CarryMemory(total=sum(per_slot), per_slot=per_slot, by_device=dict(by_device))

    def _check_slot(self, slot: Any) -> int:
        return check_int("slot", slot, minimum=0, maximum=self.num_slots - 1)

    def _check_bytes(self, slot: int, new: int) -> None:
        others = sum(size.total() for index, size in enumerate(self._bytes) if index != slot)
        if self.max_bytes is not None and others + new > self.max_bytes:
            raise ParameterError(
                f"slot {slot} would hold {new} bytes, the other slots hold {others}: above max_bytes={self.max_bytes}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"num_slots": self.num_slots, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_slots, self.max_bytes = state["num_slots"], state["max_bytes"]
        self.restart()


def as_sample_ids(sample_ids: Any) -> tuple[Hashable, ...] | None:
    """Sample ids as a tuple of hashables; a tensor or an array gives builtin ints."""
    if sample_ids is None:
        return None
    if isinstance(sample_ids, (torch.Tensor, np.ndarray)):
        sample_ids = sample_ids.reshape(-1).tolist()
    if isinstance(sample_ids, (str, bytes, Mapping, Set)) or not isinstance(sample_ids, Iterable):
        raise ParameterTypeError(f"sample_ids must be a sequence of ids, got {quote(sample_ids)}")
    ids = tuple(sample_ids)
    for index, sample_id in enumerate(ids):
        if isinstance(sample_id, torch.Tensor):  # its hash is its address
            raise ParameterTypeError(f"sample_ids[{index}] must be an int or a string, got {quote(sample_id)}")
        try:
            hash(sample_id)
        except TypeError as error:
            raise ParameterTypeError(f"sample_ids[{index}] must be hashable, got {quote(sample_id)}") from error
    return ids
