"""How many trajectory streams a run has, where each starts on the grid, and whether together they train every rung.

A stream is one (stagger group, slot) pair. Stream `group * num_slots + slot` starts that many rungs in, modulo the
grid, and moves one rung an optimizer step: at step t it is on rung `(group * num_slots + slot + t) mod num_steps`,
also after a resume that says at which step it is.

Why `streams >= gcd(num_steps, interval)`: a stream that starts on rung o is on rung (o + t) mod n at step t. Updates
come at the multiples of the interval, so it is updated on the rungs (o + k * interval) mod n: exactly those that equal
o modulo g = gcd(n, interval). The offsets are consecutive, so S streams meet min(S, g) of the g classes.

Everything here is O(1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote

MAX_SLOTS = 1 << 20  # far above any accumulation; a mistyped count must not fill the memory
_MISSING = object()


def stagger_offset(*, stagger_rank: int, num_slots: int, slot: int, num_steps: int) -> int:
    """The rung on which a stream starts its first trajectory: (stagger_rank * num_slots + slot) mod num_steps.

    Args:
        stagger_rank: index of the stagger group, from 0.
        num_slots: accumulation slots on each rank.
        slot: this slot, from 0.
        num_steps: rungs of the grid.

    Returns:
        A rung in [0, num_steps).

    Raises:
        ParameterError: a count that is no int or out of range.

    Example:
        >>> [stagger_offset(stagger_rank=r, num_slots=2, slot=s, num_steps=3) for r in (0, 1) for s in (0, 1)]
        [0, 1, 2, 0]
    """
    num_slots = check_int("num_slots", num_slots, minimum=1, maximum=MAX_SLOTS)
    num_steps = check_int("num_steps", num_steps, minimum=1)
    slot = check_int("slot", slot, minimum=0, maximum=num_slots - 1)
    return (check_int("stagger_rank", stagger_rank, minimum=0) * num_slots + slot) % num_steps


def validate_carry_coverage(
    *,
    streams: int,
    num_steps: int,
    interval: int,
    owner: str,
    num_steps_name: str = "num_steps",
    interval_name: str = "interval",
) -> None:
    """Refuse a configuration that leaves rungs without an update, however long it runs.

    Args:
        streams: stagger groups times slots.
        num_steps: rungs of the grid.
        interval: optimizer steps from one update of the walked model to the next.
        owner: who asks; begins the message.
        num_steps_name: what the configuration calls `num_steps`; for the message.
        interval_name: what the configuration calls `interval`; for the message.

    Raises:
        ParameterError: a count that is no int or below 1, an owner that is no string, or
            `streams < gcd(num_steps, interval)`.

    Example:
        >>> validate_carry_coverage(streams=2, num_steps=4, interval=2, owner="DMD2")
        >>> validate_carry_coverage(streams=1, num_steps=4, interval=2, owner="DMD2")
        Traceback (most recent call last):
        ...
        gpusampler.errors.ParameterError: DMD2 would never update 2 of the 4 rungs: with num_steps=4 and interval=2 \
a trajectory meets updates only on rungs that are equal modulo gcd(4, 2) = 2, and streams=1 (stagger groups x slots) \
is below that. Use at least 2 streams, or another interval, such as 3
    """
    if not isinstance(owner, str):
        raise ParameterTypeError(f"owner must be a string, got {quote(owner)}")
    streams = check_int("streams", streams, minimum=1)
    num_steps = check_int(num_steps_name, num_steps, minimum=1)
    interval = check_int(interval_name, interval, minimum=1)
    classes = math.gcd(num_steps, interval)
    if streams >= classes:
        return
    other = next(i for i in range(interval + 1, interval + num_steps + 1) if math.gcd(num_steps, i) <= streams)
    missed = num_steps - streams * (num_steps // classes)
    raise ParameterError(
        f"{owner} would never update {missed} of the {num_steps} rungs: with {num_steps_name}={num_steps} and "
        f"{interval_name}={interval} a trajectory meets updates only on rungs that are equal modulo "
        f"gcd({num_steps}, {interval}) = {classes}, and streams={streams} (stagger groups x slots) is below that. "
        f"Use at least {classes} streams, or another {interval_name}, such as {other}"
    )


def parse_carry_slots(method_config: Any, loop_config: Any, *, key: str = "rollout_carry_slots") -> int:
    """The number of slots: what the method asks for, which has to be the number of accumulation rounds.

    A trainer calls the method once an accumulation round without saying which, so round-robin slots fall in step with
    the rounds only when there are as many.

    Args:
        method_config: mapping or object; `key` in it may be missing or None, which means the number of rounds.
        loop_config: mapping or object with `gradient_accumulation_steps`; None there means 1.
        key: name of the setting in `method_config`.

    Returns:
        The number of slots.

    Raises:
        ParameterError: a count that is no int, below 1 or above 2**20, counts that differ, or no
            `gradient_accumulation_steps`.

    Example:
        >>> parse_carry_slots({}, {"gradient_accumulation_steps": 4})
        4
    """
    if not isinstance(key, str):
        raise ParameterTypeError(f"key must be a string, got {quote(key)}")
    rounds_name = "gradient_accumulation_steps"
    rounds = _setting(loop_config, rounds_name, default=_MISSING)
    if rounds is _MISSING:
        raise ParameterError(f"loop_config has no {rounds_name}, got {quote(loop_config)}")
    rounds = 1 if rounds is None else check_int(rounds_name, rounds, minimum=1, maximum=MAX_SLOTS)
    slots = _setting(method_config, key, default=None)
    if slots is None:
        return rounds
    slots = check_int(key, slots, minimum=1)
    if slots != rounds:
        raise ParameterError(
            f"{key} must equal {rounds_name}, one slot for each accumulation round, got {key}={slots} and "
            f"{rounds_name}={rounds}: remove {key} or set it to {rounds}"
        )
    return slots


def _setting(config: Any, name: str, *, default: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)
