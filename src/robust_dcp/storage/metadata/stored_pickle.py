"""The pickle in ``.metadata`` and the checksum behind it: checked, and unpickled with the classes that a caller gives.

``metadata_file`` makes DCP's ``Metadata`` of it. ``robust-dcp ls`` only wants to know whose it is, and does without
torch, so this module imports none.
"""

from __future__ import annotations

import gc
import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from robust_dcp.on_demand import errors
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.data.limits import Budget
from robust_dcp.storage.records.pickle_scan import dicts_in
from robust_dcp.storage.records.unpickling import ClassName, RestrictedUnpickler, attributes_of, plain_dicts

__all__ = [
    "TRAILER_NBYTES",
    "check_metadata",
    "corrupt",
    "files_are_marked",
    "pickle_in",
    "trailer_of",
    "unpickled",
    "without_garbage_collection",
]

_MAGIC: Final = b"\nRDCPMD2"
_MAGIC_WITHOUT_MARKS: Final = b"\nRDCPMD1"  # written by early versions, whose data files have no marks
# This follows the pickle, where pickle.load does not look: magic, length of the pickle, CRC-32 of the pickle.
_TRAILER: Final = struct.Struct("<8sQI")
TRAILER_NBYTES: Final = _TRAILER.size

_HOW_TO_ALLOW: Final = (
    "if the planner that wrote it keeps objects of that class in planner_data and you trust the file, register the "
    "class with torch.serialization.add_safe_globals([...])"
)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Millions of objects are made, and none of them is garbage. Looking for cycles among them would take most of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trailer_of(nbytes: int, crc: int) -> bytes:
    """The bytes that follow a pickle of ``nbytes`` bytes with CRC-32 ``crc``. By them we notice each flipped bit."""
    return _TRAILER.pack(_MAGIC, nbytes, crc)


def files_are_marked(data: bytes) -> bool:
    """Whether each data file that this ``.metadata`` names has the mark of its save."""
    return data[-_TRAILER.size :].startswith(_MAGIC)


def check_metadata(data: bytes, file: str) -> None:
    """Find anything that would make Python's unpickler take more memory or time than a pickle of this length can need.

    Raises:
        CorruptCheckpoint: there is such a thing, or the checksum does not match.
    """
    _dicts_in(pickle_in(data, file), file)


def pickle_in(data: bytes, file: str) -> bytes:
    """The pickle in ``data``, after a comparison with the trailer if there is one.

    Raises:
        CorruptCheckpoint: the file is empty, or differs from what the trailer says.
    """
    if not data:
        raise corrupt(file, "a pickle", "an empty file (a save that lost power before it was on disk)")
    if len(data) < _TRAILER.size or not data[-_TRAILER.size :].startswith((_MAGIC, _MAGIC_WITHOUT_MARKS)):
        return data
    _, nbytes, expected = _TRAILER.unpack(data[-_TRAILER.size :])
    pickled = data[: -_TRAILER.size]
    found = crc32(pickled)
    if nbytes != len(pickled) or found != expected:
        raise corrupt(
            file, f"{nbytes} bytes with CRC-32 {expected:08x}", f"{len(pickled)} bytes with CRC-32 {found:08x}"
        )
    return pickled


def unpickled(
    data: bytes,
    file: str,
    *,
    allowed: frozenset[ClassName],
    stand_ins: Mapping[ClassName, Any],
    registered: Mapping[str, Any],
    other: Callable[[str, str], Any],
) -> Any:
    """Unpickle a ``.metadata``.

    Args:
        data: the whole file.
        file: its path, for errors.
        allowed, stand_ins, registered, other: as in :class:`RestrictedUnpickler`.

    Raises:
        CorruptCheckpoint: the checksum does not match, or this is not a pickle, or something follows it.
        UnsafeCheckpoint: the pickle names classes that do not belong into metadata.
    """
    pickled = bytearray(pickle_in(data, file))
    for place in _dicts_in(bytes(pickled), file):
        pickled[place] = pickle.NEXT_BUFFER[0]  # there the unpickler takes a dict that looks at its keys
    stream = io.BytesIO(pickled)
    unpickler = RestrictedUnpickler(
        stream,
        file=file,
        allowed=allowed,
        stand_ins=stand_ins,
        registered=registered,
        other=other,
        how_to_allow=_HOW_TO_ALLOW,
        budget=Budget(len(pickled)),
    )
    try:
        with without_garbage_collection():
            found = unpickler.load()
    except errors.UnsafeCheckpoint:
        raise
    except Exception as error:
        raise _no_pickle_of_metadata(file, error) from error
    if stream.tell() != len(pickled):
        # Neither DCP nor we write anything here. If our trailer is damaged, this is where it shows.
        raise corrupt(file, "nothing behind the pickle", f"{len(pickled) - stream.tell()} bytes")
    for name in attributes_of(found):
        value = getattr(found, name)
        if isinstance(value, dict):
            setattr(found, name, plain_dicts(value))
    return found


def corrupt(file: str, expected: str, found: str) -> errors.CorruptCheckpoint:
    """The error for a ``.metadata`` that is not what somebody wrote."""
    return errors.CorruptCheckpoint(
        f"{file} cannot be used: expected {expected}, found {found}; take another checkpoint, or restore the file",
        file=file,
        expected=expected,
        found=found,
    )


def _dicts_in(pickled: bytes, file: str) -> list[int]:
    try:
        return dicts_in(pickled)
    except Exception as error:  # broken pickles raise all kinds of errors
        raise _no_pickle_of_metadata(file, error) from error


def _no_pickle_of_metadata(file: str, error: Exception) -> errors.CorruptCheckpoint:
    return corrupt(file, "the pickle of a Metadata", f"{type(error).__name__}: {error!s:.300}")
