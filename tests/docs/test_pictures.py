"""The pictures are those that docs/pictures/draw.py draws, and show figures that the documents have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS

PICTURES = DOCS / "pictures"


def bars() -> list[dict[str, Any]]:
    charts = json.loads((PICTURES / "figures.json").read_text()).values()
    return [bar for chart in charts for group in chart["groups"] for bar in group["bars"]]


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PICTURES / "draw.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in PICTURES.glob("*.svg")}, "run `make docs`"


@pytest.mark.parametrize("bar", bars(), ids=lambda bar: f"{bar['who']} {bar['value']}")
def test_a_bar_shows_a_figure_of_the_performance_page(bar: dict[str, Any]) -> None:
    rows = [line for line in (DOCS / "performance.md").read_text().splitlines() if line.startswith(bar["row"])]
    assert any(bar["value"] in line.replace("|", " ").split() for line in rows), f"{bar['row']} has no {bar['value']}"
