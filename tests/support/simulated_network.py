"""A network between ranks that are threads of this process: it loses, damages, delays and reorders what it is told to.

It stands where gloo and the store stand: :meth:`SimulatedNetwork.meeting` gives a rank its ``MeetingPlace``. Everything
above it is the real thing. It never decides by itself what goes wrong: the faults are a list that its maker gives it.

    network = SimulatedNetwork(3, [Fault(FaultKind.DROP, sender=1, receiver=0, message=2)])
    link = Link(rank=1, ranks=(0, 1, 2), meeting=network.meeting(1))
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from robust_dcp.comm.meeting import StoreLost
from robust_dcp.comm.pipe import Payload, PipeBroken

__all__ = ["Fault", "FaultKind", "SimulatedNetwork"]

_FRAME_TAG = 0


class FaultKind(Enum):
    """What can happen to a message, or because of it."""

    DELAY = "delay"  # it takes `seconds`
    DUPLICATE = "duplicate"
    DROP = "drop"  # its frame is lost; later ones arrive
    REORDER = "reorder"  # it arrives after the next one
    DAMAGE_FRAME = "damage frame"
    DAMAGE_PAYLOAD = "damage payload"
    CUT = "cut"  # the connection breaks, for both sides
    KILL_SENDER = "kill sender"
    KILL_RECEIVER = "kill receiver"
    FREEZE_SENDER = "freeze sender"  # for `seconds`
    FREEZE_RECEIVER = "freeze receiver"


@dataclass(frozen=True)
class Fault:
    """What happens to the ``message``-th frame (from 0) that ``sender`` sends to ``receiver``."""

    kind: FaultKind
    sender: int
    receiver: int
    message: int
    seconds: float = 0.0


@dataclass(frozen=True)
class _Item:
    data: bytes
    due_seconds: float


class _Sending:
    """What the sender has to keep until the payload has been received: gloo takes back what nobody keeps."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class _OneWay:
    """What is on its way from one rank to another over one connection."""

    def __init__(self, network: SimulatedNetwork, sender: int, receiver: int) -> None:
        self.network = network
        self.sender = sender
        self.receiver = receiver
        self.frames: deque[_Item] = deque()
        self.payloads: weakref.WeakValueDictionary[int, _Sending] = weakref.WeakValueDictionary()
        self.held_back: _Item | None = None
        self.fault: Fault | None = None  # of the message whose frame was sent last
        self.is_broken = False
        self.changed = threading.Condition(network.lock)


class SimulatedPipe:
    """One end of a connection: a ``Pipe``."""

    def __init__(self, network: SimulatedNetwork, outgoing: _OneWay, incoming: _OneWay) -> None:
        self._network = network
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, data: Payload, tag: int) -> object:
        """Start to send; see ``Pipe``."""
        network, way = self._network, self._outgoing
        with network.lock:
            if way.is_broken:
                raise PipeBroken("connection reset by peer")
            content = bytes(data)
            if tag != _FRAME_TAG:
                if way.fault is not None and way.fault.kind is FaultKind.DAMAGE_PAYLOAD:
                    content = _damaged(content)
                way.payloads[tag] = sending = _Sending(content)
                way.changed.notify_all()
                return sending
            way.fault = fault = network.next_fault(way.sender, way.receiver)
            self._send_frame(way, content, fault)
        return None

    def _send_frame(self, way: _OneWay, content: bytes, fault: Fault | None) -> None:
        kind = None if fault is None else fault.kind
        due = time.monotonic() + (fault.seconds if fault is not None and kind is FaultKind.DELAY else 0.0)
        item = _Item(_damaged(content) if kind is FaultKind.DAMAGE_FRAME else content, due)
        held_back, way.held_back = way.held_back, None
        if kind is FaultKind.REORDER and held_back is None:
            way.held_back = item
        elif kind is not FaultKind.DROP:
            way.frames.append(item)
        if kind is FaultKind.DUPLICATE:
            way.frames.append(item)
        if held_back is not None:
            way.frames.append(held_back)
        if fault is not None and kind is FaultKind.CUT:
            self._network.cut(way.sender, way.receiver)
        elif fault is not None and kind in (FaultKind.KILL_SENDER, FaultKind.KILL_RECEIVER):
            self._network.kill(way.sender if kind is FaultKind.KILL_SENDER else way.receiver)
        elif fault is not None and kind in (FaultKind.FREEZE_SENDER, FaultKind.FREEZE_RECEIVER):
            rank = way.sender if kind is FaultKind.FREEZE_SENDER else way.receiver
            self._network.freeze(rank, fault.seconds)
        way.changed.notify_all()

    def next_frame(self) -> bytes:
        """Wait for the next frame; see ``Pipe``."""
        way = self._incoming
        with self._network.lock:
            while True:
                pause = self._network.pause_of(way)
                if way.frames and not pause:
                    pause = way.frames[0].due_seconds - time.monotonic()
                    if pause <= 0:
                        return way.frames.popleft().data
                elif way.is_broken and not pause:
                    raise PipeBroken("connection reset by peer")
                way.changed.wait(pause or None)

    def receive(self, nbytes: int, tag: int) -> bytearray:
        """Wait for a payload; see ``Pipe``."""
        way = self._incoming
        with self._network.lock:
            while True:
                pause = self._network.pause_of(way)
                sending = way.payloads.get(tag)
                if sending is not None and not pause:
                    return bytearray(sending.data[:nbytes])
                if way.is_broken and not pause:
                    raise PipeBroken("connection reset by peer")
                way.changed.wait(pause or None)

    def close(self) -> None:
        """End all waits on both sides; see ``Pipe``."""
        with self._network.lock:
            for way in (self._outgoing, self._incoming):
                _break(way)


