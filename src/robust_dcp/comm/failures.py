"""How a failure on one rank becomes the same exception on all ranks.

This module owns the descriptions of what went wrong: :class:`Problem` on this rank, and the messages that tell other
ranks. It turns exceptions into text of bounded length, merges what several ranks report, and makes exceptions from it.
It never sends anything and never uses pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from robust_dcp.comm import wire
from robust_dcp.comm.frames import Status
from robust_dcp.errors import (
    RankFailure,
    RobustCheckpointError,
    alike,
    error_from_fields,
    failure_of,
    ranks_in_words,
)

__all__ = [
    "LOST",
    "MAX_FAILURES_TOLD",
    "EndMessage",
    "ErrorMessage",
    "FailuresBelow",
    "Problem",
    "Stopped",
    "describe",
    "joint_error",
]

MAX_FAILURES_TOLD = 16
"""If more ranks fail, only this many descriptions are sent; of the other ranks only their numbers."""

_MAX_MESSAGE_CHARS = 16 << 10
_MAX_TRACEBACK_CHARS = 32 << 10
_MAX_FIELDS_NBYTES = 256 << 10

LOST = "broke off: connection lost"


class Stopped(Exception):
    """This rank stopped its work because another rank announced a failure. It is not at fault itself.

    Raise it in the work that you give to an exchange; ``Channel.stop_if_announced`` does. All ranks, this one included,
    then raise the failure of the rank that announced it.
    """


class Problem(Exception):
    """Why this rank cannot go on. It is internal to :mod:`robust_dcp.comm`.

    Attributes:
        what: what happened, worded to follow the name of the exchange.
        cause: the exception that this rank raised itself, if that is the problem.
        missing: ranks that are gone or silent, each with what is known of it.
        damaged_by: the rank that sent messages which arrived damaged.
        is_elsewhere: some ranks are in another operation or phase.
        is_loss: the connection to the missing ranks broke. They may be alive.
        may_return: the missing ranks have said nothing in this operation, or it was this rank that closed.
    """

    def __init__(
        self,
        what: str,
        cause: BaseException | None = None,
        *,
        missing: dict[int, str] | None = None,
        damaged_by: int | None = None,
        is_elsewhere: bool = False,
        is_loss: bool = False,
        may_return: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.missing = missing or {}
        self.damaged_by = damaged_by
        self.is_elsewhere = is_elsewhere
        self.is_loss = is_loss
        self.may_return = may_return

    @classmethod
    def of_leaving(cls, rank: int, error: BaseException) -> Problem:
        """``rank``, which is this one, raised ``error`` and does not go on."""
        return cls(f"was left by rank {rank}: {type(error).__name__}", error)

    @classmethod
    def of_damage(cls, rank: int, peer: int, detail: str) -> Problem:
        """Messages from ``peer`` to ``rank`` arrive damaged."""
        return cls(f"what rank {peer} sent to rank {rank} arrived damaged {detail}", damaged_by=peer)

    @classmethod
    def of_lost(cls, lost: dict[int, str], *, may_return: bool = False) -> Problem:
        """The connections to the ranks in ``lost`` broke. The texts say what is known."""
        return cls(LOST, missing=lost, is_loss=True, may_return=may_return)

    @classmethod
    def of_silent(cls, rank: int, seconds: float, text: str) -> Problem:
        """``rank`` showed no progress for ``seconds``, the longest allowed time; ``text`` says what is known."""
        return cls(f"did not finish: no progress for {seconds:g} seconds", missing={rank: text})

    @classmethod
    def of_deadline(cls, missing: dict[int, str], seconds: float) -> Problem:
        """The exchange took longer than allowed; ``missing`` says what is known of the ranks that are not done."""
        return cls(f"did not finish within its deadline of {seconds:g} seconds", missing=missing)


class FailureMessage(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`RankFailure` as a message."""

    rank: int
    type_name: str
    message: str
    traceback_text: str

    @classmethod
    def of(cls, failure: RankFailure) -> FailureMessage:
        return cls(
            rank=failure.rank,
            type_name=failure.type_name,
            message=_shortened(failure.message, _MAX_MESSAGE_CHARS),
            traceback_text=_shortened(failure.traceback_text, _MAX_TRACEBACK_CHARS),
        )

    def to_failure(self) -> RankFailure:
        return RankFailure(self.rank, self.type_name, self.message, self.traceback_text)


class ErrorMessage(msgspec.Struct, array_like=True, frozen=True):
    """An exception as a message. ``fields`` holds the fields of our own classes; it is ``None`` for other
    exceptions."""

    type_name: str
    fields: dict[str, Any] | None
    failures: tuple[FailureMessage, ...]

    @classmethod
    def of(cls, error: RobustCheckpointError) -> ErrorMessage:
        """Describe ``error`` and the failures that it already holds."""
        failures = tuple(FailureMessage.of(failure) for failure in error.rank_failures)
        return cls(type(error).__name__, _plain_fields(error), failures)

    def to_error(self) -> RobustCheckpointError:
        failures = [failure.to_failure() for failure in self.failures]
        return error_from_fields(self.type_name, self.fields or {}, failures)


