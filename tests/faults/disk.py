"""One scripted disk: it sees each call that this process makes to the files below a directory, and lets some fail.

.. code-block:: python

    with FaultDisk(path, on={"rename:.metadata": kill, "read:*.distcp#3": OSError(errno.EIO, "")}) as disk:
        robust_dcp.load(state_dict, checkpoint_id=path)
    assert disk.names("fsync") == [...]

It replaces functions of :mod:`os`, so it needs nothing from the code under test, and works for stock's code, too. Only
calls from Python are seen, not those of C++ code (``torch.load`` of a path).

The operations are ``create``, ``open``, ``read``, ``write``, ``truncate``, ``allocate``, ``fsync``, ``close``,
``rename``, ``unlink``, ``mkdir``, ``rmdir``, ``list``, ``stat``, ``room`` and ``lock``.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import errno
import fcntl
import fnmatch
import functools
import io
import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["CHANGES", "LONG_TESTS", "Call", "Fault", "FaultDisk", "Full", "Gate", "each_call", "kill", "short"]

CHANGES: Final = frozenset({"create", "write", "truncate", "allocate", "fsync", "rename", "unlink", "mkdir", "rmdir"})
"""The operations that change what is there, or make it durable. Between two of them a kill leaves the same files."""

LONG_TESTS: Final = os.environ.get("LONG_TESTS") == "1"
"""Whether matrices are run whole, of which the tests else draw a part."""

_real: Final = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}


@dataclass(frozen=True)
class Call:
    """A call to the file system.

    Attributes:
        operation: see the module.
        path: absolute; of a rename the new name.
        source: of a rename the name that was there before.
        offset: of a write, in bytes.
        data: of a write: what was written. Only if the disk records.
        is_done: whether it succeeded. Only if the disk records.
        nbytes: of a read, write, truncation or allocation.
        is_direct: of a read or write: whether it goes past the page cache.
    """

    operation: str
    path: str
    source: str = ""
    offset: int = 0
    nbytes: int = 0
    data: bytes = b""
    is_done: bool = False
    is_direct: bool = False


Fault = BaseException | Callable[[Call], object]
"""What happens instead of a call or before it: an error that is raised, or a function that is called first. If the
function returns a number of bytes, a read or write is cut to it."""


def kill(call: Call) -> None:
    """Kill this process by ``SIGKILL`` before the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def short(call: Call) -> int:
    """Let a read or a write do about half of what it is asked for."""
    return max(call.nbytes // 2, min(call.nbytes, 1))


class Gate:
    """Calls stand still until it is opened.

    Attributes:
        is_there: is set when the first call stands before it.
        opened: set it to let all calls go on.
    """

    def __init__(self) -> None:
        self.is_there, self.opened = threading.Event(), threading.Event()

    def __call__(self, call: Call) -> None:
        self.is_there.set()
        assert self.opened.wait(300), f"nobody has opened the gate of {call.path}"


class Full:
    """A disk that has room for so many bytes, in whichever files."""

    def __init__(self, room_nbytes: int) -> None:
        self.room_nbytes = room_nbytes
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        with self._lock:
            self.room_nbytes -= call.nbytes
            if self.room_nbytes < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)


