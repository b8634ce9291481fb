"""Measures the figures of the documents, and writes them: docs/figures.json, the tables of pages, two pictures.

``make figures`` runs it: about 45 minutes on two quiet cores. ``--quick`` takes tiny sizes, to see that it all works.
``--only storage`` measures one benchmark anew and keeps the others. ``--write`` measures nothing, and writes tables and
pictures from docs/figures.json. A table stands in a page between two comments that name it, so nobody copies figures by
hand; a test holds pages and pictures to docs/figures.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
Row = dict[str, Any]

# Of each benchmark: its options, and those of --quick. Together the former take about 45 minutes on two quiet cores.
RUNS: dict[str, tuple[str, str]] = {
    "planning": (
        "--ranks 32 128 --items 5000 --stock-up-to 160000",
        "--ranks 4 8 --items 100 --stock-up-to 400",
    ),
    "loading": ("--ranks 128 --items 5000", "--ranks 8 --items 100 --chunks 16"),
    "storage": (
        "--gib 0.5 --rounds 2",
        "--shapes large --gib 0.01 --rounds 1 --who ours ours,\\ repeated\\ save stock,\\ 1\\ thread",
    ),
    "reshards": ("--mib 128", "--mib 1"),
    "reshards_cold": ("--mib 128 --cold", "--mib 1 --cold"),
    "sharing": ("--nodes 8 --mib 64 --mib-per-second 16", "--nodes 2 --mib 2 --mib-per-second 64"),
    "messages": ("--ranks 4 --items 10 1000 10000", "--ranks 2 --items 10"),
    "simulated": ("--ranks 1024 10240", "--ranks 16 32"),
    "async_save": (
        "--ranks 2 --mib 256 --saves 5",
        "--ranks 2 --mib 4 --saves 3 --who ours stock,\\ thread",
    ),
}


def measure(name: str, *, is_quick: bool) -> Row:
    """Run one benchmark; what it wrote as JSON, with the command and how long it took."""
    options, module = RUNS[name][is_quick], f"benchmarks.{name.removesuffix('_cold')}"
    command = f"python -m {module} {options}"
    print(f"== {command}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "figures.json")
        words = [word.replace("\\", "") for word in re.split(r"(?<!\\) ", options)]
        subprocess.run([sys.executable, "-m", module, *words, "--json", path], cwd=ROOT, check=True)
        rows = json.loads(path.read_text())
    seconds = round(time.monotonic() - started)
    return {"command": command, "is_quick": is_quick, "seconds": seconds, "machine": machine(), "rows": rows}


def machine() -> Row:
    """What the figures depend on beside the program."""
    processors = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    model = re.search(r"^model name\s*: (.*)$", processors, re.MULTILINE)
    return {
        "cores": os.cpu_count(),
        "processor": model[1] if model else platform.machine(),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def shown(value: float | str | None) -> str:
    """A figure as pages have it: two or three digits that count, and no exponent."""
    if value is None or isinstance(value, str):
        return value or ""
    if math.isnan(value):  # training had no step beside the save
        return ""
    if value >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    if value >= 1:
        return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{float(f'{value:.2g}'):.6f}".rstrip("0").rstrip(".") or "0"


def table(titles: Sequence[str], rows: Iterable[Sequence[float | str | None]]) -> str:
    """A table in Markdown."""
    lines = [titles, ["---"] * len(titles), *[[shown(cell) for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratio(stock: float | None, ours: float | None) -> float | None:
    """How many times more stock takes."""
    return stock / ours if stock and ours else None


def first(rows: Iterable[Row], **wanted: object) -> Row:
    """The first row that has these values; without one, no figures."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), {})


def _beside_stock(rows: Sequence[Row], same: Sequence[str], names: Callable[[Row], list[str]]) -> list[list[Any]]:
    """CPU seconds and memory of ours, stock's, and the ratios, after what ``names`` says of each row of ours."""
    cells: list[list[Any]] = []
    for ours in rows:
        if ours["who"] == "ours":
            stock = first(rows, who="stock", **{key: ours[key] for key in same})
            cells.append(names(ours))
            for key in ("cpu_seconds", "peak_mib"):
                cells[-1] += [ours[key], stock.get(key), ratio(stock.get(key), ours[key])]
    return cells


_BOTH = ("CPU s: ours", "stock", "times less", "MiB: ours", "stock", "times less")


def planning(figures: Row) -> str:
    """What a save costs the coordinator."""
    rows, same = figures["planning"]["rows"], ("ranks", "items_each", "save")
    cells = _beside_stock(rows, same, lambda row: [f"{row['ranks']} x {row['items_each']}", row["save"]])
    return table(["ranks x tensors", "save", *_BOTH], cells)


