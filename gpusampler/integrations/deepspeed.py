"""DeepSpeed: the batch sizes of its configuration, filled in and checked against the sampler.

    engine, *_ = deepspeed.initialize(model=model, config=fill_config(config, sampler))

DeepSpeed wants `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks` as fixed
numbers. Micro-batches of a balanced plan differ in size; their mean is what stands for the micro-batch, and only
`gradient_accumulation_steps` has an effect. Works on plain configurations: DeepSpeed itself need not be installed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.sampler import GPUBatchRebalanceSampler

_AUTO = "auto"


def fill_config(config: Mapping[str, Any] | str | Path, sampler: GPUBatchRebalanceSampler) -> dict[str, Any]:
    """A copy of a DeepSpeed configuration with the sampler's batch sizes.

    Args:
        config: the configuration, or the JSON file that holds it. `train_batch_size`,
            `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` are filled in where they are "auto" or
            missing.
        sampler: what the loader iterates; its `dp_size` counts the ranks that run different samples.

    Returns:
        The configuration; everything else in it is as before.

    Raises:
        OSError: the file cannot be read.
        ParameterError: the file is not JSON, a size set by hand contradicts the sampler, naming it with both values, or
            the effective batch size is no multiple of `dp_size * grad_accum`, as DeepSpeed requires.

    Example:
        >>> sampler = GPUBatchRebalanceSampler(range(1, 65), effective_batch_size=16, dp_size=2, grad_accum=2, rank=0)
        >>> filled = fill_config({"train_micro_batch_size_per_gpu": "auto"}, sampler)
        >>> filled["train_micro_batch_size_per_gpu"], filled["train_batch_size"]
        (4, 16)
    """
    if not isinstance(sampler, GPUBatchRebalanceSampler):
        raise ParameterTypeError(f"sampler must be a GPUBatchRebalanceSampler, got {quote(sampler)}")
    batch, ranks, slots = sampler.effective_batch_size, sampler.dp_size, sampler.grad_accum
    if batch % (ranks * slots):
        raise ParameterError(
            f"effective_batch_size must be a multiple of dp_size * grad_accum = {ranks} * {slots} for DeepSpeed, "
            f"got {batch}"
        )
    filled = _read(config)
    sizes = {
        "train_micro_batch_size_per_gpu": batch // (ranks * slots),
        "gradient_accumulation_steps": slots,
        "train_batch_size": batch,
    }
    for name, size in sizes.items():
        value = filled.get(name, _AUTO)
        if value != _AUTO and check_int(name, value, minimum=1) != size:
            raise ParameterError(
                f"{name} is {value} in the DeepSpeed configuration, but the sampler makes it {size} "
                f"(effective_batch_size {batch}, dp_size {ranks}, grad_accum {slots})"
            )
        filled[name] = size
    return filled


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, Path)):
        path = config
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ParameterError(f"config: {path} is no JSON file: {error}") from error
    if not isinstance(config, Mapping):
        raise ParameterTypeError(f"config must be a mapping or the path of a JSON file, got {quote(config)}")
    return copy.deepcopy(dict(config))
