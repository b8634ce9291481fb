"""``robust-dcp diff``: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from robust_dcp.cli.checkpoint import open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, CommandFailed, Output, number
from robust_dcp.comparison.structures import StructureDifference, compare_structures
from robust_dcp.contents.read import Contents, fits

__all__ = ["run"]

_MEMORY_NBYTES: Final = 32 << 20


def run(first: str, second: str, pattern: list[str], *, values: bool, tolerance: float, chunks: bool) -> int:
    """Print how two checkpoints differ."""
    contents = open_checkpoint(first), open_checkpoint(second)
    for each in contents:
        Output.say(summary(each))

    def is_wanted(name: str) -> bool:
        return not pattern or fits(name, pattern)

    if pattern and not any(is_wanted(item.name) for each in contents for item in each.items):
        raise CommandFailed(f"no item of either checkpoint has such a name: {' '.join(pattern)}")
    structure = compare_structures(*contents, is_wanted=is_wanted, chunks=chunks)
    _show_structure(structure)
    found = _compare_values(contents, structure.common, tolerance) if values else _Values()
    Output.put(
        {
            "first": summary_json(contents[0]),
            "second": summary_json(contents[1]),
            "are_equal": not (structure or found.tensors or found.objects),
            **_structure_json(structure),
            "compared": found.compared,
            "tensors": found.tensors,
            "objects": found.objects,
        }
    )
    if structure or found.tensors or found.objects:
        return FOUND
    what = "structure and values" if values else "structure"
    Output.say(f"No difference in the {what} of {number(len(structure.common), 'item')}.")
    return 0


def _show_structure(structure: StructureDifference) -> None:
    rows = [
        *(("only in the first", item.name, item.words, None) for item in structure.removed),
        *(("only in the second", item.name, None, item.words) for item in structure.added),
        *(("changed", each.name, each.before, each.after) for each in structure.changed),
    ]
    if rows:
        Output.table(("difference", "name", "first", "second"), rows)


class _Values:
    """What differs in the values, as plain rows."""

    def __init__(self) -> None:
        self.compared = 0
        self.tensors: list[dict[str, Any]] = []
        self.objects: list[dict[str, str]] = []


def _compare_values(contents: tuple[Contents, Contents], names: Sequence[str], tolerance: float) -> _Values:
    from robust_dcp.comparison.values import compare_objects, compare_tensors

    items = contents[0].by_name
    tensors = [name for name in names if items[name].is_tensor]
    first, second = (each.path for each in contents)
    found = _Values()
    with Output.progress("compare", sum(items[name].nbytes for name in tensors)) as progress:
        for name, difference in compare_tensors(
            first, second, tensors, buffer_nbytes=_MEMORY_NBYTES, progress=progress
        ):
            found.compared += 1
            if difference.exceeds(tolerance):
                found.tensors.append({"name": name, **asdict(difference)})
    objects = [name for name in names if not items[name].is_tensor]
    found.objects = [asdict(each) for each in compare_objects(first, second, objects)]
    found.compared += len(objects)
    if found.tensors:
        Output.table(
            ("name", "differing", "of", "max absolute", "max relative", "NaN", "infinite"),
            [
                (
                    *(row["name"], row["differing"], row["numel"]),
                    *("bytes" if row[key] is None else f"{row[key]:.6g}" for key in ("max_absolute", "max_relative")),
                    *(f"{row[key][0]} / {row[key][1]}" for key in ("nan", "infinite")),
                )
                for row in found.tensors
            ],
            right=("differing", "of", "max absolute", "max relative", "NaN", "infinite"),
        )
    if found.objects:
        Output.table(("name", "first", "second"), [tuple(row.values()) for row in found.objects])
    return found


def _structure_json(structure: StructureDifference) -> dict[str, Any]:
    return {
        "added": [{"name": item.name, "is": item.words} for item in structure.added],
        "removed": [{"name": item.name, "is": item.words} for item in structure.removed],
        "changed": [asdict(each) for each in structure.changed],
    }
