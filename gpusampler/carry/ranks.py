"""Which ranks walk one trajectory together, and the number each such group of ranks goes by.

Ranks of one sequence-parallel group (tensor-, context- and pipeline-parallel groups too) share their samples, so they
must walk the same trajectory: they form one stagger group. The groups are numbered from 0, and a group's number is the
stagger rank of each rank in it.

Everything here is local: no rank is asked anything. Limit: all groups have the same size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpusampler.errors import ParameterError, ParameterTypeError, check_bool, check_int, quote

_PEER_DIMS = ("sp", "cp", "tp", "pp")
_STREAM_DIMS = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")


def carry_rank_world(
    rank: int | None = None,
    world_size: int | None = None,
    sp_size: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    peer_dims: Collection[str] | None = None,
    sp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[int, int]:
    """This rank's stagger rank and the number of stagger groups, from one of four sources.

    Args:
        rank: global rank; without it, that of the initialised process group, else 0 of 1.
        world_size: number of ranks, given with `rank`.
        sp_size: ranks that share a trajectory, numbered consecutively.
        mesh: a device mesh that holds this rank. Peers are the ranks that differ only in the dimensions named
            sp, cp, tp or pp; dimensions named dp, ddp, fsdp, hsdp, data, replicate or shard (also with a suffix, such
            as dp_shard), or the only one if it has no name, tell streams apart.
        peer_dims: names of the mesh dimensions whose ranks share a trajectory, in place of that guess.
        sp_group: the group of this rank's peers, evenly spaced in the world.
        dp_group: the group of the ranks that sit where this one sits in their own peer groups, one for each.

    Returns:
        (stagger rank, number of stagger groups).

    Raises:
        ParameterError: two sources, a count out of range, a world that does not split into groups of `sp_size`, a
            mesh dimension of unknown role, or a group without this rank.

    Example:
        >>> [carry_rank_world(rank, 4, sp_size=2) for rank in range(4)]
        [(0, 2), (0, 2), (1, 2), (1, 2)]
    """
    sp_size = check_int("sp_size", sp_size, minimum=1)
    plain = rank is not None or world_size is not None or sp_size > 1
    sources = {"rank, world_size, sp_size": plain or None, "mesh": mesh, "sp_group": sp_group, "dp_group": dp_group}
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise ParameterError(f"the ranks must be described once, got {' and '.join(given)}")
    if peer_dims is not None and mesh is None:
        raise ParameterError(f"peer_dims needs mesh, got peer_dims={quote(peer_dims)} alone")
    if mesh is not None:
        return _from_mesh(mesh, peer_dims)
    if sp_group is not None:
        return _from_peer_group(sp_group)
    if dp_group is not None:
        return _group_rank("dp_group", dp_group), dist.get_world_size(dp_group)
    return _from_ranks(rank, world_size, sp_size)


def stagger_rank_and_groups(
    rank: int | None = None,
    world_size: int | None = None,
    sp_size: int = 1,
    *,
    exact_shape: bool = False,
    mesh: DeviceMesh | None = None,
    peer_dims: Collection[str] | None = None,
    sp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[int, int]:
    """`carry_rank_world`, or (0, 1) where all ranks must change shape together.

    Args:
        rank: see `carry_rank_world`, as for the others.
        world_size: see `carry_rank_world`.
        sp_size: see `carry_rank_world`.
        exact_shape: whether batches keep their native shapes. Trajectories that end at different calls on different
            ranks would then run different shapes side by side, so all ranks form one group, staggered by slot only.
        mesh: see `carry_rank_world`.
        peer_dims: see `carry_rank_world`.
        sp_group: see `carry_rank_world`.
        dp_group: see `carry_rank_world`.

    Returns:
        (stagger rank, number of stagger groups).

    Raises:
        ParameterError: as `carry_rank_world`; the ranks are checked with `exact_shape` too.

    Example:
        >>> stagger_rank_and_groups(3, 4), stagger_rank_and_groups(3, 4, exact_shape=True)
        ((3, 4), (0, 1))
    """
    found = carry_rank_world(
        rank, world_size, sp_size, mesh=mesh, peer_dims=peer_dims, sp_group=sp_group, dp_group=dp_group
    )
    return (0, 1) if check_bool("exact_shape", exact_shape) else found


def _from_ranks(rank: int | None, world_size: int | None, sp_size: int) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ParameterError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        ready = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    world_size = check_int("world_size", world_size, minimum=1)
    rank = check_int("rank", rank, minimum=0, maximum=world_size - 1)
    if world_size % sp_size:
        raise ParameterError(
            f"world_size must be a multiple of sp_size, got world_size={world_size}, sp_size={sp_size}"
        )
    return rank // sp_size, world_size // sp_size


def _from_mesh(mesh: DeviceMesh, peer_dims: Collection[str] | None) -> tuple[int, int]:
    if not isinstance(mesh, DeviceMesh):
        raise ParameterTypeError(f"mesh must be a DeviceMesh, got {quote(mesh)}")
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else None)
    if names is None:
        raise ParameterError(f"mesh needs mesh_dim_names to tell peers from streams, got {quote(mesh)}")
    if isinstance(peer_dims, str) or not isinstance(peer_dims, (Collection, type(None))):
        raise ParameterTypeError(f"peer_dims must be a collection of names, got {quote(peer_dims)}")
    for name in peer_dims or ():
        if name not in names:
            raise ParameterError(f"peer_dims names {quote(name)}, which is no dimension of the mesh {names}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ParameterError(f"mesh does not hold this rank, got {quote(mesh)}")
    stagger_rank, groups = 0, 1
    for name, size, position in zip(names, mesh.shape, coordinate, strict=True):
        if not (_is_peer_dim(name) if peer_dims is None else name in peer_dims):
            stagger_rank, groups = stagger_rank * size + position, groups * size
    return stagger_rank, groups


def _is_peer_dim(name: str) -> bool:
    parts = name.split("_")
    is_peer, is_stream = not set(_PEER_DIMS).isdisjoint(parts), parts[0] in _STREAM_DIMS
    if is_peer == is_stream:
        raise ParameterError(f"mesh dimension {quote(name)} has no clear role: name the shared dimensions in peer_dims")
    return is_peer


def _from_peer_group(group: dist.ProcessGroup) -> tuple[int, int]:
    _group_rank("sp_group", group)
    ranks = sorted(dist.get_process_group_ranks(group))
    world_size = dist.get_world_size()
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = stride * len(ranks)
    first = ranks[0]
    regular = ranks == list(range(first, first + block, stride)) and world_size % block == 0 and first % block < stride
    if not regular:
        raise ParameterError(
            f"sp_group ranks {ranks} do not tile a world of {world_size} evenly: give dp_group or mesh"
        )
    return first // block * stride + first % stride, world_size // len(ranks)


def _group_rank(name: str, group: Any) -> int:
    not_in_it: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group is not not_in_it and not isinstance(group, dist.ProcessGroup):
        raise ParameterTypeError(f"{name} must be a process group, got {quote(group)}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ParameterError(f"{name} does not hold this rank, {dist.get_rank()}")
    return rank
