"""Where a target is made: a directory beside it, ``….converting``, which one call at a time may use.

It holds at most a lock, ``note`` (what is being made), ``made`` (the target, until it is whole) and ``replaced`` (the
old target, for the moment between two renames). Whenever a process is killed, the next call finds out from these names
what to do; nothing else in the directory is touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOENT
from typing import Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.committing.saving_file import SaveState, claimed
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.kernel import exchange_names

__all__ = ["Workplace", "workplace_of"]

_MAX_NOTE_NBYTES: Final = 64 << 20


class Workplace:
    """The directory in which ``path`` is made.

    Attributes:
        made: the name of the target until it is whole.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self.directory = f"{path}.converting"
        self.made = os.path.join(self.directory, "made")
        self._note = os.path.join(self.directory, "note")
        self._replaced = os.path.join(self.directory, "replaced")

    def recover(self) -> None:
        """Undo what a killed call was about to do: an old target that had lost its name gets it back.

        Raises:
            StorageError: a call failed.
        """
        if os.path.lexists(self._replaced):
            if os.path.lexists(self._path):
                self._remove(self._replaced)
            else:
                self._disk.rename(self._replaced, self._path)
                self._disk.fsync_directory(os.path.dirname(self.directory))
        # What has no note was not being made: it is an old target that lost its name to a whole one. And where nothing
        # is finished, there is nothing to go on with.
        is_begun = self._disk.exists(self._note) and os.path.isdir(self.made)
        if not is_begun or not self._disk.list_directory(self.made):
            self.clear()

    def begin(self, note: bytes) -> None:
        """Go on with what an earlier call was making if its note was the same. Otherwise begin anew.

        Raises:
            StorageError: a call failed.
        """
        if self._disk.read_file(self._note, _MAX_NOTE_NBYTES) == note:
            return
        self.clear()
        self._disk.write_file(self._note, note)

    def clear(self) -> None:
        """Remove what is being made, and the note.

        Raises:
            StorageError: a call failed.
        """
        self._remove(self.made)
        self._remove(self._note)

    def publish(self) -> None:
        """Give the target its name. An old one keeps it until that moment.

        Where the system can swap two names in one step (``renameat2`` of Linux), there is always something whole under
        the name. Elsewhere a process that is killed between two renames leaves the old directory as ``replaced``, and
        the next call puts it back.

        Raises:
            StorageError: a call failed.
        """
        # Without a note, the next call does not take an old target that is about to lie here for unfinished work.
        self._remove(self._note)
        self._disk.fsync_directory(self.directory)
        if os.path.isdir(self.made) and os.path.lexists(self._path):
            try:
                is_swapped = exchange_names(self.made, self._path)
            except OSError as error:
                raise storage_error("rename", self._path, error) from error
            if not is_swapped:
                self._disk.rename(self._path, self._replaced)
                self._disk.rename(self.made, self._path)
        else:
            self._disk.rename(self.made, self._path)
        self._disk.fsync_directory(os.path.dirname(self.directory))
        self._remove(self._replaced)
        self._remove(self.made)

    def _remove(self, path: str) -> None:
        if not os.path.lexists(path):
            return
        if os.path.islink(path) or not os.path.isdir(path):
            self._disk.unlink(path)
            return
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise storage_error("remove", path, error) from error


@contextmanager
def workplace_of(disk: Disk, path: str) -> Iterator[Workplace]:
    """Hold the place where ``path`` is made. What an earlier call has left there is put in order.

    Raises:
        StorageError: another call makes the target, or a call to the file system failed.
    """
    place = Workplace(disk, path)
    try:
        with ExitStack() as stack:
            disk.mkdirs(place.directory)
            try:
                others = stack.enter_context(claimed(disk, place.directory))
            except StorageError as error:
                # With ENOENT, another call has ended just now, and removed the directory.
                if error.operation == "begin" or error.errno == ENOENT:
                    raise _is_made_elsewhere(path, place.directory) from None
                raise
            for other in others:
                left = os.path.join(place.directory, other.name)
                if other.state is not SaveState.OVER:
                    raise _is_made_elsewhere(path, left)
                disk.unlink(left)
            try:
                place.recover()
                yield place
            except BaseException:
                with suppress(StorageError):
                    place.recover()
                raise
    finally:
        with suppress(StorageError):  # unless something is left
            disk.rmdir(place.directory)


def _is_made_elsewhere(path: str, where: str) -> StorageError:
    return StorageError(
        f"another call makes {path} now (see {where}); wait for it. If its machine has crashed, remove that",
        path=path,
        operation="begin",
    )