def loading(figures: Row) -> str:
    """What the plan of a load costs one rank."""
    titles = {"same": "as many ranks", "reshard 1": "other ranks, cut otherwise"}
    rows = figures["loading"]["rows"]
    cells = _beside_stock(rows, ["case"], lambda row: [titles[row["case"]], f"{row['ranks']} x {row['items']}"])
    return table(["load by", "saved by ranks x tensors", *_BOTH], cells)


SHAPES = {
    "large": "few large tensors",
    "small": "many small ones",
    "moe": "experts (MoE)",
    "fsdp2": "FSDP2, 2 ranks",
}
_CONTENDERS = {
    ("save", "ours", ""): "save, first",
    ("save", "ours, repeated save", ""): "save, repeated",
    ("save", "ours, safetensors", ""): "save, safetensors",
    ("save", "stock, 1 thread", ""): "stock's save, 1 thread (its default)",
    ("save", "stock, 4 threads", ""): "stock's save, 4 threads",
    ("load", "ours", "ours"): "load",
    ("load", "ours", "stock, 1 thread"): "load of what stock saved",
    ("load", "stock", "stock, 1 thread"): "stock's load",
    ("load", "stock", "ours"): "stock's load of what we saved",
}


def _shapes(figures: Row) -> dict[str, str]:
    """The shapes that were measured, and what pages call them."""
    measured = {row["shape"] for row in figures["storage"]["rows"]}
    return {shape: title for shape, title in SHAPES.items() if shape in measured}


def _best_probe(rows: Sequence[Row], what: str, shape: str) -> Row:
    probes = [row for row in rows if row["what"] == what and row["shape"] == shape and row["who"].startswith("raw")]
    return max(probes, key=lambda row: float(row["gib_per_second"]))


def _storage(figures: Row, key: str, probe: str = "") -> str:
    rows, shapes = figures["storage"]["rows"], _shapes(figures)
    cells: list[list[float | str | None]] = []
    for (what, who, checkpoint), title in _CONTENDERS.items():
        values = [first(rows, shape=shape, what=what, who=who, checkpoint=checkpoint).get(key) for shape in shapes]
        if any(value is not None for value in values):
            cells.append([title, *values])
    if probe:
        for what in ("save", "load"):
            verb = {"save": "write", "load": "read"}[what]
            cells.append([probe.format(verb), *[_best_probe(rows, what, shape)[key] for shape in shapes]])
    return table(["", *shapes.values()], cells)


