"""The inputs of the campaign. Each says how a file of a sample is damaged, and how the result is loaded.

Owns the damage. Every forged pickle is put into all places where pickles are read: objects, ``.metadata`` with and
without its checksum, and Megatron's ``common.pt``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import robust_dcp
from robust_dcp.storage.reader import RobustReader
from torture.files import (
    archive,
    framed,
    metadata_with,
    put_file,
    put_index_bomb,
    put_metadata,
    put_object,
    put_places,
)
from torture.forged import FORGED, FORGED_METADATA, random_pickle
from torture.samples import SAMPLES, Sample, load_megatron

__all__ = ["Input", "all_forged", "random_inputs"]

_BY_NAME = {sample.name: sample for sample in SAMPLES}


@dataclass(frozen=True)
class Input:
    """One trial.

    Attributes:
        group, name: names for the table and for the list of lost trials.
        sample: the sample. A copy of it is damaged.
        damage: takes the directory and a path that must not come to exist. It changes the directory, and returns the
            name that a refusal has to contain.
        load: loads the directory.
    """

    group: str
    name: str
    sample: Sample
    damage: Callable[[str, str], str]
    load: Callable[[str], None]


# These functions load forged checkpoints. There is nothing to compare the result with.


def _load_object(directory: str) -> None:
    wanted: dict[str, object] = {"objects": {"args": None}}
    robust_dcp.load(wanted, checkpoint_id=directory, no_dist=True)


def _load_by_stock_planner(directory: str) -> None:
    wanted: dict[str, object] = {"objects": {"args": None}}
    robust_dcp.load(wanted, checkpoint_id=directory, planner=DefaultLoadPlanner(), no_dist=True)


def _load_metadata(directory: str) -> None:
    RobustReader(directory).read_metadata()


def _load_common(directory: str) -> None:
    load_megatron(directory)


def _forged(name: str, opcodes: Callable[[str], bytes]) -> Iterator[Input]:
    torchs, megatron = _BY_NAME["torch layout"], _BY_NAME["Megatron"]

    def into_object(directory: str, canary: str) -> str:
        return put_object(directory, archive(framed(opcodes(canary))))

    def put_bare(directory: str, canary: str) -> str:
        return put_object(directory, framed(opcodes(canary)))

    def into_metadata(directory: str, canary: str) -> str:
        return put_metadata(directory, metadata_with(opcodes(canary)), checksum=True)

    def put_unsigned(directory: str, canary: str) -> str:
        return put_metadata(directory, metadata_with(opcodes(canary)), checksum=False)

    def put_common(directory: str, canary: str) -> str:
        return put_file(directory, "common.pt", archive(framed(opcodes(canary))))

    yield Input("forged pickle: object", name, torchs, into_object, _load_object)
    yield Input("forged pickle: object, stock planner", name, torchs, into_object, _load_by_stock_planner)
    yield Input("forged pickle: bare object", name, torchs, put_bare, _load_object)
    yield Input("forged pickle: bare object, stock planner", name, torchs, put_bare, _load_bare_by_stock_planner)
    yield Input("forged pickle: .metadata, right CRC", name, torchs, into_metadata, _load_metadata)
    yield Input("forged pickle: .metadata, no CRC", name, torchs, put_unsigned, _load_metadata)
    yield Input("forged pickle: common.pt", name, megatron, put_common, _load_common)


def _load_bare_by_stock_planner(directory: str) -> None:
    """Load an object that is not in ``torch.save``'s format. The planner decodes it, so an error of torch is right."""
    try:
        _load_by_stock_planner(directory)
    except (EOFError, RuntimeError, ValueError) as error:
        if isinstance(error, robust_dcp.RobustCheckpointError) and "Unpickling" not in str(error):
            raise


def all_forged() -> Iterator[Input]:
    """Every forged pickle in every place, every special file, every forged head."""
    for name, opcodes in FORGED.items():
        yield from _forged(name, opcodes)
    yield from _special_files()
    yield from _forged_heads()


def _socket(path: str) -> None:
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # a socket's name must be short
    try:
        socket.socket(socket.AF_UNIX).bind(os.path.basename(path))
    finally:
        os.chdir(here)


_SPECIAL = {
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "socket": _socket,
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "link to a device": lambda path: os.symlink("/dev/zero", path),
    "link to itself": lambda path: os.symlink(path, path),
    "no file": lambda path: None,
}


