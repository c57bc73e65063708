"""Balanced micro-batches from a stream: samples that come one by one, of lengths not known before, in a bounded buffer.

Two ways to feed D ranks, which the caller names:

- `sharded=False`: every rank reads the same stream. Each step takes the next B samples and splits them like the
  map-style sampler, with the same plan on every rank. Nothing is communicated unless torch.distributed runs, and then
  one tiny gather a step proves that the ranks did read the same lengths.
- `sharded=True`: every rank reads a stream of its own, and samples stay on their rank. A step takes B / D of each, from
  a buffer of a few times as many: one rank, in turn, its oldest, the others samples of nearly the same lengths. The
  oldest sample always goes: none waits longer than `buffer_size` steps.

Ranks agree before every step, in one gather on a gloo group of their own of a few integers (and B / D lengths) a rank:
whether all go on, and whether one has failed. So all yield equally many micro-batches whatever their shards hold, and
errors reach all.

Runs in the training process; to decode in parallel, wrap a DataLoader, not the other way round:

    stream = BalancedStream(DataLoader(iterable, batch_size=None, num_workers=8), 256, grad_accum=4, sharded=True)

Time a step: O(buffer log buffer) besides the plan. Only the padded layout is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError, ParameterTypeError, check_bool, check_int, quote
from gpusampler.group import PlanGroup
from gpusampler.handout import refuse_dealing
from gpusampler.plan import Partition
from gpusampler.stream_buffer import Buffer, Item
from gpusampler.stream_peers import Peers
from gpusampler.stream_steps import Report, Step, local_step, shared_step, take_local, take_shared

_FORMAT = 2
_BUFFERED_STEPS = 4


class BalancedStream(IterableDataset[list[Any]]):
    """Yields this rank's micro-batches, lists of samples, slot 0 of a step first.

    Args:
        source: iterable of samples: an `IterableDataset`, a `DataLoader` with `batch_size=None`, a datasets stream, ...
            Iterated anew each epoch; its `set_epoch`, `state_dict` and `load_state_dict` are used if it has them.
        effective_batch_size: samples of an optimizer step over all ranks, B, at least `dp_size * grad_accum`; with
            `sharded` a multiple of `dp_size`. A step takes fewer if B do not fit under `max_tokens`.
        dp_size: ranks that read different samples, D; default: the processes of the group, else 1.
        grad_accum: micro-batches a rank accumulates in one step, G.
        rank: this rank; default: the rank in the group, else 0.
        sharded: whether the source differs between ranks; needed when `dp_size` is above 1.
        drop_last: end when some rank (or the shared stream) has no full step left, and drop the rest (see `dropped`);
            else go on until every sample was yielded, in smaller steps, in which a rank with fewer than G samples
            repeats some (see `repeats`).
        column: part of a sample whose length counts, as in `lengths_from`; default: by the first sample.
        fn: returns the length of a sample, instead.
        cost: cost of a sample at a padded length.
        max_tokens: largest samples * longest of any micro-batch.
        sync: "microbatch" or "step", as in the sampler.
        buffer_size: most samples that a rank holds, at least B / D; default 4 * B / D. With `sharded` only: a shared
            stream needs the B of its step.
        process_group: "auto", None, a group, or a `PlanGroup` with a timeout: who must agree. None only for a shared
            stream, whose ranks then trust each other.

    Raises:
        ParameterError: a parameter that cannot be honoured. While iterating: a sample without a usable length, or
            longer than `max_tokens` (named by its place in the stream); too few samples for a step; DataLoader workers.
        DistributedError: while iterating: another rank failed, reads other samples, or has other parameters.

    Example:
        >>> stream = BalancedStream([[1] * n for n in (5, 9, 2, 7, 4, 8)], 3, grad_accum=2)
        >>> [[len(sample) for sample in micro_batch] for micro_batch in stream]
        [[5, 2], [9], [7, 4], [8]]
    """

    def __init__(
        self,
        source: Iterable[Any],
        effective_batch_size: int,
        dp_size: int | None = None,
        grad_accum: int = 1,
        rank: int | None = None,
        *,
        sharded: bool | None = None,
        drop_last: bool = True,
        column: Any = None,
        fn: Callable[[Any], int] | None = None,
        cost: CostModel | None = None,
        max_tokens: int | None = None,
        sync: str = "microbatch",
        buffer_size: int | None = None,
        process_group: Any = "auto",
    ) -> None:
        """Check every parameter; nothing is read or communicated yet."""
        if not hasattr(source, "__iter__"):
            raise ParameterTypeError(f"source must be iterable, got {type(source).__name__}")
        self.process_group = process_group if isinstance(process_group, PlanGroup) else PlanGroup(process_group)
        world, world_rank = self.process_group.place()
        dp_size = world if dp_size is None else dp_size
        cost = CostModel() if cost is None else cost
        self.partition = Partition(dp_size, grad_accum, cost, max_tokens, "padded", sync)
        self.dp_size, self.grad_accum = self.partition.dp_size, self.partition.grad_accum
        if rank is None and self.dp_size not in (1, world):
            raise ParameterError(f"rank must be given when dp_size={self.dp_size} is not the {world} processes")
        self.rank = check_int("rank", world_rank % self.dp_size if rank is None else rank, 0, self.dp_size - 1)
        self.effective_batch_size = check_int("effective_batch_size", effective_batch_size, self.partition.groups)
        self.drop_last = check_bool("drop_last", drop_last)
        self.sharded = _check_sharded(sharded, self.dp_size, self.effective_batch_size, world)
        self.take = self.effective_batch_size // (self.dp_size if self.sharded else 1)
        if buffer_size is not None and not self.sharded:
            raise ParameterError("buffer_size is for sharded=True; a shared stream holds the samples of one step")
        most = (_BUFFERED_STEPS if self.sharded else 1) * self.take
        self.buffer_size = most if buffer_size is None else check_int("buffer_size", buffer_size, self.take)
        self.source = source
        self.epoch = 0
        self._peers: Peers | None = None
        self._buffer = Buffer(source, self.buffer_size, column, fn, max_tokens)
        self._step: Step | None = None
        self._slot = 0
        self._steps = 0
        self._filler: list[Item] = []
        self._loaded = False

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield micro-batches from the beginning of the epoch, or once from a loaded position."""
        if get_worker_info() is not None:
            raise ParameterError(
                "BalancedStream must be iterated in the training process, not in a DataLoader worker: put the loader "
                "inside, BalancedStream(DataLoader(source, batch_size=None, num_workers=...), ...)"
            )
        refuse_dealing(self)
        if not self._loaded:
            self._step, self._slot, self._steps, self._filler = None, 0, 0, []
            self._buffer.restart()
        self._loaded = False
        if self._peers is None or not self._peers.alive:
            self._peers = Peers(self.process_group)
        return self._iterate(self._peers)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the source, and forget a loaded position in another epoch."""
        epoch = check_int("epoch", epoch, minimum=0)
        if epoch != self.epoch:
            self.epoch, self._loaded = epoch, False
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    @property
    def repeats(self) -> list[bool]:
        """For each sample of the last micro-batch, whether it only fills up: give it weight 0."""
        return [] if self._step is None else [item.repeat for item in self._items(self._step, self._slot - 1)]

    @property
    def step_samples(self) -> int:
        """Samples of the current step over all ranks, repeats not counted: what a mean over samples divides by."""
        return 0 if self._step is None else self._step.samples

    @property
    def dropped(self) -> int:
        """Samples that this rank has read and not yielded; after the last step: those that are dropped."""
        return len(self._buffer.items)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last micro-batch that was yielded.

        If the source has `state_dict` and `load_state_dict`, its state is saved with the samples that are buffered, and
        resuming continues it, as exactly as it does itself. Else only the number of samples read is saved; resuming
        reads that many again, which is exact if the source gives the same samples. Once the source has ended, the
        rest of the buffer is all that is left. With `sharded`, each rank has its own state; else one serves all ranks.
        """
        step = None if self._step is None or self._slot == self.grad_accum else self._step
        keep = self._buffer.packed
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "steps": self._steps,
            "slot": 0 if step is None else self._slot,
            "step": None if step is None else step.packed(keep),
            "filler": keep(self._filler),
            "buffer": self._buffer.state_dict(),
            "fields": self._fields(within_step=step is not None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration.

        A shared stream may change `dp_size` and `grad_accum` at a step boundary; cost, `max_tokens` and `sync` may
        always change.

        Raises:
            ParameterError: not a state of this class, or saved with other parameters; it names them.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ParameterError(f"state must be one of BalancedStream, format {_FORMAT}, got {quote(state)}")
        for name, value in self._fields(within_step=state["step"] is not None).items():
            if state["fields"].get(name, value) != value:
                raise ParameterError(f"state was saved with {name}={state['fields'][name]!r}, here it is {value!r}")
        self._buffer.load_state_dict(state["buffer"])
        self.epoch, self._steps, self._slot = state["epoch"], state["steps"], state["slot"]
        self._step = None if state["step"] is None else Step.unpacked(state["step"], self._buffer.unpacked)
        self._filler = self._buffer.unpacked(state["filler"])
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        self._loaded = True

    def _fields(self, within_step: bool) -> dict[str, Any]:
        fields = {"effective_batch_size": self.effective_batch_size, "sharded": self.sharded}
        if self.sharded:
            fields |= {"rank": self.rank, "buffer_size": self.buffer_size}
        if self.sharded or within_step:
            fields |= {"dp_size": self.dp_size, "grad_accum": self.grad_accum}
        return fields

    def _iterate(self, peers: Peers) -> Iterator[list[Any]]:
        fields = self._fields(within_step=True) | {"epoch": self.epoch, "position": (self._steps, self._slot)}
        fields |= {"drop_last": self.drop_last, "partition": repr(self.partition)}
        error: Exception | None = None
        try:
            self._buffer.open()
        except Exception as caught:
            error = caught
        peers.begin({name: value for name, value in fields.items() if name != "rank"}, error)
        while True:
            if self._step is None or self._slot == self.grad_accum:
                self._step = self._next_step(peers)
                if self._step is None:
                    return
                self._slot = 0
                self._steps += 1
            micro_batch = self._items(self._step, self._slot)
            self._slot += 1
            yield [item.sample for item in micro_batch]

    def _items(self, step: Step, slot: int) -> list[Item]:
        return step.groups[slot * (1 if self.sharded else self.dp_size) + (0 if self.sharded else self.rank)]

    def _next_step(self, peers: Peers) -> Step | None:
        """Fill the buffer, agree, and plan; None at the end."""
        error: Exception | None = None
        report = Report()
        try:
            self._buffer.fill()
            take = take_local if self.sharded else take_shared
            report = take(self._buffer.items, self.take, self.partition)
        except Exception as caught:
            error = caught
        reports = peers.exchange(report, error, self.take if self.sharded else 0)
        if self._steps == 0:
            _refuse_no_step(reports, self.take if self.drop_last else 1, self.sharded)
        short = min(one.available for one in reports) < self.take
        if max(one.count for one in reports) == 0 or (short and self.drop_last):
            return None
        step: Step
        if self.sharded:
            items, turn = self._buffer.items, self._steps
            step = local_step(items, report, reports, turn, self.partition, self._filler)
        else:
            step = shared_step(self._buffer.items, report.count, self.partition)
        self._filler = step.groups[-1][-1:]
        return step


def _check_sharded(sharded: bool | None, dp_size: int, batch: int, world: int) -> bool:
    if dp_size == 1:
        return False
    if sharded is None:
        raise ParameterError(
            "sharded must be True or False when dp_size is above 1: does each rank read a stream of its own?"
        )
    if not check_bool("sharded", sharded):
        return False
    if batch % dp_size:
        raise ParameterError(f"effective_batch_size must be a multiple of dp_size={dp_size} if sharded, got {batch}")
    if world % dp_size:
        raise ParameterError(
            f"sharded=True needs the {dp_size} ranks in process_group, to agree when to stop; it has {world} processes"
        )
    return True


def _refuse_no_step(reports: list[Report], least: int, sharded: bool) -> None:
    for process, report in enumerate(reports):
        if report.available < least:
            where = f" of process {process} in the group" if sharded else ""
            advice = "can it be iterated more than once?" if report.available == 0 else "drop_last=False keeps them"
            raise ParameterError(f"the source{where} gave {report.available} samples, a step takes {least}; {advice}")
