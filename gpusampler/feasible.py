"""Whether `max_tokens` can be met, found out before training rather than in the middle of it.

If the longest samples of the dataset fit when they all share a step, every step of every epoch fits: shorter samples
never need more micro-batches. Otherwise the steps of an epoch are looked at one by one before the epoch starts, the
first `CHECKED_SAMPLES` samples of it; any later step that does not fit raises when it is planned, ahead of its turn.
"""

from __future__ import annotations

import warnings

import numpy as np

from gpusampler.compose import Composition
from gpusampler.errors import ParameterError
from gpusampler.kernels import spec
from gpusampler.kernels.checks import count_above, gather
from gpusampler.lengths import Lengths
from gpusampler.plan import Partition

CHECKED_SAMPLES = 1 << 22
_BLOCK_SAMPLES = 1 << 20


def check_oversize(lengths: Lengths, partition: Partition, oversize: str) -> None:
    """Refuse samples longer than `max_tokens`, or warn once that they go alone.

    Raises:
        ParameterError: naming the first such sample and its length.
    """
    cap = partition.max_tokens
    if cap is None or lengths.maximum <= cap:
        return
    first, count = count_above(lengths.values, cap)
    longest = int(lengths.values[first])
    if oversize == "error":
        raise ParameterError(
            f"max_tokens={cap} is below lengths[{first}] = {longest} ({count} of {len(lengths)} samples are longer); "
            "raise max_tokens, shorten them, or pass oversize='alone'"
        )
    warnings.warn(
        f"{count} samples are longer than max_tokens={cap}, the first is lengths[{first}] = {longest}: each goes alone "
        f"in a micro-batch, up to {lengths.maximum} tokens",
        UserWarning,
        stacklevel=3,
    )


def check_cap(lengths: Lengths, composition: Composition, partition: Partition, epoch: int) -> None:
    """Refuse a cap that some step of an epoch cannot meet.

    Raises:
        ParameterError: naming the step that needs most micro-batches, and the `grad_accum` that would do for it.
    """
    cap = partition.max_tokens
    size = max(composition.size(0), composition.size(composition.steps - 1))
    if cap is None or lengths.maximum * size <= cap or _worst_fits(lengths, composition, partition, cap):
        return
    rows = max(1, _BLOCK_SAMPLES // composition.batch_size)
    last = min(composition.full_steps, -(-CHECKED_SAMPLES // composition.batch_size))
    starts = [(start, min(rows, last - start)) for start in range(0, last, rows)]
    if composition.tail and last == composition.full_steps:
        starts.append((composition.full_steps, 1))
    worst, where = partition.groups, 0
    for start, count in starts:
        needed = spec.groups_needed(gather(lengths.values, composition.indices(epoch, start, count)), cap)
        if needed.max() > worst:
            worst, where = int(needed.max()), start + int(needed.argmax())
    if worst > partition.groups:
        raise ParameterError(
            partition.too_few_groups(worst, f"step {where} of epoch {epoch}")
            + ("; the batches of other epochs may need more" if composition.shuffle else "")
        )


def _worst_fits(lengths: Lengths, composition: Composition, partition: Partition, cap: int) -> bool:
    """Whether the B longest samples fit in K micro-batches."""
    size = max(composition.size(0), composition.size(composition.steps - 1))
    if len(lengths) > CHECKED_SAMPLES:
        worst = np.full((1, size), lengths.maximum, dtype=np.int64)
    else:
        count = min(size, len(lengths))
        longest = np.partition(lengths.values, len(lengths) - count)[len(lengths) - count :].astype(np.int64)
        worst = np.resize(longest, (1, size))
    return int(spec.groups_needed(worst, cap)[0]) <= partition.groups
