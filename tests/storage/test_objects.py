"""Objects in a checkpoint are loaded as they were if they are data, and run nothing if they are not.

What counts as data is the same for a load, for a check and for a save.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import operator
import os
import pathlib
import pickle
import random
import struct
import sys
import tarfile
import types
import uuid
import zipfile
import zoneinfo
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import _utils as torch_utils

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.records.objects import check_object, load_object, refusal_of
from tests.harness.fingerprints import differences
from tests.storage import forged
from tests.storage.forged import (
    MALFORMED,
    MALFORMED_CLASSES,
    NO_DATA,
    NO_DATA_CLASSES,
    TENSORS,
    Call,
    Config,
    Kept,
    Point,
    Precision,
    Schedule,
    Slotted,
)
from tests.storage.forged import Frozen as FrozenSlotted

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

T = TypeVar("T")


def saved(value: Any, protocol: int = 2, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol, **options)
    return buffer.getvalue()


def load(data: bytes, **options: Any) -> Any:
    return load_object(data, file="__0_0.distcp", item="extra", **options)


def check(data: bytes) -> None:
    check_object(data, file="__0_0.distcp", item="extra")


# --- what is data -----------------------------------------------------------------------------------------------------


class Name(str, enum.Enum):
    FIRST = "first"


class IntPart(enum.IntFlag):
    A = 1
    B = 2


Pair = collections.namedtuple("Pair", "left right")


class PairWithMethods(Pair):
    def total(self) -> int:
        return int(self.left + self.right)


@dataclasses.dataclass
class MoreConfig(Config):
    steps: int = 1

    def __post_init__(self) -> None:
        self.twice = 2 * self.steps


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int = 1


@dataclasses.dataclass
class Boxed(Generic[T]):
    value: T


class Reduced:
    """Is pickled as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


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


ZONES = [zoneinfo.ZoneInfo(key) for key in ("Europe/Berlin", "UTC") if key in zoneinfo.available_timezones()]

DATA: list[Any] = [
    collections.defaultdict(int, a=1),
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, {1: 2}),
    *Schedule,
    Precision.BF16,
    Name.FIRST,
    Kept.WEIGHTS,
    Kept.WEIGHTS | Kept.RNG,
    Kept(0),
    IntPart.A | IntPart.B,
    Point(1, 2),
    Pair(1, 2),
    PairWithMethods(1, 2),
    Config(2.0, ["a"]),
    MoreConfig(0.5, steps=4),
    Frozen(3),
    Slotted(5.0),
    FrozenSlotted(6.0),
    Boxed(3),
    argparse.Namespace(mode=Schedule.COSINE, nested=Config(0.1)),
    types.SimpleNamespace(point=Point(2, 3)),
    {(1, ("a", None)): 1, Schedule.COSINE: 2, Point(1, 2): 3, frozenset([1]): 4},
    uuid.UUID(int=5),
    random.getstate(),
    bytearray(),
    b"",
    2**200,
    int,
    np.float32,
    None,
    1.5,
    1 + 2j,
    "text",
    b"bytes",
    bytearray(b"x"),
    range(4),
    {"list": [1, (2, {3})]},
    collections.OrderedDict(a=1),
    collections.deque([1, 2], maxlen=3),
    collections.Counter("aab"),
    torch.Size([1]),
    torch.float32,
    np.float32(3),
    np.dtype("f4"),
    datetime.datetime(2024, 1, 2),
    datetime.timedelta(1),
    pathlib.Path("/x/y"),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "CEST"), fold=1),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
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
    *(datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zone, fold=fold) for zone in ZONES for fold in (0, 1)),
    *({"zone": zone} for zone in ZONES),
]

