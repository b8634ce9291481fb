"""Forged pickles that no writer makes. Each asks for something harmful.

Owns their bytes. Some are made by hand, opcode by opcode. The others are those of the tests of the unpickler
(:mod:`tests.storage.forged`). Each gets into a file with a valid checksum.
"""

from __future__ import annotations

import collections
import io
import os
import random
import struct
import tempfile
import zipfile
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nested._internal.nested_tensor import NestedTensor

from tests.storage import forged
from tests.storage.forged import Call

__all__ = [
    "CANARY",
    "FORGED",
    "FORGED_METADATA",
    "LARGE",
    "LARGE_METADATA",
    "REGISTERED",
    "archive",
    "framed",
    "metadata_with",
    "random_pickle",
]

CANARY = os.path.join(tempfile.gettempdir(), f"canary-of-hostile-{os.getpid()}")
"""A path that comes to exist if code of a checkpoint is run."""


def framed(opcodes: bytes) -> bytes:
    """A whole pickle: the opcodes between a protocol and an end."""
    return b"\x80\x04" + opcodes + b"."


def archive(pickled: bytes, *, compressed: bool = False) -> bytes:
    """An archive with this pickle, as ``torch.save`` writes it, and with two small storages."""
    buffer = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", b"A" * 16)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def _opcodes(value: object) -> bytes:
    """Of what ``torch.save`` makes of a value. Its first storage is one of four floats."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as saved:
        return saved.read("archive/data.pkl").removeprefix(b"\x80\x02").removesuffix(b".")


def metadata_with(value: bytes) -> bytes:
    """The pickle of a ``Metadata``. The opcodes ``value`` make its ``state_dict_metadata``."""
    return framed(_METADATA + b"Metadata\n" + _state(state_dict_metadata=value))


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _int(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def _put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def _get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def _doubled(kind: bytes, n: int) -> bytes:
    """A value that holds another value twice, which again holds another twice, and so on ``n`` times.

    So a few bytes for each level make 2 ** n leaves.
    """
    steps = [b"K\x01\x85" if kind == b"\x86" else b"]K\x01a", _put(0)]
    for place in range(n):
        steps.append(_get(place) + _get(place) + b"\x86" if kind == b"\x86" else b"](" + _get(place) * 2 + b"e")
        steps.append(_put(place + 1))
    return b"".join(steps) + b"0" * n


def _storage(count: int, kind: str = "FloatStorage", key: str = "0") -> bytes:
    return b"(" + _text("storage") + _named("torch", kind) + _text(key) + _text("cpu") + _int(count) + b"tQ"


def _colliding(n: int) -> bytes:
    modulus = (1 << 61) - 1
    return b"}(" + b"".join(_int(modulus * place) + b"N" for place in range(2, n)) + b"u"


_DEEP = 400_000

FORGED: dict[str, bytes] = {
    # These ask for more memory than there is.
    "memo of 4 billion": b"]" + _put(4_000_000_000),
    "memo in text": b"]p99999999999\n",
    "frame of an exabyte": b"\x95" + struct.pack("<Q", 1 << 60) + b"]",
    "text of an exabyte": b"\x8d" + struct.pack("<Q", 1 << 60),
    "bytes of an exabyte": b"\x8e" + struct.pack("<Q", 1 << 60),
    "number of 2 GiB": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "number of negative length": b"\x8b" + struct.pack("<i", -1),
    "number of 300,000 digits": b"L" + b"9" * 300_000 + b"L\n",
    "text of a list": _doubled(b"]", 40) + _call(_named("builtins", "str"), _get(40)),
    "copies of a list": (
        (b"](" + b"K\x01" * 50_000 + b"e" + _put(0))
        + (b"(" + _call(_named("collections", "deque"), _get(0)) * 4_000 + b"t")
    ),
    # These are nested very deeply.
    "doubled lists": _doubled(b"]", 60),
    "doubled tuple as key": b"}" + _doubled(b"\x86", 60) + b"Ns",
    "doubled tuple in a set": b"\x8f(" + _doubled(b"\x86", 60) + b"\x90",
    "lists nested deeply": b"]" * _DEEP + b"a" * (_DEEP - 1),
    "tuples nested deeply as key": b"}N" + b"\x85" * _DEEP + b"Ns",
    "dicts nested deeply": b"}" + b"N}" * _DEEP + b"s" * _DEEP,
    "marks nested deeply": b"(" * _DEEP + b"t" * _DEEP,
    "numbers that collide": _colliding(60_000),
    "storage of a TiB": _storage(1 << 38),
    "storage that is not there": _storage(4, key="../../7"),
    "storage of a negative length": _storage(-4),
    # These run code.
    "system call, other opcodes": b"(" + _text(CANARY) + b"ios\nmkdir\n",
    "system call by OBJ": b"(" + _named("os", "mkdir") + _text(CANARY) + b"o",
    "system call on the stack": _text("posix") + _text("mkdir") + b"\x93" + _text(CANARY) + b"\x85R",
    "system call behind broken text": b"I0x10\n0" + _call(_named("os", "mkdir"), _text(CANARY)),
    "system call without protocol": b"(" + _text(CANARY) + b"tcos\nmkdir\nR",
    "extension registry": b"\x82\x01",
    "module that is not imported": _call(_named("antigravity", "fly"), b""),
    # These make no sense.
    "nothing": b"",
    "empty stack": b"0000",
    "value that was never remembered": _get(77),
    "list of itself": b"]" + _put(0) + _get(0) + b"a",
    "tuple of itself": b"](" + _put(0) + _get(0) + b"te",
}
"""The forged pickles by name, without PROTO and STOP."""

_CALLS: dict[str, Any] = {
    "list of a range": Call(list, Call(range, 30_000_000)),
    "deque of a range": Call(collections.deque, Call(range, 30_000_000)),
    "bytes of a GiB": Call(bytes, 1 << 30),
    "array whose shape overflows": forged.array((1 << 33, 1 << 33), b"\x00"),
    "array of no elements and many": forged.array((0, 1 << 62, 1 << 61), b"\x00"),
    "system call": Call(os.mkdir, CANARY),
    "evaluation": Call(eval, f"__import__('os').mkdir({CANARY!r})"),
    **forged.MALFORMED,
    **forged.NO_DATA,
    **{
        name: value for name, (value, _) in (forged.MALFORMED_CLASSES | forged.NO_DATA_CLASSES | forged.TENSORS).items()
    },
}
FORGED |= {name: _opcodes({"deep": [value]}) for name, value in _CALLS.items()}

# These use names that torch registers as safe. What they may not do: change classes, join process groups.
REGISTERED = (DeviceMesh, DTensorSpec, Shard, NestedTensor)
FORGED |= {
    f"{how} {value.__qualname__}": opcodes
    for value in REGISTERED
    for how, opcodes in forged.tries_with(value.__module__, value.__qualname__).items()
}

_MANY = 4 << 20
LARGE: dict[str, bytes] = {
    "sets": b"\x8f" * _MANY,
    "sets that are remembered": b"\x8f\x94" * (_MANY // 2),
    "sets behind marks": b"(\x8f" * (_MANY // 2),
    "lists": b"]" * _MANY,
    "dicts": b"}" * _MANY,
    "marks": b"(" * _MANY,
    "tuples in tuples": b"N" + b"\x85" * _MANY,
    "lists in lists": b"]" * _MANY + b"a" * (_MANY - 1),
}
"""Objects that are large themselves, and may take a bounded multiple of that."""

_METADATA = b"ctorch.distributed.checkpoint.metadata\n"


def _state(**attributes: bytes) -> bytes:
    return b")\x81}(" + b"".join(_text(name) + value for name, value in attributes.items()) + b"ub"


def _metadata(storage_data: bytes) -> bytes:
    return _METADATA + b"Metadata\n" + _state(state_dict_metadata=b"}", storage_data=storage_data)


def _place(path: bytes, offset: bytes = b"K\x00") -> bytes:
    named = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
    return named + _state(relative_path=path, offset=offset, length=b"K\x01", transform_descriptors=b"N")


def _index(offset: bytes) -> bytes:
    return _METADATA + b"MetadataIndex\n" + _state(fqn=_text("w"), offset=offset, index=b"N")


_TUPLE, _LIST = _doubled(b"\x86", 60), _doubled(b"]", 60)
_ITEM_TYPE = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"

FORGED_METADATA: dict[str, bytes] = {
    "index that hashes for ever": _metadata(b"}" + _index(_TUPLE) + b"Ns"),
    "index that hashes for ever, in an object": _metadata(
        b"}" + _index(_call(_METADATA + b"StorageMeta\n", _TUPLE)) + b"Ns"
    ),
    "index that prints for ever": _metadata(b"}" + _index(b"N") + _LIST + b"s"),
    "index with an offset that prints for ever": _metadata(
        b"}" + _index(_call(_METADATA + b"StorageMeta\n", _LIST)) + b"Ns"
    ),
    "path that prints for ever": _metadata(b"}" + _index(b"N") + _place(_LIST) + b"s"),
    "offset that prints for ever": _metadata(b"}" + _index(b"N") + _place(_text("a"), _LIST) + b"s"),
    "path that leaves the directory": _metadata(b"}" + _index(b"N") + _place(_text("../../etc/passwd")) + b"s"),
    "enum of a value that hashes for ever": _call(_ITEM_TYPE, _TUPLE),
    "enum of a value that prints for ever": _call(_ITEM_TYPE, _LIST),
    "layout that is a module": _call(b"ctorch.serialization\n_get_layout\n", _text("torch.export")),
    "object of no attributes": _METADATA + b"Metadata\n)\x81",
    "number": b"K\x01",
}
"""The opcodes of whole ``.metadata`` files, by name."""

# A tuple of two tuples, each of two tuples, ... All share their parts, so a few bytes make 2**60 of them.
_SHARED = b"]N\x85\x94" + b"".join(b"h%ch%c\x86\x94" % (place, place) for place in range(60))
_PADDING = b"X" + (3 << 20).to_bytes(4, "little") + b"a" * (3 << 20) + b"\x87"
LARGE_METADATA: dict[str, bytes] = {
    "a dict": _SHARED + b"}h\x3bNs" + _PADDING,
    "a dict that is called": _SHARED + b"c__builtin__\ndict\n)Rh\x3bNs" + _PADDING,
    "an ordered dict": _SHARED + b"ccollections\nOrderedDict\n)Rh\x3bNs" + _PADDING,
    "a set": _SHARED + b"\x8f(h\x3b\x90" + _PADDING,
    "a set that is called": _SHARED + b"c__builtin__\nset\n)R(h\x3b\x90" + _PADDING,
    "a frozenset": _SHARED + b"(h\x3b\x91" + _PADDING,
    "a dict of protocol 0": _SHARED + b"(h\x3bNd" + _PADDING,
    "an index": _SHARED + b"}" + _METADATA + b"MetadataIndex\n)\x81}" + _text("fqn") + b"h\x3bsbNs" + _PADDING,
    "a deep tuple": b"}N" + b"\x85" * (1 << 20) + b"Ns",
}
"""Whole ``.metadata`` files with keys that hash for ever, however large the files are."""

_NAMES = {
    "builtins": "list set bytearray range slice complex getattr frozenset",
    "collections": "OrderedDict defaultdict deque Counter",
    "numpy": "dtype ndarray",
    "torch": "Size float32",
    forged.__name__: "Shaped Point Config",
    "datetime": "datetime",
    "uuid": "UUID",
    "decimal": "Decimal",
    "_io": "BytesIO",
    "argparse": "Namespace",
    "torch._utils": "_rebuild_tensor_v2",
}
_PIECES = [
    *(bytes([code]) for code in b"(.012NQR]}aebdelo)stu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"),
    *(b"K\x01", b"K\x00", b"J\xff\xff\xff\x7f", b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"M\xff\xff", _int(1 << 70)),
    *(_text(""), _text("a"), b"C\x04abcd", b"G@\x09\x21\xfb\x54\x44\x2d\x18", _storage(4), b"(K\x01K\x02t"),
    *(_named(module, name) for module, names in _NAMES.items() for name in names.split()),
]


def random_pickle(chosen: random.Random) -> bytes:
    """Opcodes and names in random order. Each of them is allowed somewhere."""
    return b"".join(chosen.choice(_PIECES) for _ in range(chosen.randrange(1, 40)))
