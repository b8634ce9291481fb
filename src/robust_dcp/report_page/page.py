"""Makes the HTML page of reports: what the page is told, within bounds, and how its files are joined.

Everything that comes from a report is data in a block of JSON. The scripts of the page put it into text nodes only, and
a content security policy allows no other script than these.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from robust_dcp.report import Modules, Ranks, SavedReport, StructureDiff, shortened
from robust_dcp.report_page.reading import FoundReport, Reports
from robust_dcp.version import __version__

_SCRIPTS: Final = (
    *("basics.js", "chart.js", "overview.js", "timeline.js", "heatmap.js"),
    *("history.js", "changes.js", "treemap.js", "main.js"),
)

# The bounds of the page. Reports that are older than these reach keep their place in the history.
_MOST_ROWS: Final = 40_000
_MOST_TREES: Final = 40
_MOST_KEYS: Final = 3000
_MOST_MODULES: Final = 500
_MOST: Final = 100
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
        "path": _bounded(reports.path),
        "version": __version__,
        "trees": budget.trees,
        "saves": saves[::-1],
        "n_skipped": len(reports.skipped),
        "skipped": _bounded([each._asdict() for each in reports.skipped[:_MOST]]),
    }


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value, _LENGTH)
    if isinstance(value, list | tuple):
        return [_bounded(each) for each in value[:_MOST]]
    if isinstance(value, dict):
        return {_bounded(name): _bounded(each) for name, each in list(value.items())[:_MOST]}
    return value


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
    """A report as it was saved, but for what there is no room for."""
    report = found.report
    shown = _bounded(msgspec.to_builtins(replace(report, ranks=Ranks(), nodes=(), ways=(), modules=None)))
    shown["plan"]["changes"] = _changes(report.plan.changes, budget)
    return {
        **shown,
        "name": _bounded(found.name),
        "n_nodes": len(report.nodes),
        "ranks": _ranks(report, budget),
        "tree": budget.tree(report.modules),
    }


def _changes(changes: StructureDiff | None, budget: _Budget) -> dict[str, Any] | None:
    """How many keys were changed, and the first of them if there is room for them."""
    if changes is None:
        return None
    shown = msgspec.to_builtins(changes)
    counts = {f"n_{kind}": len(keys) for kind, keys in shown.items()}
    n_shown = sum(min(count, _MOST) for count in counts.values())
    if n_shown > budget.keys:
        shown = dict.fromkeys(shown, ())
    else:
        budget.keys -= n_shown
    return {**_bounded(shown), **counts}


def _ranks(report: SavedReport, budget: _Budget) -> dict[str, Any] | None:
    """The columns of ranks, if there is room for them. Of the newest report as many as there is room for."""
    n_ranks = len(report.ranks)
    if not n_ranks or (n_ranks > budget.rows and budget.rows < _MOST_ROWS):
        return None
    n_rows = min(n_ranks, _MOST_ROWS)
    budget.rows -= n_rows
    columns = {name: column[:n_rows] for name, column in msgspec.structs.asdict(report.ranks).items()}
    nodes = [shortened(node, 64) for node in report.nodes]
    return {**columns, "nodes": nodes, "ways": _bounded(["; ".join(way) for way in report.ways])}
