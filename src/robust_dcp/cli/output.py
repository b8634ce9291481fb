"""What commands print: tables for people, lines with tabs for other programs, and JSON on request.

A checkpoint is hostile input. Its names may hold escape sequences that change a terminal's title or hide lines. So
every text goes through :func:`safe_text`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, TextIO

import msgspec

from robust_dcp.hooks import ProgressLine
from robust_dcp.report import sizes_in_words

size: Final = sizes_in_words

FOUND: Final = 1
"""The exit code of a command that did its work and found a problem or a difference."""

CANNOT: Final = 2
"""That of a command that could not do all of its work."""

_JSON_VERSION: Final = 1
_WIDTH: Final = 100
_LEAST_WIDTH: Final = 16


class CommandFailed(Exception):
    """A command cannot do its work, and the process exits with 2. The message says why, and what to do; ``usage`` how
    the command is meant."""

    def __init__(self, message: str, usage: str = "") -> None:
        super().__init__(message)
        self.usage = usage


class Output:
    """Where this process prints to. A command either puts one JSON object, or says and shows things.

    Attributes:
        as_json: whether the user has asked for JSON. Then :meth:`say` and :meth:`table` print nothing.
        cleans_up: whether Ctrl-C is to raise ``KeyboardInterrupt``, because something has to be cleaned up.
    """

    as_json: ClassVar[bool] = False
    cleans_up: ClassVar[bool] = False

    @classmethod
    @contextmanager
    def cleaning_up(cls) -> Iterator[None]:
        """Let Ctrl-C raise ``KeyboardInterrupt`` in the block."""
        cls.cleans_up = True
        try:
            yield
        finally:
            cls.cleans_up = False

    @classmethod
    def put(cls, value: dict[str, Any]) -> None:
        """Print one JSON object, if that was asked for. Its ``version`` changes when a field changes its meaning."""
        if cls.as_json:
            # In names of files that are no UTF-8, bytes stand as "\udcff". msgspec would refuse them.
            plain = _without_nan(msgspec.to_builtins(value, enc_hook=str))
            _print(json.dumps({"version": _JSON_VERSION, **plain}, indent=2))

    @classmethod
    def say(cls, text: str = "") -> None:
        """Print a line, at once."""
        if not cls.as_json:
            _print(safe_text(text))

    @classmethod
    def note(cls, text: str) -> None:
        """Print a line for people. Where another program reads the output, it goes to stderr, beside the data."""
        if not cls.as_json:
            _print(safe_text(text), sys.stdout if sys.stdout.isatty() else sys.stderr)

    @classmethod
    @contextmanager
    def progress(cls, what: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
        """A bar with the rate, on stderr, while the block runs. It is shown only in a terminal.

        Yields:
            A function that is told how many bytes are done so far, and how many there are.
        """
        line = ProgressLine(safe_text(what)) if is_shown and not cls.as_json and sys.stderr.isatty() else None
        try:
            yield (lambda done_nbytes, total_nbytes: None) if line is None else line.show
        finally:
            if line is not None:
                line.clear()

    @classmethod
    def table(cls, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
        """Print a table in a terminal, and lines with tabs between the values elsewhere.

        Args:
            columns: their titles. The first line has them, in both forms.
            rows: one value for each column; ``None`` is left empty.
            right: titles of columns whose values end at the right, such as numbers.
        """
        if cls.as_json:
            return
        lines = [[*columns], *([safe_text("" if value is None else str(value)) for value in row] for row in rows)]
        if not sys.stdout.isatty():
            _print("\n".join(map("\t".join, lines)))
            return
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        while (more := sum(widths) + 2 * (len(widths) - 1) - cls.width()) > 0:
            widest = max((place for place, name in enumerate(columns) if name not in right), key=widths.__getitem__)
            if widths[widest] <= _LEAST_WIDTH:
                break  # then lines wrap
            widths[widest] = max(widths[widest] - more, _LEAST_WIDTH)
        for line in lines:
            cells = zip(map(_cut, line, widths), widths, columns, strict=True)
            aligned = (text.rjust(width) if name in right else text.ljust(width) for text, width, name in cells)
            _print("  ".join(aligned).rstrip())

    @staticmethod
    def width() -> int:
        """How many columns the terminal has; 100 where there is none."""
        return shutil.get_terminal_size((_WIDTH, 24)).columns


def _cut(text: str, width: int) -> str:
    """``text`` without its middle, if it is too long: names differ at their ends."""
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - half]}…{text[-half:]}"


def _print(text: str, stream: TextIO | None = None) -> None:
    """Print at once, to stdout by default. If nobody reads on, as in ``robust-dcp verify … | head``, the command goes
    on without a word: its exit code still says what it has found."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def safe_text(text: str) -> str:
    """``text`` with control characters spelled out: a line break as ``\\n``, an escape as ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def number(value: int, what: str) -> str:
    """``(1, "file")`` -> ``"1 file"``, ``(1200, "file")`` -> ``"1,200 files"``."""
    return f"{value:,} {what}{'' if value == 1 else 's'}"


def age(seconds: float) -> str:
    """How long ago a time was: ``"3 min ago"``."""
    passed = max(0.0, time.time() - seconds)
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if passed < limit:
            return f"{passed / divisor:.0f} {unit} ago"
    return f"{passed / 86400:.0f} days ago"
