"""Refit the cost model while training: time micro-batches without waiting, apply a new model between iterations.

On CUDA a micro-batch lies between two events that are read once they are over, never waited for; elsewhere it is timed
by the clock. A new model is taken only at an epoch or window boundary, by all ranks of the sampler's process group
together: their records go to one rank, which fits them, and its model comes back, bit for bit the same.

Ranks that wait for each other in every micro-batch all measure the time of the slowest. A balanced plan would then
confirm whatever model made it: the records of one micro-batch over the ranks give one time, which belongs to the shape
that is costliest under the model being fitted. `slowest_shapes` finds model and shapes together. Two collectives a
refit; memory `capacity` records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gpusampler.calibrate import Calibration, fit_cost
from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.nvml import cuda_started
from gpusampler.regression import Floats
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.slowest import slowest_shapes

FORMAT = 1
_MOST_LENGTH_ERROR = 0.25  # relative error of the longest sample's cost above which a new model is not applied


class Refit(NamedTuple):
    """What a refit came to, the same on every rank.

    Attributes:
        model: the model in use from now on.
        applied: whether it is a new one.
        reason: why not, if not.
        calibration: the fit, on the rank that fitted, else None.
    """

    model: CostModel
    applied: bool
    reason: str
    calibration: Calibration | None = None


class CostRecorder:
    """Times micro-batches and gives the sampler the cost model that they show.

    Args:
        sampler: whose cost model is refitted; one without a `cost_fn`.
        device: where the micro-batches run; default: cuda if it has started when a micro-batch is timed, else the CPU.
        capacity: micro-batches to keep, the latest; the same on every rank.
        warmup: micro-batches to skip after the start, whose times are those of compilation and tuning.
        window: steps after which a refit within an epoch is allowed, M >= 1; at the end of an epoch it always is.

    Raises:
        ParameterError: a parameter that cannot be honoured.

    Example:
        >>> sampler = GPUBatchRebalanceSampler(range(1, 65), effective_batch_size=16, grad_accum=2)
        >>> recorder = CostRecorder(sampler)
        >>> for epoch in range(2):
        ...     sampler.set_epoch(epoch)
        ...     for micro_batch in sampler:
        ...         with recorder.measure(samples=len(micro_batch), length=64):
        ...             pass  # forward and backward
        ...     refit = recorder.refit()
        >>> refit.applied, refit.model.alpha
        (False, 0.0001)
    """

    def __init__(
        self,
        sampler: GPUBatchRebalanceSampler,
        *,
        device: str | torch.device | None = None,
        capacity: int = 4096,
        warmup: int = 8,
        window: int = 1,
    ) -> None:
        """Check the parameters."""
        if not isinstance(sampler, GPUBatchRebalanceSampler):
            raise ParameterTypeError(f"sampler must be a GPUBatchRebalanceSampler, got {quote(sampler)}")
        if sampler.partition.cost.cost_fn is not None:
            raise ParameterError(
                "sampler must have a cost model without a cost_fn: alpha and intercept are what is fitted"
            )
        self.sampler = sampler
        self.warmup = check_int("warmup", warmup, minimum=0)
        self.window = check_int("window", window, minimum=1)
        try:
            self._device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ParameterError(f"device must be a torch device, got {quote(device)}") from error
        self._records: deque[tuple[int, int, int, float]] = deque(maxlen=check_int("capacity", capacity, minimum=4))
        self._pending: deque[tuple[int, int, int, Any, Any]] = deque(maxlen=capacity)
        self._measured = self._number = 0
        self._iteration: Any = None

    def __len__(self) -> int:
        """Return the number of micro-batches whose times are known."""
        self._read_events()
        return len(self._records)

    @contextmanager
    def measure(self, samples: int, length: int) -> Iterator[None]:
        """Time one micro-batch; every rank must measure each of its micro-batches, in order.

        Args:
            samples: in the micro-batch, >= 1.
            length: that they are padded to, >= 1.
        """
        samples, length = check_int("samples", samples, minimum=1), check_int("length", length, minimum=1)
        number = self._next_number()
        self._measured += 1
        if self._measured <= self.warmup:
            yield
        elif self._on_cuda():
            begin, end = _event(), _event()
            begin.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._pending.append((number, samples, length, begin, end))
            self._read_events()
        else:
            begun = perf_counter()
            yield
            self._keep(number, samples, length, perf_counter() - begun)

    def refit(self) -> Refit:
        """Fit what was recorded and give the sampler the new model; call on every rank, between iterations.

        Applies at the end of an epoch, or within one after a multiple of `window` steps. If a new model is applied
        there, the running iteration must be given up and a new one started, which continues where it stopped. Too few
        or too uncertain records leave the model as it is; an applied model starts the records anew.

        Returns:
            The model in use from now on, the same on every rank.

        Raises:
            ParameterError: in the middle of a step or window, or the sampler's ranks have no process group; before
                anything is communicated.
        """
        if self.sampler.process_group.group is None and self.sampler.dp_size > 1:
            raise ParameterError(
                "sampler must have a process_group: with process_group=None its ranks cannot refit together"
            )
        consumed = self._check_boundary()
        self._read_events()
        mine = np.array(self._records, dtype=np.float64).reshape(-1, 4)
        group = self.sampler.process_group.resolve()
        refit = self._fit([mine]) if group is None else self._fit_together(mine, group)
        # also where nothing changed: a rank that was resumed with another model gets that of the others
        self._apply(refit.model, consumed)
        if refit.applied:
            self._records.clear()
        return refit

    def state_dict(self) -> dict[str, Any]:
        """The model in use, which is what plans depend on; the same on every rank.

        Records are not in it: a resumed run may have other machines or another `dp_size`, and measures anew.
        """
        model = self.sampler.partition.cost
        return {"format": FORMAT, "alpha": model.alpha, "intercept": model.intercept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the sampler the saved model; before `sampler.load_state_dict`, which compares models within a step.

        Raises:
            ParameterError: not a state of this class, naming the field, or a model of other lengths.
        """
        if not isinstance(state, Mapping):
            raise ParameterTypeError(f"state must be the mapping that state_dict returned, got {quote(state)}")
        for name in ("format", "alpha", "intercept"):
            if name not in state:
                raise ParameterError(f"state has no field {name!r}: it was not made by CostRecorder.state_dict")
        if state["format"] != FORMAT:
            raise ParameterError(f"state has format {quote(state['format'])}, this version reads format {FORMAT}")
        model = CostModel(alpha=state["alpha"], intercept=state["intercept"])
        self._check_range(model)
        self._apply(model, None)
        self._records.clear()
        self._pending.clear()
        self._measured, self._iteration = 0, None

    def _on_cuda(self) -> bool:
        return cuda_started() if self._device is None else self._device.type == "cuda"

    def _next_number(self) -> int:
        """Number of a micro-batch, its slot modulo `grad_accum`; a run may be resumed, or leave an epoch, in a step."""
        if self._iteration is not self.sampler._handout:
            self._iteration = self.sampler._handout
            taken = int(self.sampler.state_dict()["consumed"])
            self._number += (max(0, taken - 1) - self._number) % self.sampler.grad_accum
        self._number += 1
        return self._number - 1

    def _keep(self, number: int, samples: int, length: int, seconds: float) -> None:
        if seconds > 0.0:  # less than the clock tells: nothing was run
            self._records.append((number, samples, length, seconds))

    def _read_events(self) -> None:
        while self._pending and self._pending[0][4].query():
            number, samples, length, begin, end = self._pending.popleft()
            self._keep(number, samples, length, begin.elapsed_time(end) / 1000.0)

    def _check_boundary(self) -> int | None:
        """Micro-batches consumed of the epoch that is under way, None between epochs."""
        consumed = int(self.sampler.state_dict()["consumed"])
        if consumed in (0, len(self.sampler)):
            return None
        step, slot = divmod(consumed, self.sampler.grad_accum)
        if slot or step % self.window:
            raise ParameterError(
                f"refit must come after a multiple of window={self.window} steps or at the end of an epoch, the "
                f"sampler is {slot} micro-batches into step {step}"
            )
        return consumed

    def _fit_together(self, mine: Floats, group: Any) -> Refit:
        root = dist.get_global_rank(group, 0)
        fits = dist.get_rank() == root
        everyone: list[Any] | None = [None] * dist.get_world_size(group) if fits else None
        dist.gather_object(mine, everyone, dst=root, group=group)
        refit = self._fit(everyone) if everyone is not None else None
        answer: list[Any] = [None if refit is None else (refit.model, refit.applied, refit.reason)]
        dist.broadcast_object_list(answer, src=root, group=group)
        return Refit(*answer[0]) if refit is None else refit

    def _fit(self, by_rank: Sequence[Floats]) -> Refit:
        current = self.sampler.partition.cost
        try:
            fit = fit_cost(self._shapes(by_rank))
            self._check_range(fit.model)
        # not only ParameterError: the other ranks wait for an answer
        except ValueError as error:
            return Refit(current, False, str(error))
        doubt = fit.length_error(self.sampler.lengths.maximum)
        if doubt > _MOST_LENGTH_ERROR:
            return Refit(current, False, f"the cost of the longest sample is uncertain by {doubt:.0%}", fit)
        return Refit(fit.model, True, "", fit)

    def _check_range(self, model: CostModel) -> None:
        """Refuse a model under which a batch of the longest samples costs more than the planner can hold."""
        replace(self.sampler.partition, cost=model).check_range(
            self.sampler.effective_batch_size, self.sampler.lengths.maximum
        )

    def _shapes(self, by_rank: Sequence[Floats]) -> Floats:
        """Records [n, 3] whose times are those of their own shapes."""
        slots = self.sampler.grad_accum
        if len(by_rank) == 1:
            return by_rank[0][:, 1:]
        if self.sampler.partition.sync == "step" and slots > 1:
            # ranks wait only in the last slot
            return np.concatenate([one[one[:, 0] % slots != slots - 1, 1:] for one in by_rank])
        common = sorted(set.intersection(*(set(one[:, 0].tolist()) for one in by_rank)))
        if not common:
            return np.empty((0, 3))
        return slowest_shapes(np.stack([one[np.isin(one[:, 0], common), 1:] for one in by_rank], axis=1))

    def _apply(self, model: CostModel, consumed: int | None) -> None:
        if model == self.sampler.partition.cost:
            return
        self.sampler.partition = replace(self.sampler.partition, cost=model)
        if consumed is not None:
            self.sampler.load_state_dict(self.sampler.state_dict(consumed))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
