"""Copies a checkpoint to another place, where it counts from the moment that its ``.metadata`` is there.

This module owns what a copy is, and the order. A copy puts its claim at the target, sends data files, sends all other
files, makes sure that nothing has changed at either end, writes ``.metadata``, and removes its claim. Each file is
verified at the target after it was sent. A place that holds anything else than this checkpoint is refused.

Data files of our saves have names that no other save gives. So two copies of different saves to one place do not touch
each other's files, and the one that commits second finds ``.metadata`` and fails. A checkpoint of stock or Megatron has
names that others have, so its copy gives way to any other claim. A copy that goes on after a kill finds its own claim,
and sends what has not arrived.

A step that is saved again into its directory goes to the same place again. There it replaces the copy of the checkpoint
that it has replaced here, and no other: first all new files arrive, then ``.metadata`` is replaced, then the old data
files go.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from robust_dcp.drain.places import Content, Place, open_place
from robust_dcp.drain.record import DRAIN_RECORD_NAME, DrainRecord, awaited_copy, digest_of, note_arrival
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError, entry_point
from robust_dcp.report import listed
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import (
    COPYING_PREFIX,
    METADATA_NAME,
    PARITY_PREFIX,
    REMOVING_PREFIX,
    SAVING_PREFIX,
    committed_name,
    is_data_file,
    mark_of,
    place_of,
    real_place,
    writer_of,
)
from robust_dcp.storage.files.what_is_there import why_nothing_is_committed
from robust_dcp.storage.layouts.blocks import blocks_in
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.remote import Calls, CopyOptions
from robust_dcp.threads import submit

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_NOT_COPIED: Final = (SAVING_PREFIX, COPYING_PREFIX, REMOVING_PREFIX, PARITY_PREFIX, DRAIN_RECORD_NAME)
_CLAIM_TRIES: Final = 5
_SHOWN: Final = 5


@dataclass
class CopyResult:
    """What a copy has done.

    Attributes:
        source, target: from where, and to where.
        files, nbytes: how much was sent.
        skipped_files, skipped_nbytes: how much was there already, and was verified.
        seconds: how long it took.
        retries: how many calls were made once more.
    """

    source: str
    target: str
    files: int = 0
    nbytes: int = 0
    skipped_files: int = 0
    skipped_nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0


@entry_point
def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
) -> CopyResult:
    """Copy a checkpoint to another directory or to an object store, in either direction, or between two of them.

    Data files go first, and each is verified at the target. ``.metadata`` goes last, so a load never finds half a copy.
    A copy that was cut off goes on if it is started again: a file that is there and verifies is not sent again. That
    holds for a drain as well, and its local checkpoint is not awaited any more.

    Args:
        source: a path, or any URL of fsspec. The checkpoint may be of robust_dcp, of stock or of Megatron.
        target: a path or URL that holds nothing else than this checkpoint.
        options: see :class:`CopyOptions`.
        progress: called from several threads with two numbers: the bytes that have been sent, or were found at the
            target, and the bytes of the checkpoint.

    Raises:
        StorageError: a call failed and could not be repeated; no checkpoint is at the source; the source was replaced
            meanwhile; something else is at the target.
        CorruptCheckpoint: the source is damaged, or a file has not arrived as it was sent.
        UnsafeCheckpoint: the metadata of the source leads out of its directory, or would run code.
        ValueError: a URL is of a kind that fsspec does not know.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{root}/step_1")
        ...     copied = robust_dcp.copy_checkpoint(f"{root}/step_1", f"file://{root}/durable/step_1")
        ...     again = robust_dcp.copy_checkpoint(f"{root}/step_1", f"{root}/durable/step_1")
        >>> copied.skipped_files, again.files
        (0, 0)
    """
    copy = Copy(source, target, options or CopyOptions(), progress=progress)
    with needed_for_a_load(copy.source.disk, copy.source.url):
        with suppress(StorageError):
            awaited = awaited_copy(copy.source.disk, copy.source.url)
            if awaited is not None and real_place(awaited.target) == real_place(copy.result.target):
                copy.record = awaited  # this is the copy that a drain has begun
        copy.begin()
        copy.send_data(copy.manifest.data)
        copy.commit()
        if copy.record.target:
            note_arrival(copy.source.disk, copy.source.url, copy.record)
    return copy.result


class _Manifest(msgspec.Struct, frozen=True):
    """What belongs to a checkpoint, whoever has written it.

    Attributes:
        metadata: the bytes of ``.metadata``.
        data: the data files that it names, with their sizes where they are known.
        extras: all other files, such as the index or Megatron's ``common.pt``, with their sizes.
    """

    metadata: bytes
    data: Mapping[str, int | None]
    extras: Mapping[str, int]

    @classmethod
    def read(cls, place: Place) -> _Manifest:
        """What belongs to the checkpoint at a place.

        Raises:
            StorageError: there is no checkpoint.
            CorruptCheckpoint, UnsafeCheckpoint: its metadata cannot be used, or a file is shorter than it says.
        """
        files, metadata = place.files(), place.read(METADATA_NAME)
        if metadata is None:
            raise StorageError(
                why_nothing_is_committed(place.disk, place.url),
                path=place.path_of(METADATA_NAME),
                operation="copy",
            )
        ends: dict[str, int] = {}
        for info in (decode_metadata(metadata, place.path_of(METADATA_NAME)).storage_data or {}).values():
            ends[info.relative_path] = max(info.offset + info.length, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            if files.get(name, end) < end:
                raise CorruptCheckpoint.of_file(place.path_of(name), f"{end} bytes or more", str(files[name]))
        extras = {name: nbytes for name, nbytes in files.items() if name not in ends and _is_extra(name)}
        # Data files of other nodes may be missing in the list.
        return cls(metadata, {name: files.get(name) for name in ends}, extras)

    @property
    def digest(self) -> str:
        """Tells this checkpoint from others, as ``digest_at`` does."""
        return digest_of(len(self.metadata), self.metadata)

    @property
    def names(self) -> set[str]:
        """The names of all its files."""
        return {METADATA_NAME, *self.data, *self.extras}


def _is_claim(name: str) -> bool:
    return name.startswith(COPYING_PREFIX)


def _whose(metadata: bytes) -> str:
    """Which save has written a ``.metadata``, for people."""
    save_id = None
    with suppress(RobustCheckpointError):
        save_id = getattr(decode_metadata(metadata, METADATA_NAME).storage_meta, "save_id", None)
    return f"of the save {mark_of(save_id)}" if isinstance(save_id, str) else "of a save that is not known"


def _has_mark(name: str) -> bool:
    """Whether a data file has the mark of a save of ours in its name, which no other save gives."""
    writer = writer_of(name.rpartition("/")[2])
    return writer is not None and bool(writer.mark)


def _is_extra(name: str) -> bool:
    """Whether a file that ``.metadata`` does not name belongs to the checkpoint: not what saves need while they run."""
    last = name.rpartition("/")[2]
    if last.startswith(_NOT_COPIED) or last.endswith((".tmp", ".part")):
        return False
    # Not those of other saves into the same directory. In a directory below is a whole checkpoint.
    return "/" in name or not (last.endswith(METADATA_NAME) or is_data_file(committed_name(last)))


class Copy:
    """One copy of a checkpoint, step by step: :meth:`begin`, :meth:`send_data`, :meth:`commit`.

    Args:
        source, target: paths or URLs.
        options: how to copy.
        progress: called with the bytes that have been sent, or were found at the target, and those of the checkpoint
            if they are known, else 0.
        check_stop: called between calls, from several threads. What it raises ends the copy.
        record: of the drain that this copy is of. It says which checkpoints may be at the target, whose place this one
            takes.
        disk: the file system of paths.

    Attributes:
        source: where the checkpoint is.
        manifest: what is copied, on the rank that has begun the copy.
        there: the sizes of files that were at the target when it was begun. On other ranks set by the caller.
        result: what this process has done so far.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        options: CopyOptions,
        *,
        progress: Progress | None = None,
        check_stop: Callable[[], None] = lambda: None,
        record: DrainRecord | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.record = record or DrainRecord("", "")
        self.manifest = _Manifest(b"", {}, {})
        self.there: Mapping[str, int] = {}
        self.result = CopyResult(place_of(source), place_of(target))
        source_url, target_url = self.result.source, self.result.target
        if os.path.join(real_place(target_url), "").startswith(os.path.join(real_place(source_url), "")):
            raise ValueError(f"{source_url} cannot be copied to itself or to a place in itself: give another target")
        self._options = options
        self._progress = progress
        self._check_stop = check_stop
        self._calls = Calls(
            retries=options.retries, timeout_seconds=options.call_timeout_seconds, check_stop=self._stop_if_failed
        )
        self.source = open_place(source_url, self._calls, disk)
        self._target = open_place(target_url, self._calls, disk)
        self._total_nbytes = 0
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._free_at_seconds = 0.0
        self._failed = threading.Event()
        self._started_seconds = time.perf_counter()

    def begin(self) -> dict[str, int]:
        """Look at both ends, and put the claim of this copy at the target.

        Returns:
            The sizes of the data files that are at the target.

        Raises:
            StorageError: there is no checkpoint at the source, or something else at the target; or a call failed.
            CorruptCheckpoint, UnsafeCheckpoint: the metadata of the source cannot be used.
        """
        manifest = self.manifest = _Manifest.read(self.source)
        links = [name for name in self.source.links_to_others() if name not in manifest.data]
        if links:
            what = "links are not copied, as no reader of a checkpoint asks for their names"
            logger.warning("%s: %d %s: %s", self.source.url, len(links), what, listed(links, _SHOWN))
        self._total_nbytes = sum(nbytes or 0 for nbytes in (*manifest.data.values(), *manifest.extras.values()))
        self.there = self._put_claim()
        return {name: nbytes for name, nbytes in self.there.items() if name in manifest.data}

    def send_data(self, names: Collection[str]) -> None:
        """Send data files, several at once, and make sure that they arrive.

        Raises:
            StorageError, CorruptCheckpoint: a file cannot be read or sent, is damaged, or has arrived otherwise than it
                was sent. The first error ends all other transfers.
        """
        self._send_each(names)
        self._target.sync()

    def commit(self) -> None:
        """Send all other files, and ``.metadata`` last. Called when all data files have arrived.

        Raises:
            StorageError: the source was replaced, or files at the target are gone; or a call failed. Nothing is
                committed, unless ``.metadata`` was being written.
        """
        manifest, target = self.manifest, self._target
        # The metadata of a checkpoint in a directory below comes after its data, as at the top.
        last = {name for name in manifest.extras if name.endswith(METADATA_NAME)}
        self._send_each(manifest.extras.keys() - last)
        self._send_each(last)
        self._check_source()
        target.sync()
        there = target.files()
        committed = self._metadata_at_target(there)
        lost = [name for name, size in manifest.data.items() if name not in there or size not in (None, there[name])]
        if lost:
            raise self._refused(
                f"{target.url} lacks files that this copy has sent: {listed(sorted(lost), _SHOWN)}; another program "
                "has removed or replaced them. The copy is not committed. Copy again when nothing else writes there"
            )
        if committed != manifest.metadata:
            # Another copy may have committed since that look. If its file can stay, this copy is refused.
            target.put(METADATA_NAME, manifest.metadata, former=committed, keeps_others=True)
            arrived = self._metadata_at_target(there) or b""
            if arrived != manifest.metadata:
                words = f"{len(arrived)} bytes that are not those"
                raise self._not_as_sent(METADATA_NAME, f"{len(manifest.metadata)} bytes", words)
            self._count(files=1, nbytes=len(manifest.metadata))
        self._clean_up()
        logger.info("%s has arrived at %s in %.1f s", self.source.url, target.url, self.result.seconds)

    # The target.

    def _put_claim(self) -> dict[str, int]:
        """Put the claim at the target, unless another copy may put the same names there.

        Returns:
            What is there.
        """
        target, manifest, claim = self._target, self.manifest, COPYING_PREFIX + self.manifest.digest
        others: list[str] = []
        for n_tries in range(_CLAIM_TRIES):
            there = target.files()
            is_new = claim not in there
            ours = manifest.names if any(map(_is_claim, there)) else set()
            strangers = [name for name in there if not (_is_claim(name) or _has_mark(name) or name in ours)]
            if self._metadata_at_target(there) is None and is_new and strangers:
                raise self._refused(
                    f"{target.url} holds what is not of this checkpoint: {listed(sorted(strangers), _SHOWN)}; copy to "
                    "an empty place, or remove it first"
                )
            target.put(claim, b"")
            there = target.files()
            others = self._claims_of_others(there)
            # What else has one name in several checkpoints is small, and sent again.
            if not others or all(map(_has_mark, manifest.data)):
                return there
            if is_new:
                target.remove(claim)
            threading.Event().wait(random.uniform(0, 0.2 * 2**n_tries))  # two that began together do not meet again
        raise self._refused(
            f"another copy has begun at {target.url} that is not over, and would write the same files: copy to another "
            f"place. If that copy was killed, remove {target.path_of(others[0])} and what it has sent"
        )

    def _claims_of_others(self, there: Collection[str]) -> list[str]:
        """The claims of copies that may still run. Those of what this checkpoint replaces are over."""
        over = {COPYING_PREFIX + digest for digest in (self.manifest.digest, *self.record.replaces)}
        return [name for name in there if _is_claim(name) and name not in over]

    def _metadata_at_target(self, there: Collection[str]) -> bytes | None:
        """The metadata at the target: of this checkpoint, or of one that it replaces; ``None`` if there is none.

        Raises:
            StorageError: it is that of another checkpoint.
        """
        data = self._target.read(METADATA_NAME)  # also if it is not listed: lists of some stores are old
        # A store that writes bit by bit holds a part of it if this copy was killed meanwhile.
        has_begun = COPYING_PREFIX + self.manifest.digest in there
        is_ours = data == self.manifest.metadata or (has_begun and self.manifest.metadata.startswith(data or b""))
        if data is not None and not is_ours and digest_of(len(data), data) not in self.record.replaces:
            raise self._refused(
                f"there is another checkpoint at {self._target.url}, {_whose(data)}, which is not known to be an "
                f"earlier save of this one, {_whose(self.manifest.metadata)}: copy to another place, or remove it first"
            )
        return data

    def _clean_up(self) -> None:
        """Remove what is left of the checkpoints that this one replaces, and the claims last: they say that there is
        something left. This one has arrived, so an error costs space only.

        Raises:
            StorageError: a copy of another checkpoint has committed at the same time, and counts.
        """
        target, names = self._target, self.manifest.names
        there = target.files()
        left = [name for name in there if _has_mark(name) and name not in names]
        if left:  # after a look at the claims: a copy whose claim is gone has committed by now
            self._metadata_at_target(there)
        try:
            target.remove_unfinished()
            others = self._claims_of_others(there)
            over = [name for name in there if _is_claim(name) and name not in others]
            for name in over if others else [*left, *over]:
                target.remove(name)
            target.sync()
        except RobustCheckpointError as error:
            logger.warning("%s has arrived, but files of copies that are over stay: %s", target.url, error.message)
        self._count()

    def _refused(self, message: str) -> StorageError:
        return StorageError(message, path=self._target.url, operation="copy")

    # Files.

    def _send_each(self, names: Collection[str]) -> None:
        """Several at once, until the first error."""
        n_threads = max(1, min(self._options.threads, len(names)))
        with ThreadPoolExecutor(n_threads, thread_name_prefix="robust_dcp-copy") as pool:
            try:
                for each in as_completed([submit(pool, self._send, name) for name in sorted(names)]):
                    each.result()
            except BaseException as error:  # also Ctrl-C. The pool waits for the files that are under way
                self._failed.set()
                pool.shutdown(cancel_futures=True)
                self._failed.clear()
                if isinstance(error, Exception):
                    self._check_source()  # that shows in many ways: files are gone, shorter, or have other checksums
                raise
        self._count()

    def _send(self, name: str) -> None:
        """Make sure that a file of the source is at the target. It is sent twice at most."""
        part_nbytes, wants_md5 = self._options.part_bytes, self._target.gives_etags
        with self.source.reading(name, part_nbytes, wants_md5=wants_md5) as content:
            is_there = self.there.get(name) == content.nbytes
            difference: str | None = ""
            for n_sent in range(0 if is_there else 1, 3):
                if n_sent:
                    self._target.write(name, partial(self._parts, content), content.nbytes, content.part_nbytes)
                else:
                    deque(self._parts(content, is_sent=False), maxlen=0)
                difference = self._difference(name, content)
                if difference is None and n_sent:
                    return self._count(files=1, nbytes=content.nbytes)
                if difference is None:
                    return self._count(skipped_files=1, skipped_nbytes=content.nbytes)
        raise self._not_as_sent(name, str(content), f"{difference}; it was sent twice")

    def _parts(self, content: Content, *, is_sent: bool = True) -> Iterator[bytes]:
        """The parts of a file, compared with the checksums that it holds. All threads together stay below the rate of
        what is sent.

        Raises:
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        rate = self._options.limit_bytes_per_second if is_sent else None
        writer = writer_of(os.path.basename(content.path))
        columns = blocks_in(content.disk, content.file, "" if writer is None else writer.mark)
        blocks = zip(*(column.tolist() for column in columns), strict=True)
        block, crc, offset = next(blocks, None), 0, 0
        for part in content.parts():
            view, end = memoryview(part), offset + len(part)
            while block is not None and block[0] < end:
                crc = crc32(view[max(block[0] - offset, 0) : min(block[1], end) - offset], crc)
                if block[1] > end:
                    break
                if crc != block[2]:
                    expected = f"bytes {block[0]} to {block[1]} with CRC-32 {block[2]:08x}"
                    raise CorruptCheckpoint.of_file(content.path, expected, f"CRC-32 {crc:08x}")
                block, crc = next(blocks, None), 0
            offset = end
            if rate is not None:
                with self._lock:
                    starts_at = max(time.monotonic(), self._free_at_seconds)
                    self._free_at_seconds = starts_at + len(part) / rate
                while (left := starts_at - time.monotonic()) > 0:
                    self._stop_if_failed()
                    threading.Event().wait(min(left, 0.5))
            self._note(len(part))
            yield part

    def _difference(self, name: str, content: Content) -> str | None:
        """``None`` if the target has this content; else what it has."""
        try:
            if self._target.proves(name, content):
                return None
            with self._target.reading(name, self._options.part_bytes) as arrived:
                if arrived.nbytes != content.nbytes:
                    return f"{arrived.nbytes} bytes"
                for _ in arrived.parts():
                    self._note(0)  # its bytes have counted when they were sent
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return "no file"
        return None if arrived.crc32 == content.crc32 else str(arrived)

    def _check_source(self) -> None:
        """Make sure that the checkpoint is still as :meth:`begin` has seen it.

        Raises:
            StorageError: it was removed or replaced.
        """
        metadata = self.source.read(METADATA_NAME) if self.manifest.metadata else b""
        if metadata != self.manifest.metadata:
            url, what = self.result.source, "removed" if metadata is None else "replaced by another save"
            raise StorageError(
                f"{url} was {what} while it was copied, and nothing is committed at the target; save each step into a "
                "directory of its own, and remove it only after its copy has arrived",
                path=url,
                operation="copy",
            )

    def _not_as_sent(self, name: str, expected: str, found: str) -> CorruptCheckpoint:
        path = self._target.path_of(name)
        advice = "look whether another program writes there, and copy to a place of its own"
        return CorruptCheckpoint.of_file(path, expected, found, problem="is not as it was sent", advice=advice)

    def _stop_if_failed(self) -> None:
        self._check_stop()
        if self._failed.is_set():
            raise StorageError(f"the copy to {self.result.target} was stopped: another file of it has failed")

    def _note(self, nbytes: int) -> None:
        self._stop_if_failed()  # reads and writes of a directory are no calls, so they do not ask
        with self._lock:
            self._done_nbytes += nbytes
            done_nbytes = self._done_nbytes
        if self._progress is not None:
            # A file that is sent again counts twice.
            self._progress(min(done_nbytes, self._total_nbytes or done_nbytes), self._total_nbytes)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.result, name, getattr(self.result, name) + count)
            self.result.retries = self._calls.n_retries
            self.result.seconds = time.perf_counter() - self._started_seconds
