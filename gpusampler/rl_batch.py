"""A batch of rollouts: a mapping of fields with a row each, its rows' lengths, and its parts.

Fields are tensors on any device (jagged nested ones too), numpy arrays or lists; a `TensorDict` is one as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from gpusampler.errors import ParameterError, ParameterTypeError
from gpusampler.lengths import as_lengths

_Int64 = np.ndarray[Any, np.dtype[np.int64]]


def lengths_of(batch: Any, lengths: Any, cap: int) -> _Int64:
    """Lengths of the rows on the host, the one copy from the device, checked against the budget.

    Raises:
        ParameterError: no lengths, a bad one, or one above `cap`, named with its row.
    """
    name = "lengths"
    if not isinstance(batch, Mapping) and not _is_tensordict(batch):
        raise ParameterTypeError(f"batch must be a mapping of fields or a TensorDict, got {type(batch).__name__}")
    if lengths is None:
        names = set(batch.keys())  # a TensorDict refuses `in`
        ids: Any = batch["input_ids"] if "input_ids" in names else None
        if getattr(ids, "is_nested", False):
            name, lengths = "lengths of input_ids", ids.offsets().diff()
        elif "attention_mask" in names:
            name, lengths = "lengths of attention_mask", _mask_sums(batch["attention_mask"])
        else:
            raise ParameterError(f"batch has no attention_mask and no nested input_ids: give lengths; {_fields(batch)}")
    values = as_lengths(lengths, name=name).values.astype(np.int64)
    if values.max() > cap:
        row = int(np.argmax(values > cap))
        raise ParameterError(
            f"max_token_len={cap} is below the length of row {row}, {values[row]} "
            f"({int((values > cap).sum())} of {len(values)} rows are longer)"
        )
    return values


def _mask_sums(mask: Any) -> torch.Tensor:
    """Ones of each row; the sums and what proves that they are ones come to the host in one copy."""
    try:
        mask = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterTypeError(f"attention_mask must be a tensor of rows, got {type(mask).__name__}") from error
    if mask.is_nested or mask.ndim != 2:
        shape = "a nested one" if mask.is_nested else f"shape {tuple(mask.shape)}"
        raise ParameterError(f"attention_mask must be a dense tensor [rows, tokens], got {shape}: give lengths")
    if not len(mask):
        raise ParameterError("batch is empty: at least one row is needed")
    others = ((mask != 0) & (mask != 1)).sum(1)
    sums: torch.Tensor
    sums, others = torch.stack([(mask == 1).sum(1), others]).cpu()
    if others.any():
        row = int(others.ne(0).nonzero()[0, 0])
        raise ParameterError(f"attention_mask must hold 0 and 1 only, row {row} has other values: give lengths")
    return sums


def _is_tensordict(batch: Any) -> bool:
    return type(batch).__module__.partition(".")[0] == "tensordict"


def _fields(batch: Any) -> str:
    return f"its fields are {', '.join(map(repr, batch.keys()))}"


def check_fields(batch: Any, rows: int) -> None:
    """Every field must have a row for each length."""
    for name, value in batch.items():
        count = len(value) if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) else None
        if isinstance(value, torch.Tensor) and value.ndim:
            count = value.shape[0]
        if count != rows and not (_is_tensordict(batch) and count is None):
            what = f"{count} rows" if count is not None else f"no rows, it is a {type(value).__name__}"
            raise ParameterError(f"batch has {rows} lengths, but field {name!r} has {what}")


def take(batch: Any, groups: list[list[int]]) -> list[Any]:
    """One mapping a group, with its rows of every field."""
    device = next((value.device for value in batch.values() if isinstance(value, torch.Tensor)), None)
    order: Any = torch.tensor(list(chain.from_iterable(groups)), device=device)
    if not _is_tensordict(batch):
        fields = {name: rows_of(value, groups, order) for name, value in batch.items()}
        return [{name: parts[k] for name, parts in fields.items()} for k in range(len(groups))]
    nested = [name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.is_nested]
    dense = batch.exclude(*nested)
    micro_batches = [dense[rows] for rows in order.split([len(group) for group in groups])]
    for name in nested:
        for micro_batch, rows in zip(micro_batches, rows_of(batch[name], groups, order), strict=True):
            micro_batch[name] = rows
    return micro_batches


def rows_of(values: Any, groups: list[list[int]], order: Any) -> list[Any]:
    """Rows of one field for each group; `order` is all groups, one after the other."""
    if isinstance(values, torch.Tensor) and values.is_nested:
        single = values.unbind()
        return [torch.nested.as_nested_tensor([single[i] for i in group], layout=torch.jagged) for group in groups]
    if isinstance(values, torch.Tensor):
        reordered: Any = values.index_select(0, order.to(values.device))
        return list(reordered.split([len(group) for group in groups]))
    if isinstance(values, np.ndarray):
        return [values[group] for group in groups]
    return [[values[i] for i in group] for group in groups]
