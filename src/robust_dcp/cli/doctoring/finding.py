"""One finding of ``robust-dcp doctor``."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "State", "ok", "problem", "warning"]


class State(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What was looked at.

    Attributes:
        state: whether something should be done.
        name: what was looked at.
        found: what it is like.
        advice: what to do; empty if nothing.
    """

    state: State
    name: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(State.OK, name, found)


def warning(name: str, found: str, advice: str) -> Finding:
    """It works, and could be better or may surprise."""
    return Finding(State.WARNING, name, found, advice)


def problem(name: str, found: str, advice: str) -> Finding:
    """A save or a load will fail, or its promises do not hold."""
    return Finding(State.PROBLEM, name, found, advice)
