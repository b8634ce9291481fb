"""The exceptions of robust_dcp. This is the lowest layer: every other module may import it.

    RobustCheckpointError (CheckpointException, RuntimeError)
    ├── ExchangeError            a bad frame, another operation or another sequence number
    │   └── ExchangeTimeout      a rank did not join in time (TimeoutError)
    ├── PlanConflict             the ranks' structures contradict each other (ValueError)
    ├── StructureChanged         the structure differs from the cached one, and the user forbade that
    ├── StorageError             a call to the file system failed (OSError)
    ├── CorruptCheckpoint        bytes or metadata are not what was written (ValueError)
    └── UnsafeCheckpoint         loading would run code or leave the checkpoint's directory (ValueError)

``torch.distributed.checkpoint.api.CheckpointException`` derives from ``BaseException``. Our exceptions derive from
``RuntimeError`` as well, so ``except Exception`` and ``except CheckpointException`` both catch them.

When one rank fails, it sends its exception to the other ranks as text (:meth:`RobustCheckpointError.to_fields`). They
raise the same class with the same fields (:func:`error_from_fields`). No exception object is pickled.

A user sees what happened, what to do, and which ranks raised it. The stack shows the user's own code only:
:func:`entry_point` removes our frames where the user's code calls ours.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from textwrap import indent
from typing import Any, ClassVar, ParamSpec, TypeVar

import msgspec
import numpy
import torch
from torch.distributed.checkpoint.api import CheckpointException

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_MAX_KINDS_SHOWN = 8
"""How many different failures a message describes in full."""

_BRIEF_CHARS = 200
_MAX_FRAMES = 20
_MAX_CAUSES = 4
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank. It is text, so it can be sent to every other rank and printed there.

    Attributes:
        rank: the rank of the group that raised.
        type_name, message: the name of the exception's class, and its message.
        traceback_text: the frames of the user's code. If a bug in our own code raised the exception, it holds all
            frames.
    """

    rank: int
    type_name: str
    message: str
    traceback_text: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {_type_and_message(self)}"

    def rebuilt(self) -> BaseException:
        """An exception of the same class and message: of Python's own classes and ours. Of others it has the name."""
        if self.type_name in RobustCheckpointError.classes or self.type_name == RobustCheckpointError.__name__:
            return error_from_fields(self.type_name, {"message": self.message})
        kind = getattr(builtins, self.type_name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            # Python shows the message of a KeyError as it would be written in a program.
            is_written = kind is KeyError and self.message[:1] in ("'", '"')
            with suppress(TypeError):  # some take more than a message
                return kind(self.message[1:-1] if is_written else self.message)
        named: type[BaseException] = type(self.type_name, (RuntimeError,), {})
        return named(self.message)


class RobustCheckpointError(CheckpointException, RuntimeError):
    """A save or load failed. The same exception is raised on every rank of the group.

    Args:
        message: who, where, what was expected, what was found, what to do.
        failures: one entry for each rank that failed itself. Ranks that only heard of the failure have no entry.
        fields: the values of the attributes that the class names by its annotations (``field_names``).
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    classes: ClassVar[dict[str, type[RobustCheckpointError]]] = {}
    was_repeated = False  # whether the call that failed was made as often as it may be
    is_brief = False  # whether only the message is printed

    def __init_subclass__(cls) -> None:
        cls.field_names = (*cls.field_names, *inspect.get_annotations(cls))
        if cls.__module__ == __name__:
            cls.classes[cls.__name__] = cls

    def __init__(self, message: str, *, failures: Sequence[RankFailure] = (), **fields: Any) -> None:
        unknown = set(fields) - set(self.field_names)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        self.message = message
        self.rank_failures = tuple(failures)
        super().__init__(
            message,
            {failure.rank: (failure.rebuilt(), traceback.StackSummary()) for failure in failures},
        )
        if isinstance(self, OSError):  # In Python 3.14 that call reaches OSError, which takes the two for its own.
            for name in ("errno", "strerror"):
                setattr(self, name, None)
        for name in self.field_names:
            setattr(self, name, fields.get(name))

    def __str__(self) -> str:
        kinds = [] if self.is_brief else alike(self.rank_failures)
        lines = [line for kind in kinds[:_MAX_KINDS_SHOWN] for line in self._told(kind)]
        if len(kinds) > _MAX_KINDS_SHOWN:
            rest = [failure.rank for kind in kinds[_MAX_KINDS_SHOWN:] for failure in kind]
            lines.append(f"  {ranks_in_words(rest)} failed in other ways: see rank_failures")
        return "\n".join([self.message, *lines])

    def _told(self, kind: Sequence[RankFailure]) -> list[str]:
        """Describe a group of similar failures, without what ``message`` already says."""
        first = kind[0]
        where = ranks_in_words([failure.rank for failure in kind])
        same = "" if all(failure.message == first.message for failure in kind) else f", as rank {first.rank} words it"
        lines = []
        is_own = (first.type_name, first.message) == (type(self).__name__, self.message)
        if not is_own and _type_and_message(first) not in self.message:
            lines.append(indent(f"{where}{same}: {_type_and_message(first)}", "  "))
        elif where not in self.message:
            lines.append(f"  raised on {where}{same}")
        if first.traceback_text:
            lines.append(indent(first.traceback_text.rstrip(), "    "))
        return lines

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (type(self).__name__, self.to_fields(), self.rank_failures)
        return error_from_fields, fields, {"is_brief": self.is_brief}

    def in_brief(self) -> RobustCheckpointError:
        """The same class and fields with a short message, where the errors of all ranks are printed."""
        start = self.message.partition("\n")[0].rstrip(":")
        if len(start) > _BRIEF_CHARS:
            start = f"{start[:_BRIEF_CHARS]}…"
        message = f"{start} (the coordinator's error says all of it)"
        brief = error_from_fields(type(self).__name__, {**self.to_fields(), "message": message}, self.rank_failures)
        brief.is_brief = True
        return brief

    def to_fields(self) -> dict[str, Any]:
        """The message and the fields of the class, as plain values that every encoding supports."""
        return {"message": self.message, **{name: getattr(self, name) for name in self.field_names}}


class ExchangeError(RobustCheckpointError):
    """An exchange between ranks failed: a frame or payload arrived damaged twice, or the ranks are in different
    operations. ``phase`` names the exchange; ``ranks`` lists the ranks at fault, as ranks of the group."""

    phase: str | None
    ranks: list[int] | None


class ExchangeTimeout(ExchangeError, TimeoutError):
    """Some ranks did not join an exchange within ``timeout_seconds``; ``missing_ranks`` names them (group ranks)."""

    missing_ranks: list[int] | None
    timeout_seconds: float | None


class PlanConflict(RobustCheckpointError, ValueError):
    """The ranks want to save contradictory things. ``key`` is the FQN; ``ranks`` are those that hold it."""

    key: str | None
    ranks: list[int] | None


class StructureChanged(RobustCheckpointError):
    """The state dict has another structure than in the last committed save, and ``on_structure_change="error"``.

    ``added``, ``removed`` and ``changed`` list the keys, at most a few hundred of each."""

    added: list[str] | None
    removed: list[str] | None
    changed: list[str] | None


class StorageError(RobustCheckpointError, OSError):
    """A call to the file system failed: ``operation`` on ``path`` gave ``errno`` (``None`` if it gave no number)."""

    path: str | None
    operation: str | None
    errno: int | None


class CorruptCheckpoint(RobustCheckpointError, ValueError):
    """Bytes or metadata differ from what was written. ``file`` and ``item`` say where; ``expected`` and ``found`` say
    what differs."""

    file: str | None
    item: str | None
    expected: str | None
    found: str | None

    @classmethod
    def of_file(
        cls,
        file: str,
        expected: str,
        found: str,
        *,
        item: str | None = None,
        problem: str = "cannot be used",
        advice: str = "take another checkpoint, or restore the file",
    ) -> CorruptCheckpoint:
        """For example: ``__0_0.distcp cannot be used: expected 8 bytes, found 7; take another checkpoint, …``."""
        what = file if item is None else f"item {item!r} in {file}"
        message = f"{what} {problem}: expected {expected}, found {found}; {advice}"
        return cls(message, file=file, item=item, expected=expected, found=found)


class UnsafeCheckpoint(RobustCheckpointError, ValueError):
    """Loading ``file`` would run code, or follow a path out of the checkpoint's directory. ``what`` says which."""

    file: str | None
    what: str | None


def error_from_fields(
    type_name: str, fields: Mapping[str, Any], failures: Sequence[RankFailure] = ()
) -> RobustCheckpointError:
    """Build the exception that :meth:`RobustCheckpointError.to_fields` described.

    If ``type_name`` is not one of our classes (a user's hook raised ``KeyError``, say), the base class is returned.
    """
    cls = RobustCheckpointError.classes.get(type_name, RobustCheckpointError)
    known = {name: fields.get(name) for name in cls.field_names}
    return cls(str(fields.get("message", "")), failures=failures, **known)


def failure_of(rank: int, error: BaseException) -> RankFailure:
    """Describe ``error``, which was caught on ``rank``, as text."""
    message = error.message if isinstance(error, RobustCheckpointError) else str(error)
    return RankFailure(rank, type(error).__name__, message, _user_stack(error))


def alike(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Put similar ``failures`` into one group each, and keep their order.

    Two failures are similar if they have the same class and their messages differ only in words with digits in them
    (``__3_0.distcp``, ``layers.7``, a checksum)."""
    groups: dict[tuple[str, str], list[RankFailure]] = {}
    for failure in failures:
        # Match whole words. A pattern for "a word with a digit in it" takes quadratic time on a long word.
        kind = re.sub(r"\w+", lambda word: "#" if _DIGIT.search(word[0]) else word[0], failure.message)
        groups.setdefault((failure.type_name, kind), []).append(failure)
    return list(groups.values())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"ranks 0-2, 5"``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {words}"


def _type_and_message(failure: RankFailure) -> str:
    return f"{failure.type_name}: {failure.message}" if failure.message else failure.type_name


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that user code calls, so that our errors leave it without our frames.

    The error's message already says who, where and why, and shows the user's own frames. The exception that led to it
    stays in ``__context__``, without its frames: they hold the state dict, and each other. The whole stack goes to this
    module's logger at DEBUG.
    """

    @functools.wraps(function)
    def robust_dcp(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RobustCheckpointError as error:
            logger.debug("the whole stack:", exc_info=error)
            if error.__cause__ is not None:
                error.__context__ = error.__cause__
            each: BaseException | None = error
            while each is not None and each.__traceback__ is not None:
                each = each.with_traceback(None).__context__
            raise error from None

    return robust_dcp


def _user_stack(error: BaseException) -> str:
    """Format the frames of user code from the traceback of ``error`` and of the exceptions that led to it.

    No frame of robust_dcp or torch is shown if there are such frames, and none if ``error`` is ours: its message says
    everything. Another error without user code is a bug of ours or of a library that we call. Then all are shown.
    """
    lines: list[str] = []
    text, how, each = _one_line(error), "", error
    for _ in range(_MAX_CAUSES):
        frames = user_frames(each)
        if not frames and each is error and not isinstance(each, RobustCheckpointError):
            frames = list(traceback.extract_tb(each.__traceback__))
        what = _one_line(each)
        if how and frames and what not in text:
            lines.append(f"{how} {what}")
        calls = [
            f'File "{frame.filename}", line {frame.lineno}, in {frame.name}' + f"\n  {frame.line}" * bool(frame.line)
            for frame in frames
        ]
        if len(calls) > _MAX_FRAMES:
            half = _MAX_FRAMES // 2
            calls[half:-half] = [f"[{len(calls) - _MAX_FRAMES} calls left out]"]
        lines += calls
        if each.__cause__ is not None:
            how, each = "caused by", each.__cause__
        elif each.__context__ is not None and not each.__suppress_context__:
            how, each = "while handling", each.__context__
        else:
            break
    return "\n".join(lines)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of user code that ``error`` has passed, the outermost first."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]


def _one_line(error: BaseException) -> str:
    """The type and message, as Python prints them."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


@cache
def _is_user_code(filename: str) -> bool:
    """Whether a file belongs neither to robust_dcp, nor to Python, nor to a package that robust_dcp builds on."""
    if filename.startswith("<frozen") or filename.startswith(_PACKAGES):
        return False
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return is_installed or not filename.startswith(_PYTHON)


def _directory_of(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_PACKAGES = tuple(map(_directory_of, (__file__, torch.__file__, numpy.__file__, msgspec.__file__)))
_PYTHON = _directory_of(os.__file__)
