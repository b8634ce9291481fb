"""A bar for commands that take long, on standard error and only in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bytes_bar"]


@contextmanager
def bytes_bar(what: str, total_nbytes: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that advances the bar by a number of bytes."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_nbytes)
        yield lambda nbytes: progress.advance(task, nbytes)
