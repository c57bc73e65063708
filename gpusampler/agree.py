"""All ranks agree before the first step of an iteration, and know how far their loaders run ahead of training.

An iteration begins with one gather of `_ROW` integers a rank: digests of everything that defines the plans, the
position to start from, and counts. A difference, or an error on one rank, is then raised on all. Two process groups of
a sampler's own carry this and the plans, so that neither is mixed up with a training loop's collectives. One gather is
O(ranks) in time and memory; plans are not part of it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpusampler.broadcast import Channel
from gpusampler.errors import DistributedError, quote
from gpusampler.group import PlanGroup, end_without_gil, transport

_ROW = 32
_COUNTS = ("posted", "ahead", "rank", "failed")  # of each rank, not compared


class Agreement:
    """A sampler's own process groups, and what its ranks have agreed on.

    Args:
        group: the processes that must agree; all of them make this object at the same time.
        options: the user's.

    Attributes:
        root: global rank of the one that plans: the first member of the group.
        generation: iterations begun.
    """

    def __init__(self, group: dist.ProcessGroup, options: PlanGroup) -> None:
        """Make the groups: every member waits for the others here."""
        self.world = dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(group)
        self.root = dist.get_global_rank(group, 0)
        self.is_root = dist.get_rank() == self.root
        self.generation = 0
        self._is_world = len(self.ranks) == dist.get_world_size()
        kind, backend = transport(dist.get_backend_config(group))
        self.device = torch.device("cpu")
        if kind != "cpu":
            self.device = torch.device(kind, torch.get_device_module(kind).current_device())
        self.timeout = options.timeout or _timeout_of(group, kind)
        self._channel: Channel | None = None
        control = "gloo" if dist.is_gloo_available() else backend
        try:
            self._control = self._new_group(control, self.timeout, None)
            # NCCL ends the process when its own timeout passes: leave the error a head start
            patience = self.timeout * (1 if backend == "gloo" else 2)
            self._plans = self._new_group(backend, patience, _nccl_options(backend, options.max_ctas, patience))
        except RuntimeError as error:
            raise self._not_begun(error) from error
        self._control_device = torch.device("cpu") if control == "gloo" else self.device
        # torch names a group of a part of the world by its members and the number of groups there are: one made after
        # another was ended would find the dead one's addresses, so these stay until torch.distributed ends
        self._finalizer = weakref.finalize(self, _destroy, [self._control, self._plans] if self._is_world else [])
        self._finalizer.atexit = False

    @property
    def alive(self) -> bool:
        """Whether torch.distributed is still the one that the groups were made in."""
        return dist.group.WORLD is self.world

    def close(self) -> None:
        """End the groups."""
        self._channel = None
        self._finalizer()

    def begin(
        self,
        fields: Mapping[str, Any],
        rank: int,
        ahead: int,
        error: Exception | None,
    ) -> int:
        """Begin an iteration on every rank, or raise on every rank.

        Args:
            fields: what must be equal on all ranks, by name, in one order.
            rank: data-parallel rank of this process.
            ahead: micro-batches its loader takes ahead.
            error: what went wrong on this rank already.

        Returns:
            How many micro-batches before its turn this rank must have its plans, for all ranks to wait for each chunk
            at the same micro-batch of training: the most that any loader runs ahead, less this rank's.

        Raises:
            DistributedError: fields differ; it names them, with their values and the ranks. Or another rank failed.
        """
        posted = self._channel.posted if self._channel else 0
        counts = dict(zip(_COUNTS, (posted, ahead, rank, int(error is not None)), strict=True))
        rows = self._gather([*counts.values(), *map(_digest, fields.values())])
        self.generation += 1
        table = {name: rows[:, column].tolist() for column, name in enumerate(_COUNTS)}
        digests = rows[:, len(_COUNTS) : len(_COUNTS) + len(fields)]
        differing = [name for name, column in zip(fields, digests.T, strict=True) if len(set(column.tolist())) > 1]
        if differing or any(table["failed"]):
            self._raise_difference({name: quote(fields[name]) for name in differing}, error)
        self._check_cover(table["rank"], int(fields["dp_size"]))
        if self._channel is not None:
            self._channel.drain(max(table["posted"]))
        return int(max(table["ahead"])) - ahead

    def channel(self, numel: int, dtype: torch.dtype, slots: int) -> Channel:
        """A channel for this iteration's messages; the last one is used again if its buffers fit."""
        channel = self._channel
        if channel is None or channel.message_bytes != numel * dtype.itemsize:
            posted = channel.posted if channel else 0
            channel = Channel(self._plans, self.root, self.device, numel, dtype, slots, self.timeout)
            channel.posted = posted
            self._channel = channel
        channel.generation = self.generation
        return channel

    def _new_group(self, backend: str, timeout: float, options: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            self.ranks,
            timeout=datetime.timedelta(seconds=timeout),
            backend=backend,
            pg_options=options,
            use_local_synchronization=not self._is_world,  # others do not come here
            group_desc="gpusampler",
        )
        if backend == "gloo":
            end_without_gil(group)
        return group

    def _gather(self, row: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        own = torch.tensor([*row, *[0] * (_ROW - len(row))], dtype=torch.int64, device=self._control_device)
        rows = [torch.empty_like(own) for _ in self.ranks]
        try:
            dist.all_gather(rows, own, group=self._control)
        except RuntimeError as error:
            raise self._not_begun(error) from error
        return torch.stack(rows).cpu().numpy()

    def _not_begun(self, error: Exception) -> DistributedError:
        return DistributedError(
            f"a rank did not begin the iteration within {self.timeout:g} s: every rank of the group "
            f"({_some(self.ranks)}) must iterate over its sampler; one that iterates alone needs process_group=None. "
            f"Cause: {error}"
        )

    def _raise_difference(self, texts: dict[str, str], error: Exception | None) -> None:
        """Raise on every rank; a second gather, which only happens on all, brings the values as text."""
        answers: list[Any] = [None] * len(self.ranks)
        failure = f"{type(error).__name__}: {error}" if error is not None else None
        dist.all_gather_object(answers, (texts, failure), group=self._control)
        if error is not None:
            raise error
        failed = [f"rank {rank}: {answer[1]}" for rank, answer in zip(self.ranks, answers, strict=True) if answer[1]]
        if failed:
            raise DistributedError(f"{len(failed)} of {len(answers)} ranks cannot begin the epoch. {failed[0]}")
        lines = [f"{name} is {self._by_value([a[0][name] for a in answers])}" for name in texts]
        hint = ""
        if "epoch" in texts or "position" in texts:
            hint = "; call set_epoch alike on every rank, and load the same state on every rank or on none"
        raise DistributedError(f"ranks differ, nothing was handed out: {'; '.join(lines)}{hint}")

    def _by_value(self, values: list[str]) -> str:
        by: dict[str, list[int]] = {}
        for rank, value in zip(self.ranks, values, strict=True):
            by.setdefault(value, []).append(rank)
        named = [f"{value} on rank{'s' if len(ranks) > 1 else ''} {_some(ranks)}" for value, ranks in by.items()]
        return " and ".join(named)

    def _check_cover(self, dp_ranks: list[int], dp_size: int) -> None:
        counts = np.bincount(dp_ranks, minlength=dp_size)
        if counts.min() != counts.max():
            least, most = int(counts.argmin()), int(counts.argmax())
            raise DistributedError(
                f"each data-parallel rank must be held by equally many of the {len(dp_ranks)} processes: rank "
                f"{least} of {dp_size} is held by {counts[least]}, rank {most} by {counts[most]}"
            )


def _timeout_of(group: dist.ProcessGroup, kind: str) -> float:
    """The timeout a group was made with, in seconds; torch's default where a backend does not tell."""
    try:
        timeout = group._get_backend(torch.device(kind)).options._timeout
    except (AttributeError, RuntimeError):
        timeout = dist.default_pg_timeout
    return float(timeout.total_seconds())


def _nccl_options(backend: str, max_ctas: int | None, timeout: float) -> Any:
    if backend != "nccl" or max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options.config.min_ctas = 1
    options._timeout = datetime.timedelta(seconds=timeout)  # new_group warns of another than its own
    return options


def _digest(value: Any) -> int:
    """63 bits of a value's text."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def _some(ranks: Sequence[int], limit: int = 8) -> str:
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return ", ".join(map(str, ranks[:limit])) + more


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    """End groups; those of a world that has ended already are gone."""
    if dist.is_initialized():
        for group in groups:
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)
