"""README.md is shown on PyPI too, where only absolute links lead anywhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()
HOME = "https://github.com/robust-dcp/robust-dcp/blob/main/"
RAW = "https://raw.githubusercontent.com/robust-dcp/robust-dcp/main/"


def links() -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)]+)\)", README)))


@pytest.mark.parametrize("link", links())
def test_a_link_is_absolute_and_leads_to_a_file_that_is_there(link: str) -> None:
    home = next((each for each in (HOME, RAW) if link.startswith(each)), None)
    assert home is not None
    path, _, anchor = link.removeprefix(home).partition("#")
    assert (ROOT / path).is_file()
    assert not anchor


def test_its_first_screen_installs_and_has_the_two_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    first_screen = "\n".join(lines[:40])
    for words in ("pip install robust-dcp", "robust_dcp.save(", "make demo", "make test"):
        assert words in first_screen
