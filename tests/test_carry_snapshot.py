"""Snapshots of loader batches: no shared storage, same types, nothing written to the input."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from gpusampler.carry import snapshot_raw_batch


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str = "n"
    seen: list[torch.Tensor] = dataclasses.field(init=False, default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    n: int


class Strict(collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, data: dict[str, Any], *, required: int) -> None:
        super().__init__(data)
        self.required = required


class MovesInPlace:
    """A `to` that works on the object itself and returns nothing."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.moved_to: Any = None

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)
        self.moved_to = device


class MovesSlots:
    __slots__ = ("_x", "device")

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self.device = "unset"

    def to(self, device: torch.device) -> MovesSlots:
        self._x = self._x.to(device)
        self.device = str(device)
        return self


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor and array that a batch of the shapes below holds, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if isinstance(value, collections.abc.Mapping):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (list, tuple, collections.deque)):
        return [t for item in value for t in tensors_in(item)]
    if isinstance(value, MovesSlots):
        return [value._x]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name))]
    return [t for item in getattr(value, "__dict__", {}).values() for t in tensors_in(item)]


BATCHES: dict[str, Any] = {
    "tensor": lambda x: x,
    "view": lambda x: x[1:],
    "strided view": lambda x: x[::2],
    "numpy": lambda x: x.numpy(),
    "dict": lambda x: {"x": x, "y": 1},
    "list": lambda x: [x, [x, "text"]],
    "tuple": lambda x: (x, (1, (x,))),
    "ordered dict": lambda x: collections.OrderedDict(b=x, a=x),
    "default dict": lambda x: collections.defaultdict(list, x=[x]),
    "deque": lambda x: collections.deque([x], maxlen=2),
    "namedtuple": lambda x: Pair(x, ["a"]),
    "dataclass": lambda x: Frozen(x),
    "slots dataclass": lambda x: Slotted(x, 3),
    "user dict": lambda x: Strict({"x": x}, required=3),
    "chain map": lambda x: collections.ChainMap({"x": x}, {"y": x}),
    "mapping proxy": lambda x: types.MappingProxyType({"x": x}),
    "namespace": lambda x: types.SimpleNamespace(inner=types.SimpleNamespace(x=x)),
    "to in place": lambda x: MovesInPlace(x),
    "to with slots": lambda x: MovesSlots(x),
    "plain object": lambda x: Plain([x]),
    "packed sequence": lambda x: pack_sequence([x, x[:2]]),
    "structseq": lambda x: x.reshape(2, 2).max(1),
}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None], ids=str)
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_L05_snapshots_never_alias(make: Any, device: Any) -> None:
    batch = make(torch.arange(4.0))
    before = [t.clone() for t in tensors_in(batch)]
    kept = snapshot_raw_batch(batch, device)
    assert type(kept) is type(batch)
    copies, originals = tensors_in(kept), tensors_in(batch)
    assert len(copies) == len(originals) > 0
    for new, old, value in zip(copies, originals, before, strict=True):
        assert torch.equal(old, value)  # the input was only read
        assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()
        assert torch.equal(new, value)
        assert new.dtype == value.dtype


@pytest.mark.parametrize("make", [m for name, m in BATCHES.items() if name != "numpy"])
def test_snapshots_move_every_tensor_and_leave_the_input_where_it_is(make: Any) -> None:
    batch = make(torch.arange(4.0))
    kept = snapshot_raw_batch(batch, "meta")
    expected = "cpu" if isinstance(batch, PackedSequence) else "meta"  # its batch_sizes stay on the host
    assert {t.device.type for t in tensors_in(kept)} == {"meta", expected}
    assert {t.device.type for t in tensors_in(batch)} == {"cpu"}


def test_snapshots_keep_what_containers_carry_besides_items() -> None:
    x = torch.zeros(1)
    kept = snapshot_raw_batch(
        [
            collections.defaultdict(int, x=x),
            collections.deque([x], maxlen=2),
            Strict({"x": x}, required=3),
            collections.OrderedDict(b=x, a=x),
            Frozen(x, "note"),
        ],
        "cpu",
    )
    assert kept[0]["missing"] == 0
    assert kept[1].maxlen == 2
    assert kept[2].required == 3
    assert list(kept[3]) == ["b", "a"]
    assert (kept[4].note, kept[4].seen) == ("note", [])


def test_snapshots_keep_what_is_no_data() -> None:
    model, generator, marker = torch.nn.Linear(1, 1), torch.Generator(), object()
    batch = {
        "m": model,
        "g": generator,
        "o": marker,
        "f": len,
        "t": int,
        "n": None,
        "size": torch.Size([2]),
        "i": 1,
    }
    kept = snapshot_raw_batch(batch, "cpu")
    assert list(kept) == list(batch)
    assert all(kept[key] is value for key, value in batch.items())


