"""Ranks of one group in virtual time: their real state machines, on a network, a store and a clock that are made up.

All of it runs in one thread, and depends on its seed only. An hour takes a moment, and each run of a seed is the same.
Nothing goes wrong by itself: whoever makes a simulation says what happens to whom, and when.

    simulation = Simulation(3, seed=1)
    for rank in range(3):
        simulation.start(rank, save(simulation.links[rank]))
    simulation.at(0.5, simulation.kill, 2)
    simulation.run(until=60.0)
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from robust_dcp.comm.connections import GREETING_TAG, Broken, Connections, Moving, Unreachable, Whereabouts
from robust_dcp.comm.link import Link
from robust_dcp.comm.store import Notes, StoreLost, StoreSilent
from robust_dcp.comm.waits import Ask, Call, Finish, Outcome, Steps, Until

__all__ = ["Later", "Simulation", "Task"]

_TICK_SECONDS = 0.5
"""How often a rank looks whether it is time for a beat."""

_CONNECT_SECONDS = 2.0
"""How long gloo tries to reach an address."""

_SLOW_NBYTES_PER_SECOND = 1e5


@dataclass(eq=False)
class Later:
    """What a call returns that takes ``seconds``, and then raises what ``fail`` returns.

    Attributes:
        resume: is set by whoever runs the call. If it is called, the call ends before, with that outcome.
    """

    seconds: float
    fail: Callable[[], Exception]
    resume: Callable[[Outcome, None], None] = lambda outcome, error: None


@dataclass(eq=False)
class Task:
    """Steps that are being taken on a rank.

    Attributes:
        number: how many waits there were. What was to end an earlier one is ignored.
        outcome: what the steps have returned or raised; ``None`` while they are not over.
        ended_seconds: when that was.
    """

    steps: Steps[Any]
    number: int = 0
    sleeps: bool = False
    wait: Finish | None = None
    n_received: int = 0
    outcome: Outcome | None = None
    ended_seconds: float = math.inf


class Store:
    """A store in memory, with what :mod:`robust_dcp.comm` calls, for the keys that begin with ``prefix``."""

    def __init__(self, values: dict[str, bytes], prefix: str = "", n_calls: list[int] | None = None) -> None:
        self.values, self.prefix = values, prefix
        self.n_calls = [0] if n_calls is None else n_calls

    def under(self, prefix: str) -> Store:
        return Store(self.values, f"{self.prefix}{prefix}/", self.n_calls)

    def set(self, key: str, value: Any) -> None:
        self.n_calls[0] += 1
        self.values[self.prefix + key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.n_calls[0] += 1
        return self.values[self.prefix + key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.n_calls[0] += 1
        return [self.values[self.prefix + key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self.n_calls[0] += 1
        return all(self.prefix + key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.n_calls[0] += 1
        total = int(self.values.get(self.prefix + key, b"0")) + amount
        self.values[self.prefix + key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self.n_calls[0] += 1
        wanted = expected.encode() if isinstance(expected, str) else expected
        value = self.values.get(self.prefix + key)
        if value == wanted or (value is None and not wanted):
            self.set(key, desired)
            return self.values[self.prefix + key]
        return wanted if value is None else value


class _Notes(Notes):
    """What a rank asks the store, without a thread."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._name = "group"
        self._store = simulation.store
        self.life = self.life_over = ""
        self._stores: dict[tuple[str, str], Store] = {}

    def under(self, place: str) -> Store:
        if not self.life:
            drawn = f"0 simulation {len(self._store.values):016x}"
            self.life = self._store.compare_set("group/life", "", drawn).decode()
        if (self.life, place) not in self._stores:
            self._stores[self.life, place] = self._simulation.store.under(f"{self.life}/{place}")
        return self._stores[self.life, place]


