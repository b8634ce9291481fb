"""Who is where, asked along the tree after something has gone wrong: each rank answers for itself and those behind it.

Owns the question, its way from rank to rank and the merging of answers. Draws no conclusions. A rank asks all ranks
that it is connected to but the one that asked it; a question that comes another way round, however late, is answered
for the rank alone.
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

_QUESTION = struct.Struct("<QH")  # a number that nobody else asks under, and how many milliseconds there are
_SHARE_FOR_OTHERS = 0.8
_MAX_RANKS = 4096
_MAX_QUESTIONS = 1000
"""So many are known again: a question that is passed on twice goes round for ever, and floods the ranks."""


class Whereabouts(msgspec.Struct, array_like=True, frozen=True):
    """What was found out.

    Attributes:
        doing: what ranks are in, for people: each text with the ranks that say so.
        inside: the same as the keys of operations, each with the ranks that are in it.
        missing: ranks that a rank has lost or not heard of, each with what that rank knows of it.
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
    """What a rank says of an operation that it is in."""

    @property
    def key(self) -> tuple[int, int]: ...

    def whereabouts(self) -> str: ...

    def missing(self) -> dict[int, str]: ...


class Asking(Protocol):
    """What asks and answers: a :class:`~robust_dcp.comm.link.Link`, but in tests."""

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
            number: of the question; a new one if ``None``.
            but: the rank that asked this one.
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