class EndMessage(msgspec.Struct, array_like=True, frozen=True):
    """The end message: how operations ended out of step, the same for all ranks.

    Attributes:
        operations: the operations that end, as ``OperationKey``. There are several if their ranks waited for each
            other.
        error: the exception that all ranks in these operations raise.
        gone: ranks that closed their connections and did not answer the roll call.
    """

    operations: tuple[tuple[int, int], ...]
    error: ErrorMessage
    gone: tuple[int, ...] = ()


def describe(rank: int, error: BaseException) -> bytes:
    """Describe ``error``, caught on ``rank``, as a payload for other ranks. It has a bounded size and never raises."""
    own = FailureMessage.of(failure_of(rank, error))
    fields: dict[str, Any] | None = None
    failures: tuple[FailureMessage, ...] = (own,)
    if isinstance(error, RobustCheckpointError):
        fields = _plain_fields(error)
        failures += tuple(FailureMessage.of(failure) for failure in error.rank_failures[:MAX_FAILURES_TOLD])
    return wire.encode(ErrorMessage(type(error).__name__, fields, failures))


class FailuresBelow(msgspec.Struct, array_like=True, frozen=True):
    """The failures of a rank and of those below it in the tree, on their way up.

    Attributes:
        failed: the ranks that failed in their own work, in ascending order.
        told: the descriptions of the first ``MAX_FAILURES_TOLD`` of these ranks (:func:`describe`).
        stopped: the ranks that stopped because they heard of a failure.
        reason: the failure that they heard of.
    """

    failed: tuple[int, ...] = ()
    told: dict[int, ErrorMessage] = {}
    stopped: tuple[int, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.failed or self.stopped)

    @classmethod
    def on(cls, rank: int, error: BaseException) -> FailuresBelow:
        """The failures of ``rank`` after ``error`` was raised there."""
        return cls(failed=(rank,), told={rank: wire.decode(describe(rank, error), ErrorMessage)})

    @classmethod
    def stopped_on(cls, rank: int, reason: str) -> FailuresBelow:
        """The failures of ``rank`` after it stopped because it heard of another rank's failure."""
        return cls(stopped=(rank,), reason=reason[:500].encode(errors="replace").decode())

    def merged(self, other: FailuresBelow) -> FailuresBelow:
        """The failures of both."""
        told = {**self.told, **other.told}
        return FailuresBelow(
            failed=tuple(sorted({*self.failed, *other.failed})),
            told={rank: told[rank] for rank in sorted(told)[:MAX_FAILURES_TOLD]},
            stopped=tuple(sorted({*self.stopped, *other.stopped})),
            reason=self.reason or other.reason,
        )

    @property
    def status(self) -> Status:
        """The status that the rank reports for itself and those below it."""
        if self.failed:
            return Status.ERROR
        return Status.STOPPED if self.stopped else Status.OK

    def joint_error(self, phase: str) -> RobustCheckpointError:
        """The one exception that all ranks raise."""
        if self.failed:
            return joint_error(phase, self.failed, self.told)
        return RobustCheckpointError(
            f"{phase!r} was stopped on ranks {list(self.stopped)}, as a failure was announced: {self.reason}"
        )


def joint_error(phase: str, failed_ranks: Sequence[int], told: Mapping[int, ErrorMessage]) -> RobustCheckpointError:
    """The one exception for the failures of ``failed_ranks``. It is the lowest rank's, and lists the failures of all.

    Args:
        phase: the exchange that the ranks were about to join.
        failed_ranks: in ascending order.
        told: the descriptions that arrived.
    """
    failures: list[RankFailure] = []
    for rank in failed_ranks:
        if rank in told:
            failures.extend(failure.to_failure() for failure in told[rank].failures)
        else:
            failures.append(RankFailure(rank, "unknown", "its description was not sent, or did not arrive whole"))
    lowest = told.get(failed_ranks[0])
    if lowest is not None and lowest.fields is not None:
        return error_from_fields(lowest.type_name, lowest.fields, failures)
    own = [failure for failure in failures if failure.rank in failed_ranks]
    what = ", ".join(sorted({failure.type_name for failure in own}))
    if len(alike(own)) == 1 and own[0].message:
        what += ": " + own[0].message
    return RobustCheckpointError(f"{phase!r} failed on {ranks_in_words(failed_ranks)}: {what}", failures=failures)


def _plain_fields(error: RobustCheckpointError) -> dict[str, Any]:
    """The fields of ``error`` as msgpack supports them. If they are too long, lists and dicts are left out."""
    fields = error.to_fields()
    fields["message"] = _shortened(str(fields["message"]), _MAX_MESSAGE_CHARS)
    plain: dict[str, Any] = _as_text(msgspec.to_builtins(fields, str_keys=True, enc_hook=str))
    if len(msgspec.msgpack.encode(plain)) > _MAX_FIELDS_NBYTES:
        plain = {name: None if isinstance(value, list | tuple | dict) else value for name, value in plain.items()}
    return plain


def _as_text(value: Any) -> Any:
    """A plain value, in which lone surrogates are replaced: a path that is no UTF-8 has some, and UTF-8 has none."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value


def _shortened(text: str, limit: int) -> str:
    """``text``, or its beginning and end if it is longer than ``limit``. Lone surrogates are replaced."""
    text = _as_text(text)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[{len(text) - limit} characters left out]\n{text[-(limit // 2) :]}"
