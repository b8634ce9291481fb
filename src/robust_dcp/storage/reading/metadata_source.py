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

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import mark_of, metadata_name, name_before_commit
from robust_dcp.storage.files.what_is_there import why_nothing_is_committed
from robust_dcp.storage.index.form import DamagedIndex, fit_of, fit_of_file
from robust_dcp.storage.index.stored_index import StoredIndex, lazy_metadata, open_index
from robust_dcp.storage.metadata.metadata_file import (
    decode_metadata,
    digest_beside,
    encode_metadata,
    files_beside,
    metadata_of_shards,
    shards_in,
)
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES, files_are_marked

logger = logging.getLogger(__name__)


def overwritten(path: str, reason: str) -> StorageError:
    """The error of a load when another save has replaced its files. ``reason`` is how that was noticed."""
    return StorageError(
        f"{path} was overwritten while it was loaded: load it again once no save runs into it, or save each step into "
        f"a directory of its own ({reason})",
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
            message = why_nothing_is_committed(self.disk, self.path, metadata_name(rank))
            raise StorageError(message, path=path, errno=error.errno, operation="open") from error
        self._was_read = rank, fit_of(len(data), data)
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

    def read_beside(self, name: str, at_most: int, *, trusted: bool = False, begins: bytes = b"") -> bytes | None:
        """A file that belongs to the checkpoint and lies beside its data, such as Megatron's ``common.pt``; ``None`` if
        the checkpoint has none.

        A save gives it its name right after the commit. If the save was killed just then, the name may still be that of
        the earlier checkpoint's file, and the file of this checkpoint still has the mark of the save behind its name.

        Args:
            trusted: whether a file that is not the one that was saved is only logged, for who has changed it.
            begins: as for :meth:`Disk.read_file`.

        Raises:
            CorruptCheckpoint: the file that has the name is not the one of this checkpoint, or is too long.
            StorageError: a file cannot be read.
        """
        path, saves_seen = os.path.join(self.path, name), set[str | None]()
        while True:
            digests, save_id = self._saved_beside()
            data = self.disk.read_file(path, at_most, begins=begins)
            if not digests:  # of stock, or of a save that knew of no such files
                return data
            if name not in digests:  # it is a file of an earlier checkpoint
                return None
            if data is not None and digest_beside(data) == digests[name]:
                return data
            before = os.path.join(self.path, name_before_commit(name, mark_of(save_id or "")))
            of_save = self.disk.read_file(before, at_most, begins=begins)
            if of_save is not None and digest_beside(of_save) == digests[name]:
                logger.warning(
                    "%s is read in the place of %s: the save was killed right after its commit. Other readers would "
                    "take the file of an earlier checkpoint; give this one its name by renaming it",
                    before,
                    name,
                )
                return of_save
            if save_id not in saves_seen:  # unless a save has committed meanwhile
                saves_seen.add(save_id)
            elif data is None:
                return None
            else:
                expected, found = (f"SHA-256 {each:.16}…" for each in (digests[name], digest_beside(data)))
                if trusted:
                    logger.warning("%s was not saved with this checkpoint, and is read as it is trusted", path)
                    return data
                raise CorruptCheckpoint.of_file(
                    path,
                    expected,
                    found,
                    problem="was not saved with this checkpoint",
                    advice="it is damaged, or of another save: restore it, or take another checkpoint. If you have "
                    "changed it yourself, load it as trusted",
                )

    def _saved_beside(self) -> tuple[dict[str, str], str | None]:
        """The digests of the files beside the data, and the id of the save; no digests if it is not one of ours."""
        meta, path = None, self.path_of_metadata()
        try:
            index = open_index(self.disk, self.path)
            meta = None if index is None else lazy_metadata(index).storage_meta
        except (DamagedIndex, StorageError) as error:
            logger.warning("%s; .metadata is read instead", error.message)
        # To decode .metadata may take long, so that of others is not: it has no such digests.
        if meta is None and self.disk.exists(path) and files_are_marked(self.disk.read_end(path, TRAILER_NBYTES)[1]):
            meta = self.decode_metadata(self.metadata_bytes()).storage_meta
        return files_beside(meta), None if meta is None else meta.save_id

    def fit(self) -> bytes:
        """The digest of the ``.metadata`` that this rank sees; empty if it sees none."""
        try:
            return fit_of_file(self.disk, self.path_of_metadata())
        except StorageError:
            return b""
