"""Objects in a batch: those without attributes, and those with a `to` of another kind."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from gpusampler.carry import snapshot_raw_batch
from gpusampler.errors import ParameterError


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


class Empty:
    pass


class Text(str):
    pass


class ListToAnother(list):  # type: ignore[type-arg]
    """A `to` that forgets the type."""

    def to(self, device: torch.device) -> list[Any]:
        return [item.to(device) for item in self]


class PairToAnother(tuple):  # type: ignore[type-arg]
    def to(self, device: torch.device) -> tuple[Any, ...]:
        return tuple(item.to(device) for item in self)


class ObjectToAnother(Holder):
    def to(self, device: torch.device) -> Holder:
        return Holder(self.x.to(device))


class OwnTo(Holder):
    """A `to` that has nothing to do with devices."""

    def to(self) -> str:
        raise AssertionError("never called")


class ToByKeyword(Holder):
    def to(self, *, device: torch.device) -> str:
        raise AssertionError("never called")


@pytest.mark.parametrize("make", [Empty, types.SimpleNamespace, lambda: Text("a")], ids=["object", "namespace", "text"])
def test_L05_an_object_without_attributes_gets_none_later(make: Any) -> None:
    value = make()
    kept = snapshot_raw_batch([value], "cpu")[0]
    value.x = torch.zeros(1)
    assert type(kept) is type(value)
    assert vars(kept) == {}


@pytest.mark.parametrize("device", ["cpu", "meta", None])
@pytest.mark.parametrize("kind", [ListToAnother, PairToAnother, ObjectToAnother, OwnTo, ToByKeyword])
def test_L05_an_object_whose_to_is_of_no_use_is_copied_all_the_same(kind: Any, device: Any) -> None:
    x = torch.zeros(2)
    kept = snapshot_raw_batch({"x": kind(x if issubclass(kind, Holder) else [x])}, device)["x"]
    x.fill_(-1)
    assert type(kept) is kind
    inner = kept.x if issubclass(kind, Holder) else kept[0]
    assert inner.device.type == (device or "cpu")
    assert device == "meta" or inner.tolist() == [0, 0]


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
def test_what_a_to_raises_comes_with_the_path(error: type[Exception]) -> None:
    class Fails(Holder):
        def to(self, device: torch.device) -> None:
            raise error("not today")

    with pytest.raises(ParameterError, match=rf"batch\['x'\]\[0\] of type Fails .* its to failed, {error.__name__}"):
        snapshot_raw_batch({"x": [Fails(1)]}, "cpu")
