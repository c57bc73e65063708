"""transformers: a Trainer that trains on balanced micro-batches.

    trainer = balance(Trainer(model, args, train_dataset=dataset, ...))
    trainer.train()

The Trainer goes on deciding everything else: batch size, accumulation, seeds, workers, collator, checkpoints. Its
loader is rebuilt around a `GPUBatchRebalanceSampler`, which its own epochs and its own skipping on resume then reach.
Losses that are means over a micro-batch are weighted, so that every item of a step counts the same; losses that the
model divides by `num_items_in_batch` are exact already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from gpusampler import state as states
from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.integrations._loaders import with_batch_sampler
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
        lengths: length of each training sample; default: the dataset's column `length_column_name`, else the length of
            the model's first input (`input_ids`) in every sample.
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
        "cost": _cost(trainer) if cost is None else cost,
        "max_tokens": max_tokens,
        "oversize": oversize,
        "layout": layout,
        "sync": _sync(trainer) if sync is None else sync,
        "lookahead": lookahead,
        "pad_multiple": pad_multiple,
        "process_group": process_group,
        "device": device,
    }
    trainer._balance_count = count_items or (lambda inputs: _count_items(trainer, inputs))
    trainer.add_callback(BalancedPosition())
    return trainer


class BalancedTrainer:
    """What `balance` puts in front of a Trainer's class."""

    _balance_lengths: Any
    _balance_options: dict[str, Any]
    _balance_count: CountItems
    _balance_read: tuple[Any, Lengths] | None = None
    _balance_total: Any = None
    _balance_probed: bool = False

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
            if _ignores_num_items(self, batches[0], num_items):
                self.model_accepts_loss_kwargs, num_items = False, None
        if batches and not _is_divided(self, num_items):
            counts = [torch.as_tensor(self._balance_count(batch)).to(device) for batch in batches]
            ranks = self.accelerator.gather(torch.stack(counts).sum().reshape(1))
            replicas = len(ranks) // self._balance_sampler.dp_size
            self._balance_total = ranks.sum() / (replicas * len(batches))
        return batches, num_items

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weigh the mean loss of a micro-batch by its share of the step's items."""
        weight = None
        if self._balance_total is not None and model.training:
            items = torch.as_tensor(self._balance_count(inputs)).to(self._balance_total.device)
            weight = microbatch_weight(items, self._balance_total, dp_size=self._balance_sampler.dp_size)
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
        lengths = as_lengths(_read_lengths(trainer) if lengths is None else lengths)
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


def _cost(trainer: Any) -> CostModel:
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    if config is None:
        return CostModel()
    try:
        return CostModel.from_config(config)
    except ParameterError as error:
        raise ParameterError(f"cost must be given, as it does not follow from the model's config: {error}") from error


def _sync(trainer: Any) -> str:
    ddp = trainer.accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    every = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    return "step" if ddp and not every and not trainer.is_fsdp_enabled else "microbatch"


def _is_divided(trainer: Any, num_items: Any) -> bool:
    """Whether the step's losses are divided by the number of its items; the Trainer's own rule."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None


def _ignores_num_items(trainer: Any, inputs: Any, num_items: Any) -> bool:
    """Whether the model takes `num_items_in_batch` but returns the mean over the micro-batch all the same.

    Many classifiers do. The Trainer takes such a loss for divided: it would neither divide it by the accumulation
    steps nor could it weigh micro-batches. Two forward passes tell, once.
    """
    if trainer.loss_is_scaled_for_ga is not None or trainer.compute_loss_func is not None:
        return False
    trainer.model_wrapped.eval()
    inputs = trainer._prepare_inputs(inputs)
    with torch.no_grad():
        once, twice = (
            trainer.compute_loss(trainer.model_wrapped, dict(inputs), num_items_in_batch=num_items * factor).mean()
            for factor in (1, 2)
        )
    same = torch.isclose(once, twice, rtol=1e-3) & (once != 0)
    ignores = bool(trainer.accelerator.gather(same.reshape(1)).any())
    if ignores:
        warnings.warn(
            f"{type(trainer.model).__name__} takes num_items_in_batch but returns the mean over a micro-batch: the "
            "losses are weighted and divided by gradient_accumulation_steps, as if accepts_loss_kwargs were False",
            stacklevel=2,
        )
    return ignores


def _count_items(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    for name in trainer.label_names:
        labels = inputs.get(name)
        if isinstance(labels, torch.Tensor):
            return (labels[..., 1:] if trainer._loss_shifts_labels else labels).ne(-100).sum()
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim)


def _read_lengths(trainer: Any) -> Any:
    dataset, column = trainer.train_dataset, trainer.args.length_column_name
    names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        if column in columns:
            return dataset.with_format(None)[column]
        if names[0] in columns:
            table = dataset.select_columns(names[0]).with_format("arrow")
            blocks = (block.column(0).combine_chunks() for block in table.iter(batch_size=10_000))
            return [length for block in blocks for length in block.value_lengths().to_pylist()]
        found = ", ".join(map(repr, columns))
    else:
        first = dataset[0]
        if isinstance(first, Mapping):
            for name, measure in ((column, lambda value: value), (names[0], len)):
                if name in first:
                    return [measure(dataset[i][name]) for i in range(len(dataset))]
        found = f"items of type {type(first).__name__}"
        if isinstance(first, Mapping):
            found = ", ".join(map(repr, first))
    raise ParameterError(
        f"lengths must be given: the dataset has no {column!r} (length_column_name) and no {names[0]!r}, got {found}"
    )
