"""Copies of loader batches that outlive the batch.

A carried trajectory keeps its conditioning for as many calls as the grid has rungs, while the loader may reuse pinned
buffers, shared memory or a static input of a captured graph for its next batch. So each tensor and array is copied,
even where it already sits on the right device. Containers keep their types; the input is only read.

Cost: one copy of the data, one visit of each container. Limits: modules and iterators are kept as they are, and so is
an object that is no known container, has no `to`, and holds no tensor or array in an attribute or one level below.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from gpusampler.errors import ParameterError, ParameterTypeError, quote

T = TypeVar("T")
_NOT_DATA = (type, ModuleType, torch.nn.Module)


def snapshot_raw_batch(batch: T, device: torch.device | str | int | None) -> T:
    """Copy `batch` so that nothing in it shares storage with the caller.

    Tensors come back detached, on `device`, as ordinary tensors even under `torch.inference_mode`. Numpy arrays are
    copied and stay arrays; a memory-mapped one is read into memory. dict, list, tuple, set, deque, namedtuple,
    dataclass and Mapping (subclasses too) keep their type and attributes, and no constructor runs. An object with a
    `to` method is copied first and then moved by its own `to`, so that a `to` which works in place never touches the
    batch. A tensor met twice is copied once.

    Args:
        batch: whatever the loader yields.
        device: where tensors go; None leaves each on its own device.

    Returns:
        The copy, of the same type as `batch`.

    Raises:
        ParameterError: `device` names no device.

    Example:
        >>> batch = {"x": torch.zeros(2), "prompt": ["a", "b"]}
        >>> kept = snapshot_raw_batch(batch, "cpu")
        >>> _ = batch["x"].add_(1)
        >>> kept
        {'x': tensor([0., 0.]), 'prompt': ['a', 'b']}
    """
    target = None if device is None else as_device(device)
    with torch.inference_mode(False), torch.no_grad():
        return cast(T, _Copier(target).copy(batch))


def held_bytes(value: Any) -> Counter[str]:
    """Bytes of the tensors and arrays inside `value`, by device ("cpu" for arrays).

    One met twice counts once; of a jagged or compressed sparse tensor only the values count.
    """
    total: Counter[str] = Counter()
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            total[str(item.device)] += _tensor_bytes(item)
        elif isinstance(item, np.ndarray):
            total["cpu"] += item.nbytes
        else:
            stack.extend(_children(item))
    return total


def as_device(device: Any) -> torch.device:
    """`device` as a torch.device, or an error that names the parameter."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise ParameterTypeError(f"device must be a torch.device, a string or an int, got {quote(device)}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ParameterError(f"device names no device of this machine, got {quote(device)}") from error


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.values().nbytes


def _attributes(value: Any) -> dict[str, Any]:
    """Instance attributes, whether they live in `__dict__` or in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            slot = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return found


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, _NOT_DATA):
        return ()
    return list(_attributes(value).values())


def _holds_arrays(values: Collection[Any]) -> bool:
    """Whether a tensor or an array is among `values`, or inside a dict, list or tuple among them."""
    nested = [item for value in values if isinstance(value, (dict, list, tuple)) for item in _children(value)]
    return any(isinstance(item, (torch.Tensor, np.ndarray)) for item in [*values, *nested])


def _has_methods(value: Any, *names: str) -> bool:
    return all(callable(getattr(type(value), name, None)) for name in names)


def _is_record(value: Any) -> bool:
    known = isinstance(value, (Mapping, SimpleNamespace)) or hasattr(type(value), "__attrs_attrs__")
    return known or dataclasses.is_dataclass(value) or _holds_arrays(_attributes(value).values())


class _Copier:
    """One traversal. `done` maps the id of an object to it and its copy: it keeps cycles and shared objects."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.done: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, bytes, int, float, complex, Iterator, *_NOT_DATA)):
            return value
        if id(value) not in self.done:
            self._keep(value, self._copy_new(value))
        return self.done[id(value)][1]

    def _keep(self, value: Any, result: Any) -> Any:
        self.done[id(value)] = (value, result)
        return result

    def _copy_new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(self.device or value.device, copy=True)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (bytearray, array.array)):
            return copy.copy(value)
        if _has_methods(value, "to", "clone", "detach"):
            clone = value.clone().detach()
            return clone if self.device is None else clone.to(self.device)
        if _has_methods(value, "to") and self.device is not None and not isinstance(value, Mapping):
            return self._move(value)
        return self._container(value)

    def _move(self, value: Any) -> Any:
        private = _Copier(None).copy(value)
        moved = private.to(self.device)
        return private if moved is None else moved

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._refill(value, lambda new: [dict.__setitem__(new, k, self.copy(v)) for k, v in value.items()])
        if isinstance(value, list):
            return self._refill(value, lambda new: list.__setitem__(new, slice(None), [self.copy(v) for v in value]))
        if isinstance(value, deque):
            return self._refill(value, lambda new: [new.__setitem__(i, self.copy(v)) for i, v in enumerate(value)])
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, (set, frozenset)):
            return type(value)(self.copy(item) for item in value)
        if isinstance(value, MappingProxyType):
            return MappingProxyType({key: self.copy(item) for key, item in value.items()})
        return self._record(value) if _is_record(value) or _has_methods(value, "to") else value

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype != object:
            return np.array(value, copy=True, subok=not isinstance(value, np.memmap))
        items = np.empty(value.size, dtype=object)
        for position, item in enumerate(value.flat):
            items[position] = self.copy(item)
        return items.reshape(value.shape)

    def _refill(self, value: Any, fill: Callable[[Any], Any]) -> Any:
        """A shallow copy whose entries, and then attributes, are replaced by copies."""
        new = self._keep(value, copy.copy(value))
        fill(new)
        self._set_attributes(new, _attributes(value))
        return new

    def _tuple(self, value: Any) -> Any:
        items = [self.copy(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "n_sequence_fields"):  # a structseq, such as the result of torch.max
            return type(value)(items)
        new = tuple.__new__(type(value), items)
        self._set_attributes(new, getattr(value, "__dict__", {}))
        return new

    def _record(self, value: Any) -> Any:
        """A new object of the same type with copied attributes; no constructor runs."""
        attributes = _attributes(value)
        try:
            new = object.__new__(type(value))
        except TypeError:  # a type with a layout of its own
            new = copy.copy(value)
        self._keep(value, new)
        self._set_attributes(new, attributes)
        return new

    def _set_attributes(self, new: Any, attributes: Mapping[str, Any]) -> None:
        in_dict = getattr(new, "__dict__", None)
        for name, attribute in attributes.items():
            if in_dict is not None and not hasattr(getattr(type(new), name, None), "__objclass__"):
                in_dict[name] = self.copy(attribute)
            else:
                object.__setattr__(new, name, self.copy(attribute))
