"""The inputs of the campaign. Each says how a file of a sample is damaged, and how the result is loaded.

Owns the damage. Every forged pickle is put into all places where pickles are read: objects, ``.metadata`` with and
without its checksum, and Megatron's ``common.pt``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from isal import isal_zlib
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import robust_dcp
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.storage.index.form import IndexFile, Section, encode_sections
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES, trailer_of
from robust_dcp.storage.reader import RobustReader
from torture.forged import (
    FORGED,
    FORGED_METADATA,
    LARGE,
    LARGE_METADATA,
    archive,
    framed,
    metadata_with,
    random_pickle,
)
from torture.samples import SAMPLES, Sample, load_megatron

__all__ = ["Input", "all_forged", "random_inputs"]

_BY_NAME = {sample.name: sample for sample in SAMPLES}


@dataclass(frozen=True)
class Input:
    """One trial.

    Attributes:
        group, name: names for the table and for the list of lost trials.
        sample: the sample. A copy of it is damaged.
        damage: changes the directory, and returns the name that a refusal has to contain.
        load: loads the directory.
    """

    group: str
    name: str
    sample: Sample
    damage: Callable[[str], str]
    load: Callable[[str], object]


# What is written into a valid checkpoint, so that everything else in it still fits.


def put_object(directory: str, data: bytes) -> str:
    """Make ``data`` the item of the sample, in its own file, as a stock writer does: without marks of a save."""
    path = os.path.join(directory, ".metadata")
    with open(path, "rb") as file:
        metadata = decode_metadata(file.read(), path)
    for index, info in metadata.storage_data.items():
        if index.fqn == "objects.args":
            place = copy.copy(info)
            place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(data)
            metadata.storage_data[index] = place
    put_file(directory, ".metadata", encode_metadata(metadata)[:-TRAILER_NBYTES])
    put_file(directory, "__0_9.distcp", data)
    return directory


def put_metadata(directory: str, pickled: bytes, *, checksum: bool) -> str:
    """Make ``pickled`` the ``.metadata``."""
    trailer = trailer_of(len(pickled), zlib.crc32(pickled)) if checksum else b""
    return put_file(directory, ".metadata", pickled + trailer)


def put_file(directory: str, name: str, data: bytes) -> str:
    """Write a file of the checkpoint. Returns its path."""
    path = os.path.join(directory, name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def _deflated_zeros(nbytes: int) -> bytes:
    return struct.pack("<BQ", 3, nbytes) + bytes(isal_zlib.compress(bytes(nbytes), 3))


def put_index_bomb(directory: str, section: str) -> str:
    """Make a section of the index announce a GiB, and really have it, with valid checksums."""
    path = os.path.join(directory, INDEX_NAME)
    with open(path, "rb") as file:
        data = file.read()
    index = IndexFile(Disk(), path)
    bomb = _deflated_zeros(1 << 30)
    sections = {
        name: Section.of(name, bomb if name == section else data[start : start + nbytes])
        for name, (start, nbytes) in index.places.items()
        if name != "checksums"
    }
    if section == "shares":  # the share of the only rank
        sections["share_ends"] = Section.of("share_ends", struct.pack("<Q", len(bomb)))
    sections_at = min(start for start, _ in index.places.values())
    (_, head), (_, behind) = encode_sections(sections, index.fit, sections_at)
    return put_file(directory, INDEX_NAME, head + data[len(head) : sections_at] + behind)


def put_places(directory: str, offset: int, length: int) -> str:
    """Change the metadata to say that every item is at ``offset`` and has ``length`` bytes."""
    path = os.path.join(directory, ".metadata")
    with open(path, "rb") as file:
        metadata = decode_metadata(file.read(), path)
    for info in metadata.storage_data.values():
        info.offset, info.length = offset, length
    put_file(directory, ".metadata", encode_metadata(metadata))
    return directory


# These functions load forged checkpoints. There is nothing to compare the result with.


def _load_object(directory: str, **options: Any) -> None:
    wanted: dict[str, object] = {"objects": {"args": None}}
    robust_dcp.load(wanted, checkpoint_id=directory, no_dist=True, **options)


def _load_object_by_stock_planner(directory: str) -> None:
    _load_object(directory, planner=DefaultLoadPlanner())


def _load_bare_by_stock_planner(directory: str) -> None:
    """Load an object that is not in ``torch.save``'s format. The planner decodes it, so an error of torch is right."""
    try:
        _load_object_by_stock_planner(directory)
    except (EOFError, RuntimeError, ValueError) as error:
        if isinstance(error, robust_dcp.RobustCheckpointError) and "Unpickling" not in str(error):
            raise


def _load_metadata(directory: str) -> None:
    RobustReader(directory).read_metadata()


def _forged(name: str, opcodes: bytes) -> Iterator[Input]:
    """A pickle in every place where one is read."""
    bare, in_archive, metadata = framed(opcodes), archive(framed(opcodes)), metadata_with(opcodes)
    by_stock = "stock planner"
    for place, damage, load in (
        ("object", partial(put_object, data=in_archive), _load_object),
        (f"object, {by_stock}", partial(put_object, data=in_archive), _load_object_by_stock_planner),
        ("bare object", partial(put_object, data=bare), _load_object),
        (f"bare object, {by_stock}", partial(put_object, data=bare), _load_bare_by_stock_planner),
        (".metadata, right CRC", partial(put_metadata, pickled=metadata, checksum=True), _load_metadata),
        (".metadata, no CRC", partial(put_metadata, pickled=metadata, checksum=False), _load_metadata),
        ("common.pt", partial(put_file, name="common.pt", data=in_archive), load_megatron),
    ):
        sample = _BY_NAME["Megatron" if place == "common.pt" else "torch layout"]
        yield Input(f"forged pickle: {place}", name, sample, damage, load)


