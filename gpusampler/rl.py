"""Dynamic micro-batches for RL: rollouts of very different lengths, split under a token budget, evenly over ranks.

Functions with the names and call shapes of verl's `seqlen_balancing`, so that one import line changes. The partition is
`kernels.partition`: instead of the differencing method in Python, with a better balance. Unlike there, the token budget
is kept, wrong input raises instead of `assert`, and one rank's error reaches every rank.

Rows stay on the device of the batch. The partition runs on the host: one copy of a length a row to it, one copy of the
row order back, because the index lists that are returned are host lists in any case. Between those two it takes about
0.2 to 20 ms for 1024 rows. `plan_batches` plans padded micro-batches of fixed number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpusampler.cost import CostModel
from gpusampler.errors import DistributedError, ParameterError, ParameterTypeError, check_bool, check_int, quote
from gpusampler.group import transport
from gpusampler.kernels import spec
from gpusampler.kernels.partition import groups_needed, partition, partition_capped, sums_of
from gpusampler.rl_batch import check_fields, lengths_of, rows_of, take

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_LARGEST_SUM = 2.0**61
_LARGEST_INT = 2**63 - 1
_LARGEST_COUNT = 2**31 - 1


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool = False) -> list[list[int]]:
    """Split samples into groups of nearly equal summed length (or workload).

    Args:
        seqlen_list: a positive integer a sample: list, numpy array or tensor on any device (copied to the host once).
        k_partitions: number of groups, at least 1 and at most the number of samples.
        equal_size: every group holds the same number of samples, which must divide.

    Returns:
        `k_partitions` lists of positions, none empty, ascending; the group with the largest sum first.

    Raises:
        ParameterError: a value that is not a positive integer, named with its position; or too many groups.

    Example:
        >>> get_seqlen_balanced_partitions([3, 5, 4, 3, 5], 2, equal_size=False)
        [[0, 2, 3], [1, 4]]
    """
    values = _as_values(seqlen_list, "seqlen_list")
    groups = check_int("k_partitions", k_partitions, minimum=1)
    if groups > len(values):
        raise ParameterError(f"k_partitions must be at most the number of samples, {len(values)}, got {groups}")
    if check_bool("equal_size", equal_size) and len(values) % groups:
        raise ParameterError(
            f"equal_size needs a multiple of k_partitions samples, got {len(values)} samples for {groups} groups"
        )
    return _costliest_first(values, partition(values, groups, equal_size=bool(equal_size)), groups)


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    *,
    cost: CostModel | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[list[Any], list[list[int]]]:
    """Split this rank's batch into micro-batches of balanced cost with at most `max_token_len` tokens each.

    The number of micro-batches is the same on all ranks of `dp_group`: each packs its rows (first-fit decreasing), one
    `all_reduce` takes the largest number, and every rank splits its rows into that many.

    Args:
        batch: mapping of fields with n rows each: tensors (on any device, jagged nested ones too), numpy arrays or
            lists. A `TensorDict` yields TensorDicts, any other mapping yields dicts.
        max_token_len: largest sum of lengths of a micro-batch.
        dp_group: processes that must run equally many micro-batches; None is the world if torch.distributed runs.
        num_batches_divided_by: the number of micro-batches is a multiple of this (interleaved pipelines).
        same_micro_num_in_dp: agree with `dp_group`; if False, this rank counts alone.
        min_num_micro_batch: at least this many.
        use_dynamic_bsz_balance: order micro-batches so that costs rise to the middle and fall again, which shortens the
            bubbles of a pipeline; else the costliest is first, so that memory peaks early.
        cost: cost of a row of a length, summed over a micro-batch; default `CostModel()`.
        lengths: tokens of each row, integers [n]; default: of `batch["input_ids"]` if that is nested, else the sum of
            each row of `batch["attention_mask"]`.

    Returns:
        The micro-batches (dense tensors are views of one reordered copy a field), and for each the rows of `batch` that
        it holds, ascending.

    Raises:
        ParameterError: on every rank, if on any: a parameter out of range, a row longer than `max_token_len` (named),
            a length below 1, fewer rows than micro-batches, fields of different sizes, another
            `num_batches_divided_by` on another rank.
        DistributedError: a rank does not call this (or with another `same_micro_num_in_dp`), after the group's timeout.

    Example:
        >>> batch = {"input_ids": torch.arange(12).view(4, 3), "attention_mask": torch.ones(4, 3).tril(-1)}
        >>> batch["attention_mask"][0, 0] = 1
        >>> parts, rows = rearrange_micro_batches(batch, max_token_len=4)
        >>> rows, parts[0]["input_ids"].tolist()
        ([[0, 1, 2], [3]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    """
    together = same_micro_num_in_dp is not False and dist.is_available() and dist.is_initialized()
    error: Exception | None = None
    wanted, rows, multiple = 1, 1, 1
    try:
        check_bool("same_micro_num_in_dp", same_micro_num_in_dp)
        cap = check_int("max_token_len", max_token_len, 1, _LARGEST_INT)
        multiple = _check_count("num_batches_divided_by", num_batches_divided_by)
        least = _check_count("min_num_micro_batch", min_num_micro_batch)
        use_hill = check_bool("use_dynamic_bsz_balance", use_dynamic_bsz_balance)
        sizes = lengths_of(batch, lengths, cap)
        costs = _costs_of(sizes, cost)
        rows = len(sizes)
        check_fields(batch, rows)
        wanted = -(-max(least, groups_needed(sizes, cap)) // multiple) * multiple
    except Exception as caught:
        error = caught
    if together:
        wanted, rows = _agree(wanted, rows, multiple, error, dp_group)
    if error is not None:
        raise error
    if wanted > rows:
        raise ParameterError(
            f"{wanted} micro-batches are needed (max_token_len={cap}, min_num_micro_batch={min_num_micro_batch}, "
            f"num_batches_divided_by={num_batches_divided_by}), but a rank has only {rows} rows: none may be empty"
        )
    groups = _costliest_first(costs, partition_capped(costs, sizes, cap, wanted), wanted)
    if use_hill:
        groups = _smallest_outside(groups)
    return take(batch, groups), groups


def get_reverse_idx(idx_map: Any) -> Any:
    """Invert an order: `rows[order][get_reverse_idx(order)]` is `rows`.

    Args:
        idx_map: a permutation of 0 to n - 1: a sequence of ints, or an integer tensor, which stays on its device (and
            is not checked on a CUDA device, where that would wait for it).

    Returns:
        A list, or a tensor like `idx_map`.

    Raises:
        ParameterError: not a permutation.

    Example:
        >>> get_reverse_idx([2, 0, 1])
        [1, 2, 0]
    """
    if isinstance(idx_map, torch.Tensor):
        if idx_map.ndim != 1 or idx_map.is_floating_point() or idx_map.is_complex() or idx_map.dtype == torch.bool:
            what = f"shape {tuple(idx_map.shape)} of {idx_map.dtype}"
            raise ParameterTypeError(f"idx_map must be a one-dimensional integer tensor, got {what}")
        reverse = torch.argsort(idx_map)
        if idx_map.device.type == "cpu" and not torch.equal(idx_map[reverse], torch.arange(len(idx_map))):
            raise ParameterError(
                f"idx_map must hold each of 0 to {len(idx_map) - 1} once, got {quote(idx_map.tolist())}"
            )
        return reverse.to(idx_map.dtype)
    if not hasattr(idx_map, "__len__"):
        raise ParameterTypeError(f"idx_map must be a sequence of ints, got {quote(idx_map)}")
    reverse_list: list[int] = [-1] * len(idx_map)
    for position, index in enumerate(idx_map):
        index = check_int(f"idx_map[{position}]", index, minimum=0, maximum=len(idx_map) - 1)
        if reverse_list[index] >= 0:
            raise ParameterError(f"idx_map[{position}] = {index} is also idx_map[{reverse_list[index]}]")
        reverse_list[index] = position
    return reverse_list


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Bring rows, concatenated in the order of the micro-batches, back into the order of the batch.

    Args:
        data: [n, ...], dense or jagged nested, on any device.
        batch_idx_list: the index lists that `rearrange_micro_batches` returned.

    Raises:
        ParameterError: another number of rows, or lists that do not hold each row once.

    Example:
        >>> restore_dynamic_batch(torch.tensor([30, 10, 20]), [[2], [0, 1]]).tolist()
        [10, 20, 30]
    """
    order = list(chain.from_iterable(batch_idx_list))
    if len(order) != data.shape[0]:
        raise ParameterError(f"data has {data.shape[0]} rows, batch_idx_list {len(order)}")
    reverse = get_reverse_idx(order)
    restored: torch.Tensor = rows_of(data, [reverse], torch.tensor(reverse, device=data.device))[0]
    return restored


def _as_values(values: Any, name: str) -> _Int64:
    """Positive integers as int64 [n]; unlike lengths they may be workloads far above 2**31."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64 if values.is_floating_point() else values.dtype).numpy()
    elif isinstance(values, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, values)):
        index = next(i for i, value in enumerate(values) if isinstance(value, (bool, np.bool_)))
        raise ParameterTypeError(f"{name} must be one positive integer a sample, got {name}[{index}] = {values[index]}")
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not len(array):
        what = f"shape {array.shape}" if array.ndim != 1 or not len(array) else f"{quote(values)} of {array.dtype}"
        raise ParameterTypeError(f"{name} must be one positive integer a sample, got {what}")
    bad = ~(array >= 1) | (array != np.floor(array)) | (array > _LARGEST_SUM)
    if bad.any():
        index = int(np.argmax(bad))
        raise ParameterError(f"{name} must be positive integers of at most 2**61, got {name}[{index}] = {array[index]}")
    if float(array.sum(dtype=np.float64)) > _LARGEST_SUM:
        raise ParameterError(f"{name} must have a sum of at most 2**61, use a coarser unit")
    return array.astype(np.int64)


def _costliest_first(costs: _Int64, group_of: _Int64, groups: int) -> list[list[int]]:
    by_group = np.argsort(group_of, kind="stable")
    ends = np.cumsum(np.bincount(group_of, minlength=groups))
    lists = [part.tolist() for part in np.split(by_group, ends[:-1])]
    loads = sums_of(costs, group_of, groups)
    return [lists[k] for k in sorted(range(groups), key=lambda k: (-loads[k], lists[k][0]))]


def _smallest_outside(groups: list[list[int]]) -> list[list[int]]:
    ordered: deque[list[int]] = deque()
    for position, group in enumerate(groups):
        if position % 2:
            ordered.append(group)
        else:
            ordered.appendleft(group)
    return list(ordered)


def _check_count(name: str, value: Any) -> int:
    return 1 if value is None else check_int(name, value, 1, _LARGEST_COUNT)


def _costs_of(lengths: _Int64, cost: CostModel | None) -> _Int64:
    """Costs as integers of at least 1 whose sum stays below 2**61; on the host, so that no device rounds otherwise."""
    if not isinstance(cost, (CostModel, type(None))):
        raise ParameterTypeError(f"cost must be a CostModel, got {quote(cost)}")
    costs = (CostModel() if cost is None else cost)(torch.from_numpy(lengths)).numpy()
    shift = spec.shift_for_costs(float(costs.max()), len(costs))
    integers: _Int64 = np.maximum(1, np.rint(np.ldexp(costs, shift))).astype(np.int64)
    return integers


def _agree(wanted: int, rows: int, multiple: int, error: Exception | None, group: Any) -> tuple[int, int]:
    """Largest number of micro-batches and least number of rows over the group.

    Raises:
        ParameterError: another rank has an error, or another `num_batches_divided_by`.
        DistributedError: a rank does not come.
    """
    device, _ = transport(dist.get_backend_config(group))
    row = [wanted, -rows, multiple, -multiple, int(error is not None)]
    largest = torch.tensor(row, dtype=torch.int64, device=device)
    texts: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        wanted, rows, most, least, failed = largest.tolist()
        if failed:
            dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=group)
    except RuntimeError as failure:
        raise DistributedError(
            "a rank of dp_group did not come to rearrange_micro_batches, which every rank must call, with "
            f"same_micro_num_in_dp alike: {failure}"
        ) from failure
    if failed and error is None:
        where, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        rank = where if group is None else dist.get_global_rank(group, where)
        raise ParameterError(f"rank {rank} cannot split its batch. {text}")
    if not failed and most != -least:
        raise ParameterError(f"num_batches_divided_by must be the same on all ranks, got {-least} and {most}")
    return wanted, -rows