NOT_DATA: list[tuple[Any, str]] = [
    (len, "builtins.len"),
    (functools.partial(int, base=2), "functools.partial"),
    (Reduced(zoneinfo.ZoneInfo._unpickle, ("Nowhere/Here", 1)), "a time zone that this host does not know"),
    (Reduced(zoneinfo.ZoneInfo.from_file, ("/etc/passwd",)), "builtins.getattr"),
    (Own(), "Own"),
    (OwnDict(a=1), "OwnDict"),
    (WithState(), "__setstate__"),
    (WithGetattr(), "__getattr__"),
    (collections.UserDict(), "UserDict"),
    ({Frozen(): 1}, "key of a dict"),
    (np.zeros(2, dtype=[("a", "i4")]), "numpy.dtype"),
    (torch.nn.Linear(1, 1), "Linear"),
]


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
    pickled = pickle.dumps(Config(0.1), protocol=2).replace(f"c{Config.__module__}\n".encode(), b"cantigravity\n")
    with pytest.raises(UnsafeCheckpoint, match="its module is not imported here"):
        load(_archive(pickled))
    assert "antigravity" not in sys.modules


def _archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return buffer.getvalue()


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


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_stream_comes_back_with_its_position(position: int) -> None:
    stream = io.BytesIO(b"abc")
    stream.seek(position)
    loaded = load(saved(stream))
    assert (loaded.getvalue(), loaded.tell()) == (b"abc", position)


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


# --- tensors within objects -------------------------------------------------------------------------------------------


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.partition = {"dim": 1, "name": "columns"}  # type: ignore[attr-defined]
    tensor.sizes = torch.Size([2])  # type: ignore[attr-defined]
    return tensor


def matrix() -> torch.Tensor:
    return torch.tensor([[0.0, 1.5, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0]])


def quantized_by_channel(dtype: torch.dtype, zeros: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(matrix(), torch.tensor([0.1, 0.5]), zeros, 0, dtype)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: matrix().t(),
    "a slice": lambda: matrix()[1:, 1:3],
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3),
    "uint16, whose storage has no type": lambda: torch.tensor([1, 2], dtype=torch.uint16),
    "float8": lambda: matrix().to(torch.float8_e4m3fn),
    "needs a gradient": lambda: matrix().requires_grad_(),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "coordinates": lambda: matrix().to_sparse(),
    "coordinates that are not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "compressed rows": lambda: matrix().to_sparse_csr(),
    "compressed columns": lambda: matrix().to_sparse_csc(),
    "compressed rows of blocks": lambda: matrix().to_sparse_bsr((2, 2)),
    "compressed columns of blocks": lambda: matrix().to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(matrix(), 0.5, 3, torch.qint8),
    "quantized by channel": lambda: quantized_by_channel(torch.qint8, torch.tensor([1, 2])),
    "quantized by channel, zeros between numbers": lambda: quantized_by_channel(torch.quint8, torch.tensor([0.5, 1.5])),
    "meta": lambda: torch.empty(1 << 40, 3, device="meta"),
    "parameter": lambda: torch.nn.Parameter(matrix(), requires_grad=False),
    "parameter with attributes": lambda: with_attribute(torch.nn.Parameter(matrix())),
    "tensor with attributes": lambda: with_attribute(matrix()),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_tensor_is_loaded_as_it_was_saved(make: Callable[[], torch.Tensor]) -> None:
    value = make()
    loaded = load(saved(value))
    assert type(loaded) is type(value)
    assert (loaded.dtype, loaded.shape, loaded.layout, loaded.requires_grad, loaded.__dict__) == (
        value.dtype,
        value.shape,
        value.layout,
        value.requires_grad,
        value.__dict__,
    )
    if value.layout is torch.strided:
        assert (loaded.stride(), loaded.is_conj(), loaded.is_neg()) == (value.stride(), value.is_conj(), value.is_neg())
    if value.is_meta:
        assert loaded.is_meta
    else:
        dense = [each if each.layout is torch.strided else each.to_dense() for each in (value, loaded)]
        assert differences(*dense) == []


@pytest.mark.parametrize(
    "value",
    [torch.device("cuda", 3), torch.device("cpu"), torch.sparse_csr, torch.per_channel_affine],
    ids=str,
)
def test_constants_of_torch_are_data(value: Any) -> None:
    assert load(saved({"constant": value})) == {"constant": value}