def test_snapshots_copy_numpy_of_every_kind(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", dtype=np.int64, mode="w+", shape=(3,))
    inner = torch.zeros(2)
    ragged = np.array([inner, None], dtype=object)
    masked = np.ma.array([1, 2], mask=[False, True])
    kept = snapshot_raw_batch([mapped, ragged, masked, np.array(5), np.float32(2)], "cpu")
    mapped[:] = 9
    inner.add_(1)
    masked[0] = 7
    assert type(kept[0]) is np.ndarray
    assert kept[0].tolist() == [0, 0, 0]
    assert (kept[1][0].tolist(), kept[1][1]) == ([0.0, 0.0], None)
    assert (type(kept[2]), kept[2].tolist()) == (np.ma.MaskedArray, [1, None])
    assert (kept[3].shape, kept[3].item(), kept[4]) == ((), 5, np.float32(2))


def test_snapshots_keep_shared_objects_and_cycles() -> None:
    x = torch.zeros(2)
    batch: dict[str, Any] = {"a": x, "b": [x]}
    batch["self"] = batch
    kept = snapshot_raw_batch(batch, "cpu")
    assert kept["a"] is kept["b"][0]
    assert kept["self"] is kept
    assert kept is not batch


def test_snapshots_detach_and_leave_inference_mode() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert snapshot_raw_batch({"x": x}, "cpu")["x"].grad_fn is None
    assert x.grad_fn is not None
    with torch.inference_mode():
        kept = snapshot_raw_batch({"x": torch.ones(2)}, "cpu")["x"]
    weight = torch.zeros(2, requires_grad=True)
    (weight * kept).sum().backward()  # an inference tensor cannot be saved for this
    assert weight.grad.tolist() == [1.0, 1.0]


def test_snapshots_of_every_layout() -> None:
    dense = torch.eye(3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    complex_view = torch.ones(2, dtype=torch.complex64).conj()
    kept = snapshot_raw_batch([dense.to_sparse(), jagged, complex_view, dense.expand(4, 3, 3)], "cpu")
    assert torch.equal(kept[0].to_dense(), dense)
    assert [t.tolist() for t in kept[1].unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
    assert torch.equal(kept[2], complex_view)
    assert (kept[3].shape, kept[3].untyped_storage().nbytes()) == ((4, 3, 3), 36 * 4)


def test_snapshots_of_transformers_and_tensordict() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = importlib.import_module("transformers.modeling_outputs")
    x = torch.zeros(2, 2)
    encoding, output = transformers.BatchEncoding({"x": x}), outputs.BaseModelOutput(last_hidden_state=x)
    kept = snapshot_raw_batch([encoding, output], "cpu")
    x.add_(1)
    assert [type(item) for item in kept] == [transformers.BatchEncoding, outputs.BaseModelOutput]
    assert (kept[0]["x"].sum(), kept[1].last_hidden_state.sum(), kept[1][0].sum()) == (0, 0, 0)


def test_snapshots_of_objects_that_move_themselves() -> None:
    x = torch.ones(2, requires_grad=True) * 2  # deepcopy refuses it
    in_place, with_slots = MovesInPlace(x), MovesSlots(x)
    kept = snapshot_raw_batch([in_place, with_slots], "cpu")
    assert (kept[0].moved_to, kept[1].device) == (torch.device("cpu"), "cpu")
    assert (in_place.moved_to, with_slots.device) == (None, "unset")
    assert not kept[0].x.requires_grad
    assert in_place.x is with_slots._x is x


@pytest.mark.parametrize("device", [True, 1.5, "nowhere", b"cpu"])
def test_snapshots_refuse_what_is_no_device(device: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        snapshot_raw_batch({}, device)


LEAVES = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3).map(torch.tensor)
)
TREES = st.recursive(
    LEAVES,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), child, max_size=3),
    ),
    max_leaves=8,
)


def as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return type(value)(map(as_plain, value)) if isinstance(value, (list, tuple)) else value


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_any_tree_is_copied_with_its_values_and_without_its_storage(tree: Any) -> None:
    kept = snapshot_raw_batch(tree, "cpu")
    assert as_plain(kept) == as_plain(tree)
    old = {id(t): t for t in tensors_in(tree) if t.numel()}.values()
    new = {t.data_ptr() for t in tensors_in(kept) if t.numel()}
    assert new.isdisjoint(t.data_ptr() for t in old)
