"""One call for the whole cycle of a carried walk: seed or continue, one forward, advance, clear after the last rung.

A call costs one forward of the walked model. The first call of each slot costs `num_steps`: it walks the whole grid
without gradients and keeps the state on the rung where its stream starts. All of the grid, whatever the rung, because
a sharded model communicates in each forward, and ranks that ran different numbers of them would wait for each other
for ever. The number of forwards of a call is thus the same on every rank, as long as all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpusampler.carry.renoise import Renoise
from gpusampler.carry.slots import TrajectoryCarry, as_sample_ids
from gpusampler.carry.snapshot import as_device, snapshot_raw_batch
from gpusampler.carry.streams import stagger_offset, validate_carry_coverage
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote


@dataclass(frozen=True, eq=False)
class CarryStep:
    """What one call did.

    Attributes:
        slot: the accumulation slot.
        rung: the rung the model was run on.
        timestep: `schedule[rung]`.
        state: the model's input.
        pred: the model's output, with its graph if gradients were on.
        raw_batch: the batch that belongs to `state`: losses need this one, not the batch passed in.
        sample_ids: ids of its samples, or None if they were never given.
        fresh: whether a trajectory began here.
        forwards: forwards of the model this call ran.
    """

    slot: int
    rung: int
    timestep: Any
    state: torch.Tensor
    pred: torch.Tensor
    raw_batch: Any
    sample_ids: tuple[Hashable, ...] | None
    fresh: bool
    forwards: int


class CarryLoop:
    """Walks one trajectory for each accumulation slot, one rung a call.

    Args:
        model: `model(state, timestep, raw_batch) -> pred`, the clean prediction, of the shape of `state`. Gradients
            are as the caller sets them, off during the stagger walk.
        schedule: the grid, noisiest rung first; `timestep` is its element, of whatever type that is.
        start: `start(raw_batch) -> state`, fresh noise for rung 0.
        renoise: `renoise(state, pred, timestep, next_timestep, raw_batch) -> state`; see `sde_renoise`, `ode_renoise`.
        num_slots: accumulation slots: the sampler's `grad_accum`.
        stagger_rank: see `stagger_rank_and_groups`.
        stagger_groups: see `stagger_rank_and_groups`.
        interval: optimizer steps from one update of `model` to the next.
        device: where carried batches live; None leaves each tensor on its own device.
        max_bytes: bound on the memory held, see `TrajectoryCarry`.
        batch_size: `batch_size(batch) -> int`, the number of samples; by default the first length found in the batch.
            Packed batches need it.
        owner: name for messages.

    Attributes:
        carry: the `TrajectoryCarry`.
        forwards: forwards of the model so far.

    Raises:
        ParameterError: a count out of range, an empty schedule, or a configuration that leaves rungs untrained.

    Example:
        >>> loop = CarryLoop(
        ...     lambda state, timestep, batch: state * 0 + batch["x"], [1.0, 0.5],
        ...     start=lambda batch: torch.ones_like(batch["x"]),
        ...     renoise=lambda state, pred, timestep, next_timestep, batch: pred + next_timestep,
        ...     num_slots=1,
        ... )
        >>> steps = [loop.step({"x": torch.full((1,), float(call))}) for call in range(4)]
        >>> [(step.rung, step.state.item(), step.pred.item(), step.forwards) for step in steps]
        [(0, 1.0, 0.0, 2), (1, 0.5, 0.0, 1), (0, 1.0, 2.0, 1), (1, 2.5, 2.0, 1)]
    """

    def __init__(
        self,
        model: Callable[[torch.Tensor, Any, Any], torch.Tensor],
        schedule: Sequence[Any] | torch.Tensor,
        *,
        start: Callable[[Any], torch.Tensor],
        renoise: Renoise,
        num_slots: int,
        stagger_rank: int = 0,
        stagger_groups: int = 1,
        interval: int = 1,
        device: torch.device | str | int | None = None,
        max_bytes: int | None = None,
        batch_size: Callable[[Any], int] | None = None,
        owner: str = "CarryLoop",
    ) -> None:
        if not isinstance(schedule, (Sequence, torch.Tensor, np.ndarray)) or isinstance(schedule, str):
            raise ParameterTypeError(f"schedule must be a sequence of timesteps, got {quote(schedule)}")
        self.schedule = list(schedule)
        if not self.schedule:
            raise ParameterError("schedule must have at least one timestep, got none")
        self.carry = TrajectoryCarry(num_slots, max_bytes=max_bytes)
        groups = check_int("stagger_groups", stagger_groups, minimum=1)
        self.stagger_rank = check_int("stagger_rank", stagger_rank, minimum=0, maximum=groups - 1)
        validate_carry_coverage(
            streams=groups * self.carry.num_slots, num_steps=len(self.schedule), interval=interval, owner=owner
        )
        self.forwards = 0
        self._model, self._start, self._renoise = model, start, renoise
        self._device = None if device is None else as_device(device)
        self._batch_size = batch_size or _first_length

    def restart(self, micro_batch: int = 0) -> None:
        """Begin anew, as after a resume: every slot starts from fresh noise, staggered again.

        Args:
            micro_batch: micro-batches this rank has run so far; the next slot is `micro_batch % num_slots`.

        Raises:
            ParameterError: `micro_batch` is no int or negative.
        """
        self.carry.restart(micro_batch)

    def step(self, batch: Any, *, slot: int | None = None, sample_ids: Iterable[Hashable] | None = None) -> CarryStep:
        """Run the model once on the next slot's trajectory and move it one rung on.

        An empty slot adopts `batch` and starts from noise. A slot in mid-walk keeps the batch it set out with, and
        `batch` is ignored. Under a balancing sampler the two may differ in size; whoever computes losses has to know,
        so pass `sample_ids` on every call and use those of the result, or a change of size is refused.

        Args:
            batch: the loader's micro-batch.
            slot: the trainer's accumulation index, if known: checked against the slot in use.
            sample_ids: ids of the samples in `batch`: what the sampler yielded.

        Returns:
            The `CarryStep`; compute the loss from its `pred`, `raw_batch` and `sample_ids`.

        Raises:
            ParameterError: `slot` is not the slot in use; the batch size changed and ids are unknown; ids and batch
                differ in size; the model or `renoise` returned another shape. The slot in use stays the same then.
        """
        current = self.carry.upcoming_slot
        if slot is not None and check_int("slot", slot, minimum=0) != current:
            raise ParameterError(
                f"slot {slot} is not the slot in use, {current} of {self.carry.num_slots}: calls are out of step with "
                "the accumulation index; after a resume call restart(micro_batch)"
            )
        ids = as_sample_ids(sample_ids)
        self._check_sizes(current, batch, ids)
        before, held = self.forwards, self.carry.slots[current]
        if held is None:
            raw_batch = snapshot_raw_batch(batch, self._device)
            state, rung = self._seed(current, raw_batch)
        else:
            state, rung, raw_batch, ids = held["state"], held["rung"], held["raw_batch"], self.carry.sample_ids[current]
        pred = self._forward(state, rung, raw_batch)
        if rung + 1 < len(self.schedule):
            moved = self._advance(state, pred, rung, raw_batch)
            self.carry.set(current, state=moved, rung=rung + 1, raw_batch=raw_batch, sample_ids=ids)
        else:
            self.carry.clear(current)
        self.carry.seeded[current] = True
        self.carry.next_slot()
        return CarryStep(
            slot=current,
            rung=rung,
            timestep=self.schedule[rung],
            state=state,
            pred=pred,
            raw_batch=raw_batch,
            sample_ids=ids,
            fresh=held is None,
            forwards=self.forwards - before,
        )

    def _seed(self, slot: int, raw_batch: Any) -> tuple[torch.Tensor, int]:
        """Fresh noise; the slot's first trajectory is walked over the whole grid and kept where its stream starts."""
        with torch.no_grad():
            state = self._start(raw_batch)
        if self.carry.seeded[slot]:
            return state, 0
        num_steps = len(self.schedule)
        offset = stagger_offset(
            stagger_rank=self.stagger_rank, num_slots=self.carry.num_slots, slot=slot, num_steps=num_steps
        )
        first_rung = (offset + self.carry.rounds) % num_steps
        kept = state
        for rung in range(num_steps - 1):
            with torch.no_grad():
                state = self._advance(state, self._forward(state, rung, raw_batch), rung, raw_batch)
            if rung + 1 == first_rung:
                kept = state
        return kept, first_rung

    def _forward(self, state: torch.Tensor, rung: int, raw_batch: Any) -> torch.Tensor:
        pred = self._model(state, self.schedule[rung], raw_batch)
        self.forwards += 1
        _check_shape("model", pred, state)
        return pred

    def _advance(self, state: torch.Tensor, pred: torch.Tensor, rung: int, raw_batch: Any) -> torch.Tensor:
        with torch.no_grad():
            moved = self._renoise(state, pred.detach(), self.schedule[rung], self.schedule[rung + 1], raw_batch)
        _check_shape("renoise", moved, state)
        return moved

    def _check_sizes(self, slot: int, batch: Any, ids: tuple[Hashable, ...] | None) -> None:
        size = self._batch_size(batch)
        if ids is not None and size is not None and len(ids) != size:
            raise ParameterError(
                f"sample_ids has {len(ids)} ids for a batch of {size} samples; a packed batch needs batch_size"
            )
        held = self.carry.slots[slot]
        if held is None or (ids is not None and self.carry.sample_ids[slot] is not None):
            return
        carried = self._batch_size(held["raw_batch"])
        if size is not None and carried is not None and size != carried:
            raise ParameterError(
                f"slot {slot} carries a batch of {carried} samples and the new one has {size}: pass sample_ids on "
                "every call, so that each loss meets its own samples, or keep the batch size of a slot fixed"
            )


def _check_shape(name: str, value: torch.Tensor, state: torch.Tensor) -> None:
    for what, tensor in (("start", state), (name, value)):
        if not isinstance(tensor, torch.Tensor):
            raise ParameterTypeError(f"{what} must return a tensor, got {quote(tensor)}")
    if value.shape != state.shape:
        raise ParameterError(
            f"{name} must keep the state's shape {tuple(state.shape)}, got {tuple(value.shape)}: nothing is broadcast"
        )


def _first_length(batch: Any) -> int | None:
    """Samples in a batch: the first length of its first tensor, array or list; None if it has none."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return len(batch) if batch.ndim else None
    if isinstance(batch, list):
        return len(batch)
    if isinstance(batch, Mapping):
        values: Iterable[Any] = batch.values()
    elif isinstance(batch, tuple):
        values = batch
    else:
        values = getattr(batch, "__dict__", {}).values()
    return next((size for size in map(_first_length, values) if size is not None), None)