class _Connections(Connections):
    """The connections of one rank in one place, without gloo."""

    def __init__(self, simulation: Simulation, rank: int, place: str) -> None:
        super().__init__(rank, simulation.size, Whereabouts(f"rank {rank} of a simulation", "", ""), b"hi")
        self.is_lazy = True
        self.place = place
        self.inbox: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.receivers: dict[tuple[int, int], Task] = {}
        self.broken: dict[int, str] = {}
        self.partners: set[int] = set()
        self.greeted: set[int] = set()
        self.awaits_greeting: dict[int, Later] = {}
        self.simulation = simulation
        simulation.members[place, rank] = self

    @property
    def has_group(self) -> bool:
        return True

    def note_peer(self, peer: int, there: Whereabouts) -> None:
        self.peers[peer] = there.process

    def greet(self, peer: int, say_gone: Callable[[], None]) -> Any:
        return self.simulation.greet(self, peer, say_gone)

    def start(self, verb: str, peer: int, tag: int, data: Any) -> Moving:
        if self.is_dropped or peer in self.broken:
            raise Broken(self.broken.get(peer, "the connections were dropped"))
        works = []
        self.partners.add(peer)
        if verb == "send":
            content = data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)
            works = self.simulation.send(self, peer, tag, content)
        return Moving(data, _NOTHING, works if verb == "send" else [(peer, tag)])

    def drop(self) -> None:
        if not self.is_dropped:
            self.is_dropped = True
            self.simulation.close(self)
            self.kept.clear()


_NOTHING = torch.empty(0)


class _Rank:
    """Takes the steps of one rank; see :class:`robust_dcp.comm.link.Runner`."""

    link: Link

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.rank = simulation, rank
        self.tasks: dict[Task, None] = {}
        self.beating: dict[Any, None] = {}
        self.is_ticking = False

    def spawn(self, steps: Steps[Any]) -> None:
        task = Task(steps)
        self.tasks[task] = None
        self.simulation.at(0.0, self.step, task, 0, None, None)

    def run(self, steps: Steps[Any]) -> Any:
        raise AssertionError("a simulated rank takes its steps in virtual time")

    def tell(self, function: Callable[..., Any], *args: Any) -> Any:
        self.link.now = self.simulation.now
        return function(*args)

    def wake(self) -> None:
        for task in self.tasks:
            if task.sleeps:
                task.sleeps = False
                self.simulation.at(0.0, self.step, task, task.number, None, None)

    def begin_beats(self, operation: Any) -> None:
        self.beating[operation] = None
        if not self.is_ticking:
            self.is_ticking = True
            self.simulation.at(_TICK_SECONDS, self.tick)

    def end_beats(self, operation: Any) -> None:
        self.beating.pop(operation, None)

    def tick(self) -> None:
        if not self.postponed(self.tick):
            self.is_ticking = bool(self.beating)
            for operation in list(self.beating):
                self.tell(operation.beat)
            if self.is_ticking:
                self.simulation.at(_TICK_SECONDS, self.tick)

    def leave(self) -> None:
        self.spawn(self.link.leave())

    def close(self) -> None:
        self.spawn(self.link.close())

    def postponed(self, function: Callable[..., None], *args: Any) -> bool:
        """Whether the rank does nothing now. If it stands still, it does that later."""
        simulation = self.simulation
        if self.rank in simulation.killed:
            return True
        if not simulation.thaws:
            return False
        thaws = simulation.thaws.get(self.rank, 0.0)
        if simulation.now < thaws:
            simulation.at(thaws - simulation.now, function, *args)
            return True
        return False

    def step(self, task: Task, number: int, answer: Any, error: BaseException | None) -> None:
        """Take the next step of ``task``, unless its wait with this number has ended otherwise."""
        if task.number != number or self.postponed(self.step, task, number, answer, error):
            return
        task.sleeps, task.wait = False, None
        while True:
            task.number += 1
            self.link.now = self.simulation.now
            try:
                wait = task.steps.send(answer) if error is None else task.steps.throw(error)
            except StopIteration as end:
                self._end(task, Outcome(end.value, None))
                return
            except Exception as raised:
                self._end(task, Outcome(None, raised))
                return
            answer = error = None
            if isinstance(wait, Call):
                answer = self._call(wait)
                if isinstance(answer.value, Later):
                    later = answer.value
                    later.resume = partial(self.step, task, task.number)
                    self.simulation.at(later.seconds, self.fail, task, task.number, later)
                    return
            elif isinstance(wait, Until):
                if wait.seconds > self.simulation.now:
                    task.sleeps = True
                    if wait.seconds < math.inf:
                        delay = wait.seconds - self.simulation.now
                        self.simulation.at(delay, self.step, task, task.number, None, None)
                    return
            elif isinstance(wait, Ask):
                self.simulation.ask(self, task, wait)
                return
            else:
                try:
                    task.wait, task.n_received = wait, 0
                    if not self._receive(task):
                        if wait.seconds is not None:
                            timed_out = Broken("Timed out waiting")
                            self.simulation.at(wait.seconds, self.step, task, task.number, None, timed_out)
                        return
                except Broken as broken:
                    error = broken

    def fail(self, task: Task, number: int, later: Later) -> None:
        """A call that took long fails."""
        if task.number == number and not self.postponed(self.fail, task, number, later):
            self.step(task, number, Outcome(None, later.fail()), None)

    def _call(self, wait: Call) -> Outcome:
        try:
            return Outcome(wait.function(), None)
        except Exception as error:
            return Outcome(None, error)

    def _end(self, task: Task, outcome: Outcome) -> None:
        task.outcome, task.ended_seconds = outcome, self.simulation.now
        del self.tasks[task]

    def _receive(self, task: Task) -> bool:
        """Whether all that ``task`` waits for has come."""
        wait = task.wait
        assert wait is not None
        connections, works = wait.connections, wait.moving.works
        while task.n_received < len(works):
            peer, tag = works[task.n_received]
            if peer < 0:  # a piece that leaves
                return False
            inbox = connections.inbox.get((peer, tag))
            if not inbox:
                if connections.is_dropped or peer in connections.broken:
                    raise Broken(connections.broken.get(peer, "the connections were dropped"))
                connections.receivers[peer, tag] = task
                return False
            data = inbox.popleft()
            target = wait.moving.data
            target[:] = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(target, torch.Tensor) else data
            )
            task.n_received += 1
            if wait.note_piece is not None:
                self.tell(wait.note_piece)
        return True

    def arrived(self, task: Task) -> None:
        """Something has come that ``task`` may wait for, or never will."""
        if task.wait is None or self.postponed(self.arrived, task):
            return
        error = None
        try:
            if not self._receive(task):
                return
        except Broken as broken:
            error = broken
        self.step(task, task.number, None, error)

    def piece(self, task: Task) -> None:
        """A piece for ``task`` has come or left."""
        if task.wait is not None and task.wait.note_piece is not None and not self.postponed(self.piece, task):
            self.tell(task.wait.note_piece)


