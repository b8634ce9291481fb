"""How the connections of a group end on all ranks, with one verdict.

Take three ranks in a save, of which rank 2 dies. Ranks 0 and 1 lose their connection to it. The first of them calls the
roll in the store and drops its connections, so that the others notice and answer too. Then it reads the answers, and
writes the verdict into the store: which operations end, and the exception that their ranks raise. The other ranks read
it. Operations that it does not name go on over new connections.

This module makes the answers and the verdict. The link owns the order of these steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from robust_dcp.comm import wire
from robust_dcp.comm.failures import EndMessage, ErrorMessage, Problem
from robust_dcp.comm.notes import STORE_IS_LOST
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError, error_from_fields, failure_of

__all__ = ["Answer", "as_told_to", "end_of_leaving", "end_without_store", "verdict"]

_MAX_RANKS_DESCRIBED = 16


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What one rank says when the roll is called.

    Attributes:
        rank: the rank.
        doing: what it is doing, for people.
        inside: the keys of the operations that it is in.
        missing: ranks that it lost or does not hear, each with what it knows of it.
        closed: ranks that closed their connections to it.
        lost: those of them that took part in its operations, each with what it knows of it.
    """

    rank: int
    doing: str
    inside: tuple[tuple[int, int], ...]
    missing: dict[int, str]
    closed: tuple[int, ...]
    lost: dict[int, str]


def verdict(
    problem: Problem,
    key: tuple[int, int],
    what: str,
    phase: str,
    size: int,
    timeout_seconds: float,
    own: Answer,
    answers: Sequence[Answer],
) -> EndMessage:
    """Decide which operations end, and make the exception for all ranks that are in them.

    Args:
        problem: what happened on this rank.
        key, what, phase, timeout_seconds: the operation that it happened in.
        size: how many ranks the group has.
        own: the answer of this rank.
        answers: those of all ranks that have answered.
    """
    answers = sorted({answer.rank: answer for answer in (own, *answers)}.values(), key=lambda answer: answer.rank)
    alive = {answer.rank for answer in answers}  # of a rank that answers, only the connection broke
    inside = {each for answer in answers for each in answer.inside}
    dead = {rank: text for answer in answers for rank, text in answer.lost.items() if rank not in alive}
    ending = {key}
    error: RobustCheckpointError
    if problem.cause is not None:
        failures = [failure_of(own.rank, problem.cause)]
        error = ExchangeError(f"{what} {problem.what}", failures=failures, phase=phase, ranks=[own.rank])
    elif problem.damaged_by is not None:
        error = ExchangeError(f"{what}: {problem.what}", phase=phase, ranks=[problem.damaged_by])
    elif dead:
        ending |= inside
        error = _missing_ranks_error(Problem.of_lost(dead), what, phase, size, timeout_seconds, answers)
    elif problem.is_loss:
        ending = set()
        error = ExchangeError("the ranks connect again")
    elif problem.is_elsewhere:
        error = _different_operations_error(phase, answers, own.rank)
        here = {answer.rank for answer in answers if key in answer.inside}
        # The operations that share no rank with this one: their ranks wait for those of this one, and vice versa.
        ending |= {each for each in inside if not any(each in a.inside for a in answers if a.rank in here)}
    else:
        error = _missing_ranks_error(problem, what, phase, size, timeout_seconds, answers)
    gone = {rank for answer in answers for rank in answer.closed} - alive
    return EndMessage(tuple(sorted(ending)), ErrorMessage.of(error), tuple(sorted(gone)))


def _different_operations_error(phase: str, answers: Sequence[Answer], rank: int) -> ExchangeError:
    # Assume that the operation with the most ranks is the right one. If there are several, take this rank's own.
    doing: dict[str, list[int]] = {}
    for answer in answers:
        doing.setdefault(answer.doing, []).append(answer.rank)
    counts = Counter({text: len(ranks) for text, ranks in doing.items()})
    expected = max(counts, key=lambda text: (counts[text], rank in doing[text]))
    where = "; ".join(f"{_ranks(doing[text])} in {text}" for text, _ in counts.most_common(_MAX_RANKS_DESCRIBED))
    return ExchangeError(
        f"the ranks are in different operations: {where}",
        phase=phase,
        ranks=sorted(each for text, ranks in doing.items() if text != expected for each in ranks),
    )


def _missing_ranks_error(
    problem: Problem, what: str, phase: str, size: int, timeout_seconds: float, answers: Sequence[Answer]
) -> ExchangeTimeout:
    doing = {answer.rank: answer.doing for answer in answers}
    missing = dict(problem.missing)
    for answer in answers if not problem.is_loss else ():
        missing = {**{rank: text for rank, text in answer.missing.items() if rank not in doing}, **missing}
    for rank, text in problem.missing.items():
        # A rank that answers is alive: only its work does not advance.
        if rank in doing and what not in doing[rank]:
            missing[rank] = f"{text}: it is in {doing[rank]}"
    described = [missing[rank] for rank in sorted(missing)[:_MAX_RANKS_DESCRIBED]]
    if len(missing) > len(described):
        described.append(f"and {len(missing) - len(described)} more: {sorted(missing)[_MAX_RANKS_DESCRIBED:]}")
    return ExchangeTimeout(
        f"{what} {problem.what}; {len(missing)} of {size} ranks missing: {'; '.join(described)}",
        phase=phase,
        ranks=sorted(missing),
        missing_ranks=sorted(missing),
        timeout_seconds=timeout_seconds,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"


def as_told_to(rank: int, error: RobustCheckpointError) -> RobustCheckpointError:
    """The exception as ``rank`` raises it. If the others had given up on that rank, the message says so first."""
    if not isinstance(error, ExchangeTimeout) or rank not in (error.missing_ranks or ()):
        return error
    fields = error.to_fields()
    fields["message"] = f"this rank ({rank}) came after the others had given up on it: {error.message}"
    return error_from_fields(type(error).__name__, fields, error.rank_failures)


def end_without_store(ended: EndMessage, what: str, size: int, detail: str, host: int | None, rank: int) -> EndMessage:
    """The verdict of this rank alone, because the ranks could not agree on one in the store.

    Then it names the rank that hosts the store. The others may be missing only because that one is.
    """
    error = ended.error.to_error()
    fields = error.to_fields()
    if host is not None and host != rank and isinstance(error, ExchangeTimeout):
        fields["message"] = (
            f"{what} did not finish; 1 of {size} ranks missing: rank {host}, whose process hosts the "
            f"store unless a launcher's does, has ended or is frozen: {STORE_IS_LOST} ({detail}), and ranks meet there"
        )
        fields["missing_ranks"] = fields["ranks"] = [host]
    else:
        fields["message"] = (
            f"{error.message}; {STORE_IS_LOST} either ({detail}): the process that hosts it, rank 0 "
            "unless a launcher does, has ended or is frozen"
        )
    told = error_from_fields(type(error).__name__, fields, error.rank_failures)
    return EndMessage(ended.operations, ErrorMessage.of(told))


def end_of_leaving(keys: Sequence[tuple[int, int]]) -> bytes:
    """The end of operations on a rank whose group was destroyed, or whose process ends."""
    error = ExchangeError("this rank leaves: its process group was destroyed, or its process ends")
    return wire.encode(EndMessage(tuple(sorted(keys)), ErrorMessage.of(error)))
