"""The journal of a save: the file ``.robust_dcp.saving.<id>`` in the checkpoint's directory says that a save is
running.

This module owns what the journal holds, which files it accounts for, and how to tell whether its save is over. The
coordinator writes the journal, durably, before any rank makes a file. It removes the journal after the commit, or after
a failed save has cleaned up. So a later save can tell the files that a killed save has left from files of somebody
else. ``leftovers`` and ``save_directory`` call this module while they hold the lock of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from robust_dcp.on_demand import errors
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.mounts import boot_id
from robust_dcp.storage.files.paths import (
    INDEX_NAME,
    JOURNAL_PREFIX,
    METADATA_NAME,
    mark_of,
    parse_data_file_name,
    writer_of,
)

__all__ = [
    "Journal",
    "JournalRecord",
    "OtherSave",
    "SaveState",
    "await_announced",
    "identity",
    "is_announced",
    "journals_in",
]

_NAME: Final = re.compile(re.escape(JOURNAL_PREFIX) + r"[0-9a-f]{16}")

_OVER_AFTER_SECONDS: Final = 24 * 3600.0
"""If no lock can tell, a save that began longer ago than this is over: none takes so long. Until then its files
stay.
"""

_MAX_NBYTES: Final = 256 << 20

_WRITTEN_WITHIN_SECONDS: Final = 60.0
_LOOK_AGAIN_SECONDS: Final = 0.002


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a save says about itself, for other saves and for people, in JSON.

    Attributes:
        save_id: the id of the save, as in the ``.metadata`` that it will write.
        host, pid, boot_id: those of the coordinator's process.
        layout: the layout, which decides the names of the files.
        ranks: how many ranks write.
        files: how many files each rank may write; ``None`` if that is not known.
        replaces: the data files of the checkpoint that was there when the save began. They are garbage after its
            commit.
        present: other files that were there when the save began, and that could be mistaken for files of the save.
    """

    save_id: str
    host: str
    pid: int
    boot_id: str
    layout: str
    ranks: int
    files: int | None
    replaces: tuple[str, ...]
    present: tuple[str, ...]

    def may_have_made(self, names: Collection[str]) -> set[str]:
        """Those of ``names`` that this save may have given: files of its ranks, with plain names or with its mark."""
        mark = mark_of(self.save_id)
        found = {f"{name}.{mark}.tmp" for name in (METADATA_NAME, INDEX_NAME, REPORT_NAME)} & set(names)
        for name in set(names).difference(self.replaces, self.present):
            writer = writer_of(name)
            if writer is None or writer.rank >= self.ranks or writer.mark not in ("", mark):
                continue
            if self.files is not None and writer.number >= self.files:
                continue
            if self.layout == "safetensors" or parse_data_file_name(name) is not None:
                found.add(name)
        return found


def journals_in(names: Collection[str]) -> list[str]:
    """Those of ``names`` that are journals."""
    return sorted(name for name in names if _NAME.fullmatch(name))


def is_announced(disk: Disk, directory: str, save_id: str) -> bool:
    """Whether the journal of a save is in ``directory``. If another rank is just writing it, this waits for that.

    Raises:
        StorageError: it cannot be looked at, or it stays empty.
    """
    nbytes = _nbytes_of_journal(disk, directory, save_id)
    if nbytes == 0:
        await_announced(disk, directory, save_id)
    return nbytes is not None


def identity(disk: Disk, directory: str, save_id: str) -> str:
    """A text that all ranks have in common which see the same announcement of a save, and so the same directory.

    It is empty if there is none.
    """
    try:
        return repr(disk.fingerprint(_path_of_journal(directory, save_id)))
    except errors.StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        raise


def await_announced(disk: Disk, directory: str, save_id: str) -> None:
    """Wait until the journal of a save, which another rank has created in ``directory``, is written and can be seen.

    Raises:
        StorageError: it cannot be looked at, or it does not appear.
    """
    deadline_seconds = time.monotonic() + _WRITTEN_WITHIN_SECONDS
    while not _nbytes_of_journal(disk, directory, save_id):
        if time.monotonic() > deadline_seconds:
            path = _path_of_journal(directory, save_id)
            raise errors.StorageError(
                f"{path} was created by another rank, and is not to be seen or still empty after "
                f"{_WRITTEN_WITHIN_SECONDS:.0f} seconds: that rank has ended, or the file system shows it too late; "
                "save again",
                path=path,
                operation="begin",
            )
        time.sleep(_LOOK_AGAIN_SECONDS)


