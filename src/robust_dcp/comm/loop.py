"""Runs the links of this process: the one place that reads the clock, and waits for gloo and for the store.

The state machines say what they wait for (:mod:`~robust_dcp.comm.waits`); here that happens. All steps of a link are
taken under one lock, and each is told the time. The caller's thread takes the steps of its exchange, and a thread for
each neighbour waits in gloo, because a receive of gloo ends when its bytes have come, or when the group is dropped.

This module also owns these threads, and the end of a process: it drops the connections and waits for the threads
before Python ends them in the midst of gloo. In a forked child it closes the sockets and leaves all else alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import connections as network
from robust_dcp.comm import patience
from robust_dcp.comm.connections import Broken, Connections, Whereabouts
from robust_dcp.comm.link import Link
from robust_dcp.comm.store import Notes, store_host, store_of
from robust_dcp.comm.waits import Ask, Call, Finish, Outcome, Steps, T, Until
from robust_dcp.threads import start_thread

logger = logging.getLogger(__name__)


class Loop:
    """Runs one link. It holds the link only weakly: a destroyed group takes it along.

    Args:
        notes: asks the store for it.
    """

    _link: weakref.ref[Link]

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._changed = threading.Condition(threading.RLock())
        self._in_gloo: dict[Steps[Any], threading.Thread | None] = {}
        self._is_closing = False

    @property
    def link(self) -> Link:
        """The link, which somebody else holds."""
        link = self._link()
        if link is None:
            raise ReferenceError("the link is gone")
        return link

    def run(self, steps: Steps[T]) -> T:
        """Take all of ``steps`` in this thread, and return what they return."""
        answer: Any = None
        error: BaseException | None = None
        link = self.link
        with self._changed:
            while True:
                link.now = time.monotonic()
                try:
                    step = steps.send(answer) if error is None else steps.throw(error)
                except StopIteration as end:
                    value: T = end.value
                    return value
                finally:
                    answer = error = None  # a traceback that holds itself would keep gloo's group alive
                try:
                    if isinstance(step, Until):
                        seconds = step.seconds - link.now
                        self._changed.wait(None if seconds == math.inf else max(0.0, seconds))
                        continue
                    self._changed.release()
                    try:
                        answer = self._answer(step)
                    finally:
                        self._changed.acquire()
                except BaseException as raised:
                    error = _bare(raised)

    def _answer(self, step: Finish | Ask | Call) -> Any:
        """What ``step`` waits for. Called without the lock."""
        if isinstance(step, Finish):
            note_piece = None if step.note_piece is None else partial(self.tell, step.note_piece)
            return step.connections.finish(step.moving, step.seconds, note_piece)
        if isinstance(step, Ask):
            return self._notes.ask(*step)
        try:
            return Outcome(step.function(), None)
        except BaseException as error:
            return Outcome(None, _bare(error))

    def tell(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function(*args)`` between two steps."""
        with self._changed:
            self.link.now = time.monotonic()
            return function(*args)

    def wake(self) -> None:
        """Let all that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def spawn(self, steps: Steps[Any]) -> None:
        """Take ``steps`` in another thread, which may wait in gloo."""

        def call() -> None:
            self._in_gloo[steps] = threading.current_thread()
            try:
                self.run(steps)
            finally:
                del self._in_gloo[steps]
                if self._is_closing:
                    self.wake()

        try:
            calls = _idle.pop()
        except IndexError:
            calls = SimpleQueue()
            start_thread(_make_calls, calls, name="robust_dcp: gloo")
        self._in_gloo[steps] = None
        calls.put(call)

    def begin_beats(self, operation: Any) -> None:
        """Let ``operation`` send its beats."""
        with _beating_lock:
            _beating.add(operation)
            if not _beats_threads:
                _beats_threads.append(start_thread(_send_beats, name="robust_dcp: beats"))

    def end_beats(self, operation: Any) -> None:
        """The exchange of ``operation`` is over."""
        _beating.discard(operation)

    def leave(self) -> None:
        """The process group is destroyed. Operations that are under way, such as an async save, still go on."""
        if not self.link.is_closed and self.run(self.link.leave()):
            self.close()

    def close(self) -> None:
        """Drop the connections, end all operations, and wait for the threads."""
        if self.link.is_closed:
            return
        self._is_closing = True
        self.run(self.link.close())
        own = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: set(self._in_gloo.copy().values()) <= {own}, patience.EXIT_SECONDS)
        self._notes.forget()


def _bare(error: BaseException) -> BaseException:
    """``error``, or one like it without the traceback if that holds gloo's group, which is to end."""
    return type(error)(*error.args) if isinstance(error, Broken) else error


