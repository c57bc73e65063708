"""Whether the batch that a slot carries and the loader's new one are of one size, or known apart by their samples.

Without ids a loss could meet another batch's samples, so any change of size is refused with both sizes. Limit: without
`batch_size` only lengths are seen, by first dimensions; two batches that differ in a later one compare equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from gpusampler.carry.visit import lengths
from gpusampler.errors import ParameterError, check_int

BatchSize = Callable[[Any], int]
Ids = tuple[Hashable, ...] | None
_ADVICE = (
    "pass sample_ids on every call, so that each loss meets its own samples, or keep the batch size of a slot fixed; "
    "if that is no batch size, give batch_size"
)


def sizes_of(batch: Any, batch_size: BatchSize | None) -> dict[str, int]:
    """Every length in the batch by its path, or the one that the caller knows."""
    if batch_size is None:
        return lengths(batch)
    return {"batch_size": check_int("batch_size(batch)", batch_size(batch), minimum=0)}


def check_new(batch: Any, found: dict[str, int], ids: Ids) -> None:
    """Refuse a batch whose lengths `found` cannot be compared and have no ids beside them, or not as many."""
    is_empty = batch is None or (isinstance(batch, Mapping) and not len(batch))
    if ids is None and not found and not is_empty:
        raise ParameterError(
            f"batch of type {type(batch).__name__} shows no length, so a change of its size would go unseen: pass "
            "sample_ids on every call, or give batch_size; a walk without data takes None or an empty batch"
        )
    if ids is not None and found and len(ids) not in found.values():
        raise ParameterError(
            f"sample_ids has {len(ids)} ids for a batch of {_all(found)} samples; a packed batch needs batch_size"
        )


def check_change(slot: int, carried: dict[str, int], new: dict[str, int]) -> None:
    """Refuse another size than the carried batch has; batches that have no path in common compare as a whole."""
    common = [path for path in carried if path in new]
    for path in common:
        if carried[path] != new[path]:
            _refuse(slot, carried[path], new[path], path)
    if not common and set(carried.values()) != set(new.values()):
        _refuse(slot, _all(carried), _all(new), "batch")


def _refuse(slot: int, old: Any, new: Any, where: str) -> None:
    raise ParameterError(
        f"slot {slot} carries a batch of {old} samples and the new one has {new}, by {where}: {_ADVICE}"
    )


def _all(found: dict[str, int]) -> str:
    return " or ".join(str(size) for size in sorted(set(found.values()))) or "no"
