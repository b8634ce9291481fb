"""Writes the list of promises in docs/reliability.md: what is promised, and by which module.

The tests are the source. A promise is the first sentence of the docstring of a module in ``tests/promises`` or
``tests/megatron/seeds``. A test compares the page with the list.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FOLDERS = ("tests/promises", "tests/megatron/seeds")
_MARKED = re.compile(r"(<!-- promises: python scripts/promises.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def promise(module: str) -> str:
    """The first paragraph of a module's docstring, as Markdown."""
    words = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
    return " ".join(words.split("\n\n")[0].split()).replace("``", "`")


def modules() -> list[str]:
    """The modules that hold promises."""
    return sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))


def listed() -> str:
    """The list, by name of the module."""
    return "\n".join(["", *(f"* {promise(module)} `{module}`" for module in modules()), "", ""])


def with_table(page: str) -> str:
    """The text of a page with the list as it is now."""
    return _MARKED.sub(lambda found: f"{found[1]}{listed()}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