def _special_files() -> Iterator[Input]:
    places = {
        "torch layout": (".metadata", ".robust_dcp.index", "__0_0."),
        "safetensors layout": (".metadata", ".safetensors"),
        "kept plan": (".robust_dcp.index",),
        "Megatron": ("common.pt", "metadata.json"),
    }
    for sample, names in places.items():
        for place in names:
            for kind in _SPECIAL:
                damage = _replacing(place, kind)
                yield Input("special file", f"{kind} as {place}", _BY_NAME[sample], damage, _BY_NAME[sample].load)


def _replacing(place: str, kind: str) -> Callable[[str, str], str]:
    def damage(directory: str, canary: str) -> str:
        path = os.path.join(directory, min(name for name in os.listdir(directory) if place in name))
        os.unlink(path)
        try:
            _SPECIAL[kind](path)
        except PermissionError:  # only root can make devices
            os.mkfifo(path)
        return directory

    return damage


def _first_shard(directory: str) -> str:
    return min(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def _forged_heads() -> Iterator[Input]:
    plain = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    shapes = {
        "shape of a million sizes": {**plain, "shape": [1 << 60] * 1_000_000},
        "shape that overflows": {**plain, "shape": [1 << 40, 1 << 40]},
        "offsets of an exabyte": {**plain, "shape": [1 << 58], "data_offsets": [0, 1 << 60]},
        "negative offsets": {**plain, "data_offsets": [-4, 0]},
    }
    heads = {name: json.dumps({"model.large": entry}).encode() for name, entry in shapes.items()}
    heads["JSON nested deeply"] = b'{"a":' * 100_000 + b"}" * 100_000
    heads["number of a million digits"] = b'{"a":' + b"9" * 1_000_000 + b"}"
    heads["no JSON"] = b"\xff" * 100
    sample = _BY_NAME["safetensors layout"]
    for name, head in heads.items():
        yield Input(
            "forged head", name, sample, _with_head(struct.pack("<Q", len(head)) + head + bytes(64)), sample.load
        )
    yield Input("forged head", "head of an exabyte", sample, _with_head(struct.pack("<Q", 1 << 60)), sample.load)
    megatron, plan, torchs = _BY_NAME["Megatron"], _BY_NAME["kept plan"], _BY_NAME["torch layout"]
    for name, data in {
        "metadata.json nested deeply": b"[" * 200_000,
        "metadata.json without end": b"x" * (2 << 20),
        "metadata.json with other fields": b'{"a": 1}',
        "metadata.json of another type": b'{"sharded_backend": [[[[1]]]]}',
        "empty metadata.json": b"",
    }.items():
        yield Input("forged head", name, megatron, _with_file("metadata.json", data), megatron.load)
    for sample in (plan, torchs):
        yield Input("forged head", "index of zeros", sample, _with_file(".robust_dcp.index", bytes(5000)), sample.load)
    for section in ("structures", "shares", "meta", "properties"):
        yield Input("forged head", f"index: {section} of a GiB", plan, _with_index_bomb(section), plan.load)
    bomb = archive(framed(b"C\x01a" + b"0N" * 50_000_000), compressed=True)
    for name, data in {
        "deflated archive": archive(framed(b"]"), compressed=True),
        "deflated bomb": bomb,
        "zeros": bytes(5000),
        "zeros, then an archive": bytes(100) + archive(framed(b"]"))[100:],
        "tar archive": bytes(257) + b"ustar\x0000" + bytes(2000),
        "archive without a pickle": archive(b"")[:-200],
    }.items():
        yield Input("forged archive", name, torchs, _with_object(data), _load_object)
        yield Input("forged archive", f"{name}, common.pt", megatron, _with_file("common.pt", data), _load_common)
    for name, opcodes in FORGED_METADATA.items():
        for checksum in (True, False):
            damage = _with_metadata(framed(opcodes), checksum)
            yield Input(
                "forged .metadata", f"{name}, {'right' if checksum else 'no'} CRC", torchs, damage, _load_metadata
            )
    for name, offset, length in (
        ("longer than its file", 0, 1 << 50),
        ("behind its file", 1 << 50, 100),
        ("of a length that overflows", 0, 1 << 70),
        ("at an offset that overflows", 1 << 70, 10),
    ):
        yield Input("forged place", name, torchs, _with_places(offset, length), torchs.load)


def _with_head(data: bytes) -> Callable[[str, str], str]:
    return lambda directory, canary: put_file(directory, _first_shard(directory), data)


def _with_file(name: str, data: bytes) -> Callable[[str, str], str]:
    return lambda directory, canary: put_file(directory, name, data)


def _with_index_bomb(section: str) -> Callable[[str, str], str]:
    return lambda directory, canary: put_index_bomb(directory, section)


def _with_metadata(pickled: bytes, checksum: bool) -> Callable[[str, str], str]:
    return lambda directory, canary: put_metadata(directory, pickled, checksum=checksum)


def _with_object(data: bytes) -> Callable[[str, str], str]:
    return lambda directory, canary: put_object(directory, data)


def _with_places(offset: int, length: int) -> Callable[[str, str], str]:
    return lambda directory, canary: put_places(directory, offset, length)


# Random damage.


def random_inputs(chosen: random.Random, n: int) -> Iterator[Input]:
    """``n`` inputs: half of them are random damage, and half are pickles of random opcodes."""
    for number in range(n):
        if number % 2:
            opcodes = random_pickle(chosen)
            inputs = list(_forged(f"random opcodes {opcodes!r:.200}", lambda _, opcodes=opcodes: opcodes))  # type: ignore[misc]
            found = chosen.choice(inputs)
            yield Input(found.group.replace("forged pickle", "random opcodes"), *_rest(found))
        else:
            yield _damaged(chosen)


def _rest(found: Input) -> tuple[str, Sample, Callable[[str, str], str], Callable[[str], None]]:
    return found.name, found.sample, found.damage, found.load


_DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {}


def _damage(function: Callable[[bytearray, random.Random], None]) -> Callable[[bytearray, random.Random], None]:
    _DAMAGES[function.__name__.strip("_").replace("_", " ")] = function
    return function


@_damage
def _bits_flipped(data: bytearray, chosen: random.Random) -> None:
    for _ in range(chosen.choice((1, 1, 1, 2, 8))):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)


