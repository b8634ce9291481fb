"""Policies say which checkpoints are kept. You can write your own.

.. code-block:: python

    class KeepFirst:
        def kept(self, checkpoints):
            return checkpoints[:1]

    CheckpointManager(root, keep=[KeepLast(3), KeepFirst()])

A checkpoint stays if at least one policy keeps it. :func:`unkept` says which others stay, whatever the policies say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from robust_dcp.drain.record import is_awaited
from robust_dcp.manager.series import Checkpoint, Series, is_marked
from robust_dcp.on_demand import errors

__all__ = ["KeepBest", "KeepEvery", "KeepLast", "KeepPolicy", "unkept", "why_it_stays"]


class KeepPolicy(Protocol):
    """Says which checkpoints are to stay."""

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        """Those of ``checkpoints``, which are sorted by step, that are to stay.

        It is asked a second time, for those up to the latest, after a job has gone back to an earlier step.
        """


@dataclass(frozen=True)
class KeepLast:
    """The ones with the highest steps.

    Attributes:
        number: how many, at least 1.
    """

    number: int

    def __post_init__(self) -> None:
        _check_number("number", self.number)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        return checkpoints[-self.number :]


@dataclass(frozen=True)
class KeepEvery:
    """Those whose step is a multiple of a number.

    Attributes:
        steps: the number, at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_number("steps", self.steps)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        return [each for each in checkpoints if each.step % self.steps == 0]


@dataclass(frozen=True)
class KeepBest:
    """The best ones by a metric. Of equal ones the newest. A checkpoint without the metric, or with NaN, is none.

    Attributes:
        metric: its name.
        number: how many.
        best: whether the smallest or the largest value is best.
    """

    metric: str
    number: int = 1
    best: Literal["smallest", "largest"] = "smallest"

    def __post_init__(self) -> None:
        _check_number("number", self.number)
        if self.best not in ("smallest", "largest"):
            raise ValueError(f"best is 'smallest' or 'largest', not {self.best!r}")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        sign = 1 if self.best == "smallest" else -1
        rated = [each for each in checkpoints if not math.isnan(each.metrics.get(self.metric, math.nan))]
        rated.sort(key=lambda each: (sign * each.metrics[self.metric], -each.step))
        return rated[: self.number]


def unkept(series: Series, policies: Sequence[KeepPolicy]) -> list[Checkpoint]:
    """The checkpoints of a series that no policy keeps, and that may be removed.

    If the latest checkpoint is not the one with the highest step, the job has gone back to an earlier step. Then each
    policy is asked twice: for all checkpoints, and for those up to the latest. So what was saved before the job went
    back takes no place from what it saves now, and is not removed for it.

    The latest and the newest stay whatever the policies say, and so does what :func:`why_it_stays` names.

    Raises:
        StorageError: the root cannot be looked at.
    """
    checkpoints, _ = series.look()
    latest = series.latest_of(checkpoints)
    until_latest = [each for each in checkpoints if latest is not None and each.step <= latest.step]
    asked = [checkpoints] if until_latest == checkpoints else [checkpoints, until_latest]
    kept = {each.path for policy in policies for among in asked for each in policy.kept(among)}
    return [
        each for each in checkpoints[:-1] if each.path not in kept and each != latest and not why_it_stays(series, each)
    ]


def why_it_stays(series: Series, checkpoint: Checkpoint) -> str:
    """Why a checkpoint may not be removed although no policy keeps it; empty if it may be."""
    path = checkpoint.path
    try:
        if os.path.islink(path):
            return "somebody has put a link there"
        if not is_marked(series.disk, path):
            return "robust_dcp has not saved it"
        return "its copy has not arrived" if is_awaited(series.disk, path) else ""
    except errors.StorageError as error:
        return f"it cannot be read: {error.message}"


def _check_number(name: str, value: object) -> None:
    """Now, because a policy that fails when it is asked is only logged, and then nothing is ever removed."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1, and a whole number, got {value!r}")