class FaultDisk:
    """See the module. As a context manager it ends with the block; :meth:`install` is for a process of its own.

    Args:
        directory: calls to files outside are not seen.
        on: what happens at which calls. A key is an operation, or ``operation:pattern`` with a pattern of
            :mod:`fnmatch` for the path below ``directory`` or for the name of the file, or ``*``. With ``#3`` behind
            it only the third such call is meant. ``"write|allocate"`` means either.
        counted: operations that ``at`` counts.
        at: the number of a counted call, from 0 on, and what happens there.
        record: whether calls keep the data that is written.

    Attributes:
        calls: every call that was made, in order. One that was refused is among them.
        n_counted: how many calls were made that ``at`` counts.
        struck: whether ``at`` was reached.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        on: Mapping[str, Fault] | None = None,
        *,
        counted: Collection[str] = CHANGES,
        at: tuple[int, Fault] | None = None,
        record: bool = False,
    ) -> None:
        self.directory = os.path.abspath(directory)
        self.calls: list[Call] = []
        self.struck = False
        self._rules = [_Rule(key, fault) for key, fault in (on or {}).items()]
        self._counted = counted
        self._at = at
        self.n_counted = 0
        self._record = record
        # A recording is only of use if its order is that of the calls.
        self._one_at_a_time = threading.RLock()
        self._counting = threading.RLock()  # the garbage collector may close a file meanwhile

    def names(self, *operations: str) -> list[str]:
        """The paths, below the directory, of all calls of these operations, in order."""
        calls = [call for call in self.calls if not operations or call.operation in operations]
        return [os.path.relpath(call.path, self.directory) for call in calls]

    def install(self) -> FaultDisk:
        """See each call from now on."""
        _disks.append(self)
        _replace()
        return self

    def __enter__(self) -> FaultDisk:
        return self.install()

    def __exit__(self, *error: object) -> None:
        _disks.remove(self)
        if not _disks:
            _restore()

    def do(self, call: Call, data: Callable[[], bytes], function: Callable[[int | None], Any]) -> Any:
        """Make a call, or let it fail. ``function`` is given the bytes that a read or write is cut to."""
        if not self._record:
            return function(self._before(call))
        with self._one_at_a_time:
            cut = self._before(call)
            place = len(self.calls) - 1
            done = function(cut)
            written = data()[:done] if call.operation == "write" else b""
            nbytes = len(written) or call.nbytes
            self.calls[place] = replace(call, nbytes=nbytes, data=written, is_done=done != -1)
            return done

    def sees(self, path: str) -> bool:
        """Whether a path is in the directory, or the directory itself."""
        return path == self.directory or path.startswith(self.directory + os.sep)

    def _before(self, call: Call) -> int | None:
        with self._counting:
            self.calls.append(call)
            faults = [rule.fault for rule in self._rules if rule.is_met(call, self.directory)]
            if call.operation in self._counted:
                if self._at is not None and self._at[0] == self.n_counted:
                    self.struck = True
                    faults.append(self._at[1])
                self.n_counted += 1
        cut = None
        for fault in faults:
            if isinstance(fault, OSError):
                raise OSError(fault.errno, os.strerror(fault.errno or 0), call.path)
            if isinstance(fault, BaseException):
                raise copy.copy(fault)
            answer = fault(call)
            cut = answer if isinstance(answer, int) else cut
        return cut


class _Rule:
    """What a key of ``on`` means, and how often it was met."""

    def __init__(self, key: str, fault: Fault) -> None:
        key, _, number = key.partition("#")
        operations, _, self._pattern = key.partition(":")
        self._operations = operations.split("|")
        self._number = int(number or 0)
        self._n_met = 0
        self.fault = fault

    def is_met(self, call: Call, directory: str) -> bool:
        if self._operations != ["*"] and call.operation not in self._operations:
            return False
        names = (os.path.relpath(call.path, directory), os.path.basename(call.path))
        if self._pattern and not any(fnmatch.fnmatchcase(name, self._pattern) for name in names):
            return False
        self._n_met += 1
        return self._number in (0, self._n_met)


# --- the loop over n-th calls -----------------------------------------------------------------------------------------


def each_call(
    act: Callable[[str], object],
    root: str | os.PathLike[str],
    fault: Callable[[int], Fault] | None,
    *,
    prepare: Callable[[str], object] = os.makedirs,
    counted: Collection[str] = CHANGES,
    every: int = 1,
) -> Iterator[tuple[int, Call | None, str, BaseException | None]]:
    """Act once for each call that it makes to files, with a fault at that call. First it is done without one.

    Args:
        act: is given a directory of its own below ``root``.
        fault: what happens at the call of a number; ``None``: it is done in a forked process that is killed there.
        prepare: makes what is there before, without faults.
        counted: which operations count.
        every: try each so many-th call only, from a place that is drawn and printed; all with ``LONG_TESTS=1``.

    Yields:
        the number of the call, the call, the directory as it was left, and what was raised.
    """
    clean = os.path.join(root, "clean")
    prepare(clean)
    with FaultDisk(clean, counted=counted) as disk:
        act(clean)
    assert disk.n_counted > 0, "it makes no call that counts"
    begin = random.randrange(1 if LONG_TESTS else every)
    print(f"every {every}-th of {disk.n_counted} calls, from {begin}")
    for number in range(begin, disk.n_counted, 1 if LONG_TESTS else every):
        directory = os.path.join(root, f"call-{number}")
        prepare(directory)
        if fault is None:
            if _is_killed(act, directory, counted, number):
                yield number, None, directory, None
            continue
        raised: BaseException | None = None
        with FaultDisk(directory, counted=counted, at=(number, fault(number))) as disk_that_fails:
            try:
                act(directory)
            except BaseException as error:  # the CheckpointException of torch is no Exception
                raised = error
        if disk_that_fails.struck:  # threads may make a call less
            at = [call for call in disk_that_fails.calls if call.operation in counted][number]
            yield number, at, directory, raised


def _is_killed(act: Callable[[str], object], directory: str, counted: Collection[str], number: int) -> bool:
    """Act in a process that is forked, so this one may have no other thread. Whether it got to the call."""
    pid = os.fork()
    if pid == 0:
        try:
            with FaultDisk(directory, counted=counted, at=(number, kill)):
                act(directory)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"call {number}: ended with {code}"
    return code != 0


# --- functions in place of those of os --------------------------------------------------------------------------------

_disks: list[FaultDisk] = []


def _absolute(path: Any) -> str | None:
    """The path that a call means, by name or by descriptor; ``None`` if it has none."""
    if isinstance(path, int):
        try:
            return str(_real["readlink"](f"/proc/self/fd/{path}")).removesuffix(" (deleted)")
        except OSError:
            return None
    try:
        return os.path.abspath(os.fsdecode(path))
    except TypeError:
        return None


def _seen(
    operation: str,
    path: Any,
    function: Callable[[int | None], Any],
    *,
    source: Any = None,
    offset: int = 0,
    nbytes: int = 0,
    data: Callable[[], bytes] = lambda: b"",
) -> Any:
    """Make the call through every disk that sees it, the newest first."""
    if not _disks:
        return function(None)
    absolute = _absolute(path)
    for disk in reversed(_disks):
        if absolute is not None and disk.sees(absolute):
            before = "" if source is None else _absolute(source) or ""
            is_direct = operation in ("read", "write") and bool(fcntl.fcntl(path, fcntl.F_GETFL) & os.O_DIRECT)
            call = Call(operation, absolute, before, offset, nbytes, is_direct=is_direct)
            return disk.do(call, data, function)
    return function(None)


def _by_path(operation: str, name: str) -> Callable[..., Any]:
    real = _real[name]

    @functools.wraps(real)
    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return _seen(operation, path, lambda cut: real(path, *args, **kwargs))

    return call


def _rename(source: Any, target: Any, **kwargs: Any) -> Any:
    return _seen("rename", target, lambda cut: _real["replace"](source, target, **kwargs), source=source)


def _is_there(path: Any) -> bool:
    try:
        _real["lstat"](path)
    except OSError:
        return False
    return True


def _open(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
    creates = flags & os.O_CREAT and not _is_there(path)
    operation = "create" if creates else "open"
    return int(_seen(operation, path, lambda cut: _real["open"](path, flags, mode, **kwargs)))


def _io_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if isinstance(file, int):
        return _real_io_open(file, mode, *args, **kwargs)
    operation = "create" if set(mode) & set("wxa") else "open"
    return _seen(operation, file, lambda cut: _real_io_open(file, mode, *args, **kwargs))


def _views(buffers: Any) -> list[memoryview]:
    return [memoryview(each).cast("B") for each in buffers]


def _cut(views: Sequence[memoryview], nbytes: int | None) -> list[memoryview]:
    kept: list[memoryview] = []
    for view in views:
        kept.append(view if nbytes is None else view[:nbytes])
        nbytes = None if nbytes is None else max(nbytes - view.nbytes, 0)
    return [view for view in kept if view.nbytes]


def _pwritev(fd: int, buffers: Any, offset: int, *flags: int) -> int:
    views = _views(buffers)
    nbytes = sum(view.nbytes for view in views)
    return int(
        _seen(
            "write",
            fd,
            lambda cut: _real["pwritev"](fd, _cut(views, cut), offset, *flags),
            offset=offset,
            nbytes=nbytes,
            data=lambda: b"".join(views),
        )
    )


def _preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
    views = _views(buffers)
    nbytes = sum(view.nbytes for view in views)
    call = _real["preadv"]
    return int(_seen("read", fd, lambda cut: call(fd, _cut(views, cut), offset, *flags), offset=offset, nbytes=nbytes))


def _pwrite(fd: int, data: Any, offset: int) -> int:
    return _pwritev(fd, [data], offset)


def _pread(fd: int, nbytes: int, offset: int) -> Any:
    call = _real["pread"]
    return _seen("read", fd, lambda cut: call(fd, nbytes if cut is None else cut, offset), offset=offset, nbytes=nbytes)


def _ftruncate(fd: int, length: int) -> None:
    _seen("truncate", fd, lambda cut: _real["ftruncate"](fd, length), nbytes=length)


def _flock(file: Any, operation: int) -> None:
    fd = file if isinstance(file, int) else file.fileno()
    _seen("lock", fd, lambda cut: _real_flock(file, operation))


def _stat(path: Any, **kwargs: Any) -> Any:
    return _seen("stat", path, lambda cut: _real["stat"](path, **kwargs))


class _Fallocate:
    """``fallocate`` of the C library, which Python does not have."""

    _function: Any

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_function", real)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)

    def __call__(self, fd: int, mode: int, offset: int, nbytes: int) -> int:
        try:
            function = self._function
            return int(_seen("allocate", fd, lambda cut: function(fd, mode, offset, nbytes), nbytes=offset + nbytes))
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1


def _library_function(self: Any, name: str) -> Any:
    function: Any = _real_library_function(self, name)
    if name == "fallocate":
        function = _Fallocate(function)
        setattr(self, name, function)
    return function


_real_io_open: Final = io.open
_real_flock: Final = fcntl.flock
_real_library_function: Final = ctypes.CDLL.__getattr__
# Code that looks up `fallocate` keeps what it has found. So this is there before any disk is.
ctypes.CDLL.__getattr__ = _library_function  # type: ignore[method-assign]

_REPLACED: Final[dict[str, Callable[..., Any]]] = {
    "open": _open,
    "pwritev": _pwritev,
    "pwrite": _pwrite,
    "preadv": _preadv,
    "pread": _pread,
    "ftruncate": _ftruncate,
    "stat": _stat,
    **{name: _by_path(name, name) for name in ("close", "fsync", "unlink", "mkdir", "rmdir")},
    "fdatasync": _by_path("fsync", "fdatasync"),
    "remove": _by_path("unlink", "remove"),
    "listdir": _by_path("list", "listdir"),
    "scandir": _by_path("list", "scandir"),
    "lstat": _by_path("stat", "lstat"),
    "fstat": _by_path("stat", "fstat"),
    "statvfs": _by_path("room", "statvfs"),
    "rename": _rename,
    "replace": _rename,
}


def _replace() -> None:
    for name, function in _REPLACED.items():
        setattr(os, name, function)
    io.open = builtins.open = _io_open
    fcntl.flock = _flock


def _restore() -> None:
    for name in _REPLACED:
        setattr(os, name, _real[name])
    io.open = builtins.open = _real_io_open
    fcntl.flock = _real_flock
