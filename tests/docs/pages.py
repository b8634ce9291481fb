"""The pages that users read, and the code blocks in them.

Owns where pages lie and how blocks are found (by Sybil, so that an error names page and line). Asked by the tests here.
"""

from __future__ import annotations

import re
from pathlib import Path

from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

__all__ = ["DOCS", "PAGES", "ROOT", "blocks_of"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])

# What stands behind the language, such as a title, is for the site.
_find_blocks = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[a-z]+)(?P<title>[^\n]*)\n"))


def blocks_of(page: Path, language: str) -> list[Example]:
    """The blocks of one language, in order. All examples of a page share one namespace."""

    def regions(document: Document) -> list[Region]:
        found = [region for region in _find_blocks(document) if region.lexemes["language"] == language]
        for region in found:
            region.parsed = region.lexemes["source"]
            region.evaluator = lambda example: None  # the tests decide what is done with a block
        return found

    return list(Document.parse(str(page), regions).examples())
