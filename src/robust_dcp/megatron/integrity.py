"""Megatron's manifest of file hashes, ``integrity.json`` (``--verify-integrity``, 0.19). All ranks share the hashing.

After a save each rank hashes the files that it wrote, and the coordinator hashes the files that no rank of this save
wrote. Before a load each rank hashes its share of all files. In stock, rank 0 hashes everything. With a large
checkpoint the other ranks would then wait longer than the timeout of an exchange.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import partial

import msgspec
from megatron.core.dist_checkpointing.core import CheckpointingException

from robust_dcp.comm import Channel
from robust_dcp.decoding import from_json
from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.megatron.common_state import MAX_NBYTES
from robust_dcp.megatron.versions import backend_of
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.small_files import read_small_file

MANIFEST_FILE = "integrity.json"

_ALGORITHM = "sha256"
_BLOCK_NBYTES = 1 << 20


class _Manifest(msgspec.Struct, frozen=True):
    """The file as Megatron writes and reads it. A rank also sends the hashes of its own files in this form."""

    files: dict[str, str]
    algorithm: str = _ALGORITHM


def save_manifest(channel: Channel, phase: str, directory: str, names: Iterable[str]) -> None:
    """Write the manifest of a complete checkpoint. Stock can verify it. All ranks call this.

    Args:
        phase: the phase of the save, for error messages.
        directory: the checkpoint's directory.
        names: of the files that this rank wrote. The coordinator hashes all other files.

    Raises:
        RobustCheckpointError: a file cannot be read, or the manifest cannot be written. All ranks raise the same error.
    """

    def write(gathered: list[_Manifest | None]) -> None:
        files = {name: found for each in gathered if each is not None for name, found in each.files.items()}
        there = [entry.name for entry in os.scandir(directory) if entry.is_file() and entry.name != MANIFEST_FILE]
        files |= _hashes_of(directory, (name for name in there if name not in files))
        data = msgspec.json.format(msgspec.json.encode(_Manifest(dict(sorted(files.items())))), indent=2)
        Disk().replace_file(os.path.join(directory, MANIFEST_FILE), data)

    channel.gather(f"{phase}: hash files", lambda: _Manifest(_hashes_of(directory, names)), _Manifest, then=write)


def verify_files(channel: Channel, phase: str, directory: str) -> None:
    """Compare all files of a checkpoint with its manifest. All ranks call it.

    Args:
        phase: the phase of the load, for error messages.
        directory: the checkpoint's directory.

    Raises:
        RobustCheckpointError: there is no checkpoint or no manifest, a file is missing, or a file is not what the
            manifest says. All ranks raise it. Its cause is a ``CheckpointingException``, as in stock.
    """
    manifest = channel.broadcast(f"{phase}: manifest", lambda: _read_manifest(directory), _Manifest)
    share = sorted(manifest.files)[channel.rank :: channel.size]
    channel.barrier(
        f"{phase}: verify files", lambda: _compare(directory, {name: manifest.files[name] for name in share})
    )


def _read_manifest(directory: str) -> _Manifest:
    backend_of(directory)
    path, decode = os.path.join(directory, MANIFEST_FILE), partial(from_json, kind=_Manifest)
    try:
        manifest = read_small_file(Disk(), path, decode, what="a manifest of files", at_most=MAX_NBYTES)
    except CorruptCheckpoint as error:
        raise CheckpointingException(f"{path} is not a manifest of files: {error.found}") from None
    if manifest is None:
        raise CheckpointingException(
            f"there is no {path}: only a checkpoint that was saved with --verify-integrity can be verified"
        )
    if manifest.algorithm != _ALGORITHM:
        raise CheckpointingException(f"{path} holds hashes of {manifest.algorithm!r}, expected {_ALGORITHM!r}")
    return manifest


def _compare(directory: str, expected: dict[str, str]) -> None:
    wrong = []
    for name, digest in expected.items():
        if os.path.basename(name) != name:
            wrong.append(f"{name}: not a file of this directory")
            continue
        if os.path.exists(os.path.join(directory, name)) and not os.path.isfile(os.path.join(directory, name)):
            wrong.append(f"{name}: no regular file")
            continue
        try:
            found = _hash(os.path.join(directory, name))
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
            continue
        if found != digest:
            wrong.append(f"{name}: expected {digest[:16]}…, found {found[:16]}…")
    if wrong:
        raise CheckpointingException(
            f"{len(wrong)} of {len(expected)} files in {directory} that this rank verified are not as they were saved: "
            f"{'; '.join(wrong)}"
        )


def _hashes_of(directory: str, names: Iterable[str]) -> dict[str, str]:
    return {name: _hash(os.path.join(directory, name)) for name in names}


def _hash(path: str) -> str:
    found = hashlib.new(_ALGORITHM)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_NBYTES):
            found.update(block)
    return found.hexdigest()
