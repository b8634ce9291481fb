"""Reports are found, or skipped with a reason, and the page holds what they say, within bounds; none can become markup.

``test_compat_browser`` looks at the page in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from robust_dcp.report import REPORT_NAME, VERSION, encode_report
from robust_dcp.report_page.page import render_page
from robust_dcp.report_page.reading import FoundReport, NoReports, Reports, read_reports
from tests.report_page.made_reports import HOSTILE, hostile_reports, made_report, put_report, put_run

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


def test_the_reports_of_a_run_are_in_the_order_of_their_saves(tmp_path: Path) -> None:
    put_run(tmp_path, 2, 12)
    put_report(tmp_path / "other" / "step_5", made_report(5, 2))
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["other/step_5", *(f"step_{100 * n}" for n in range(1, 13))]
    (alone,) = read_reports(tmp_path / "step_300").found
    assert (alone.name, alone.report.checkpoint) == ("step_300", "/checkpoints/run/step_300")


def _changed(change: Callable[[Any], object]) -> bytes:
    document = msgspec.json.decode(encode_report(made_report(7, 4)))
    change(document)
    return msgspec.json.encode(document)


BAD: dict[str, tuple[bytes, str]] = {
    "torn": (encode_report(made_report(7, 4))[:500], "no report of a save"),
    "nested": (b"[" * 200_000, "no report of a save"),
    "newer": (_changed(lambda document: document.update(version=VERSION + 1)), "that this robust_dcp knows"),
    "uneven": (_changed(lambda document: document["ranks"].update(nbytes=[1, 2])), "ranks.nbytes has 2 rows"),
    "no node": (_changed(lambda document: document["ranks"].update(node=[0, 0, 0, 9])), "node without a name"),
    "loop": (_changed(lambda document: document["modules"].update(parent=[-1, 2, 1])), "uneven columns"),
    "another save": (encode_report(made_report(8, 4)), "of another save"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_report_that_is_not_believed_is_skipped_by_name(what: str, tmp_path: Path) -> None:
    data, reason = BAD[what]
    put_report(tmp_path / "good", made_report(6, 4))
    bad = put_report(tmp_path / "bad", made_report(7, 4))
    (bad / REPORT_NAME).write_bytes(data)
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["good"]
    (skipped,) = found.skipped
    assert skipped.name == "bad" and reason in skipped.reason
    assert '"n_skipped":1' in render_page(found)
    with pytest.raises(NoReports, match=re.escape(reason)):
        read_reports(bad)


def test_a_file_that_is_no_plain_file_or_far_too_long_is_not_read(tmp_path: Path) -> None:
    good = put_report(tmp_path / "good", made_report(6, 4)) / REPORT_NAME
    for name, put in (("pipe", os.mkfifo), ("directory", os.mkdir), ("link", lambda path: os.symlink(good, path))):
        report = put_report(tmp_path / name, made_report(7, 4)) / REPORT_NAME
        report.unlink()
        put(report)
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["good"]
    assert [each.name for each in found.skipped] == ["directory", "link", "pipe"]
    os.truncate(good, 20 << 30)
    with pytest.raises(NoReports, match=r"has more than \d+ bytes, so it is no report"):
        read_reports(tmp_path / "good")
    metadata = put_report(tmp_path / "alone", made_report(7, 4)) / ".metadata"
    for change, reason in ((os.unlink, "no checkpoint is committed there"), (os.mkfifo, "metadata is no regular file")):
        change(metadata)
        with pytest.raises(NoReports, match=reason):
            read_reports(metadata.parent)


def test_where_nothing_can_be_shown_the_error_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(NoReports, match="no checkpoint lies there"):
        read_reports(tmp_path)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / ".metadata").write_bytes(b"stock")
    with pytest.raises(NoReports, match="step_1: it has no report: another program saved it"):
        read_reports(tmp_path)
