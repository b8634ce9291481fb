"""Items that are not tensors (DCP's BYTE_IO): loads them as data, or checks them before somebody else loads them.

This module decides which objects are refused, by one rule for saving, checking and loading. It makes the errors that
name file and item. A planner that gets the bytes calls ``torch.load`` with ``weights_only=False``, as DCP's planner
does. So bytes that would run code, or ask for memory that they do not fill, must be found here. The reader calls it,
and the planner calls it when it saves.
"""

from __future__ import annotations

import io
from typing import Any, Final, NamedTuple

import torch

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.records.archives import ZIP_MAGIC, OtherFormat, load_data
from robust_dcp.storage.records.data.limits import NotData
from robust_dcp.storage.records.data.names import registered_by_user
from robust_dcp.storage.records.parse_record import zip_members
from robust_dcp.storage.records.pickle_scan import is_inert

__all__ = [
    "ObjectBytes",
    "Refusal",
    "check_object",
    "load_object",
    "not_an_object",
    "pickle_of",
    "refusal_of",
    "registered_names",
]

_HOW_TO_ALLOW: Final = (
    "if you trust it, register the class with torch.serialization.add_safe_globals([...]), or pass trusted=True to "
    "load whatever the checkpoint holds"
)
_LARGE_NBYTES: Final = 64 << 10
_ZIP_END_MAGIC: Final = b"PK\x05\x06"
_ZIP_END_NBYTES: Final = 22
_TAR_MAGIC_AT: Final = 257
_TAR: Final = "a tar archive, PyTorch's format before 0.1.10, which cannot be read safely"


class ObjectBytes(io.BytesIO):
    """The bytes of an object that go to a planner, and the file that they come from."""

    def __init__(self, data: bytes, file: str) -> None:
        super().__init__(data)
        self.file = file


class Refusal(NamedTuple):
    """Why an object cannot be loaded: ``what`` it needs, and ``why`` that is refused."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}, {self.why}"


def load_object(data: bytes | io.BytesIO, *, file: str, item: str, trusted: bool = False) -> Any:
    """Load an object that ``torch.save`` wrote, if it consists of data only.

    Args:
        data: the item's bytes.
        file, item: where they come from, for errors.
        trusted: load with ``torch.load(weights_only=False)``, which runs any code that the bytes name.

    Returns:
        The object, with its tensors on the CPU.

    Raises:
        UnsafeCheckpoint: it needs a class that is neither known to be data nor registered by the user.
        CorruptCheckpoint: these are not the bytes of a ``torch.save``, or they ask for more memory than they fill.
    """
    view = _bytes_of(data)
    try:
        if trusted:
            return torch.load(io.BytesIO(view), map_location="cpu", weights_only=False)
        if _is_tar(view):
            raise UnsafeCheckpoint(f"item {item!r} in {file} is {_TAR}", file=file, what="a tar archive")
        return load_data(view)
    except UnsafeCheckpoint:
        raise
    except NotData as error:
        raise _unsafe(file, item, Refusal(error.what, error.why)) from error
    except Exception as error:  # broken bytes raise all kinds of errors
        raise not_an_object(error, file=file, item=item) from error


def check_object(data: bytes | io.BytesIO, *, file: str, item: str) -> None:
    """Make sure that ``torch.load(weights_only=False)`` of ``data`` runs no code, and takes no more memory than
    ``data`` fills.

    Bytes that ``torch.load`` cannot read in any of its formats pass, because a planner may have its own format.

    Raises:
        UnsafeCheckpoint, CorruptCheckpoint: as :func:`load_object`.
    """
    view = _bytes_of(data)
    is_torchs = view[:4] == ZIP_MAGIC or view[-_ZIP_END_NBYTES:][:4] == _ZIP_END_MAGIC
    is_lost = bool(view) and not view.strip(b"\0")  # after a power cut a file system may return zeros
    try:
        load_object(view, file=file, item=item)
    except CorruptCheckpoint as error:
        # In these cases torch.load's unpickler does not read further, or it stops before it could import, call or
        # allocate anything.
        if is_torchs or is_lost or not (isinstance(error.__cause__, OtherFormat) or is_inert(view)):
            raise


def refusal_of(data: bytes | io.BytesIO) -> Refusal | None:
    """Why :func:`check_object` would refuse bytes that a pickler has just made; ``None`` if it would not."""
    view = _bytes_of(data)
    pickled = pickle_of(view)
    if len(pickled) < len(view) and is_inert(pickled):
        return None  # it names no classes or functions, and holds only numbers, text, lists and dicts
    try:
        check_object(data, file="", item="")
    except UnsafeCheckpoint as error:
        cause = error.__cause__
        return Refusal(cause.what, cause.why) if isinstance(cause, NotData) else Refusal(str(error.what), error.message)
    except CorruptCheckpoint as error:
        return Refusal("what was pickled", str(error.found))
    return None


def pickle_of(data: bytes) -> bytes:
    """The pickle within an archive of ``torch.save``, without the data of tensors; all of ``data`` if it is short or
    of another format.
    """
    if len(data) <= _LARGE_NBYTES:
        return data
    try:
        pickled = zip_members(data)["data.pkl"]
    except (ValueError, KeyError):
        return data
    return data[pickled.offset : pickled.offset + pickled.nbytes]


def registered_names() -> frozenset[str]:
    """Full names of everything that the user has registered with ``torch.serialization.add_safe_globals``."""
    return frozenset(registered_by_user())


def _bytes_of(data: bytes | io.BytesIO) -> bytes:
    return data.getvalue() if isinstance(data, io.BytesIO) else data


def _is_tar(data: bytes) -> bool:
    return data[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar" and data[:4] != ZIP_MAGIC


def _unsafe(file: str, item: str, refusal: Refusal) -> UnsafeCheckpoint:
    return UnsafeCheckpoint(
        f"item {item!r} in {file} asks for {refusal}, and is refused; {_HOW_TO_ALLOW}", file=file, what=refusal.what
    )


def not_an_object(error: Exception, *, file: str, item: str) -> CorruptCheckpoint:
    """The error for bytes that are not an object. ``error`` says why."""
    found = f"{type(error).__name__}: {error!s:.300}"
    return CorruptCheckpoint(
        f"item {item!r} in {file} is not what torch.save wrote: {found}",
        file=file,
        item=item,
        expected="the bytes of a torch.save",
        found=found,
    )
