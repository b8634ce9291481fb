"""Runs the async saves of one group in the order of the calls, each on a thread of its own.

Owns these threads, and the number of saves under way. It also sees to it that each error is raised: by the future's
``result()``, or else by the next save. A save that is not async waits for its turn. What the end of Python does to
saves and their threads is here as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.threads import start_thread

T = TypeVar("T")

logger = logging.getLogger(__name__)

GRACE_SECONDS: Final = 20.0
"""How long a process goes on with a running save after SIGTERM. Launchers kill processes that have not ended after 30
seconds."""

_SAVES: Final = "async save"

_SAME_VERDICT_SECONDS: Final = 5.0
"""All ranks hear within that time that a drain has failed."""


class SaveFuture(Future[T]):
    """The outcome of one save. If nobody asks this future for its outcome, the next save raises its error.

    Attributes:
        asked: set once somebody has asked for the outcome, and so knows of an error.
        convert: makes what :meth:`result` returns of the value.
        queue: what runs it, once something does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.queue: SaveQueue | None = None
        self.convert: Callable[[Any], Any] = lambda value: value

    def cancel(self) -> bool:
        """Return ``False``: one rank alone cannot cancel a save."""
        return False

    def result(self, timeout: float | None = None) -> T:
        try:
            if self.queue is not None:
                self.queue.refuse_endless_wait(self)
            value: T = self.convert(super().result(timeout))
            return value
        finally:
            if self.done():
                self.asked.set()
            del self  # it has the error, which has this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self.queue is not None:
            self.queue.refuse_endless_wait(self)
        error = super().exception(timeout)
        self.asked.set()
        return error


class SaveQueue:
    """Runs saves, each after those that were under way when it was called.

    Two threads may call one save each at the same time, and each rank may be done first with another of them. So these
    two do not wait for each other: a rank would wait for a save of which another rank has not begun its part.

    Args:
        what: what is run: ``"async save"``, or ``"drain"`` for copies of what was saved.
    """

    def __init__(self, what: str = _SAVES) -> None:
        self.what = what
        self._changed = threading.Condition()
        self._after: dict[SaveFuture[Any], Collection[SaveFuture[Any]]] = {}  # those under way: each comes after these
        self._threads: dict[int, SaveFuture[Any]] = {}  # what runs in which thread
        self._failed: list[SaveFuture[Any]] = []

    @property
    def n_under_way(self) -> int:
        """The number of saves that are not over. A save is over when its future has a result, even if its thread is
        still busy."""
        with self._changed:
            return sum(not future.done() for future in self._after)

    def under_way(self) -> tuple[SaveFuture[Any], ...]:
        """The saves that are under way, also those whose callbacks run. A save that is called now comes after them. If
        it is called in such a callback, it does not wait for that, which may wait for it.

        Ask before the first exchange of that save. Whatever is under way has had an exchange with all ranks by then. So
        what comes first on one rank never comes last on another.
        """
        with self._changed:
            this = self._threads.get(threading.get_ident())
            return tuple(future for future in self._after if future is not this or not future.done())

    def wait(self, *, below: int = 1, timeout_seconds: float | None = None, callbacks: bool = False) -> bool:
        """Wait until fewer than ``below`` saves are under way.

        Args:
            callbacks: wait until none is, and the callbacks of the last one have run, such as the removal of old
                checkpoints. A callback that waits does not wait for itself.

        Returns:
            Whether that is so. ``False`` means that the time is up.

        Raises:
            RuntimeError: a save waits for the thread that calls this, so it would never end.
        """
        this = self._threads.get(threading.get_ident())
        with self._changed:
            are_open = [future for future in self._after if not future.done()]
            if len(are_open) >= below:
                self.refuse_endless_wait(*are_open)
            if callbacks and this is None:
                return self._changed.wait_for(lambda: not self._after, timeout_seconds)
            return self._changed.wait_for(lambda: self.n_under_way < below, timeout_seconds)

    def refuse_endless_wait(self, *futures: SaveFuture[Any]) -> None:
        """Make sure that none of the saves waits for the thread that calls this.

        Raises:
            RuntimeError: one does.
        """
        with self._changed:
            this = self._threads.get(threading.get_ident())
            for future in futures:
                if not future.done() and (future is this or this in self._after.get(future, ())):
                    raise RuntimeError(
                        f"a listener or callback of an {self.what} saves or waits for saves, and they wait for it to "
                        "return; do that in a thread of your own"
                    )

    def raise_unreported(self) -> None:
        """Raise the error of an earlier save, if nobody has asked for its outcome."""
        for error in self.take_unreported()[:1]:
            raise error

    def take_unreported(self) -> list[BaseException]:
        """The errors of earlier saves, if nobody has asked for their outcomes. The log says which follow the first."""
        with self._changed:
            failed, self._failed = self._failed, []
        errors = [error for future in failed if not future.asked.is_set() and (error := future.exception()) is not None]
        for error in errors[1:]:
            logger.error("another %s failed before: %s", self.what, error)
        return errors

    def forget(self, error: BaseException) -> None:
        """Forget the failures that ``error`` tells of. All ranks know them: one has raised them in an exchange."""
        with self._changed:
            lines = {future: str(Future.exception(future)).partition("\n")[0] for future in self._failed}
            self._failed = [future for future, line in lines.items() if line not in str(error)]

    def submit(
        self,
        run: Callable[[], T],
        future: SaveFuture[T] | None = None,
        *,
        after: Collection[SaveFuture[Any]] | None = None,
    ) -> SaveFuture[T]:
        """Run a save on a thread of its own.

        Args:
            future: becomes that of the save; ``None`` for a new one.
            after: what was under way when the save was called; ``None`` for what is under way now.

        Raises:
            ExchangeError: no thread can be started. The save is not run, not later either.
        """
        future = SaveFuture() if future is None else future
        future.add_done_callback(self._tell_waiting)  # the first callback: nobody waits for those of the user
        end_well_on_sigterm()
        future.queue = self
        with self._changed:
            self._after[future] = self.under_way() if after is None else after
            try:
                start_thread(self._run, run, future, name=f"robust_dcp-{self.what.replace(' ', '-')}", daemon=False)
            except BaseException:
                del self._after[future]
                raise
        return future

    def _tell_waiting(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self, run: Callable[[], T], future: SaveFuture[T]) -> None:
        with self._changed:
            self._threads[threading.get_ident()] = future
            self._changed.wait_for(lambda: self._after.keys().isdisjoint(self._after[future]))
        future.set_running_or_notify_cancel()
        try:
            tell = partial(future.set_result, run())
        except BaseException as error:
            logger.error("%s failed: %s", self.what, str(error))  # a handler may keep what it is given
            with self._changed:
                self._failed.append(future)
            if isinstance(error, RobustCheckpointError):
                error.with_traceback(None)  # its frames have the future, which has the error
            tell = partial(future.set_exception, error)
        try:
            tell()
        except BaseException:  # a callback of the user's has called sys.exit()
            logger.exception("a callback of an %s raises", self.what)
        with self._changed:
            del self._after[future], self._threads[threading.get_ident()]
            self._changed.notify_all()