@_damage
def _cut_short(data: bytearray, chosen: random.Random) -> None:
    del data[chosen.randrange(len(data)) :]


@_damage
def _range_zeroed(data: bytearray, chosen: random.Random) -> None:
    start, nbytes = chosen.randrange(len(data)), chosen.choice((1, 16, 512, 4096, 65_536))
    data[start : start + nbytes] = bytes(len(data[start : start + nbytes]))


@_damage
def _blocks_swapped(data: bytearray, chosen: random.Random) -> None:
    nbytes = min(chosen.choice((16, 512, 4096)), len(data) // 2)
    one = chosen.randrange(len(data) - 2 * nbytes + 1)
    other = chosen.randrange(one + nbytes, len(data) - nbytes + 1)
    first, second = data[one : one + nbytes], data[other : other + nbytes]
    data[one : one + nbytes], data[other : other + nbytes] = second, first


@_damage
def _bytes_made_random(data: bytearray, chosen: random.Random) -> None:
    for _ in range(chosen.randrange(1, 64)):
        data[chosen.randrange(len(data))] = chosen.randrange(256)


@_damage
def _bytes_added(data: bytearray, chosen: random.Random) -> None:
    data += chosen.randbytes(chosen.choice((1, 100, 5000)))


_DAMAGED_FILES = {
    "torch layout": (".metadata", ".robust_dcp.index", "__0_0.", "__0_1.", "__0_2."),
    "safetensors layout": (".metadata", ".safetensors", ".distcp"),
    "stock checkpoint": ("__0_0.distcp",),
    "kept plan": (".robust_dcp.index",),
    "Megatron": ("common.pt", "metadata.json"),
}
"""The ``.metadata`` of a stock checkpoint is left out. It has no checksum, so some damage cannot be noticed."""


def _damaged(chosen: random.Random) -> Input:
    sample = chosen.choice(SAMPLES)
    suffix = chosen.choice(_DAMAGED_FILES[sample.name])
    kind = chosen.choice(list(_DAMAGES))
    seed = chosen.randrange(1 << 30)

    def damage(directory: str, canary: str) -> str:
        path = os.path.join(directory, min(name for name in os.listdir(directory) if suffix in name))
        with open(path, "rb") as file:
            data = bytearray(file.read())
        if data:
            _DAMAGES[kind](data, random.Random(seed))
        with open(path, "wb") as file:
            file.write(data)
        return directory

    return Input(f"{sample.name}: {kind}", f"{suffix}, seed {seed}", sample, damage, sample.load)