class _SimulatedMeeting:
    """Where one rank meets the others: a ``MeetingPlace``."""

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self.closed = False
        self._network = network
        self._rank = rank

    def connect(
        self, peer: int, generation: int, purpose: str = "exchanges", **called: Callable[..., None]
    ) -> SimulatedPipe:
        return self._network.connect(self, self._rank, peer, (generation, purpose))

    def await_announced(self, n_connections: int) -> None:
        """Here a rank that is gone is known to be."""

    def settle(self, operations: Sequence[str], end_message: bytes) -> bytes:
        return self._network.settle(self._rank, operations, end_message)

    def end_message_of(self, operation: str) -> bytes | None:
        return self._network.end_message_of(self._rank, operation)


class SimulatedNetwork:
    """See the module.

    Args:
        size: how many ranks.
        faults: what goes wrong.
        store_host: the rank that takes the store along when it is killed; ``None`` if the store survives all.

    Attributes:
        happened: the faults that have struck.
        killed: the ranks that are gone.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = (), store_host: int | None = None) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.happened: list[Fault] = []
        self.killed: set[int] = set()
        self._faults = {(fault.sender, fault.receiver, fault.message): fault for fault in faults}
        self._store_host = store_host
        self._is_closed = False
        self._n_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._ways: list[_OneWay] = []
        self._came: dict[tuple[object, ...], set[int]] = defaultdict(set)
        self._pipes: dict[tuple[object, ...], dict[int, SimulatedPipe]] = {}
        self._met = threading.Condition(self.lock)
        self._thaws: dict[int, float] = {}
        self._end_messages: dict[str, bytes] = {}

    def meeting(self, rank: int) -> _SimulatedMeeting:
        """What ``rank`` reaches the others by."""
        return _SimulatedMeeting(self, rank)

    def connect(self, meeting: _SimulatedMeeting, rank: int, peer: int, which: tuple[object, ...]) -> SimulatedPipe:
        """Wait until both ranks have come. A rank that has been killed before does not."""
        pair = (min(rank, peer), max(rank, peer), *which)
        with self.lock:
            came = self._came[pair]
            came.add(rank)
            if len(came - self.killed) == 2:
                there, back = _OneWay(self, rank, peer), _OneWay(self, peer, rank)
                self._ways += [there, back]
                self._pipes[pair] = {rank: SimulatedPipe(self, there, back), peer: SimulatedPipe(self, back, there)}
                self._met.notify_all()
            self._met.wait_for(lambda: pair in self._pipes or meeting.closed or rank in self.killed or self._is_closed)
            if pair not in self._pipes:
                raise PipeBroken("connecting failed: closed while connecting")
            return self._pipes[pair][rank]

    def settle(self, rank: int, operations: Sequence[str], end_message: bytes) -> bytes:
        """Keep the first end message of each of ``operations``."""
        with self.lock:
            self._await_store(rank)
            counts = self._end_messages.setdefault(operations[0], end_message)
            if counts == end_message:
                for operation in operations[1:]:
                    self._end_messages.setdefault(operation, end_message)
            return counts

    def end_message_of(self, rank: int, operation: str) -> bytes | None:
        """What was kept of ``operation``."""
        with self.lock:
            self._await_store(rank)
            return self._end_messages.get(operation)

    def _await_store(self, rank: int) -> None:
        while (pause := self._thaws.get(rank, 0.0) - time.monotonic()) > 0 and rank not in self.killed:
            self._met.wait(pause)
        if rank in self.killed or self._store_host in self.killed:
            raise StoreLost("connection reset by peer")

    def next_fault(self, sender: int, receiver: int) -> Fault | None:
        """What is to happen to the frame that is being sent. Called with the lock."""
        number = self._n_sent[sender, receiver]
        self._n_sent[sender, receiver] += 1
        fault = self._faults.get((sender, receiver, number))
        if fault is not None:
            self.happened.append(fault)
        return fault

    def cut(self, rank: int, peer: int) -> None:
        """Break what there is between two ranks. They may connect again."""
        with self.lock:
            for way in self._ways:
                if {way.sender, way.receiver} == {rank, peer}:
                    _break(way)

    def kill(self, rank: int) -> None:
        """``rank`` is gone, and says nothing any more; its thread finds all its connections broken."""
        with self.lock:
            self.killed.add(rank)
            for way in self._ways:
                if rank in (way.sender, way.receiver):
                    _break(way)
            self._met.notify_all()

    def freeze(self, rank: int, seconds: float) -> None:
        """Nothing comes to ``rank`` or from it until ``seconds`` have passed."""
        with self.lock:
            self._thaws[rank] = time.monotonic() + seconds

    def pause_of(self, way: _OneWay) -> float:
        """How long nothing moves on ``way``. Called with the lock."""
        if self._is_closed:
            return 0.0
        thaw = max(self._thaws.get(way.sender, 0.0), self._thaws.get(way.receiver, 0.0))
        return max(0.0, thaw - time.monotonic())

    def heal(self) -> None:
        """No fault strikes any more. What has struck already stays as it is."""
        with self.lock:
            self._faults = {}

    def close(self) -> None:
        """End all waits, for good."""
        with self.lock:
            self._is_closed = True
            for way in self._ways:
                _break(way)
            self._met.notify_all()


def _break(way: _OneWay) -> None:
    way.is_broken = True
    way.changed.notify_all()


def _damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]
