"""Who reads and iterates a batch sampler, and how many micro-batches the training loop has taken, as opposed to how
many were handed to a loader.

A DataLoader with workers asks its batch sampler for `num_workers * prefetch_factor` micro-batches ahead. torch's
loaders count the batches they have given to the loop in `_num_yielded`, in every release since 1.4 (torchdata's
StatefulDataLoader does the same); a loader that iterates the sampler, itself or through batch samplers around it, is
read there. accelerate's loaders hold one more batch back, until `end_of_dataloader`. Any other consumer is taken to use
what it is handed.

accelerate and Lightning take every batch sampler for one that is the same on all processes, and deal its batches out or
make it anew. Both read `batch_size` before; there they are told otherwise.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from gpusampler.errors import ParameterError

if TYPE_CHECKING:
    from gpusampler.plan import Partition
    from gpusampler.sampler import GPUBatchRebalanceSampler

# Calls between a sampler and the loop: batch samplers around it, the loader's iterator with its bases, the loader.
_MAX_FRAMES = 16
_MAX_WRAPPERS = 4
_LIGHTNING_SETUP = "setup_data"
_LIGHTNING_READER = "_dataloader_init_kwargs_resolve_sampler"


def told_size(sampler: GPUBatchRebalanceSampler, mean: int) -> Any:
    """What the reader of `sampler.batch_size` is told; to be called from that property.

    A `BatchSamplerShard` of accelerate reads it when it is made, to keep the batches of one of several processes. Of a
    plan that is one rank's already it must keep all; it is told None, as sizes differ, and the sampler takes its rank.

    Raises:
        ParameterError: accelerate would split batches, or has other ranks; Lightning would make the sampler anew.
    """
    reader = sys._getframe(2)
    owner = reader.f_locals.get("self")
    fields = getattr(owner, "__dict__", {})
    if fields.get("batch_sampler") is sampler and {"num_processes", "process_index", "split_batches"} <= fields.keys():
        _keep_all(owner, sampler)
        if reader.f_back is not None and reader.f_back.f_locals.get("use_stateful_dataloader"):
            warnings.warn(
                "use_stateful_dataloader=True: behind accelerate's own prepare the loader keeps a number of batches "
                "without their epoch; use gpusampler.integrations.accelerate.prepare, or save the epoch, too, and set "
                "it after load_state",
                stacklevel=4,
            )
        return None
    if reader.f_code.co_name == _LIGHTNING_READER:
        _leave_alone(sampler, bool(reader.f_locals.get("is_predicting")))
    return mean


def _keep_all(shard: Any, sampler: GPUBatchRebalanceSampler) -> None:
    """Make a shard of one process, which hands on every batch, and pass epochs on through batch samplers around it."""
    from gpusampler.integrations._loaders import take_place

    if shard.split_batches:
        raise ParameterError(
            "split_batches=True cannot be honoured: each process loads the micro-batches planned for it"
        )
    take_place(sampler, shard.num_processes, shard.process_index, 1, "accelerate")
    shard.num_processes, shard.process_index = 1, 0
    shard.sampler = sampler.sampler


def _leave_alone(sampler: GPUBatchRebalanceSampler, is_predicting: bool) -> None:
    """Keep Lightning from making the sampler anew: without a batch size it predicts with the one there is.

    Raises:
        AttributeError: for Lightning.
        ParameterError: it would put another sampler in its place.
    """
    helper = "wrap the loader by gpusampler.integrations.lightning.balanced_loader(loader, trainer)"
    if not is_predicting:
        raise ParameterError(
            "use_distributed_sampler=True cannot be honoured: Lightning would make the batch sampler of every "
            f"distributed loader anew, around a sampler of its own; {helper}, or set use_distributed_sampler=False"
        )
    if sampler.drop_last:
        raise ParameterError("drop_last=True would leave samples without a prediction; give drop_last=False")
    raise AttributeError("batch_size")


class Consumer:
    """The loader that iterates `sampler`, found among the callers; it is not kept alive.

    Attributes:
        skips: batches that accelerate's `skip_first_batches` throws away, or None where it is not in use.
        epoch: the one that Lightning is about to train, where it makes an iterator before it tells; else None.

    Raises:
        ParameterError: a wrapper of accelerate would keep a part of this rank's micro-batches, or deal them out.
    """

    def __init__(self, sampler: object) -> None:
        """Look through the callers; to be called from the sampler's `__iter__`."""
        self.skips: int | None = None
        self.epoch: int | None = None
        self._loader: weakref.ref[Any] | None = None
        self._fields: dict[str, Any] | None = None
        self._holder: weakref.ref[Any] | None = None
        self._final: int | None = None
        frame = sys._getframe(2)
        chain: list[Any] = []
        for _ in range(_MAX_FRAMES):
            owner: Any = frame.f_locals.get("self")
            if not chain:
                chain = _wrappers(owner, sampler)
                if chain:
                    self._fields = vars(owner)
                    self._loader = weakref.ref(owner, self._loader_died)
            elif getattr(owner, "batch_sampler", None) is chain[0] and hasattr(owner, "end_of_dataloader"):
                _refuse_dispatch(owner)
                self._holder = weakref.ref(owner)
                break
            elif frame.f_code.co_name == _LIGHTNING_SETUP and hasattr(owner, "epoch_progress"):
                # what the loop counts as processed lies behind in a checkpoint of the last batch of an epoch
                progress, is_last = owner.epoch_progress.current, owner.epoch_loop.batch_progress.is_last_batch
                self.epoch = progress.started if is_last else progress.processed
                break
            if frame.f_back is None:
                break
            frame = frame.f_back
        _refuse_shards(chain)
        skips = [int(wrapper.skip_batches) for wrapper in chain if hasattr(wrapper, "skip_batches")]
        if skips:
            self.skips = sum(skips)

    @property
    def yielded(self) -> int | None:
        """Batches that the loop has taken from the loader; None without a loader."""
        if self._fields is None:
            return self._final
        count: int | None = self._fields.get("_num_yielded")  # not there yet while the loader sets itself up
        if count is None:
            return None
        holder = None if self._holder is None else self._holder()
        return count - 1 if count and holder is not None and not holder.end_of_dataloader else count

    @property
    def ahead(self) -> int:
        """Micro-batches that the loader takes before the loop needs them; 0 without a loader that is known."""
        fields = self._fields or {}
        workers = int(fields.get("_num_workers") or 0) * int(fields.get("_prefetch_factor") or 0)
        return workers + (self._holder is not None)

    @property
    def waits(self) -> bool:
        """Whether a loader has begun, and the loop has taken nothing yet."""
        return self._fields is not None and self._fields.get("_num_yielded") == 0

    def _loader_died(self, _: object) -> None:
        self._final = self.yielded
        self._fields = None


