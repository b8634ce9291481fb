"""Lets the site of docs/ begin with README.md. MkDocs calls it (``hooks`` in mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """The text of a page: that of the first one is the README, whose links begin at the root of the repository."""
    return README.read_text().replace("](docs/", "](") if page.file.src_uri == "index.md" else markdown
