"""The names of the files of a checkpoint, and the check that a name does not lead out of its directory.

This module decides which checkpoint ids are directories, which names data files have, where the mark of a save is in a
name, and which paths in ``.metadata`` may be opened. It never opens a file. Users give readers and writers paths, and
``.metadata`` gives them names: both are checked here.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple

from robust_dcp import errors
from robust_dcp.report import REPORT_NAME
from robust_dcp.storage.files.disk import Disk

METADATA_NAME: Final = ".metadata"
DATA_SUFFIX: Final = ".distcp"
SAFETENSORS_SUFFIX: Final = ".safetensors"
INDEX_NAME: Final = ".robust_dcp.index"
"""The contents of ``.metadata`` for readers that look up few of its items, and the plan of the save. DCP does not look
for a file of this name.
"""

NODES_NAME: Final = ".robust_dcp.nodes"
"""If the nodes of a save do not share its directory, this file says which ranks have written on which node."""

PARITY_PREFIX: Final = ".robust_dcp.parity."
"""The mark of a save follows. By this file the checkpoint outlives the loss of another node."""

RECORD_NAME: Final = ".robust_dcp.step.json"
"""What a manager has noted of a step."""

SAVING_PREFIX: Final = ".robust_dcp.saving."
"""The mark of a save follows. This file says that the save is running, and the save holds a lock on it."""

REMOVING_PREFIX: Final = ".robust_dcp.removing."
"""A checkpoint that is being removed has this before its name, so that nobody takes it for one."""

MODEL_INDEX_NAME: Final = "model.safetensors.index.json"
"""Says which files hold the tensors of a Hugging Face model."""

READ_BY_NAME: Final = frozenset(
    (
        *(METADATA_NAME, INDEX_NAME, NODES_NAME, REPORT_NAME, RECORD_NAME),
        *("common.pt", "metadata.json", "integrity.json"),  # Megatron's
        *(MODEL_INDEX_NAME, "config.json"),  # Hugging Face's
    )
)
"""Files beside the data that readers of a checkpoint look for."""

COPYING_PREFIX: Final = ".robust_dcp.copying."
"""16 hexadecimal digits that tell a checkpoint from others follow. The file says that its copy to here is not over."""

STAGING_PREFIX: Final = "robust_dcp-"
"""The directories that saves to URLs are made in have this before their names, and so has the one that they lie in."""

_MARK: Final = r"(?:\.(?P<mark>[0-9a-f]{16}))?"

# DCP's names are __{rank}_{number}.distcp. Megatron-Core may put its separation hint before that, and we add a mark.
_DATA_FILE: Final = re.compile(rf"(?P<hint>[\w.\-]*?)__(?P<rank>\d+)_(?P<number>\d+){_MARK}\.distcp")

# Names that torch's HuggingFaceStorageWriter gives, to which we add a mark.
_SHARD_FILE: Final = re.compile(rf"shard-(?P<rank>\d{{5,}})-model-(?P<number>\d{{5,}})-of-\d{{5,}}{_MARK}\.safetensors")
_UNCOMMITTED: Final = ".part"


_URL: Final = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.\-]*://")

# pathlib turns two slashes into one: Path("s3://bucket") is "s3:/bucket". Directories may have such names. So a path
# with one slash counts as a URL only if it begins with the name of a common store.
_COLLAPSED_URL: Final = re.compile(
    r"(abfss?|adl|az|cos|dbfs|file|ftp|gcs|gs|hdfs|hf|https?|memory|msc|oci|oss|s3[an]?|sftp|ssh|swift|wasbs?|webhdfs)"
    r":/(?!/)"
)


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether ``checkpoint_id`` names a place in an object store or on another machine, and not a local directory.

    ``scheme://…`` is a URL, and so is a ``Path`` made of one. ``a:b``, ``x:/y`` and ``runs/s3://x`` are legal names of
    directories, so they are not.
    """
    path = os.fsdecode(checkpoint_id)
    is_path = not isinstance(checkpoint_id, (str, bytes))
    return _URL.match(path) is not None or (is_path and _COLLAPSED_URL.match(path) is not None)


