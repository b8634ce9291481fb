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

from robust_dcp import __version__
from robust_dcp.report import Modules, Ranks, shortened
from robust_dcp.report_page.reading import FoundReport, Reports

_SCRIPTS: Final = (
    *("basics.js", "chart.js", "overview.js", "timeline.js", "heatmap.js"),
    *("history.js", "changes.js", "treemap.js", "main.js"),
)

# The bounds of the page. Reports that are older than these reach keep their place in the history.
_MOST_FULL: Final = 40
_MOST_ROWS: Final = 40_000
_MOST_MODULES: Final = 500
_MOST: Final = 100
_LENGTH: Final = 400


def render_page(reports: Reports) -> str:
    """One HTML page that shows ``reports`` and loads nothing.

    It has a few megabytes at most. Only the newest checkpoints are shown rank by rank.
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
    trees: dict[Modules, int] = {}  # checkpoints of one model share theirs
    saves: list[dict[str, Any]] = []
    left = _MOST_ROWS
    for found in reversed(reports.found):
        n_ranks = min(len(found.report.ranks), _MOST_ROWS)
        is_full = len(saves) < _MOST_FULL and n_ranks <= left
        left -= n_ranks if is_full else 0
        saves.append(_save(found, n_ranks if is_full else 0, trees if is_full else None))
    return {
        "path": _bounded(reports.path),
        "version": __version__,
        "trees": [
            {
                "name": [shortened(name, 100) for name in each.name[:_MOST_MODULES]],
                "parent": each.parent[:_MOST_MODULES],
                "nbytes": each.nbytes[:_MOST_MODULES],
            }
            for each in trees
        ],
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


def _save(found: FoundReport, n_rows: int, trees: dict[Modules, int] | None) -> dict[str, Any]:
    """A report as it was saved, but for what there is no room for.

    Args:
        n_rows: how many ranks are shown.
        trees: the places of the trees of the page. ``None``: no tree and no changed keys are shown.
    """
    report = found.report
    shown = _bounded(msgspec.to_builtins(replace(report, ranks=Ranks(), nodes=(), ways=(), modules=None)))
    if report.plan.changes is not None:
        changes = msgspec.to_builtins(report.plan.changes)
        counts = {f"n_{kind}": len(keys) for kind, keys in changes.items()}
        shown["plan"]["changes"] = {**_bounded(changes if trees is not None else dict.fromkeys(changes, ())), **counts}
    ranks = {name: column[:n_rows] for name, column in msgspec.structs.asdict(report.ranks).items()}
    texts = {
        "nodes": [shortened(node, 64) for node in report.nodes],
        "ways": _bounded(["; ".join(way) for way in report.ways]),
    }
    modules = report.modules
    return {
        **shown,
        "name": _bounded(found.name),
        "n_nodes": len(report.nodes),
        "ranks": {**ranks, **texts} if n_rows else None,
        "tree": None if modules is None or trees is None else trees.setdefault(modules, len(trees)),
    }
