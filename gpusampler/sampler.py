"""The batch sampler: epochs, iteration, length and state. Planning is elsewhere.

`Composition` says which samples share a step, `Partition` splits a step over ranks and slots, `PlanAhead` does both
ahead of time; this class strings them together and remembers where the training loop is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from gpusampler import state as states
from gpusampler.compose import Composition, Indices
from gpusampler.cost import CostModel
from gpusampler.errors import (
    NotAvailableError,
    ParameterError,
    ParameterTypeError,
    check_bool,
    check_choice,
    check_int,
    quote,
)
from gpusampler.feasible import check_cap, check_oversize
from gpusampler.handout import Consumer, Handout
from gpusampler.kernels.checks import gather
from gpusampler.lengths import as_lengths
from gpusampler.pipeline import PlanAhead
from gpusampler.plan import BatchPlan, Partition

DEFAULT_SEED = 42
_SAMPLES_A_CHUNK = 1 << 14


class _Chunk(NamedTuple):
    """Planned steps: `samples[w]` in plan order, cut by `offsets[w]` into groups."""

    samples: Indices
    offsets: np.ndarray[Any, np.dtype[np.int32]]


class GPUBatchRebalanceSampler(Sampler[list[int]]):
    """Batch sampler that gives every rank the same cost in every micro-batch.

    For each optimizer step it takes `effective_batch_size` samples in shuffled order, sorts them by length and splits
    them into `dp_size * grad_accum` micro-batches of balanced padded cost, so that ranks that wait for each other wait
    little and none exceeds `max_tokens`. Every rank computes the same plan and yields its own micro-batches: pass it
    as `batch_sampler` to a `DataLoader`.

    The order is not that of `torch.randperm`: the same seed gives another order than other samplers do.

    Args:
        lengths: length of each sample, integers >= 1: list, range, numpy array (a memory-mapped one stays mapped),
            tensor on any device, pyarrow array, pandas Series or datasets column. Must not change afterwards.
        effective_batch_size: samples in one optimizer step over all ranks, B; at least `dp_size * grad_accum`.
        dp_size: data-parallel ranks, D; default: the world size when torch.distributed is initialized, else 1.
        grad_accum: micro-batches a rank accumulates in one step, G.
        shuffle: shuffle samples, anew each epoch (see `set_epoch`); else the order of the dataset.
        seed: of the shuffle, any int; None is 42, as ranks could not agree on another without communication.
        rank: this rank, 0 to D - 1; default: the rank in torch.distributed if the world has D processes, else 0.
        drop_last: drop the last fewer than B samples of an epoch, others each epoch; else they form a smaller step,
            filled up with repeats only if there are fewer than D * G (see `repeated`).
        cost: cost of a sample at a padded length, see `CostModel`.
        max_tokens: largest samples * longest of any micro-batch; None for no cap.
        oversize: "error": a sample longer than `max_tokens` is an error; "alone": it is a micro-batch of its own, with
            one warning.
        layout: "padded"; "packed" is not available yet.
        sync: "microbatch" if ranks wait for each other in every slot (FSDP, ZeRO-2/3, DDP without `no_sync`), "step"
            if only once a step (DDP with `no_sync`).
        lookahead: 1; larger windows are not available yet.
        pad_multiple: 1; larger multiples are not available yet.
        process_group: "auto" or None: every rank plans for itself, with the same result. Broadcasting plans within a
            given group is not available yet.
        device: None or "cpu": where to plan; "cuda" is not available yet.
        plan_ahead: steps planned at once; default 16384 samples' worth, at least 1.

    Raises:
        ParameterError: a parameter or a length that cannot be honoured; it names the parameter, index and value.

    Example:
        >>> sampler = GPUBatchRebalanceSampler([5, 9, 2, 7, 4, 8, 1, 3], effective_batch_size=4, dp_size=2, rank=0)
        >>> len(sampler), [len(micro_batch) for micro_batch in sampler]
        (2, [1, 1])
        >>> loader = torch.utils.data.DataLoader(range(8), batch_sampler=sampler)
        >>> state = sampler.state_dict()
    """

    def __init__(
        self,
        lengths: Any,
        effective_batch_size: int,
        dp_size: int | None = None,
        grad_accum: int = 1,
        shuffle: bool = True,
        seed: int | None = DEFAULT_SEED,
        rank: int | None = None,
        drop_last: bool = True,
        *,
        cost: CostModel | None = None,
        max_tokens: int | None = None,
        oversize: str = "error",
        layout: str = "padded",
        sync: str = "microbatch",
        lookahead: int = 1,
        pad_multiple: int = 1,
        process_group: Any = "auto",
        device: str | torch.device | None = None,
        plan_ahead: int | None = None,
    ) -> None:
        """Check every parameter and length."""
        _check_available(lookahead, pad_multiple, process_group, device)
        world, world_rank = _world(process_group)
        dp_size = world if dp_size is None else dp_size
        cost = CostModel() if cost is None else cost
        self.partition = Partition(dp_size, grad_accum, cost, max_tokens, layout, sync)
        self.dp_size, self.grad_accum = self.partition.dp_size, self.partition.grad_accum
        self.effective_batch_size = check_int("effective_batch_size", effective_batch_size, minimum=1)
        if self.effective_batch_size < self.partition.groups:
            raise ParameterError(
                f"effective_batch_size must be at least dp_size * grad_accum = {self.dp_size} * {self.grad_accum} = "
                f"{self.partition.groups}, got {self.effective_batch_size}"
            )
        self.rank = _check_rank(rank, self.dp_size, world, world_rank)
        self.shuffle = check_bool("shuffle", shuffle)
        self.seed = DEFAULT_SEED if seed is None else check_int("seed", seed)
        self.drop_last = check_bool("drop_last", drop_last)
        check_choice("oversize", oversize, ("error", "alone"))
        if plan_ahead is None:
            plan_ahead = max(1, _SAMPLES_A_CHUNK // self.effective_batch_size)
        self.plan_ahead = check_int("plan_ahead", plan_ahead, minimum=1)

        self.lengths = as_lengths(lengths)
        if self.drop_last and len(self.lengths) < self.effective_batch_size:
            raise ParameterError(
                f"lengths must have at least effective_batch_size = {self.effective_batch_size} samples with "
                f"drop_last=True, got {len(self.lengths)}"
            )
        self.composition = Composition(
            num_samples=len(self.lengths),
            batch_size=self.effective_batch_size,
            groups=self.partition.groups,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        self.epoch = 0
        self._epoch_before_load = 0
        self._start = 0
        self._handout: Handout | None = None
        self.partition.check_range(self.effective_batch_size, self.lengths.maximum)
        _check_cost_fn(cost, self.lengths.minimum, self.lengths.maximum)
        check_oversize(self.lengths, self.partition, oversize)
        self._checked_epoch: int | None = None
        self._check_cap()

    def __len__(self) -> int:
        """Micro-batches this rank runs an epoch: `steps * grad_accum`, the same on every rank, in every epoch."""
        return self.composition.steps * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of the epoch, slot 0 of the first step first.

        Starts where a loaded state left off, once; the next iteration starts the epoch from its beginning. Where
        accelerate's `skip_first_batches` wraps the sampler, the batches it throws away are empty: they are not planned.

        Raises:
            ParameterError: accelerate's `prepare` has wrapped the sampler so that most of the plan would be lost.
        """
        self._check_cap()
        consumer = Consumer(self)
        start, self._start = self._start, 0
        if consumer.skips is None:
            self._handout = Handout(start, consumer)
            return _MicroBatches(self, self._handout)
        self._handout = Handout(min(consumer.skips, len(self)), consumer)
        return chain(repeat([], self._handout.handed), _MicroBatches(self, self._handout))

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration; also forgets a loaded position in another epoch.

        Args:
            epoch: >= 0. The same epoch gives the same micro-batches.
        """
        epoch = check_int("epoch", epoch, minimum=0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._start = 0
            self._handout = None

    @property
    def sampler(self) -> _EpochHook:
        """What wrappers that look for `batch_sampler.sampler.set_epoch` find."""
        return _EpochHook(self)

    @property
    def batch_size(self) -> int:
        """Mean samples in a micro-batch, rounded down; micro-batches have different sizes."""
        return self.effective_batch_size // self.partition.groups

    @property
    def repeated(self) -> int:
        """Samples that appear a second time in an epoch, because its last step has fewer than D * G of them."""
        return self.composition.repeats

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Position in the epoch and what it depends on; plain ints, strings, floats and bools.

        Args:
            consumed: micro-batches of this epoch that the training loop has taken. Default: counted. The count is
                right for a plain loop and for a torch `DataLoader`, with workers too; give it when something else
                between the sampler and the loop takes micro-batches ahead.
        """
        total = len(self)
        if consumed is None:
            consumed = self._start if self._handout is None else self._handout.consumed
        consumed = check_int("consumed", consumed, minimum=0, maximum=total)
        return states.save(self.epoch, consumed, self.composition, self.partition, self.lengths)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, in O(1): the next iteration yields the rest of that epoch.

        `dp_size`, `grad_accum`, `cost`, `max_tokens` and `sync` may have changed if the position is between two steps.

        Raises:
            ParameterError: the state is not one of this class, or was saved with other lengths, batch size, seed,
                shuffle or drop_last, or within a step under another partition; it names the field.
        """
        epoch, start = states.load(state, self.composition, self.partition, self.lengths)
        self._epoch_before_load = self.epoch
        self.epoch, self._start = epoch, start
        self._handout = None

    def indices(self, step: int, epoch: int | None = None) -> torch.Tensor:
        """Samples of a step, int64 [B]; `plan(step).order` are positions in it.

        Raises:
            ParameterError: `step` is not one of the epoch's.
        """
        return torch.from_numpy(self._indices(step, epoch)[0])

    def plan(self, step: int, epoch: int | None = None) -> BatchPlan:
        """Plan of one step of an epoch (default: the current one), with one row.

        Raises:
            ParameterError: `step` is not one of the epoch's.
        """
        return self.partition.plan(gather(self.lengths.values, self._indices(step, epoch)))

    def repeats(self, step: int, slot: int) -> list[bool]:
        """For each sample of this rank's micro-batch, whether it is a repeat that fills up the last step.

        Example:
            >>> sampler = GPUBatchRebalanceSampler([5, 9, 2], 4, dp_size=2, grad_accum=2, drop_last=False, rank=0)
            >>> sampler.repeated, [sum(sampler.repeats(0, slot)) for slot in range(2)]
            (1, [0, 0])
        """
        plan = self.plan(step)
        real = self.composition.tail if step == self.composition.full_steps else self.effective_batch_size
        return [position >= real for position in plan.microbatch(0, slot, self.rank).tolist()]

    def report(self, max_steps: int = 1000) -> Any:
        """Balance, padding and peak of this epoch against their bounds; see `gpusampler.report.Report`."""
        from gpusampler.report import report_sampler

        return report_sampler(self, max_steps=max_steps)

    def _check_cap(self) -> None:
        if self._checked_epoch != self.epoch:
            check_cap(self.lengths, self.composition, self.partition, self.epoch)
            self._checked_epoch = self.epoch

    def _indices(self, step: int, epoch: int | None) -> Indices:
        step = check_int("step", step, minimum=0, maximum=self.composition.steps - 1)
        epoch = self.epoch if epoch is None else check_int("epoch", epoch, minimum=0)
        return self.composition.indices(epoch, step)

    def _plan_chunk(self, epoch: int, step: int, count: int) -> _Chunk:
        samples = self.composition.indices(epoch, step, count)
        plan = self.partition.plan(gather(self.lengths.values, samples))
        return _Chunk(np.take_along_axis(samples, plan.order.numpy(), axis=1), plan.offsets.numpy())


class _MicroBatches(Iterator[list[int]]):
    """One pass over an epoch for one rank."""

    def __init__(self, sampler: GPUBatchRebalanceSampler, handout: Handout) -> None:
        """Start at what is consumed; plans nothing yet."""
        self._sampler = sampler
        self._handout = handout
        self._rank = sampler.rank
        self._dp_size = sampler.dp_size
        self._grad_accum = sampler.grad_accum
        self._epoch = sampler.epoch
        self._go_to(handout.handed)

    def _go_to(self, position: int) -> None:
        sampler, epoch = self._sampler, self._epoch
        step, self._slot = divmod(position, sampler.grad_accum)
        self._chunks = PlanAhead(
            _chunk_starts(step, sampler.composition, sampler.plan_ahead),
            lambda start, count: sampler._plan_chunk(epoch, start, count),
        )
        self._chunk: _Chunk | None = None
        self._row = 0

    def state_dict(self) -> dict[str, Any]:
        """Position of what was handed out; torchdata's StatefulDataLoader keeps it for each batch under way."""
        handed = self._handout.handed
        return {**self._sampler.state_dict(handed), "epoch": self._epoch, "handed": handed - self._handout.base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind what was handed out; the loader goes on counting from where it was."""
        sampler = self._sampler
        self._epoch, position = states.load(state, sampler.composition, sampler.partition, sampler.lengths)
        self._handout.handed, self._handout.base = position, position - check_int("state['handed']", state["handed"])
        self._chunks.close()
        self._go_to(position)
        if position == len(sampler):  # a loader that has finished asks for the next epoch, which may be chosen already
            sampler.set_epoch(max(sampler.epoch, sampler._epoch_before_load))

    def __next__(self) -> list[int]:
        """Return the next micro-batch as builtin ints."""
        if self._chunk is None:
            self._chunk = next(self._chunks)
        offsets = self._chunk.offsets[self._row]
        group = self._slot * self._dp_size + self._rank
        micro_batch: list[int] = self._chunk.samples[self._row, offsets[group] : offsets[group + 1]].tolist()
        self._slot += 1
        if self._slot == self._grad_accum:
            self._slot = 0
            self._row += 1
            if self._row == len(self._chunk.samples):
                self._row = 0
                self._chunk = None
        self._handout.handed += 1
        return micro_batch

    def __del__(self) -> None:
        """Let the planning thread end with the iteration."""
        self._chunks.close()


class _EpochHook:
    """Forwards `set_epoch` to a batch sampler."""

    def __init__(self, batch_sampler: GPUBatchRebalanceSampler) -> None:
        self._batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self._batch_sampler.lengths)

    def set_epoch(self, epoch: int) -> None:
        self._batch_sampler.set_epoch(epoch)


def _chunk_starts(step: int, composition: Composition, plan_ahead: int) -> Iterator[tuple[int, int]]:
    """First step and number of steps of each chunk; a tail step, of another size, is a chunk of its own."""
    for start in range(step, composition.full_steps, plan_ahead):
        yield start, min(plan_ahead, composition.full_steps - start)
    if composition.tail and step <= composition.full_steps:
        yield composition.full_steps, 1


def _check_available(lookahead: Any, pad_multiple: Any, process_group: Any, device: Any) -> None:
    if check_int("lookahead", lookahead, minimum=1) != 1:
        raise NotAvailableError(f"lookahead={lookahead} is not available yet, use lookahead=1")
    if check_int("pad_multiple", pad_multiple, minimum=1) != 1:
        raise NotAvailableError(f"pad_multiple={pad_multiple} is not available yet, use pad_multiple=1")
    if process_group is not None and process_group != "auto":
        if isinstance(process_group, torch.distributed.ProcessGroup):
            raise NotAvailableError("a process_group is not available yet, use process_group='auto' or None")
        raise ParameterTypeError(
            f"process_group must be 'auto', None or a torch.distributed.ProcessGroup, got {quote(process_group)}"
        )
    if device is not None:
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ParameterError(f"device must be a torch device, got {quote(device)}") from error
        if where.type != "cpu":
            raise NotAvailableError(f"device={str(where)!r} is not available yet, use device='cpu'")


def _world(process_group: Any) -> tuple[int, int]:
    """World size and rank of torch.distributed, or (1, 0)."""
    distributed = torch.distributed
    if process_group == "auto" and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return 1, 0


def _check_rank(rank: Any, dp_size: int, world: int, world_rank: int) -> int:
    if rank is not None:
        return check_int("rank", rank, minimum=0, maximum=dp_size - 1)
    if world == dp_size:
        return world_rank
    if world > 1:
        raise ParameterError(f"rank must be given: dp_size is {dp_size}, but torch.distributed has {world} processes")
    return 0


def _check_cost_fn(cost: CostModel, shortest: int, longest: int) -> None:
    """Call a `cost_fn` on lengths over the whole range, so that a bad one fails in the constructor."""
    if cost.cost_fn is not None:
        steps = np.geomspace(shortest, longest, 256)
        probes = np.unique(np.clip(np.rint(steps).astype(np.int64), shortest, longest))
        cost(torch.from_numpy(probes))
