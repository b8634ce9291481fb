"""What a process has of one group: its connections, and the operations that use them.

Connections come in generations. When something fails that ends an operation on all ranks, the connections are dropped
too: that is how all ranks hear of it at once. The ranks agree in the store how the generation ended. Then they make the
next one, and operations that did not end go on over it.

Two ranks meet in the store. Each sets a key for the other one, and both connect when both keys are there. So nobody
waits in gloo for a rank that does not come.

All channels of a group share one link. It does nothing by itself: see :mod:`~robust_dcp.comm.waits`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from robust_dcp.comm import patience
from robust_dcp.comm.connections import (
    CONNECTING_FAILED,
    GREETING_TAG,
    NOT_CONNECTED,
    Broken,
    Connections,
    Unreachable,
    Whereabouts,
)
from robust_dcp.comm.endings import (
    STORE_IS_LOST,
    Answer,
    EndMessage,
    OperationKey,
    Problem,
    Waiting,
    end_of_leaving,
    end_without_store,
    verdict,
)
from robust_dcp.comm.frames import operation_id
from robust_dcp.comm.messages import decode, encode
from robust_dcp.comm.store import Notes, StoreLost, StoreSilent, compare_set, value_of, values_of
from robust_dcp.comm.waits import Ask, Call, Finish, Outcome, Steps, T, Until

_LOOK_SECONDS = 1.0
"""How often a rank that waits for another one to come looks whether that has become pointless."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS, _POLL_GROWTH = 0.002, 0.25, 2.0
_GOLDEN_RATIO = 0.618034
_MAX_COMPLETED = 8
_MAX_ASKED = 64

Look = Callable[[], Steps[None]]
"""Is called again and again while a rank waits. It raises to end the wait."""


