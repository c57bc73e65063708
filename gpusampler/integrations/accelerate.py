"""accelerate: a loader prepared whole, its epoch, its position in checkpoints.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

`Accelerator.prepare` takes every batch sampler for one that yields the batches of all processes, of which it keeps
every n-th. Its shard asks the sampler, which has it hand on everything (see `gpusampler.handout`), so that a loader may
be prepared by accelerate alone. Here it is prepared as for one process, without a shard; what cannot be honoured is
refused, and checkpoints keep its position. `set_epoch` and `skip_first_batches` of accelerate reach the sampler.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from gpusampler.errors import ParameterError, check_bool
from gpusampler.integrations._loaders import sampler_of, take_place
from gpusampler.integrations.deepspeed import fill_config
from gpusampler.sampler import GPUBatchRebalanceSampler


def prepare(accelerator: Accelerator, *objects: Any, check_accumulation: bool = True) -> Any:
    """`accelerator.prepare`, except that balanced loaders keep their whole plan.

    Args:
        accelerator: the accelerator; `dispatch_batches` and `split_batches` must be off.
        objects: models, optimizers, schedulers and loaders in any order. At least one is a DataLoader with a
            `GPUBatchRebalanceSampler` as its batch sampler; its position is saved by `accelerator.save_state` and
            restored by `accelerator.load_state`.
        check_accumulation: refuse a sampler whose `grad_accum` is not the accelerator's
            `gradient_accumulation_steps`; False for a loop that accumulates by itself.

    Returns:
        The prepared objects, in order; a single one as it is.

    Raises:
        ParameterError: no loader is balanced, or one cannot be honoured: it names the option.

    Example:
        >>> from gpusampler import GPUBatchRebalanceSampler
        >>> sampler = GPUBatchRebalanceSampler([5, 9, 2, 7], effective_batch_size=2)
        >>> loader = prepare(Accelerator(cpu=True), DataLoader(range(4), batch_sampler=sampler))
        >>> loader.set_epoch(1)
        >>> sampler.epoch, sum(len(batch) for batch in loader)
        (1, 4)
    """
    balanced = [_is_balanced(item) for item in objects]
    if not any(balanced):
        raise ParameterError(
            "objects must hold a DataLoader whose batch_sampler is a GPUBatchRebalanceSampler, got "
            f"{', '.join(type(item).__name__ for item in objects) or 'nothing'}"
        )
    prepared = []
    for item, is_balanced in zip(objects, balanced, strict=True):
        if is_balanced:
            if check_bool("check_accumulation", check_accumulation):
                _check_accumulation(accelerator, sampler_of(item))
            _fill_deepspeed(accelerator, sampler_of(item))
            item = prepare_loader(accelerator, item)
            accelerator.register_for_checkpointing(LoaderPosition(item))
        prepared.append(item)
    return accelerator.prepare(*prepared)


def prepare_loader(accelerator: Accelerator, loader: DataLoader[Any]) -> DataLoaderShard:
    """Prepare one balanced loader; `accelerator.prepare` returns it as it is afterwards.

    Args:
        accelerator: the accelerator.
        loader: a DataLoader with a `GPUBatchRebalanceSampler` as its batch sampler.

    Returns:
        accelerate's own loader: batches on the accelerator's device, `set_epoch`, `len` as before.

    Raises:
        ParameterError: see `prepare`.
    """
    sampler = sampler_of(loader)
    for name in ("dispatch_batches", "split_batches"):
        if getattr(accelerator, name):
            raise ParameterError(
                f"{name}=True cannot be honoured: each process loads the micro-batches planned for it; "
                f"leave {name} off in DataLoaderConfiguration (accelerator_config of a Trainer)"
            )
    replicas = replicas_of(accelerator)
    take_place(sampler, accelerator.num_processes, accelerator.process_index, replicas, "accelerate")
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement and accelerator.distributed_type != DistributedType.XLA,
        rng_types=None if accelerator.rng_types is None else list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    if prepared.use_stateful_dataloader:
        prepared.base_dataloader.load_state_dict({})  # accelerate has begun an iteration of it, before any set_epoch
    # without it accelerate takes len(dataset) % total_batch_size for the size of the last batch in gather_for_metrics
    prepared._drop_last = True
    prepared._is_accelerate_prepared = True
    return prepared


def replicas_of(accelerator: Accelerator) -> int:
    """Neighbouring processes that run the same samples: tensor parallel times context parallel.

    Raises:
        ParameterError: sequence parallelism is on.
    """
    config = getattr(accelerator, "parallelism_config", None)
    if config is None:
        return 1
    if getattr(config, "sp_size", 1) > 1:
        raise ParameterError(
            f"sp_size={config.sp_size} cannot be honoured: sequence parallelism deals the batches of a group out anew"
        )
    return int(config.tp_size) * int(config.cp_size)


class LoaderPosition:
    """What `Accelerator.save_state` keeps of a prepared loader: where in which epoch the training loop is.

    After `load_state` the loader continues there by itself. `skip_first_batches` counts from the start of the epoch
    also then, so that a loop that counts by itself is right too. The position of a finished epoch is the start of the
    next one.
    """

    def __init__(self, loader: DataLoaderShard) -> None:
        """Follow `loader`."""
        self._loader = loader
        self._sampler: GPUBatchRebalanceSampler = loader.batch_sampler

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, and the epoch that the loader counts.

        Raises:
            ParameterError: as of `GPUBatchRebalanceSampler.load_state_dict`.
        """
        self._sampler.load_state_dict(state)
        if self._sampler.state_dict()["consumed"] == len(self._sampler):
            self._sampler.set_epoch(self._sampler.epoch + 1)
        self._loader.iteration = self._sampler.epoch


def _is_balanced(item: object) -> bool:
    return isinstance(item, DataLoader) and isinstance(item.batch_sampler, GPUBatchRebalanceSampler)


def _check_accumulation(accelerator: Accelerator, sampler: GPUBatchRebalanceSampler) -> None:
    steps = accelerator.gradient_accumulation_steps
    if steps != sampler.grad_accum:
        raise ParameterError(
            f"gradient_accumulation_steps of the accelerator is {steps} and grad_accum of the sampler is "
            f"{sampler.grad_accum}; make them equal, or give check_accumulation=False if the loop accumulates by itself"
        )


def _fill_deepspeed(accelerator: Accelerator, sampler: GPUBatchRebalanceSampler) -> None:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config.update(fill_config(plugin.deepspeed_config, sampler))
