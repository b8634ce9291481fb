"""The page in a real browser: what it draws, in light and dark and on a phone, without an error and without network.

Run it by ``make test-browser``, which installs the client of the browser. Chromium itself must be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from robust_dcp.report_page import Reports, read_reports, render_page
from tests.report_page.made_reports import hostile_reports, put_run

if TYPE_CHECKING:
    from tests.report_page.browser import Page

pytestmark = pytest.mark.compat

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(244, 245, 247)", "rgb(16, 20, 27)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    from tests.report_page.browser import browser

    with browser() as opened:
        yield opened


def put(tmp_path: Path, reports: Reports) -> Path:
    file = tmp_path / "report.html"
    file.write_text(render_page(reports), encoding="utf-8")
    return file


def marks(page: Page, which: str) -> int:
    return int(page.value(f"document.querySelector('{which}').dataset.marks"))


def check_quiet(page: Page, file: Path) -> None:
    assert page.complaints == []
    assert page.requests == [file.as_uri()]


@pytest.mark.parametrize(("world_size", "n_checkpoints"), [(4, 12), (2048, 30)])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_all_ranks_are_drawn_without_an_error_and_without_network(
    world_size: int, n_checkpoints: int, scheme: str, width: int, page: Page, tmp_path: Path
) -> None:
    file = put(tmp_path, read_reports(put_run(tmp_path / "run", world_size, n_checkpoints)))
    page.show(file, width=width, scheme=scheme)
    check_quiet(page, file)
    assert page.value(BACKGROUND) == (LIGHT if scheme == "light" else DARK)
    assert page.value("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert marks(page, "#heatmap") == world_size
    # Four phases of each rank; the last rank that writes does not wait. Of 2048 ranks four share a line.
    lines = min(world_size, 512)
    assert marks(page, "#timeline") in (4 * lines - 1, 4 * lines)  # its times are rounded, so it may wait for 0.1 ms
    assert marks(page, "#history") == 3 * n_checkpoints
    assert marks(page, ".tree") > 20
    assert "waited for" in page.value("document.querySelector('#notices').innerText")
    drawn = "(() => { const c = document.querySelector('#%s'); const d = c.getContext('2d').getImageData(0, 0, "
    drawn += "c.width, c.height).data; return new Set(Array.from({length: d.length / 4}, (_, i) => "
    drawn += "d.slice(4 * i, 4 * i + 4).join())).size; })()"
    assert all(page.value(drawn % chart) > 4 for chart in ("timeline", "heatmap", "history"))


def test_the_button_changes_the_colours_and_a_bar_the_checkpoint(page: Page, tmp_path: Path) -> None:
    file = put(tmp_path, read_reports(put_run(tmp_path / "run", 4, 5)))
    page.show(file)
    found = []
    for _ in range(3):
        page.value("document.querySelector('#theme').click()")
        found.append(page.value(BACKGROUND))
    assert found == [LIGHT, DARK, LIGHT]  # light, dark, and as the system has it
    page.value("document.querySelector('#older').click()")
    assert page.value("document.querySelector('#choice').selectedOptions[0].text") == "step_400"
    assert "step_400" in page.value("document.querySelector('#timeline-lead').textContent")
    page.value("document.querySelector('#history').focus()")
    for key in ("Home", "ArrowRight", "Enter"):
        page.press(key)
    assert page.value("document.querySelector('#choice').selectedOptions[0].text") == "step_200"
    assert page.value("document.querySelector('#said').textContent").startswith("step_200: saved 2026-")
    check_quiet(page, file)


def test_ranks_and_modules_are_reached_by_the_keyboard(page: Page, tmp_path: Path) -> None:
    file = put(tmp_path, read_reports(put_run(tmp_path / "run", 16, 2)))
    page.show(file)
    page.value("document.querySelector('#timeline').focus()")
    for _ in range(4):
        page.press("ArrowDown")
    assert page.value("document.querySelector('#said').textContent").startswith("Rank 3: node gpu-0000")
    page.value("document.querySelector('#heatmap').focus()")
    page.press("End")
    assert page.value("document.querySelector('#tip').innerText").startswith("Rank 15")
    page.press("Escape")
    assert page.value("document.querySelector('#tip').hidden") is True
    page.value("document.querySelector('.tree button').click()")
    assert page.value("[...document.querySelectorAll('#treemap-crumbs button')].map((each) => each.textContent)") == [
        "checkpoint",
        "optimizer",
    ]
    check_quiet(page, file)


def test_hostile_names_stay_text(page: Page, tmp_path: Path) -> None:
    file = put(tmp_path, hostile_reports())
    page.show(file)
    page.value("document.querySelector('#timeline').focus()")
    page.press("ArrowDown")
    assert page.value("document.querySelectorAll('img, [onerror], body script').length") == 2  # its data and its script
    assert page.value("document.title") != "owned"
    assert page.value("document.querySelector('#tip').innerText.includes('<img src=x')") is True
    check_quiet(page, file)
