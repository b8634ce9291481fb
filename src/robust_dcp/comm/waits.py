"""What the state machines of this package wait for.

An exchange, an operation and a link read no clock, start no thread, and touch neither gloo nor the store. They are told
what has come and what time it is (``link.now``). Where they have to wait they are generators, and yield one of these
classes; what they waited for is the value of that ``yield``. For example, a rank that waits at most two seconds:

    until = self.link.now + 2.0
    while not self.has_come and self.link.now < until:
        yield Until(until)

:mod:`robust_dcp.comm.loop` runs them on the real clock, gloo and store. The tests run them in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Until(NamedTuple):
    """Wait until the clock shows ``seconds``, or until something has changed. Look again after that."""

    seconds: float


class Ask(NamedTuple):
    """Ask the store, which has ``seconds`` to answer. The answer is what ``question`` returns.

    It raises ``StoreLost``, or ``StoreSilent`` if the store has not answered in time.
    """

    place: str
    question: Callable[[Any], Any]
    seconds: float


class Finish(NamedTuple):
    """Wait until all of ``moving`` has been sent or received over ``connections``.

    It raises ``Broken`` if that has become impossible, or a piece takes longer than ``seconds``. ``note_piece`` is
    called after each piece.
    """

    connections: Any
    moving: Any
    seconds: float | None = None
    note_piece: Callable[[], object] | None = None


class Call(NamedTuple):
    """Call ``function()``, which may take long. The answer is an :class:`Outcome`, also if it raises."""

    function: Callable[[], Any]


class Outcome(NamedTuple):
    """What a call has returned, or raised."""

    value: Any
    error: BaseException | None

    def get(self) -> Any:
        """What it has returned. It raises what the call has raised."""
        if self.error is not None:
            raise self.error
        return self.value


Wait = Until | Ask | Finish | Call
Steps = Generator[Wait, Any, T]
