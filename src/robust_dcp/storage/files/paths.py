"""Names of the files of a checkpoint, and the proof that a name stays in its directory.

Owns which checkpoint ids are directories, which names data files have, the mark of a save that stands in some, and
which paths out of ``.metadata`` may be opened. Never opens anything. Readers and writers are given paths by users, and
names by ``.metadata``: both come here.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk

__all__ = [
    "DATA_SUFFIX",
    "INDEX_NAME",
    "JOURNAL_PREFIX",
    "LOCK_NAME",
    "METADATA_NAME",
    "SAFETENSORS_SUFFIX",
    "DataFileName",
    "WriterOfFile",
    "check_relative_path",
    "committed_name",
    "data_file_name",
    "directory_path",
    "holds_raw_bytes",
    "is_data_file",
    "is_url",
    "locate",
    "mark_of",
    "metadata_name",
    "parse_data_file_name",
    "shard_file_name",
    "temporary_name",
    "writer_of",
]

METADATA_NAME: Final = ".metadata"
DATA_SUFFIX: Final = ".distcp"
SAFETENSORS_SUFFIX: Final = ".safetensors"
INDEX_NAME: Final = ".robust_dcp.index"
"""What ``.metadata`` says, for readers that look up few of its items, and the plan that it was saved by. Nothing that
stock looks for."""

JOURNAL_PREFIX: Final = ".robust_dcp.saving."
"""Followed by the mark of a save: the file that says that this save is under way, and which files it may make."""

LOCK_NAME: Final = ".robust_dcp.lock"
"""The file that a save holds a lock on as long as it runs."""

# What the first edition put into names instead of a mark: how often the plain name had been taken.
_MARK: Final = r"(?P<mark>[0-9a-f]{16}|\d+)"

# Stock DCP: __{rank}_{number}.distcp. Megatron-Core may put its separation hint before that; ours may have a mark.
_DATA_FILE: Final = re.compile(rf"(?P<hint>[\w.\-]*?)__(?P<rank>\d+)_(?P<number>\d+)(?:\.(?!0\.){_MARK})?\.distcp")

# Names of torch's HuggingFaceStorageWriter, and of a file that will be called so once it is committed.
_SHARD_FILE: Final = re.compile(r"shard-(?P<shard>\d{5,})-model-(?P<number>\d{5,})-of-\d{5,}\.safetensors")
_TEMPORARY: Final = re.compile(rf"(?P<name>.+\.safetensors)(?:\.{_MARK})?\.part")


_URL: Final = re.compile(r"\s*(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://")

# pathlib makes one slash of two: Path("s3://bucket") is "s3:/bucket". Directories may have such names, so of paths with
# one slash only those count that begin like a store which people have.
_COLLAPSED_URL: Final = re.compile(
    r"(?P<scheme>abfss?|adl|az|cos|dbfs|file|ftp|gcs|gs|hdfs|hf|https?|memory|msc|oci|oss|s3[an]?|sftp|ssh|swift|wasbs?|webhdfs)"
    r":/(?!/)"
)


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether ``checkpoint_id`` names a place in an object store or on another machine, not a local directory.

    ``scheme://…`` does, and so does a ``Path`` that was made of one. ``a:b``, ``x:/y`` and ``runs/s3://x`` are legal
    names of directories, and stay possible.
    """
    return _scheme_of(checkpoint_id) is not None


def _scheme_of(checkpoint_id: str | os.PathLike[str]) -> str | None:
    path = os.fsdecode(checkpoint_id)
    match = _URL.match(path)
    if match is None and not isinstance(checkpoint_id, (str, bytes)):
        match = _COLLAPSED_URL.match(path)
    return None if match is None else match["scheme"]


def directory_path(path: str | os.PathLike[str]) -> str:
    """``path`` as a string, if it can be a local directory. Every entry point calls this before it touches a disk.

    Raises:
        ValueError: it is a URL; the message says what to do instead.
    """
    scheme = _scheme_of(path)
    if scheme is None:
        return os.fsdecode(path)
    if scheme.lower() == "file":
        what_to_do = "pass the path itself, without file://"
    else:
        what_to_do = "save to a local or mounted directory and copy it there, or copy it from there and load the copy"
    raise ValueError(
        f"{os.fsdecode(path)!r} is a URL ({scheme}://), and robust_dcp reads and writes directories of mounted file "
        f"systems only: {what_to_do}"
    )


def mark_of(save_id: str) -> str:
    """The mark of a save: the first 16 hexadecimal digits of its id, which stand in its files, and in their names where
    the plain names are taken."""
    return save_id.replace("-", "")[:16]


class DataFileName(NamedTuple):
    """What the name of a data file says: who wrote it, which of its files it is, and the mark of the save, if any."""

    rank: int
    number: int
    mark: str
    hint: str = ""


def data_file_name(rank: int, number: int, mark: str = "") -> str:
    """``__{rank}_{number}.distcp`` as stock names it, or ``__{rank}_{number}.{mark}.distcp``.

    A save takes the latter where the plain name is not free, so that no file of another save is ever written to.
    """
    return f"__{rank}_{number}.{mark}{DATA_SUFFIX}" if mark else f"__{rank}_{number}{DATA_SUFFIX}"


