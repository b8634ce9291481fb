"""Sends one file from a store to another, and makes sure that it has arrived as it was read.

This module owns what counts as arrived. It never decides which files are sent. ``copy`` calls it, from several threads.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from robust_dcp.drain.bandwidth import Bandwidth
from robust_dcp.drain.content import ContentSums, OpenSource, part_nbytes_of, parts_of
from robust_dcp.drain.stores import Store
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.remote.calls import Calls
from robust_dcp.storage.remote.copy_options import CopyOptions

__all__ = ["Tally", "Transfer"]


@dataclass
class Tally:
    """What a copy has done so far. Several threads add to it.

    Attributes:
        files, nbytes: what was sent.
        skipped_files, skipped_nbytes: what was there already, and verified.
        verified_by_store, verified_by_reading: how many files were verified in which way.
    """

    files: int = 0
    nbytes: int = 0
    skipped_files: int = 0
    skipped_nbytes: int = 0
    verified_by_store: int = 0
    verified_by_reading: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class Transfer:
    """Sends files from one store to another.

    Args:
        calls: makes a file's whole transfer once more where a store cannot send a part again.
        note_progress: called after each part, with its bytes if they have not counted yet.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        options: CopyOptions,
        calls: Calls,
        bandwidth: Bandwidth,
        tally: Tally,
        note_progress: Callable[[int], None],
    ) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._calls = calls
        self._bandwidth = bandwidth
        self._tally = tally
        self._note_progress = note_progress

    def send(self, name: str, target_name: str, there_nbytes: int | None) -> int:
        """Make sure that a file of the source is at the target.

        Args:
            name, target_name: its names.
            there_nbytes: the size of the file of that name that is at the target.

        Returns:
            Its size.

        Raises:
            StorageError: it cannot be read or sent.
            CorruptCheckpoint: it is damaged, or arrives otherwise than it was sent.
        """
        source = self._source.open(name)
        try:
            if there_nbytes == source.nbytes and self._is_there(source, name, target_name):
                self._tally.add(skipped_files=1, skipped_nbytes=source.nbytes)
                return source.nbytes
            sums = self._send(source, name, target_name)
            if self._verify(target_name, sums) is not None:
                sums = self._send(source, name, target_name)
                found = self._verify(target_name, sums)
                if found is not None:
                    raise self._not_as_sent(target_name, sums, f"{found}; it was sent twice")
            self._tally.add(files=1, nbytes=source.nbytes)
            return source.nbytes
        finally:
            source.close()

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at the target, and make sure that it is there.

        Raises:
            StorageError, CorruptCheckpoint: as :meth:`send`.
        """
        sums = ContentSums()
        sums.add(data)
        self._bandwidth.take(len(data))
        self._target.put(name, data)
        found = self._target.read_whole(name)
        if found != data:
            raise self._not_as_sent(name, sums, f"{len(found)} bytes with CRC-32 {crc32(found):08x}")
        self._tally.add(files=1, nbytes=len(data), verified_by_reading=1)

    def _part_nbytes(self, source: OpenSource) -> int:
        return part_nbytes_of(source.nbytes, self._options.part_bytes)

    def _is_there(self, source: OpenSource, name: str, target_name: str) -> bool:
        """Whether the target has this content. The source is read for that, and the target too if it has no sums."""
        return self._verify(target_name, self._sums_of(source, name)) is None

    def _send(self, source: OpenSource, name: str, target_name: str) -> ContentSums:
        if self._target.repeats_parts:
            try:
                return self._send_parts(source, name, target_name)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
            # The upload is gone: it was finished by a call whose answer was lost, or by another copy of this save, or
            # somebody has removed it.
            return self._sums_if_arrived(source, name, target_name) or self._send_parts(source, name, target_name)
        # Each call within has its limit of time, so the whole has none.
        path = self._target.path_of(target_name)
        n_tries = 0
        while True:
            try:
                return self._send_parts(source, name, target_name)
            except StorageError as error:  # noqa: PERF203 a try takes longer than that
                if not self._calls.may_try_again("send", path, error, n_tries):
                    raise
                n_tries += 1

    def _sums_if_arrived(self, source: OpenSource, name: str, target_name: str) -> ContentSums | None:
        sums = self._sums_of(source, name)
        try:
            return sums if self._verify(target_name, sums) is None else None
        except StorageError:
            return None

    def _sums_of(self, source: OpenSource, name: str) -> ContentSums:
        sums = ContentSums(wants_md5=self._target.wants_md5)
        for part in parts_of(source, self._source.path_of(name), self._part_nbytes(source)):
            sums.add(part)
            self._note_progress(len(part))
        return sums

    def _send_parts(self, source: OpenSource, name: str, target_name: str) -> ContentSums:
        part_nbytes = self._part_nbytes(source)
        sums = ContentSums(wants_md5=self._target.wants_md5)
        upload = self._target.begin(target_name, source.nbytes, part_nbytes)
        try:
            for number, part in enumerate(parts_of(source, self._source.path_of(name), part_nbytes)):
                sums.add(part)
                self._bandwidth.take(len(part))
                upload.write(number, part)
                self._note_progress(len(part))
            upload.finish()
        except BaseException:
            upload.abandon()
            raise
        return sums

    def _verify(self, target_name: str, sums: ContentSums) -> str | None:
        """``None`` if the target has this content; else what was found there."""
        if self._options.verify == "store" and self._target.proves(target_name, sums):
            self._tally.add(verified_by_store=1)
            return None
        found = self._read_back(target_name, sums)
        if found is None:
            self._tally.add(verified_by_reading=1)
        return found

    def _read_back(self, target_name: str, sums: ContentSums) -> str | None:
        there = self._target.open(target_name)
        try:
            if there.nbytes != sums.nbytes:
                return f"{there.nbytes} bytes"
            value = offset = 0
            while offset < there.nbytes:
                data = there.read(offset, min(self._options.part_bytes, there.nbytes - offset))
                value = crc32(data, value)
                offset += len(data)
                self._note_progress(0)  # its bytes have counted when they were sent
        finally:
            there.close()
        return None if value == sums.crc32 else f"{there.nbytes} bytes with CRC-32 {value:08x}"

    def _not_as_sent(self, name: str, sums: ContentSums, found: str) -> CorruptCheckpoint:
        path = self._target.path_of(name)
        expected = f"{sums.nbytes} bytes with CRC-32 {sums.crc32:08x}"
        return CorruptCheckpoint(
            f"{path} is not as it was sent: expected {expected}, found {found}. The copy is not committed. "
            "Look whether another program writes there, and copy again",
            file=path,
            expected=expected,
            found=found,
        )
