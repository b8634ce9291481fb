"""Makes the HTML page of reports: what the page is told, within bounds, and how its files are joined.

Everything that comes from a report is data in a block of JSON. The scripts of the page put it into text nodes only, and
a content security policy allows no other script than these.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import msgspec

from robust_dcp.report import Modules, SavedReport, StructureDiff, shortened
from robust_dcp.report_page.reading import FoundReport, Reports
from robust_dcp.version import __version__

__all__ = ["render_page"]

_SCRIPTS: Final = (
    *("basics.js", "chart.js", "overview.js", "timeline.js", "heatmap.js"),
    *("history.js", "changes.js", "treemap.js", "main.js"),
)

# The bounds of the page. Reports that are older than these reach keep their place in the history.
_MOST_ROWS: Final = 40_000
_MOST_TREES: Final = 40
_MOST_KEYS: Final = 3000
_MOST_MODULES: Final = 500
_MOST_SKIPPED: Final = 100
_MOST_TEXTS: Final = 32
_LENGTH: Final = 400


def render_page(reports: Reports) -> str:
    """One HTML page that shows ``reports`` and loads nothing.

    It has a few megabytes at most. If there are many ranks and checkpoints, only the newest are shown rank by rank.
    """
    style = _file("page.css")
    script = "".join(f"// {name}\n{_file(name)}\n" for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    parts = {
        "@POLICY@": "; ".join(
            [
                "default-src 'none'",
                f"script-src '{_digest(script)}'",
                f"style-src '{_digest(style)}'",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        "@STYLE@": style,
        "@SCRIPT@": script,
        "@DATA@": _data_block(_page_data(reports)),
    }
    # One pass, so that nothing is put into what was put in before.
    return re.sub("@[A-Z]+@", lambda mark: parts.get(mark[0], mark[0]), _file("page.html"))


def _file(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_block(data: object) -> str:
    """JSON that cannot end the element that it stands in, whatever its strings are."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _page_data(reports: Reports) -> dict[str, Any]:
    budget = _Budget()
    saves = [_save(each, budget) for each in reversed(reports.found)]
    return {
        "path": _short(reports.path),
        "version": __version__,
        "trees": budget.trees,
        "saves": saves[::-1],
        "n_skipped": len(reports.skipped),
        "skipped": [{"name": _short(e.name), "reason": _short(e.reason)} for e in reports.skipped[:_MOST_SKIPPED]],
    }


class _Budget:
    """What may still go into the page. The newest report is asked for first."""

    def __init__(self) -> None:
        self.rows = _MOST_ROWS
        self.keys = _MOST_KEYS
        self.trees: list[Any] = []
        self._places: dict[Modules, int] = {}

    def tree(self, modules: Modules | None) -> int | None:
        """The place of a tree among those of the page. Checkpoints of one model share theirs."""
        if modules is None:
            return None
        if modules not in self._places:
            if len(self.trees) == _MOST_TREES:
                return None
            self._places[modules] = len(self.trees)
            n_rows = min(len(modules.name), _MOST_MODULES)
            self.trees.append(
                {
                    "name": [shortened(name, 100) for name in modules.name[:n_rows]],
                    "parent": modules.parent[:n_rows],
                    "nbytes": modules.nbytes[:n_rows],
                }
            )
        return self._places[modules]


def _save(found: FoundReport, budget: _Budget) -> dict[str, Any]:
    report = found.report
    return {
        "name": _short(found.name),
        "checkpoint": _short(report.checkpoint),
        "save_id": report.save_id,
        "at": report.saved_at_seconds,
        "seconds": report.seconds,
        "nbytes": report.total_nbytes,
        "world_size": report.world_size,
        "is_async": report.is_async,
        "versions": {_short(name): _short(version) for name, version in list(report.versions.items())[:8]},
        "phases": [[_short(phase.name), phase.seconds] for phase in report.phases[:8]],
        "outcome": shortened(report.plan.outcome, 20),
        "reason": _short(report.plan.reason),
        "changes": _changes(report.plan.changes, budget),
        "n_nodes": len(report.nodes),
        "stragglers": [
            [each.rank, _short(each.node), _short(each.phase), each.seconds, each.median_seconds]
            for each in report.stragglers[:_MOST_TEXTS]
            if math.isfinite(each.seconds) and math.isfinite(each.median_seconds)
        ],
        "waits": _texts(report.waits),
        "fallbacks": _texts(report.fallbacks),
        "ranks": _ranks(report, budget),
        "tree": budget.tree(report.modules),
    }


def _changes(changes: StructureDiff | None, budget: _Budget) -> dict[str, Any] | None:
    if changes is None:
        return None
    shown: dict[str, Any] = {}
    for name in ("added", "removed", "changed"):
        keys: Any = getattr(changes, name)
        pairs = list(keys.items()) if isinstance(keys, dict) else [(key, "") for key in keys]
        shown[f"n_{name}"] = len(pairs)
        pairs = pairs[: max(budget.keys, 0)]
        budget.keys -= len(pairs)
        shown[name] = [[_short(key), _short(how)] for key, how in pairs]
    return shown


def _ranks(report: SavedReport, budget: _Budget) -> dict[str, Any] | None:
    """The columns of ranks, if there is room for them. Of the newest report as many as there is room for."""
    ranks = report.ranks
    if not len(ranks) or (len(ranks) > budget.rows and budget.rows < _MOST_ROWS):
        return None
    rows = range(min(len(ranks), _MOST_ROWS))
    budget.rows -= len(rows)
    used = sorted({ranks.how[row] for row in rows})
    ways = {way: place for place, way in enumerate(used[:_MOST_TEXTS])}
    return {
        "rank": _taken(ranks.rank, rows),
        "node": _taken(ranks.node, rows),
        "nodes": [shortened(node, 64) for node in report.nodes],
        "plan": [round(ranks.plan_seconds[row], 4) for row in rows],
        "stage": [round(ranks.stage_seconds[row], 4) for row in rows],
        "write": [round(ranks.write_seconds[row], 4) for row in rows],
        "nbytes": _taken(ranks.nbytes, rows),
        "files": _taken(ranks.files, rows),
        "how": [ways.get(ranks.how[row], -1) for row in rows],
        "ways": ["; ".join(_texts(report.ways[way])) for way in ways],
    }


def _taken(column: Sequence[int], rows: Sequence[int]) -> list[int]:
    return [column[row] for row in rows]


def _texts(texts: Sequence[str]) -> list[str]:
    return [_short(text) for text in texts[:_MOST_TEXTS]]


def _short(text: str) -> str:
    return shortened(text, _LENGTH)
