"""What pages say of figures and promises is what scripts have made of measurements and tests."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import DOCS, ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = script("figures")
MEASURED = json.loads((DOCS / "figures.json").read_text())


@pytest.mark.parametrize("page", FIGURES.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_figures(page: Path) -> None:
    text = page.read_text()
    assert "<!-- figures:" in text
    assert text == FIGURES.with_tables(text, MEASURED), "run `make docs`"


def test_the_pictures_are_those_of_the_figures() -> None:
    for name, content in FIGURES.pictures(MEASURED).items():
        assert (DOCS / name).read_text() == content, "run `make docs`"


def test_the_table_of_promises_is_that_of_the_tests() -> None:
    page = (DOCS / "reliability.md").read_text()
    assert "<!-- promises:" in page
    assert page == script("promises").with_table(page), "run `make docs`"
