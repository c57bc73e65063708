"""L05: what a carry cannot hold is refused with the path to it, and what it holds is counted."""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from gpusampler.carry import TrajectoryCarry, snapshot_raw_batch
from gpusampler.errors import ParameterError


class Holder:
    """A plain object; its `to`, in the class below, takes something else than a device."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self) -> Any:
        return self.x


class Odd(Holder):
    def to(self, unit: str) -> None:
        raise ValueError(f"no unit {unit}")


class Labelled(str):
    x: Any


def labelled(text: str, x: Any) -> Labelled:
    found = Labelled(text)
    found.x = x
    return found


def closure(x: Any) -> Any:
    return lambda: x


def with_default(x: Any = [1]) -> Any:  # noqa: B006
    return x


def with_keyword(*, x: Any = [1]) -> Any:  # noqa: B006
    return x


def with_attribute() -> None: ...


with_attribute.x = [1]  # type: ignore[attr-defined]


def object_array(*items: Any) -> Any:
    found = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        found[index] = item
    return found


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


REFUSED: dict[str, tuple[Any, str]] = {
    "memoryview": (memoryview(bytearray(b"ab")), r"batch\['x'\] of type memoryview"),
    "partial": (functools.partial(torch.add, torch.zeros(1)), r"batch\['x'\] of type partial"),
    "closure": (Holder(closure(1)), r"batch\['x'\]\.x of type function"),
    "mutable default": (with_default, r"batch\['x'\] of type function"),
    "mutable keyword": (with_keyword, r"batch\['x'\] of type function"),
    "function with an attribute": (with_attribute, r"batch\['x'\] of type function"),
    "method": (Holder(1).get, r"batch\['x'\] of type method"),
    "iterator": ([iter([1])], r"batch\['x'\]\[0\] of type list_iterator"),
    "generator": ((i for i in [1]), r"batch\['x'\] of type generator"),
    "lock": (types.SimpleNamespace(a=[threading.Lock()]), r"batch\['x'\]\.a\[0\] of type lock"),
    "file": ({"f": io.StringIO()}, r"batch\['x'\]\['f'\] of type StringIO"),
    "weak reference": (weakref.ref(Holder), r"batch\['x'\] of type ReferenceType"),
    "string with a tensor": (labelled("a", torch.zeros(1)), r"batch\['x'\] of type Labelled"),
    "error": (ValueError(torch.zeros(1)), r"batch\['x'\] of type ValueError"),
    "objects in a structure": (np.zeros(1, dtype=[("a", object)]), r"batch\['x'\] of type ndarray .* objects in it"),
    "meta": (torch.zeros(1, device="meta"), r"batch\['x'\] of type Tensor .* no data"),
    "another to": (Holder(Odd(1)), r"batch\['x'\]\.x of type Odd .* its to failed, ValueError\('no unit cpu'\)"),
    "objects in a scalar": (np.zeros(1, dtype=[("a", object)])[0], r"batch\['x'\] of type void .* objects in it"),
    "too deep": (nested(5000), r"batch\['x'\]\[0\].* nested deeper than 100"),
    "a key": ({(1, len, closure(1)): 1}, r"batch\['x'\] key .*\[2\] of type function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_L05_what_cannot_be_copied_is_refused_with_its_path(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ParameterError, match=message):
        snapshot_raw_batch({"ok": 1, "x": value}, "cpu")


def test_refusals_name_the_argument_and_keep_the_slot() -> None:
    carry = TrajectoryCarry(1)
    carry.set(0, state=torch.ones(1))
    with pytest.raises(ParameterError, match=r"state\['a'\] of type memoryview"):
        carry.set(0, state={"x": torch.zeros(1), "a": memoryview(b"")})
    with pytest.raises(ParameterError, match=r"raw_batch\[0\] of type memoryview"):
        carry.set(0, state=torch.zeros(1), raw_batch=[memoryview(b"")])
    assert carry.slots[0] == {"state": torch.ones(1), "rung": 0, "raw_batch": None}


@pytest.mark.filterwarnings("ignore:Sparse")  # says that it is in beta
def test_memory_of_hostile_batches_is_counted() -> None:
    carry = TrajectoryCarry(1)
    holder = sys.getsizeof(Holder(1))
    for value, size in [
        (torch.zeros(1).expand(5), 20),  # a copy holds every element
        (object_array(torch.zeros(4), None), 16 + 2 * 8),
        (Holder((Holder(torch.zeros(3)),)), 12 + 2 * holder + sys.getsizeof((1,))),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 20),
        (torch.eye(4).to_sparse_csr(), 16),
    ]:
        carry.set(0, state=torch.zeros(1), raw_batch=value)
        assert carry.memory().total == 4 + size


@pytest.mark.parametrize("count", [10**12, 10**20, np.bool_(True), np.float64(2), torch.tensor(2), b"2", [2]], ids=repr)
def test_L05_slot_counts_that_are_none(count: Any) -> None:
    with pytest.raises(ParameterError, match="num_slots"):
        TrajectoryCarry(count)


@pytest.mark.parametrize("ids", [{1, 2}, {1: 2}, [torch.tensor(1)], [(1, [2])], b"ab"], ids=repr)
def test_sample_ids_have_an_order_and_a_hash(ids: Any) -> None:
    with pytest.raises(ParameterError, match="sample_ids"):
        TrajectoryCarry(1).set(0, state=torch.zeros(1), sample_ids=ids)
