"""How a failure on one rank becomes the same exception on all: descriptions as messages, and their union.

Owns the words for what went wrong: :class:`Problem` on this rank, and the messages in which others hear of it. It turns
exceptions into bounded text and text into exceptions. It never sends anything and never sees a pickle.
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
"""When more ranks fail, only so many send a description; the others are named."""

_MAX_MESSAGE_CHARS = 16 << 10
_MAX_TRACEBACK_CHARS = 32 << 10
_MAX_FIELDS_NBYTES = 256 << 10


class Stopped(Exception):
    """This rank stopped its work because another announced a failure; it is not itself at fault.

    Raise it in the work given to an exchange (``Channel.stop_if_announced`` does): the failure of the rank that
    announced it is then raised on all, this one included.
    """


class Problem(Exception):
    """What keeps this rank from going on. Internal to :mod:`robust_dcp.comm`.

    Attributes:
        what: what happened, to be read after the name of the exchange.
        cause: what this rank raised itself, if that is the problem.
        missing: ranks that are gone or silent, each with what is known of it.
        damaged_by: the rank whose messages arrive damaged.
        is_elsewhere: some ranks are in another operation or phase.
    """

    def __init__(
        self,
        what: str,
        cause: BaseException | None = None,
        *,
        missing: dict[int, str] | None = None,
        damaged_by: int | None = None,
        is_elsewhere: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.missing = missing or {}
        self.damaged_by = damaged_by
        self.is_elsewhere = is_elsewhere

    @classmethod
    def of_damage(cls, rank: int, peer: int, detail: str) -> Problem:
        """What ``peer`` sends to ``rank`` arrives damaged."""
        return cls(f"what rank {peer} sent to rank {rank} arrived damaged {detail}", damaged_by=peer)

    @classmethod
    def of_lost(cls, peer: int, text: str) -> Problem:
        """The connection to ``peer`` has broken; ``text`` says what is known."""
        return cls("broke off: connection lost", missing={peer: text})

    @classmethod
    def of_silent(cls, rank: int, seconds: float, text: str) -> Problem:
        """``rank`` has shown no progress for as long as it may; ``text`` says what is known."""
        return cls(f"did not finish: no progress for {seconds:g} seconds", missing={rank: text})

    @classmethod
    def of_deadline(cls, ranks: Sequence[int], seconds: float) -> Problem:
        """The exchange has taken longer than it may."""
        missing = {rank: f"rank {rank}, or a rank behind it, is not done" for rank in ranks}
        return cls(f"did not finish within its deadline of {seconds:g} seconds", missing=missing)


class FailureMessage(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`RankFailure` on its way."""

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
    """An exception on its way. ``fields``: those of one of our classes; ``None`` for any other exception."""

    type_name: str
    fields: dict[str, Any] | None
    failures: tuple[FailureMessage, ...]

    @classmethod
    def of(cls, error: RobustCheckpointError) -> ErrorMessage:
        """``error`` as it is, with the failures that it already holds."""
        failures = tuple(FailureMessage.of(failure) for failure in error.rank_failures)
        return cls(type(error).__name__, _plain_fields(error), failures)

    def to_error(self) -> RobustCheckpointError:
        failures = [failure.to_failure() for failure in self.failures]
        return error_from_fields(self.type_name, self.fields or {}, failures)


class EndMessage(msgspec.Struct, array_like=True, frozen=True):
    """How operations ended out of step, the same for all ranks.

    Attributes:
        operations: those that end, each as its ``OperationKey``; several if their ranks waited for each other.
        error: what all ranks that are in one of them raise.
    """

    operations: tuple[tuple[int, int], ...]
    error: ErrorMessage


def describe(rank: int, error: BaseException) -> bytes:
    """``error``, caught on ``rank``, as the payload that tells the others. Bounded, and never fails itself."""
    own = FailureMessage.of(failure_of(rank, error))
    fields: dict[str, Any] | None = None
    failures: tuple[FailureMessage, ...] = (own,)
    if isinstance(error, RobustCheckpointError):
        fields = _plain_fields(error)
        failures += tuple(FailureMessage.of(failure) for failure in error.rank_failures[:MAX_FAILURES_TOLD])
    return wire.encode(ErrorMessage(type(error).__name__, fields, failures))


class FailuresBelow(msgspec.Struct, array_like=True, frozen=True):
    """What has failed on a rank and on those below it in the tree, on its way up.

    Attributes:
        failed: the ranks whose own work failed, in ascending order.
        told: the descriptions of the first ``MAX_FAILURES_TOLD`` of them (:func:`describe`).
        stopped: the ranks that stopped since a failure was announced to them.
        reason: what was announced.
    """

    failed: tuple[int, ...] = ()
    told: dict[int, ErrorMessage] = {}
    stopped: tuple[int, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.failed or self.stopped)

    @classmethod
    def on(cls, rank: int, error: BaseException) -> FailuresBelow:
        """``error`` was raised on ``rank``."""
        return cls(failed=(rank,), told={rank: wire.decode(describe(rank, error), ErrorMessage)})

    @classmethod
    def stopped_on(cls, rank: int, reason: str) -> FailuresBelow:
        """``rank`` stopped since it was told of a failure."""
        return cls(stopped=(rank,), reason=reason[:500].encode(errors="replace").decode())

    def merged(self, other: FailuresBelow) -> FailuresBelow:
        """Those of both."""
        told = {**self.told, **other.told}
        return FailuresBelow(
            failed=tuple(sorted({*self.failed, *other.failed})),
            told={rank: told[rank] for rank in sorted(told)[:MAX_FAILURES_TOLD]},
            stopped=tuple(sorted({*self.stopped, *other.stopped})),
            reason=self.reason or other.reason,
        )

    @property
    def status(self) -> Status:
        """What the rank says of itself and of those below it."""
        if self.failed:
            return Status.ERROR
        return Status.STOPPED if self.stopped else Status.OK

    def joint_error(self, phase: str) -> RobustCheckpointError:
        """The one exception for all ranks."""
        if self.failed:
            return joint_error(phase, self.failed, self.told)
        return RobustCheckpointError(
            f"{phase!r} was stopped on ranks {list(self.stopped)}, as a failure was announced: {self.reason}"
        )


def joint_error(phase: str, failed_ranks: Sequence[int], told: Mapping[int, ErrorMessage]) -> RobustCheckpointError:
    """The one exception for the failures of ``failed_ranks``: that of the lowest rank, with the failures of all.

    Args:
        phase: the exchange that they were to join.
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
    """The fields of ``error`` as msgpack carries them; without the bulky ones if they are too long."""
    fields = error.to_fields()
    fields["message"] = _shortened(str(fields["message"]), _MAX_MESSAGE_CHARS)
    plain: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True, enc_hook=str)
    if len(msgspec.msgpack.encode(plain)) > _MAX_FIELDS_NBYTES:
        plain = {name: None if isinstance(value, list | tuple | dict) else value for name, value in plain.items()}
    return plain


def _shortened(text: str, limit: int) -> str:
    """``text`` if it has at most ``limit`` characters, else its two ends. Lone surrogates cannot be sent."""
    text = text.encode(errors="replace").decode()
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[{len(text) - limit} characters left out]\n{text[-(limit // 2) :]}"
