"""How a call on one rank ended, as plain values that can be sent and compared."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Verdict", "lines_of_the_log", "verdict_of"]


@dataclass(frozen=True)
class Verdict:
    """The exception of a call: ``type_name`` is ``""`` if there was none, and then ``value`` is what it returned.

    Attributes:
        message: the attribute ``message`` of robust_dcp's exceptions, else ``str(error)``.
        fields: ``to_fields()`` of robust_dcp's exceptions, without the message. Empty for others.
        rank_failures: the ``RankFailure`` entries of robust_dcp's exceptions. Empty for others.
        traceback_text: what Python would have printed.
    """

    type_name: str = ""
    message: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    rank_failures: tuple[Any, ...] = ()
    traceback_text: str = field(default="", compare=False, repr=False)
    value: Any = None

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        return tuple(failure.rank for failure in self.rank_failures)

    def __str__(self) -> str:
        return "\n".join([f"{self.type_name}: {self.message}", *map(str, self.rank_failures)])


def verdict_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Verdict:
    """Call, and catch whatever comes: stock's ``CheckpointException`` is no ``Exception``."""
    try:
        return Verdict(value=call(*args, **kwargs))
    except BaseException as error:
        to_fields = getattr(error, "to_fields", None)
        fields = dict(to_fields()) if callable(to_fields) else {}
        return Verdict(
            type_name=type(error).__name__,
            message=str(fields.pop("message", error)),
            fields=fields,
            rank_failures=tuple(getattr(error, "rank_failures", ())),
            traceback_text="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        )


def lines_of_the_log(name: str = "robust_dcp") -> list[str]:
    """The warnings, and worse, that a logger gets from now on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return lines
