"""README, and what other files at the root say: links lead to files, and the first screen says what a reader needs."""

from __future__ import annotations

import re

import pytest

import robust_dcp
from robust_dcp import megatron
from robust_dcp.storage.index.form import SECTIONS
from tests.docs.pages import DOCS, PAGES, ROOT

README = (ROOT / "README.md").read_text()
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]


def links() -> list[tuple[str, str]]:
    found = {(page, link) for page in LINKING for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())}
    return sorted((str(page.relative_to(ROOT)), link) for page, link in found if "://" not in link)


@pytest.mark.parametrize(("page", "link"), links())
def test_a_link_leads_to_a_file_and_a_heading_that_are_there(page: str, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.is_file()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors


def test_no_page_names_a_package_index_or_a_repository_that_is_not_there() -> None:
    for page in [*LINKING, ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        assert not re.search(r"pip install '?robust-dcp|github\.(com|io)/robust-dcp", page.read_text()), page


def test_its_first_screen_says_what_it_is_and_how_to_switch_it_on_and_off() -> None:
    lines = README.splitlines()
    assert len(lines) <= 80
    assert "never on a cluster" in lines[3]
    first_screen = "\n".join(lines[:20])
    for words in ("pip install .", "ROBUST_DCP=1", "--ckpt-planner robust_dcp", "ROBUST_DCP=0", "pip uninstall"):
        assert words in first_screen


def test_there_are_twelve_pages_and_they_stay_short() -> None:
    pages = {page.name for page in DOCS.glob("*.md")} - {"api.md", "index.md"}
    assert len(pages) == 12
    texts = [re.sub(r"<!-- figures:.*?<!-- end -->", "", (DOCS / name).read_text(), flags=re.DOTALL) for name in pages]
    words = [word for text in texts for word in text.split()]
    assert len([word for word in words if re.search(r"\w", word)]) <= 15_000


def test_a_program_that_a_page_names_is_there() -> None:
    named = {
        name for page in LINKING for name in re.findall(r"python -m ((?:benchmarks|torture)\.\w+)", page.read_text())
    }
    assert len(named) > 8
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in named)


def test_the_page_on_formats_has_the_sections_of_the_index() -> None:
    page = (DOCS / "formats.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)`: (\w\d)", page, re.MULTILINE))
    assert shown == {name: kind[1:] for name, kind in SECTIONS.items()}
    assert f"number of sections, {len(SECTIONS)} " in page


def test_what_the_page_for_contributors_names_is_there() -> None:
    page = (DOCS / "contributing.md").read_text()
    sources = ROOT / "src" / "robust_dcp"
    for path in set(re.findall(r"`([\w/]+\.(?:py|md|toml|txt))`", page)):
        assert any((base / path).exists() for base in (ROOT, sources)), path
    classes = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    defined = {
        name for source in sources.rglob("*.py") for name in re.findall(r"^class (\w+)", source.read_text(), re.M)
    }
    assert len(classes) > 5 and set(classes) <= defined


SHOWN = set(re.findall(r"^::: robust_dcp\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))


NAMES = {*robust_dcp.__all__, *(f"megatron.{name}" for name in megatron.__all__)} - {"__version__"}


def test_every_public_name_is_in_the_api_reference() -> None:
    assert set() == NAMES - SHOWN
