"""The batch sampler: epochs, iteration, length and state. Planning is elsewhere.

`Composition` says which samples share a step, `Partition` splits a step over ranks and slots, `MicroBatches` has both
done ahead of time; this class strings them together and remembers where the training loop is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from gpusampler import state as states
from gpusampler.agree import Agreement
from gpusampler.batch_plan import BatchPlan
from gpusampler.compose import Composition, Indices
from gpusampler.cost import CostModel
from gpusampler.errors import (
    NotAvailableError,
    ParameterError,
    check_bool,
    check_choice,
    check_int,
    quote,
)
from gpusampler.feasible import check_cap, check_oversize
from gpusampler.group import PlanGroup
from gpusampler.handout import Consumer, Handout, told_size
from gpusampler.iterate import MicroBatches
from gpusampler.kernels.checks import gather, reorder
from gpusampler.lengths import as_lengths
from gpusampler.pipeline import Chunk, PlanAhead
from gpusampler.plan import Partition
from gpusampler.planner import Planner
from gpusampler.stats import PlanStats

DEFAULT_SEED = 42
# Half a chunk is cut into micro-batches at once: once in 256 of them, well below the 99th percentile.
_MICRO_BATCHES_A_CHUNK = 512
_SAMPLES_A_CHUNK = 1 << 19
_FIXED = frozenset(
    ("lengths", "effective_batch_size", "dp_size", "grad_accum", "shuffle", "seed", "drop_last", "plan_ahead")
)


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
        dp_size: data-parallel ranks, D; default: the size of `process_group`, else 1. With tensor-, context- or
            pipeline-parallel peers give both `dp_size` and `rank`, see `from_device_mesh`.
        grad_accum: micro-batches a rank accumulates in one step, G.
        shuffle: shuffle samples, anew each epoch (see `set_epoch`); else the order of the dataset.
        seed: of the shuffle, any int; None is 42, as ranks could not agree on another without communication.
        rank: this rank, 0 to D - 1; default: the rank in `process_group` if it has D processes, else 0.
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
        process_group: the processes that must agree, data-parallel and model-parallel peers: the first of them plans
            and broadcasts. "auto": the world, when torch.distributed runs with more than one process; None: every rank
            plans for itself, without communication, with the same result; or a `ProcessGroup`, or a `PlanGroup` with
            options. Iterating is then a collective operation: every process of the group does it, to the same
            micro-batch.
        device: where to plan. None: on the current CUDA device if there is one where the kernels can plan, else on the
            CPU, with a warning if there is one where they cannot; "cuda" or "cuda:1": there, or an error says why not.
            Plans do not depend on it. A GPU holds 4 bytes a sample, and with a `cost_fn` 8 a length.
        plan_ahead: steps planned at once; default 512 micro-batches' worth, at most 524288 samples', at least 1.

    Raises:
        ParameterError: a parameter or a length that cannot be honoured; it names the parameter, index and value.

    Example:
        >>> sampler = GPUBatchRebalanceSampler([5, 9, 2, 7, 4, 8, 1, 3], effective_batch_size=4, dp_size=2, rank=0)
        >>> len(sampler), [len(micro_batch) > 0 for micro_batch in sampler]
        (2, [True, True])
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
        _check_available(lookahead, pad_multiple)
        self.process_group = process_group if isinstance(process_group, PlanGroup) else PlanGroup(process_group)
        world, world_rank = self.process_group.place()
        self._alone = world == 1 and dp_size is None
        dp_size = world if dp_size is None else dp_size
        cost = CostModel() if cost is None else cost
        self.partition = Partition(dp_size, grad_accum, cost, max_tokens, layout, sync)
        self.dp_size, self.grad_accum = self.partition.dp_size, self.partition.grad_accum
        self.effective_batch_size = check_int(
            "effective_batch_size", effective_batch_size, minimum=1, maximum=(1 << 31) - 1
        )
        if self.effective_batch_size < self.partition.groups:
            raise ParameterError(
                f"effective_batch_size must be at least dp_size * grad_accum = {self.dp_size} * {self.grad_accum} = "
                f"{self.partition.groups}, got {self.effective_batch_size}"
            )
        self.rank = _check_rank(rank, self.dp_size, world, world_rank)
        self._rank_guessed = rank is None and world < self.dp_size
        self._agreement: Agreement | None = None
        self._stats = PlanStats()
        self.shuffle = check_bool("shuffle", shuffle)
        self.seed = DEFAULT_SEED if seed is None else check_int("seed", seed)
        self.drop_last = check_bool("drop_last", drop_last)
        check_choice("oversize", oversize, ("error", "alone"))
        if plan_ahead is None:
            steps = -(-_MICRO_BATCHES_A_CHUNK // self.grad_accum)
            plan_ahead = max(1, min(steps, _SAMPLES_A_CHUNK // self.effective_batch_size))
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
        self._planner = Planner(device, self.lengths, self.composition)
        self.epoch = 0
        self._epoch_before_load = 0
        self._start = 0
        self._handout: Handout | None = None
        self.partition.check_range(self.effective_batch_size, self.lengths.maximum)
        _check_cost_fn(cost, self.lengths.minimum, self.lengths.maximum)
        check_oversize(self.lengths, self.partition, oversize)
        self._checked_epoch: int | None = None
        self._check_cap(self.epoch)

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
        consumer = Consumer(self)
        if consumer.epoch is not None:
            self.set_epoch(consumer.epoch)
        if self.process_group.resolve() is None:
            self._refuse_guessed_rank()
            self._check_cap(self.epoch)
        if consumer.skips is None:
            self._handout = Handout(self._start, consumer)
            return MicroBatches(self, self._handout)
        self._handout = Handout(min(consumer.skips, len(self)), consumer)
        return chain(repeat([], self._handout.handed), MicroBatches(self, self._handout))

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration; also forgets a loaded position in another epoch.

        Args:
            epoch: >= 0. The same epoch gives the same micro-batches.
        """
        epoch = check_int("epoch", epoch, minimum=0)
        if epoch != self.epoch:
            if self._start and epoch < self.epoch:
                warnings.warn(
                    f"set_epoch({epoch}) forgets the position that was loaded in epoch {self.epoch}: go on with that "
                    "epoch (set_epoch of the loader, where it counts epochs by itself)",
                    stacklevel=2,
                )
            if self._handout is not None and self._handout.waits:
                warnings.warn(
                    f"set_epoch({epoch}) does not reach the iteration that a loader has begun before it: that goes "
                    f"through epoch {self.epoch}",
                    stacklevel=2,
                )
            self.epoch = epoch
            self._start = 0
            self._handout = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change what the sampler was made with, which would be of no effect or of a wrong one."""
        if name in _FIXED and name in self.__dict__:
            raise ParameterError(
                f"{name} cannot be changed from {quote(self.__dict__[name])} to {quote(value)}, make another sampler"
            )
        super().__setattr__(name, check_int("epoch", value, minimum=0) if name == "epoch" else value)

    @property
    def rank(self) -> int:
        """This process's part of a step, 0 to D - 1; whoever starts the processes may set it before iterating."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = check_int("rank", rank, minimum=0, maximum=self.dp_size - 1)
        self._rank_guessed = False

    @property
    def sampler(self) -> _EpochHook:
        """What wrappers that look for `batch_sampler.sampler.set_epoch` find."""
        return _EpochHook(self)

    @property
    def batch_size(self) -> int:
        """Mean samples in a micro-batch, rounded down; micro-batches have different sizes."""
        size: int = told_size(self, self.effective_batch_size // self.partition.groups)
        return size

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
        partition = (None if self._handout is None else self._handout.partition) or self.partition
        return states.save(self.epoch, consumed, self.composition, partition, self.lengths)

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

    def stats(self) -> PlanStats:
        """Waits of the training thread, planning time and broadcasts so far, over all iterations; a copy."""
        return replace(self._stats)

    def close(self) -> None:
        """End the process groups and free the GPU memory that iterating took; it takes them anew.

        Those within a part of the world stay until torch.distributed ends.
        """
        self._planner.close()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the process groups: a copy makes its own."""
        return {**self.__dict__, "_agreement": None}

    def _refuse_guessed_rank(self) -> None:
        """Ranks of a group compare their places; processes that torchrun started without one would all be rank 0."""
        if self._rank_guessed and torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
            raise ParameterError(
                f"rank must be given with dp_size={self.dp_size}, or init_process_group called before: torchrun has "
                "started several processes, which would all train the data of rank 0"
            )

    def _check_cap(self, epoch: int) -> None:
        if self._checked_epoch != epoch:
            check_cap(self.lengths, self.composition, self.partition, epoch)
            self._checked_epoch = epoch

    def _cap_error(self, epoch: int) -> Exception | None:
        """What is wrong with an epoch's cap on this rank, for all ranks to hear of it."""
        try:
            self._check_cap(epoch)
        except Exception as error:
            return error
        return None

    def _begin(self, handout: Handout) -> None:
        """A first micro-batch is asked for: the loaded position is used up. A loader may have called `iter` twice."""
        if self._handout is handout:
            self._start = 0

    def _agree(self) -> Agreement | None:
        """The process groups of this sampler; None if it has nobody to agree with."""
        group = self.process_group.resolve()
        if group is None:
            return None
        if self._alone:
            raise ParameterError(
                "dp_size was taken to be 1, as torch.distributed was not initialized when the sampler was made; make "
                "it afterwards, or give dp_size and rank"
            )
        if get_worker_info() is not None:
            raise ParameterError(
                "process_group must be None where a DataLoader's worker iterates the sampler: workers cannot agree"
            )
        if self._agreement is None or not self._agreement.alive:
            self._agreement = Agreement(group, self.process_group)
        return self._agreement

    def _indices(self, step: int, epoch: int | None) -> Indices:
        step = check_int("step", step, minimum=0, maximum=self.composition.steps - 1)
        epoch = self.epoch if epoch is None else check_int("epoch", epoch, minimum=0)
        return self.composition.indices(epoch, step)

    def _plan_ahead(self, epoch: int, spans: Iterator[tuple[int, int]], partition: Partition, depth: int) -> PlanAhead:
        plan = partial(self._plan_chunk, epoch, partition=partition)
        return self._planner.ahead(spans, plan, epoch, partition, self._stats, depth)

    def _plan_chunk(self, epoch: int, step: int, count: int, partition: Partition) -> Chunk:
        samples = self.composition.indices(epoch, step, count)
        plan = partition.plan(
            gather(self.lengths.values, samples), where=lambda row: f"step {step + row} of epoch {epoch}"
        )
        return Chunk(step, reorder(samples, plan.order.numpy()), plan.offsets.numpy()[:, 1:])


class _EpochHook:
    """Forwards `set_epoch` to a batch sampler."""

    def __init__(self, batch_sampler: GPUBatchRebalanceSampler) -> None:
        self._batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self._batch_sampler.lengths)

    def set_epoch(self, epoch: int) -> None:
        self._batch_sampler.set_epoch(epoch)