def place_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """``checkpoint_id`` as a path, or as a URL without a slash at its end. ``Path("s3://bucket")`` is a URL again.

    Raises:
        ValueError: it is a ``file://`` URL of another machine, or no path at all.
    """
    place = os.fsdecode(checkpoint_id)
    if not is_url(checkpoint_id):
        if not place or "\0" in place:
            raise ValueError(
                f"{place!r} cannot be the path of a directory: it {'has a zero byte' if place else 'is empty'}"
            )
        return place
    scheme, slashes, rest = re.split(r":(/+)", place.strip(), maxsplit=1)
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if scheme != "file":
        return f"{scheme}://{rest}"  # memory:///a has an empty host
    if slashes == "//":
        host, _, rest = rest.partition("/")
        if host.lower() != "localhost":
            raise ValueError(
                f"{place!r} names a file of the host {host!r}, and file:// reaches the file systems of this machine "
                f"only: write file:///{host}/{rest} if {host!r} is the name of a directory, or mount the file system "
                "of that host and pass the path"
            )
    return f"file:///{rest}"


def local_path_of(place: str) -> str | None:
    """The path that a place means if it is on a mounted file system, such as ``file:///data``; else ``None``."""
    if not is_url(place):
        return place
    return place[len("file://") :] if place.startswith("file://") else None


def real_place(place: str) -> str:
    """One name of a place that has several: an absolute path without links, or the URL as it is."""
    path = local_path_of(place)
    return place if path is None else os.path.realpath(path)


def checkpoint_name(checkpoint_id: str | os.PathLike[str] | None) -> str:
    """The name of a checkpoint in exchanges and messages. Ranks with another name are in another operation."""
    if checkpoint_id is None:
        return ""
    return place_of(checkpoint_id) if is_url(checkpoint_id) else os.path.normpath(os.fspath(checkpoint_id))


def absolute(place: str) -> str:
    """``place``, a path or a URL, so that it stays the same when the working directory changes."""
    return place if not place or os.path.isabs(place) or is_url(place) else os.path.join(os.getcwd(), place)


def directory_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as a string if it can be a local directory. Entry points that take no URLs call this before they
    touch a disk.

    Raises:
        ValueError: it is a URL, or no path at all. The message says what to do instead.
    """
    if not is_url(path):
        return place_of(path)
    scheme = os.fsdecode(path).strip().partition(":")[0]
    if scheme.lower() == "file":
        what_to_do = "pass the path itself, without file://"
    else:
        what_to_do = (
            "robust_dcp.save and load take it as checkpoint_id, RobustReader as path, RobustWriter as drain_to, and "
            "copy_checkpoint copies from and to it"
        )
    raise ValueError(
        f"{os.fsdecode(path)!r} is a URL ({scheme}://), and this takes directories of mounted file systems only: "
        f"{what_to_do}"
    )


def mark_of(save_id: str) -> str:
    """The mark of a save: the first 16 hexadecimal digits of its id. The files of the save hold it, and so do their
    names.
    """
    return save_id.replace("-", "")[:16]


def name_before_commit(name: str, mark: str) -> str:
    """The name of a file that lies beside the data, such as Megatron's ``common.pt``, until the save has committed."""
    return f"{name}.{mark}"


def data_file_name(rank: int, number: int, mark: str, prefix: str = "") -> str:
    """``__{rank}_{number}.{mark}.distcp``: DCP's name with the mark of the save. No other save writes to the file.

    Args:
        prefix: what the name begins with, as with Megatron's ``separation_hint``.
    """
    return f"{prefix}__{rank}_{number}.{mark}{DATA_SUFFIX}"


def shard_file_name(rank: int, number: int, count: int, mark: str) -> str:
    """The name of number ``number`` of a rank's ``count`` safetensors files. It is torch's name, which counts from 1,
    with the mark of the save.
    """
    return f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{count:05d}.{mark}{SAFETENSORS_SUFFIX}"


def uncommitted_name(name: str) -> str:
    """The name of a data file before its commit. No reader of safetensors looks at that of a safetensors file."""
    return name + _UNCOMMITTED if name.endswith(SAFETENSORS_SUFFIX) else name


def committed_name(name: str) -> str:
    """The inverse of :func:`uncommitted_name`."""
    return name.removesuffix(_UNCOMMITTED) if name.endswith(SAFETENSORS_SUFFIX + _UNCOMMITTED) else name


