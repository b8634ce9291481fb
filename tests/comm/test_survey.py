"""Who asks whom, after something has gone wrong."""

from __future__ import annotations

from typing import Any

from robust_dcp.comm import wire
from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.comm.survey import Surveyor, Whereabouts
from tests.support.waiting import wait_until


class Neighbourhood:
    """The link of rank 1, which is connected to ranks 0 and 2, and what it sends."""

    rank = 1

    def __init__(self) -> None:
        self.sent: list[tuple[int, Frame, Any]] = []

    def peers(self) -> list[int]:
        return [0, 2]

    def operations(self) -> list[Any]:
        return []

    def send(self, peer: int, frame: Frame, payload: Any = b"") -> None:
        self.sent.append((peer, frame, payload))

    def receivers(self, kind: Kind) -> list[int]:
        return [peer for peer, frame, _ in self.sent if frame.kind == kind]


def test_a_question_is_passed_on_once_however_late_it_comes_again() -> None:
    link = Neighbourhood()
    surveyor = Surveyor(link)
    asking = Neighbourhood()
    Surveyor(asking).ask(0.01)
    _, question, _ = asking.sent[0]

    surveyor.deliver(0, question, b"")
    wait_until(lambda: link.receivers(Kind.ANSWER) == [0])
    surveyor.deliver(2, question, b"")
    wait_until(lambda: link.receivers(Kind.ANSWER) == [0, 2])

    assert link.receivers(Kind.ASK) == [2]
    assert wire.decode(link.sent[-1][2], Whereabouts).doing == {"no operation": [1]}