@dataclass
class Outage:
    """Nothing passes between two sides from ``begin`` to ``end``. TCP tries again, less and less often."""

    side: frozenset[int]
    begin: float
    end: float

    def concerns(self, a: int, b: int) -> bool:
        return (a in self.side) != (b in self.side)


class Simulation:
    """See the module.

    Args:
        size: how many ranks.
        seed: of the delays.
        store_host: the rank that takes the store along when it is killed; ``None`` if the store survives all.
        mean_delay_seconds: of a message, and of the store.

    Attributes:
        now: the time.
        links: the link of each rank.
        killed: when ranks were killed.
        thaws: until when ranks stand still.
        outages: when which ranks do not reach which. The store is rank -1, or that of its host.
        damage: may change what is sent: it gets sender, receiver, and the bytes.
        happened: what was done to whom, for people.
        n_events, n_messages, nbytes: the work of the simulation, and what was sent by each rank.
    """

    def __init__(
        self, size: int, seed: object, *, store_host: int | None = None, mean_delay_seconds: float = 0.002
    ) -> None:
        self.size = size
        self.now = 0.0
        self.random = random.Random(f"simulation {seed}")
        self.store_host = store_host
        self.mean_delay_seconds = mean_delay_seconds
        self.store = Store({})
        self.ranks = [_Rank(self, rank) for rank in range(size)]
        self.members: dict[tuple[str, int], _Connections] = {}
        self.killed: dict[int, float] = {}
        self.thaws: dict[int, float] = {}
        self.outages: list[Outage] = []
        self.damage: Callable[[int, int, bytes], bytes] | None = None
        self.slow: set[frozenset[int]] = set()
        self.happened: list[str] = []
        self.n_events = 0
        self.n_messages: list[int] = [0] * size
        self.nbytes: list[int] = [0] * size
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._arrives: dict[tuple[int, int], float] = {}
        self.links = [self._link(rank) for rank in range(size)]

    def _link(self, rank: int) -> Link:
        def make_connections() -> Connections:
            return _Connections(self, rank, link._place(link.generation))

        link = Link(rank, tuple(range(self.size)), self.ranks[rank], _Notes(self), make_connections, self.store_host)
        self.ranks[rank].link = link
        return link

    def at(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(*args)`` after so many seconds."""
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, function, args))

    def start(self, rank: int, steps: Steps[Any], delay: float = 0.0) -> Task:
        """Let ``rank`` take ``steps``."""
        task = Task(steps)
        self.ranks[rank].tasks[task] = None
        self.at(delay, self.ranks[rank].step, task, 0, None, None)
        return task

    def run(self, until: float) -> None:
        """Let time pass until nothing happens any more, or for so long."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, function, args = heapq.heappop(events)
            self.n_events += 1
            function(*args)

    def alive(self) -> list[int]:
        """The ranks that were not killed."""
        return [rank for rank in range(self.size) if rank not in self.killed]

    # What goes wrong.

    def kill(self, rank: int) -> None:
        """``rank`` is gone. The kernel closes its connections."""
        if rank in self.killed:
            return
        self.happened.append(f"{self.now:.2f}: rank {rank} is killed")
        self.killed[rank] = self.now
        for task in self.ranks[rank].tasks:
            task.steps.close()
        self.ranks[rank].tasks.clear()
        for (_, member), connections in list(self.members.items()):
            if member == rank:
                self.close(connections)

    def freeze(self, rank: int, seconds: float) -> None:
        """``rank`` does nothing for so long."""
        self.happened.append(f"{self.now:.2f}: rank {rank} stands still for {seconds:.2f} s")
        self.thaws[rank] = max(self.thaws.get(rank, 0.0), self.now + seconds)

    def cut(self, a: int, b: int) -> None:
        """The connections between two ranks break; both are alive."""
        self.happened.append(f"{self.now:.2f}: the connections between {a} and {b} break")
        for (_, member), connections in list(self.members.items()):
            if member in (a, b) and (b if member == a else a) in connections.peers:
                self._break(connections, b if member == a else a, "connection reset by peer")

    def part(self, side: Sequence[int], seconds: float) -> None:
        """``side``, in which -1 is the store, and the others do not reach each other for so long."""
        self.happened.append(f"{self.now:.2f}: {sorted(side)} are cut off for {seconds:.2f} s")
        self.outages.append(Outage(frozenset(side), self.now, self.now + seconds))

    # The network.

    def _passes(self, a: int, b: int, now: float) -> float:
        """When something that ``a`` sends to ``b`` at ``now`` gets through all outages: TCP tries again later."""
        if not self.outages or a == b:
            return now
        tries = 0.2
        at = now
        while any(each.begin <= at < each.end and each.concerns(a, b) for each in self.outages):
            if tries > 1000:
                return math.inf
            at += tries
            tries *= 2
        return at

    def _delay(self) -> float:
        return self.random.expovariate(1.0) * self.mean_delay_seconds

    def send(self, connections: _Connections, peer: int, tag: int, content: bytes) -> list[tuple[int, int]]:
        """What a rank sends arrives, in the order in which it was sent to this peer."""
        rank = connections.rank
        self.n_messages[rank] += 1
        self.nbytes[rank] += len(content)
        if self.damage is not None:
            content = self.damage(rank, peer, content)
        last = self._arrives.get((rank, peer), 0.0)
        # What waits for a network that is gone is sent again in one go, however often its first message was tried.
        begins = last if self.outages and last > self.now else self.now
        arrives = max(self._passes(rank, peer, begins) + self._delay(), last)
        works: list[tuple[int, int]] = []
        if len(content) > 1000 and self.slow and frozenset((rank, peer)) in self.slow:
            seconds = len(content) / _SLOW_NBYTES_PER_SECOND
            for part in range(1, int(2 * seconds)):
                self.at(max(0.0, arrives - self.now) + part / 2, self._piece, connections, peer, tag)
            arrives += seconds
        self._arrives[rank, peer] = arrives
        if arrives < math.inf:
            self.at(arrives - self.now, self._deliver, connections, peer, tag, content)
        return works

    def _piece(self, connections: _Connections, peer: int, tag: int) -> None:
        there = self.members.get((connections.place, peer))
        task = None if there is None else there.receivers.get((connections.rank, tag))
        if task is not None:
            self.ranks[peer].piece(task)

    def _deliver(self, connections: _Connections, peer: int, tag: int, content: bytes) -> None:
        there = self.members.get((connections.place, peer))
        if there is None or there.is_dropped or peer in self.killed or connections.rank in there.broken:
            return
        there.inbox[connections.rank, tag].append(content)
        task = there.receivers.pop((connections.rank, tag), None)
        if task is not None:
            self.ranks[peer].arrived(task)

    def greet(self, connections: _Connections, peer: int, say_gone: Callable[[], None]) -> Any:
        """Connect, as gloo does with the first message: one of the two connects, by their addresses, and is done at
        once; the other one waits until it is connected to, for five times as long."""
        rank, place = connections.rank, connections.place
        if connections.is_dropped:
            raise Broken("the connections were dropped")
        passes = self._passes(rank, peer, self.now)
        there = self.members.get((place, peer))
        is_here = there is not None and not there.is_dropped and peer not in self.killed
        fail = partial(self._unreachable, connections, say_gone)
        if (rank < peer) == ((rank + peer) % 2 == 0):
            if passes > self.now + _CONNECT_SECONDS:
                return Later(_CONNECT_SECONDS, partial(fail, "Connect timeout"))
            if there is None or not is_here:
                return Later(passes - self.now + self._delay(), partial(fail, "Connection refused"))
            there.partners.add(rank)  # the socket is closed when the other one closes where it listens
            connections.greeted.add(peer)
            connections.kept[None].append(connections.start("send", peer, GREETING_TAG, connections.greeting))
            if rank in there.awaits_greeting:
                self.at(passes - self.now + self._delay(), self._connected, there, rank)
            return None
        if there is not None and rank in there.greeted:
            connections.kept[None].append(connections.start("send", peer, GREETING_TAG, connections.greeting))
            return None
        connections.awaits_greeting[peer] = Later(5 * _CONNECT_SECONDS, partial(fail, "Connect timeout"))
        return connections.awaits_greeting[peer]

    def _connected(self, connections: _Connections, peer: int) -> None:
        """``peer`` has connected to a rank, which answers."""
        later, error = connections.awaits_greeting.pop(peer), None
        try:
            connections.kept[None].append(connections.start("send", peer, GREETING_TAG, connections.greeting))
        except Broken:
            error = later.fail()
        later.resume(Outcome(None, error), None)

    def _unreachable(self, connections: _Connections, say_gone: Callable[[], None], detail: str) -> Exception:
        if connections.is_dropped:
            return Broken("the connections were dropped")
        say_gone()
        connections.drop()
        return Unreachable(detail)

    def close(self, connections: _Connections) -> None:
        """The connections of a rank in one place are closed. What it has sent before still arrives."""
        rank = connections.rank
        for peer in sorted(connections.partners):
            there = self.members.get((connections.place, peer))
            if there is not None and not there.is_dropped:
                last = self._arrives.get((rank, peer), 0.0)
                arrives = max(self._passes(rank, peer, self.now) + self._delay(), last)
                if arrives < math.inf:
                    self.at(arrives - self.now, self._break, there, rank, "connection closed by peer")
            self._break(connections, peer, "the connections were dropped")

    def _break(self, connections: _Connections, peer: int, detail: str) -> None:
        if peer in connections.broken:
            return
        connections.broken[peer] = detail
        for (sender, tag), task in list(connections.receivers.items()):
            if sender == peer:
                del connections.receivers[sender, tag]
                self.at(0.0, self.ranks[connections.rank].arrived, task)

    # The store.

    def ask(self, loop: _Rank, task: Task, wait: Ask) -> None:
        """Ask the store for ``task``."""
        host = -1 if self.store_host is None else self.store_host
        reaches = self._passes(loop.rank, host, self.now) + self._delay() / 2
        deadline = self.now + wait.seconds
        if reaches < deadline:
            self.at(reaches - self.now, self._answer, loop, task, task.number, wait, deadline)
        else:
            self._be_silent(loop, task, wait, deadline)

    def _be_silent(self, loop: _Rank, task: Task, wait: Ask, deadline: float) -> None:
        silent = StoreSilent(f"no answer within {wait.seconds:g} seconds")
        self.at(max(0.0, deadline - self.now), loop.step, task, task.number, None, silent)

    def _answer(self, loop: _Rank, task: Task, number: int, wait: Ask, deadline: float) -> None:
        host = -1 if self.store_host is None else self.store_host
        if host in self.killed:
            self.at(self._delay(), loop.step, task, number, None, StoreLost("connection reset by peer"))
            return
        if loop.rank in self.killed or task.number != number:
            return
        thaws = self.thaws.get(host, 0.0)
        if self.now < thaws:  # its process hosts the store in a thread, which stands still too
            if thaws >= deadline:
                self._be_silent(loop, task, wait, deadline)
            self.at(thaws - self.now, self._answer, loop, task, number, wait, deadline)
            return
        answer, error = None, None
        try:
            answer = wait.question(loop.link.notes.under(wait.place))  # type: ignore[attr-defined]
        except RuntimeError as raised:
            error = StoreLost(str(raised))
        back = self._passes(host, loop.rank, self.now) + self._delay() / 2
        if back >= deadline:
            self._be_silent(loop, task, wait, deadline)
        elif back < math.inf:
            self.at(back - self.now, loop.step, task, number, answer, error)
