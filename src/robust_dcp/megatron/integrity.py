"""Megatron's manifest of file hashes, ``integrity.json`` (``--verify-integrity``, 0.19). All ranks share the hashing.

In a save each rank hashes the files that it has written, and the manifest is committed with them. Before a load each
rank hashes its share of all files. In stock, rank 0 hashes everything. With a large checkpoint the other ranks would
then wait longer than the timeout of an exchange.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

import msgspec
from megatron.core.dist_checkpointing.core import CheckpointingException

from robust_dcp.comm import Channel
from robust_dcp.decoding import from_json
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.megatron.common_state import MAX_NBYTES
from robust_dcp.megatron.versions import backend_of
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.files.small_files import read_small_file

MANIFEST_FILE = "integrity.json"

_ALGORITHM = "sha256"


class _Manifest(msgspec.Struct, frozen=True):
    """The file as Megatron writes and reads it."""

    files: dict[str, str]
    algorithm: str = _ALGORITHM


def encode_manifest(hashes: Mapping[str, str]) -> bytes:
    """The bytes of the manifest of files with these hashes. Stock verifies it."""
    return msgspec.json.format(msgspec.json.encode(_Manifest(dict(sorted(hashes.items())))), indent=2)


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
        f"{phase}: verify files",
        lambda: _compare(directory, {name: manifest.files[name] for name in share}, channel.check_stop),
    )


def _read_manifest(directory: str) -> _Manifest:
    """The manifest that has the hash of this ``.metadata``. If the save was killed right after its commit, it still has
    the mark of the save behind its name."""
    backend_of(directory)
    disk, path = Disk(), os.path.join(directory, MANIFEST_FILE)
    of_metadata = disk.hashes_of({METADATA_NAME: os.path.join(directory, METADATA_NAME)})[METADATA_NAME]
    marked = [name for name in disk.list_directory(directory) if name.startswith(f"{MANIFEST_FILE}.")]

    def read(name: str) -> _Manifest | CorruptCheckpoint | None:
        try:
            return read_small_file(
                disk,
                os.path.join(directory, name),
                partial(from_json, kind=_Manifest),
                what="a manifest of files",
                at_most=MAX_NBYTES,
            )
        except CorruptCheckpoint as error:  # one with a mark may be of a save that was killed while it wrote
            return error

    unmarked = read(MANIFEST_FILE)
    manifests = (each for each in chain([unmarked], map(read, marked)) if isinstance(each, _Manifest))
    manifest = next((each for each in manifests if each.files.get(METADATA_NAME) == of_metadata), unmarked)
    if manifest is None:
        raise CheckpointingException(
            f"there is no {path}: only a checkpoint that was saved with --verify-integrity can be verified"
        )
    if isinstance(manifest, CorruptCheckpoint):
        raise CheckpointingException(f"{path} is not a manifest of files: {manifest.found}")
    if manifest.algorithm != _ALGORITHM:
        raise CheckpointingException(f"{path} holds hashes of {manifest.algorithm!r}, expected {_ALGORITHM!r}")
    return manifest


def _compare(directory: str, expected: Mapping[str, str], check_stop: Callable[[int, int], None]) -> None:
    wrong = {}
    for name, digest in expected.items():
        problem = _difference(directory, name, digest, check_stop)
        # If the save was killed right after its commit, the file still has the mark of the save behind its name.
        marked = [each for each in os.listdir(directory) if problem and each.startswith(f"{name}.")]
        if problem and all(_difference(directory, each, digest, check_stop) for each in marked):
            wrong[name] = problem
    if wrong:
        problems = "; ".join(f"{name}: {problem}" for name, problem in sorted(wrong.items()))
        raise CheckpointingException(
            f"{len(wrong)} of {len(expected)} files in {directory} that this rank verified are not as they were saved: "
            f"{problems}"
        )


def _difference(directory: str, name: str, digest: str, check_stop: Callable[[int, int], None]) -> str:
    """Why a file is not as it was saved; empty if it is."""
    path = os.path.join(directory, name)
    if os.path.basename(name) != name:
        return "not a file of this directory"
    if os.path.exists(path) and not os.path.isfile(path):
        return "no regular file"
    try:
        actual = Disk().hashes_of({name: path}, check_stop)[name]
    except StorageError as error:
        return os.strerror(error.errno) if error.errno else error.message
    return "" if actual == digest else f"expected {digest:.16}…, found {actual:.16}…"
