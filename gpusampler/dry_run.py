"""Grow micro-batches of the user's own model until the cap on padded tokens is sure.

Starts with one sample and doubles, never beyond what the fit so far allows, so that it approaches the target from below
and runs out of memory only where memory is not what the fit expects; then that is caught, cleaned up after, and limits
the cap. A few steps for each length: logarithmic in the size of the largest micro-batch.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.fit_memory import (
    MemoryFit,
    cap_notes,
    check_confidence,
    check_share,
    check_target,
    fit_memory,
    target_for,
)
from gpusampler.memory_report import device_index, memory_report

_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Meter(Protocol):
    """What measures the peak of a step; `CudaMeter` unless another is given."""

    def reset(self) -> None:
        """Begin a measurement: give back what is cached, forget the peak."""

    def peak(self) -> int:
        """Bytes held at most since `reset`."""


class CudaMeter:
    """Peak of torch's allocator on a CUDA device: what it holds, which is what the device has to have.

    Args:
        device: default: the current one.
    """

    def __init__(self, device: int | str | torch.device | None = None) -> None:
        """Find the device."""
        index = device_index(device)
        if index is None or not torch.cuda.is_available():
            raise ParameterError(
                f"device must be a CUDA device that is available, got {quote(device)}; or give a meter"
            )
        self.index = index

    def reset(self) -> None:
        """See `Meter`."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)

    def peak(self) -> int:
        """See `Meter`."""
        return torch.cuda.max_memory_reserved(self.index)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: torch's own, of libraries below it, and of the host.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("shape"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def measure_memory(
    step: Callable[[int, int], Any],
    lengths: Sequence[int],
    *,
    target_bytes: float | None = None,
    share: float = 0.9,
    device: int | str | torch.device | None = None,
    meter: Meter | None = None,
    max_samples: int = 1 << 16,
    confidence: float = 0.999,
) -> MemoryFit:
    """Find `max_tokens` by running steps of growing micro-batches.

    Args:
        step: `step(samples, length)` runs the forward, backward and optimizer step of one micro-batch of that shape, as
            in training, and keeps nothing of it. It is called once before anything is measured, so that the optimizer's
            state exists.
        lengths: padded lengths to measure, the longest that will be trained on among them; two or more tell whether
            memory grows with the squared length.
        target_bytes: what a peak must not exceed; default: `share` of the device less what lies outside the allocator.
        share: see `target_for`.
        device: CUDA device; default: the current one.
        meter: what measures peaks; default: torch's allocator on `device`.
        max_samples: largest micro-batch to try, in samples.
        confidence: as in `fit_memory`.

    Returns:
        The cap; its notes name micro-batches that ran out of memory.

    Raises:
        ParameterError: too little memory for the smallest micro-batches, or as `fit_memory`.
    """
    if not callable(step):
        raise ParameterTypeError(f"step must be a function of samples and length, got {quote(step)}")
    if not isinstance(lengths, Iterable):
        raise ParameterTypeError(f"lengths must be a list of ints, got {quote(lengths)}")
    sizes = sorted({check_int(f"lengths[{i}]", length, minimum=1) for i, length in enumerate(lengths)})
    if not sizes:
        raise ParameterError("lengths must have at least one length, got none")
    limit = check_int("max_samples", max_samples, minimum=2)
    # all that can be found out before the model runs
    confidence, share = check_confidence(confidence), check_share(share)
    target = None if target_bytes is None else check_target(target_bytes)
    meter = CudaMeter(device) if meter is None else meter
    meter.reset()
    if _peak(step, 1, sizes[0], meter) is None:
        raise ParameterError(f"step ran out of memory with 1 sample of length {sizes[0]}: nothing can be measured")
    if target is None:
        target = target_for(memory_report(device), share)
    records: list[tuple[int, int, int]] = []
    failed: list[tuple[int, int]] = []
    for length in sizes:
        samples, good, bad = 1, 0, 0
        while 0 < samples <= limit:
            peak = _peak(step, samples, length, meter)
            if peak is None:
                bad = samples
                failed.append((samples, length))
            else:
                good = samples
                records.append((samples, length, peak))
            if peak is not None and peak >= target:
                break
            samples = _between(good, bad) if bad else _next(records, good, length, target, confidence)
    try:
        fit = fit_memory(records, target, longest=sizes[-1], confidence=confidence)
    except ParameterError as error:
        ran = [f"{samples} x {length}: {peak:.4g} bytes" for samples, length, peak in records[-4:]]
        what = "; ".join([*ran, *([_ran_out(failed)] if failed else [])])
        raise ParameterError(f"too little was measured for a target of {target:.4g} bytes ({what}): {error}") from error
    return _limited(fit, failed)


def _peak(step: Callable[[int, int], Any], samples: int, length: int, meter: Meter) -> int | None:
    """Peak of one step, or None if memory ran out; what the failed step held is given back."""
    meter.reset()
    try:
        step(samples, length)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # the frames of the failed step hold its tensors
        traceback.clear_frames(error.__traceback__)
    else:
        return meter.peak()
    meter.reset()
    return None


def _between(good: int, bad: int) -> int:
    """Samples to try next where `bad` ran out of memory; 0 if `good` is near enough."""
    return (good + bad) // 2 if bad - good > max(1, good // 8) else 0


def _ran_out(failed: list[tuple[int, int]]) -> str:
    return "out of memory with " + ", ".join(f"{samples} x {length}" for samples, length in failed)


def _next(records: list[tuple[int, int, int]], samples: int, length: int, target: float, confidence: float) -> int:
    """Samples to try next, at most twice as many; 0 if the fit allows no more."""
    try:
        cap = fit_memory(records, target, longest=length, confidence=confidence).max_tokens
    except ParameterError:
        return 2 * samples  # too few records yet, or peaks that do not grow yet
    allowed = cap // length
    return min(2 * samples, allowed) if allowed > samples else 0


def _limited(fit: MemoryFit, failed: list[tuple[int, int]]) -> MemoryFit:
    """Lower the cap below every micro-batch that ran out of memory."""
    if not failed:
        return fit
    notes = [*fit.notes[len(cap_notes(fit.records, fit.max_tokens, fit.longest)) :], _ran_out(failed)]
    cap = min([fit.max_tokens, *(samples * length - 1 for samples, length in failed)])
    if cap < fit.max_tokens:
        # where memory grows with the squared length, shorter samples that ran do not tell
        alike = fit.records[(fit.records[:, 1] == fit.longest) | (fit.bytes_per_token2 == 0.0)]
        fitting = alike[:, 0] * alike[:, 1]
        cap = int(fitting[fitting <= cap].max(initial=1.0))
        notes.append(
            f"the fit allows {fit.max_tokens} tokens, but memory ran out below: the cap is the largest that ran"
        )
    notes = [*cap_notes(fit.records, cap, fit.longest), *notes]
    return replace(fit, max_tokens=cap, expected_bytes=round(fit.expected(cap, fit.longest)), notes=tuple(notes))
