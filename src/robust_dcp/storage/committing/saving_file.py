"""Whose files lie in a checkpoint's directory: of the save that runs there, of others, and what may be removed.

A save creates ``.robust_dcp.saving.<mark>`` exclusively, locks it, and removes it when it has tidied up. The kernel
releases the lock when the process ends, however it ends. So whoever can lock the file of another save knows that this
save is over. On a file system without locks, or if the save ran on another machine, a lock proves nothing. Then a save
counts as over a day after it began.

A data file may be removed if the ``.metadata`` that was replaced names it, or if its name has the mark of a save that
is over and no checkpoint needs it. Every other file stays, and the log says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from robust_dcp import errors
from robust_dcp.decoding import Undecodable, from_json
from robust_dcp.environment import boot_id
from robust_dcp.report import REPORT_NAME, listed
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import (
    INDEX_NAME,
    METADATA_NAME,
    SAVING_PREFIX,
    check_relative_path,
    is_data_file,
    mark_of,
    name_before_commit,
    writer_of,
)
from robust_dcp.storage.files.small_files import NO_REGULAR_FILE, pass_over

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(re.escape(SAVING_PREFIX) + r"([0-9a-f]{16})")
_OVER_AFTER_SECONDS: Final = 24 * 3600.0
_MAX_NBYTES: Final = 256 << 20
_WRITTEN_WITHIN_SECONDS: Final = 60.0
_LOOK_AGAIN_SECONDS: Final = 0.002
_GIVES_UP_WITHIN_SECONDS: Final = 2.0
_CLAIM: Final = "ffffffff"
_SHOWN: Final = 5
_SHOWN_IN_ERRORS: Final = 20


class SavingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds, in JSON, for other saves and for people.

    Attributes:
        save_id: the id of the save, as in the ``.metadata`` that it will write.
        host, pid, boot_id: those of the process.
        replaces: the data files of the checkpoint that was there when the save began. They are garbage after its
            commit.
    """

    save_id: str
    host: str
    pid: int
    boot_id: str = ""
    replaces: tuple[str, ...] = ()