def reshards(figures: Row) -> str:
    """What a load costs that cuts in another way: the middle and the worst of all ways, beside stock."""
    cells: list[list[float | str | None]] = []
    rows, cold = figures["reshards"]["rows"], figures.get("reshards_cold", {"rows": []})["rows"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        ways = [row for row in rows if row["kind"] == kind]
        worst = min(ways, key=lambda row: float(row["ratio"]))
        medians = [statistics.median(row[key] for row in ways) for key in ("ours", "stock", "ratio")]
        there = f"{worst['dtype']}, {worst['saved']} to {worst['loaded']}"
        past = [float(row["ratio"]) for row in cold if row["kind"] == kind] or [math.nan]
        cells.append([kind, *medians, worst["ratio"], there, statistics.median(past), min(past)])
    titles = [
        "tensors",
        "CPU s/GiB: ours",
        "stock",
        "times less",
        "at worst",
        "there",
        "from the disk: times less",
        "at worst",
    ]
    return table(titles, cells)


def sharing(figures: Row) -> str:
    """What a load by many nodes takes from their store."""
    return table(
        ["load by 8 nodes", "s", "MiB from the store", "times the checkpoint"],
        [[row["who"], row.get("seconds"), row["read_mib"], row["times"]] for row in figures["sharing"]["rows"]],
    )


def messages(figures: Row) -> str:
    """What ranks send in a save."""
    return table(
        [
            "ranks",
            "tensors of each",
            "save",
            "coordinator sends",
            "another rank, at most",
            "stock's coordinator",
            "others",
        ],
        [
            [
                *(str(row[key]) for key in ("ranks", "items", "save")),
                *(f"{row[key]:,}" for key in ("nbytes", "others_nbytes", "stock_nbytes", "stock_others_nbytes")),
            ]
            for row in figures["messages"]["rows"]
        ],
    )


def simulated(figures: Row) -> str:
    """What an exchange costs among thousands of ranks that do not exist, and what grows with their number."""
    rows = figures["simulated"]["rows"]
    few, many = (extreme(row["ranks"] for row in rows) for extreme in (min, max))
    of_few = {row["what"]: row for row in rows if row["ranks"] == few}
    titles = [f"{many:,} ranks", "verdict", "seconds"]
    for what in ("messages", "bytes"):
        titles += [f"{what} of a rank", "at most", f"at most with {few:,}"]
    cells = [
        [row["what"], row["verdict"], row["seconds"]]
        + [
            each
            for key in ("messages", "nbytes")
            for each in (row[key], row[f"most_{key}"], of_few[row["what"]][f"most_{key}"])
        ]
        for row in rows
        if row["ranks"] == many
    ]
    return table(titles, cells)


def async_save(figures: Row) -> str:
    """How long training waits for an async save, and how much slower it is beside it."""
    keys = "repeated_blocked_seconds", "first_blocked_seconds", "save_seconds", "slowdown", "pause_seconds"
    titles = ["", "training stands still, s", "in the first save", "until committed, s", "training slower by"]
    rows = [
        [row["who"].replace("ours", "robust_dcp"), *[row[key] for key in keys]] for row in figures["async_save"]["rows"]
    ]
    return table([*titles, "longest pause of Python behind the call, s"], rows)


def summary(figures: Row) -> str:
    """What README shows."""
    plans, files, stops = (figures[name]["rows"] for name in ("planning", "storage", "async_save"))
    stock = first(plans, who="stock", save="repeated")
    ours = first(plans, who="ours", save="repeated", ranks=stock["ranks"])
    size = f"{stock['ranks']} ranks with {stock['items_each']} tensors each"
    cells = [[f"plan a save again, {size}: CPU seconds", stock["cpu_seconds"], ours["cpu_seconds"]]]
    for what, who, checkpoint in (("save", "ours, repeated save", ""), ("load", "ours", "ours")):
        large = [row for row in files if row["shape"] == "large" and row["what"] == what]
        stocks = [
            row for row in large if row["who"].startswith("stock") and row["checkpoint"] in ("", "stock, 1 thread")
        ]
        best = max(row["gib_per_second"] for row in stocks)
        ours = first(large, who=who, checkpoint=checkpoint)["gib_per_second"]
        cells.append([f"{what} few large tensors: GiB/s, stock at its best", best, ours])
    loads = {row["who"]: row for row in figures["sharing"]["rows"]}
    title = "eight nodes load the same 64 MiB: MiB that their store gives"
    cells.append([title, loads["stock"]["read_mib"], loads["robust_dcp"]["read_mib"]])
    blocked = {row["who"]: row["repeated_blocked_seconds"] for row in stops}
    best = min(seconds for who, seconds in blocked.items() if who.startswith("stock"))
    title = f"async save of {stops[0]['mib']} MiB a rank: seconds that training stands still, stock at its best"
    cells.append([title, best, blocked["ours"]])
    return warning(figures) + table(["", "stock", "robust_dcp"], cells)


def warning(figures: Row) -> str:
    """What stands above figures of sizes that only show that the benchmarks run."""
    is_quick = any(figures[name]["is_quick"] for name in RUNS if name in figures)
    return "**These figures are of tiny sizes (`--quick`) and mean nothing.**\n\n" if is_quick else ""


def about(figures: Row) -> str:
    """The machine, or which one has measured what."""
    runs: dict[str, list[str]] = {}
    for name in RUNS:
        if name in figures:
            at = figures[name]["machine"]
            words = f"{at['cores']} cores ({at['processor']}), no GPU, one virtual disk, Linux {at['kernel']}"
            runs.setdefault(f"{words}, Python {at['python']}, torch {at['torch']}.\n", []).append(name)
    if len(runs) == 1:
        return warning(figures) + next(iter(runs))
    return warning(figures) + "".join(f"* {', '.join(names)}: {words}" for words, names in runs.items())


def command_of(name: str) -> Callable[[Row], str]:
    """What makes the block of the command that printed a table."""

    def command(figures: Row) -> str:
        options = RUNS[name][0]
        measured = figures.get(name, {"command": f"python -m benchmarks.{name.removesuffix('_cold')} {options}"})
        command = measured["command"].replace(" --who", " \\\n    --who")  # else a narrow page cuts it off
        return f"```console\n$ {command}\n```\n"

    return command


TABLES: dict[str, Callable[[Row], str]] = {
    "about": about,
    "summary": summary,
    "planning": planning,
    "loading": loading,
    "storage": lambda figures: _storage(figures, "gib_per_second", "raw direct I/O, {}"),
    "processor": lambda figures: _storage(figures, "cpu_seconds_per_gib"),
    "reshards": reshards,
    "sharing": sharing,
    "messages": messages,
    "simulated": simulated,
    "async_save": async_save,
    **{f"command of {name}": command_of(name) for name in RUNS},
}
_MARKED = re.compile(r"(<!-- figures: ([\w ]+) -->\n\n?)(.*?)(\n?<!-- end -->)", re.DOTALL)


def with_tables(page: str, figures: Row) -> str:
    """A page with the tables that it names, as docs/figures.json has them."""

    def filled(block: re.Match[str]) -> str:
        name = block[2]
        is_measured = name.removeprefix("command of ") in figures or name not in RUNS
        content = TABLES[name](figures) if is_measured else "Not measured yet: `make figures`.\n"
        return f"{block[1]}{content}{block[4]}"

    return _MARKED.sub(filled, page)


# --- pictures --------------------------------------------------------------------------------------------------------

_STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1c2430; }
.title { font-size: 18px; font-weight: 600; } .name { font-weight: 600; } .faint { fill: #5d6878; }
.page { fill: #ffffff; stroke: #d9dee6; } .ours { fill: #3b6fd4; } .other { fill: #9aa5b4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf2; } .faint { fill: #a3aec0; } .page { fill: #1b2029; stroke: #39424f; }
  .ours { fill: #6f9cf0; } .other { fill: #6b7688; }
}
"""
_WIDTH = 420  # a phone shows it without making it much smaller, so that its words can be read
Bar = tuple[str, float]


def picture(title: str, unit: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Bars below each other, group by group. Each group has a scale of its own."""
    parts: list[str] = []

    def text(y: float, words: str, style: str) -> None:
        parts.append(f'<text x="16" y="{y:g}" class="{style}">{escape(words)}</text>')

    text(30, title, "title")
    text(52, unit, "faint")
    y = 62
    for name, bars in groups:
        text(y + 24, name, "name")
        y += 32
        most = max(value for _, value in bars)
        for who, value in bars:
            style = "ours" if who.startswith("robust_dcp") else "other"
            length = max(2, (_WIDTH - 32) * value / most)
            text(y + 16, f"{who}: {shown(value)}", "")
            parts.append(f'<rect class="{style}" x="16" y="{y + 22}" width="{length:.1f}" height="10" rx="2"/>')
            y += 40
        y += 6
    size = f'viewBox="0 0 {_WIDTH} {y + 10}" width="{_WIDTH}" height="{y + 10}"'
    page = f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{y + 9}" rx="10"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", page, *parts, "</svg>", ""])