_QUEUES: Final[dict[tuple[str, tuple[int, ...]], SaveQueue]] = {}
"""The save queues of this process, by what they run and the global ranks of their group."""


def queue_of(ranks: tuple[int, ...], what: str = _SAVES) -> SaveQueue:
    """The save queue of the group of these global ranks, or its queue of drains."""
    return _QUEUES.get((what, ranks)) or _QUEUES.setdefault((what, ranks), SaveQueue(what))


def queues_of(ranks: tuple[int, ...]) -> tuple[SaveQueue, SaveQueue]:
    """The save queue of the group of these global ranks, and its queue of drains."""
    return queue_of(ranks), queue_of(ranks, "drain")


@contextlib.contextmanager
def telling_of_earlier(queues: tuple[SaveQueue, SaveQueue]) -> Iterator[None]:
    """Around the exchange in which ranks raise the errors of earlier saves: each of these is raised once."""
    try:
        yield
    except BaseException as error:
        # Another rank may tell of a drain whose end this rank is about to hear. It must not tell of it once more.
        queues[1].wait(timeout_seconds=_SAME_VERDICT_SECONDS)
        for queue in queues:
            queue.forget(error)
        raise


def _all_queues() -> list[SaveQueue]:
    """Saves first: a save that ends may begin a drain."""
    return [queue for _, queue in sorted(_QUEUES.copy().items(), key=lambda item: item[0])]


def finish_async_saves(timeout_seconds: float | None = None) -> bool:
    """Wait for all async saves of this process, for all drains (``RobustWriter(path, drain_to=…)``), and for the
    callbacks of their futures.

    Args:
        timeout_seconds: how long to wait; ``None`` for as long as it takes.

    Returns:
        Whether all are over. ``False`` means that the time is up.

    Raises:
        RobustCheckpointError: a save has failed, and nobody has asked for its outcome. The first such error is raised.
    """
    ends_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    queues = _all_queues()
    are_over = all(
        queue.wait(timeout_seconds=None if ends_at is None else max(0.0, ends_at - time.monotonic()), callbacks=True)
        for queue in queues
    )
    for queue in queues:
        queue.raise_unreported()
    return are_over


def _finish_at_exit() -> None:
    if any(queue.n_under_way for queue in _all_queues()):
        logger.warning("this process ends after the async saves and drains that are under way")
    for queue in _all_queues():
        queue.wait(callbacks=True)


