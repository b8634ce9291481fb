"""What a process has of one group: its connections, and the operations that use them.

Connections come in generations. When something fails that ends an operation on all ranks, the connections are dropped
too: that is how all ranks hear of it at once. The ranks agree in the store how the generation ended. Then they make the
next one, and operations that did not end go on over it.

All channels of a group share one link. This module also owns the threads in gloo, and the end of a process: it drops
the connections and waits for these threads before Python ends them in the midst of gloo. In a forked child it leaves
everything alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch.distributed as dist

from robust_dcp.comm import connections as network
from robust_dcp.comm import patience
from robust_dcp.comm.connections import Ask, Broken, Connections, Whereabouts
from robust_dcp.comm.endings import (
    STORE_IS_LOST,
    Answer,
    EndMessage,
    OperationKey,
    Problem,
    end_of_leaving,
    end_without_store,
    verdict,
)
from robust_dcp.comm.frames import operation_id
from robust_dcp.comm.messages import decode, encode
from robust_dcp.comm.store import Notes, StoreLost, StoreSilent, compare_set, store_host, store_of, value_of
from robust_dcp.threads import start_thread

_LOOK_SECONDS = 1.0
"""How often a rank that waits for another one to come looks whether that has become pointless."""


class ExchangeStats(msgspec.Struct):
    """What exchanges have cost this rank.

    Attributes:
        exchanges: how many it joined.
        messages_sent: how many messages this rank sent, of any size.
        header_nbytes_sent: bytes sent in frames, up and down.
        payload_nbytes_sent: bytes of payloads sent to neighbours in the tree, including what it only passed on, and of
            what was relayed.
    """

    exchanges: int = 0
    messages_sent: int = 0
    header_nbytes_sent: int = 0
    payload_nbytes_sent: int = 0


class Link:
    """The connections of one rank to other ranks of its group. Each is made when it is first needed.

    Args:
        rank: this process's rank in the group.
        ranks: the global rank of each rank of the group.
        notes: what the ranks tell each other in their store. A group of one needs none.
        make_connections: makes the connections that the ranks meet for in a place of the store. It gets the place, and
            what asks the store there. A group of one needs none.
        store_host: the rank whose process hosts the store; ``None`` if no rank of the group does.

    Attributes:
        secret: 64 bits that only ranks of the group know, once the store was asked.
        stats: what all exchanges have cost this rank so far, over all operations.
        generation: how many generations of connections have ended.
        gone: ranks that seem to have ended, each with the reason. They are named soon unless they connect again.
        breaking: is held while a generation ends. Nobody can come back meanwhile.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        notes: Notes | None = None,
        make_connections: Callable[[str, Ask], Connections] | None = None,
        store_host: int | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.store_host = store_host
        self.secret = 0
        self.stats = ExchangeStats()
        self.generation = 0
        self.gone: dict[int, str] = {}
        self._notes = Notes(dist.HashStore(), "one") if notes is None else notes
        self._make_connections = make_connections
        self._lock = threading.RLock()
        self.breaking = threading.Lock()
        self._making = threading.Lock()
        self._in_gloo: dict[Future[None], threading.Thread | None] = {}
        self._dropped = -1  # the latest generation that was dropped
        self._first = 0  # the first generation of this life of the group
        self._connections: Connections | None = None
        self._unsettled: tuple[str, bytes] | None = None
        self._operations: weakref.WeakValueDictionary[OperationKey, Any] = weakref.WeakValueDictionary()
        self._occurrences: dict[int, int] = defaultdict(int)
        self._ended_before: dict[OperationKey, EndMessage] = {}
        self._is_closed = False

    def begin(self, name: str, operation: Any) -> None:
        """Number ``operation``. If the others have given up on it already, it is ended at once.

        Args:
            name: the name of the operation, the same on all ranks.
            operation: the link holds only a weak reference to it.
        """
        with self._lock:
            number = operation_id(name)
            key = OperationKey(number, self._occurrences[number])
            self._occurrences[number] += 1
            operation.key = key
            end_message = self._ended_before.pop(key, None)
            if end_message is None:
                self._operations[key] = operation
        if end_message is not None:
            operation.end(end_message)

    def operations(self) -> list[Any]:
        """The operations that this rank is in."""
        with self._lock:
            return list(self._operations.values())

    # Connecting.

    def connect(
        self, peer: int, is_over: Callable[[], bool], announced: Callable[[], None] = lambda: None
    ) -> tuple[int, Connections]:
        """Connect to ``peer``. Return the generation, and its connections.

        Args:
            is_over: whether nobody needs the connection any more.
            announced: is called once ``peer`` can find this rank.

        Raises:
            Broken: the generation is over, or the store is lost.
            RobustCheckpointError: this rank, or ``peer``, listens where the other one cannot reach it.
        """
        generation, connections = self.generation, self._connections
        try:
            if connections is None:
                generation, connections = self._begin_generation(is_over)
            if peer not in connections.peers or connections.is_dropped:
                connections.connect(peer, self._looking(generation, is_over), announced)
            self.gone.pop(peer, None)
            return generation, connections
        except StoreLost as error:
            raise Broken(f"{STORE_IS_LOST} ({error})") from None

    def _begin_generation(self, is_over: Callable[[], bool]) -> tuple[int, Connections]:
        def look() -> None:
            if self._is_closed or is_over():
                raise Broken("the connections were dropped")

        with self._making:  # without the other lock, since the store may take long to answer
            if self._unsettled is not None:  # the store did not answer when it ended
                place, end_message = self._unsettled
                self._notes.ask(place, lambda store: compare_set(store, "end", "", end_message), look)
                self._unsettled = None
            look()
            generation, connections = self.generation, self._connections
            if generation == self._dropped:  # the ranks have not agreed yet how it ended
                raise Broken("the connections were dropped")
            if connections is None:
                self.secret = int(self._notes.ask("", lambda store: self._notes.life, look)[-16:], 16)
                if self._make_connections is None:
                    raise ValueError("a group of one has nobody to connect to")
                place = self._place(generation)
                connections = self._make_connections(place, partial(self._notes.ask, place))
                with self._lock:
                    if generation != self.generation or generation == self._dropped:
                        raise Broken("the connections were dropped")
                    self._connections = connections
            return generation, connections

    def _place(self, generation: int) -> str:
        """Where in the store the ranks meet for a generation."""
        return str(generation - self._first)

    def _looking(self, generation: int, is_over: Callable[[], bool]) -> Callable[[], None]:
        """A function to call while a rank does not come. It raises ``Broken`` if that has become pointless."""
        looked_seconds = -_LOOK_SECONDS

        def look() -> None:
            nonlocal looked_seconds
            if generation != self.generation or self._is_closed or is_over():
                raise Broken("the connections were dropped")
            if time.monotonic() - looked_seconds > _LOOK_SECONDS:
                looked_seconds = time.monotonic()
                with contextlib.suppress(StoreSilent):
                    if self._notes.is_pointless(self._place(generation)):
                        raise Broken("the others have given up these connections")

        return look

    def process_of(self, peer: int) -> str:
        """Host and process id of ``peer``, as far as they are known."""
        connections = self._connections
        return connections.peers.get(peer, "") if connections is not None else ""

    # Ranks that wait in different operations.

    def say_waiting(self, generation: int, where: str) -> None:
        """Tell the others where this rank waits; no text if it waits no longer. Nobody minds if that fails."""
        with contextlib.suppress(StoreLost):
            self._notes.ask(self._place(generation), lambda store: store.set(f"{self.rank} waits", where))

    def where_waits(self, generation: int, peer: int) -> str:
        """What ``peer`` has said by :meth:`say_waiting`."""
        with contextlib.suppress(StoreLost):
            return self._notes.ask(self._place(generation), lambda store: value_of(store, f"{peer} waits")).decode()
        return ""

    def in_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(*args)``, which may wait in gloo, in another thread."""
        done: Future[None] = Future()

        def call() -> None:
            self._in_gloo[done] = threading.current_thread()
            try:
                function(*args)
            finally:
                del self._in_gloo[done]
                done.set_result(None)

        try:
            calls = _idle.pop()
        except IndexError:
            calls = SimpleQueue()
            start_thread(_make_calls, calls, name="robust_dcp: gloo")
        self._in_gloo[done] = None
        calls.put(call)

    # Ending a generation.

    def break_up(self, generation: int, problem: Problem, operation: Any) -> None:
        """End a generation of connections on all ranks, because of ``problem`` in ``operation``.

        Afterwards each operation of this rank has ended, or goes on over the next generation.
        """
        with self.breaking:
            if self._is_closed:
                operation.end(end_of_leaving(operation.key))
            if self._is_closed or generation != self.generation:
                return
            place = self._place(generation)

            def verdict_on(answers: Sequence[Answer]) -> EndMessage:
                return verdict(problem, operation, self.size, self._answer(problem), answers)

            if self._notes.life_over == self._notes.life != "":
                end_message = EndMessage((), verdict_on([]).error)
                # All at once: a rank that had the next life, and still counted from here, would meet nobody.
                self._notes.life, self._first = "", generation + 1
            else:
                try:
                    told = self._end_of(place) or self._call_roll(place, problem, verdict_on)
                    self._notes.ask(place, lambda store: store.add("heard", 1))
                    end_message = decode(told, EndMessage)
                except StoreLost as lost:
                    problem.is_loss = False  # the lost ranks cannot say that they are alive
                    host = self.store_host
                    alone = verdict_on([])
                    end_message = end_without_store(alone, operation.what, self.size, str(lost), host, self.rank)
                    self._unsettled = place, encode(end_message)
            self._drop(problem)
            self._wait_until_heard(place, end_message)
            self._apply(end_message)

    def _answer(self, problem: Problem, connections: Connections | None = None) -> Answer:
        operations = self.operations()
        missing = dict(problem.missing)
        for each in operations:
            missing.update(each.missing())
        doing = "; ".join(sorted(each.doing() for each in operations)) or "no operation"
        closed = {} if connections is None else dict(connections.closed)
        apart = {rank: detail for rank, detail in self.gone.items() if network.has_timed_out(detail)}
        return Answer(self.rank, doing, tuple(each.key for each in operations), missing, closed, apart)

    def _end_of(self, place: str) -> bytes:
        return self._notes.ask(place, lambda store: value_of(store, "end"))

    def _call_roll(self, place: str, problem: Problem, verdict_on: Callable[[Sequence[Answer]], EndMessage]) -> bytes:
        """Agree with the other ranks on the end message that counts for all of them."""
        awaited: list[int] = []
        if self._connections is not None and problem.missing and not problem.is_loss:
            awaited = self._connections.awaited()
        # The first one decides. It has to be the rank with the problem, not one that hears that this one drops its
        # connections.
        number = self._notes.ask(place, lambda store: int(store.add("answers", 1)))
        connections = self._say_gone(problem)  # other neighbours that have ended are found meanwhile
        # Answer before the connections close: whoever has closed them, and does not answer, is dead.
        answer = self._answer(problem, connections)
        if awaited:  # the others have come, and cannot connect either
            problem.missing = {rank: f"rank {rank} has not come" for rank in awaited}
            answer = msgspec.structs.replace(answer, missing=problem.missing)

        def answers(store: Any) -> list[bytes]:
            found = [value_of(store, f"answer {number + 1}") for number in range(store.add("answers", 0))]
            return [each for each in found if each]

        self._notes.ask(place, lambda store: store.set(f"answer {number}", encode(answer)))
        if connections is not None:
            connections.drop()
        until = time.monotonic() + patience.VERDICT_SECONDS
        pause_seconds = 0.005
        while number > 1 and time.monotonic() < until:
            end_message = self._end_of(place)
            if end_message:
                return end_message
            time.sleep(pause_seconds)
            pause_seconds = min(0.1, 1.3 * pause_seconds)
        if problem.is_elsewhere or problem.missing:
            expected = self.size - (0 if problem.is_loss else len(problem.missing))  # who is lost may be alive
            until = time.monotonic() + patience.ROLL_CALL_SECONDS
            while len(self._notes.ask(place, answers)) < expected and time.monotonic() < until:
                time.sleep(0.02)
        decided = encode(verdict_on([decode(each, Answer) for each in self._notes.ask(place, answers)]))
        return self._notes.ask(place, lambda store: compare_set(store, "end", "", decided))

    def _say_gone(self, problem: Problem | None = None) -> Connections | None:
        """Tell the neighbours that the connections will be dropped, and return these. Nobody connects any more."""
        with self._lock:
            connections, self._connections = self._connections, None
            self._dropped = self.generation
        if connections is not None:
            for each in self.operations():
                each.say_gone(connections, list(problem.missing) if problem and not problem.may_return else ())
            time.sleep(patience.GONE_SECONDS)
        return connections

    def _drop(self, problem: Problem | None = None) -> None:
        connections = self._say_gone(problem)
        if connections is not None:
            connections.drop()

    def _apply(self, end_message: EndMessage) -> None:
        """End the operations that ``end_message`` names. All others go on.

        An end message with several operations means that their ranks waited for each other. A rank that is not in one
        of these operations skips it, so that operations have the same numbers on all ranks afterwards.
        """
        with self._lock:
            self.gone.update(dict.fromkeys(end_message.gone, "and it does not answer"))
            self.generation += 1
            ending = [self._operations.pop(key) for key in end_message.operations if key in self._operations]
            for key in end_message.operations:
                if key.occurrence >= self._occurrences[key.operation]:
                    if len(end_message.operations) > 1 and ending:
                        self._occurrences[key.operation] = key.occurrence + 1
                    else:
                        self._ended_before[key] = end_message
            others = self.operations()
        for operation in ending:
            operation.end(end_message)
        for operation in others:
            operation.resume()

    def _wait_until_heard(self, place: str, end_message: EndMessage) -> None:
        """If the store is in this process, wait until the others have read the end message: when an operation ends, the
        caller may end the process at once."""
        if self.store_host != self.rank or not end_message.operations:
            return
        n_missing = len((end_message.error.fields or {}).get("missing_ranks") or ())
        until = time.monotonic() + patience.HEARD_SECONDS
        with contextlib.suppress(StoreLost):
            while time.monotonic() < until:
                if self._notes.ask(place, lambda store: store.add("heard", 0)) >= self.size - n_missing:
                    return
                time.sleep(0.02)

    # The end of a group.

    def leave(self) -> None:
        """The process group is destroyed. Operations that are under way, such as an async save, still go on."""
        if self._is_closed:
            return
        with contextlib.suppress(StoreLost):
            self._notes.leave()
        if not self.operations():
            self.close()

    def close(self) -> None:
        """Drop the connections, and end all operations: the process ends, or nothing is under way."""
        if self._is_closed:
            return
        self._is_closed = True
        self._drop()
        for operation in self.operations():
            operation.end(end_of_leaving(operation.key))
        own = threading.current_thread()
        wait([done for done, thread in self._in_gloo.copy().items() if thread is not own], patience.EXIT_SECONDS)
        self._make_connections = None
        self._notes.forget()


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


_links: weakref.WeakKeyDictionary[Any, Link] = weakref.WeakKeyDictionary()
"""The links of this process by group. A destroyed group takes its link along, unless an operation is under way."""

_all_links: weakref.WeakSet[Link] = weakref.WeakSet()
_links_lock = threading.Lock()


def link_for(parent: Any) -> Link:
    """The link among the members of ``parent``.

    Raises:
        ValueError: this process is not a member of ``parent``.
    """
    rank = dist.get_rank(parent)
    if rank < 0:  # torch then passes a number
        raise ValueError("this rank is not a member of the process group that it was given")
    with _links_lock:
        if parent not in _links:
            ranks = tuple(dist.get_process_group_ranks(parent))
            link = Link(rank, ranks) if len(ranks) == 1 else _link_in(parent, rank, ranks)
            _links[parent] = link
            _all_links.add(link)
            weakref.finalize(parent, _leave, weakref.ref(link)).atexit = False
        return _links[parent]


def _link_in(parent: Any, rank: int, ranks: tuple[int, ...]) -> Link:
    store = store_of(parent)
    notes = Notes(store, f"robust_dcp/{parent.group_name}")

    @cache
    def here() -> Whereabouts:  # in an exchange, so that all ranks hear of an error
        # A tree needs two connections for each of its levels at most, and a relay a few for each of its steps.
        network.ensure_open_files(8 + 8 * len(ranks).bit_length())
        process = f"host {socket.gethostname()[:64]}, pid {os.getpid()}"
        return Whereabouts(process, network.listening_address(store), network.network_id())

    def make_connections(place: str, ask: Ask) -> Connections:
        return Connections(ask, rank, len(ranks), here(), notes.life.encode())

    return Link(rank, ranks, notes, make_connections, store_host(parent))


def _leave(link: weakref.ref[Link]) -> None:
    left = link()
    if left is not None:
        left.leave()


def _forget_all() -> None:
    """In a forked child: the connections are the parent's, and its threads do not exist here."""
    _idle.clear()
    for kept in (*_all_links, *_links):
        # gloo joins the threads of a group that is freed. Whether Python frees it at its end depends on the order of
        # imports.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for link in list(_all_links):
        link._is_closed = True
    _links.clear()
    _all_links.clear()
    _links_lock.release()


def _close_all() -> None:
    """At the end of the process, before Python ends the threads."""
    for link in list(_all_links):
        link.close()
    while _idle:
        _idle.pop().put(sys.exit)


os.register_at_fork(before=_links_lock.acquire, after_in_parent=_links_lock.release, after_in_child=_forget_all)
atexit.register(_close_all)
