"""transformers: a Trainer that trains on balanced micro-batches.

    trainer = balance(Trainer(model, args, train_dataset=dataset, ...))
    trainer.train()

The Trainer goes on deciding everything else: batch size, accumulation, seeds, workers, collator, checkpoints. Its
loader is rebuilt around a `GPUBatchRebalanceSampler`, which its own epochs and its own skipping on resume then reach.
Losses that are means over a micro-batch are weighted, so that every item of a step counts the same; losses that the
model divides by `num_items_in_batch` are exact already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from gpusampler import state as states
from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.integrations._loaders import with_batch_sampler
from gpusampler.integrations._trainer import (
    cost_of,
    fillers,
    ignores_num_items,
    is_divided,
    read_lengths,
    sync_of,
    without_labels,
)
from gpusampler.integrations._trainer import count_items as count_labels
from gpusampler.integrations.accelerate import prepare_loader
from gpusampler.lengths import Lengths, as_lengths
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.weights import microbatch_weight

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)
CountItems = Callable[[Mapping[str, Any]], Any]

_SHUFFLES = {"random": True, "sequential": False, "batch_rebalance": True}


def balance(
    trainer: AnyTrainer,
    *,
    lengths: Any = None,
    cost: CostModel | None = None,
    max_tokens: int | None = None,
    oversize: str = "error",
    layout: str = "padded",
    sync: str | None = None,
    lookahead: int = 1,
    pad_multiple: int = 1,
    process_group: Any = "auto",
    device: str | torch.device | None = None,
    count_items: CountItems | None = None,
) -> AnyTrainer:
    """Make a Trainer, of any subclass, train on balanced micro-batches; call it before `train()`.

    Ranks, `per_device_train_batch_size`, accumulation, `data_seed` or else `seed`, `dataloader_drop_last` and
    `train_sampling_strategy` ("random", "sequential" or "batch_rebalance") are those of the Trainer; its
    `per_device_train_batch_size` is the mean of a micro-batch.

    Args:
        trainer: the Trainer; it is changed and returned.
        lengths: length of each training sample; default: `lengths_from` the dataset's column `length_column_name`, else
            from the model's first input (`input_ids`), read by `dataloader_num_workers` processes.
        cost: default `CostModel.from_config(model.config)`.
        max_tokens: as in `GPUBatchRebalanceSampler`.
        oversize: as in `GPUBatchRebalanceSampler`.
        layout: as in `GPUBatchRebalanceSampler`.
        sync: default "step" where the Trainer accumulates under DDP's `no_sync`, else "microbatch".
        lookahead: as in `GPUBatchRebalanceSampler`.
        pad_multiple: as in `GPUBatchRebalanceSampler`.
        process_group: as in `GPUBatchRebalanceSampler`.
        device: as in `GPUBatchRebalanceSampler`.
        count_items: items that a micro-batch's mean loss is a mean over, from the model's inputs; default: labels that
            are not -100, or samples where there are no labels. Used where the loss is not divided by
            `num_items_in_batch`.

    Returns:
        `trainer`.

    Raises:
        ParameterError: something cannot be honoured; it names the option.
    """
    if not isinstance(trainer, Trainer):
        raise ParameterTypeError(f"trainer must be a transformers.Trainer, got {quote(trainer)}")
    if isinstance(trainer, BalancedTrainer):
        raise ParameterError("trainer is balanced already")
    if count_items is not None and not callable(count_items):
        raise ParameterTypeError(f"count_items must be callable, got {quote(count_items)}")
    _check(trainer)
    base = type(trainer)
    trainer.__class__ = type(f"Balanced{base.__name__}", (BalancedTrainer, base), {"__module__": base.__module__})
    trainer._balance_lengths = lengths
    trainer._balance_options = {
        "cost": cost_of(trainer) if cost is None else cost,
        "max_tokens": max_tokens,
        "oversize": oversize,
        "layout": layout,
        "sync": sync_of(trainer) if sync is None else sync,
        "lookahead": lookahead,
        "pad_multiple": pad_multiple,
        "process_group": process_group,
        "device": device,
    }
    trainer._balance_count = count_items or (lambda inputs: count_labels(trainer, inputs))
    trainer.add_callback(BalancedPosition())
    return trainer


class BalancedTrainer:
    """What `balance` puts in front of a Trainer's class."""

    _balance_lengths: Any
    _balance_options: dict[str, Any]
    _balance_count: CountItems
    _balance_read: tuple[Any, Lengths] | None = None
    _balance_total: Any = None
    _balance_shares: int = 1
    _balance_probed: bool = False
    _balance_fillers: Sequence[bool] = ()
    _balance_is_filler: bool = False

    def get_train_dataloader(self: Any) -> Any:
        """The Trainer's own loader with the balancing sampler in it."""
        _check(self)
        loader = super().get_train_dataloader()  # type: ignore[misc]
        return prepare_loader(self.accelerator, with_batch_sampler(loader, _sampler(self)))

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> None:
        """No sampler of the Trainer's: it may take long to build and is not used."""

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Also count the items of the step where its losses are means over micro-batches."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self._balance_total = None
        if not self._balance_probed and num_items is not None:
            self._balance_probed = True
            if ignores_num_items(self, batches[0], num_items):
                self.model_accepts_loss_kwargs, num_items = False, None
        if batches and not is_divided(self, num_items):
            pairs = zip(batches, self._balance_fillers, strict=True)
            counts = [torch.as_tensor(0 if filler else self._balance_count(b)).to(device) for b, filler in pairs]
            ranks = self.accelerator.gather(torch.stack(counts).sum().reshape(1))
            replicas = len(ranks) // self._balance_sampler.dp_size
            self._balance_total, self._balance_shares = ranks.sum().clamp(min=1), replicas * len(batches)
        return batches, num_items

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: Any) -> Any:
        """Count nothing in micro-batches that only fill up the last step of an epoch."""
        self._balance_fillers = fillers(self._balance_sampler, len(batch_samples))
        counted = [
            without_labels(batch) if filler else batch
            for batch, filler in zip(batch_samples, self._balance_fillers, strict=True)
        ]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Note whether this micro-batch only fills up its step."""
        self._balance_is_filler = any(self._balance_fillers[:1])
        self._balance_fillers = self._balance_fillers[1:]
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weigh the mean loss of a micro-batch by its share of the step's items."""
        weight: Any = None
        if self._balance_is_filler and model.training:
            weight = 0.0
        elif self._balance_total is not None and model.training:
            items = torch.as_tensor(self._balance_count(inputs)).to(self._balance_total.device)
            dp_size = self._balance_sampler.dp_size
            weight = microbatch_weight(items, self._balance_total, dp_size, grad_accum=self._balance_shares)
        result = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if weight is None:
            return result
        return (result[0] * weight, *result[1:]) if return_outputs else result * weight


class BalancedPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the sampler's state in checkpoints, and refuses a resume that would mix two orders of the samples."""

    def __init__(self) -> None:
        """Follow no training yet."""
        self.position: dict[str, Any] | None = None
        self._sampler: GPUBatchRebalanceSampler | None = None

    def state(self) -> dict[str, Any]:
        """For the checkpoint's `trainer_state.json`."""
        return {"args": {}, "attributes": {"position": self.position}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the state of the checkpoint that is resumed, if there is one."""
        self._sampler = sampler = kwargs["train_dataloader"].batch_sampler
        saved = state.stateful_callbacks.get(type(self).__name__)
        position = None if saved is None else saved["attributes"]["position"]
        if state.global_step and not args.ignore_data_skip:
            if position is not None:
                states.load(position, sampler.composition, sampler.partition, sampler.lengths)
            elif state.global_step % sampler.composition.steps:
                raise ParameterError(
                    "resume_from_checkpoint is a checkpoint within an epoch that was not balanced: its order cannot be "
                    "continued; resume from the end of an epoch, or set ignore_data_skip=True"
                )
        self.position = None
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the position behind the step."""
        sampler = self._sampler
        if sampler is not None:
            steps = min(
                max(state.global_step - sampler.epoch * sampler.composition.steps, 0), sampler.composition.steps
            )
            self.position = sampler.state_dict(consumed=steps * sampler.grad_accum)


def _check(trainer: Any) -> None:
    """Refuse what cannot be honoured, by name."""
    args, dataset = trainer.args, trainer.train_dataset
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name):
            raise ParameterError(
                f"accelerator_config.{name}=True cannot be honoured: each process loads what is planned for it"
            )
    if args.train_sampling_strategy not in _SHUFFLES:
        raise ParameterError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} contradicts balanced micro-batches; "
            f"use one of {', '.join(map(repr, _SHUFFLES))}"
        )
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ParameterTypeError(
            f"train_dataset must be indexed and have a length to be balanced, got an IterableDataset of type "
            f"{type(dataset).__name__}"
        )
    divides = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if divides and args.world_size > 1 and not args.average_tokens_across_devices:
        raise ParameterError(
            "average_tokens_across_devices=False cannot be honoured: ranks hold different numbers of tokens, and the "
            "mean of their means is not the mean over the batch"
        )


def _sampler(trainer: Any) -> GPUBatchRebalanceSampler:
    args = trainer.args
    if trainer._balance_read is None or trainer._balance_read[0] is not trainer.train_dataset:
        lengths = trainer._balance_lengths
        lengths = as_lengths(read_lengths(trainer) if lengths is None else lengths)
        trainer._balance_read = trainer.train_dataset, lengths
    batch = trainer.get_total_train_batch_size(args)
    dp_size = batch // (trainer._train_batch_size * args.gradient_accumulation_steps)
    trainer._balance_sampler = GPUBatchRebalanceSampler(
        trainer._balance_read[1],
        effective_batch_size=batch,
        dp_size=dp_size,
        grad_accum=args.gradient_accumulation_steps,
        shuffle=_SHUFFLES[args.train_sampling_strategy],
        seed=args.seed if args.data_seed is None else args.data_seed,
        rank=args.process_index * dp_size // args.world_size,
        drop_last=args.dataloader_drop_last,
        **trainer._balance_options,
    )
    sampler: GPUBatchRebalanceSampler = trainer._balance_sampler
    return sampler
