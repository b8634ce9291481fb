"""What a file system may hold after the power was cut: what was not synced is lost, torn, kept or out of order.

A recording disk (:class:`~tests.faults.disk.FaultDisk`) tells which calls were made. From them, and from what was there
before, :func:`cut_power` builds the states that a crash after each call may leave:

* the bytes of a file that were not synced: all there, none, or the first half with zeros behind; of all files alike, or
  of one file only
* the names of a directory that was not synced: changed as by the first so many changes, by all but one, or by one alone
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.disk import Call

__all__ = ["State", "cut_power"]

Files = dict[str, bytes]


@dataclass
class _File:
    cached: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def kept(self) -> bytes:
        return bytes(self.cached)

    def lost(self) -> bytes:
        return self.durable

    def torn(self) -> bytes:
        if self.cached == self.durable:
            return self.durable
        half = len(self.cached) // 2
        return bytes(self.cached[:half]).ljust(len(self.cached), b"\0")


Names = dict[str, _File]


@dataclass
class _Directory:
    """The names that survive, and the changes since they were synced."""

    durable: Names = field(default_factory=dict)
    pending: list[Callable[[Names], object]] = field(default_factory=list)

    def after(self, changes: Sequence[Callable[[Names], object]]) -> Names:
        names = dict(self.durable)
        for change in changes:
            with contextlib.suppress(KeyError):  # out of order: what it changes is not there
                change(names)
        return names

    def possible(self) -> Iterator[Names]:
        pending = self.pending
        for number in range(len(pending) + 1):
            yield self.after(pending[:number])
        for number in range(len(pending)):
            yield self.after(pending[:number] + pending[number + 1 :])
            yield self.after(pending[number : number + 1])


@dataclass(frozen=True)
class State:
    """Files after a crash.

    Attributes:
        after: how many of the calls were made.
        files: their bytes, by their paths below the directory.
    """

    after: int
    files: Files

    def put(self, directory: str | os.PathLike[str]) -> None:
        """Make them."""
        os.makedirs(directory)
        for name, data in self.files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def cut_power(directory: str, before: Files, calls: Sequence[Call]) -> Iterator[State]:
    """Every state that the power may leave after any of the calls; each one once.

    Args:
        directory: which was recorded.
        before: the files that were there, all synced.
        calls: all calls that succeeded, as they were recorded.
    """
    disk = _Disk(directory, before)
    known: set[bytes] = set()
    for number in range(len(calls) + 1):
        if number:
            disk.make(calls[number - 1])
        is_over = number == len(calls)
        for files in disk.states():
            # What may be found after the last call has to be the new checkpoint, so it is told from the same before.
            text = repr((is_over, sorted(files.items()))).encode()
            digest = hashlib.sha256(text).digest()
            if digest not in known:
                known.add(digest)
                yield State(number, files)


class _Disk:
    """The files of a directory and of those below it, after some calls."""

    def __init__(self, directory: str, before: Files) -> None:
        self._root = directory
        self._directories: dict[str, _Directory] = {}
        for name, data in before.items():
            path = os.path.join(directory, name)
            self._at(path).durable[os.path.basename(path)] = _File(bytearray(data), data)

    def _at(self, path: str) -> _Directory:
        return self._directories.setdefault(os.path.dirname(path), _Directory())

    def _file(self, path: str) -> _File | None:
        place = self._at(path)
        return place.after(place.pending).get(os.path.basename(path))

    def make(self, call: Call) -> None:
        """Make a call that the recorded process has made."""
        place, name = self._at(call.path), os.path.basename(call.path)
        file = self._file(call.path)
        if call.operation == "create":
            new = _File()
            place.pending.append(lambda names: names.__setitem__(name, new))
        elif call.operation in ("write", "truncate", "allocate") and file is not None:
            _change(file, call)
        elif call.operation == "fsync" and file is not None:
            file.durable = bytes(file.cached)
        elif call.operation == "fsync":
            synced = self._directories.setdefault(call.path, _Directory())
            synced.durable, synced.pending = synced.after(synced.pending), []
        elif call.operation == "unlink":
            place.pending.append(lambda names: names.pop(name))
        elif call.operation == "rename":
            moved, old = self._file(call.source), os.path.basename(call.source)
            source = self._at(call.source)
            if moved is None:
                self._move_directory(call.source, call.path)
            elif source is place:
                place.pending.append(lambda names: names.__setitem__(name, names.pop(old)))
            else:
                place.pending.append(lambda names: names.__setitem__(name, moved))
                source.pending.append(lambda names: names.pop(old))

    def _move_directory(self, source: str, target: str) -> None:
        """Here that is durable at once."""
        for path in [path for path in self._directories if path == source or path.startswith(source + os.sep)]:
            self._directories[target + path.removeprefix(source)] = self._directories.pop(path)

    def states(self) -> Iterator[Files]:
        """What a crash may leave now."""
        paths = sorted(self._directories)
        kept = {path: self._directories[path].after(self._directories[path].pending) for path in paths}
        for path in paths:
            for names in self._directories[path].possible():
                tree = {**kept, path: names}
                for contents in (_File.kept, _File.lost, _File.torn):
                    yield self._files(tree, lambda file, contents=contents: contents(file))  # type: ignore[misc]
        for victim in {id(file): file for names in kept.values() for file in names.values()}.values():
            if victim.kept() != victim.durable:
                for broken, rest in ((_File.lost, _File.kept), (_File.torn, _File.kept), (_File.kept, _File.lost)):
                    yield self._files(
                        kept,
                        lambda file, victim=victim, broken=broken, rest=rest: (  # type: ignore[misc]
                            broken(file) if file is victim else rest(file)
                        ),
                    )

    def _files(self, tree: dict[str, Names], contents: Callable[[_File], bytes]) -> Files:
        return {
            os.path.relpath(os.path.join(path, name), self._root): contents(file)
            for path, names in tree.items()
            for name, file in names.items()
        }


def _change(file: _File, call: Call) -> None:
    end = call.offset + call.nbytes if call.operation == "write" else call.nbytes
    file.cached.extend(bytes(max(0, end - len(file.cached))))
    if call.operation == "write":
        file.cached[call.offset : end] = call.data
    elif call.operation == "truncate":
        del file.cached[end:]
