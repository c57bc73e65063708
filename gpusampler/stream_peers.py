"""The ranks of a stream agree before each step: whether all go on, with what, and whether one has failed.

A few integers a rank (and the lengths of its oldest samples, where ranks read different streams) are gathered on a gloo
group of the stream's own, so that neither a training loop's collectives nor a GPU are involved. A rank that has failed
still comes to the gather; text is exchanged only then.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from gpusampler.errors import DistributedError, quote
from gpusampler.group import PlanGroup, end_without_gil
from gpusampler.stream_steps import Report

_HEAD = 4


class Peers:
    """The processes that must agree; all of them make this object at the same time."""

    def __init__(self, options: PlanGroup) -> None:
        """Make the group; alone, nothing is ever communicated."""
        group = options.resolve()
        self._world = None if group is None else dist.group.WORLD
        self._group: dist.ProcessGroup | None = None
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        if group is not None:
            self._group = dist.new_group(
                self.ranks,
                timeout=None if options.timeout is None else datetime.timedelta(seconds=options.timeout),
                backend="gloo",
                use_local_synchronization=len(self.ranks) < dist.get_world_size(),
                group_desc="gpusampler stream",
            )
            end_without_gil(self._group)

    @property
    def alive(self) -> bool:
        """Whether torch.distributed is still the one that the group was made in."""
        return self._world is None or dist.group.WORLD is self._world

    def begin(self, fields: dict[str, Any], error: Exception | None) -> None:
        """Compare what must be equal on all ranks.

        Raises:
            Exception: `error`.
            DistributedError: on all ranks, naming the fields that differ; or another rank has an error.
        """
        self._raise_any(error)
        everyone = self._objects(fields)
        for rank, other in zip(self.ranks, everyone, strict=True):
            for name, value in everyone[0].items():
                if other[name] != value:
                    raise DistributedError(
                        f"ranks differ: {name} is {quote(value)} on rank {self.ranks[0]} and {quote(other[name])} on "
                        f"rank {rank}; load the same position and call set_epoch alike on every rank"
                    )

    def exchange(self, report: Report, error: Exception | None, oldest: int) -> list[Report]:
        """Reports of all ranks, or an error on all of them.

        Args:
            report: of this rank.
            error: what went wrong on this rank.
            oldest: most lengths in a report; 0 if all ranks read the same stream, and their reports must be equal.

        Raises:
            Exception: `error`.
            DistributedError: another rank has an error; reports differ; a rank does not answer.
        """
        if self._group is None:
            if error is not None:
                raise error
            return [report]
        row = [int(error is not None), report.available, report.count, report.digest, *report.oldest]
        own = torch.tensor(row + [0] * (_HEAD + oldest - len(row)), dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in self.ranks]
        try:
            dist.all_gather(rows, own, group=self._group)
        except RuntimeError as failure:
            raise DistributedError(f"a rank did not come to the next step of the stream: {failure}") from failure
        table = [row.tolist() for row in rows]
        if any(row[0] for row in table):
            self._raise_any(error)
        if not oldest and any(row != table[0] for row in table):
            rank = next(rank for rank, row in zip(self.ranks, table, strict=True) if row != table[0])
            raise DistributedError(
                f"ranks {self.ranks[0]} and {rank} read different samples of a shared stream; with sharded=True each "
                "rank reads a stream of its own"
            )
        return [Report(row[1], row[2], row[3], tuple(row[_HEAD : _HEAD + row[2]])) for row in table]

    def _raise_any(self, error: Exception | None) -> None:
        texts = self._objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in zip(self.ranks, texts, strict=True):
            if text is not None:
                raise DistributedError(f"rank {rank} cannot go on with the stream. {text}")

    def _objects(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values
