"""Writes the table of promises in docs/reliability.md: what is promised, by which module, and in how many cases.

The tests are the source. A promise is the first sentence of the docstring of a module in ``tests/promises`` or
``tests/megatron/seeds``, and its cases are what pytest collects there. A test compares the page with the table.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FOLDERS = ("tests/promises", "tests/megatron/seeds")
_MARKED = re.compile(r"(<!-- promises: python scripts/promises.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def promise(module: str) -> str:
    """The first paragraph of a module's docstring, as Markdown."""
    words = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
    return " ".join(words.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def cases() -> Counter[str]:
    """How many cases pytest collects in each module."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *FOLDERS]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return Counter(line.partition("::")[0] for line in collected.splitlines() if "::" in line)


def modules() -> list[str]:
    """The modules that hold promises."""
    return sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))


def table(numbers: Mapping[str, int]) -> str:
    """The table, by name of the module."""
    rows = [f"| {promise(module)} | `{module}` | {numbers[module]} |" for module in modules()]
    return "\n".join(["", "| promise | test | cases |", "| --- | --- | --- |", *rows, "", ""])


def table_in_page() -> str:
    """The table that the page has now."""
    found = _MARKED.search(PAGE.read_text())
    return found[2] if found else ""


def cases_in_page() -> dict[str, int]:
    """The numbers in that table, by module."""
    return {module: int(number) for module, number in re.findall(r"`(tests/\S+)` \| (\d+) \|", table_in_page())}


if __name__ == "__main__":
    numbered = table(cases())
    PAGE.write_text(_MARKED.sub(lambda found: f"{found[1]}{numbered}{found[3]}", PAGE.read_text()))