def _check_available(lookahead: Any, pad_multiple: Any) -> None:
    if check_int("lookahead", lookahead, minimum=1) != 1:
        raise NotAvailableError(f"lookahead={lookahead} is not available yet, use lookahead=1")
    if check_int("pad_multiple", pad_multiple, minimum=1) != 1:
        raise NotAvailableError(f"pad_multiple={pad_multiple} is not available yet, use pad_multiple=1")


def _check_rank(rank: Any, dp_size: int, world: int, world_rank: int) -> int:
    if world % dp_size and world > 1:
        raise ParameterError(f"dp_size={dp_size} does not divide the {world} processes of process_group")
    if rank is not None:
        return check_int("rank", rank, minimum=0, maximum=dp_size - 1)
    if world == dp_size:
        return world_rank
    if world > 1:
        raise ParameterError(
            f"rank must be given: dp_size is {dp_size}, but process_group has {world} processes; "
            "from_device_mesh(mesh, dims) tells both"
        )
    return 0


def _check_cost_fn(cost: CostModel, shortest: int, longest: int) -> None:
    """Call a `cost_fn` on lengths over the whole range, so that a bad one fails in the constructor."""
    if cost.cost_fn is None:
        return
    steps = np.geomspace(shortest, longest, 256)
    probes = torch.from_numpy(np.unique(np.clip(np.rint(steps).astype(np.int64), shortest, longest)))
    together, alone = cost(probes), torch.cat([cost(probes[i : i + 1]) for i in (0, -1 % len(probes))])
    if not torch.equal(together[[0, -1]], alone):
        raise ParameterError(
            f"cost_fn must give a length the same cost whatever the others are, got {together[0]} and {together[-1]} "
            f"for lengths {probes[0]} and {probes[-1]} among others, {alone[0]} and {alone[1]} alone"
        )
