"""The environment variables of robust_dcp: their names, and what each may be.

A job that asks for robust_dcp by a mistyped value would train for hours without it. So a value that nobody can
understand ends the process at ``import torch``. This module needs the standard library only, because it is asked there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["VARIABLES", "check", "value_of"]

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")


def switch(text: str) -> bool:
    if text.lower() not in _ON + _OFF:
        raise ValueError("one of 1, true, yes, on, 0, false, no, off")
    return text.lower() in _ON


def whole_number(text: str) -> int:
    # int() would also accept " +1_0 " and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) > 0):
        raise ValueError("a whole number from 1 on")
    return int(text)


def positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ValueError("a positive number of seconds")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


VARIABLES: Final[Mapping[str, Callable[[str], Any]]] = {
    "ROBUST_DCP": switch,
    "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": positive_seconds,
    "ROBUST_DCP_KEEP_STAGING": switch,
    "ROBUST_DCP_PROGRESS": switch,
    "ROBUST_DCP_RANKS_PER_NODE": whole_number,
    "ROBUST_DCP_SAVE_FAILURE": _one_of("raise", "warn"),
    "ROBUST_DCP_STAGING": str,
    "ROBUST_DCP_TRUSTED": switch,
    "ROBUST_DCP_WRITER_THREADS": whole_number,
}
"""By name: what makes a value of the text. Its ``ValueError`` says what the text may be."""


def value_of(variable: str, environment: Mapping[str, str] = os.environ) -> Any:
    """The value of a variable; ``None`` if it is not set, or empty.

    Raises:
        ValueError: it has a value that makes no sense. The message says which, what is expected and what was found.
    """
    text = environment.get(variable, "")
    if not text:
        return None
    try:
        return VARIABLES[variable](text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r} in the environment: expected {error}") from None


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Look at all variables.

    Raises:
        ValueError: as :func:`value_of`, for the first one that makes no sense.
    """
    for variable in VARIABLES:
        value_of(variable, environment)
