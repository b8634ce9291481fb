"""Reads both formats of ``torch.save`` as data: the pickle, and the storages that it names.

This module finds pickle and storages, and checks that each storage has the length that the pickle gives. ``objects``
calls it.

| format | what |
| --- | --- |
| zip | members ``data.pkl``, ``byteorder``, ``data/0``, ``data/1``, …; stored, not compressed |
| legacy | four pickles (magic number, version, system, value), one of storage keys, the storages; before torch 1.6 |
"""

from __future__ import annotations

import struct
import sys
from typing import Any, Final

import torch
from torch.storage import TypedStorage, UntypedStorage

from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.data.limits import Malformed, NotData, check_depth
from robust_dcp.storage.records.data.machine import Machine
from robust_dcp.storage.records.data.names import Names
from robust_dcp.storage.records.parse_record import ZipMember, zip_members

__all__ = ["ZIP_MAGIC", "OtherFormat", "is_program", "load_data"]

ZIP_MAGIC: Final = b"PK\x03\x04"

_TORCHSCRIPT_MEMBER: Final = (
    b"/constants.pkl"  # torch.load recognises a program by this member, and would start to load it
)
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION: Final = 1001
_LENGTH: Final = struct.Struct("<q")


class OtherFormat(Malformed):
    """A pickle of plain data that is not from ``torch.save``. ``torch.load`` stops after it."""


def load_data(data: bytes) -> Any:
    """The value that ``torch.save`` has written into ``data``, with its tensors on the CPU.

    Raises:
        NotData: it needs something that is not known to be data.
        Malformed, and nearly anything else: these are not the bytes of a ``torch.save``.
    """
    value = _load_zip(data) if data[:4] == ZIP_MAGIC else _load_legacy(data)
    check_depth(value)
    return value


def is_program(data: bytes) -> bool:
    """Whether a zip archive is a TorchScript program. Its members may be compressed."""
    return _TORCHSCRIPT_MEMBER in data


def _load_zip(data: bytes) -> Any:
    try:
        members = zip_members(data)
    except ValueError:
        if is_program(data):
            raise NotData("a TorchScript archive", "a program") from None
        raise
    if _TORCHSCRIPT_MEMBER[1:].decode() in members:
        raise NotData("a TorchScript archive", "a program")
    if "data.pkl" not in members:
        raise Malformed("the archive has no data.pkl")
    order = members.get("byteorder")
    is_swapped = order is not None and _contents(data, order) != sys.byteorder.encode()
    storages: dict[str, TypedStorage] = {}

    def storage_of(persistent_id: Any) -> TypedStorage:
        kind, key, nbytes = _checked_id(persistent_id, 5)
        if key not in storages:
            member = members.get(f"data/{key}")
            if member is None or member.nbytes != nbytes:
                found = "no such storage" if member is None else f"one of {member.nbytes} bytes"
                raise Malformed(f"the pickle names storage {key[:40]!r} of {nbytes} bytes, the archive has {found}")
            untyped = _storage_of(_contents(data, member))
            if is_swapped:
                untyped.byteswap(_dtype_of(kind))
            storages[key] = _typed(untyped, kind)
        return storages[key]

    machine = Machine(bytes(_contents(data, members["data.pkl"])), 0, Names(), storage_of)
    value = machine.run()
    machine.make_checks()
    return value


def _contents(data: bytes, member: ZipMember) -> memoryview:
    """The bytes of a member. They are compared with their checksum if there is one."""
    found = memoryview(data)[member.offset : member.offset + member.nbytes]
    if member.crc32 not in (0, crc32(found)):
        raise Malformed("a member of the archive does not have the CRC-32 that was written with it")
    return found


def _load_legacy(data: bytes) -> Any:
    names = Names()
    machine = Machine(data, 0, names)
    if machine.run() != _LEGACY_MAGIC:
        raise OtherFormat("it does not begin as a file of torch.save")
    machine = Machine(data, machine.at, names)
    if machine.run() != _LEGACY_VERSION:
        raise Malformed("it is of an unknown version of torch.save")
    machine = Machine(data, machine.at, names)
    machine.run()  # this pickle holds byte order and sizes of integers of the machine that wrote the file
    storages: dict[str, TypedStorage] = {}
    left = [len(data)]

    def storage_of(persistent_id: Any) -> TypedStorage:
        kind, key, nbytes = _checked_id(persistent_id, 6)
        if persistent_id[5] is not None:
            raise NotData("a view of a storage", "which torch.save has not written since 0.4")
        if key not in storages:
            left[0] -= nbytes
            if left[0] < 0:
                raise Malformed(f"the pickle names storages of more bytes than the {len(data)} that there are")
            storages[key] = _typed(UntypedStorage(nbytes), kind)
        return storages[key]

    machine = Machine(data, machine.at, names, storage_of)
    value = machine.run()
    keys = Machine(data, machine.at, names)
    _fill(storages, keys.run(), data, keys.at)
    machine.make_checks()
    return value


def _fill(storages: dict[str, TypedStorage], keys: Any, data: bytes, at: int) -> None:
    """Fill each storage of the legacy format. The file holds its length in elements, then its bytes."""
    if type(keys) is not list or not all(type(key) is str for key in keys) or set(keys) != storages.keys():
        raise Malformed("the storages that follow are not those that the pickle names")
    for key in keys:
        storage = storages[key]._untyped_storage
        (count,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if count * storages[key].dtype.itemsize != storage.nbytes() or at + storage.nbytes() > len(data):
            raise Malformed(f"storage {key[:40]!r} has another length than the pickle says")
        if storage.nbytes():
            storage.copy_(_storage_of(memoryview(data)[at : at + storage.nbytes()]))
        at += storage.nbytes()


def _checked_id(persistent_id: Any, length: int) -> tuple[Any, str, int]:
    """(storage class, key, bytes) of ``("storage", class, key, location, elements)``."""
    if type(persistent_id) is not tuple or len(persistent_id) != length or persistent_id[0] != "storage":
        raise Malformed("a persistent id names no storage")
    _, kind, key, location, count = persistent_id[:5]
    if type(key) is not str or type(location) is not str or type(count) is not int or not 0 <= count < 1 << 56:
        raise Malformed("a persistent id names no storage")
    return kind, key, count * _dtype_of(kind).itemsize


def _dtype_of(kind: Any) -> torch.dtype:
    dtype = torch.uint8 if kind is UntypedStorage else getattr(kind, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise Malformed("a persistent id does not name a class of storages")
    return dtype


def _typed(storage: UntypedStorage, kind: Any) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=_dtype_of(kind), _internal=True)


def _storage_of(data: memoryview) -> UntypedStorage:
    """A storage with a copy of ``data``, so that changes of a tensor do not change the bytes that were read."""
    if not data.nbytes:
        return UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
