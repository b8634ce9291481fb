"""Copies a checkpoint to another place, where it counts from the moment that its ``.metadata`` is there.

This module owns the order. A copy puts its claim at the target, sends data files, sends all other files, makes sure
that nothing has changed at either end, writes ``.metadata``, and removes its claim. Each file is verified at the target
after it was sent. A place that holds anything else than this checkpoint is refused.

Data files of our saves have names that no other save gives. So two copies of different saves to one place do not touch
each other's files, and the one that commits second finds ``.metadata`` and fails. Where two would write the same names
(checkpoints of stock or Megatron), their claims say so, and one of them gives way. A copy that goes on after a kill
finds its own claim, and sends what has not arrived.

A step that is saved again into its directory goes to the same place again. There it replaces the copy of the checkpoint
that it has replaced here, and no other: first all new files arrive, then ``.metadata`` is replaced, then the old data
files go.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from robust_dcp.drain.content import Content
from robust_dcp.drain.manifest import CLAIM_PREFIX, Claim, Manifest, read_manifest, read_metadata
from robust_dcp.drain.places import PlaceFile, open_place
from robust_dcp.drain.record import awaited_copy, digest_of, note_arrival
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError, entry_point
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.committing.saving_file import needed_for_a_load
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.metadata.metadata_file import decode_metadata, referenced_files
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.remote import Calls, CopyOptions, local_path_of, place_of

__all__ = ["Copy", "CopyResult", "Progress", "copy_checkpoint"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_WITHOUT: Final = frozenset({REPORT_NAME, INDEX_NAME})
"""A checkpoint is whole without these, and nobody believes those of another save."""

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
        verified_by_store, verified_by_reading: how many files were verified by the store's own checksum, and how many
            by reading them back.
    """

    source: str
    target: str
    files: int = 0
    nbytes: int = 0
    skipped_files: int = 0
    skipped_nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    verified_by_store: int = 0
    verified_by_reading: int = 0


@entry_point
def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
    disk: Disk | None = None,
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
        disk: the file system of paths.

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
    copy = Copy(source, target, options or CopyOptions(), progress=progress, disk=disk)
    path, local, is_awaited = local_path_of(copy.result.source), disk or Disk(), False
    with nullcontext() if path is None else needed_for_a_load(local, path):
        awaited = None
        with suppress(StorageError):
            awaited = None if path is None else awaited_copy(local, path)
        if awaited is not None and _real(awaited.target) == _real(copy.result.target):
            copy.replaces, is_awaited = awaited.replaces, True
        copy.begin()
        copy.send_data(copy.manifest.data)
        result = copy.commit()
        if path is not None and awaited is not None and is_awaited:
            note_arrival(local, path, awaited)  # this was the copy that a drain has begun
    return result


