"""What `balance` takes from a Trainer: the lengths, the cost, and how its loss counts the items of a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DistributedType

from gpusampler.cost import CostModel
from gpusampler.errors import ParameterError
from gpusampler.lengths_from import lengths_from
from gpusampler.sampler import GPUBatchRebalanceSampler


def cost_of(trainer: Any) -> CostModel:
    """Cost by the model's config; the default without one."""
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    if config is None:
        return CostModel()
    try:
        return CostModel.from_config(config)
    except ParameterError as error:
        raise ParameterError(f"cost must be given, as it does not follow from the model's config: {error}") from error


def sync_of(trainer: Any) -> str:
    """When ranks wait for each other: once a step under DDP's `no_sync`."""
    ddp = trainer.accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    every = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    return "step" if ddp and not every and not trainer.is_fsdp_enabled else "microbatch"


def read_lengths(trainer: Any) -> Any:
    """The dataset's lengths, from the Trainer's column for them or from the model's first input."""
    args, dataset = trainer.args, trainer.train_dataset
    wanted = (
        args.length_column_name,
        (getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"])[0],
    )
    names = getattr(dataset, "column_names", None)
    if names is None:
        first = dataset[0]
        names = list(first) if isinstance(first, Mapping) else []
    column = next((name for name in wanted if name in names), None)
    if column is None:
        found = ", ".join(map(repr, names)) or f"items of type {type(dataset[0]).__name__}"
        raise ParameterError(
            f"lengths must be given: the dataset has no {wanted[0]!r} (length_column_name) and no {wanted[1]!r}, "
            f"got {found}"
        )
    hidden = args.disable_tqdm or args.local_process_index != 0
    return lengths_from(
        dataset, column=column, num_workers=args.dataloader_num_workers, progress=False if hidden else None
    )


def fillers(sampler: GPUBatchRebalanceSampler, count: int) -> list[bool]:
    """Whether each micro-batch of the step that was just loaded is a repeat: then it is one sample that fills it up."""
    if not sampler.repeated or sampler.state_dict()["consumed"] < len(sampler):
        return [False] * count
    return [all(sampler.repeats(sampler.composition.full_steps, slot)) for slot in range(count)]


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as one that the Trainer counts nothing in."""
    labels = {name: batch[name] for name in ("labels", "shift_labels") if isinstance(batch.get(name), torch.Tensor)}
    return {**batch, **{name: torch.full_like(value, -100) for name, value in labels.items()}}


def is_divided(trainer: Any, num_items: Any) -> bool:
    """Whether the step's losses are divided by the number of its items; the Trainer's own rule."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None


def ignores_num_items(trainer: Any, inputs: Any, num_items: Any) -> bool:
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


def count_items(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    """Labels that are not -100, as the model's loss counts them, or samples where there are no labels."""
    for name in trainer.label_names:
        labels = inputs.get(name)
        if isinstance(labels, torch.Tensor):
            return (labels[..., 1:] if trainer._loss_shifts_labels else labels).ne(-100).sum()
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim)
