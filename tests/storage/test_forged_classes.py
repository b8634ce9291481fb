"""Enums, named tuples and dataclasses of the program: data comes back as it was, forged or with code it is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import sys
from typing import Any, NamedTuple

import pytest
import torch

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from tests.storage.test_forged_objects import Call, made
from tests.storage.test_objects import check, load, saved


class Schedule(enum.Enum):
    COSINE = "cosine"
    STEP = (1, (2, 3))


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


some_value = 3


def test_a_member_is_found_by_its_name_as_newer_pythons_pickle_it() -> None:
    assert load(saved(Call(getattr, Schedule, "STEP"))) is Schedule.STEP
    assert load(saved(Call(operator.or_, Kept.WEIGHTS, Kept.RNG))) == Kept.WEIGHTS | Kept.RNG


MALFORMED = {
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


@pytest.mark.parametrize(("forged", "told"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_no_such_class_has_is_corrupt(forged: Call, told: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=told):
        load(saved({"deep": [forged]}))


NO_DATA = {
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
    "a state for a class itself": (Call(collections.OrderedDict, state={"a": 1}), None),
}


@pytest.mark.parametrize(("forged", "told"), NO_DATA.values(), ids=NO_DATA.keys())
def test_what_would_run_code_of_the_program_is_refused_and_says_why(forged: Any, told: str | None) -> None:
    if told is None:
        assert load(saved(forged)).a == 1
        return
    for function in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=told):
            function(saved({"deep": [forged]}))


@pytest.mark.parametrize(
    ("renamed", "told"),
    [("gone", "its module is not imported here"), ("tests.storage.test_forged_classes", "it is not a class here")],
)
def test_a_name_that_the_program_has_not_is_not_looked_for_elsewhere(
    renamed: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(Config(0.1))
    module = sys.modules[Config.__module__]
    if renamed == "gone":
        monkeypatch.delitem(sys.modules, Config.__module__)
    else:
        monkeypatch.setattr(module, "Config", some_value)
    with pytest.raises(UnsafeCheckpoint, match=told):
        load(data)


class Registered:
    """A class with slots and attributes, whose state pickle sets without any code of it."""

    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.slot = 1
        self.attribute = 2


class Remembers:
    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["value"] + 1


def test_a_registered_class_gets_its_state_as_pickle_gives_it() -> None:
    with torch.serialization.safe_globals([Registered, Remembers]):
        loaded = load(saved(Registered()))
        assert (loaded.slot, loaded.attribute) == (1, 2)
        assert load(saved(Remembers())).value == 2
        assert load(saved(Call(Remembers))).value == 1