def parse_data_file_name(name: str) -> DataFileName | None:
    """Read a name by us, by stock DCP or by Megatron-Core; ``None`` if it is no data file's."""
    match = _DATA_FILE.fullmatch(name)
    if match is None:
        return None
    return DataFileName(int(match["rank"]), int(match["number"]), match["mark"] or "", match["hint"])


def shard_file_name(rank: int, number: int, count: int) -> str:
    """The name of the ``number``-th of a rank's ``count`` safetensors files, as torch's writer names it (from 1 on)."""
    return f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{count:05d}{SAFETENSORS_SUFFIX}"


def temporary_name(name: str, mark: str = "") -> str:
    """What a safetensors file is called until it is committed: a name that no reader of safetensors looks at."""
    return f"{name}.{mark}.part" if mark else f"{name}.part"


def committed_name(name: str) -> str:
    """The inverse of :func:`temporary_name`; any other name as it is."""
    match = _TEMPORARY.fullmatch(name)
    return name if match is None else match["name"]


def is_data_file(name: str) -> bool:
    """Whether a file of this name holds items of a checkpoint, or will. Other programs than ours may have made it."""
    return parse_data_file_name(name) is not None or _SHARD_FILE.fullmatch(committed_name(name)) is not None


class WriterOfFile(NamedTuple):
    """Which rank would give a data file its name, which of its files it would be (from 0 on), and the mark of its save,
    if that is in the name."""

    rank: int
    number: int
    mark: str


def writer_of(name: str) -> WriterOfFile | None:
    """Read a name that ours may be, in either layout; ``None`` if a save of ours gives no file such a name."""
    records = parse_data_file_name(name)
    if records is not None:
        return None if records.hint else WriterOfFile(records.rank, records.number, records.mark)
    shard = _SHARD_FILE.fullmatch(committed_name(name))
    if shard is None:
        return None
    temporary = _TEMPORARY.fullmatch(name)
    mark = "" if temporary is None else temporary["mark"] or ""
    return WriterOfFile(int(shard["shard"]) - 1, int(shard["number"]) - 1, mark)


def holds_raw_bytes(path: str) -> bool:
    """Whether the items in a file are bare bytes that its head describes (safetensors), rather than records."""
    return committed_name(os.path.basename(path)).endswith(SAFETENSORS_SUFFIX)


def metadata_name(rank: int | None = None) -> str:
    """``.metadata``, or ``__{rank}.metadata`` of a stock save without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def check_relative_path(relative_path: Any, *, file: str) -> str:
    """Return ``relative_path`` if it names something below the checkpoint's directory by its spelling alone.

    Args:
        relative_path: as it stands in the storage info of an item.
        file: where it was read, for the error.

    Raises:
        UnsafeCheckpoint: not a string, empty, absolute, with ``..``, a NUL or a backslash-separated escape.
    """
    if not isinstance(relative_path, str):
        raise _unsafe(file, relative_path, f"is a {type(relative_path).__name__}, not a string")
    if not relative_path or "\0" in relative_path:
        raise _unsafe(file, relative_path, "is empty or holds a NUL")
    # Both separators: a checkpoint may be read on another system than it was written on.
    parts = re.split(r"[/\\]", relative_path)
    if os.path.isabs(relative_path) or parts[0] == "" or re.match(r"[A-Za-z]:", relative_path):
        raise _unsafe(file, relative_path, "is absolute")
    if ".." in parts:
        raise _unsafe(file, relative_path, 'leaves the directory by ".."')
    if parts[-1] in ("", "."):
        raise _unsafe(file, relative_path, "names a directory")
    return relative_path


def locate(disk: Disk, directory: str, relative_path: str, *, file: str) -> str:
    """The path to open for ``relative_path``, with symbolic links followed and checked.

    A checkpoint that was copied or unpacked from elsewhere may bring symbolic links. One is followed if it stays in the
    directory, or if it leads to a data file of the very same name (or of that which it had before the commit): this is
    how files striped over several disks are linked, and a link to ``/etc/passwd`` or to a private key is not of that
    form.

    Raises:
        UnsafeCheckpoint: the path, or a link on it, leads somewhere else.
        StorageError: the links cannot be read (a loop, say).
    """
    path = os.path.join(directory, check_relative_path(relative_path, file=file))
    resolved = disk.resolve(path)
    if os.path.commonpath([resolved, disk.resolve(directory)]) == disk.resolve(directory):
        return resolved
    name = os.path.basename(relative_path)
    if committed_name(os.path.basename(resolved)) == name and is_data_file(name):
        return resolved
    raise _unsafe(file, relative_path, f"is a symbolic link out of the directory, to {resolved}")


def _unsafe(file: str, relative_path: Any, problem: str) -> UnsafeCheckpoint:
    shown = repr(relative_path[:200]) if isinstance(relative_path, str) else f"of class {type(relative_path).__name__}"
    return UnsafeCheckpoint(
        f"{file}: relative_path {shown} {problem}; the data files of a checkpoint lie in its directory, so "
        "this file is damaged or was made to read something else",
        file=file,
        what=f"relative_path {shown}",
    )
