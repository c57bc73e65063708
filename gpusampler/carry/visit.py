"""What a batch holds: its leaves and containers, their lengths and their bytes. Nothing is changed or copied here.

Cost: one visit of each item. Limit: what an object hides from its attributes, such as in a closure, is not seen.
"""

from __future__ import annotations

import datetime
import enum
import re
import sys
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

ITEM, ATTRIBUTE, KEY = "[{!r}]", ".{}", " key {!r}"

COMMON = {type(None), str, bytes, int, float, bool, complex}
_VALUES = (str, bytes, Number, np.generic, range, datetime.date, datetime.time, datetime.timedelta, uuid.UUID)
_FIXED = (type, ModuleType, BuiltinFunctionType, enum.Enum, EllipsisType, PurePath, re.Pattern, np.dtype)
_TORCH = (torch.nn.Module, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged)


def is_atom(value: Any) -> bool:
    """Whether `value` is immutable, or code, a module or a random generator: what a copy of a batch keeps as it is."""
    if type(value) in COMMON or type(value) is object or isinstance(value, (*_FIXED, *_TORCH)):
        return True
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__closure__ is None and not vars(value) and all(map(is_atom, defaults))
    return isinstance(value, _VALUES) and not isinstance(value, np.void) and not hasattr(value, "__dict__")


def slots_of(value: Any) -> Iterator[tuple[MemberDescriptorType, Any]]:
    """The slots of an object that are set, and what they hold; no user code runs."""
    for kind in type(value).__mro__:
        if "__slots__" in kind.__dict__:
            for member in kind.__dict__.values():
                if isinstance(member, MemberDescriptorType):
                    try:
                        yield member, member.__get__(value)
                    except AttributeError:
                        continue


def children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(form, key, item) of all that `value` holds; `form.format(key)` is how code would reach the item."""
    if isinstance(value, Mapping):
        yield from ((ITEM, key, item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((ITEM, index, item) for index, item in enumerate(value))
    elif isinstance(value, np.ndarray):
        yield from ((ITEM, index, item) for index, item in enumerate(value.flat) if value.dtype == object)
    elif not isinstance(value, torch.Tensor):
        yield from ((ATTRIBUTE, name, item) for name, item in getattr(value, "__dict__", {}).items())
        yield from ((ATTRIBUTE, member.__name__, item) for member, item in slots_of(value))


def held_bytes(value: Any) -> Counter[str]:
    """Bytes of what `value` holds, by device ("cpu" for all but tensors).

    Tensors and arrays count by their elements, all other data and its containers by `sys.getsizeof`. One object met
    twice counts once; of a jagged or compressed sparse tensor only the values count. What copies keep as it is counts
    nothing, unless it is a string, a number or another value.
    """
    total: Counter[str] = Counter()
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen or (is_atom(item) and not isinstance(item, _VALUES)):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            total[str(item.device)] += _tensor_bytes(item)
        elif isinstance(item, np.ndarray):
            total["cpu"] += item.nbytes
        else:
            total["cpu"] += sys.getsizeof(item)
        stack.extend(child for _, _, child in children(item))
    return total


def has_data(value: Any) -> bool:
    """Whether a tensor or an array is anywhere inside `value`."""
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (torch.Tensor, np.ndarray)):
            return True
        if not is_atom(item) and id(item) not in seen:
            seen[id(item)] = item
            stack.extend(child for _, _, child in children(item))
    return False


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor.numel() * tensor.element_size()


def lengths(batch: Any) -> dict[str, int]:
    """Every length in a batch, by the path that leads to it: tensors and arrays by their first dimension, sequences.

    Example:
        >>> lengths({"x": torch.zeros(4, 2), "scale": np.ones(3), "t": torch.tensor(1.0), "prompt": ("a", "b")})
        {"batch['x']": 4, "batch['scale']": 3, "batch['prompt']": 2}
    """
    found: dict[str, int] = {}
    seen: dict[int, Any] = {}
    stack = [("batch", batch)]
    while stack:
        path, item = stack.pop()
        if is_atom(item) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            if item.dim():
                found[path] = item.size(0)
        elif isinstance(item, np.ndarray):
            if item.ndim:
                found[path] = len(item)
        else:
            if isinstance(item, (list, tuple, set, frozenset, deque)):
                found[path] = len(item)
            held = [(path + form.format(key), child) for form, key, child in children(item) if not is_atom(child)]
            stack.extend(reversed(held))
    return found
