"""After a failure, a rank asks all others where they are. The question travels along the connections.

Each rank passes the question on to all ranks that it is connected to, except the one that asked. It merges their
answers with its own. If the same question reaches a rank a second time, it answers for itself only. This module owns
the question, its way, and the merging of answers. It draws no conclusions.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from robust_dcp.comm import wire
from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.comm.pipe import Payload
from robust_dcp.errors import ExchangeError

__all__ = ["Surveyor", "Whereabouts"]

_QUESTION = struct.Struct("<QH")  # a random number that identifies the question, and the time left in milliseconds
_SHARE_FOR_OTHERS = 0.8
_MAX_RANKS = 4096
_MAX_QUESTIONS = 1000
"""How many questions a rank remembers. A question that is passed on twice would go round for ever and flood the ranks.
"""


class Whereabouts(msgspec.Struct, array_like=True, frozen=True):
    """What a survey found out.

    Attributes:
        doing: for each description of what a rank is doing (text for people), the ranks that gave it.
        inside: for each operation key, the ranks that are in that operation.
        missing: ranks that another rank lost or does not hear, each with what that rank knows of it.
    """

    doing: dict[str, list[int]]
    inside: dict[tuple[int, int], list[int]]
    missing: dict[int, str]

    def merged(self, others: list[Whereabouts]) -> Whereabouts:
        doing = _united([self.doing, *(other.doing for other in others)])
        inside = _united([self.inside, *(other.inside for other in others)])
        answered = {rank for ranks in doing.values() for rank in ranks}
        missing: dict[int, str] = {}
        for each in (self, *others):
            missing = {**each.missing, **missing}
        missing = {rank: detail for rank, detail in sorted(missing.items()) if rank not in answered}
        return Whereabouts(doing, inside, missing)


K = TypeVar("K")


def _united(parts: Sequence[Mapping[K, list[int]]]) -> dict[K, list[int]]:
    united: dict[K, list[int]] = {}
    for part in parts:
        for key, ranks in part.items():
            united[key] = sorted({*united.get(key, []), *ranks})[:_MAX_RANKS]
    return united


class AskedOperation(Protocol):
    """What a rank tells about an operation that it is in."""

    @property
    def key(self) -> tuple[int, int]: ...

    def whereabouts(self) -> str: ...

    def missing(self) -> dict[int, str]: ...


class Asking(Protocol):
    """Who asks and answers: a :class:`~robust_dcp.comm.link.Link`. Tests use their own."""

    @property
    def rank(self) -> int: ...

    def peers(self) -> list[int]: ...

    def operations(self) -> Sequence[AskedOperation]: ...

    def send(self, peer: int, frame: Frame, payload: Payload = ...) -> None: ...


class Surveyor:
    """Asks and answers for one link."""

    def __init__(self, link: Asking) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._answers: dict[int, dict[int, Whereabouts | None]] = {}
        self._asked: deque[int] = deque(maxlen=_MAX_QUESTIONS)

    def ask(self, seconds: float, *, number: int | None = None, but: int | None = None) -> Whereabouts:
        """Ask all ranks that can be reached, and wait for at most ``seconds``.

        Args:
            number: identifies the question; ``None`` makes a new one.
            but: the rank that asked this one; it is not asked again.
        """
        if number is None:
            number = secrets.randbits(64)
        peers = [peer for peer in self._link.peers() if peer != but]
        with self._changed:
            if number in self._asked:
                return self._own()
            self._asked.append(number)
            self._answers[number] = dict.fromkeys(peers)
        body = _QUESTION.pack(number, int(seconds * _SHARE_FOR_OTHERS * 1000))
        for peer in peers:
            self._link.send(peer, Frame(Kind.ASK, body=body))
        with self._changed:
            self._changed.wait_for(lambda: all(self._answers[number].values()), seconds)
            answers = [answer for answer in self._answers.pop(number).values() if answer is not None]
        return self._own().merged(answers)

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None:
        number, milliseconds = _QUESTION.unpack_from(frame.body)
        if frame.kind == Kind.ASK:
            threading.Thread(
                target=self._answer, args=(peer, number, milliseconds / 1000), name="robust_dcp: answer", daemon=True
            ).start()
            return
        try:
            answer = wire.decode(payload, Whereabouts)
        except ExchangeError:
            return
        with self._changed:
            if number in self._answers:
                self._answers[number][peer] = answer
                self._changed.notify_all()

    def _answer(self, peer: int, number: int, seconds: float) -> None:
        found = self.ask(seconds, number=number, but=peer)
        self._link.send(peer, Frame(Kind.ANSWER, body=_QUESTION.pack(number, 0)), wire.encode(found))

    def _own(self) -> Whereabouts:
        operations = self._link.operations()
        missing: dict[int, str] = {}
        for operation in operations:
            missing.update(operation.missing())
        text = "; ".join(sorted(operation.whereabouts() for operation in operations)) or "no operation"
        own = [self._link.rank]
        return Whereabouts({text: own}, {operation.key: own for operation in operations}, missing)
