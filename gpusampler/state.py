"""The sampler's state: where in the epoch the training loop is, and the fingerprint of what that position means.

What defines which samples share a step must match on resume; what defines how a step is split over ranks and slots
may change, but only between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpusampler.compose import Composition
from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.lengths import Lengths
from gpusampler.plan import Partition

FORMAT = 1
_COMPOSITION = ("num_samples", "lengths_digest", "effective_batch_size", "seed", "shuffle", "drop_last", "lookahead")
_PARTITION = ("dp_size", "grad_accum", "cost", "max_tokens", "layout", "sync")


def save(epoch: int, consumed: int, composition: Composition, partition: Partition, lengths: Lengths) -> dict[str, Any]:
    """State of a sampler; O(1) in time and size."""
    return {
        "format": FORMAT,
        "epoch": epoch,
        "consumed": consumed,
        **fingerprint(composition, partition, lengths),
    }


def load(state: Mapping[str, Any], composition: Composition, partition: Partition, lengths: Lengths) -> tuple[int, int]:
    """Check a state against a sampler; returns the epoch and the micro-batches consumed, in the sampler's own slots.

    Raises:
        ParameterError: naming the field that does not match, with both values.
    """
    if not isinstance(state, Mapping):
        raise ParameterTypeError(f"state must be the mapping that state_dict returned, got {quote(state)}")
    now = fingerprint(composition, partition, lengths)
    for name in ("format", "epoch", "consumed", *now):
        if name not in state:
            raise ParameterError(f"state has no field {name!r}: it was not made by GPUBatchRebalanceSampler.state_dict")
    if state["format"] != FORMAT:
        raise ParameterError(f"state has format {quote(state['format'])}, this version reads format {FORMAT}")
    for name in _COMPOSITION:
        if state[name] != now[name]:
            raise ParameterError(
                f"{name} was {quote(state[name])} when the state was saved and is {quote(now[name])} now: "
                "the rest of the epoch would not be the same samples"
            )
    epoch = check_int("state['epoch']", state["epoch"], minimum=0)
    slots = check_int("state['grad_accum']", state["grad_accum"], minimum=1)
    consumed = check_int("state['consumed']", state["consumed"], minimum=0)
    step, slot = divmod(consumed, slots)
    if step > composition.steps or (step == composition.steps and slot):
        raise ParameterError(f"state['consumed'] must be at most {composition.steps * slots}, got {consumed}")
    if slot:
        for name in _PARTITION:
            if state[name] != now[name]:
                raise ParameterError(
                    f"{name} was {quote(state[name])} when the state was saved and is {quote(now[name])} now; it may "
                    f"change between steps only, and the state is {slot} of {slots} micro-batches into step {step}"
                )
    return epoch, step * partition.grad_accum + slot


def fingerprint(
    composition: Composition, partition: Partition, lengths: Lengths, cost: str | None = None
) -> dict[str, Any]:
    """Everything that defines the plans of an epoch, by the name of the parameter; plain values.

    `cost` is `describe_cost` of the partition, if that has been called.
    """
    return {
        "num_samples": composition.num_samples,
        "lengths_digest": lengths.digest,
        "effective_batch_size": composition.batch_size,
        "seed": composition.seed,
        "shuffle": composition.shuffle,
        "drop_last": composition.drop_last,
        "lookahead": 1,
        "dp_size": partition.dp_size,
        "grad_accum": partition.grad_accum,
        "cost": describe_cost(partition, lengths) if cost is None else cost,
        "max_tokens": partition.max_tokens,
        "layout": partition.layout,
        "sync": partition.sync,
    }


def describe_cost(partition: Partition, lengths: Lengths) -> str:
    """The cost model as text: a function has no name that lasts, but its values at some lengths tell it apart."""
    model = partition.cost
    if model.cost_fn is None:
        return f"alpha={model.alpha!r} intercept={model.intercept!r}"
    probes = np.unique(np.linspace(lengths.minimum, lengths.maximum, 16).astype(np.int64))
    values = model(torch.from_numpy(probes)).tolist()
    return f"cost_fn={','.join(f'{value:.17g}' for value in values)} intercept={model.intercept!r}"
