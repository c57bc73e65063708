"""Copies of loader batches that outlive the batch.

A carried trajectory keeps its conditioning for as many calls as the grid has rungs, while the loader may reuse pinned
buffers, shared memory or a static input of a captured graph for its next batch. So each tensor and array is copied,
even where it already sits on the right device, however deep it lies. Containers and objects keep their types; the
input is only read, and no code of theirs runs but `to` and `clone`.

Kept as they are: immutable values, classes, functions that hold no data (in a closure, defaults or attributes), modules
(`torch.nn.Module` too) and `torch.Generator`. What can be neither copied nor kept, such as an iterator, a closure, a
memoryview, a lock or an open file, is refused with the path that leads to it. Cost: one copy of the data, one visit of
each container.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from gpusampler.carry.visit import ATTRIBUTE, COMMON, ITEM, KEY, is_atom, slots_of
from gpusampler.errors import ParameterError, ParameterTypeError, quote

T = TypeVar("T")
_ADVICE = "carry tensors, arrays and plain values, in containers or plain objects"
_MAX_DEPTH = 100  # well inside Python's recursion limit
# Attributes of this prefix are what torch before 2.8 keeps on a jagged tensor for itself; it makes them anew.
_MADE_ANEW = "_sym_"
_REFUSED = (BaseException, Iterator, FunctionType, MethodType, functools.partial, weakref.ReferenceType, memoryview)


def snapshot_raw_batch(batch: T, device: torch.device | str | int | None) -> T:
    """Copy `batch` so that nothing in it shares storage with the caller.

    Tensors come back detached, on `device`, as ordinary tensors even under `torch.inference_mode`; a parameter comes
    back as a tensor. Numpy arrays are copied and stay arrays; a memory-mapped one is read into memory. dict, list,
    tuple, set, deque, namedtuple, dataclass, Mapping (subclasses too) and plain objects keep their type and
    attributes, and no constructor runs. An object with a `to` method is copied first and then moved by its own `to`,
    so that a `to` which works in place never touches the batch; one that also has `clone` and `detach` is copied by
    these. A `to` that takes no device, or gives another type, is not used. A leaf that is no plain object copies
    itself as for `copy.deepcopy`. A tensor met twice is copied once. A jagged tensor's offsets are its shape, by which
    torch tells whether two are alike, and stay shared on the same device.

    Args:
        batch: whatever the loader yields.
        device: where tensors go; None leaves each on its own device.

    Returns:
        The copy, of the same type as `batch`.

    Raises:
        ParameterError: `device` names no device, or something in the batch cannot be copied: the message has its path.

    Example:
        >>> batch = {"x": torch.zeros(2), "prompt": ["a", "b"]}
        >>> kept = snapshot_raw_batch(batch, "cpu")
        >>> _ = batch["x"].add_(1)
        >>> kept
        {'x': tensor([0., 0.]), 'prompt': ['a', 'b']}
        >>> snapshot_raw_batch({"x": [memoryview(b"ab")]}, "cpu")
        Traceback (most recent call last):
        ...
        gpusampler.errors.ParameterTypeError: batch['x'][0] of type memoryview cannot be copied: carry tensors, arrays \
and plain values, in containers or plain objects
    """
    return copy_of(batch, None if device is None else as_device(device))


def copy_of(value: T, device: torch.device | None = None, name: str = "batch") -> T:
    """`snapshot_raw_batch` onto a device known to be good; `name` begins the paths in messages."""
    with torch.inference_mode(False), torch.no_grad():
        return cast(T, _Copier(device, name).copy(value))


def as_device(device: Any) -> torch.device:
    """`device` as a torch.device, or an error that names the parameter."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise ParameterTypeError(f"device must be a torch.device, a string or an int, got {quote(device)}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, ValueError, AssertionError) as error:  # the last from a build without that kind of device
        raise ParameterError(f"device names no device of this machine, got {quote(device)}") from error


