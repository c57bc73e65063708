"""Who must agree on plans, and which part of the data a process trains.

These are two things: `process_group` holds every process whose batches must fit together, tensor-, context- and
pipeline-parallel peers too, while `dp_size` and `rank` say which part a process trains. Peers have the same `rank`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpusampler.errors import ParameterError, ParameterTypeError, check_float, check_int, quote


@dataclass(frozen=True)
class PlanGroup:
    """The processes that must agree, with options; what `process_group` takes.

    Attributes:
        group: a `ProcessGroup`; "auto": the world when torch.distributed runs with more than one process; None: every
            process plans for itself, without communication, with the same result.
        timeout: seconds without an answer from another rank that are an error; default: the group's own timeout.
        max_ctas: most thread blocks, hence SMs, that a waiting NCCL broadcast may hold; default: NCCL's choice.
        loader_ahead: micro-batches that this process's loader takes before training needs them; default: found for
            torch DataLoaders, 0 for others. It matters only where it differs between ranks.

    Example:
        >>> PlanGroup(timeout=60.0).group
        'auto'
    """

    group: Any = "auto"
    timeout: float | None = None
    max_ctas: int | None = None
    loader_ahead: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        group = self.group
        if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ParameterError("process_group must contain this process: new_group gave it no group")
        if not (group is None or group == "auto" or (dist.is_available() and isinstance(group, dist.ProcessGroup))):
            raise ParameterTypeError(
                "process_group must be 'auto', None, a torch.distributed.ProcessGroup or a PlanGroup, "
                f"got {quote(group)}"
            )
        if self.timeout is not None and check_float("timeout", self.timeout) <= 0:
            raise ParameterError(f"timeout must be above 0 seconds, got {self.timeout}")
        if self.max_ctas is not None:
            check_int("max_ctas", self.max_ctas, minimum=1)
        if self.loader_ahead is not None:
            check_int("loader_ahead", self.loader_ahead, minimum=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanGroup:
        """Return itself: a process group cannot be copied, and need not be."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value, which a ProcessGroup has not."""
        if not (self.group is None or self.group == "auto"):
            raise TypeError(
                "a sampler with a ProcessGroup as process_group cannot be pickled, one with 'auto' or None can"
            )
        return PlanGroup, (self.group, self.timeout, self.max_ctas, self.loader_ahead)

    def place(self) -> tuple[int, int]:
        """Size of the group and this process's rank in it; (1, 0) alone."""
        group = self.resolve()
        return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

    def resolve(self) -> dist.ProcessGroup | None:
        """The group as it is now; None if there is nobody to agree with.

        Raises:
            ParameterError: this process is not a member, or the group has been destroyed.
        """
        if self.group is None or not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.group == "auto" else self.group
        try:
            rank = dist.get_rank(group)
        except ValueError as error:
            raise ParameterError(
                "process_group has been destroyed, or was made before torch.distributed last began"
            ) from error
        if rank < 0:
            raise ParameterError(f"process_group must contain this process, of rank {dist.get_rank()} in the world")
        return group if dist.get_world_size(group) > 1 else None


class Coordinates(NamedTuple):
    """Which part of the data a process trains: part `rank` of `dp_size`; unpacks in that order."""

    dp_size: int
    rank: int


def from_device_mesh(mesh: Any, dims: str | Sequence[str]) -> Coordinates:
    """Which part of the data this process trains, by its place in a device mesh.

    Processes that differ only in other dimensions, such as tensor- and context-parallel ones, train on the same rows.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions, this process in it.
        dims: names of the dimensions that split the data, major first, such as ("dp_replicate", "dp_shard"); also of
            dimensions that were made of others by `_flatten`.

    Returns:
        `dp_size` and `rank`, to be passed as such.

    Raises:
        ParameterError: a dimension that the mesh does not have, or twice, by itself or within another; or no dimension;
            or a mesh without this process.

    Example:
        Under `torchrun --nproc-per-node=8`:

        >>> mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> dp_size, rank = from_device_mesh(mesh, "dp")  # doctest: +SKIP
        >>> sampler = GPUBatchRebalanceSampler(lengths, 256, dp_size, rank=rank)  # doctest: +SKIP
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise ParameterTypeError(f"mesh must be a DeviceMesh, got {quote(mesh)} of type {type(mesh).__name__}")
    names = tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
    if not names or len(set(names)) != len(names):
        raise ParameterError(f"dims must be names of mesh dimensions, each once, got {quote(dims)}")
    if mesh.get_coordinate() is None:
        raise ParameterError(f"mesh must contain this process, of rank {dist.get_rank()} in the world")
    size, rank, peers = 1, 0, set[int]()
    for name in names:
        line, place = _line(mesh, name)
        if len(peers.intersection(line)) > 1:
            raise ParameterError(f"dims must split the data in different ways, {quote(name)} overlaps another")
        peers.update(line)
        size, rank = size * len(line), rank * len(line) + place
    return Coordinates(size, rank)


def _line(mesh: Any, name: Any) -> tuple[list[int], int]:
    """Ranks along one dimension, this process's among them, and its place."""
    names = mesh.mesh_dim_names or ()
    if name in names:  # without cutting the mesh: torch 2.6 cannot cut a part of one again
        axis, where = names.index(name), list(mesh.get_coordinate())
        place, where[axis] = where[axis], slice(None)
        return mesh.mesh[tuple(where)].tolist(), place
    known = ", ".join(map(repr, names)) or "no names"
    try:
        line = mesh[name]
    except (KeyError, RuntimeError, TypeError) as error:
        raise ParameterError(f"dims has {quote(name)}, the mesh has {known}") from error
    if line.ndim != 1:
        raise ParameterError(f"dims has {quote(name)}, the mesh has {known}")
    return line.mesh.tolist(), line.get_local_rank()


def transport(config: str) -> tuple[str, str]:
    """Device type and backend that carry plans, given a group's backends.

    An accelerator's own backend, if there is such a device here or nothing else; else the CPU's.

    Example:
        >>> transport("cpu:gloo,cuda:gloo"), transport("cuda:nccl")
        (('cpu', 'gloo'), ('cuda', 'nccl'))
    """
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    for device, backend in backends.items():
        if device == "cpu" or backend == "gloo":
            continue
        if "cpu" not in backends or torch.get_device_module(device).is_available():
            return device, backend
    return "cpu", backends["cpu"]


def end_without_gil(group: dist.ProcessGroup) -> None:
    """See that the end of a gloo group does not hold the GIL, which gloo's threads may need to end.

    Before torch 2.8 a ProcessGroup does hold it, but not the Python object of its backend, so that must be the last to
    go: pybind11 runs a weak reference's callback, which keeps it, when the C++ object has gone.
    """
    if torch.__version__ < "2.8":  # compared as a version, not as text
        weakref.finalize(group, lambda backend: None, group._get_backend(torch.device("cpu"))).atexit = False
