"""Items that are not tensors (DCP's BYTE_IO): loads them as data, or checks them before somebody else loads them.

This module decides which objects are refused, by one rule for saving, checking and loading, and whether two are equal
as values. It makes the errors that name file and item. A planner that gets the bytes calls ``torch.load`` with
``weights_only=False``, as DCP's planner does. So bytes that would run code, or ask for memory that they do not fill,
must be found here.

An object is an archive of ``torch.save``: members ``data.pkl``, ``byteorder``, ``data/0``, ``data/1``, …; stored, not
compressed. ``torch.load`` would also read what torch wrote before 1.6, tar archives, and programs. DCP has never
written those, so they are refused, and so is any other pickle that could do harm.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import sys
import tarfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, UnsafeCheckpoint, user_frames
from robust_dcp.staging.blocks import flat_bytes, to_host
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.kinds import Malformed, NotAPickle, NotData, check_depth, expect, is_generated
from robust_dcp.storage.records.record import ZIP_MAGIC, ZipMember, zip_members
from robust_dcp.storage.records.torch_kinds import storage_of
from robust_dcp.storage.records.unpickler import Unpickler

_HOW_TO_ALLOW: Final = (
    "if you trust it, register the class with torch.serialization.add_safe_globals([...]), or pass trusted=True to "
    "load whatever the checkpoint holds"
)
_LARGE_NBYTES: Final = 64 << 10
_ZIP_END_MAGIC: Final = b"PK\x05\x06"
_ZIP_END_NBYTES: Final = 22
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_TORCHSCRIPT_MEMBER: Final = b"/constants.pkl"  # torch.load recognises a program by it, and would start to load it


class ObjectBytes(io.BytesIO):
    """The bytes of an object that go to a planner, and the file that they come from.

    The reader trusts them, or :func:`check_object` has passed them.
    """

    def __init__(self, data: bytes, file: str) -> None:
        super().__init__(data)
        self.file = file


def load_object(data: bytes | io.BytesIO, *, file: str, item: str, trusted: bool = False) -> Any:
    """Load an object that ``torch.save`` wrote, if it consists of data only.

    Args:
        data: the item's bytes.
        file, item: where they come from, for errors.
        trusted: load with ``torch.load(weights_only=False)``, which runs any code that the bytes name.

    Returns:
        The object, with its tensors on the CPU.

    Raises:
        UnsafeCheckpoint: it needs a class that is neither known to be data nor registered by the user, or it is of a
            format of torch that is not read.
        CorruptCheckpoint: these are not the bytes of a ``torch.save``, or they ask for more memory than they fill.
    """
    view = data.getvalue() if isinstance(data, io.BytesIO) else data
    try:
        if trusted:
            return torch.load(io.BytesIO(view), map_location="cpu", weights_only=False)
        value = _unpickler_of(view).load() if view[:4] == ZIP_MAGIC else _refuse_other(view)
        check_depth(value)
        return value
    except NotData as error:
        raise UnsafeCheckpoint(
            f"item {item!r} in {file} asks for {error}, and is refused; {_HOW_TO_ALLOW}", file=file, what=error.what
        ) from error
    except Exception as error:  # broken bytes raise all kinds of errors
        raise not_an_object(error, file=file, item=item) from error


def check_object(data: bytes | io.BytesIO, *, file: str, item: str) -> None:
    """Make sure that ``torch.load(weights_only=False)`` of ``data`` runs no code, and takes no more memory than
    ``data`` fills.

    Bytes that ``torch.load`` cannot read in any of its formats pass, because a planner may have its own format.

    Raises:
        UnsafeCheckpoint, CorruptCheckpoint: as :func:`load_object`.
    """
    view = data.getvalue() if isinstance(data, io.BytesIO) else data
    is_torchs = view[:4] == ZIP_MAGIC or view[-_ZIP_END_NBYTES:][:4] == _ZIP_END_MAGIC
    is_lost = bool(view) and not view.strip(b"\0")  # after a power cut a file system may return zeros
    try:
        load_object(view, file=file, item=item)
    except CorruptCheckpoint as error:
        # torch.load's unpickler stops where ours did, or right after it.
        if is_torchs or is_lost or not isinstance(error.__cause__, NotAPickle):
            raise


def refusal_of(data: bytes | io.BytesIO) -> NotData | None:
    """Why :func:`check_object` would refuse bytes that a pickler has just made; ``None`` if it would not."""
    try:
        check_object(data, file="", item="")
    except UnsafeCheckpoint as error:
        cause = error.__cause__
        what, why = (cause.what, cause.why) if isinstance(cause, NotData) else (str(error.what), error.message)
        return NotData(what, why)  # a new one, without the frames of the load
    except RobustCheckpointError as error:
        return NotData("what was pickled", repr(error.__cause__))
    return None


def pickle_of(data: bytes) -> bytes:
    """The pickle within an archive of ``torch.save``, without the data of tensors; all of ``data`` if it is short or
    of another format.
    """
    if len(data) <= _LARGE_NBYTES:
        return data
    try:
        pickled = zip_members(data, len(data))[0]["data.pkl"]
    except (ValueError, KeyError):
        return data
    return data[pickled.offset : pickled.offset + pickled.nbytes]


_MOST_ODD_MEMBERS: Final = 100
"""Of so many members of sets, at most, each is compared with each."""


def are_equal(one: Any, other: Any) -> bool:
    """Whether two objects hold the same values, in whatever kinds and orders of dicts. Numbers, also in lists, tuples,
    sets, dataclasses, arrays and tensors, are equal if their bits are: NaN and NaN, but not 0.0 and -0.0. Other objects
    are compared by ``==``, and if that finds a difference, as they are pickled."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _are_equal_tensors(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if any(isinstance(one, kind) and isinstance(other, kind) for kind in (list, tuple, deque)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, np.generic | np.ndarray):
        return _are_equal_arrays(np.asarray(one), np.asarray(other))
    if isinstance(one, complex):
        return are_equal((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, set | frozenset):
        sides = [{_bits_of(each): each for each in members} for members in (one, other)]
        here, there = ([side[key] for key in side.keys() - past.keys()] for side, past in (sides, sides[::-1]))
        if len(one) != len(other) or not len(here) == len(there) <= _MOST_ODD_MEMBERS:
            return False
        for each in here:  # each has a partner of its own
            partner = next((place for place, like in enumerate(there) if are_equal(each, like)), None)
            if partner is None:
                return False
            del there[partner]
        return True
    if dataclasses.is_dataclass(one) and is_generated(type(one).__eq__):
        # This `==` was made by the dataclass, and another one may know better than its fields what is equal.
        names = [each.name for each in dataclasses.fields(one) if each.compare]
        return all(are_equal(getattr(one, name, None), getattr(other, name, None)) for name in names)
    with suppress(Exception):  # of an object with arrays, for example, which do not say whether they are equal
        if one == other or (one != one and other != other):
            return True
    if type(one).__module__ == "builtins":
        return False
    try:
        return are_equal(one.__reduce_ex__(2), other.__reduce_ex__(2))
    except TypeError:  # it cannot be pickled, and was not saved
        return False


def _are_equal_arrays(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dtype.char in "gG":  # long doubles have bytes that mean nothing
        return all(
            np.array_equal(here, there, equal_nan=True) and np.array_equal(np.signbit(here), np.signbit(there))
            for here, there in ((one.real, other.real), (one.imag, other.imag))
        )
    if not one.dtype.hasobject and one.tobytes() == other.tobytes():
        return True
    values = one.tolist(), other.tolist()
    return not isinstance(values[0], np.generic) and are_equal(*values)


def _bits_of(value: Any) -> Any:
    """A key that two members of sets share if their bits are the same: ``0.0 == -0.0``, and ``1 == 1.0 == True``."""
    if isinstance(value, float):
        return type(value), struct.pack("d", value)
    if isinstance(value, tuple):
        return type(value), *map(_bits_of, value)
    return type(value), value


def _are_equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.layout, one.shape) != (other.dtype, other.layout, other.shape):
        return False
    if any(map(is_traceable_wrapper_subclass, (one, other))):
        if type(one) is not type(other):
            return False
        subclasses: tuple[Any, Any] = (one, other)
        (names, *rest), (other_names, *other_rest) = (each.__tensor_flatten__() for each in subclasses)
        pairs = ((getattr(one, name), getattr(other, name)) for name in names)
        return (names, *rest) == (other_names, *other_rest) and all(are_equal(*pair) for pair in pairs)
    if one.layout is not torch.strided:
        one, other = (each.detach().to_sparse_coo().coalesce() for each in (one, other))
        return torch.equal(one.indices().cpu(), other.indices().cpu()) and are_equal(one.values(), other.values())
    if one.is_quantized or one.is_nested:
        return torch.equal(one, other)
    return torch.equal(flat_bytes(to_host(one)), flat_bytes(to_host(other)))


def is_program(data: bytes) -> bool:
    """Whether a zip archive is a TorchScript program. Its members may be compressed."""
    return _TORCHSCRIPT_MEMBER in data


def not_an_object(error: Exception, *, file: str, item: str) -> RobustCheckpointError:
    """The error for bytes that are not an object, or whose class has raised ``error``, which says why."""
    found = f"{type(error).__name__}: {error!s:.300}"
    if user_frames(error):
        return RobustCheckpointError(f"item {item!r} in {file} cannot be rebuilt, as its class raised {found}")
    return CorruptCheckpoint(
        f"item {item!r} in {file} cannot be unpickled: {found}",
        file=file,
        item=item,
        expected="the bytes of a torch.save",
        found=found,
    )


def _refuse_other(data: bytes) -> Any:
    """Raise what is wrong with bytes that are no archive of ``torch.save``."""
    if _begins_with_tar_header(data):
        raise NotData("PyTorch's format of tar archives", "which DCP has never written")
    value = Unpickler(data).load()
    if type(value) is int and value == _LEGACY_MAGIC:
        raise NotData("PyTorch's format before 1.6", "which DCP has never written")
    raise NotAPickle("it does not begin as an archive of torch.save")


def _begins_with_tar_header(data: bytes) -> bool:
    """Whether ``torch.load`` would open it as a tar archive. The oldest have no magic, only a checksum."""
    try:
        tarfile.TarInfo.frombuf(data[: tarfile.BLOCKSIZE], tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _unpickler_of(data: bytes) -> Unpickler:
    """What runs the pickle in an archive of ``torch.save``, with the storages of its tensors."""
    try:
        members, _ = zip_members(data, len(data))
    except ValueError:
        if is_program(data):
            raise NotData("a TorchScript archive", "a program") from None
        raise
    if "constants.pkl" in members:
        raise NotData("a TorchScript archive", "a program")
    expect("data.pkl" in members, "the archive has no data.pkl")
    order = _contents(data, members["byteorder"]) if "byteorder" in members else sys.byteorder.encode()
    expect(order in (b"little", b"big"), "the archive does not say in which order its bytes are")
    storages: dict[str, TypedStorage] = {}

    def load_storage(persistent_id: Any) -> TypedStorage:
        key, nbytes, dtype = storage_of(persistent_id)
        if key not in storages:
            member = members.get(f"data/{key}")
            if member is None or member.nbytes != nbytes:
                found = "no such storage" if member is None else f"one of {member.nbytes} bytes"
                raise Malformed(f"the pickle names storage {key[:40]!r} of {nbytes} bytes, the archive has {found}")
            # A copy, so that changes of a tensor do not change the bytes that were read.
            copy = bytearray(_contents(data, member))
            untyped = torch.frombuffer(copy, dtype=torch.uint8).untyped_storage() if copy else UntypedStorage(0)
            if order != sys.byteorder.encode():
                untyped.byteswap(dtype)
            storages[key] = TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return storages[key]

    return Unpickler(bytes(_contents(data, members["data.pkl"])), load_storage)


def _contents(data: bytes, member: ZipMember) -> memoryview:
    """The bytes of a member. They are compared with their checksum if there is one."""
    found = memoryview(data)[member.offset : member.offset + member.nbytes]
    is_right = member.crc32 in (0, crc32(found))
    expect(is_right, "a member of the archive does not have the CRC-32 that was written with it")
    return found
