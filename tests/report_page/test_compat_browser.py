"""The page in a real browser: what it draws on a screen and on a phone, and that names stay text.

``make test-browser`` runs it. Chromium must be there. ``test_page`` holds that the page asks for nothing else.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.report_page.page import render_page
from robust_dcp.report_page.reading import Reports, read_reports
from tests.report_page.made_reports import hostile_reports, put_run

pytestmark = pytest.mark.compat

FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"

WITH_SCRIPT = """<script>
const $ = (which) => document.querySelector(which), press = (which, ...keys) => keys.forEach((key) =>
  $(which).dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true})));
setTimeout(() => { document.documentElement.dataset.found = JSON.stringify((() => {SCRIPT})()); }, 500);
</script>"""


def shown(reports: Reports, tmp_path: Path, script: str, width: int = 1280) -> Any:
    """What a script finds in the page, which is shown once as it is, and once with the script."""
    page, found = render_page(reports), None
    for text in (page, re.sub(r"<meta[^>]*Security-Policy[^>]*>", "", page) + WITH_SCRIPT.replace("SCRIPT", script)):
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "chromium")
        more = (f"--user-data-dir={tmp_path}/profile", f"--window-size={width},900", "--virtual-time-budget=5000")
        command = [browser, *FLAGS.split(), *more, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        assert 'data-ready="yes"' in done.stdout
        found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize(("world_size", "n_checkpoints", "width"), [(4, 12, 1280), (2048, 30, 1280), (2048, 30, 390)])
def test_all_ranks_are_drawn(world_size: int, n_checkpoints: int, width: int, tmp_path: Path) -> None:
    script = """
        const pixels = Object.fromEntries(["#timeline", "#heatmap", "#history"].map((chart) => { const c = $(chart);
          return [chart, c.getContext("2d").getImageData(0, 0, c.width, c.height).data]; }));
        const colours = (d) =>
          new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 4).join())).size;
        // A bar that is not chosen is drawn through: its pixels have the colour of its plan, and another alpha.
        const theme = getComputedStyle(document.documentElement), bars = pixels["#history"];
        const area = Object.fromEntries(["reused", "rebuilt", "other"].map((name) => {
          const hex = theme.getPropertyValue("--" + name).trim();
          const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
          let n = 0;
          for (let i = 0; i < bars.length; i += 4) {
            n += bars[i + 3] > 150 && wanted.every((value, at) => Math.abs(bars[i + at] - value) <= 2);
          }
          return [name, n];
        }));
        const marks = ["#heatmap", "#timeline", "#history", ".tree"].map((each) => Number($(each).dataset.marks));
        return [marks, Object.values(pixels).map(colours), $("#notices").innerText,
                document.documentElement.scrollWidth - innerWidth, area,
                [...$("#choice").options].map(({value}) => Number(value)).filter((place) => {
                  $("#choice").value = String(place);
                  $("#choice").dispatchEvent(new Event("change"));
                  return $("#tiles").textContent.includes("Loaded before it");
                }).sort((a, b) => a - b)];
    """
    reports = read_reports(put_run(tmp_path / "run", world_size, n_checkpoints))
    charts, colours, notices, sticks_out, area, loaded = shown(reports, tmp_path, script, width)
    heatmap, timeline, history, tree = charts
    # A save in seven comes after loads.
    assert (heatmap, history) == (world_size, 5 * n_checkpoints + n_checkpoints // 7) and tree > 20
    assert loaded == list(range(6, n_checkpoints, 7))
    assert area["reused"] > 500 and area["rebuilt"] > 50 and area["other"] < 50, area
    assert "Slow again and again" in notices
    # Four phases of each rank; the last rank that writes does not wait. Of 2048 ranks four share a line.
    lines = min(world_size, 512)
    assert timeline in (4 * lines - 1, 4 * lines)  # its times are rounded, so it may wait for 0.1 ms
    assert min(colours) > 4 and "waited for" in notices and sticks_out <= 0


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    script = """
        press("#timeline", "ArrowDown");
        return [document.querySelectorAll("img, [onerror]").length, document.title, $("#tip").innerText];
    """
    elements, title, tip = shown(hostile_reports(), tmp_path, script)
    assert elements == 0 and title != "owned" and "<img src=x" in tip