class Runner(Protocol):
    """What runs the steps of a link: :class:`~robust_dcp.comm.loop.Loop`, or a simulation."""

    def run(self, steps: Steps[T]) -> T:
        """Take all of ``steps``, and return what they return."""

    def tell(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function(*args)`` between two steps."""

    def spawn(self, steps: Steps[Any]) -> None:
        """Take ``steps`` beside what is running."""

    def wake(self) -> None:
        """Something has changed for which others may wait."""

    def begin_beats(self, operation: Any) -> None:
        """Call ``operation.beat()`` several times a second."""

    def end_beats(self, operation: Any) -> None:
        """Do not call it any more."""

    def leave(self) -> None:
        """The process group is destroyed. Operations that are under way, such as an async save, still go on."""

    def close(self) -> None:
        """Drop the connections, and end all operations."""


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
        loop: runs what has to wait.
        notes: what the ranks tell each other in their store.
        make_connections: makes a generation of connections. A group of one needs none.
        store_host: the rank whose process hosts the store; ``None`` if no rank of the group does.

    Attributes:
        now: the time in seconds. Whoever runs the link sets it before each step; nothing in it reads a clock.
        secret: 64 bits that only ranks of the group know, once the store was asked.
        stats: what all exchanges have cost this rank so far, over all operations.
        generation: how many generations of connections have ended.
        gone: ranks that seem to have ended, each with the reason. They are named soon unless they connect again.
        completed: the operations that this rank was in lately, and how many exchanges of each have ended well.
        is_breaking: a generation is ending. Nobody can come back meanwhile.
        is_closed: the group was destroyed, or the process ends.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        loop: Runner,
        notes: Notes,
        make_connections: Callable[[], Connections] | None = None,
        store_host: int | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.loop = loop
        self.notes = notes
        self.now = 0.0
        self.store_host = store_host
        self.secret = 0
        self.stats = ExchangeStats()
        self.generation = 0
        self.gone: dict[int, str] = {}
        self.completed: dict[OperationKey, int] = {}
        self.is_breaking = self.is_closed = False
        self.connections: Connections | None = None
        self._make_connections = make_connections
        self._is_making = False
        self._dropped = -1  # the latest generation that was dropped
        self._first = 0  # the first generation of this life of the group
        self._unsettled: tuple[str, bytes] | None = None
        self._operations: weakref.WeakValueDictionary[OperationKey, Any] = weakref.WeakValueDictionary()
        self._occurrences: dict[int, int] = defaultdict(int)
        self._ended_before: dict[OperationKey, EndMessage] = {}
        self._store_lost: tuple[StoreLost, float, bool] | None = None

    def begin(self, name: str, operation: Any) -> None:
        """Number ``operation``. If the others have given up on it already, it is ended at once.

        Args:
            name: the name of the operation, the same on all ranks.
            operation: the link holds only a weak reference to it.
        """
        number = operation_id(name)
        key = OperationKey(number, self._occurrences[number])
        self._occurrences[number] += 1
        operation.key = key
        end_message = self._ended_before.pop(key, None)
        if end_message is None:
            self._operations[key] = operation
        else:
            operation.end(end_message)

    def operations(self) -> list[Any]:
        """The operations that this rank is in."""
        return list(self._operations.values())

    def pause(self, seconds: float) -> Steps[None]:
        """Wait for so long."""
        until = self.now + seconds
        while self.now < until:
            yield Until(until)

    # The store.

    def ask(
        self, place: str, question: Callable[[Any], T], look: Look | None = None, until: float = -math.inf
    ) -> Steps[T]:
        """What ``question`` returns. It gets the store for the keys of ``place`` in this life of the group.

        Args:
            look: is called each time that the store has not answered in time, before it is asked again.
            until: without ``look`` the store is asked again until then. In that time an outage of the network may end.
                After it the store is asked once more, and not at all if it did not answer such a question shortly
                before. Without ``until`` nothing depends on the answer, and it may have been any question.

        Raises:
            StoreSilent: the store does not answer in time.
            StoreLost: the store is gone.
        """
        for n_tries in range(1, 1 << 30):
            seconds = patience.STORE_BUSY_SECONDS
            if look is None:
                lost, lost_until, was_urgent = self._store_lost or (None, 0.0, False)
                if lost is not None and until <= self.now < lost_until and (was_urgent or until == -math.inf):
                    raise type(lost)(*lost.args)
                seconds = min(seconds, max(patience.STORE_ANSWER_SECONDS, until - self.now))
            try:
                answer: T = yield Ask(place, question, seconds)
                return answer
            except StoreLost as lost:
                is_over = not isinstance(lost, StoreSilent) or (look is None and self.now >= until)
                is_over = is_over or (look is None and self.is_closed)
                if is_over and look is None:
                    lost_until = self.now + patience.STORE_LOST_SECONDS
                    self._store_lost = lost.with_traceback(None), lost_until, until > -math.inf
                if is_over:
                    raise
            # Each try is work for the store. If all ranks came back at once, it would never have time for an answer.
            again = self.now + seconds * (_GOLDEN_RATIO * (self.rank + n_tries) % 1.0)
            while self.now < (again if look is not None else min(again, until)):
                if look is not None:
                    yield from look()
                yield Until(again if look is not None else min(again, until))
        raise StoreSilent("no answer")

    # Connecting.

    def connect(
        self, peer: int, is_over: Callable[[], bool], announced: Callable[[], None] = lambda: None
    ) -> Steps[tuple[int, Connections]]:
        """Connect to ``peer``. Return the generation, and its connections.

        Args:
            is_over: whether nobody needs the connection any more.
            announced: is called once ``peer`` can find this rank.

        Raises:
            Broken: the generation is over, or the store is lost.
            RobustCheckpointError: this rank, or ``peer``, listens where the other one cannot reach it.
        """
        generation, connections = self.generation, self.connections
        try:
            if connections is None:
                generation, connections = yield from self._begin_generation(is_over)
            if peer not in connections.peers or connections.is_dropped:
                yield from self._meet(connections, peer, self._looking(generation, is_over), announced)
            self.gone.pop(peer, None)
            return generation, connections
        except StoreLost as error:
            raise Broken(f"{STORE_IS_LOST} ({error})") from None

    def _begin_generation(self, is_over: Callable[[], bool]) -> Steps[tuple[int, Connections]]:
        def look() -> Steps[None]:
            if self.is_closed or is_over():
                raise Broken("the connections were dropped")
            yield from ()

        while self._is_making:
            yield Until(math.inf)
        self._is_making = True
        try:
            if self._unsettled is not None:  # the store did not answer when it ended
                place, end_message = self._unsettled
                yield from self.ask(place, lambda store: compare_set(store, "end", "", end_message), look)
                self._unsettled = None
            yield from look()
            generation, connections = self.generation, self.connections
            if generation == self._dropped:  # the ranks have not agreed yet how it ended
                raise Broken("the connections were dropped")
            if connections is None:
                self.secret = int((yield from self.ask("", lambda store: self.notes.life, look))[-16:], 16)
                if self._make_connections is None:
                    raise ValueError("a group of one has nobody to connect to")
                connections = (yield Call(self._make_connections)).get()
                if generation != self.generation or generation == self._dropped:
                    raise Broken("the connections were dropped")
                self.connections = connections
            return generation, connections
        finally:
            self._is_making = False
            self.loop.wake()

    def _place(self, generation: int) -> str:
        """Where in the store the ranks meet for a generation."""
        return str(generation - self._first)

    def _looking(self, generation: int, is_over: Callable[[], bool]) -> Look:
        """A function to call while a rank does not come. It raises ``Broken`` if that has become pointless."""
        looked_seconds = -math.inf

        def look() -> Steps[None]:
            nonlocal looked_seconds
            if generation != self.generation or self.is_closed or is_over():
                raise Broken("the connections were dropped")
            if self.now - looked_seconds > _LOOK_SECONDS:
                looked_seconds = self.now
                with contextlib.suppress(StoreSilent):
                    if (yield from self.ask(self._place(generation), self.notes.is_pointless)):
                        raise Broken("the others have given up these connections")

        return look

    def _meet(self, connections: Connections, peer: int, look: Look, announced: Callable[[], None]) -> Steps[None]:
        """Wait until ``peer`` has come, however long that takes, connect, and make sure that it is a rank of the group.

        Raises:
            Broken: the connections were dropped, or cannot be made.
            RobustCheckpointError: one of the two listens where the other one cannot reach it.
            StoreLost: the store is gone.
        """
        while peer in connections.meeting:  # several operations may need this connection
            yield from look()
            yield Until(self.now + _LAST_POLL_SECONDS)
        connections.meeting.add(peer)
        try:
            yield from look()
            if connections.is_dropped:
                raise Broken("the connections were dropped")
            if peer in connections.peers:
                return
            place, here = self._place(self.generation), connections.here
            yield from self._make_group(connections, place, look)
            yield from self.ask(place, lambda store: store.set(f"{self.rank} to {peer}", here.encode()), look)
            announced()
            (there,) = yield from self._await(connections, place, [f"{peer} to {self.rank}"], look)
            here.refuse_loopback(there)
            there.refuse_loopback(here)
            answer = bytearray(len(connections.greeting))

            def say_gone() -> None:
                for each in self.operations():
                    each.say_gone(connections, ())

            greeted: list[Outcome] = []

            def greet() -> Steps[None]:
                greeted.append((yield Call(partial(connections.greet, peer, partial(self.loop.tell, say_gone)))))
                self.loop.wake()

            self.loop.spawn(greet())  # gloo may wait for ten seconds, and the others may give up these connections
            while not greeted:
                yield Until(self.now + _LOOK_SECONDS)
                yield from () if greeted else look()
            try:
                greeted[0].get()
                yield Finish(
                    connections, connections.start("recv", peer, GREETING_TAG, answer), patience.GREETING_SECONDS
                )
            except Broken as error:
                if connections.is_dropped and not isinstance(error, Unreachable):
                    raise  # this rank has dropped them, and it is no fault of the other one
                if not connections.is_dropped:
                    say_gone()
                    yield Call(connections.drop)
                raise Broken(f"{CONNECTING_FAILED}: {there.process}: {error}") from None
            if answer != connections.greeting:
                raise Broken(f"{CONNECTING_FAILED}: whoever answered is not {there.process}")
            yield Call(partial(connections.note_peer, peer, there))
        finally:
            connections.meeting.discard(peer)
            self.loop.wake()

    def _make_group(self, connections: Connections, place: str, look: Look) -> Steps[None]:
        """Make the gloo group. Where gloo connects each rank to each other one at once, all must be here."""
        while connections.is_making:  # a drop ends the wait for the ranks
            yield Until(math.inf)
        if connections.is_dropped:
            raise Broken("the connections were dropped")
        if connections.has_group:
            return
        connections.is_making = True
        try:
            if not connections.is_lazy:
                here = connections.here
                yield from self.ask(place, lambda store: store.set(f"{self.rank} is here", here.encode()), look)
                connections.awaits_all = True
                keys = [f"{rank} is here" for rank in range(self.size)]
                everywhere = yield from self._await(connections, place, keys, look)
                connections.awaits_all = False
                for there in everywhere:
                    here.refuse_loopback(there)
            store = yield from self.ask(place, lambda store: store, look)
            (yield Call(partial(connections.make_group, store))).get()
        finally:
            connections.is_making = False
            self.loop.wake()

    def _await(self, connections: Connections, place: str, keys: list[str], look: Look) -> Steps[list[Whereabouts]]:
        """Wait for what other ranks say of themselves under ``keys`` of the store."""
        pause_seconds = _FIRST_POLL_SECONDS

        def ask_all(store: Any) -> list[bytes] | None:
            return values_of(store, keys) if store.check(keys) else None

        while (values := (yield from self.ask(place, ask_all, look))) is None:
            yield from look()
            if connections.is_dropped:
                raise Broken("the connections were dropped")
            yield from self.pause(pause_seconds)
            pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)
        return [Whereabouts.decode(value) for value in values]

    def process_of(self, peer: int) -> str:
        """Host and process id of ``peer``, as far as they are known."""
        return self.connections.peers.get(peer, "") if self.connections is not None else ""

    # Ranks that wait in different operations.

    def note_completed(self, key: OperationKey, n_exchanges: int) -> None:
        """So many exchanges of an operation have ended well on this rank."""
        self.completed.pop(key, None)
        self.completed[key] = n_exchanges
        if len(self.completed) > _MAX_COMPLETED:
            del self.completed[next(iter(self.completed))]

    def say_waiting(self, generation: int, waiting: Waiting | None, peers: Sequence[int] = ()) -> Steps[list[Waiting]]:
        """Tell the others where this rank waits; ``None`` if it waits no longer. Return what ``peers`` have told.

        Nobody minds if the store does not answer.

        Raises:
            Problem: the others have given up these connections, and none that is left leads to one of them.
        """
        encoded = b"" if waiting is None else encode(waiting)

        def say(store: Any) -> list[bytes] | None:
            if waiting is not None and (store.check(["answers"]) or self.notes.is_pointless(store)):
                return None  # the roll is called
            store.set(f"{self.rank} waits", encoded)
            return list(_present(store, [f"{peer} waits" for peer in peers]).values())

        with contextlib.suppress(StoreLost):
            values = yield from self.ask(self._place(generation), say)
            if values is None:
                raise Problem.of_lost({}, may_return=True)
            return [decode(value, Waiting) for value in values if value]
        return []

    # Ending a generation.

    def break_up(self, generation: int, problem: Problem, operation: Any) -> Steps[None]:
        """End a generation of connections on all ranks, because of ``problem`` in ``operation``.

        Afterwards each operation of this rank has ended, or goes on over the next generation.
        """
        while self.is_breaking:
            yield Until(math.inf)
        self.is_breaking = True
        try:
            if self.is_closed:
                operation.end(end_of_leaving(operation.key))
            if self.is_closed or generation != self.generation:
                return
            place = self._place(generation)

            def verdict_on(answers: Sequence[Answer], waiting: Mapping[int, Waiting]) -> EndMessage:
                return verdict(problem, operation, self.size, self._answer(problem), answers, waiting)

            if self.notes.life_over == self.notes.life != "":
                end_message = EndMessage((), verdict_on([], {}).error)
                # All at once: a rank that had the next life, and still counted from here, would meet nobody.
                self.notes.life, self._first = "", generation + 1
            else:
                # Who does not act because of silence has time: an outage of the network may end.
                until = self.now + (operation.timeout_seconds if problem.is_loss or problem.is_elsewhere else 0.0)
                try:
                    encoded = yield from self._end_of(place, until)
                    if not encoded:
                        encoded = yield from self._call_roll(place, problem, verdict_on, until)
                    yield from self.ask(place, lambda store: store.add("heard", 1), until=until)
                    end_message = decode(encoded, EndMessage)
                except StoreLost as lost:
                    problem.is_loss = False  # the lost ranks cannot say that they are alive
                    host = self.store_host
                    alone = verdict_on([], {})
                    end_message = end_without_store(alone, operation.what, self.size, str(lost), host, self.rank)
                    self._unsettled = place, encode(end_message)
            yield from self._drop(problem)
            yield from self._wait_until_heard(place, end_message)
            self._apply(end_message)
        finally:
            self.is_breaking = False
            self.loop.wake()

    def _answer(self, problem: Problem, connections: Connections | None = None) -> Answer:
        operations = self.operations()
        missing = dict(problem.missing)
        for each in operations:
            missing.update(each.missing())
        doing = "; ".join(sorted(each.doing() for each in operations)) or "no operation"
        closed = {} if connections is None else dict(connections.closed)
        # Who was connected to and did not greet may come over new connections: its host was busy, or a stranger took
        # its place.
        apart = {rank: detail for rank, detail in self.gone.items() if NOT_CONNECTED in detail}
        return Answer(self.rank, doing, tuple(each.key for each in operations), missing, closed, apart)

    def _end_of(self, place: str, until: float) -> Steps[bytes]:
        return (yield from self.ask(place, lambda store: value_of(store, "end"), until=until))

    def _call_roll(
        self, place: str, problem: Problem, verdict_on: Callable[..., EndMessage], patient_until: float
    ) -> Steps[bytes]:
        """Agree with the other ranks on the end message that counts for all of them."""

        def ask(question: Callable[[Any], T]) -> Steps[T]:
            return self.ask(place, question, until=patient_until)

        awaited: list[int] = []
        if self.connections is not None and self.connections.awaits_all and problem.missing and not problem.is_loss:
            awaited = yield from ask(
                lambda store: [rank for rank in range(self.size) if not store.check([f"{rank} is here"])]
            )
        # The first one decides. It has to be the rank with the problem, not one that hears that this one drops its
        # connections.
        number = yield from ask(lambda store: int(store.add("answers", 1)))
        connections = yield from self._say_gone(problem)  # other neighbours that have ended are found meanwhile
        # Answer before the connections close: whoever has closed them, and does not answer, is dead.
        answer = self._answer(problem, connections)
        if awaited:  # the others have come, and cannot connect either
            problem.missing = {rank: f"rank {rank} has not come" for rank in awaited}
            answer = msgspec.structs.replace(answer, missing=problem.missing)
        try:
            yield from ask(lambda store: store.set(f"answer {number}", encode(answer)))
        except StoreLost:
            self.connections = connections  # they are still to be dropped
            raise
        if connections is not None:
            yield Call(connections.drop)
        # If the first one has ended meanwhile, the second one decides: it may have a problem of its own, too. All at
        # once would be too much for the store, as each reads what all have answered.
        until = self.now + patience.VERDICT_SECONDS * min(number - 1, 2)
        pause_seconds = 0.005
        while self.now < until:
            end_message = yield from self._end_of(place, patient_until)
            if end_message:
                return end_message
            yield from self.pause(pause_seconds)
            pause_seconds = min(0.1, 1.3 * pause_seconds)
        encoded: dict[str, bytes] = {}

        def read_answers(store: Any) -> int:
            keys = [f"answer {number + 1}" for number in range(store.add("answers", 0))]
            encoded.update(_present(store, [key for key in keys if key not in encoded]))
            return len(keys)

        n_begun = yield from ask(read_answers)
        if problem.is_elsewhere or problem.missing:
            expected = self.size - (0 if problem.is_loss else len(problem.missing))  # who is lost may be alive
            until = self.now + patience.ROLL_CALL_SECONDS
            # Who has begun to answer is alive, and only its machine is busy.
            while len(encoded) < expected and self.now < until + (n_begun > len(encoded)) * patience.ROLL_CALL_SECONDS:
                yield from self.pause(0.02)
                n_begun = yield from ask(read_answers)
        answers = [decode(each, Answer) for each in encoded.values()]
        missing = sorted({*problem.missing}.union(*[answer.missing for answer in answers]))[:_MAX_ASKED]
        keys = {f"{rank} waits": rank for rank in missing}
        notes = yield from ask(lambda store: _present(store, list(keys)))
        waiting = {keys[key]: decode(value, Waiting) for key, value in notes.items() if value}
        decided = encode(verdict_on(answers, waiting))
        return (yield from ask(lambda store: compare_set(store, "end", "", decided)))

    def _say_gone(self, problem: Problem | None) -> Steps[Connections | None]:
        """Tell the neighbours that the connections will be dropped, and return these. Nobody connects any more."""
        connections, self.connections = self.connections, None
        self._dropped = self.generation
        if connections is not None:
            missing = None if problem is None else () if problem.may_return else list(problem.missing)
            for each in self.operations():
                each.say_gone(connections, missing)
            yield from self.pause(patience.GONE_SECONDS)
        return connections

    def _drop(self, problem: Problem | None) -> Steps[None]:
        connections = yield from self._say_gone(problem)
        if connections is not None:
            yield Call(connections.drop)

    def _apply(self, end_message: EndMessage) -> None:
        """End the operations that ``end_message`` names. All others go on.

        A rank that is going to come to one of them hears of its end then. But if ranks waited for each other in several
        of them, each skips those that it is not in, so that operations have the same numbers on all ranks afterwards.
        """
        self.gone.update(dict.fromkeys(end_message.gone, "and it does not answer"))
        self.generation += 1
        ending = [self._operations.pop(key) for key in end_message.operations if key in self._operations]
        for key in end_message.operations:
            if key.occurrence >= self._occurrences[key.operation]:
                if end_message.are_crossed and ending:
                    self._occurrences[key.operation] = key.occurrence + 1
                else:
                    self._ended_before[key] = end_message
        others = self.operations()
        for operation in ending:
            operation.end(end_message)
        for operation in others:
            operation.resume()

    def _wait_until_heard(self, place: str, end_message: EndMessage) -> Steps[None]:
        """If the store is in this process, wait until the others have read the end message: when an operation ends, the
        caller may end the process at once."""
        if self.store_host != self.rank or not end_message.operations:
            return
        n_missing = len((end_message.error.fields or {}).get("missing_ranks") or ())
        until = self.now + patience.HEARD_SECONDS
        with contextlib.suppress(StoreLost):
            while self.now < until:
                if (yield from self.ask(place, lambda store: store.add("heard", 0))) >= self.size - n_missing:
                    return
                yield from self.pause(0.02)

    # The end of a group.

    def leave(self) -> Steps[bool]:
        """The process group is destroyed. Whether nothing is under way: an async save, say, still goes on."""
        if self.notes.life:
            with contextlib.suppress(StoreLost):
                yield from self.ask("", self.notes.leave)
        return not self.operations()

    def close(self) -> Steps[None]:
        """Drop the connections, and end all operations: the process ends, or nothing is under way."""
        if self.is_closed:
            return
        self.is_closed = True
        self.loop.wake()
        yield from self._drop(None)
        for operation in self.operations():
            operation.end(end_of_leaving(operation.key))
        self._make_connections = None


def _present(store: Any, keys: list[str]) -> dict[str, bytes]:
    """What those of ``keys`` hold that are there: one or two round trips where all are, and few where few are not."""
    if not keys:
        return {}
    if store.check(keys):
        return dict(zip(keys, values_of(store, keys), strict=True))
    middle = len(keys) // 2
    return {**_present(store, keys[:middle]), **_present(store, keys[middle:])} if middle else {}
