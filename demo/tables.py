"""Plain text tables. A column is as wide as its widest cell, and numbers are right-aligned."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["nbytes_in_words", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines. A column is right-aligned if all its cells start with a digit."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  " + "  ".join(padded).rstrip()

    rule = "  " + "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def nbytes_in_words(nbytes: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
