"""How an operation ends out of step on one rank: the end message, which is the same on all ranks, and who has heard it.

Take three ranks in a save, of which rank 2 dies. Ranks 0 and 1 notice. ``conclusion`` makes the words, the store says
whose words count, and both ranks raise the same exception. This module owns the order of these steps on one rank.
"""

from __future__ import annotations

import contextlib
import threading

from robust_dcp.comm import patience, wire
from robust_dcp.comm.conclusion import as_told_to, conclude, settle
from robust_dcp.comm.failures import EndMessage, Problem
from robust_dcp.comm.link import Link, RunningOperation
from robust_dcp.comm.meeting import StoreLost
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Ending"]


class Ending:
    """The end of one operation, once it has one.

    It does not hold the operation, because the link drops an operation that nobody holds any more.

    Args:
        link: the link of the group.
        changed: is notified when an end message has come. It also guards the attributes.

    Attributes:
        message: the encoded :class:`EndMessage`; ``None`` as long as the operation goes on.
        is_untold: whether the caller of this rank has not seen the exception yet.
    """

    def __init__(self, link: Link, changed: threading.Condition) -> None:
        self._link = link
        self._changed = changed
        self.message: bytes | None = None
        self.is_untold = False

    def note(self, end_message: bytes) -> None:
        """The operation is over on all ranks."""
        self.message = end_message
        self.is_untold = True

    def known(self, operation: RunningOperation) -> bytes | None:
        """The end message, if one has come or the store has one. Others may have given up on this rank meanwhile."""
        if self.message is None:
            with contextlib.suppress(StoreLost):
                return self._link.end_message_of(operation.key)
        return self.message

    def conclude(self, problem: Problem, operation: RunningOperation, parent: int | None) -> RobustCheckpointError:
        """End the operation on all ranks, and return the exception that they raise.

        Args:
            parent: this rank's parent in the tree.
        """
        with self._changed:
            if self.message is None and problem.missing:
                # Several ranks may die at the same time: wait a little to report all of them. If this rank lost its
                # parent, the ranks above the parent see more than this one, so it gives them time to report first.
                seconds = patience.PARENT_LOST_SECONDS if parent in problem.missing else patience.TOGETHER_SECONDS
                self._changed.wait_for(lambda: self.message is not None, min(seconds, operation.timeout_seconds))
        end_message = self.known(operation)
        if end_message is None:
            ended = conclude(problem, operation, self._link)
            # Another rank's end message may have come while this rank asked where the others are.
            end_message = self.message or settle(ended, operation, self._link)
        self._link.end_operations(end_message)
        with self._changed:
            # Another thread of this process may be ending the operation right now. Wait until it has done so here.
            self._changed.wait_for(lambda: self.message is not None, patience.HEARD_SECONDS)
        if self.message is None:
            operation.end(end_message)
        return self.error()

    def error(self) -> RobustCheckpointError:
        """The exception that this rank raises. The other ranks have heard of the end when this returns."""
        self._link.await_heard()
        self.is_untold = False
        return as_told_to(self._link.rank, wire.decode(self.message or b"", EndMessage).error.to_error())
