"""Describes what a path holds instead of a checkpoint, so that an error can say which path was probably meant.

It looks at names and at the first bytes of a file only.
"""

from __future__ import annotations

import os
import re
from typing import Final

from robust_dcp import errors
from robust_dcp.report import listed
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, is_data_file, is_url, metadata_name

TRACKER_NAME: Final = "latest_checkpointed_iteration.txt"
"""Megatron-LM writes this file beside its ``iter_*`` directories."""

_SHOWN: Final = 5
_DIRECTORIES_LOOKED_INTO: Final = 50
_BUCKET: Final = re.compile(r"(?:s3a?|gc?s|az|abfss?|adl)://[^/]+")

_HOW_TO_LOAD_ONE_FILE: Final = (
    "read it with torch.load(path, weights_only=True), or make a checkpoint of it with "
    "robust-dcp convert path directory --to dcp"
)


def why_nothing_is_committed(disk: Disk, path: str, metadata: str = METADATA_NAME) -> str:
    """The message for a checkpoint that has no ``.metadata``. It begins with what is wrong: a bucket that does not
    exist is no checkpoint that was cut off."""
    nothing = f"no {metadata} in {path}: no checkpoint was committed there"
    return why_no_bucket(disk, path) or f"{nothing}; {what_is_there(disk, path)}"


def why_no_bucket(disk: Disk, path: str) -> str:
    """Say that the bucket of a URL does not exist; nothing if it does, or if that cannot be found out."""
    bucket = _BUCKET.match(path)
    try:
        if bucket is not None and not disk.exists(bucket[0]):
            return f"{bucket[0]} does not exist, so there is no checkpoint at {path}: check the URL"
    except errors.StorageError:  # whoever may read a checkpoint may not always look at its bucket
        pass
    return ""


def what_is_there(disk: Disk, path: str) -> str:
    """Describe what is at ``path``, where no ``.metadata`` was found, and say what to pass instead, in one or more
    sentences.
    """
    try:
        if disk.exists(path):
            names = _names_in(disk, path)
            if names is None:
                return _of_file(disk, path)
            if metadata_name(0) in names:
                return "each rank has saved for itself: torch.distributed.checkpoint.load reads what such ranks saved"
            if any(map(is_data_file, names)):
                return "there are data files, so a save or a copy was cut off, or .metadata is lost; start a copy again"
            return f"the directory is there, {_contents_of(disk, path, names)}"
        if is_url(path):  # whoever may read a checkpoint may not always look at what lies above it
            return why_no_bucket(disk, path) or "there is nothing whose name begins with that"
        parent = os.path.dirname(os.path.abspath(path))
        while not disk.exists(parent) and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        names = _names_in(disk, parent)
        if names is None:
            return f"there is no such directory, and {_of_file(disk, parent)}"
        contents = _contents_of(disk, parent, names)
        return f"there is no such directory; the nearest parent that exists is {parent}, {contents}"
    except errors.StorageError as error:  # we cannot look at it, so we report only that
        return error.message


def _names_in(disk: Disk, path: str) -> list[str] | None:
    """The names in a directory; ``None`` if it is a file, or we may not look into it."""
    if os.path.exists(path) and not (os.path.isdir(path) and os.access(path, os.R_OK)):
        return None  # without an error, because errors need torch, whose import takes seconds
    try:
        return disk.list_directory(path)
    except errors.StorageError:
        return None


def _of_file(disk: Disk, path: str) -> str:
    name = os.path.basename(path)
    if name == METADATA_NAME or is_data_file(name):
        return f"{path} is a file of a checkpoint: pass its directory, {os.path.dirname(path)}"
    if name.endswith(SAFETENSORS_SUFFIX):
        return f"{path} is a safetensors file: pass its directory, {os.path.dirname(path)}"
    if _is_of_torch_save(_beginning_of(disk, path)):
        return f"{path} is a file of torch.save, not a checkpoint's directory: {_HOW_TO_LOAD_ONE_FILE}"
    return f"{path} is a file, and a checkpoint is a directory"


def _beginning_of(disk: Disk, path: str) -> bytes:
    with disk.reading(path) as file:
        return disk.read(file, 0, 512)


def _is_of_torch_save(beginning: bytes) -> bool:
    # A zip archive; or, up to torch 1.5 and on request, a pickle that begins with this number.
    is_legacy = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." in beginning[:16]
    return is_legacy or (beginning.startswith(b"PK\x03\x04") and b"/data.pkl" in beginning)


def _contents_of(disk: Disk, path: str, names: list[str]) -> str:
    """Describe what a directory without ``.metadata`` holds: its checkpoints, if there are any."""
    if not names:
        return "and is empty"
    if METADATA_NAME in names:
        return "and is a checkpoint: pass that"
    checkpoints = []
    for name in sorted(names, key=_latest_first)[:_DIRECTORIES_LOOKED_INTO]:
        within = _names_in(disk, os.path.join(path, name)) or ()
        if METADATA_NAME in within or any(each.endswith(SAFETENSORS_SUFFIX) for each in within):
            checkpoints.append(name)
    try:
        if checkpoints:
            tracked = ""
            if TRACKER_NAME in names:
                content = _beginning_of(disk, os.path.join(path, TRACKER_NAME))[:32].decode(errors="replace")
                tracked = f" ({TRACKER_NAME} says {content.strip()!r})"
            return f"and holds the checkpoints {listed(checkpoints, _SHOWN)}{tracked}: pass the path of one of them"
        for name in [name for name in names if name.endswith((".pt", ".pth", ".bin", ".ckpt"))][:_SHOWN]:
            if _is_of_torch_save(_beginning_of(disk, os.path.join(path, name))):
                return f"and holds {name}, which is a file of torch.save: {_HOW_TO_LOAD_ONE_FILE}"
    except errors.StorageError:
        pass  # What cannot be read is not told. No `suppress`: that would import our errors, and so torch, each time.
    return f"and holds {listed(checkpoints or names, _SHOWN)}"


def _latest_first(name: str) -> tuple[bool, int, str]:
    """Sorts names that contain numbers (``step_100``, ``iter_0000100``, ``100``)."""
    numbers = re.findall(r"\d+", name)
    return not numbers, -int(numbers[-1][:18]) if numbers else 0, name
