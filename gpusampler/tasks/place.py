"""The place in a state of `MultiTaskBatchSampler`, checked before anything moves: O(samplers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusampler.errors import ParameterError, check_int, quote


def check_place(state: Mapping[str, Any], labels: set[str]) -> tuple[int, int, bool]:
    """Step and micro-batch of a state, and whether it was taken after the last item of a pass.

    Args:
        state: From `MultiTaskBatchSampler.state_dict`.
        labels: The samplers of the schedule that loads it.

    Raises:
        ParameterError: A field is missing, or has a value that no state has.
    """
    missing = [
        key
        for key in ("num_steps", "epoch", "step", "micro_batch", "draw_counts", "read", "samplers")
        if key not in state
    ]
    if missing:
        raise ParameterError(f"state has no {missing}")
    num_steps = check_int("num_steps of the state", state["num_steps"], minimum=1)
    epoch, step, micro_batch = (
        check_int(f"{key} of the state", state[key], minimum=0) for key in ("epoch", "step", "micro_batch")
    )
    for key in ("read", "samplers"):
        if not isinstance(state[key], Mapping) or set(state[key]) != labels:
            found = sorted(state[key], key=str) if isinstance(state[key], Mapping) else quote(state[key])
            raise ParameterError(f"state has {key} of {found}, this schedule has samplers {sorted(labels)}")
    read = [check_int(f"read[{label!r}] of the state", steps, minimum=0) for label, steps in state["read"].items()]
    if sum(read) != step:
        raise ParameterError(f"state has read {sum(read)} steps of its samplers, but is at step {step}")
    if not 0 <= step - epoch * num_steps <= num_steps or (micro_batch and step == (epoch + 1) * num_steps):
        raise ParameterError(
            f"state has step {step} and micro_batch {micro_batch}, no place in its epoch {epoch} of {num_steps} steps"
        )
    return step, micro_batch, step == (epoch + 1) * num_steps
