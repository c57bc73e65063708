"""What a step takes from a buffer of a stream, and how that is split into micro-batches.

A step of a shared stream is planned like a global batch of the map-style sampler. A step of a sharded one is planned by
each rank alone, over its own slots; its micro-batches cost what the other ranks' do because all ranks choose samples
of like lengths: one rank, another each step, takes its oldest, and the others the nearest to those in their buffers. So
long samples of different ranks meet in the same steps, and the mix of lengths in a step is that of a random one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from gpusampler.kernels import spec
from gpusampler.plan import Partition
from gpusampler.stream_buffer import Item


@dataclass(frozen=True)
class Report:
    """What a rank tells the others before a step.

    Attributes:
        available: samples in its buffer.
        count: samples that it will take.
        digest: of the lengths it will take (shared).
        oldest: lengths of its `count` oldest samples (sharded).
    """

    available: int = 0
    count: int = 0
    digest: int = 0
    oldest: tuple[int, ...] = ()


@dataclass
class Step:
    """A planned step.

    Attributes:
        groups: micro-batches, slot-major; of all ranks for a shared stream, of this rank for a sharded one.
        samples: over all ranks, repeats not counted.
    """

    groups: list[list[Item]]
    samples: int

    def packed(self, keep: Callable[[list[Item]], Any]) -> dict[str, Any]:
        """As plain containers."""
        return {"groups": [keep(group) for group in self.groups], "samples": self.samples}

    @classmethod
    def unpacked(cls, state: dict[str, Any], items_of: Callable[[list[Any]], list[Item]]) -> Step:
        """From plain containers."""
        return cls([items_of(group) for group in state["groups"]], state["samples"])


def take_shared(items: list[Item], take: int, partition: Partition) -> Report:
    """What a shared stream's step takes: its oldest samples, as many as fit."""
    count = _fitting(items, min(take, len(items)), partition.groups, partition.max_tokens)
    taken = np.array([item.length for item in items[:count]], dtype=np.int64)
    digest = hashlib.blake2b(taken.tobytes(), digest_size=8).digest()
    return Report(len(items), count, int.from_bytes(digest, "little", signed=True))


def take_local(items: list[Item], take: int, partition: Partition) -> Report:
    """What a rank's share of a step takes, before it is known which samples."""
    count = _fitting(items, min(take, len(items)), partition.grad_accum, partition.max_tokens)
    return Report(len(items), count, oldest=tuple(item.length for item in items[:count]))


def shared_step(items: list[Item], count: int, partition: Partition) -> Step:
    """Take the oldest `count` samples out of `items` and plan them for all ranks."""
    taken = items[:count]
    del items[:count]
    return Step(_planned(taken, taken, partition), count)


def local_step(
    items: list[Item],
    report: Report,
    reports: Sequence[Report],
    turn: int,
    partition: Partition,
    filler: list[Item],
) -> Step:
    """Take `report.count` samples out of `items`, of lengths like those another rank takes; plan this rank's slots.

    Args:
        items: the buffer.
        report: of this rank.
        reports: of all ranks.
        turn: number of the step; of the ranks that take most, it says whose lengths are followed.
        partition: of the whole step.
        filler: a sample that was yielded, in case this rank has none left.
    """
    own = replace(partition, dp_size=1)
    chosen = list(range(report.count))
    most = max(other.count for other in reports)
    leaders = [other.oldest for other in reports if other.count == most]
    if report.count and len(items) > report.count:
        like = _alike([item.length for item in items], leaders[turn % len(leaders)], report.count)
        if _fitting([items[i] for i in like], report.count, own.groups, own.max_tokens) == report.count:
            chosen = like
    taken = [items[i] for i in chosen]
    gone = set(chosen)
    items[:] = [item for i, item in enumerate(items) if i not in gone]
    samples = sum(other.count for other in reports) * partition.dp_size // len(reports)
    return Step(_planned(taken, taken or filler, own), samples)


def _alike(lengths: list[int], wanted: Sequence[int], count: int) -> list[int]:
    """Positions of `count` lengths, each the nearest left to one of `wanted`, longest first; position 0 is among them.

    Ties go to the shorter length, then to the smaller position. `wanted` has at least `count` lengths; of more, evenly
    spaced ones are followed.

    Example:
        >>> _alike([5, 40, 9, 7, 90], [8, 80, 4], 3)  # 5 for 4, 90 for 80, 7 for 8
        [0, 4, 3]
    """
    longest_first = sorted(wanted, reverse=True)
    targets = [longest_first[(2 * i + 1) * len(wanted) // (2 * count)] for i in range(count)]
    targets.remove(min(targets, key=lambda target: abs(target - lengths[0])))
    left = sorted((length, i) for i, length in enumerate(lengths) if i)
    chosen = [0]
    for target in targets:
        at = bisect_left(left, (target, 0))
        if at == len(left) or (at > 0 and target - left[at - 1][0] <= left[at][0] - target):
            at = bisect_left(left, (left[at - 1][0], 0))
        chosen.append(left.pop(at)[1])
    return chosen


def _fitting(items: list[Item], count: int, groups: int, cap: int | None) -> int:
    """How many of the oldest samples fit into `groups` micro-batches; as many as groups always do."""
    if cap is None or count <= groups:
        return count
    lengths = np.array([[item.length for item in items[:count]]], dtype=np.int64)
    low, high = groups, count
    while low < high:
        middle = (low + high + 1) // 2
        if spec.groups_needed(np.ascontiguousarray(lengths[:, :middle]), cap)[0] <= groups:
            low = middle
        else:
            high = middle - 1
    return low


def _planned(taken: list[Item], fillers: list[Item], partition: Partition) -> list[list[Item]]:
    """Micro-batches of `taken`, filled up with repeats of `fillers` until none is empty."""
    missing = max(0, partition.groups - len(taken))
    items = taken + [item._replace(repeat=True) for item in islice(cycle(fillers), missing)]
    lengths = np.array([[item.length for item in items]], dtype=np.int64)
    partition.check_range(len(items), int(lengths.max()))
    plan = partition.plan(lengths)
    order, offsets = plan.order[0].tolist(), plan.offsets[0].tolist()
    return [[items[i] for i in order[start:end]] for start, end in pairwise(offsets)]
