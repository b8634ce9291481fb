"""Policies say which checkpoints are kept. You can write your own.

.. code-block:: python

    class KeepFirst:
        def kept(self, checkpoints):
            return checkpoints[:1]

    CheckpointManager(root, keep=[KeepLast(3), KeepFirst()])

A checkpoint stays if at least one policy keeps it. ``Series.unkept`` says which others stay, whatever the policies say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Checkpoint", "KeepBest", "KeepEvery", "KeepLast", "KeepPolicy"]


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: the number in its name.
        path: its directory.
        saved_seconds: when it was committed, in seconds since 1970, by the clock of the file system.
        metrics: what the training loop said of it, such as ``{"loss": 2.31}``.
        provenance: with what it was made: git commit, digest of the configuration, versions, number of ranks.
    """

    step: int
    path: str
    saved_seconds: float = field(compare=False, default=0.0)
    metrics: Mapping[str, float] = field(compare=False, default_factory=dict)
    provenance: Mapping[str, Any] = field(compare=False, default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.path)


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


def _check_number(name: str, value: object) -> None:
    """Now, because a policy that fails when it is asked is only logged, and then nothing is ever removed."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1, and a whole number, got {value!r}")