def _end_with_unreported() -> None:
    """If a save has failed and nobody has asked for its outcome, end the process as an uncaught exception does."""
    errors = [error for queue in _all_queues() for error in queue.take_unreported()]
    if not errors:
        return
    for error in errors:
        sys.excepthook(type(error), error, error.__traceback__)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)  # nothing else sets the exit code once main has returned


def end_by_sigterm() -> None:
    """Let the saves that are under way end, for a while, and then end the process. Does not return."""
    ends_at = time.monotonic() + GRACE_SECONDS
    for queue in _all_queues():
        if wait(queue.under_way(), max(0.0, ends_at - time.monotonic())).not_done:
            logger.error(
                "SIGTERM: %s is not over after %.0f seconds, and ends %s",
                queue.what,
                GRACE_SECONDS,
                "uncommitted; the checkpoint before it is still there"
                if queue.what == _SAVES
                else "unfinished; its checkpoint is committed",
            )
    while True:
        ctypes.CDLL(None).signal(signal.SIGTERM, None)  # the default; Python lets only the main thread say it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


def on_sigterm(number: int, frame: FrameType | None) -> None:
    """What SIGTERM does in the main thread, if nobody else handles it.

    The program goes on until its saves are over. The main thread must not wait for them here: it may have been
    interrupted while it holds a lock that a save needs, such as that of a future or of the log.
    """
    if not LISTENER.tell(number):
        end_by_sigterm()


class _Listener:
    """A thread that hears of SIGTERM, also while the main thread waits in C, where Python runs no handler before the
    call returns: a rank in ``dist.recv`` would not end before its launcher kills it.

    The C part of Python's handlers writes each signal's number into a socket, from which the thread reads
    (``signal.set_wakeup_fd``). If the program uses that itself, only handlers write into it, by :meth:`tell`.
    """

    def __init__(self) -> None:
        self._reactions: list[tuple[Any, Callable[[], object]]] = [(on_sigterm, end_by_sigterm)]
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def react(self, handler: Any, reaction: Callable[[], object]) -> None:
        """Call ``reaction`` in the thread when SIGTERM comes, as long as Python has this handler for it."""
        self._reactions = [*(each for each in self._reactions if each[0] != handler), (handler, reaction)]

    def start(self) -> None:
        """Listen from now on. Only the main thread may call this."""
        if self._sockets is not None:
            return
        reader, writer = self._sockets = socket.socketpair()
        reader.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        writer.setblocking(False)
        thread = threading.Thread(target=self._listen, args=(reader,), name="robust_dcp-signals", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            thread.start()
            self._thread = thread
            former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            if former >= 0:
                signal.set_wakeup_fd(former)

    def tell(self, number: int) -> bool:
        """Tell the thread of a signal, and return whether there is one. Takes no lock."""
        if self._sockets is None or self._thread is None or not self._thread.is_alive():
            return False
        with contextlib.suppress(BlockingIOError):  # it has not read the signals before this one yet
            self._sockets[1].send(bytes([number]))
        return True

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(256):
            handler = signal.getsignal(signal.SIGTERM)
            for expected, reaction in self._reactions if signal.SIGTERM in numbers else ():
                if handler == expected:
                    reaction()

    def stop(self) -> None:
        """Listen no more: Python ends, or this is a forked child, which shares the sockets with its parent."""
        if self._sockets is None:
            return
        (reader, writer), self._sockets = self._sockets, None
        with contextlib.suppress(ValueError):  # not the main thread
            former = signal.set_wakeup_fd(-1)
            if former not in (-1, writer.fileno()):
                signal.set_wakeup_fd(former)
        writer.close()  # which ends the thread
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1)
        reader.close()


LISTENER: Final = _Listener()


def end_well_on_sigterm() -> None:
    """Handle SIGTERM, unless somebody does already: running saves may end before the process does."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
        LISTENER.start()
    else:
        _warn_of_sigterm()


@functools.cache
def _warn_of_sigterm() -> None:
    logger.warning(
        "SIGTERM will end this process before its async saves are over: the first of them begins in another thread "
        "than the main one, where Python handles no signals. Begin it in the main thread, or handle SIGTERM there"
    )


_MASKS = threading.local()


def _hold_sigterm() -> None:
    """Before a fork. Python drops a signal that reaches the child right after it, if there is a handler, and nobody
    would end that child: ``multiprocessing.Pool`` waits for it for ever. So the child gets it when its handler is gone.
    """
    _MASKS.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.before)


def _forget_all() -> None:
    """A forked child has none of the threads, and SIGTERM ends it as ever."""
    _QUEUES.clear()
    LISTENER.stop()
    if signal.getsignal(signal.SIGTERM) is on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()


# What is registered later runs before: the writer processes have ended then.
atexit.register(LISTENER.stop)
atexit.register(_end_with_unreported)
# A running save may still need to start threads, so this must run before concurrent.futures shuts down. `atexit` would
# run after it, and there is no public way to run before it. Functions that are registered later run earlier.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_forget_all)
