"""How exchanges fail: what is told of it, what ranks write into the store, and the one verdict for all of them.

A failure in a rank's own work travels over the tree: :class:`FailuresBelow` on the way up, :class:`ErrorMessage` on the
way down. All else ends the connections of all ranks. Take three ranks in a save, of which rank 2 dies. Ranks 0 and 1
lose their connection to it. The first of them calls the roll in the store and drops its connections, so that the others
notice and answer too. Then it reads the answers, and writes the verdict into the store: which operations end, and the
exception that their ranks raise. The other ranks read it. Operations that it does not name go on over new connections.

Everything that is told has a bounded length, and none of it is a pickle. The link owns the order of these steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from robust_dcp.comm.connections import INTERFACE
from robust_dcp.errors import (
    ExchangeError,
    ExchangeTimeout,
    RankFailure,
    RobustCheckpointError,
    alike,
    error_from_fields,
    failure_of,
    ranks_in_words,
)

MAX_FAILURES_TOLD = 16
"""If more ranks fail, only this many descriptions are sent; of the other ranks only their numbers."""

_MAX_MESSAGE_CHARS = 16 << 10
_MAX_TRACEBACK_CHARS = 32 << 10
_MAX_FIELDS_NBYTES = 256 << 10
_MAX_RANKS_DESCRIBED = 16

STORE_IS_LOST = "the store of the process group does not answer"


class Stopped(Exception):
    """This rank stopped its work because another rank announced a failure. It is not at fault itself.

    Raise it in the work that you give to an exchange; ``Channel.stop_if_announced`` does. All ranks, this one included,
    then raise the failure of the rank that announced it.
    """


# What is told of a failure.


class ErrorMessage(msgspec.Struct, array_like=True, frozen=True):
    """An exception as a message. ``fields`` holds the fields of our own classes; it is ``None`` for other
    exceptions."""

    type_name: str
    fields: dict[str, Any] | None
    failures: tuple[RankFailure, ...]

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> ErrorMessage:
        """Describe ``error`` and the failures that it holds; if it was caught on ``rank``, that is one of them."""
        failures = [] if rank is None else [failure_of(rank, error)]
        fields: dict[str, Any] | None = None
        if isinstance(error, RobustCheckpointError):
            fields = _plain_fields(error)
            failures += error.rank_failures[:MAX_FAILURES_TOLD] if failures else error.rank_failures
        return cls(type(error).__name__, fields, tuple(map(_bounded, failures)))

    def to_error(self) -> RobustCheckpointError:
        return error_from_fields(self.type_name, self.fields or {}, self.failures)


class FailuresBelow(msgspec.Struct, array_like=True, frozen=True):
    """The failures of a rank and of those below it in the tree, on their way up.

    Attributes:
        failed: the ranks that failed in their own work, in ascending order.
        told: the descriptions of the first ``MAX_FAILURES_TOLD`` of these ranks.
        reason: the failure because of which others have stopped.
    """

    failed: tuple[int, ...] = ()
    told: dict[int, ErrorMessage] = {}
    reason: str = ""

    @classmethod
    def on(cls, rank: int, error: BaseException) -> FailuresBelow:
        """The failures of ``rank`` after ``error`` was raised there."""
        if isinstance(error, Stopped):
            return cls(reason=_shortened(str(error), 500))
        return cls(failed=(rank,), told={rank: ErrorMessage.of(error, rank)})

    def merged(self, other: FailuresBelow) -> FailuresBelow:
        """The failures of both."""
        told = {**self.told, **other.told}
        return FailuresBelow(
            failed=tuple(sorted({*self.failed, *other.failed})),
            told={rank: told[rank] for rank in sorted(told)[:MAX_FAILURES_TOLD]},
            reason=self.reason or other.reason,
        )

    def joint_error(self, phase: str) -> RobustCheckpointError:
        """The one exception that all ranks raise. It is that of the lowest rank, and lists the failures of all."""
        if not self.failed:
            return RobustCheckpointError(f"{phase!r} was stopped, as a failure was announced: {self.reason}")
        failures: list[RankFailure] = []
        for rank in self.failed:
            if rank in self.told:
                failures.extend(self.told[rank].failures)
            else:
                failures.append(RankFailure(rank, "unknown", "its description was not sent, or did not arrive whole"))
        lowest = self.told.get(self.failed[0])
        if lowest is not None and lowest.fields is not None:
            return error_from_fields(lowest.type_name, lowest.fields, failures)
        own = [failure for failure in failures if failure.rank in self.failed]
        what = ", ".join(sorted({failure.type_name for failure in own}))
        if len(alike(own)) == 1 and own[0].message:
            what += ": " + own[0].message
        return RobustCheckpointError(f"{phase!r} failed on {ranks_in_words(self.failed)}: {what}", failures=failures)


def _bounded(failure: RankFailure) -> RankFailure:
    message = _shortened(failure.message, _MAX_MESSAGE_CHARS)
    traceback_text = _shortened(failure.traceback_text, _MAX_TRACEBACK_CHARS)
    return RankFailure(failure.rank, failure.type_name, message, traceback_text)


def _plain_fields(error: RobustCheckpointError) -> dict[str, Any]:
    """The fields of ``error`` as msgpack supports them. If they are too long, lists and dicts are left out."""
    fields = error.to_fields()
    fields["message"] = _shortened(str(fields["message"]), _MAX_MESSAGE_CHARS)
    plain: dict[str, Any] = as_text(msgspec.to_builtins(fields, str_keys=True, enc_hook=str))
    if len(msgspec.msgpack.encode(plain)) > _MAX_FIELDS_NBYTES:
        plain = {name: None if isinstance(value, list | tuple | dict) else value for name, value in plain.items()}
    return plain


def as_text(value: Any) -> Any:
    """A plain value, in which lone surrogates are escaped: a path that is no UTF-8 has some, and UTF-8 has none."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {as_text(key): as_text(each) for key, each in value.items()}
    return [as_text(each) for each in value] if isinstance(value, list | tuple) else value