def is_data_file(name: str) -> bool:
    """Whether a file of this name holds items of a checkpoint, or will hold them. Other programs may have made it,
    too.
    """
    return any(form.fullmatch(committed_name(name)) for form in (_DATA_FILE, _SHARD_FILE))


class WriterOfFile(NamedTuple):
    """The rank that gives a data file its name, the number of the file (from 0 on), and the mark of the save; no mark
    for files of others.
    """

    rank: int
    number: int
    mark: str


def writer_of(name: str) -> WriterOfFile | None:
    """Parse a name that one of our saves may give, in either layout; ``None`` if none gives such a name."""
    if found := _DATA_FILE.fullmatch(name):
        first = 0
        if found["hint"] and not found["mark"]:
            return None
    elif found := _SHARD_FILE.fullmatch(committed_name(name)):
        first = 1
    else:
        return None
    return WriterOfFile(int(found["rank"]) - first, int(found["number"]) - first, found["mark"] or "")


def holds_raw_bytes(path: str) -> bool:
    """Whether a file holds plain bytes of tensors, described by its head (safetensors). Other data files hold
    records.
    """
    return path.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_SUFFIX + _UNCOMMITTED))


def metadata_name(rank: int | None = None) -> str:
    """``.metadata``, or ``__{rank}.metadata`` of a save by DCP without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def check_relative_path(relative_path: Any, *, file: str) -> str:
    """Return ``relative_path`` if its spelling does not lead out of the checkpoint's directory.

    Args:
        relative_path: the path in the storage info of an item.
        file: the file that holds the path, for the error.

    Raises:
        UnsafeCheckpoint: the path is not a string, is empty or absolute, or holds ``..`` or a NUL. A backslash counts
            as a slash.
    """
    if not isinstance(relative_path, str):
        raise _unsafe(file, relative_path, f"is a {type(relative_path).__name__}, not a string")
    if not relative_path or "\0" in relative_path:
        raise _unsafe(file, relative_path, "is empty or holds a NUL")
    # Split at both separators: the checkpoint may have been written on another system.
    parts = re.split(r"[/\\]", relative_path)
    if os.path.isabs(relative_path) or parts[0] == "" or re.match(r"[A-Za-z]:", relative_path):
        raise _unsafe(file, relative_path, "is absolute")
    if ".." in parts:
        raise _unsafe(file, relative_path, 'leaves the directory by ".."')
    if parts[-1] in ("", "."):
        raise _unsafe(file, relative_path, "names a directory")
    return relative_path


def locate(disk: Disk, directory: str, relative_path: str, *, file: str) -> str:
    """The path to open for ``relative_path``.

    The file may be a symbolic link to anywhere, as in Hugging Face's cache, or with DVC and git-annex: whoever owns the
    directory has put it there, under the name that ``.metadata`` gives. It may not lie behind a link to a directory,
    which makes many names at once, and leads to files that nobody has put into this checkpoint.

    Raises:
        UnsafeCheckpoint: the name leads out of the directory, or through a link to another one.
        StorageError: the links cannot be read.
    """
    path = os.path.join(directory, check_relative_path(relative_path, file=file))
    if not is_url(directory) and is_behind_link(disk, directory, relative_path):  # a store has no links
        raise _unsafe(file, relative_path, "lies behind a symbolic link to a directory")
    return path


def is_behind_link(disk: Disk, directory: str, relative_path: str) -> bool:
    """Whether a directory between ``directory`` and the file at ``relative_path`` in it is a symbolic link.

    Raises:
        StorageError: that cannot be found out.
    """
    below = os.path.dirname(relative_path)
    if not below:
        return False
    return disk.resolve(os.path.join(directory, below)) != os.path.normpath(
        os.path.join(disk.resolve(directory), below)
    )


def _unsafe(file: str, relative_path: Any, problem: str) -> errors.UnsafeCheckpoint:
    shown = repr(relative_path[:200]) if isinstance(relative_path, str) else f"of class {type(relative_path).__name__}"
    return errors.UnsafeCheckpoint(
        f"{file}: relative_path {shown} {problem}; the data files of a checkpoint lie in its directory, so "
        "this file is damaged or was made to read something else",
        file=file,
        what=f"relative_path {shown}",
    )