_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The threads that wait for a call, each by what it takes calls from. To start a thread for each neighbour would cost a
third of an exchange."""


def _make_calls(calls: SimpleQueue[Callable[[], None]]) -> None:
    """In a thread: make calls until there are none for a while."""
    while True:
        try:
            call = calls.get(timeout=patience.IDLE_SECONDS)
        except Empty:
            try:
                _idle.remove(calls)
            except ValueError:  # somebody has taken it, and is about to call
                continue
            return
        call()
        del call  # it keeps the link
        _idle.append(calls)


_beating: set[Any] = set()
"""The operations of this process that are in an exchange. One thread sends the beats of all of them. It ends when there
are none. At the end of the process nobody waits for it: once the link has ended an operation, it sends no beats.
"""

_beating_lock = threading.Lock()
_beats_threads: list[threading.Thread] = []


def _send_beats() -> None:
    """Let each exchange send its beats when it is time."""
    while True:
        with _beating_lock:
            left = list(_beating)
            if not left:
                _beats_threads.clear()
                return
        while left:
            operation = left.pop()
            try:
                operation.link.loop.tell(operation.beat)
            except Exception:  # the beats of other operations go on, and this one may succeed next time
                with contextlib.suppress(Exception):  # it may be a log handler that raises
                    logger.exception("a beat of %s fails", operation.name)
            del operation  # it may be over before the next beat
        time.sleep(patience.TICK_SECONDS)


_links: weakref.WeakKeyDictionary[Any, Link] = weakref.WeakKeyDictionary()
"""The links of this process by group. A destroyed group takes its link along, unless an operation is under way."""

_all_links: weakref.WeakSet[Link] = weakref.WeakSet()
_links_lock = threading.Lock()


def run_link(
    rank: int,
    ranks: tuple[int, ...],
    notes: Notes,
    make_connections: Callable[[], Connections] | None = None,
    store_host: int | None = None,
) -> Link:
    """A link that runs on the real clock; see :class:`Link`."""
    loop = Loop(notes)
    link = Link(rank, ranks, loop, notes, make_connections, store_host)
    loop._link = weakref.ref(link)
    return link


def link_for(parent: Any) -> Link:
    """The link among the members of ``parent``; of this process alone if that is ``None``.

    Raises:
        ValueError: this process is not a member of ``parent``.
    """
    if parent is None:
        return run_link(0, (0,), Notes(dist.HashStore(), "one"))
    rank = dist.get_rank(parent)
    if rank < 0:  # torch then passes a number
        raise ValueError("this rank is not a member of the process group that it was given")
    with _links_lock:
        if parent not in _links:
            link = _link_in(parent, rank, tuple(dist.get_process_group_ranks(parent)))
            _links[parent] = link
            _all_links.add(link)
            weakref.finalize(parent, _leave, weakref.ref(link)).atexit = False
        return _links[parent]


def _link_in(parent: Any, rank: int, ranks: tuple[int, ...]) -> Link:
    if len(ranks) == 1:
        return run_link(rank, ranks, Notes(dist.HashStore(), "one"))
    store = store_of(parent)
    notes = Notes(store, f"robust_dcp/{parent.group_name}")

    @cache
    def here() -> Whereabouts:  # in an exchange, so that all ranks hear of an error
        # A tree needs two connections for each of its levels at most, and a relay a few for each of its steps.
        n_connections = 8 * len(ranks).bit_length() if network.connects_at_first_use() else 2 * len(ranks)
        network.ensure_open_files(8 + n_connections)
        process = f"host {socket.gethostname()[:64]}, pid {os.getpid()}"
        return Whereabouts(process, network.listening_address(store), network.network_id())

    def make_connections() -> Connections:
        connections = Connections(rank, len(ranks), here(), notes.life.encode())
        connections.listen()
        return connections

    return run_link(rank, ranks, notes, make_connections, store_host(parent))


def _leave(link: weakref.ref[Link]) -> None:
    left = link()
    if left is not None:
        left.loop.leave()


def _before_fork() -> None:
    _links_lock.acquire()
    _beating_lock.acquire()


def _after_fork_in_parent() -> None:
    _beating_lock.release()
    _links_lock.release()


def _forget_all() -> None:
    """In a forked child: the connections and operations are the parent's, and its threads do not exist here."""
    network.close_in_child()
    _beating.clear()
    _beats_threads.clear()
    _idle.clear()
    for kept in (*_all_links, *_links):
        # gloo joins the threads of a group that is freed. Whether Python frees it at its end depends on the order of
        # imports.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for link in list(_all_links):
        link.is_closed = True
    _links.clear()
    _all_links.clear()
    _after_fork_in_parent()


def _close_all() -> None:
    """At the end of the process, before Python ends the threads."""
    for link in list(_all_links):
        link.loop.close()
    while _idle:
        _idle.pop().put(sys.exit)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_forget_all)
atexit.register(_close_all)