def _shortened(text: str, limit: int) -> str:
    """``text``, or its beginning and end if it is longer than ``limit``. Lone surrogates are escaped."""
    text = as_text(text)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[{len(text) - limit} characters left out]\n{text[-(limit // 2) :]}"


# How operations end on all ranks.


class OperationKey(NamedTuple):
    """Identifies an operation: a hash of its name, and how many operations of that name there were before."""

    operation: int
    occurrence: int

    def __str__(self) -> str:
        return f"{self.operation:016x}/{self.occurrence}"


@dataclass(eq=False)
class Problem(Exception):
    """Why this rank cannot go on. It is internal to :mod:`robust_dcp.comm`.

    Attributes:
        what: what happened, worded to follow the name of the exchange.
        cause: the exception that this rank raised itself, if that is the problem.
        missing: ranks that are gone or silent, each with what is known of it.
        damaged_by: the rank that sent messages which arrived damaged.
        is_elsewhere: some ranks are in another operation or phase.
        is_loss: the connection to the missing ranks broke. They may be alive. If none is missing, this rank breaks the
            connections to end a wait.
        may_return: the missing ranks have said nothing in this operation, or it was this rank that closed.
        is_told: another rank misses them, and tells of it.
    """

    what: str
    cause: BaseException | None = None
    missing: dict[int, str] = field(default_factory=dict)
    damaged_by: int | None = None
    is_elsewhere: bool = False
    is_loss: bool = False
    may_return: bool = False
    is_told: bool = False

    @classmethod
    def of_leaving(cls, rank: int, error: BaseException) -> Problem:
        """``rank``, which is this one, raised ``error`` and does not go on."""
        return cls(f"was left by rank {rank}: {type(error).__name__}", error)

    @classmethod
    def of_lost(cls, lost: dict[int, str], *, may_return: bool = False, is_told: bool = False) -> Problem:
        """The connections to the ranks in ``lost`` broke. The texts say what is known."""
        return cls("broke off: connection lost", missing=lost, is_loss=True, may_return=may_return, is_told=is_told)

    @classmethod
    def of_silent(cls, rank: int, seconds: float, text: str) -> Problem:
        """``rank`` showed no progress for ``seconds``, the longest allowed time; ``text`` says what is known."""
        return cls(f"did not finish: no progress for {seconds:g} seconds", missing={rank: text})

    @classmethod
    def of_late(cls, missing: dict[int, str], seconds: float) -> Problem:
        """The operation was to take ``seconds`` at most, and the ranks in ``missing`` are not done."""
        return cls(f"did not finish within its deadline of {seconds:g} seconds", missing=missing)


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What one rank says when the roll is called.

    Attributes:
        rank: the rank.
        doing: what it is doing, for people.
        inside: the keys of the operations that it is in.
        missing: ranks that it lost or does not hear, each with what it knows of it.
        closed: ranks that closed their connections to it, each with what it knows of it if it took part in its
            operations.
        apart: ranks that it could not connect to in time, each with what went wrong.
    """

    rank: int
    doing: str
    inside: tuple[OperationKey, ...]
    missing: dict[int, str]
    closed: dict[int, str] = {}
    apart: dict[int, str] = {}


class Waiting(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank waits, as it tells the others in the store.

    Attributes:
        operation, number, what: of the exchange in which it waits.
        completed: the operations that it was in lately, and how many exchanges of each have ended well.
        awaited: the ranks for which it waits, as far as it knows.
    """

    operation: OperationKey
    number: int
    what: str
    completed: tuple[tuple[OperationKey, int], ...]
    awaited: tuple[int, ...] = ()

    def is_elsewhere(self, other: Waiting) -> bool:
        """Whether this rank and the ``other`` one wait for each other in different operations, or for different
        purposes in one exchange.

        In another exchange of the same operation one of them is only late. So is a rank that has not got the result of
        an exchange which the other one has completed."""
        if self.operation == other.operation:
            return self.number == other.number and self.what != other.what
        return not (self._has_completed(other) or other._has_completed(self))

    def _has_completed(self, other: Waiting) -> bool:
        return any(key == other.operation and other.number < n_exchanges for key, n_exchanges in self.completed)


class EndMessage(msgspec.Struct, array_like=True, frozen=True):
    """The end message: how operations ended out of step, the same for all ranks.

    Attributes:
        operations: the operations that end.
        error: the exception that all ranks in these operations raise.
        gone: ranks that closed their connections and did not answer the roll call.
        are_crossed: ranks waited for each other in these operations.
    """

    operations: tuple[OperationKey, ...]
    error: ErrorMessage
    gone: tuple[int, ...] = ()
    are_crossed: bool = False


def verdict(
    problem: Problem, operation: Any, size: int, own: Answer, answers: Sequence[Answer], waiting: Mapping[int, Waiting]
) -> EndMessage:
    """Decide which operations end, and make the exception for all ranks that are in them.

    Args:
        problem: what happened on this rank.
        operation: the operation that it happened in.
        size: how many ranks the group has.
        own: the answer of this rank.
        answers: those of all ranks that have answered.
        waiting: where missing ranks wait, as far as they have told.
    """
    key, what, phase = operation.key, operation.what, operation.phase
    answers = sorted({answer.rank: answer for answer in (own, *answers)}.values(), key=lambda answer: answer.rank)
    alive = {answer.rank for answer in answers}  # of a rank that answers, only the connection broke
    inside = {each for answer in answers for each in answer.inside}
    closed = [each for answer in answers for each in answer.closed.items()]
    closed += problem.missing.items() if problem.is_told else ()  # who has told of it may have died before it answered
    closed = [each for each in closed if each[0] not in alive]
    if not problem.missing and problem.is_loss:
        closed = []  # this rank only breaks off what is on its way, and gave nobody the time to answer
    # If it is this rank that has stood still, the others have closed because they gave up on it.
    dead = {rank: text for rank, text in closed if text and own.rank not in problem.missing}
    tried = {(answer.rank, rank): detail for answer in answers for rank, detail in answer.apart.items()}
    # If only one of two ranks tells of it, the other one was late.
    apart = {
        rank: f"rank {own_rank} and rank {rank} cannot connect to each other ({detail}): does {INTERFACE} name the "
        "interface of the network that joins the hosts?"
        for (own_rank, rank), detail in tried.items()
        if own_rank < rank and (rank, own_rank) in tried
    }
    ending: set[OperationKey] = {key}
    are_crossed = False
    error: RobustCheckpointError
    if problem.cause is not None:
        failures = [failure_of(own.rank, problem.cause)]
        error = ExchangeError(f"{what} {problem.what}", failures=failures, phase=phase, ranks=[own.rank])
    elif problem.damaged_by is not None:
        error = ExchangeError(f"{what}: {problem.what}", phase=phase, ranks=[problem.damaged_by])
    elif dead or apart:
        ending |= inside
        error = missing_ranks_error(Problem.of_lost(dead or apart), operation, size, answers)
    elif problem.is_loss:
        ending = set()
        error = ExchangeError("the ranks connect again")
    elif problem.is_elsewhere:
        are_crossed = True
        error = _different_operations_error(phase, answers, own.rank)
        here = {answer.rank for answer in answers if key in answer.inside}
        # The operations that share no rank with this one: their ranks wait for those of this one, and vice versa.
        ending |= {each for each in inside if not any(each in a.inside for a in answers if a.rank in here)}
    else:
        error = missing_ranks_error(problem, operation, size, answers, waiting)
    gone = tuple(sorted({rank for rank, _ in closed}))
    return EndMessage(tuple(sorted(ending)), ErrorMessage.of(error), gone, are_crossed)


def _different_operations_error(phase: str, answers: Sequence[Answer], rank: int) -> ExchangeError:
    # Assume that the operation with the most ranks is the right one. If there are several, take this rank's own.
    doing: dict[str, list[int]] = {}
    for answer in answers:
        doing.setdefault(answer.doing, []).append(answer.rank)
    counts = Counter({text: len(ranks) for text, ranks in doing.items()})
    expected = max(counts, key=lambda text: (counts[text], rank in doing[text]))
    described = []
    for text, _ in counts.most_common(_MAX_RANKS_DESCRIBED):
        ranks = doing[text]
        described.append(f"{f'rank {ranks[0]} is' if len(ranks) == 1 else f'ranks {ranks} are'} in {text}")
    return ExchangeError(
        f"the ranks are in different operations: {'; '.join(described)}",
        phase=phase,
        ranks=sorted(each for text, ranks in doing.items() if text != expected for each in ranks),
    )


def missing_ranks_error(
    problem: Problem, operation: Any, size: int, answers: Sequence[Answer], waiting: Mapping[int, Waiting] = {}
) -> ExchangeTimeout:
    """The exception for ``problem`` in ``operation``, by what ``answers`` say of others, and ``waiting`` of some."""
    doing = {answer.rank: answer.doing for answer in answers}
    missing = dict(problem.missing)
    for answer in answers if not problem.is_loss else ():
        missing = {**{rank: text for rank, text in answer.missing.items() if rank not in doing}, **missing}
    for rank, text in problem.missing.items():
        # A rank that answers is alive: only its work does not advance.
        if rank in doing and operation.what not in doing[rank]:
            missing[rank] = f"{text}: it is in {doing[rank]}"
    for rank, there in waiting.items():
        # Who has not got a result yet, because the one that should pass it on is silent, does not come either.
        if rank in missing and there.operation == operation.key and there.number < operation.n_exchanges:
            silent = {each: f"rank {each} is silent, and rank {rank} waits for it" for each in there.awaited}
            missing = {**{each: text for each, text in silent.items() if each not in doing}, **missing}
            if not silent.keys() <= doing.keys():
                del missing[rank]
    described = [missing[rank] for rank in sorted(missing)[:_MAX_RANKS_DESCRIBED]]
    if len(missing) > len(described):
        described.append(f"and {len(missing) - len(described)} more: {sorted(missing)[_MAX_RANKS_DESCRIBED:]}")
    return ExchangeTimeout(
        f"{operation.what} {problem.what}; {len(missing)} of {size} ranks missing: {'; '.join(described)}",
        phase=operation.phase,
        ranks=sorted(missing),
        missing_ranks=sorted(missing),
        timeout_seconds=operation.timeout_seconds,
    )


def as_told_to(rank: int, error: RobustCheckpointError) -> RobustCheckpointError:
    """The exception as ``rank`` raises it. If the others had given up on that rank, the message says so first."""
    if not isinstance(error, ExchangeTimeout) or rank not in (error.missing_ranks or ()):
        return error
    return _changed(error, message=f"this rank ({rank}) came after the others had given up on it: {error.message}")


def end_without_store(ended: EndMessage, what: str, size: int, detail: str, host: int | None, rank: int) -> EndMessage:
    """The verdict of this rank alone, because the ranks could not agree on one in the store.

    Then it names the rank that hosts the store. The others may be missing only because that one is.
    """
    error = ended.error.to_error()
    lost = (
        f"{STORE_IS_LOST} ({detail}), and ranks meet there: the process that hosts it, rank 0 unless a launcher does, "
        "is frozen, or has ended, and then the job has to be restarted"
    )
    if host is not None and host != rank and isinstance(error, ExchangeTimeout):
        message = f"{what} did not finish; 1 of {size} ranks missing: rank {host}: {lost}"
        error = _changed(error, message=message, missing_ranks=[host], ranks=[host])
    else:
        error = _changed(error, message=f"{error.message}; {lost}")
    return EndMessage(ended.operations, ErrorMessage.of(error))


def _changed(error: RobustCheckpointError, **changes: Any) -> RobustCheckpointError:
    return error_from_fields(type(error).__name__, {**error.to_fields(), **changes}, error.rank_failures)


def end_of_leaving(key: OperationKey) -> EndMessage:
    """The end of an operation on a rank whose group was destroyed, or whose process ends."""
    error = ExchangeError("this rank leaves: its process group was destroyed, or its process ends")
    return EndMessage((key,), ErrorMessage.of(error))
