"""The exceptions of robust_dcp: the lowest layer, which every other may import.

    RobustCheckpointError (CheckpointException, RuntimeError)
    ├── ExchangeError            a bad frame, another operation or another sequence number
    │   └── ExchangeTimeout      a rank did not join in time (TimeoutError)
    ├── PlanConflict             the ranks' structures contradict each other (ValueError)
    ├── StructureChanged         the structure differs from the cached one, and the user forbade that
    ├── StorageError             a call to the file system failed (OSError)
    ├── CorruptCheckpoint        bytes or metadata are not what was written (ValueError)
    └── UnsafeCheckpoint         loading would run code or leave the checkpoint's directory (ValueError)

``torch.distributed.checkpoint.api.CheckpointException`` derives from ``BaseException``; ours derive from
``RuntimeError`` as well, so ``except Exception`` and ``except CheckpointException`` both catch them.

A failure on one rank travels to the others as text (:meth:`RobustCheckpointError.to_fields`) and is raised
there as the same class with the same fields (:func:`error_from_fields`): no exception object is pickled.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed.checkpoint.api import CheckpointException

__all__ = [
    "CorruptCheckpoint",
    "ExchangeError",
    "ExchangeTimeout",
    "PlanConflict",
    "RankFailure",
    "RobustCheckpointError",
    "StorageError",
    "StructureChanged",
    "UnsafeCheckpoint",
    "error_from_fields",
    "failure_of",
]


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, as text: it can be sent to every other rank and printed there."""

    rank: int
    type_name: str
    message: str
    traceback_text: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}"


class RobustCheckpointError(CheckpointException, RuntimeError):
    """A save or load failed; the same exception is raised on every rank of the group.

    Args:
        message: who, where, what was expected, what was found, what to do.
        failures: one entry for each rank that failed on its own (not for those that only heard of it).
        fields: the values of the attributes that ``field_names`` of the class lists.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, *, failures: Sequence[RankFailure] = (), **fields: Any) -> None:
        unknown = set(fields) - set(self.field_names)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        self.message = message
        self.rank_failures = tuple(failures)
        for name in self.field_names:
            setattr(self, name, fields.get(name))
        super().__init__(
            message,
            {f.rank: (RuntimeError(f"{f.type_name}: {f.message}"), traceback.StackSummary()) for f in failures},
        )

    def __str__(self) -> str:
        if not self.rank_failures:
            return self.message
        lines = [self.message]
        for failure in self.rank_failures:
            lines.append(f"  {failure}")
            lines.extend(f"    {line}" for line in failure.traceback_text.rstrip().splitlines())
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_fields, (type(self).__name__, self.to_fields(), self.rank_failures)

    def to_fields(self) -> dict[str, Any]:
        """The message and the fields of the class, as plain values that any encoding can carry."""
        return {"message": self.message, **{name: getattr(self, name) for name in self.field_names}}


class ExchangeError(RobustCheckpointError):
    """An exchange between ranks cannot be trusted: a frame or payload was bad twice, or ranks are in different
    operations. ``phase`` names the exchange; ``ranks`` lists the offenders by group rank."""

    field_names: ClassVar[tuple[str, ...]] = ("phase", "ranks")
    phase: str | None
    ranks: list[int] | None


class ExchangeTimeout(ExchangeError, TimeoutError):
    """Some ranks did not join an exchange within ``timeout_seconds``; ``missing_ranks`` names them (group ranks)."""

    field_names: ClassVar[tuple[str, ...]] = ("phase", "ranks", "missing_ranks", "timeout_seconds")
    missing_ranks: list[int] | None
    timeout_seconds: float | None


class PlanConflict(RobustCheckpointError, ValueError):
    """What the ranks want to save contradicts itself; ``key`` is the FQN and ``ranks`` are those that hold it."""

    field_names: ClassVar[tuple[str, ...]] = ("key", "ranks")
    key: str | None
    ranks: list[int] | None


class StructureChanged(RobustCheckpointError):
    """The structure of the state dict is not that of the last committed save, and ``on_structure_change="error"``.

    ``added``, ``removed`` and ``changed`` list the keys (at most a few hundred of each)."""

    field_names: ClassVar[tuple[str, ...]] = ("added", "removed", "changed")
    added: list[str] | None
    removed: list[str] | None
    changed: list[str] | None


class StorageError(RobustCheckpointError, OSError):
    """A call to the file system failed: ``operation`` on ``path`` gave ``errno`` (``None`` if there was none)."""

    field_names: ClassVar[tuple[str, ...]] = ("path", "errno", "operation")
    path: str | None
    operation: str | None
    errno: int | None


class CorruptCheckpoint(RobustCheckpointError, ValueError):
    """Bytes or metadata are not what was written: ``file`` and ``item`` say where, ``expected`` and ``found`` what."""

    field_names: ClassVar[tuple[str, ...]] = ("file", "item", "expected", "found")
    file: str | None
    item: str | None
    expected: str | None
    found: str | None


class UnsafeCheckpoint(RobustCheckpointError, ValueError):
    """Loading ``file`` would run code or follow a path out of the checkpoint's directory; ``what`` says which."""

    field_names: ClassVar[tuple[str, ...]] = ("file", "what")
    file: str | None
    what: str | None


_CLASSES: dict[str, type[RobustCheckpointError]] = {
    cls.__name__: cls
    for cls in (
        RobustCheckpointError,
        ExchangeError,
        ExchangeTimeout,
        PlanConflict,
        StructureChanged,
        StorageError,
        CorruptCheckpoint,
        UnsafeCheckpoint,
    )
}


def error_from_fields(
    type_name: str, fields: Mapping[str, Any], failures: Sequence[RankFailure] = ()
) -> RobustCheckpointError:
    """Make the exception again from :meth:`RobustCheckpointError.to_fields`.

    A ``type_name`` that is not one of ours (the failure of a user's hook, say) gives the base class.
    """
    cls = _CLASSES.get(type_name, RobustCheckpointError)
    known = {name: fields.get(name) for name in cls.field_names}
    return cls(str(fields.get("message", "")), failures=failures, **known)


def failure_of(rank: int, error: BaseException) -> RankFailure:
    """Describe ``error``, caught on ``rank``, as text."""
    message = error.message if isinstance(error, RobustCheckpointError) else str(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RankFailure(rank=rank, type_name=type(error).__name__, message=message, traceback_text=text)
