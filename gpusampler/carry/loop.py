"""One call for the whole cycle of a carried walk: seed or continue, one forward, advance, clear after the last rung.

A call costs one forward of the walked model. The first call of each slot costs `num_steps`: it walks the whole grid
without gradients and keeps the state on the rung where its stream starts. All of the grid, whatever the rung, because
a sharded model communicates in each forward, and ranks that ran different numbers of them would wait for each other
for ever. The number of forwards of a call is thus the same on every rank, as long as all ranks make the same calls.

What is carried is the loop's own: the batch as `start` left it, and a state of the dtype that `start` gave. Each
forward, each re-noising and the caller get copies of their own, so that one that works in place, keeps what it was
given or returns a static buffer cannot change a trajectory, nor what another sees: three copies of a batch and some of
a state a call, small beside the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpusampler.carry.renoise import Renoise
from gpusampler.carry.sizes import check_change, check_new, sizes_of
from gpusampler.carry.slots import TrajectoryCarry, as_sample_ids
from gpusampler.carry.snapshot import as_device, copy_of
from gpusampler.carry.streams import stagger_offset, validate_carry_coverage
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote


@dataclass(frozen=True, eq=False)
class CarryStep:
    """What one call did.

    Attributes:
        slot: the accumulation slot.
        rung: the rung the model was run on.
        timestep: `schedule[rung]`.
        state: the model's input; a copy, the caller's to change.
        pred: the model's output, with its graph if gradients were on.
        raw_batch: the batch that belongs to `state`, as `start` left it: losses need this one, not the batch passed in.
            A copy, too.
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
        start: `start(raw_batch) -> state`, fresh noise for rung 0. What it changes in its batch is carried: model,
            re-noising and caller get the batch as it left it, in every call of the trajectory.
        renoise: `renoise(state, pred, timestep, next_timestep, raw_batch) -> state`; see `sde_renoise`, `ode_renoise`.
            A result in another float dtype than the state's, as under autocast, is cast back to it.
        num_slots: accumulation slots: the sampler's `grad_accum`.
        stagger_rank: see `stagger_rank_and_groups`.
        stagger_groups: see `stagger_rank_and_groups`.
        interval: optimizer steps from one update of `model` to the next.
        device: where carried batches live; None leaves each tensor on its own device.
        max_bytes: bound on the memory held, see `TrajectoryCarry`.
        batch_size: `batch_size(batch) -> int`, the number of samples. Without it a change of size is a change of any
            length in the batch, so packed batches need it, and ids have to be as many as some length in the batch. A
            batch that shows no length needs it or ids.
        owner: name for messages.

    Attributes:
        carry: the `TrajectoryCarry`.
        forwards: forwards of the model so far.

    Raises:
        ParameterError: a count out of range, an empty schedule, one with a rung that `renoise` cannot leave, a function
            that takes other arguments, or a configuration that leaves rungs untrained.

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
        _check_callable("model", model, "state, timestep, raw_batch")
        _check_callable("start", start, "raw_batch")
        _check_callable("renoise", renoise, "state, pred, timestep, next_timestep, raw_batch")
        if batch_size is not None:
            _check_callable("batch_size", batch_size, "batch")
        is_list = isinstance(schedule, (Sequence, torch.Tensor, np.ndarray)) and not isinstance(schedule, (str, bytes))
        if not is_list or getattr(schedule, "ndim", 1) == 0:
            raise ParameterTypeError(f"schedule must be a sequence of timesteps, got {quote(schedule)}")
        self.schedule = list(copy_of(schedule, name="schedule"))
        if not self.schedule:
            raise ParameterError("schedule must have at least one timestep, got none")
        if hasattr(renoise, "check_schedule"):
            renoise.check_schedule(self.schedule)
        self.carry = TrajectoryCarry(num_slots, max_bytes=max_bytes)
        groups = check_int("stagger_groups", stagger_groups, minimum=1)
        self.stagger_rank = check_int("stagger_rank", stagger_rank, minimum=0, maximum=groups - 1)
        validate_carry_coverage(
            streams=groups * self.carry.num_slots, num_steps=len(self.schedule), interval=interval, owner=owner
        )
        self.forwards = 0
        self._model, self._start, self._renoise = model, start, renoise
        self._device = None if device is None else as_device(device)
        self._batch_size = batch_size

    def restart(self, micro_batch: int = 0) -> None:
        """Begin anew, as after a resume: every slot starts from fresh noise, on the rung where its stream would be.

        Args:
            micro_batch: micro-batches this rank has run in the whole run, earlier epochs included; the next slot is
                `micro_batch % num_slots`.

        Raises:
            ParameterError: `micro_batch` is no int or negative.
        """
        self.carry.restart(micro_batch)

    def align(self, slot: int = 0) -> None:
        """Move on to the next turn of `slot`, as after an epoch that broke off in mid-step; else nothing happens.

        The slots that had their turn go on. Those that miss it drop their trajectory and start another one, level with
        the others, which costs `num_steps` forwards in the next call of each; on every rank, if all broke off alike.

        Args:
            slot: the accumulation index of the next micro-batch.

        Raises:
            ParameterError: `slot` is no int or out of range.
        """
        self.carry.align(slot)

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
            ParameterError: `slot` is not the slot in use; the batch size changed, or shows nowhere, and ids are
                unknown; ids and batch differ in size; the model or `renoise` returned another shape, or `renoise`
                another kind of dtype. The slot in use stays the same then.
        """
        current = self.carry.upcoming_slot
        if slot is not None and check_int("slot", slot, minimum=0) != current:
            raise ParameterError(
                f"slot {slot} is not the slot in use, {current} of {self.carry.num_slots}: calls are out of step with "
                "the accumulation index; after a resume call restart(micro_batch), after a step broken off align()"
            )
        ids = as_sample_ids(sample_ids)
        before, held = self.forwards, self.carry.slots[current]
        sizes = sizes_of(batch, self._batch_size)
        check_new(batch, sizes, ids)
        if held is None:
            state, rung, raw_batch = self._begin(current, batch)
        else:
            if ids is None or self.carry.sample_ids[current] is None:
                check_change(current, sizes_of(held["raw_batch"], self._batch_size), sizes)
            state, rung, raw_batch, ids = held["state"], held["rung"], held["raw_batch"], self.carry.sample_ids[current]
        pred = self._forward(state, rung, raw_batch)
        if rung + 1 < len(self.schedule):
            moved = self._advance(state, pred, rung, raw_batch)
            self.carry.adopt(current, state=moved, rung=rung + 1, raw_batch=raw_batch, sample_ids=ids)
        else:
            self.carry.clear(current)
        self.carry.seeded[current] = True
        self.carry.next_slot()
        return CarryStep(
            slot=current,
            rung=rung,
            timestep=copy_of(self.schedule[rung]),
            state=state,
            pred=pred,
            raw_batch=copy_of(raw_batch),
            sample_ids=ids,
            fresh=held is None,
            forwards=self.forwards - before,
        )

    def _begin(self, slot: int, batch: Any) -> tuple[torch.Tensor, int, Any]:
        """A trajectory's state, rung and batch; a slot's first one is staggered."""
        given = copy_of(batch, self._device)
        with torch.no_grad():
            started = self._start(given)
        _check_tensor("start", started)
        state, raw_batch = copy_of(started), copy_of(given, self._device)  # `start` may keep what it had
        if self.carry.seeded[slot]:
            return state, 0, raw_batch
        return *self._stagger(slot, state, raw_batch), raw_batch

    def _stagger(self, slot: int, state: torch.Tensor, raw_batch: Any) -> tuple[torch.Tensor, int]:
        """Walk over the whole grid: the state where the slot's stream is now, and that rung."""
        kept = state
        num_steps = len(self.schedule)
        offset = stagger_offset(
            stagger_rank=self.stagger_rank, num_slots=self.carry.num_slots, slot=slot, num_steps=num_steps
        )
        first_rung = (offset + self.carry.rounds) % num_steps
        for rung in range(num_steps - 1):
            with torch.no_grad():
                state = self._advance(state, self._forward(state, rung, raw_batch), rung, raw_batch)
            if rung + 1 == first_rung:
                kept = state
        return kept, first_rung

    def _forward(self, state: torch.Tensor, rung: int, raw_batch: Any) -> torch.Tensor:
        pred = self._model(copy_of(state), copy_of(self.schedule[rung]), copy_of(raw_batch))
        self.forwards += 1
        _check_shape("model", pred, state)
        return pred

    def _advance(self, state: torch.Tensor, pred: torch.Tensor, rung: int, raw_batch: Any) -> torch.Tensor:
        here, there = copy_of(self.schedule[rung]), copy_of(self.schedule[rung + 1])
        with torch.no_grad():
            moved = self._renoise(copy_of(state), copy_of(pred), here, there, copy_of(raw_batch))
        _check_shape("renoise", moved, state)
        return copy_of(_as_dtype(moved, state.dtype))


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ParameterTypeError(f"{name} must return a tensor, got {quote(value)}")


def _check_shape(name: str, value: Any, state: torch.Tensor) -> None:
    _check_tensor(name, value)
    if value.shape != state.shape:
        raise ParameterError(
            f"{name} must keep the state's shape {tuple(state.shape)}, got {tuple(value.shape)}: nothing is broadcast"
        )


def _as_dtype(moved: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if moved.dtype != dtype and not (moved.is_floating_point() and dtype.is_floating_point):
        raise ParameterError(f"renoise must keep the state's dtype {dtype}, got {moved.dtype}")
    return moved.to(dtype)


def _check_callable(name: str, call: Any, arguments: str) -> None:
    if not callable(call):
        raise ParameterTypeError(f"{name} must be callable, got {quote(call)}")
    try:
        signature = inspect.signature(call, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin says nothing
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise ParameterTypeError(f"{name} must take ({arguments}), got {quote(call)}: {error}") from None
