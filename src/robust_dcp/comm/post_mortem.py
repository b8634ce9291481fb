"""How an exchange ended that did not end in step: who was missing, lost or elsewhere, decided once for all ranks.

It runs only after a failure. The first rank that gives up takes the roll, writes the verdict to the store, and every
other rank, late ones included, raises that verdict. Nobody closes a connection before it has said that it gives up;
so a connection that closes without that belongs to a process that has ended. Called by the exchange.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from robust_dcp.comm import wire
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.failures import ErrorMessage
from robust_dcp.comm.frames import Fault
from robust_dcp.comm.roll_call import Presence, RollCall, State, StoreLost
from robust_dcp.comm.transport import TransportFailure
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError, error_from_fields, failure_of

__all__ = ["BadRound", "Breakdown", "Trouble", "settle"]

GRACE_SECONDS = 2.0
"""How long the reporter waits for ranks that had joined to say that they give up too; who does not has ended."""

_POLL_SECONDS = 0.01
_MAX_RANKS_DESCRIBED = 16
_ELSEWHERE = frozenset({Fault.KIND, Fault.OPERATION, Fault.SEQUENCE})

Roll = Mapping[int, "Presence | None"]


@dataclass(frozen=True)
class Trouble:
    """The frame of ``sender``, as ``receiver`` got it, is not acceptable."""

    receiver: int
    sender: int
    fault: Fault
    detail: str


class BadRound(Exception):
    """A round of frames was bad twice. Internal to :mod:`robust_dcp.comm`."""

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        super().__init__(f"{len(troubles)} bad frames")
        self.troubles = tuple(troubles)


@dataclass(frozen=True)
class Breakdown:
    """What this rank knows of an exchange that it could not finish.

    Attributes:
        operation: what this rank was doing, in full.
        phase: the caller's name for it.
        rank: of this process in the group.
        size: of the group.
        generation, sequence: which exchange it was.
        timeout_seconds: how long this rank was ready to wait.
        timed_out: whether it did.
        cause: why it stopped.
    """

    operation: str
    phase: str
    rank: int
    size: int
    generation: int
    sequence: int
    timeout_seconds: float
    timed_out: bool
    cause: BaseException

    @property
    def lost_rank(self) -> int | None:
        """Whose connection broke, as far as this rank can tell."""
        return self.cause.peer if isinstance(self.cause, TransportFailure) and not self.timed_out else None


def settle(roll_call: RollCall, breakdown: Breakdown, close: Callable[[], None]) -> RobustCheckpointError:
    """End the generation: say so, take the roll if nobody has, call ``close``, and return what all ranks are to raise.

    Takes at most a few times ``GRACE_SECONDS``, and milliseconds where all ranks that had joined still run.
    """
    try:
        is_reporter = roll_call.give_up(
            breakdown.generation, breakdown.sequence, breakdown.operation, breakdown.lost_rank
        )
        # Who is missing is judged before the others are let go: a rank that comes a moment later was late.
        roll = _read(roll_call, range(breakdown.size)) if is_reporter else None
        close()
        verdict = None if is_reporter else _await_verdict(roll_call, breakdown.generation)
        if verdict is None:
            survivors = _await_survivors(roll_call, breakdown, roll or _read(roll_call, range(breakdown.size)))
            error = _conclude(breakdown, survivors)
            verdict = roll_call.publish_verdict(breakdown.generation, wire.encode(ErrorMessage.of(error)))
        return _as_told_to(breakdown.rank, wire.decode(verdict, ErrorMessage).to_error())
    except StoreLost as lost:
        return _conclude_alone(breakdown, lost)
    finally:
        close()


def _read(roll_call: RollCall, ranks: Iterable[int]) -> dict[int, Presence | None]:
    return {rank: roll_call.seen(rank) for rank in ranks}


def _await_verdict(roll_call: RollCall, generation: int) -> bytes | None:
    deadline = Deadline(2 * GRACE_SECONDS)
    while True:
        verdict = roll_call.verdict(generation)
        if verdict is not None or deadline.has_passed:
            return verdict
        time.sleep(_POLL_SECONDS)


def _await_survivors(roll_call: RollCall, breakdown: Breakdown, roll: dict[int, Presence | None]) -> Roll:
    """``roll``, with the ranks that had joined read again until each has given up, or is known to be lost."""
    deadline = Deadline(GRACE_SECONDS)
    while True:
        lost = _lost_connections(breakdown, roll)
        pending = [rank for rank, seen in roll.items() if _had_joined(breakdown, seen) and rank not in lost]
        if not pending or deadline.has_passed:
            return roll
        time.sleep(_POLL_SECONDS)
        roll = {**roll, **_read(roll_call, pending)}


def _gave_up(breakdown: Breakdown, seen: Presence | None) -> bool:
    if seen is None or seen.generation < breakdown.generation:
        return False
    return seen.generation > breakdown.generation or seen.state == State.GAVE_UP


def _had_joined(breakdown: Breakdown, seen: Presence | None) -> bool:
    return (
        seen is not None
        and (seen.generation, seen.sequence) == (breakdown.generation, breakdown.sequence)
        and seen.state == State.JOINED
    )


def _lost_connections(breakdown: Breakdown, roll: Roll) -> set[int]:
    """The ranks whose connections broke though they had not given up."""
    accused = {seen.lost_rank for seen in roll.values() if seen is not None and _gave_up(breakdown, seen)}
    return {rank for rank in accused if rank in roll and not _gave_up(breakdown, roll[rank])}


def _conclude(breakdown: Breakdown, roll: Roll) -> RobustCheckpointError:
    if isinstance(breakdown.cause, BadRound):
        return _conclude_bad_round(breakdown, breakdown.cause.troubles, roll)
    if isinstance(breakdown.cause, TransportFailure):
        return _conclude_missing(breakdown, breakdown.cause, roll)
    return ExchangeError(
        f"{breakdown.operation} broke off on rank {breakdown.rank}: {type(breakdown.cause).__name__}",
        failures=[failure_of(breakdown.rank, breakdown.cause)],
        phase=breakdown.phase,
        ranks=[breakdown.rank],
    )


def _conclude_missing(breakdown: Breakdown, cause: TransportFailure, roll: Roll) -> ExchangeTimeout:
    ended = _lost_connections(breakdown, roll) | {rank for rank, seen in roll.items() if _had_joined(breakdown, seen)}
    away = {
        rank
        for rank, seen in roll.items()
        if not _gave_up(breakdown, seen) and not _had_joined(breakdown, seen) and not _finished(breakdown, seen)
    }
    missing = sorted(ended | away if breakdown.timed_out or not ended else ended)
    if breakdown.timed_out:
        what = f"did not finish within {breakdown.timeout_seconds:g} seconds"
    else:
        what = "broke off: connection lost"
    if missing:
        who = f"{len(missing)} of {breakdown.size} ranks missing: " + _described(
            missing, lambda rank: _whereabouts(rank, roll[rank], rank in ended)
        )
    else:
        peer = "another rank" if cause.peer is None else f"rank {cause.peer}"
        who = f"all ranks had joined; rank {breakdown.rank} was waiting for {peer} ({cause.detail})"
    return ExchangeTimeout(
        f"{breakdown.operation} {what}; {who}",
        phase=breakdown.phase,
        ranks=missing,
        missing_ranks=missing,
        timeout_seconds=breakdown.timeout_seconds,
    )


def _finished(breakdown: Breakdown, seen: Presence | None) -> bool:
    return (
        seen is not None
        and (seen.generation, seen.sequence) == (breakdown.generation, breakdown.sequence)
        and seen.state == State.FINISHED
    )


def _whereabouts(rank: int, seen: Presence | None, ended: bool) -> str:
    if seen is None:
        return f"rank {rank} never came" + (" and its connection is closed" if ended else "")
    ago = f"{max(0.0, time.time() - seen.unix_seconds):.1f} seconds ago"
    where = {
        State.PREPARING: f"began its own work for {seen.operation} {ago}",
        State.JOINED: f"joined {seen.operation} {ago}",
        State.FINISHED: f"finished {seen.operation} {ago} and has not come back",
        State.GAVE_UP: f"gave up {seen.operation} {ago} and has not come back",
    }[seen.state]
    if ended:
        where += "; its process has ended, or no longer answers"
    return f"rank {rank} (host {seen.host}, pid {seen.pid}) {where}"


def _described(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    parts = [describe(rank) for rank in ranks[:_MAX_RANKS_DESCRIBED]]
    rest = len(ranks) - len(parts)
    return "; ".join(parts) + (f"; and {rest} more: {list(ranks[_MAX_RANKS_DESCRIBED:])}" if rest else "")


def _conclude_bad_round(breakdown: Breakdown, troubles: Sequence[Trouble], roll: Roll) -> ExchangeError:
    doing = {
        rank: f"{seen.operation} (exchange {seen.sequence})"
        for rank, seen in roll.items()
        if seen is not None and seen.generation == breakdown.generation
    }
    if any(trouble.fault in _ELSEWHERE for trouble in troubles) and len(set(doing.values())) > 1:
        # Most ranks are taken to be right; if no operation has more, the one that the reporter is in.
        counts = Counter(doing.values())
        expected = max(counts, key=lambda text: (counts[text], text == doing.get(breakdown.rank)))
        where = "; ".join(
            f"{'rank' if count == 1 else 'ranks'} {[rank for rank, text in doing.items() if text == each]} in {each}"
            for each, count in counts.most_common()
        )
        return ExchangeError(
            f"the ranks are in different operations: {where}",
            phase=breakdown.phase,
            ranks=[rank for rank in range(breakdown.size) if doing.get(rank) != expected],
        )
    parts = [
        f"that of rank {trouble.sender} as rank {trouble.receiver} received it: {trouble.detail}"
        for trouble in troubles[:_MAX_RANKS_DESCRIBED]
    ]
    return ExchangeError(
        f"{breakdown.operation}: headers were bad twice: {'; '.join(parts)}",
        phase=breakdown.phase,
        ranks=sorted({trouble.sender for trouble in troubles}),
    )


def _conclude_alone(breakdown: Breakdown, lost: StoreLost) -> RobustCheckpointError:
    """The verdict of this rank only, as there is no store to agree over."""
    if not isinstance(breakdown.cause, TransportFailure):
        return _conclude(breakdown, {})
    missing = [] if breakdown.cause.peer is None else [breakdown.cause.peer]
    return ExchangeTimeout(
        f"{breakdown.operation} broke off: connection lost from rank {breakdown.rank} to "
        f"{missing or 'others'} ({breakdown.cause.detail}); the store of the process group does not answer "
        f"either, so its host (rank 0, or the launcher) has probably ended first ({lost})",
        phase=breakdown.phase,
        ranks=missing,
        missing_ranks=missing,
        timeout_seconds=breakdown.timeout_seconds,
    )


def _as_told_to(rank: int, error: RobustCheckpointError) -> RobustCheckpointError:
    """The verdict, with a word for a rank that comes after the others have given it up."""
    if not isinstance(error, ExchangeTimeout) or rank not in (error.missing_ranks or ()):
        return error
    fields = error.to_fields()
    fields["message"] = f"this rank ({rank}) came after the others had given up on it: {error.message}"
    return error_from_fields(type(error).__name__, fields, error.rank_failures)
