"""The metadata of one checkpoint for one load: from its index, its ``.metadata``, or the heads of a model's files.

This module owns which of them is used, and notices when another save has replaced what was read. It reads no data.
``RobustReader`` has one for each load.
"""

from __future__ import annotations

import logging
import os
import sys
from errno import ENOENT, ENOTDIR

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import metadata_name
from robust_dcp.storage.files.what_is_there import what_is_there
from robust_dcp.storage.index.form import DamagedIndex, fit_of, fit_of_file
from robust_dcp.storage.index.stored_index import StoredIndex, lazy_metadata, open_index
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata, metadata_of_shards, shards_in
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES, files_are_marked

logger = logging.getLogger(__name__)


def overwritten(path: str, error: RobustCheckpointError) -> StorageError:
    """The error of a load when another save has replaced its files. ``error`` is the error by which that was
    noticed.
    """
    return StorageError(
        f"{path} was overwritten while it was loaded: load it again once no save runs into it, or save each step into "
        f"a directory of its own ({error.message})",
        path=path,
        operation="load",
    )


class StoredMetadata(msgspec.Struct, frozen=True):
    """Where the ranks of a load get the metadata from.

    Attributes:
        index: the identity of the index to use, 32 bytes, by which each rank recognises it. It is empty without one.
        file: otherwise the bytes of ``.metadata``.
    """

    index: bytes = b""
    file: bytes = b""


class MetadataSource(msgspec.Struct, eq=False):
    """Where the metadata of a checkpoint comes from.

    Args:
        disk: the file system.
        path: the checkpoint's directory, or a URL of fsspec.
    """

    disk: Disk
    path: str
    _index: StoredIndex | None = None
    _was_read: tuple[int | None, bytes] | None = None
    _are_marked: bool | None = None

    def path_of_metadata(self, rank: int | None = None) -> str:
        """The path of ``.metadata``, or of the one that ``rank`` has written without collectives."""
        return os.path.join(self.path, metadata_name(rank))

    def is_there(self, rank: int) -> bool:
        """Whether there is a ``__{rank}.metadata``, which a DCP save without collectives writes."""
        return self.disk.exists(self.path_of_metadata(rank))

    def metadata_bytes(self, rank: int | None = None) -> bytes:
        """The bytes of ``.metadata``, after a check. They can be sent to other ranks, which decode them with
        :meth:`decode_metadata`.

        Checkpoints by torch's ``HuggingFaceStorageWriter`` and Hugging Face models have safetensors files and no
        ``.metadata``. For these it is made from the heads of the files.

        Args:
            rank: read ``__{rank}.metadata`` instead, which a DCP save without collectives writes.

        Raises:
            StorageError: there is no such file, so nothing was committed here; or it cannot be read.
        """
        path = self.path_of_metadata(rank)
        try:
            _, data = self.disk.read_end(path, sys.maxsize)
        except StorageError as error:
            if error.errno not in (ENOENT, ENOTDIR):
                raise
            shards = [] if rank is not None or error.errno == ENOTDIR else shards_in(self.disk, self.path)
            if shards:
                return encode_metadata(metadata_of_shards(self.disk, self.path, shards))
            what = what_is_there(self.disk, self.path)
            message = f"no {metadata_name(rank)} in {self.path}: no checkpoint was committed there; {what}"
            raise StorageError(message, path=path, errno=error.errno, operation="open") from error
        self._was_read = rank, fit_of([data])
        return data

    def decode_metadata(self, data: bytes, rank: int | None = None) -> Metadata:
        """Decode what :meth:`metadata_bytes` returned, here or on another rank.

        Raises:
            CorruptCheckpoint, UnsafeCheckpoint: as :func:`~robust_dcp.storage.metadata.metadata_file.decode_metadata`.
        """
        self._are_marked = files_are_marked(data)
        return decode_metadata(data, self.path_of_metadata(rank))

    def find(self, *, by_index: bool = True) -> StoredMetadata:
        """Look for an index that fits the ``.metadata`` beside it, and check all of it. Without one, which is logged if
        it is damaged, read ``.metadata``.

        Args:
            by_index: whether an index may be used.

        Raises:
            StorageError: as :meth:`metadata_bytes`.
        """
        try:
            self._index = open_index(self.disk, self.path) if by_index else None
            if self._index is not None:
                self._index.file.check_all()
                self._was_read = None, self._index.file.fit
                return StoredMetadata(index=self._index.file.identity)
        except (DamagedIndex, StorageError) as error:
            logger.warning("%s; .metadata is read instead", error.message)
            self._index = None
        return StoredMetadata(file=self.metadata_bytes())

    def open(self, stored: StoredMetadata) -> Metadata | None:
        """The metadata that :meth:`find` has found, on this rank or another. Those of an index look up an entry when it
        is asked for.

        Returns:
            ``None`` if the index in the directory is another one on this rank, or cannot be opened, which is logged.

        Raises:
            CorruptCheckpoint, UnsafeCheckpoint: as :meth:`decode_metadata`.
        """
        if not stored.index:
            return self.decode_metadata(stored.file)
        try:
            if self._index is None or self._index.file.identity != stored.index:
                self._index = open_index(self.disk, self.path, identity=stored.index)
            if self._index is None:
                return None
            self._are_marked = True  # a version that writes an index also writes marks
            return lazy_metadata(self._index)
        except (DamagedIndex, StorageError) as error:
            logger.warning("%s; .metadata is read instead", error.message)
            return None

    def files_are_marked(self) -> bool:
        """Whether the files have marks, according to the ``.metadata`` that was set up. Another reader may have read
        that.
        """
        if self._are_marked is None:
            path = self.path_of_metadata()
            is_there = self.disk.exists(path)
            self._are_marked = is_there and files_are_marked(self.disk.read_end(path, TRAILER_NBYTES)[1])
        return self._are_marked

    def is_overwritten(self) -> bool:
        """Whether the ``.metadata`` that was last read here has been replaced since."""
        if self._was_read is None:
            return False
        rank, fit = self._was_read
        try:
            return fit_of_file(self.disk, self.path_of_metadata(rank)) != fit
        except StorageError:
            return False

    def fit(self) -> bytes:
        """The digest of the ``.metadata`` that this rank sees; empty if it sees none."""
        try:
            return fit_of_file(self.disk, self.path_of_metadata())
        except StorageError:
            return b""
