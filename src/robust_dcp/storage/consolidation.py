"""Turns a checkpoint into a Hugging Face model: whole tensors in ``model-0000k-of-0000n.safetensors``, and their index.

This module decides which tensor goes into which file. None of the names appears before all files are complete and
durable. ``model_file`` fills a file. All this happens in one process. Users call it as
``robust_dcp.storage.consolidate``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from robust_dcp.errors import StorageError, entry_point
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import SAFETENSORS_SUFFIX, directory_path, is_url
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts.safetensors_head import DTYPES, METADATA_KEY
from robust_dcp.storage.metadata.shard_metadata import shards_in
from robust_dcp.storage.model_file import write_model_file
from robust_dcp.storage.pieces import NamedTensor, PieceReader

__all__ = ["INDEX_NAME", "ConsolidateReport", "check_dtypes", "consolidate", "in_shards", "index_of"]

INDEX_NAME: Final = "model.safetensors.index.json"


@dataclass(frozen=True)
class ConsolidateReport:
    """What :func:`consolidate` has written.

    Attributes:
        files: the names of the files in the output directory; the index comes last.
        tensors: how many tensors were written.
        nbytes: bytes of tensor data.
        skipped: keys of items that are not tensors.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    skipped: tuple[str, ...]


@entry_point
def consolidate(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 << 30,
    keys: Collection[str] | None = None,
    buffer_bytes: int = 256 << 20,
    disk: Disk | None = None,
) -> ConsolidateReport:
    """Write the tensors of a checkpoint as the safetensors files of a Hugging Face model, with their index.

    Everything that ``RobustReader`` reads can be consolidated, whatever its layout and however many ranks saved it. It
    takes ``buffer_bytes`` of memory and what the reader needs, whatever the sizes of tensors: a larger tensor is copied
    piece by piece. Items that are read as a whole are compared with their checksums.

    Args:
        path: the checkpoint's directory.
        output: the directory to write to. It is created if it does not exist. It must not hold safetensors files, nor
            their index.
        max_shard_bytes: most bytes of tensor data in one file. A larger tensor gets a file of its own.
        keys: the tensors to write; ``None`` for all.
        buffer_bytes: limit for data that was read and not yet written.
        disk: the file system.

    Raises:
        ValueError: a key is not in the checkpoint, is not a tensor, or has a dtype that safetensors does not know; or a
            path is a URL (``scheme://…``).
        StorageError: a call to the file system failed, or ``output`` holds safetensors files or their index. What was
            there is untouched.
        CorruptCheckpoint: the checkpoint is damaged.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> from robust_dcp.storage.consolidation import consolidate
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = robust_dcp.save({"weight": torch.ones(4), "step": 1}, checkpoint_id=f"{path}/checkpoint")
        ...     report = consolidate(f"{path}/checkpoint", f"{path}/model")
        >>> report.files, report.skipped
        (('model-00001-of-00001.safetensors', 'model.safetensors.index.json'), ('step',))
    """
    if max_shard_bytes < 1 or buffer_bytes < 1:
        raise ValueError(f"max_shard_bytes and buffer_bytes must be positive, got {max_shard_bytes}, {buffer_bytes}")
    disk = PosixDisk() if disk is None else disk
    directory = directory_path(output)
    reader = PieceReader(path, disk=None if is_url(path) else disk, buffer_nbytes=buffer_bytes)
    tensors, skipped = _chosen(reader, keys)
    disk.mkdirs(directory)
    index_is_there = disk.exists(os.path.join(directory, INDEX_NAME))
    present = [*shards_in(disk, directory), *([INDEX_NAME] if index_is_there else [])]
    if present:
        raise StorageError(
            f"{directory} holds {present[0]}: readers of safetensors take every file of a directory; choose another",
            path=directory,
            operation="begin",
        )
    shards = in_shards(tensors, max_shard_bytes)
    with _Unfinished(disk, directory) as unfinished:
        for name, shard in shards.items():
            file = unfinished.create(name)
            write_model_file(disk, file, shard, reader.read, buffer_nbytes=buffer_bytes // 2)
            unfinished.complete(file)
        index = unfinished.create(INDEX_NAME)
        disk.pwrite(index, index_of(shards), 0)
        unfinished.complete(index)
        unfinished.publish()
    return ConsolidateReport(
        files=(*shards, INDEX_NAME),
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        skipped=skipped,
    )


def _chosen(reader: PieceReader, keys: Collection[str] | None) -> tuple[list[NamedTensor], tuple[str, ...]]:
    """The tensors to write, in the order of the metadata, and the names of items that are not tensors."""
    entries = reader.metadata.state_dict_metadata
    wanted = entries.keys() if keys is None else set(keys)
    missing = sorted(set(wanted) - entries.keys())
    objects = tuple(name for name in entries if name in wanted and name not in reader.tensors)
    if missing or (keys is not None and objects):
        problem = f"has no {missing[0]!r}" if missing else f"has an object and no tensor called {objects[0]!r}"
        raise ValueError(f"the checkpoint {problem}; choose keys among those of its tensors")
    tensors = [tensor for name, tensor in reader.tensors.items() if name in wanted]
    check_dtypes(tensors, "pass keys without it")
    return tensors, objects


def check_dtypes(tensors: Sequence[NamedTensor], what_to_do: str) -> None:
    """Find a tensor that safetensors cannot hold.

    Raises:
        ValueError: there is one. The message ends with ``what_to_do``.
    """
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.name == METADATA_KEY:
            raise ValueError(f"safetensors cannot hold {tensor.name!r}, a tensor of {tensor.dtype}; {what_to_do}")


def in_shards(tensors: Sequence[NamedTensor], max_nbytes: int) -> dict[str, list[NamedTensor]]:
    """Divide the tensors among files, in order, by the names that Hugging Face gives these.

    Each file has at least one tensor, and there is at least one file.
    """
    shards: list[list[NamedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return {
        f"model-{number:05d}-of-{len(shards):05d}{SAFETENSORS_SUFFIX}": shard for number, shard in enumerate(shards, 1)
    }


def index_of(shards: Mapping[str, Sequence[NamedTensor]]) -> bytes:
    """The bytes of ``model.safetensors.index.json``."""
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


class _Unfinished:
    """Files that are not complete yet. They have names that nobody reads, and are removed if an error occurs."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._names: list[tuple[str, str]] = []
        self._made: list[str] = []
        self._open: list[OpenFile] = []

    def __enter__(self) -> _Unfinished:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        for file in self._open:
            with contextlib.suppress(StorageError):
                self._disk.close(file)
        for path in self._made:
            with contextlib.suppress(StorageError):
                self._disk.unlink(path)

    def create(self, name: str) -> OpenFile:
        """Create a file that will get the name ``name``."""
        path = os.path.join(self._directory, name)
        temporary = f"{path}.{secrets.token_hex(8)}.part"
        file = self._disk.open_new(temporary)
        self._names.append((temporary, path))
        self._made.append(temporary)
        self._open.append(file)
        return file

    def complete(self, file: OpenFile) -> None:
        """Make the bytes of ``file`` durable and close it."""
        self._disk.fsync(file)
        self._disk.close(file)

    def publish(self) -> None:
        """Give all files their final names, in the order in which they were made. No file is replaced."""
        self._disk.fsync_directory(self._directory)
        for temporary, path in self._names:
            if self._disk.exists(path):
                raise StorageError(
                    f"{path} was made by another program meanwhile: choose another directory, and consolidate again",
                    path=path,
                    operation="rename",
                )
            self._disk.rename(temporary, path)
            self._made.append(path)
        self._disk.fsync_directory(self._directory)
