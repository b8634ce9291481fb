"""What commands print: tables for people, lines with tabs for other programs, and JSON on request.

A checkpoint is hostile input. Its names may hold escape sequences that change a terminal's title or hide lines. So
every text goes through :func:`safe_text`, and none is read as markup.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Protocol

import msgspec
import typer

__all__ = ["CommandFailed", "Json", "Output", "number", "safe_text", "size"]


class ShowProgress(Protocol):
    """Moves a progress bar."""

    def __call__(self, done_nbytes: int, total_nbytes: int | None = None) -> None: ...


class CommandFailed(Exception):
    """A command cannot do its work. The message says why, and what to do. The process exits with 2."""


def _ask_for_json(value: bool) -> bool:
    Output.as_json = value
    return value


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.", callback=_ask_for_json, is_eager=True)
]
"""The option ``--json`` of every command."""


class Output:
    """Where this process prints to. A command either puts one JSON object, or says and shows things.

    Attributes:
        as_json: whether the user has asked for JSON. Then :meth:`say` and :meth:`table` print nothing.
    """

    as_json: ClassVar[bool] = False

    @classmethod
    def put(cls, value: Any) -> None:
        """Print one JSON object, if that was asked for."""
        if cls.as_json:
            sys.stdout.write(_as_json(msgspec.to_builtins(value, enc_hook=str)) + "\n")
            sys.stdout.flush()

    @classmethod
    def say(cls, text: str = "") -> None:
        """Print a line, at once."""
        if not cls.as_json:
            print(safe_text(text), flush=True)

    @classmethod
    def note(cls, text: str) -> None:
        """Print a line for people. Where another program reads the output, it goes to stderr, beside the data."""
        if not cls.as_json:
            print(safe_text(text), file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)

    @classmethod
    @contextmanager
    def progress(cls, what: str, total_nbytes: int) -> Iterator[ShowProgress]:
        """A bar with the rate, on stderr, while the block runs. It is shown only in a terminal.

        Yields:
            A function that is told how many bytes are done so far, and how many there are if that is known by then.
        """

        def ignore(done_nbytes: int, total_nbytes: int | None = None) -> None:
            pass

        if cls.as_json or not sys.stderr.isatty():
            yield ignore
            return
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(safe_text(what), total=total_nbytes)

            def show(done_nbytes: int, total_nbytes: int | None = None) -> None:
                bar.update(task, completed=done_nbytes, total=total_nbytes)

            yield show

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
        texts = ([safe_text("" if value is None else str(value)) for value in row] for row in rows)
        if not sys.stdout.isatty():
            for row in ([*columns], *texts):
                print("\t".join(row))
            return
        # Here, because a program that reads our output need not wait for it.
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in texts:
            table.add_row(*map(Text, row))
        Console(highlight=False).print(table)


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.format(msgspec.json.encode(value)).decode()
    except UnicodeEncodeError:  # a name of a file that is no UTF-8: its bytes stand as "\udcff"
        return json.dumps(_without_nan(value), indent=2)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def safe_text(text: str) -> str:
    """``text`` with control characters spelled out: a line break as ``\\n``, an escape as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    power = 0
    while abs(nbytes) >= 1024 and power < 4:
        nbytes /= 1024
        power += 1
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def number(value: int, what: str) -> str:
    """``(1, "file")`` -> ``"1 file"``, ``(1200, "file")`` -> ``"1,200 files"``."""
    return f"{value:,} {what}{'' if value == 1 else 's'}"