def all_forged() -> Iterator[Input]:
    """Every forged pickle in every place, every special file, every forged head."""
    for name, opcodes in FORGED.items():
        yield from _forged(name, opcodes)
    yield from _special_files()
    yield from _forged_heads()
    yield from _forged_archives()
    sample = _BY_NAME["torch layout"]
    for name, opcodes in FORGED_METADATA.items():
        for checksum in (True, False):
            damage = partial(put_metadata, pickled=framed(opcodes), checksum=checksum)
            words = f"{name}, {'right' if checksum else 'no'} CRC"
            yield Input("forged .metadata", words, sample, damage, _load_metadata)
    for name, opcodes in LARGE.items():
        damage = partial(put_object, data=archive(framed(opcodes)))
        yield Input("large pickle", name, sample, damage, _load_object)
    for name, opcodes in LARGE_METADATA.items():
        damage = partial(put_metadata, pickled=framed(opcodes), checksum=False)
        yield Input("large pickle", f"{name} in .metadata", sample, damage, _load_metadata)
    for offset, length in ((0, 1 << 50), (1 << 50, 100), (0, 1 << 70), (1 << 70, 10)):
        damage = partial(put_places, offset=offset, length=length)
        yield Input("forged place", f"{length} bytes at {offset}", sample, damage, sample.load)


def _socket(path: str) -> None:
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # a socket's name must be short
    try:
        socket.socket(socket.AF_UNIX).bind(os.path.basename(path))
    finally:
        os.chdir(here)


_SPECIAL: dict[str, Callable[[str], object]] = {
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
                damage = partial(_replace, place=place, kind=kind)
                yield Input("special file", f"{kind} as {place}", _BY_NAME[sample], damage, _BY_NAME[sample].load)


def _first(directory: str, place: str) -> str:
    return os.path.join(directory, min(name for name in os.listdir(directory) if place in name))


def _replace(directory: str, place: str, kind: str) -> str:
    path = _first(directory, place)
    os.unlink(path)
    try:
        _SPECIAL[kind](path)
    except PermissionError:  # only root can make devices
        os.mkfifo(path)
    return directory


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
    data_of = {name: struct.pack("<Q", len(head)) + head + bytes(64) for name, head in heads.items()}
    data_of["head of an exabyte"] = struct.pack("<Q", 1 << 60)
    sample = _BY_NAME["safetensors layout"]
    for name, data in data_of.items():
        yield Input("forged head", name, sample, partial(_put_shard, data=data), sample.load)
    megatron, plan = _BY_NAME["Megatron"], _BY_NAME["kept plan"]
    for name, data in {
        "metadata.json nested deeply": b"[" * 200_000,
        "metadata.json without end": b"x" * (2 << 20),
        "metadata.json with other fields": b'{"a": 1}',
        "metadata.json of another type": b'{"sharded_backend": [[[[1]]]]}',
        "empty metadata.json": b"",
    }.items():
        yield Input("forged head", name, megatron, partial(put_file, name="metadata.json", data=data), megatron.load)
    for sample in (plan, _BY_NAME["torch layout"]):
        zeros = partial(put_file, name=INDEX_NAME, data=bytes(5000))
        yield Input("forged head", "index of zeros", sample, zeros, sample.load)
    for section in ("structures", "shares", "meta", "properties"):
        bomb = partial(put_index_bomb, section=section)
        yield Input("forged head", f"index: {section} of a GiB", plan, bomb, plan.load)


def _put_shard(directory: str, data: bytes) -> str:
    return put_file(directory, os.path.basename(_first(directory, ".safetensors")), data)


def _forged_archives() -> Iterator[Input]:
    for name, data in {
        "deflated archive": archive(framed(b"]"), compressed=True),
        "deflated bomb": archive(framed(b"C\x01a" + b"0N" * 50_000_000), compressed=True),
        "zeros": bytes(5000),
        "zeros, then an archive": bytes(100) + archive(framed(b"]"))[100:],
        "tar archive": bytes(257) + b"ustar\x0000" + bytes(2000),
        "archive without a pickle": archive(b"")[:-200],
    }.items():
        torchs, common = _BY_NAME["torch layout"], partial(put_file, name="common.pt", data=data)
        yield Input("forged archive", name, torchs, partial(put_object, data=data), _load_object)
        yield Input("forged archive", f"{name}, common.pt", _BY_NAME["Megatron"], common, load_megatron)


def random_inputs(chosen: random.Random, n: int) -> Iterator[Input]:
    """``n`` pickles of random opcodes, each in one of the places where pickles are read."""
    for _ in range(n):
        opcodes = random_pickle(chosen)
        found = chosen.choice(list(_forged(f"random opcodes {opcodes!r:.200}", opcodes)))
        yield replace(found, group=found.group.replace("forged pickle", "random opcodes"))
