"""The table in docs/megatron.md of all that is replaced; run it to write the table anew.

python -m tests.megatron.patch_table
"""

from __future__ import annotations

from pathlib import Path

from robust_dcp.installation import PATCHES

__all__ = ["DOCUMENT", "table", "table_in_document"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "megatron.md"

_BEGIN = "<!-- patches: python -m tests.megatron.patch_table writes this table, and a test compares -->\n"
_END = "<!-- end of patches -->\n"


def table() -> str:
    """Each module and its attributes, in the order of the table; optional ones in parentheses."""
    rows: dict[str, list[str]] = {}
    for patch in PATCHES:
        shown = f"(`{patch.name}`)" if patch.optional else f"`{patch.name}`"
        if shown not in rows.setdefault(patch.module, []):
            rows[patch.module].append(shown)
    lines = [f"| `{module}` | {', '.join(names)} |" for module, names in rows.items()]
    return "\n".join(["| module | attributes; in parentheses: optional |", "| --- | --- |", *lines, ""])


def table_in_document() -> str:
    """What the document shows now."""
    return DOCUMENT.read_text().partition(_BEGIN)[2].partition(_END)[0]


if __name__ == "__main__":
    before, begin, rest = DOCUMENT.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{before}{begin}{table()}{_END}{after}")
