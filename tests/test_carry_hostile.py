"""L05: batches made to break a copy. Each is copied with nothing shared, or refused with the path to the culprit."""

from __future__ import annotations

import array
import collections
import dataclasses
import fractions
import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attr
import numpy as np
import pytest
import torch
from torch import nn

from gpusampler.carry import snapshot_raw_batch


class Frozen(dict):  # type: ignore[type-arg]
    """A dict whose own methods must not run."""

    def _never(self, *_: Any) -> Any:
        raise TypeError("frozen")

    __setitem__ = update = __copy__ = __deepcopy__ = __reduce_ex__ = __iter__ = items = _never  # type: ignore[assignment]


class Strict(list):  # type: ignore[type-arg]
    """A list whose own methods must not run, with an attribute."""

    note: Any

    def _never(self, *_: Any) -> Any:
        raise TypeError("strict")

    __setitem__ = extend = append = __copy__ = __reduce_ex__ = __iter__ = _never  # type: ignore[assignment]


class Recording(dict):  # type: ignore[type-arg]
    """A dict whose attribute is written by each assignment; a shallow copy would share it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.written: list[str] = []

    def __setitem__(self, key: str, item: Any) -> None:
        self.written.append(key)
        super().__setitem__(key, item)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass
class WithInit:
    x: Any
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.x = self.x * scale


class Pair(NamedTuple):
    x: Any
    y: Any


class PairAndMore(Pair):
    pass


class Private:
    __slots__ = ("__dict__", "__weakref__", "__x")

    def __init__(self, x: Any) -> None:
        self.__x = x

    def get(self) -> Any:
        return self.__x


class Forwarding:
    def __init__(self, **items: Any) -> None:
        self.items = items

    def __getattr__(self, name: str) -> Any:
        return self.items[name]


class Moving:
    """Its `to` moves one tensor and keeps the rest as it is."""

    def __init__(self, x: Any, rest: Any) -> None:
        self.x, self.rest = x, rest

    def to(self, device: Any) -> Moving:
        return Moving(self.x.to(device), self.rest)


@attr.s(slots=True, frozen=True)
class Attrs:
    x: Any = attr.ib()


class Named(torch.Tensor):
    pass


class Info(np.ndarray):  # type: ignore[type-arg]
    info: Any = None


def with_attributes(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def object_array(*items: Any) -> Any:
    found = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        found[index] = item
    return found


def inside_itself(x: Any) -> Any:
    held = [x]
    found = (held,)
    held.append(found)
    return found


Make, Get = Callable[[torch.Tensor], Any], Callable[[Any], Any]
COPIED: dict[str, tuple[Make, Get]] = {
    "frozen dict": (lambda x: Frozen(x=x), lambda v: dict.__getitem__(v, "x")),
    "strict list": (lambda x: with_attributes(Strict([x]), note=[x]), lambda v: list.__getitem__(v, 0)),
    "attribute of a strict list": (lambda x: with_attributes(Strict([1]), note=[x]), lambda v: v.note[0]),
    "recording dict": (lambda x: Recording(x=x), lambda v: v["x"]),
    "ordered dict, moved": (lambda x: collections.OrderedDict(x=x), lambda v: v.popitem()[1]),
    "key of a dict": (lambda x: {Slotted(1, 2): x}, lambda v: v[Slotted(1, 2)]),
    "set": (lambda x: {x}, lambda v: next(iter(v))),
    "frozenset": (lambda x: frozenset([x]), lambda v: next(iter(v))),
    "frozen slots": (lambda x: Slotted([x]), lambda v: v.x[0]),
    "initvar": (lambda x: with_attributes(WithInit(x, 2), x=x), lambda v: v.x),
    "namedtuple's attribute": (lambda x: with_attributes(PairAndMore(1, 2), more=x), lambda v: v.more),
    "private slot": (Private, lambda v: v.get()),
    "forwarded attribute": (lambda x: Forwarding(x=x), lambda v: v.x),
    "attrs": (Attrs, lambda v: v.x),
    "three levels of objects": (lambda x: Private([Private({"k": x})]), lambda v: v.get()[0].get()["k"]),
    "plain attribute beside to": (lambda x: Moving(torch.zeros(1), Private([x])), lambda v: v.rest.get()[0]),
    "bound on a tensor": (lambda x: with_attributes(torch.zeros(1), note=[x]), lambda v: v.note[0]),
    "tensor subclass": (lambda x: x.as_subclass(Named), lambda v: v.as_subclass(torch.Tensor)),
    "attribute of a tensor subclass": (
        lambda x: with_attributes(torch.zeros(1).as_subclass(Named), note=x), lambda v: v.note,
    ),
    "array subclass": (lambda x: with_attributes(np.zeros(1).view(Info), info=x), lambda v: v.info),
    "object array": (lambda x: object_array([1, x], None), lambda v: v[0][1]),
    "object array, 0-d": (lambda x: object_array({"x": x}).reshape(()), lambda v: v.item()["x"]),
    "read-only array": (lambda x: np.lib.stride_tricks.as_strided(x.numpy(), writeable=False), lambda v: v),
    "record": (lambda x: x.numpy().view([("a", "f4")]).view(np.recarray), lambda v: torch.from_numpy(v.a.copy())),
    "scalar of a structured array": (lambda x: x.numpy().view([("a", "f4", 4)])[0], lambda v: v["a"]),
    "from numpy": (lambda x: torch.from_numpy(x.numpy()), lambda v: v),
    "expanded": (lambda x: x.expand(3, 4), lambda v: v[2]),
    "transposed": (lambda x: x.expand(3, 4).t(), lambda v: v[:, 1]),
    "sparse": (lambda x: torch.sparse_coo_tensor(torch.arange(4)[None], x), lambda v: v.coalesce().values()),
    "compressed": (lambda x: torch.sparse_csr_tensor(torch.arange(5), torch.zeros(4).long(), x), lambda v: v.values()),
    "jagged": (lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])), lambda v: v.values()),
    "shared memory": (lambda x: x.share_memory_(), lambda v: v),
    "parameter": (lambda x: nn.Parameter(x), lambda v: v),
    "tuple in itself": (inside_itself, lambda v: v[0][0]),
    "namespaces": (lambda x: types.SimpleNamespace(a=types.SimpleNamespace(b=[x])), lambda v: v.a.b[0]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")  # says that it is in beta, and that it checks little
@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("name", COPIED)
def test_L05_hostile_batches_share_nothing(name: str, device: Any) -> None:
    make, get = COPIED[name]
    source = torch.arange(4.0)
    batch = [make(source)]
    kept = snapshot_raw_batch(batch, device)[0]
    assert type(kept) is (torch.Tensor if name == "parameter" else type(batch[0]))
    source.fill_(-1)
    assert get(kept).tolist() == [0, 1, 2, 3]
    assert get(batch[0]).tolist() == [-1] * 4  # the getter does reach what was put in


STAYS = ("read-only", "record", "scalar", "from numpy", "plain attribute beside to")  # arrays; what `to` leaves behind


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", [n for n in COPIED if not n.startswith(STAYS) and n != "sparse"])
def test_hostile_batches_move_every_tensor(name: str) -> None:
    make, get = COPIED[name]
    assert get(snapshot_raw_batch([make(torch.arange(4.0))], "meta")[0]).is_meta


def test_a_copy_leaves_the_input_alone() -> None:
    batch = Recording(x=torch.zeros(1))
    kept = snapshot_raw_batch(batch, "cpu")
    assert batch.written == kept.written == []
    kept["y"] = 1
    assert batch.written == []


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.ones(3, 1).expand(3, 0),
        torch.arange(4).bfloat16(),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        np.zeros((0, 3)),
        np.array(["a", "bb"]),
        np.arange(4)[::-1].astype(">i4"),
        np.ma.array([1, 2], mask=[False, True]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        array.array("f", [1.0]),
        bytearray(b"ab"),
        slice(0, 3),
        {1, (2, "a")},
        range(3),
        fractions.Fraction(1, 2),
        Path("a"),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_odd_values_come_back_as_they_were(value: Any) -> None:
    kept = snapshot_raw_batch({"x": value}, "cpu")["x"]
    assert (type(kept), repr(kept)) == (type(value), repr(value))
    if isinstance(value, torch.Tensor):
        assert (kept.shape, kept.dtype) == (value.shape, value.dtype)


def test_a_tokenizers_batch_keeps_its_encodings() -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")
    batch = fast(["a", "b"], return_tensors="pt")
    kept = snapshot_raw_batch(batch, "cpu")
    batch["input_ids"].fill_(9)
    assert (kept["input_ids"].tolist(), kept.tokens(1)) == ([[0], [1]], ["?"])


def test_a_tensor_dictionary() -> None:
    tensordict = importlib.import_module("tensordict") if importlib.util.find_spec("tensordict") else None
    if tensordict is None:
        pytest.skip("needs tensordict")
    x = torch.zeros(2)
    kept = snapshot_raw_batch([tensordict.TensorDict({"a": {"x": x}}, batch_size=[2])], "cpu")[0]
    x.add_(1)
    assert (type(kept), kept["a", "x"].tolist()) == (tensordict.TensorDict, [0.0, 0.0])


class TensorLike:
    """The part of the tensor protocol that tensor dictionaries and graph batches have; what it holds is hidden."""

    def __init__(self, x: torch.Tensor) -> None:
        self.get = lambda: x

    def clone(self) -> TensorLike:
        return TensorLike(self.get().clone())

    def detach(self) -> TensorLike:
        return TensorLike(self.get().detach())

    def to(self, device: torch.device) -> TensorLike:
        return TensorLike(self.get().to(device))


@pytest.mark.parametrize("device", ["cpu", None])
def test_snapshots_use_clone_where_there_is_one(device: Any) -> None:
    x = torch.zeros(2, requires_grad=True)
    kept = snapshot_raw_batch([TensorLike(x)], device)[0].get()
    assert kept.data_ptr() != x.data_ptr()
    assert not kept.requires_grad
    assert snapshot_raw_batch(TensorLike(x), "meta").get().device.type == "meta"