def test_tensors_that_share_memory_share_it_again() -> None:
    base = torch.zeros(4)
    loaded = load(saved([base, base[1:3]]))
    loaded[0][2] = 5.0
    assert loaded[1].tolist() == [0.0, 5.0]


def rewritten(data: bytes, **members: bytes | None) -> bytes:
    """The archive with other contents of some members, by the end of their names; ``None`` leaves one out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            key = name.partition("/")[2]
            content = members.get(key, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return buffer.getvalue()


def test_a_checkpoint_of_a_machine_with_the_other_byte_order_is_read() -> None:
    value = torch.tensor([1.5, -2.0])
    swapped = value.numpy().astype(">f4").tobytes()
    data = rewritten(saved(value), byteorder=b"big", **{"data/0": swapped})
    assert torch.equal(torch.load(io.BytesIO(data)), value)
    assert torch.equal(load(data), value)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"data/0": None}, "no such storage"),
        ({"data/0": b"1234"}, "one of 4 bytes"),
        ({"data.pkl": None}, "no data.pkl"),
        ({"byteorder": b""}, "in which order its bytes are"),
    ],
)
def test_an_archive_without_what_its_pickle_names_is_corrupt(members: dict[str, bytes | None], why: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=why):
        load(rewritten(saved(torch.ones(4)), **members))


def test_an_archive_whose_members_lie_over_each_other_is_corrupt() -> None:
    """A small one could else have any number of large members."""
    data = bytearray(saved([torch.ones(4), torch.zeros(4)]))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        one, other = (each.header_offset for each in archive.infolist() if "/data/" in each.filename)
        directory = archive.start_dir
    place = data.index(struct.pack("<I", other), directory)
    data[place : place + 4] = struct.pack("<I", one)
    with pytest.raises(CorruptCheckpoint, match="lie over each other"):
        load(bytes(data))


# --- what runs nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "save",
    [
        saved,
        lambda value: saved(value, 4),
        lambda value: saved(value, _use_new_zipfile_serialization=False),
        pickle.dumps,
    ],
    ids=["zip", "protocol 4", "before torch 1.6", "bare pickle"],
)
@pytest.mark.parametrize("wrapped", [lambda value: value, lambda value: {"deep": [collections.deque([value])]}])
def test_code_is_refused_and_not_run(
    save: Callable[[Any], bytes], wrapped: Callable[[Any], Any], tmp_path: Path
) -> None:
    data = save(wrapped(Call(os.mkdir, str(tmp_path / "ran"))))
    for function in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=r"(posix\.mkdir|before 1\.6).*add_safe_globals.*trusted=True"):
            function(data)
    assert not (tmp_path / "ran").exists()


def test_a_trusted_object_may_run_code(tmp_path: Path) -> None:
    load(saved(Call(os.mkdir, str(tmp_path / "ran"))), trusted=True)
    assert (tmp_path / "ran").is_dir()


def test_a_program_is_refused() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    with pytest.raises(UnsafeCheckpoint, match="TorchScript"):
        check(buffer.getvalue())


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return buffer.getvalue()


def tar_without_magic() -> bytes:
    """As the first versions of tar wrote it. ``torch.load`` of such a file unpickles its members."""
    data = bytearray(tar())
    data[257:512] = bytes(255)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


OLD = {
    "tar": tar(),
    "tar without magic": tar_without_magic(),
    "before torch 1.6": saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False),
    "text": pickle.dumps([1.5, "a"], protocol=0),
    "text that is code": b"I0x10\n0cos\nsystem\n.",  # a number as Python's unpickler reads it, and others do not
    "opcodes of Python 2": b"\x80\x02U\x01a.",
}


@pytest.mark.parametrize("data", OLD.values(), ids=OLD.keys())
def test_formats_that_dcp_never_wrote_are_refused(data: bytes) -> None:
    for function in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=r"item 'extra' in __0_0\.distcp asks for .*trusted=True"):
            function(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"raw", b'{"json": 1}', bytes(range(256)), b"PK", b"RIFF", b"lr: 0.1\n", b"Some\n", pickle.dumps([1, "a"])],
)
def test_bytes_that_torch_cannot_read_are_the_planners_business(data: bytes) -> None:
    check(data)
    with pytest.raises(CorruptCheckpoint, match=r"'extra' in __0_0\.distcp"):
        load(data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_cannot_change_the_classes_that_it_names(protocol: int) -> None:
    # BUILD with a pair of states calls setattr: here on the class Namespace itself.
    state = pickle.NONE + b"}X\x08\0\0\0__init__cbuiltins\nlist\ns" + pickle.TUPLE2
    named = b"cargparse\nNamespace\n"
    attack = pickle.PROTO + bytes([protocol]) + named + state + pickle.BUILD + pickle.STOP
    before = argparse.Namespace.__init__
    with pytest.raises(UnsafeCheckpoint, match=r"Namespace\.__init__"):
        check(attack)
    assert argparse.Namespace.__init__ is before
    assert argparse.Namespace(a=1).a == 1


REFUSED: dict[str, tuple[Any, Any, str]] = {
    **{name: (value, CorruptCheckpoint, "extra") for name, value in MALFORMED.items()},
    **{name: (value, UnsafeCheckpoint, "extra") for name, value in NO_DATA.items()},
    **{name: (value, CorruptCheckpoint, words) for name, (value, words) in MALFORMED_CLASSES.items()},
    **{name: (value, UnsafeCheckpoint, words) for name, (value, words) in NO_DATA_CLASSES.items()},
    **{name: (value, (CorruptCheckpoint, UnsafeCheckpoint), words) for name, (value, words) in TENSORS.items()},
}


@pytest.mark.parametrize(("value", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_writer_makes_is_refused_and_says_why(value: Any, error: Any, words: str) -> None:
    data = saved({"deep": [value]})
    with pytest.raises(error, match=words):
        load(data)
    if error is UnsafeCheckpoint:
        assert refusal_of(data) is not None
        with pytest.raises(UnsafeCheckpoint, match=words):
            check(data)


def test_a_member_is_found_by_its_name_as_newer_pythons_pickle_it() -> None:
    assert load(saved(Call(getattr, forged.Schedule, "STEP"))) is forged.Schedule.STEP
    flags = Call(operator.or_, forged.Kept.WEIGHTS, forged.Kept.RNG)
    assert load(saved(flags)) == forged.Kept.WEIGHTS | forged.Kept.RNG


def test_a_tensor_of_another_device_comes_to_the_cpu() -> None:
    on_xla = (torch.ones(3), torch.float64, "xla:0", True)
    loaded = load(saved(Call(torch_utils._rebuild_device_tensor_from_cpu_tensor, *on_xla)))
    assert loaded.requires_grad and torch.equal(loaded.detach(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("how", ["its module is not imported here", "it is not a class here"])
def test_a_name_that_the_program_has_not_is_not_looked_for_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(forged.Config(0.1))
    if "imported" in how:
        monkeypatch.delitem(sys.modules, forged.__name__)
    else:
        monkeypatch.setattr(forged, "Config", 3)
    with pytest.raises(UnsafeCheckpoint, match=how):
        load(data)


def test_bytes_never_become_pointers_even_if_numpy_itself_is_registered_as_megatron_does() -> None:
    types = [type(np.dtype("O")), type(np.dtype("f8"))]
    with torch.serialization.safe_globals([forged.RECONSTRUCT, np.ndarray, np.dtype, *types]):
        for value in (forged.array((4,), b"A" * 32, forged.dtype("O8")), forged.made(np.ndarray, (4,), np.object_)):
            with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint)):
                load(saved(value))
            with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint), match=r"numpy|dtype 'O8'"):
                decode_metadata(pickle.dumps(value, 2), ".metadata")
