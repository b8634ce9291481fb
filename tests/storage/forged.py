"""Pickles that no writer makes, as objects that pickle turns into them: calls with other arguments than their own.

The tests of the unpickler load each, and ``torture.hostile`` puts each into every place where pickles are read.
"""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import operator
import pathlib
import re
import uuid
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import _utils as torch_utils
from torch.storage import TypedStorage

__all__ = ["MALFORMED", "MALFORMED_CLASSES", "NO_DATA", "NO_DATA_CLASSES", "TENSORS", "Call", "made", "tries_with"]

SOME_CODE = re.compile  # a function, which is no data
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
SCALAR: Any = np.float64(0).__reduce__()[0]
FROM_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]
FLOATS = np.dtype("f4")
FLOAT_STATE = (3, "<", None, None, None, -1, -1, 0)


class Call:
    """Is pickled as a call of ``function``, and a state for what it returns if there is one."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


def dtype(code: str = "f4", state: Any = FLOAT_STATE) -> Call:
    return Call(np.dtype, code, False, True, state=state)


def array(shape: Any, data: Any, dtype: Any = FLOATS, version: int = 1) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(version, shape, dtype, False, data))


class made(Call):  # noqa: N801
    """An object as pickle makes it: by ``__new__``, and then with a state."""

    def __init__(self, kind: Any, *arguments: Any, state: Any = None) -> None:
        super().__init__(copyreg.__newobj__, kind, *arguments, state=state)  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pickle refuses to make an object of a class that it has not
        return self.call[1][0]


def tries_with(module: str, name: str) -> dict[str, bytes]:
    """Opcodes of all that a pickle may try with a name, without PROTO and STOP."""
    named = b"c" + f"{module}\n{name}\n".encode()
    attributes = b"}(X\x03\0\0\0dimK\x07X\x08\0\0\0__init__c_codecs\nencode\nu"
    arguments = b"X\x03\0\0\0cpu]K\x00a"
    slots = b"N" + attributes + b"\x86"
    return {
        "REDUCE": named + b")R",
        "REDUCE with arguments": named + b"(" + arguments + b"tR",
        "REDUCE of its member": b"cbuiltins\ngetattr\n" + named + b"X\x08\0\0\0__init__\x86R",
        "NEWOBJ": named + b")\x81",
        "NEWOBJ with arguments": named + b"(" + arguments + b"t\x81",
        "NEWOBJ_EX": named + b")}\x92",
        "BUILD with a dict": named + b")\x81" + attributes + b"b",
        "BUILD with slots": named + b")\x81" + slots + b"b",
        "BUILD of the class with a dict": named + attributes + b"b",
        "BUILD of the class with slots": named + slots + b"b",
        "INST": b"(" + arguments + b"i" + named[1:],
        "OBJ": b"(" + named + arguments + b"o",
        "APPENDS to the class": named + b"(K\x01e",
        "SETITEMS of the class": named + b"(K\x01K\x02u",
        "factory of a defaultdict": b"ccollections\ndefaultdict\n" + named + b"\x85R",
        "class of a tensor": (
            b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_meta_tensor_no_storage\n" + named
            + b"(ctorch\nfloat32\n(K\x02t(K\x01t\x89t" + attributes + b"tR"
        ),
        "key of a dict": b"}" + named + b")\x81Ns",
        "value": named,
    }  # fmt: skip


MALFORMED: dict[str, Call] = {
    "a bytearray of numbers": Call(bytearray, 10**12),
    "a bytearray in another code": Call(bytearray, "text", "utf-16"),
    "a filled dict": Call(dict, [("a", 1)]),
    "a complex number of texts": Call(complex, "1", "2"),
    "a set of a text": Call(frozenset, "text"),
    "a range of floats": Call(range, 1.5),
    "a slice of nothing": Call(slice),
    "an OrderedDict of numbers": Call(collections.OrderedDict, [1]),
    "a Counter of a text": Call(collections.Counter, "text"),
    "a defaultdict with contents": Call(collections.defaultdict, list, {}),
    "a deque of a dict": Call(collections.deque, {}),
    "a deque of no length": Call(collections.deque, [], "1"),
    "a short date": Call(datetime.date, b"123"),
    "a short time": Call(datetime.time, b"123"),
    "a time in a zone that is a text": Call(datetime.time, bytes(6), "UTC"),
    "a short datetime": Call(datetime.datetime, b"123"),
    "a timedelta of texts": Call(datetime.timedelta, "1", 2, 3),
    "a timezone of a number": Call(datetime.timezone, 1),
    "a Fraction of a float": Call(fractions.Fraction, 1.5),
    "a path of numbers": Call(pathlib.PurePosixPath, 1),
    "a UUID of a negative number": made(uuid.UUID, state={"int": -1}),
    "a UUID with a state that is a list": made(uuid.UUID, state=[1]),
    "a stream beyond its end": made(io.BytesIO, state=(b"12", 3, None)),
    "a deque that comes with its items": Call(collections.deque, [1, 2]),
    "a dtype of a number": Call(np.dtype, 4, False, True, state=FLOAT_STATE),
    "a dtype of another version": dtype(state=(9, *FLOAT_STATE[1:])),
    "a dtype of numbers with the flags of objects": dtype(state=(*FLOAT_STATE[:-1], 63)),
    "a dtype of objects with the flags of numbers": dtype("O8"),
    "a dtype with another order": dtype(state=(3, "?", *FLOAT_STATE[2:])),
    "a dtype of another size": dtype(state=(3, "<", None, None, None, 16, 1, 0)),
    "a time without a unit": dtype("M8"),
    "a time of another unit": dtype("M8", (*FLOAT_STATE, (None, ("parsec", 1, 1, 1)))),
    "a time of a unit that is no tuple": dtype("M8", (*FLOAT_STATE, (None, "s"))),
    "an array of another version": array((1,), bytes(4), version=2),
    "an array without a dtype": array((1,), bytes(4), dtype="f4"),
    "an array with fewer bytes": array((2,), bytes(4)),
    "an array of a negative size": array((-1,), b""),
    "an array of too many dimensions": array((1,) * 40, bytes(4)),
    "an array of objects from bytes": array((1,), bytes(8), dtype=np.dtype(object)),
    "an array of fewer objects": array((2,), [1], dtype=np.dtype(object)),
    "an array from a buffer in another order": Call(FROM_BUFFER, bytes(4), FLOATS, (1,), "K"),
    "a scalar without bytes": Call(SCALAR, FLOATS),
    "a scalar of objects": Call(SCALAR, np.dtype(object), bytes(8)),
}
"""What is corrupt: a call that may make an object, with arguments that no writer gives."""

NO_DATA: dict[str, Any] = {
    "a slice of a list": Call(slice, [1]),
    "a defaultdict of code": Call(collections.defaultdict, SOME_CODE),
    "a Decimal with a large exponent": Call(decimal.Decimal, "1e999999"),
    "a Decimal of words": Call(decimal.Decimal, "many"),
    "a Fraction of long numbers": Call(fractions.Fraction, 1 << 20_000, 1),
    "an object of a class that is not known": made(io.StringIO),
    "an object as protocol 1 makes it": Call(copyreg._reconstructor, uuid.UUID, object, None),  # type: ignore[attr-defined]
    "a dtype with fields": Call(np.dtype, "V8", False, True, state=FLOAT_STATE),
    "a dtype with names": dtype(state=(3, "<", None, ("a",), {}, -1, -1, 0)),
    "a time with metadata": dtype("M8", (*FLOAT_STATE, ({"a": 1}, (b"s", 1, 1, 1)))),
    "an array that is not empty at first": Call(RECONSTRUCT, np.ndarray, (1 << 40,), b"b"),
    "flags that are not flags": Call(operator.or_, 1, 2),
    "a member of what is no enum": Call(getattr, io.BytesIO, "write"),
}
"""What is refused as no data: it may take long, or run code."""


# --- classes of the program ---------------------------------------------------------------------------------------


class Schedule(enum.Enum):
    COSINE = "cosine"
    STEP = (1, (2, 3))

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise SystemExit("code of the program has run")


class Precision(enum.IntEnum):
    BF16 = 16


class Kept(enum.Flag):
    WEIGHTS = 1
    OPTIMIZER = 2
    RNG = 4


class Nested(enum.Enum):
    LIST = [1]  # noqa: RUF012


class Shaped(enum.Flag):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise SystemExit("code of the program has run")


class Meta(enum.EnumMeta):
    pass


class WithMeta(enum.Enum, metaclass=Meta):
    A = 1


class Point(NamedTuple):
    x: int
    y: int


class Doubled(Point):
    def __new__(cls, x: int, y: int) -> Any:
        raise SystemExit("code of the program has run")


class PlainTuple(tuple[int, ...]):
    pass


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    lr: float
    step: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    lr: float
    step: int = 0


@dataclasses.dataclass
class WithGetstate:
    lr: float

    def __getstate__(self) -> Any:
        raise SystemExit("code of the program has run")


@dataclasses.dataclass
class WithSetattr:
    lr: float

    def __setattr__(self, name: str, value: Any) -> None:
        raise SystemExit("code of the program has run")


class WithCode:
    def __setstate__(self, state: Any) -> None:
        raise SystemExit("code of the program has run")


@dataclasses.dataclass
class Derived(WithCode):
    lr: float


class MetaOfData(type):
    pass


@dataclasses.dataclass
class WithMetaOfData(metaclass=MetaOfData):
    lr: float


def some_function() -> None:
    raise SystemExit("code of the program has run")


MALFORMED_CLASSES: dict[str, tuple[Call, str]] = {
    "a member of another value": (Call(Schedule, "linear"), "has no member"),
    "a member whose values have another order": (Call(Schedule, (1, (3, 2))), "has no member"),
    "a member of an equal value of another type": (Call(Precision, 16.0), "has no member"),
    "a member of another name": (Call(getattr, Schedule, "__class__"), "has no member"),
    "flags that there are not": (Call(Kept, 8), "no such combination"),
    "negative flags": (Call(Kept, -1), "no such combination"),
    "flags of a text": (Call(Kept, "1"), "no such combination"),
    "a named tuple with fewer fields": (made(Point, 1), "made from 1 fields"),
    "a dataclass whose state is a number": (made(Config, state=7), "is not a dict of attributes"),
    "a dataclass with a field that is no name": (made(Config, state={1: 2}), "is not a dict of attributes"),
    "slots that get attributes": (made(Slotted, state={"lr": 1.0}), "has slots and gets attributes|gets"),
    "a slot that there is not": (made(Config, state=(None, {"nothing": 1})), "has no slot 'nothing'"),
    "a slot that is a method": (made(Config, state=(None, {"__init__": 1})), "has no slot '__init__'"),
    "too many fields": (made(Frozen, state=[1.0, 2, 3]), "gets 3 fields"),
}
"""What no such class has, and what the error says."""

NO_DATA_CLASSES: dict[str, tuple[Any, str]] = {
    "an enum of two values": (Call(Schedule, "a", "b"), "an enum whose value is not a plain one"),
    "an enum of a list": (Call(Nested, [1]), "an enum whose value is not a plain one"),
    "flags that the program combines": (Call(Shaped, 0), "whose combinations are made by code of its own"),
    "an enum with a metaclass": (WithMeta.A, "an enum with a metaclass of its own"),
    "a member of a class that is no enum": (Call(getattr, Config, "lr"), "of something else than an enum"),
    "a member whose name is a number": (Call(getattr, Schedule, 1), "of something else than an enum"),
    "flags of two enums": (Call(operator.or_, Kept.RNG, Precision.BF16), "something else than two flags"),
    "a named tuple with a __new__": (made(Doubled, 1, 2), "a tuple with code of its own"),
    "a tuple of another class": (PlainTuple([1]), "a tuple with code of its own"),
    "a dataclass with a __getstate__": (made(WithGetstate, state={"lr": 1.0}), "it has a __getstate__"),
    "a dataclass with a __setattr__": (made(WithSetattr, state={"lr": 1.0}), "it has a __setattr__"),
    "a dataclass with a base of its own": (made(Derived, state={"lr": 1.0}), "it has the base class WithCode"),
    "a dataclass with a metaclass": (made(WithMetaOfData, state={"lr": 1.0}), "it has a metaclass"),
    "a dataclass made with arguments": (made(Config, 1.0), "made by code of its own"),
    "a function": (some_function, "it is a function"),
}
"""What would run code of the program, and what the error says."""


# --- tensors --------------------------------------------------------------------------------------------------------


NO_HOOKS: collections.OrderedDict[str, Any] = collections.OrderedDict()


def storage(numbers: int = 4) -> TypedStorage:
    return TypedStorage(wrap_storage=torch.zeros(numbers).untyped_storage(), dtype=torch.float32, _internal=True)


def tensor_v2(*place: Any, requires_grad: Any = False, hooks: Any = NO_HOOKS, flags: tuple[Any, ...] = ()) -> Call:
    return Call(torch_utils._rebuild_tensor_v2, *place, requires_grad, hooks, *flags)


def sparse(layout: Any, *parts: Any) -> Call:
    return Call(torch_utils._rebuild_sparse_tensor, layout, parts)


def quantized(quantizer: Any, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,)) -> Call:
    return Call(torch_utils._rebuild_qtensor, storage(), 0, size, stride, quantizer, False, NO_HOOKS)


def with_state(state: Any, kind: type = torch.Tensor) -> Call:
    return Call(torch._tensor._rebuild_from_type_v2, torch_utils._rebuild_tensor_v2, kind, _PLACE, state)


_PLACE = (storage(), 0, (4,), (1,), False, NO_HOOKS)

TENSORS: dict[str, tuple[Call, str]] = {
    "larger than its storage": (tensor_v2(storage(), 0, (5,), (1,)), "needs 20 bytes"),
    "beyond its storage": (tensor_v2(storage(), 3, (2,), (1,)), "needs 20 bytes"),
    "strides beyond its storage": (tensor_v2(storage(), 0, (2, 2), (3, 1)), "needs 20 bytes"),
    "endless": (tensor_v2(storage(), 0, (1 << 40, 1 << 40), (0, 0)), "needs"),
    "negative size": (tensor_v2(storage(), 0, (-1,), (1,)), "not integers of 0 or more"),
    "negative offset": (tensor_v2(storage(), -1, (1,), (1,)), "not integers of 0 or more"),
    "strides of another number": (tensor_v2(storage(), 0, (1, 1), (1,)), "number of strides"),
    "no storage": (tensor_v2("text", 0, (1,), (1,)), "no storage"),
    "with hooks": (tensor_v2(storage(), 0, (1,), (1,), hooks={"hook": 1}), "other arguments"),
    "other flags": (tensor_v2(storage(), 0, (1,), (1,), flags=({"zero": True},)), "flags"),
    "third form, no dtype": (
        Call(torch_utils._rebuild_tensor_v3, storage(), 0, (1,), (1,), False, NO_HOOKS, "float"),
        "other arguments",
    ),
    "third form, larger type": (
        Call(torch_utils._rebuild_tensor_v3, storage(), 0, (4,), (1,), False, NO_HOOKS, torch.complex128),
        "needs 64 bytes",
    ),
    "quantized, no scheme": (quantized(()), "quantized tensor from other arguments"),
    "quantized, numbers missing": (quantized((torch.per_tensor_affine, 0.5)), "a quantizer"),
    "quantized, unknown scheme": (quantized((torch.per_channel_symmetric, 0.5, 3)), "scheme that is not known"),
    "quantized, larger than its storage": (
        quantized((torch.per_tensor_affine, 0.5, 3), size=(1 << 20,), stride=(0,)),
        "larger than its storage",
    ),
    "quantized, strides beyond its storage": (
        quantized((torch.per_tensor_affine, 0.5, 3), size=(2,), stride=(1 << 20,)),
        "needs",
    ),
    "quantized, scales of another size": (
        quantized((torch.per_channel_affine, torch.ones(3), torch.zeros(3), 0)),
        "scales",
    ),
    "quantized, no such dimension": (quantized((torch.per_channel_affine, torch.ones(4), torch.zeros(4), 1)), "scales"),
    "sparse, parts missing": (sparse(torch.sparse_coo, torch.zeros(1, 1)), "sparse tensor from other arguments"),
    "sparse, no values": (sparse(torch.sparse_coo, torch.zeros(1, 1), "text", (3,)), "no indices, values or size"),
    "sparse, unknown layout": (
        sparse(torch.strided, torch.zeros(1), torch.zeros(1), torch.zeros(1), (3,)),
        "layout that is not known",
    ),
    "meta, negative": (
        Call(torch_utils._rebuild_meta_tensor_no_storage, torch.float32, (-1,), (1,), False),
        "without data",
    ),
    "parameter of a text": (Call(torch_utils._rebuild_parameter, "text", True, NO_HOOKS), "a parameter"),
    "parameter with state, too few": (Call(torch_utils._rebuild_parameter_with_state, torch.zeros(1)), "a parameter"),
    "of a device, no dtype": (
        Call(torch_utils._rebuild_device_tensor_from_cpu_tensor, torch.zeros(1), "float", "cpu", False),
        "on a device",
    ),
    "attributes that are no dict": (with_state([1, 2]), "not a dict"),
    "a method as attribute": (with_state({"numpy": 1}), "must not set"),
    "an attribute that is a tensor": (with_state({"other": torch.zeros(1)}), "not a plain value"),
    "of another class than it has": (with_state({}, torch.nn.Parameter), "another class"),
    "a layout that is none": (Call(torch.serialization._get_layout, "torch.ones"), "is not a layout"),
    "a size of texts": (Call(torch.Size, ["text"]), "torch.Size"),
    "coordinates beyond the size": (sparse(torch.sparse_coo, torch.tensor([[7]]), torch.ones(1), (3,)), "extra"),
    "columns beyond the size": (
        sparse(torch.sparse_csr, torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1), (1, 3)),
        "extra",
    ),
    "rows beyond the values": (
        sparse(torch.sparse_csr, torch.tensor([0, 9]), torch.tensor([0]), torch.ones(1), (1, 3)),
        "extra",
    ),
}
"""Tensors that ``torch.save`` cannot have written, and what the error says."""
