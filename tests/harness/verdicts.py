"""How a call on one rank ended, as plain values, so that one run of ranks can try many cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from robust_dcp import RobustCheckpointError

__all__ = ["Verdict", "verdict_of"]


@dataclass(frozen=True)
class Verdict:
    """The exception of a call: ``type_name`` is ``""`` if there was none, and then ``value`` is what it returned."""

    type_name: str = ""
    message: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    failed_ranks: tuple[int, ...] = ()
    failures: str = ""
    value: Any = None


def verdict_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Verdict:
    """Call, and catch whatever comes: stock's ``CheckpointException`` is no ``Exception``."""
    try:
        return Verdict(value=call(*args, **kwargs))
    except RobustCheckpointError as error:
        fields = error.to_fields()
        message = fields.pop("message")
        failures = "\n".join(map(str, error.rank_failures))
        return Verdict(type(error).__name__, message, fields, tuple(f.rank for f in error.rank_failures), failures)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Verdict(type(error).__name__, str(error))