class Handout:
    """Counts micro-batches of one iteration over a sampler.

    Args:
        start: micro-batches of the epoch consumed before this iteration.
        consumer: who iterates, if that is known.
        skipped: micro-batches that are handed out but never reach the loader.

    Attributes:
        partition: what plans this iteration, from its first micro-batch on.
    """

    partition: Partition | None = None

    def __init__(self, start: int, consumer: Consumer | None = None, skipped: int = 0) -> None:
        """Nothing is handed out yet."""
        self.handed = start
        self.base = start + skipped
        self._consumer = consumer

    @property
    def consumed(self) -> int:
        """Micro-batches of the epoch that the training loop has taken."""
        yielded = None if self._consumer is None else self._consumer.yielded
        return self.handed if yielded is None else min(self.handed, self.base + yielded)

    @property
    def ahead(self) -> int:
        """Micro-batches that are handed out before the training loop needs them, as far as that is known."""
        return 0 if self._consumer is None else self._consumer.ahead

    @property
    def waits(self) -> bool:
        """Whether a loader has begun this iteration, and the training loop has taken nothing of it yet."""
        return self._consumer is not None and self._consumer.waits

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain count: a copy has no loader."""
        return Handout, (self.consumed,)


def _wrappers(owner: object, sampler: object) -> list[Any]:
    """Batch samplers from a loader's iterator down to `sampler`; none if `owner` does not iterate it."""
    wrapper = getattr(owner, "_index_sampler", None)
    chain: list[Any] = []
    while wrapper is not None and len(chain) < _MAX_WRAPPERS:
        chain.append(wrapper)
        if wrapper is sampler:
            return chain
        wrapper = getattr(wrapper, "batch_sampler", None)
    return []


def refuse_dealing(stream: object) -> None:
    """Find out whether accelerate loads a stream in one process for all of them; to be called from its `__iter__`.

    Raises:
        ParameterError: it does, as it does with iterable datasets by default: the other processes would be waited for.
    """
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        owner: Any = frame.f_locals.get("self")
        if "slice_fn" in getattr(owner, "__dict__", {}) and owner.dataset is stream and owner.state.num_processes > 1:
            raise ParameterError(
                "the stream yields the micro-batches of this rank already, and accelerate would load those of one "
                f"process for all {owner.state.num_processes} processes: do not prepare its loader"
            )
        if frame.f_back is None:
            break
        frame = frame.f_back


def _refuse_dispatch(loader: Any) -> None:
    if hasattr(loader, "slice_fn"):
        raise ParameterError(
            "dispatch_batches=True cannot be honoured: each process loads the micro-batches planned for it; leave it "
            "off in DataLoaderConfiguration"
        )


def _refuse_shards(chain: list[Any]) -> None:
    for wrapper in chain:
        processes = getattr(wrapper, "num_processes", 1)
        if hasattr(wrapper, "split_batches") and processes > 1:
            raise ParameterError(
                f"the sampler yields the micro-batches of this rank already, and {type(wrapper).__name__} would keep "
                f"one of {processes} of them: prepare the loader with gpusampler.integrations.accelerate.prepare"
            )