def _nbytes_of_journal(disk: Disk, directory: str, save_id: str) -> int | None:
    try:
        return disk.size(_path_of_journal(directory, save_id))
    except errors.StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _path_of_journal(directory: str, save_id: str) -> str:
    return os.path.join(directory, JOURNAL_PREFIX + mark_of(save_id))


class Journal:
    """The journal of a save that this process runs.

    Attributes:
        record: what the file holds.
        path: the path of the file.
    """

    def __init__(self, disk: Disk, directory: str, record: JournalRecord) -> None:
        self.record = record
        self.path = _path_of_journal(directory, record.save_id)
        self._disk = disk
        self._directory = directory

    @classmethod
    def begin(
        cls,
        disk: Disk,
        directory: str,
        *,
        save_id: str,
        layout: str,
        ranks: int,
        files: int | None,
        replaces: Collection[str],
        present: Collection[str],
    ) -> Journal:
        """Write the journal at the beginning of a save.

        Raises:
            StorageError: a call failed; nothing is left.
        """
        could_be_ours = {name for name in present if writer_of(name) is not None} - set(replaces)
        record = JournalRecord(
            save_id=save_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=boot_id(),
            layout=layout,
            ranks=ranks,
            files=files,
            replaces=tuple(sorted(replaces)),
            present=tuple(sorted(could_be_ours)),
        )
        journal = cls(disk, directory, record)
        journal.write()
        return journal

    def write(self) -> None:
        """Make the file, durably.

        Raises:
            StorageError: a call failed; nothing is left.
        """
        file = self._disk.open_new(self.path)
        try:
            try:
                self._disk.pwrite(file, msgspec.json.format(msgspec.json.encode(self.record)), 0)
                self._disk.fsync(file)
            finally:
                self._disk.close(file)
            self._disk.fsync_directory(self._directory)
        except BaseException:
            with contextlib.suppress(errors.StorageError):
                self._disk.unlink(self.path)
            raise


class SaveState(Enum):
    """What a journal that was found tells about its save."""

    OVER = "it is over"
    UNKNOWN = "it may be running on another machine"


@dataclass(frozen=True)
class OtherSave:
    """A journal of another save that was found in a directory.

    Attributes:
        name: the name of the file.
        record: what the file holds; ``None`` if the file is not whole: its save was killed before any rank wrote.
        state: whether its save is over.
    """

    name: str
    record: JournalRecord | None
    state: SaveState

    @classmethod
    def read(cls, disk: Disk, directory: str, name: str, *, now_seconds: float, is_locked: bool) -> OtherSave:
        """Read a journal and find out whether its save is over.

        Args:
            is_locked: whether the caller holds the lock of the directory. A save holds it as long as it runs.
            now_seconds: the time by the clock of the file system.

        Raises:
            StorageError: the journal cannot be read. The errno is ENOENT if it has just been removed.
        """
        path = os.path.join(directory, name)
        file = disk.open_read(path)
        try:
            nbytes = min(disk.size(file), _MAX_NBYTES)
            data = bytearray(nbytes)
            data = data[: disk.pread_into(file, data, 0)]
        finally:
            disk.close(file)
        try:
            record: JournalRecord | None = msgspec.json.decode(data, type=JournalRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            record = None
        return cls(name, record, _state_of(disk, path, record, is_locked, now_seconds))

    @property
    def description(self) -> str:
        """Tell people which process runs or ran the save."""
        who = "unknown" if self.record is None else f"process {self.record.pid} on {self.record.host}"
        return f"{self.name} ({who}; {self.state.value})"

    def may_have_made(self, names: Sequence[str]) -> set[str]:
        """See :meth:`JournalRecord.may_have_made`."""
        return set() if self.record is None else self.record.may_have_made(names)


def _state_of(disk: Disk, path: str, record: JournalRecord | None, is_locked: bool, now_seconds: float) -> SaveState:
    """Whether a save is over.

    If we hold the lock, a save on this machine must be over. That proves nothing about saves on other machines: on a
    network file system each machine may see only its own locks. Then the age of the save decides.
    """
    is_of_this_boot = record is not None and record.boot_id != "" and record.boot_id == boot_id()
    if is_locked and (is_of_this_boot or disk.is_of_this_machine(path)):
        return SaveState.OVER
    is_old = now_seconds - disk.modified_seconds(path) > _OVER_AFTER_SECONDS
    return SaveState.OVER if is_old else SaveState.UNKNOWN