class _Copier:
    """One traversal. `done` maps the id of an object to it and its copy: it keeps cycles and shared objects."""

    def __init__(self, device: torch.device | None, name: str) -> None:
        self.device = device
        self.done: dict[int, tuple[Any, Any]] = {}
        self.path: list[tuple[str, Any]] = [("{}", name)]

    def copy(self, value: Any, form: str = "", key: Any = None) -> Any:
        if is_atom(value):
            return value
        if id(value) not in self.done:
            self.path.append((form, key))
            if len(self.path) > _MAX_DEPTH:
                self._refuse(value, f"it is nested deeper than {_MAX_DEPTH} levels")
            new = self._copy_new(value)
            self.done.setdefault(id(value), (value, new))  # a tuple inside itself is there already
            self.path.pop()
        return self.done[id(value)][1]

    def _refuse(self, value: Any, reason: str, cause: Exception | None = None) -> Any:
        path = "".join(form.format(key) for form, key in self.path[:12])
        path += "..." if len(self.path) > 12 else ""
        raise ParameterTypeError(f"{path} of type {type(value).__name__} cannot be copied: {reason}") from cause

    def _keep(self, value: Any, result: Any) -> Any:
        self.done[id(value)] = (value, result)
        return result

    def _copy_new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.void) and not value.dtype.hasobject:
            return value.copy()
        moves_itself = _moves_itself(value)
        if moves_itself and _has_methods(value, "clone", "detach"):
            clone = self._call(self._call(value, "clone"), "detach")
            return clone if self.device is None else self._call(clone, "to", self.device)
        if not moves_itself or self.device is None or isinstance(value, Mapping):
            return self._container(value)
        private = _Copier(None, "".join(form.format(key) for form, key in self.path)).copy(value)
        moved = self._call(private, "to", self.device)
        if moved is None:
            return private
        return moved if type(moved) is type(value) else self._container(value)

    def _call(self, value: Any, method: str, *arguments: Any) -> Any:
        try:
            return getattr(value, method)(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return self._refuse(value, f"its {method} failed, {quote(error)}", error)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list):
            return self._fill(list, value, list.extend)
        if isinstance(value, deque):
            return self._deque(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, set):
            return self._fill(set, value, set.update)
        if isinstance(value, frozenset):
            return self._set_attributes(frozenset.__new__(type(value), self._items(frozenset.__iter__(value))), value)
        if isinstance(value, MappingProxyType):
            return MappingProxyType({key: self.copy(item, ITEM, key) for key, item in value.items()})
        return self._object(value)

    def _items(self, items: Iterable[Any]) -> list[Any]:
        return [i if type(i) in COMMON else self.copy(i, ITEM, index) for index, i in enumerate(items)]

    def _new(self, base: Any, value: Any) -> Any:
        """An empty object of the same type, made by its builtin base: no code of the type runs."""
        try:
            return self._keep(value, base.__new__(type(value)))
        except TypeError as error:  # a type of an extension module, with a layout of its own
            return self._refuse(value, _ADVICE, error)

    def _fill(self, base: Any, value: Any, add: Callable[[Any, list[Any]], None]) -> Any:
        new = self._new(base, value)
        add(new, self._items(base.__iter__(value)))
        return self._set_attributes(new, value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        base: Any = next(kind for kind in (OrderedDict, defaultdict, dict) if isinstance(value, kind))
        new = self._new(base, value)
        if base is defaultdict:
            defaultdict.__init__(new, vars(defaultdict)["default_factory"].__get__(value))
        for key, item in base.items(value):
            base.__setitem__(new, self.copy(key, KEY, key), self.copy(item, ITEM, key))
        return self._set_attributes(new, value)

    def _deque(self, value: deque[Any]) -> Any:
        new = self._new(deque, value)
        deque.__init__(new, (), value.maxlen)
        deque.extend(new, self._items(deque.__iter__(value)))
        return self._set_attributes(new, value)

    def _tuple(self, value: Any) -> Any:
        items = self._items(tuple.__iter__(value))
        if hasattr(value, "n_sequence_fields"):  # a structseq, such as the result of torch.max
            return type(value)(items)
        if not getattr(value, "__dict__", None) and all(map(_is, items, tuple.__iter__(value))):
            return value
        return self._set_attributes(tuple.__new__(type(value), items), value)

    def _tensor(self, value: torch.Tensor) -> Any:
        try:
            new = value.detach().to(self.device or value.device, copy=True)
        except (NotImplementedError, ValueError) as error:  # a meta tensor has no data to move
            return self._refuse(value, str(error), error)
        for name, attribute in getattr(value, "__dict__", {}).items():
            if name not in vars(new) and not name.startswith(_MADE_ANEW):
                setattr(new, name, self.copy(attribute, ATTRIBUTE, name))
        return new

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if not value.dtype.hasobject:
            new = np.array(value, copy=True, subok=not isinstance(value, np.memmap))
            return self._set_attributes(new, value) if type(new) is type(value) else new
        if value.dtype != object or type(value) is not np.ndarray:
            return self._refuse(value, "it has objects in it; only a plain array of dtype object may")
        items = np.empty(value.size, dtype=object)
        new = self._keep(value, items.reshape(value.shape))
        for position, item in enumerate(value.flat):
            items[position] = self.copy(item, ITEM, position)
        return new

    def _object(self, value: Any) -> Any:
        """A new object of the same type with copied attributes, or what the copy protocol of a leaf gives."""
        if isinstance(value, _REFUSED):
            self._refuse(value, _ADVICE)
        kind: Any = type(value)
        is_plain = kind.__new__ is object.__new__ and hasattr(value, "__dict__")
        if is_plain or getattr(value, "__dict__", None) or any(True for _ in slots_of(value)):
            base = SimpleNamespace if isinstance(value, SimpleNamespace) else object
            return self._set_attributes(self._new(base, value), value)
        if isinstance(value, np.void):
            self._refuse(value, "it has objects in it; only a plain array of dtype object may")
        try:
            return copy.deepcopy(value)
        except Exception as error:
            return self._refuse(value, _ADVICE, error)

    def _set_attributes(self, new: Any, value: Any) -> Any:
        for name, attribute in getattr(value, "__dict__", {}).items():
            new.__dict__[name] = self.copy(attribute, ATTRIBUTE, name)
        for member, attribute in slots_of(value):
            member.__set__(new, self.copy(attribute, ATTRIBUTE, member.__name__))
        return new


def _is(new: Any, old: Any) -> bool:
    return new is old


def _moves_itself(value: Any) -> bool:
    """Whether `value` has a `to` that takes a device."""
    if not _has_methods(value, "to"):
        return False
    try:
        signature = inspect.signature(value.to)
    except (TypeError, ValueError):  # an extension type's says nothing
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _has_methods(value: Any, *names: str) -> bool:
    return all(callable(getattr(type(value), name, None)) for name in names)