def saving_files_in(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are such files."""
    return sorted(filter(_NAME.fullmatch, names))


def _path(directory: str, save_id: str) -> str:
    return os.path.join(directory, SAVING_PREFIX + mark_of(save_id))


class SavingFile:
    """The file of a save that this process runs. Its lock is released when this object is dropped, and not in a forked
    child.

    Attributes:
        path: the path of the file.
        release: releases the lock. The file stays, and names what the save has left.
    """

    def __init__(self, disk: Disk, path: str, file: OpenFile) -> None:
        self.path = path
        self._disk = disk
        self.release = weakref.finalize(self, _release, disk, file, os.getpid())

    @classmethod
    def create(cls, disk: Disk, directory: str, *, save_id: str, replaces: Collection[str] = ()) -> SavingFile:
        """Create the file, lock it and write it durably.

        Raises:
            StorageError: a call failed; nothing is left. The errno is EEXIST if another rank of the save was faster.
        """
        path = _path(directory, save_id)
        record = SavingRecord(
            save_id=save_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=boot_id(),
            replaces=tuple(sorted(replaces)),
        )
        while True:
            file = disk.open_new(path)
            try:
                # Others may hold the lock for an instant, while they find out whether this save is over.
                deadline_seconds = time.monotonic() + _WRITTEN_WITHIN_SECONDS
                while disk.lock(file) is False and time.monotonic() < deadline_seconds:
                    time.sleep(_LOOK_AGAIN_SECONDS)
                # Somebody may have looked at the file before it was locked, and have taken it for that of a dead save.
                if disk.is_at(file, path):
                    disk.pwrite(file, msgspec.json.format(msgspec.json.encode(record)), 0)
                    disk.fsync(file)
                    disk.fsync_directory(directory)
                    return cls(disk, path, file)
            except BaseException:
                with contextlib.suppress(errors.StorageError):
                    disk.unlink(path)
                _release(disk, file, os.getpid())
                raise
            disk.close(file)

    def remove(self) -> bool:
        """Remove the file and release the lock. Returns whether it is gone."""
        is_removed = is_gone(self._disk.unlink, self.path)
        self.release()
        return is_removed


def _release(disk: Disk, file: OpenFile, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(Exception):
            disk.close(file)


class OtherSave(msgspec.Struct, frozen=True):
    """A save whose file was found in a directory.

    Attributes:
        name: the name of the file.
        record: what the file holds; ``None`` if it is not whole: its save was killed before any rank wrote.
        is_over: whether the save is over; ``None`` if it may be running on another machine.
        heirs: where its process has ended although its lock is held: the processes that have inherited it. A child does
            that keeps the files of its parent open, and was not forked by Python.
    """

    name: str
    record: SavingRecord | None
    is_over: bool | None
    heirs: tuple[int, ...] = ()

    @property
    def mark(self) -> str:
        """The mark of the save."""
        return self.name.removeprefix(SAVING_PREFIX)

    @property
    def is_claim(self) -> bool:
        """Whether it was no save, but :func:`claimed` the directory."""
        return self.mark.startswith(_CLAIM)

    def __str__(self) -> str:
        """Tells people which process runs or ran the save."""
        who = "unknown" if self.record is None else f"process {self.record.pid} on {self.record.host}"
        state = {True: "it is over", False: "it is running", None: "it may be running on another machine"}[self.is_over]
        if self.heirs:
            state = (
                f"it has ended, and its lock is held by process {', '.join(map(str, self.heirs))}, which it has forked"
            )
        return f"{self.name} ({who}; {state})"

    @classmethod
    def read(cls, disk: Disk, directory: str, name: str, *, now_seconds: float) -> OtherSave | None:
        """Find out about the save of a file; ``None`` if the file has just been removed, or no save has made it.

        Args:
            now_seconds: the time by the clock of the file system.

        Raises:
            StorageError: the file cannot be read.
        """
        path = os.path.join(directory, name)
        try:
            with disk.reading(path, flags=os.O_RDONLY | os.O_NOFOLLOW) as file:
                is_free = disk.lock(file, shared=True)
                data = disk.read(file, 0, min(file.nbytes, _MAX_NBYTES))
            try:
                record: SavingRecord | None = from_json(data, SavingRecord)
            except Undecodable:
                record = None
            is_of_this_boot = record is not None and record.boot_id != "" and record.boot_id == boot_id()
            if is_free is not None and (is_of_this_boot or disk.is_of_this_machine(path)):
                has_ended = record is not None and is_of_this_boot and not os.path.exists(f"/proc/{record.pid}")
                return cls(name, record, is_free, _opened_by(path) if has_ended and not is_free else ())
            is_old = now_seconds - disk.modified_seconds(path) > _OVER_AFTER_SECONDS
            return cls(name, record, True if is_old and is_free is not False else None)
        except errors.StorageError as error:
            if error.errno in NO_REGULAR_FILE:
                pass_over(path, "a save makes a regular file of this name, and this is none")
            elif error.errno != errno.ENOENT:
                raise
            return None


def _opened_by(path: str) -> tuple[int, ...]:
    """The other processes that have a file open, as far as this one may see them."""
    path, pids = os.path.realpath(path), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            files = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{name}/fd")}
            if path in files and int(name) != os.getpid():
                pids.append(int(name))
    return tuple(sorted(pids))


def others_in(disk: Disk, directory: str, *, mark: str) -> tuple[OtherSave, ...]:
    """The other saves whose files lie in a directory. None of them is running.

    Args:
        mark: the mark of the save that asks, whose file is there. If two saves have begun at the same time and see each
            other, the one with the smaller mark waits until the other one has given up.

    Raises:
        StorageError: one of them is running there; or a call failed.
    """
    deadline_seconds = time.monotonic() + _GIVES_UP_WITHIN_SECONDS
    while True:
        names = saving_files_in(set(disk.list_directory(directory)) - {SAVING_PREFIX + mark})
        if not names:
            return ()
        now_seconds = disk.modified_seconds(directory)  # since the file of the save that asks was put there
        read = [OtherSave.read(disk, directory, name, now_seconds=now_seconds) for name in names]
        saves = tuple(save for save in read if save is not None)
        running = [save for save in saves if save.is_over is False]
        if not running:
            break
        if min(save.mark for save in running) < mark or time.monotonic() > deadline_seconds:
            what, advice = f"another save is running into {directory}", "wait until it is over or end that process"
            if running[0].heirs:
                what, advice = f"{directory} is locked by a save that is over", "end that process"
            raise errors.StorageError(
                f"{what} ({running[0]}): {advice}, or save to another directory; nothing of it has been touched",
                path=directory,
                operation="begin",
            )
        time.sleep(_LOOK_AGAIN_SECONDS)
    for save in saves:
        if save.is_over is None:
            logger.warning(
                "%s: another save is running into it, or its machine crashed (%s). If it is running, one of the two "
                "will get an error before it commits",
                directory,
                save,
            )
    return saves


@contextlib.contextmanager
def claimed(disk: Disk, directory: str) -> Iterator[tuple[OtherSave, ...]]:
    """Claim a directory for something else than a save: one that begins there meanwhile waits. Yields the other saves,
    of which none is running.

    Where a full disk has no room for the claim, none is needed: there is no room for a save to begin either.

    Raises:
        StorageError: a save is running there (the operation is ``begin``), or a call failed.
    """
    mark = _CLAIM + secrets.token_hex(4)  # the larger one gives way, and a save is never the one that does
    with contextlib.ExitStack() as claim:
        try:
            claim.callback(SavingFile.create(disk, directory, save_id=mark).remove)
        except errors.StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        yield others_in(disk, directory, mark=mark)


def is_announced(disk: Disk, directory: str, save_id: str, *, was_created: bool = False) -> bool:
    """Whether the file of a save is in ``directory``. If another rank is just writing it, this waits for that.

    Args:
        was_created: it is certain that another rank has created it, although it may not be seen here yet.

    Raises:
        StorageError: it cannot be looked at, or it stays empty.
    """
    deadline_seconds = time.monotonic() + _WRITTEN_WITHIN_SECONDS
    path = _path(directory, save_id)
    while True:
        try:
            with disk.reading(path) as file:
                if file.nbytes:
                    return True
        except errors.StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            if not was_created:
                return False
        if time.monotonic() > deadline_seconds:
            raise errors.StorageError(
                f"{path} was created by another rank, and is not to be seen or still empty after "
                f"{_WRITTEN_WITHIN_SECONDS:.0f} seconds: that rank has ended, or the file system shows it too late; "
                "save again",
                path=path,
                operation="begin",
            )
        time.sleep(_LOOK_AGAIN_SECONDS)


def identity(disk: Disk, directory: str, save_id: str) -> str:
    """A text that all ranks have in common which see the same file of a save, and so the same directory. It is empty if
    there is none.
    """
    fingerprint = disk.fingerprint(_path(directory, save_id))
    return "" if fingerprint is None else repr(fingerprint)


# What saves have left.


class LeftOvers(msgspec.Struct, frozen=True):
    """What saves have left in a directory.

    Attributes:
        by_save: for the file of each save that is over, the names of the files that this save has left.
        others: saves that may still be running.
        other_files: names of files that these may have made.
    """

    by_save: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    others: tuple[OtherSave, ...] = ()
    other_files: frozenset[str] = frozenset()

    @property
    def files(self) -> frozenset[str]:
        """The files that all saves that are over have left."""
        return frozenset[str]().union(*self.by_save.values())

    def tell_what_stays(self, directory: str, names: Collection[str]) -> None:
        """Log which of these files stay although they look like files of a checkpoint, and why."""
        data_files = set(filter(is_data_file, names))
        others = data_files & self.other_files
        reasons = []
        if self.others:
            saves = "; ".join(map(str, self.others))
            reasons.append(("another save is not known to be over: " + saves, others))
        if data_files - others:
            reason = (
                f"neither the {METADATA_NAME} that was replaced names them nor is it known that robust_dcp made them"
            )
            reasons.append((reason, data_files - others))
        for reason, files in reasons:
            shown = listed(sorted(files), _SHOWN) or "none yet"
            logger.warning("%s: %d files are kept, as %s: %s", directory, len(files), reason, shown)


def find_left_overs(
    names: Sequence[str],
    needed: Collection[str] | None,
    saves: Sequence[OtherSave],
    committed_by: str | None = None,
) -> LeftOvers:
    """Sort out the files in a directory.

    Args:
        names: what lies there.
        needed: the data files of the checkpoint that is committed there; ``None`` if nobody knows which it needs.
        saves: the other saves whose files lie there.
        committed_by: the save that committed it.
    """

    def made_by(save: OtherSave) -> set[str]:
        """The data files of a save, and files that were to be renamed."""
        unnamed = (f".{save.mark}.tmp", name_before_commit("", save.mark))
        return {
            name
            for name in names
            if (name.endswith(unnamed) and not name.startswith(SAVING_PREFIX))
            or ((by := writer_of(name)) is not None and by.mark == save.mark)
        }

    records = {save.mark: save.record for save in saves if save.record is not None}
    replaced, committed = dict[str, set[str]](), [mark_of(committed_by or "")]
    for mark in committed:  # it grows: whoever was replaced by a committed save has been committed, too
        if mark in records:
            # Files without a mark may have been written anew by stock.
            marked = {name: by.mark for name in records.pop(mark).replaces if (by := writer_of(name)) and by.mark}
            replaced[mark] = marked.keys() & set(names)
            committed += marked.values()
    over = [save for save in saves if save.is_over or save.mark in committed]  # who has committed makes no more files
    others = tuple(save for save in saves if save not in over)
    other_files = frozenset[str]().union(*map(made_by, others))
    if needed is None:
        return LeftOvers({}, others, other_files)
    by_save = {
        save.name: frozenset((made_by(save) | replaced.get(save.mark, set())) - other_files - set(needed))
        for save in over
    }
    return LeftOvers(by_save, others, other_files)


# How files are removed.


def is_gone(
    remove: Callable[[str], None], path: str, *, harmless: Collection[int] = (errno.ENOENT,), tells: bool = False
) -> bool:
    """Remove ``path`` if that is possible. Returns whether it is gone, or the error is one of the ``harmless`` ones.

    Args:
        tells: whether it is logged if it stays.
    """
    try:
        remove(path)
    except errors.StorageError as error:
        if error.errno in harmless or not os.path.lexists(path):  # a read-only file system says the same of any path
            return True
        if tells:
            logger.warning("not removed, which costs space and nothing else: %s", error.message)
        return False
    return True


def remove_data_files(disk: Disk, directory: str, files: Iterable[str], *, keep: Collection[str] = ()) -> list[str]:
    """Remove files that no committed checkpoint names any more. After a commit, call this only once the commit has
    returned. A file that cannot be removed stays: the checkpoint is right, and only takes more space.

    Args:
        files: relative paths of files of the old checkpoint or of saves that failed.
        keep: relative paths that the committed metadata names. These are never removed.

    Returns:
        The relative paths that are still there.

    Raises:
        UnsafeCheckpoint: a path leads out of the directory.
    """
    left = []
    for name in sorted(set(files) - set(keep)):
        path = os.path.join(directory, check_relative_path(name, file=directory))
        if not is_gone(disk.unlink, path, tells=True):
            left.append(name)
    return left


def sweep(disk: Disk, path: str) -> bool:
    """Remove what crashed saves have left in a directory that holds no checkpoint. Returns whether it is gone.

    Raises:
        StorageError: a save is running there (the operation is ``begin``), or a call failed.
    """
    names = [] if os.path.islink(path) else disk.list_directory(path)
    if METADATA_NAME in names or not saving_files_in(names):
        return False
    with claimed(disk, path) as saves:
        left_overs = find_left_overs(names, (), saves)
        if left_overs.others:
            return False
        left = remove_data_files(disk, path, left_overs.files)
        for name in {INDEX_NAME, REPORT_NAME} & set(names):  # killed right before its commit
            disk.unlink(os.path.join(path, name))
        for name, files in left_overs.by_save.items():
            if files.isdisjoint(left):
                disk.unlink(os.path.join(path, name))
    if disk.list_directory(path):
        return False
    disk.rmdir(path)
    return True


def name_left_over(error: BaseException, paths: Collection[str]) -> None:
    """Add to the error of a failed save which files it has made and could not remove."""
    if not paths:
        return
    shown = listed(sorted(set(paths)), _SHOWN_IN_ERRORS)
    text = f"what the failed save has made and could not remove: {shown}; the next save into that directory tries again"
    if isinstance(error, errors.RobustCheckpointError):
        error.message = f"{error.message}; {text}"
    else:
        logger.warning("%s", text)
