"""Draws the pictures of the documents: ``python docs/pictures/draw.py`` writes them anew, beside itself.

Owns what each picture says. ``figures.json`` has the measured figures. A test holds that they stand in the documents,
and that the pictures are those that this program draws.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from svg import Picture

_HERE = Path(__file__).parent


def phases() -> Picture:
    """What a save does, phase by phase, and what ranks tell each other."""
    picture = Picture("The phases of a save, and the exchanges between its ranks", 900, 400)
    columns = [(20, "1  plan"), (315, "2  write"), (610, "3  commit")]
    for x, name in columns:
        picture.text(x + 10, 36, name, "large")
    picture.text(30, 66, "each rank", "bold")
    picture.text(112, 262, "rank 0, the coordinator", "bold")
    picture.box(30, 78, 250, 66, "describes its state dict", "and computes the signature of it", colour="blue")
    picture.box(325, 78, 250, 66, "writes to planned places,", "with checksums, and fsyncs", colour="blue")
    picture.box(620, 78, 250, 66, "looks once more at its files:", "are they still as it wrote them?", colour="blue")
    exchanges = [
        (30, "agree", "160 bytes to each neighbour"),
        (325, "write", "has everybody written?"),
        (620, "commit", "are all files right?"),
    ]
    for x, name, what in exchanges:
        picture.arrow(x + 30, 144, x + 30, 274)
        picture.arrow(x + 60, 274, x + 60, 144)
        picture.text(x + 82, 192, f"exchange “{name}”", "bold")
        picture.text(x + 82, 212, what, "small faint")
    picture.box(30, 274, 250, 66, "do all ranks hold what the last", "plan was made for? then reuse it", colour="green")
    picture.box(325, 274, 250, 66, "waits, and logs who is slow", colour="green")
    picture.box(620, 274, 250, 66, "writes the new .metadata,", "fsync, rename, fsync", colour="green")
    picture.text(
        30, 366, "Only if something has changed: one more exchange takes the changed structures up,", "small faint"
    )
    picture.text(30, 384, "and one takes each rank's share of the new plan down.", "small faint")
    picture.text(620, 366, "From the rename on, the directory", "small faint")
    picture.text(620, 384, "loads as the new checkpoint.", "small faint")
    return picture


def tree() -> Picture:
    """Who talks to whom, with eight ranks."""
    picture = Picture("The tree of eight ranks", 900, 400)
    places = {0: (300, 60), 1: (90, 160), 2: (240, 160), 4: (440, 160)}
    places |= {3: (240, 260), 5: (380, 260), 6: (500, 260), 7: (500, 350)}
    for rank in range(1, 8):
        x, y = places[rank]
        above_x, above_y = places[rank & (rank - 1)]
        picture.arrow(x - 4, y - 22, above_x - 4 + (x - above_x) * 0.12, above_y + 22)
    for rank, (x, y) in places.items():
        picture.box(x - 44, y - 22, 88, 44, f"rank {rank}", colour="blue" if rank else "green", style="bold")
    picture.text(356, 64, "the coordinator", "small faint")
    x = 600
    picture.text(x, 60, "Up", "large")
    for number, line in enumerate(
        ["Each rank does its own work first.", "Then it waits for those below it,", "joins what they say with its own,"]
    ):
        picture.text(x, 86 + 20 * number, line)
    picture.text(x, 146, "and sends one message up.")
    picture.text(x, 190, "Down", "large")
    picture.text(x, 216, "Rank 0 decides. Its answer takes")
    picture.text(x, 236, "the same way back.")
    picture.text(x, 280, "So", "large")
    picture.text(x, 306, "a rank talks to two others on average,")
    picture.text(x, 326, "and to 10 at most in a job of 1024.")
    return picture


def file() -> Picture:
    """The bytes of a data file."""
    picture = Picture("The bytes of a data file", 900, 400)
    picture.text(30, 36, "__0_0.66….distcp", "large")
    picture.text(190, 36, "one file of one rank", "faint")
    picture.box(30, 56, 190, 56, "record", "layers.0.weight", colour="blue")
    picture.box(220, 56, 40, 56, "gap", style="small")
    picture.box(260, 56, 190, 56, "record", "layers.1.weight", colour="blue")
    picture.box(450, 56, 110, 56, "…")
    picture.box(560, 56, 160, 56, "record", "norm.weight", colour="blue")
    picture.box(720, 56, 150, 56, "footer", "by robust_dcp", colour="orange")
    for x, to_x in [(260, 30), (450, 870)]:
        picture.line(x, 112, to_x, 152, dashed=True)
    picture.text(30, 172, "A record is an archive of torch.save: stock readers take it as it is", "bold")
    widths = [("data.pkl", 110), ("version", 80), ("byteorder", 90), ("header", 80), ("the bytes of the tensor", 350)]
    x = 30
    for name, width in [*widths, ("directory, end", 130)]:
        picture.box(x, 184, width, 46, name, colour="blue" if "bytes of" in name else "plain", style="small")
        x += width
    picture.text(390, 250, "begin at a multiple of 64; large ones at 64 modulo 4096", "small faint")
    picture.text(390, 267, "so that they go to the drive without a copy", "small faint")
    picture.text(30, 306, "The footer proves whose bytes these are", "bold")
    x = 30
    for name, width in [
        ("where each item begins, its length", 250),
        ("a CRC-32 of each 256 KiB of each item", 280),
        ("mark of the save, length, CRC-32", 250),
    ]:
        picture.box(x, 318, width, 46, name, colour="orange", style="small")
        x += width
    picture.text(
        30, 386, "Stock readers never look there: .metadata tells them offset and length of each record.", "small faint"
    )
    return picture


def commit() -> Picture:
    """What the directory holds while a save replaces a checkpoint."""
    steps: list[tuple[str, list[tuple[str, str]]]] = [
        ("before", [(".metadata", "green"), ("__0_0.41….distcp", "green")]),
        ("announce", [(".metadata", "green"), ("__0_0.41….distcp", "green"), ("…saving.66…", "plain")]),
        (
            "write, fsync",
            [
                (".metadata", "green"),
                ("__0_0.41….distcp", "green"),
                ("…saving.66…", "plain"),
                ("__0_0.66….distcp", "blue"),
            ],
        ),
        (
            "prepare, fsync",
            [
                (".metadata", "green"),
                ("__0_0.41….distcp", "green"),
                ("…saving.66…", "plain"),
                ("__0_0.66….distcp", "blue"),
                (".metadata.66….tmp", "blue"),
            ],
        ),
        (
            "rename, fsync",
            [
                (".metadata", "blue"),
                ("__0_0.41….distcp", "green"),
                ("…saving.66…", "plain"),
                ("__0_0.66….distcp", "blue"),
            ],
        ),
        ("tidy up", [(".metadata", "blue"), ("", ""), ("", ""), ("__0_0.66….distcp", "blue")]),
    ]
    picture = Picture("A commit, step by step", 1080, 350)
    width, gap = 158, 18
    for number, (name, files) in enumerate(steps):
        x = 22 + number * (width + gap)
        picture.text(x, 38, f"{number}  {name}" if number else name, "large")
        for row, (file_name, colour) in enumerate(files):
            if file_name:
                picture.box(x, 54 + 40 * row, width, 32, file_name, colour=colour, style="mono")
        is_new = number > 3
        picture.box(x, 270, width, 30, f"loads: {'new' if is_new else 'old'}", colour="blue" if is_new else "green")
    picture.text(
        22,
        328,
        "Killed at any instant, it loads as the last line says; within step 4 as one of the two.",
        "small faint",
    )
    picture.text(1058, 328, "41… and 66… are the marks of saves. The index is left out.", "small faint", "end")
    return picture


def chart(chosen: dict[str, Any]) -> Picture:
    """Bars beside each other, group by group; each group has a scale of its own."""
    groups = chosen["groups"]
    n_bars = sum(len(group["bars"]) for group in groups)
    picture = Picture(chosen["title"], 900, 64 + 46 * len(groups) + 26 * n_bars + 24 * len(chosen["notes"]))
    picture.text(30, 36, chosen["title"], "large")
    y = 60
    for group in groups:
        y += 20
        picture.text(30, y, group["name"], "bold")
        picture.text(870, y, group["unit"], "small faint", "end")
        y += 10
        most = max(float(bar["value"]) for bar in group["bars"])
        for bar in group["bars"]:
            length = 430 * float(bar["value"]) / most
            picture.text(310, y + 15, bar["who"], "small", "end")
            picture.bar(322, y + 2, length, 18, "solid-blue" if bar.get("is_ours") else "solid-grey")
            picture.text(332 + max(length, 2), y + 16, bar["value"] + bar.get("note", ""), "small bold")
            y += 26
        y += 16
    for note in chosen["notes"]:
        picture.text(30, y + 12, note, "small faint")
        y += 22
    return picture


def main() -> None:
    """Draw all of them into the directory that is given, else beside this program."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else _HERE
    for draw in (phases, tree, file, commit):
        draw().save(directory / f"{draw.__name__}.svg")
    for name, chosen in json.loads((_HERE / "figures.json").read_text(encoding="utf-8")).items():
        chart(chosen).save(directory / f"{name}.svg")


if __name__ == "__main__":
    main()
