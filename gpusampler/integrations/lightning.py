"""Lightning: a loader for a Lightning Trainer with its defaults, by `lightning` or `pytorch_lightning`.

    trainer.fit(model, balanced_loader(DataLoader(dataset, batch_sampler=sampler), trainer))

By default Lightning puts a DistributedSampler of its own into every loader of a distributed run, for which it makes the
batch sampler anew with other arguments. A loader whose `sampler` is a DistributedSampler is left alone: the one here
shows Lightning what this rank gets and takes the epochs. The loader also follows the Trainer: it takes its rank where
the processes run, and has the state that Lightning keeps in checkpoints, for a resume within an epoch. It begins when
its first batch is asked for, in the epoch that the Trainer is in: Lightning makes the first iterator before it knows
where a checkpoint goes on, and what it tells samplers counts one epoch too many after some.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.integrations._loaders import sampler_of, take_place, with_batch_sampler
from gpusampler.sampler import GPUBatchRebalanceSampler


def balanced_loader(loader: DataLoader[Any], trainer: Any) -> DataLoader[Any]:
    """A loader that `trainer` uses as it is, for `fit`, `validate`, `test` and `predict`.

    Call it where the Trainer is known: before `fit`, or in `train_dataloader` with `self.trainer`.

    Args:
        loader: a DataLoader with a `GPUBatchRebalanceSampler` as its batch sampler. Its `dp_size` must be given if it
            is made before the processes are started.
        trainer: the Lightning Trainer; `accumulate_grad_batches` must be the sampler's `grad_accum`.

    Returns:
        A new DataLoader with the same dataset and options.

    Raises:
        ParameterError: something cannot be honoured; it names the option. `dp_size` is checked when the Trainer starts
            to iterate.
    """
    sampler = sampler_of(loader)
    for name in ("accumulate_grad_batches", "current_epoch", "distributed_sampler_kwargs", "overfit_batches"):
        if not hasattr(trainer, name):
            raise ParameterTypeError(f"trainer must be a Lightning Trainer, got {quote(trainer)}")
    if trainer.overfit_batches:
        raise ParameterError(
            f"overfit_batches={trainer.overfit_batches} cannot be honoured: Lightning would replace the sampler; "
            "give the sampler the lengths of a small dataset instead"
        )
    batches = _Batches(sampler, trainer)
    batches.check_accumulation()
    balanced = with_batch_sampler(loader, batches, _Loader)
    vars(balanced).update(
        sampler=_RankSampler(sampler, trainer),  # torch forbids to assign it
        state_dict=batches.state_dict,
        load_state_dict=batches.load_state_dict,
    )
    return balanced


class _Loader(DataLoader[Any]):
    """Makes its iterator, which may start workers, for the first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class _Batches(Sampler[list[int]]):
    """The sampler as Lightning sees it: without `batch_size`, by which it would take it for one to make anew."""

    def __init__(self, sampler: GPUBatchRebalanceSampler, trainer: Any) -> None:
        self.batch_sampler = sampler
        self._trainer = trainer

    def __len__(self) -> int:
        if self._trainer.training or self._trainer.predicting:  # Lightning asks before it iterates
            self._follow()
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        self._follow()
        if self._trainer.training:
            self.batch_sampler.set_epoch(self._trainer.current_epoch)
        return iter(self.batch_sampler)

    def _follow(self) -> None:
        sampler, trainer = self.batch_sampler, self._trainer
        place = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        take_place(sampler, place["num_replicas"], place["rank"], 1, "Lightning")
        if trainer.training:
            self.check_accumulation()
        elif trainer.predicting and sampler.drop_last:
            raise ParameterError("drop_last=True would leave samples without a prediction; give drop_last=False")

    def check_accumulation(self) -> None:
        steps, slots = self._trainer.accumulate_grad_batches, self.batch_sampler.grad_accum
        module = getattr(self._trainer, "lightning_module", None)
        if steps != slots and (module is None or module.automatic_optimization):
            raise ParameterError(
                f"accumulate_grad_batches of the Trainer is {steps} and grad_accum of the sampler is {slots}; "
                "make them equal"
            )

    def state_dict(self) -> dict[str, Any]:
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch_sampler.load_state_dict(state)


class _RankSampler(DistributedSampler[int]):
    """What this rank gets, as a DistributedSampler; takes the epochs."""

    def __init__(self, sampler: GPUBatchRebalanceSampler, trainer: Any) -> None:
        super().__init__(range(len(sampler.lengths)), num_replicas=sampler.dp_size, rank=sampler.rank)  # type: ignore[arg-type]
        self._sampler, self._trainer = sampler, trainer

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self._sampler for index in batch)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(self._trainer.current_epoch if self._trainer.training else epoch)