class Copy:
    """One copy of a checkpoint, step by step: :meth:`begin`, :meth:`send_data`, :meth:`commit`.

    Args:
        source, target: paths or URLs.
        options: how to copy.
        progress: called with the bytes that have been sent, or were found at the target, and those of the checkpoint
            if they are known, else 0.
        check_stop: called between calls, from several threads. What it raises ends the copy.
        replaces: digests of checkpoints that may be at the target, and that this one takes the place of.
        disk: the file system of paths.

    Attributes:
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
        replaces: Collection[str] = (),
        disk: Disk | None = None,
    ) -> None:
        self.replaces = replaces
        self.result = CopyResult(place_of(source), place_of(target))
        source_url, target_url = self.result.source, self.result.target
        if os.path.join(_real(target_url), "").startswith(os.path.join(_real(source_url), "")):
            raise ValueError(f"{source_url} cannot be copied to itself or to a place in itself: give another target")
        self._options = options
        self._progress = progress
        self._check_stop = check_stop
        self._calls = Calls(
            retries=options.retries, timeout_seconds=options.call_timeout_seconds, check_stop=self._stop_if_failed
        )
        self._source = open_place(source_url, self._calls, options=options.source_options, disk=disk)
        self._target = open_place(target_url, self._calls, options=options.target_options, disk=disk)
        self._manifest: Manifest | None = None
        self._claim = Claim("", "", ())
        self._there: Mapping[str, int] = {}
        self._replaced: Manifest | None = None
        self._total_nbytes = 0
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._free_at_seconds = 0.0
        self._failed = threading.Event()
        self._started_seconds = time.perf_counter()

    @property
    def manifest(self) -> Manifest:
        """What is copied, on the rank that has begun the copy."""
        if self._manifest is None:
            raise RuntimeError("begin comes first")
        return self._manifest

    def begin(self) -> tuple[str, dict[str, int]]:
        """Look at both ends, and put the claim of this copy at the target.

        Returns:
            For :meth:`follow`: the mark of the checkpoint, and sizes of the data files that are at the target.

        Raises:
            StorageError: there is no checkpoint at the source, or something else at the target; or a call failed.
            CorruptCheckpoint, UnsafeCheckpoint: the metadata of the source cannot be used.
        """
        manifest = self._manifest = read_manifest(self._source)
        self._total_nbytes = sum(nbytes or 0 for nbytes in (*manifest.data.values(), *manifest.extras.values()))
        self._target.mark = manifest.mark
        # A path may be no UTF-8.
        source = os.fsencode(_real(self.result.source)).decode(errors="backslashreplace")
        self._claim = Claim(platform.node(), source, tuple(sorted(manifest.names)))
        self.follow(manifest.mark, self._put_claim())
        return manifest.mark, {name: nbytes for name, nbytes in self._there.items() if name in manifest.data}

    def follow(self, mark: str, there: Mapping[str, int]) -> None:
        """Take part in a copy that another rank has begun."""
        self._target.mark = mark
        self._there = there

    def send_data(self, names: Collection[str]) -> None:
        """Send data files, several at once, and make sure that they arrive.

        Raises:
            StorageError, CorruptCheckpoint: a file cannot be read or sent, is damaged, or has arrived otherwise than it
                was sent. The first error ends all other transfers.
        """
        self._send_each(names)
        self._target.sync()

    def commit(self) -> CopyResult:
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
        changed = self._source_changed()
        if changed is not None:
            raise changed
        target.sync()
        there = target.files()
        committed = self._committed(there)
        needed = {**manifest.data, **{name: manifest.extras[name] for name in manifest.extras.keys() - _WITHOUT}}
        lost = sorted(name for name, nbytes in needed.items() if name not in there or nbytes not in (None, there[name]))
        if lost:
            raise StorageError(
                f"{target.url} lacks files that this copy has sent: {_shown(lost)}; another program has removed or "
                "replaced them. The copy is not committed. Copy again when nothing else writes there",
                path=target.url,
                operation="copy",
            )
        if self._replaced is not None:  # if we are killed after the commit, the next copy removes these files
            claim_name = CLAIM_PREFIX + self._replaced.mark
            target.put(
                claim_name,
                msgspec.json.encode(msgspec.structs.replace(self._claim, names=tuple(sorted(self._replaced.data)))),
            )
            there[claim_name] = 0
        for name, data in manifest.metadata.items() if not committed else ():
            target.put(name, data)
            found = target.read(name) or b""
            if found != data:
                raise self._not_as_sent(
                    name, len(data), crc32(data), f"{len(found)} bytes with CRC-32 {crc32(found):08x}"
                )
            self._count(files=1, nbytes=len(data), verified_by_reading=1)
        self._clean_up(there)
        return self.result

    def _put_claim(self) -> dict[str, int]:
        """Put the claim at the target, unless another copy is about to put the same names there.

        Returns:
            What is there.
        """
        target, claim_name = self._target, CLAIM_PREFIX + self.manifest.mark
        for n_tries in itertools.count(1):
            there = target.files()
            is_new = claim_name not in there
            if is_new:
                if not self._committed(there) and self._replaced is None:
                    self._refuse_strangers(there)
                target.put(claim_name, msgspec.json.encode(self._claim))
                there = target.files()
            else:
                self._committed(there)
            names = set(self._claim.names) - _WITHOUT - {METADATA_NAME}
            others = [
                name
                for name, other in self._other_claims(there).items()
                if not self._is_over(other) and names & set(other.names)
            ]
            if not others:
                return there
            if is_new:
                target.remove(claim_name)
            if n_tries == _CLAIM_TRIES:
                raise StorageError(
                    f"another copy has begun at {target.url} that is not over, and would write the same files: copy to "
                    f"another place. If that copy was killed, remove {target.path_of(others[0])} and what it has sent",
                    path=target.url,
                    operation="copy",
                )
            threading.Event().wait(random.uniform(0, 0.1 * 2**n_tries))  # two that began together do not meet again
        raise RuntimeError("the loop returns or raises")

    def _committed(self, there: Collection[str]) -> bool:
        """Whether the target holds this checkpoint.

        Raises:
            StorageError: it holds another one.
        """
        metadata = read_metadata(self._target, there)
        own = self.manifest.metadata
        for name, data in metadata.items():
            if own.get(name) == data:
                continue
            if name == METADATA_NAME and digest_of(len(data), data) in self.replaces:
                files = referenced_files(decode_metadata(data, self._target.path_of(name)))
                self._replaced = Manifest({name: data}, dict.fromkeys(files), {})
                return False
            if CLAIM_PREFIX + self.manifest.mark in there and not _is_metadata(data):
                return False  # this copy was killed while it wrote it, to a store that does so bit by bit
            raise StorageError(
                f"there is another checkpoint at {self._target.url}, which is not known to be an earlier save of this "
                "one: copy to another place, or remove it first",
                path=self._target.url,
                operation="copy",
            )
        return len(metadata) == len(own)

    def _refuse_strangers(self, there: Collection[str]) -> None:
        claimed = {name for claim in self._other_claims(there).values() for name in claim.names}
        strangers = sorted(name for name in there if not name.startswith(CLAIM_PREFIX) and name not in claimed)
        if strangers:
            raise StorageError(
                f"{self._target.url} holds what is not of this checkpoint: {_shown(strangers)}; copy to an empty "
                "place, or remove it first",
                path=self._target.url,
                operation="copy",
            )

    def _other_claims(self, there: Collection[str]) -> dict[str, Claim]:
        claims: dict[str, Claim] = {}
        for name in there:
            if name.startswith(CLAIM_PREFIX) and name != CLAIM_PREFIX + self.manifest.mark:
                data = self._target.read(name)
                if data is not None:
                    try:
                        claims[name] = msgspec.json.decode(data, type=Claim)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        claims[name] = Claim("", "", tuple(self.manifest.names))  # nobody knows what it puts there
        return claims

    def _is_over(self, claim: Claim) -> bool:
        """Whether another copy cannot go on, because a later save has replaced its source, which is ours now."""
        return (claim.host, claim.source) == (self._claim.host, self._claim.source)

    def _clean_up(self, there: Collection[str]) -> None:
        """Remove the claim, and what earlier copies from the same directory have left, which cannot go on: another save
        has replaced their source. The checkpoint has arrived, so an error costs space only."""
        target, own = self._target, self.manifest.names
        try:
            target.remove_unfinished()
            for name, claim in self._other_claims(there).items():
                if self._is_over(claim):
                    self._discard(name, set(claim.names) & set(there) - own)
            target.remove(CLAIM_PREFIX + self.manifest.mark)
            target.sync()
        except RobustCheckpointError as error:
            logger.warning("%s has arrived, but files of copies that are over stay: %s", target.url, error.message)
        self._count()

    def withdraw(self) -> None:
        """Remove what was sent: another save has replaced the source, so nobody can go on with this copy. Called when
        no rank sends any more."""
        if self._manifest is None:  # nothing was sent
            return
        try:
            there = self._target.files()
            self._target.remove_unfinished()
            if not self._committed(there):
                # What an earlier checkpoint there may need has the same names in both: all but the data files.
                names = self.manifest.names if self._replaced is None else set(self.manifest.data)
                self._discard(CLAIM_PREFIX + self.manifest.mark, names & set(there))
        except RobustCheckpointError as error:
            logger.warning("%s: files of a copy that cannot go on stay: %s", self._target.url, error.message)

    def _discard(self, claim_name: str, names: Collection[str]) -> None:
        for name in (*sorted(names), claim_name):  # while the claim is there, it says whose the files are
            self._target.remove(name)

    def _send_each(self, names: Collection[str]) -> None:
        """Several at once, until the first error."""
        if not names:
            return
        errors: list[BaseException] = []

        def send(name: str) -> None:
            if self._failed.is_set():
                return
            try:
                self._send(name)
            except BaseException as error:
                with self._lock:
                    errors.append(error)
                self._failed.set()

        with ThreadPoolExecutor(min(self._options.threads, len(names)), thread_name_prefix="robust_dcp-copy") as pool:
            try:
                list(pool.map(send, sorted(names)))
            except BaseException:  # Ctrl-C: the pool waits for the files that are under way
                self._failed.set()
                raise
        if errors:
            self._failed.clear()
            changed = None if self._manifest is None else self._source_changed()
            if changed is not None:  # that shows in many ways: files are gone, shorter, or have other checksums
                raise changed from errors[0]
            raise errors[0]
        self._count()

    def _send(self, name: str) -> None:
        """Make sure that a file of the source is at the target."""
        file = self._source.open(name)
        try:
            wants_md5 = self._target.gives_etags and self._options.verify == "store"
            content = Content(file, self._options.part_bytes, wants_md5=wants_md5, note=self._note)
            if self._there.get(name) == file.nbytes:
                for _ in content.parts():
                    pass
                if self._difference(name, content) is None:
                    self._count(skipped_files=1, skipped_nbytes=file.nbytes)
                    return
            try:
                self._write(name, content)
            except CorruptCheckpoint as error:
                if name not in _WITHOUT or error.file == file.path:
                    raise
                logger.warning("%s: %s has not arrived: %s", self._target.url, name, error.message)
                self._target.remove(name)
        finally:
            file.close()

    def _write(self, name: str, content: Content) -> None:
        difference: str | None = ""
        for is_last in (False, True):
            try:
                self._target.write(name, lambda: self._paced(content), content.nbytes, content.part_nbytes)
            except StorageError as error:
                # The answer to the last call was lost, or another copy of this checkpoint has finished the file.
                if error.errno != errno.ENOENT or is_last:
                    raise
            difference = self._difference(name, content)
            if difference is None:
                self._count(files=1, nbytes=content.nbytes)
                return
        raise self._not_as_sent(name, content.nbytes, content.crc32, f"{difference}; it was sent twice")

    def _paced(self, content: Content) -> Iterable[bytes]:
        """The parts of a file. All threads together stay below the rate."""
        rate = self._options.limit_bytes_per_second
        for part in content.parts():
            if rate is not None:
                with self._lock:
                    starts_at = max(time.monotonic(), self._free_at_seconds)
                    self._free_at_seconds = starts_at + len(part) / rate
                while (left := starts_at - time.monotonic()) > 0:
                    self._stop_if_failed()
                    threading.Event().wait(min(left, 0.5))
            yield part

    def _difference(self, name: str, content: Content) -> str | None:
        """``None`` if the target has this content; else what it has."""
        try:
            if self._options.verify == "store" and self._target.etag(name) == content.etag:
                self._count(verified_by_store=1)
                return None
            file = self._target.open(name)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return "no file"
        try:
            if file.nbytes != content.nbytes:
                return f"{file.nbytes} bytes"
            crc = self._crc32_of(file)
        finally:
            file.close()
        if crc != content.crc32:
            return f"{content.nbytes} bytes with CRC-32 {crc:08x}"
        self._count(verified_by_reading=1)
        return None

    def _crc32_of(self, file: PlaceFile) -> int:
        crc = 0
        for offset in range(0, file.nbytes, self._options.part_bytes):
            self._note(0)  # its bytes have counted when they were sent
            crc = crc32(file.read(offset, min(self._options.part_bytes, file.nbytes - offset)), crc)
        return crc

    def _source_changed(self) -> StorageError | None:
        """The error for a checkpoint that is no longer there as :meth:`begin` has seen it; ``None`` if it is."""
        there = {name: self._source.read(name) for name in self.manifest.metadata}
        if there == self.manifest.metadata:
            return None
        url = self.result.source
        if None in there.values():
            why = (
                f"{url} was removed while it was copied, and nothing is committed at the target; copy another "
                "checkpoint, and remove each only after its copy has arrived"
            )
        else:
            why = (
                f"{url} was replaced by another save while it was copied, and nothing is committed at the target; save "
                "each step into a directory of its own, and copy it to a place of its own"
            )
        return StorageError(why, path=url, operation="copy")

    def _not_as_sent(self, name: str, nbytes: int, crc: int, found: str) -> CorruptCheckpoint:
        path, expected = self._target.path_of(name), f"{nbytes} bytes with CRC-32 {crc:08x}"
        return CorruptCheckpoint(
            f"{path} is not as it was sent: expected {expected}, found {found}. Look whether another program writes "
            "there, and copy to a place of its own",
            file=path,
            expected=expected,
            found=found,
        )

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


def _is_metadata(data: bytes) -> bool:
    try:
        decode_metadata(data, METADATA_NAME)
    except RobustCheckpointError:
        return False
    return True


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _real(place: str) -> str:
    """The place, with the links of a path followed."""
    path = local_path_of(place)
    return place if path is None else os.path.realpath(path)
