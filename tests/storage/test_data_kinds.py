"""Which objects are data: loaded without running code of their classes, and the same ones that a save lets pass."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import pathlib
import pickle
import random
import sys
import types
import uuid
import zipfile
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.records.objects import refusal_of
from tests.storage.test_objects import check, load

T = TypeVar("T")


class Mode(enum.Enum):
    TRAIN = "train"
    PAIR = (1, "b")


class Level(enum.IntEnum):
    LOW = 1


class Name(str, enum.Enum):
    FIRST = "first"


class Part(enum.Flag):
    A = 1
    B = 2
    C = 4


class IntPart(enum.IntFlag):
    A = 1
    B = 2


class Watched(enum.Enum):
    KNOWN = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise SystemError("the enum's code has run")


class Point(NamedTuple):
    x: int
    y: str = "y"


Pair = collections.namedtuple("Pair", "left right")


class PairWithMethods(Pair):
    def total(self) -> int:
        return int(self.left + self.right)


class PairWithNew(Pair):
    def __new__(cls, *values: Any) -> PairWithNew:
        return super().__new__(cls, *values)


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class MoreSettings(Settings):
    steps: int = 1

    def __post_init__(self) -> None:
        self.twice = 2 * self.steps


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    value: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: int = 1


@dataclasses.dataclass
class Boxed(Generic[T]):
    value: T


@dataclasses.dataclass
class WithState:
    value: int = 1

    def __setstate__(self, state: Any) -> None:
        raise SystemError("the dataclass's code has run")


@dataclasses.dataclass
class WithGetattr:
    value: int = 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Own:
    pass


class OwnDict(dict[str, int]):
    pass


def function() -> None:
    """Not data."""


DEFAULTS: collections.defaultdict[str, int] = collections.defaultdict(int, a=1)
WITH_ATTRIBUTE: Any = torch.nn.Linear(2, 2).state_dict()

DATA: list[Any] = [
    DEFAULTS,
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, {1: 2}),
    Mode.TRAIN,
    Mode.PAIR,
    Level.LOW,
    Name.FIRST,
    Part.A,
    Part.A | Part.C,
    Part(0),
    IntPart.A | IntPart.B,
    Watched.KNOWN,
    Point(1),
    Pair(1, 2),
    PairWithMethods(1, 2),
    Settings(2.0, ["a"]),
    MoreSettings(steps=4),
    Frozen(3),
    Slotted(5),
    FrozenSlotted(6),
    Boxed(3),
    argparse.Namespace(mode=Mode.TRAIN, nested=Settings()),
    types.SimpleNamespace(point=Point(2)),
    {(1, ("a", None)): 1, Mode.TRAIN: 2, Point(1): 3, frozenset([1]): 4},
    uuid.UUID(int=5),
    random.getstate(),
    bytearray(),
    b"",
    2**200,
    int,
    np.float32,
    None,
    1.5,
    2**80,
    1 + 2j,
    "text",
    b"bytes",
    bytearray(b"x"),
    range(4),
    slice(1, 2),
    {"list": [1, (2, {3})]},
    collections.OrderedDict(a=1),
    collections.deque([1, 2], maxlen=3),
    collections.Counter("aab"),
    torch.Size([1]),
    torch.float32,
    np.float32(3),
    np.dtype("f4"),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.timedelta(1),
    decimal.Decimal("1.5"),
    pathlib.Path("/x/y"),
    argparse.Namespace(lr=0.1),
    types.SimpleNamespace(step=3),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "CEST"), fold=1),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6),
    Fraction(1, 3),
    decimal.Decimal("-1.5e-7"),
    pathlib.PureWindowsPath("c:/x"),
    np.datetime64("2024-01-02T03", "h"),
    np.timedelta64(25, "s"),
    np.float16(1.5),
    np.dtype(">i8"),
    np.dtype("M8[25s]"),
    np.dtype("U7"),
    slice(None, 3, -1),
]

NOT_DATA: list[tuple[Any, str]] = [
    (function, "function"),
    (len, "builtins.len"),
    (functools.partial(int, base=2), "functools.partial"),
    (Own(), "Own"),
    (OwnDict(a=1), "OwnDict"),
    (PairWithNew(1, 2), "PairWithNew"),
    (WithState(), "__setstate__"),
    (WithGetattr(), "__getattr__"),
    (collections.defaultdict(function), "function"),
    (collections.UserDict(), "UserDict"),
    ({Frozen(): 1}, "key of a dict"),
    (np.zeros(2, dtype=[("a", "i4")]), "numpy.dtype"),
    (torch.nn.Linear(1, 1), "Linear"),
]


def saved(value: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_what_is_data_is_loaded_as_it_was_and_saved_without_a_word(value: Any, protocol: int) -> None:
    data = saved(value, protocol)
    assert refusal_of(data) is None
    loaded = load(data)
    assert type(loaded) is type(value) and loaded == value
    check(data)
    assert torch.load(io.BytesIO(data), weights_only=False) == value  # what a stock planner then makes of it


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("value", "named"), NOT_DATA, ids=lambda value: type(value).__name__)
def test_what_is_no_data_is_refused_by_load_check_and_save_alike(value: Any, named: str, protocol: int) -> None:
    data = saved({"deep": [value]}, protocol)
    refusal = refusal_of(data)
    assert refusal is not None and named in str(refusal)
    for refuse in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=r"'extra' in __0_0\.distcp.*add_safe_globals"):
            refuse(data)


def test_a_class_whose_module_is_not_imported_is_not_imported() -> None:
    pickled = pickle.dumps(Settings(), protocol=2).replace(b"ctests.storage.test_data_kinds\n", b"cantigravity\n")
    with pytest.raises(UnsafeCheckpoint, match="its module is not imported here"):
        load(_archive(pickled))
    assert "antigravity" not in sys.modules


def _watched_of(value: int) -> bytes:
    module = __name__.encode()
    return b"\x80\x02c" + module + b"\nWatched\nK" + bytes([value]) + b"\x85R."


def _archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return buffer.getvalue()


def test_an_enum_is_not_asked_for_a_value_that_it_does_not_have() -> None:
    assert load(_archive(_watched_of(1))) is Watched.KNOWN
    with pytest.raises(CorruptCheckpoint, match="no member"):
        load(_archive(_watched_of(7)))


def _array_state(dtype: np.dtype[Any], flags: int) -> bytes:
    """The pickle of an array of 32 bytes whose dtype is said to have ``flags``."""

    class Forged:
        def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> None:
            self.parts = function, arguments, state

        def __reduce__(self) -> tuple[Any, ...]:
            return self.parts

    function, (code, *rest), state = dtype.__reduce__()  # type: ignore[misc]
    forged = Forged(function, (code, *rest), (*state[:7], flags))
    reconstruct, arguments, _ = np.empty(0).__reduce__()  # type: ignore[misc]
    return pickle.dumps(Forged(reconstruct, arguments, (1, (4,), forged, False, b"A" * 32)), protocol=2)


@pytest.mark.parametrize(("dtype", "flags"), [("O", 0), ("O", 63), ("f8", 63), ("f8", 1), ("S8", 16)])
def test_bytes_never_become_pointers(dtype: str, flags: int) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"flags|list"):
        load(_archive(_array_state(np.dtype(dtype), flags)))


@pytest.mark.parametrize(("dtype", "flags"), [("O", 0), ("f8", 63)])
def test_nor_if_numpy_itself_is_registered_as_megatron_does(dtype: str, flags: int) -> None:
    reconstruct = np.empty(0).__reduce__()[0]
    forged = _array_state(np.dtype(dtype), flags)
    made_bare = b"\x80\x02cnumpy\nndarray\n(K\x04\x85cnumpy\nobject_\nt\x81."
    with torch.serialization.safe_globals(
        [reconstruct, np.ndarray, np.dtype, type(np.dtype("O")), type(np.dtype("f8"))]
    ):
        with pytest.raises(CorruptCheckpoint, match=r"flags|list"):
            load(_archive(forged))
        with pytest.raises(UnsafeCheckpoint):
            load(_archive(made_bare))
        for pickled in (forged, made_bare):
            with pytest.raises(UnsafeCheckpoint, match="numpy"):
                decode_metadata(pickled, ".metadata")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array([b"xy"]),
        np.array(["2024-01-01"], dtype="M8[25s]"),
        np.array([1, None, "x"], dtype=object),
        np.empty((0, 3), dtype=np.float16),
        np.array(True),
        np.array([1 + 2j], dtype=">c16"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_come_back_as_they_were(array: np.ndarray[Any, Any], protocol: int) -> None:
    loaded = load(saved(array, protocol))
    assert loaded.dtype == array.dtype and loaded.shape == array.shape
    assert loaded.tolist() == array.tolist() and loaded.flags.writeable
    assert loaded.flags.f_contiguous == array.flags.f_contiguous
