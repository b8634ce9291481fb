"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Final

from robust_dcp.cli.output import CommandFailed
from robust_dcp.storage.files.paths import is_url

_FILE_URL: Final = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_SIZE: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]?)(?P<binary>i?)[bB]?(?:/s)?")
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def place(text: str) -> str:
    """A path or a URL. A path may be written as ``file:///path``."""
    return _FILE_URL.sub("", text.strip(), count=1) if is_url(text) else text


def local_path(text: str) -> str:
    """A path, which may be written as ``file:///path``.

    Raises:
        CommandFailed: it is a place in a store.
    """
    path = place(text)
    if is_url(path):
        raise CommandFailed(
            f"{text} is a URL, and this command takes directories of mounted file systems: copy the checkpoint to one "
            "with robust-dcp copy, or from one"
        )
    return path


def nbytes_in(text: str) -> float:
    """``"500MB"`` -> 500,000,000; ``"1.5GiB"`` -> 1,610,612,736.

    Raises:
        CommandFailed: it is no size.
    """
    size = _SIZE.fullmatch(text.strip())
    number = 0.0 if size is None else float(size["number"])
    if size is None or number <= 0:
        raise CommandFailed(f"{text!r} is no size: write a number and a unit, for example 500MB or 1GiB")
    return number * float((1024 if size["binary"] else 1000) ** _POWERS[size["unit"]])


def number_in(kind: type[int] | type[float], least: float, most: float | None = None) -> Callable[[str], float]:
    """A number within bounds."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return number


def pair(text: str) -> tuple[str, str]:
    """``"model.*=*"`` -> ``("model.*", "*")``."""
    left, _, right = text.partition("=")
    if not left or not right:
        raise argparse.ArgumentTypeError(f"{text}: write two sides with = between them, for example 'model.*=*'")
    return left, right
