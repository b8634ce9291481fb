"""The page holds what reports say, within bounds, and nothing in a report can become markup.

``test_compat_browser`` looks at the page in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from robust_dcp.report_page.page import render_page
from robust_dcp.report_page.reading import FoundReport, Reports, read_reports
from tests.report_page.made_reports import HOSTILE, hostile_reports, made_report, put_run

MOST_NBYTES = 4_000_000


class Elements(HTMLParser):
    """The elements of a page, and the text in those whose text is not markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


def data_of(page: str) -> dict[str, Any]:
    return msgspec.json.decode(Elements(page).texts["data"], type=dict[str, Any])


def test_the_page_loads_nothing_and_allows_only_its_own_script_and_style(tmp_path: Path) -> None:
    page = render_page(read_reports(put_run(tmp_path, 4, 6)))
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "img", "object", "embed") and attributes.get("href", "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset")]
    (policy,) = [at["content"] for _, at in elements.found if at.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, text in (("script", elements.texts["script"]), ("style", elements.texts["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|@import|url\(|innerHTML|insertAdjacentHTML|document\.write|\beval\(", page)


def test_names_in_reports_are_inert() -> None:
    innocent = render_page(Reports("/run", (FoundReport("step_1", made_report(100, 4)),)))
    page = render_page(hostile_reports("\u2028@SCRIPT@ @DATA@ <!-- <script>"))
    assert Elements(page).found[7:] == Elements(innocent).found[7:]  # the policy is the same, too
    assert page.count("</script>") == innocent.count("</script>") and HOSTILE not in page
    (save,) = data_of(page)["saves"]
    assert (save["name"], save["checkpoint"], save["waits"][0]) == (HOSTILE, HOSTILE, HOSTILE)


@pytest.mark.parametrize(("world_size", "n_checkpoints"), [(4, 300), (256, 60), (2048, 40)])
def test_the_page_has_a_bounded_size(world_size: int, n_checkpoints: int) -> None:
    one = made_report(500, world_size, slow=(3,))
    found = [FoundReport(str(n), msgspec.structs.replace(one, saved_at_seconds=n)) for n in range(n_checkpoints)]
    page = render_page(Reports("/run", tuple(found)))
    assert len(page) < MOST_NBYTES
    saves = data_of(page)["saves"]
    assert len(saves) == n_checkpoints
    assert len(saves[-1]["ranks"]["rank"]) == world_size
    assert saves[-1]["stragglers"][0]["rank"] == 3