def pictures(figures: Row) -> dict[str, str]:
    """Path below docs/ and content of each picture."""
    plans, files = figures["planning"]["rows"], figures["storage"]["rows"]
    size = first(plans, who="stock")
    same = {"ranks": size["ranks"], "items_each": size["items_each"]}
    saves = [
        (
            f"{save} save",
            [
                ("robust_dcp", first(plans, who="ours", save=save, **same)["cpu_seconds"]),
                ("stock", first(plans, who="stock", save=save, **same)["cpu_seconds"]),
            ],
        )
        for save in ("first", "repeated")
    ]
    writers = {
        "robust_dcp": "ours, repeated save",
        "stock, 1 thread (its default)": "stock, 1 thread",
        "stock, 4 threads": "stock, 4 threads",
    }
    shapes = []
    for shape, title in _shapes(figures).items():
        found = {who: first(files, shape=shape, what="save", who=name) for who, name in writers.items()}
        bars = [(who, row["gib_per_second"]) for who, row in found.items() if row]
        shapes.append((title, [*bars, ("raw direct I/O", _best_probe(files, "save", shape)["gib_per_second"])]))
    planned = f"Plan a save: {size['ranks']} ranks x {size['items_each']} tensors"
    return {
        "pictures/planning.svg": picture(planned, "CPU seconds of rank 0, less is better", saves),
        "pictures/storage.svg": picture("Save to a disk", "GiB/s, more is better", shapes),
    }


# --- all of it -------------------------------------------------------------------------------------------------------


def write(figures: Row) -> None:
    """Write tables and pictures."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), figures))
    (FIGURES.parent / "pictures").mkdir(exist_ok=True)
    for name, content in pictures(figures).items():
        (FIGURES.parent / name).write_text(content)


def main() -> None:
    """Measure if asked to, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the figures mean nothing")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), help="measure these")
    parser.add_argument("--write", action="store_true", help="measure nothing")
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if not options.write:
        for name in options.only:
            figures[name] = measure(name, is_quick=options.quick)
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    write(figures)


if __name__ == "__main__":
    main()
