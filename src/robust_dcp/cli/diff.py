"""Show how two checkpoints differ: in their structure, and with --values in what they hold.

They may be of any kind and sharded in any way. The exit code is 0 if they are equal, and 1 if they differ.

Examples:
  robust-dcp diff checkpoints/step_1000 checkpoints/step_2000
  robust-dcp diff ours stock --values
  robust-dcp diff before after 'model.layers.0.*' --values --tolerance 1e-6
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, Final

import msgspec

from robust_dcp.cli.arguments import local_path, number_in
from robust_dcp.cli.checkpoint import open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, CommandFailed, Output, number
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load

_OBJECT: Final = ("name", "first", "second")


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("first", type=local_path, help="A checkpoint's directory.")
    parser.add_argument("second", type=local_path, help="Another one's.")
    parser.add_argument("pattern", nargs="*", help="Compare only items with such names, for example 'model.*'.")
    parser.add_argument("--values", action="store_true", help="Compare the values, too.")
    numbers = "Compare elements as numbers: those that are not farther apart are equal. Else their bits count."
    parser.add_argument("--tolerance", type=number_in(float, 0), help=numbers)


def run(options: Namespace) -> int:
    """Print how two checkpoints differ."""
    if options.tolerance is not None and not options.values:
        raise CommandFailed("--tolerance says which values count as equal: compare them with --values")
    both, pattern = (open_checkpoint(options.first), open_checkpoint(options.second)), options.pattern
    from robust_dcp.names import fit_nothing

    for each in both:
        Output.note(summary(each))
    before, after = ({item.name: item for item in each.items_that_fit(pattern)} for each in both)
    if mistyped := fit_nothing(pattern, before.keys() | after.keys()):
        raise CommandFailed(f"no item of either checkpoint has such a name: {' '.join(mistyped)}")
    removed = [{"name": name, "is": item.words} for name, item in before.items() if name not in after]
    added = [{"name": name, "is": item.words} for name, item in after.items() if name not in before]
    common = [name for name in before if name in after and before[name].words == after[name].words]
    changed = [
        {"name": name, "before": item.words, "after": after[name].words}
        for name, item in before.items()
        if name in after and item.words != after[name].words
    ]
    rows = [
        *(("only in the first", each["name"], each["is"], None) for each in removed),
        *(("only in the second", each["name"], None, each["is"]) for each in added),
        *(("changed", *each.values()) for each in changed),
    ]
    if rows:
        Output.table(("difference", "name", "first", "second"), rows)
    tensors: list[dict[str, Any]] = []
    objects: list[dict[str, str]] = []
    if options.values:
        with needed_for_a_load(both[0].disk, both[0].path), needed_for_a_load(both[1].disk, both[1].path):
            tensors, objects = _different_values(both[0].path, both[1].path, common, options.tolerance)
    are_equal = not (rows or tensors or objects)
    Output.put(
        {
            "first": summary_json(both[0]),
            "second": summary_json(both[1]),
            "are_equal": are_equal,
            "added": added,
            "removed": removed,
            "changed": changed,
            "compared": len(common) if options.values else 0,
            "tensors": tensors,
            "objects": objects,
        }
    )
    if are_equal:
        what = "structure and values" if options.values else "structure"
        Output.say(f"No difference in the {what} of {number(len(common), 'item')}.")
    return 0 if are_equal else FOUND


def _different_values(
    first: str, second: str, names: list[str], tolerance: float | None
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    from robust_dcp.comparison import compare_objects, compare_tensors

    with Output.progress("compare") as progress:
        compared = compare_tensors(first, second, names, progress=progress)
    tensors = [
        {"name": name, **msgspec.structs.asdict(difference)}
        for name, difference in compared.items()
        if difference.differing
        and (tolerance is None or difference.max_absolute is None or difference.max_absolute > tolerance)
    ]
    others = [name for name in names if name not in compared]
    objects = [dict(zip(_OBJECT, each, strict=True)) for each in compare_objects(first, second, others)]
    if tensors:
        columns = ("name", "differing", "of", "max absolute", "max relative", "NaN", "infinite")
        rows = [
            (
                each["name"],
                each["differing"],
                each["numel"],
                *("bytes" if each[key] is None else f"{each[key]:.6g}" for key in ("max_absolute", "max_relative")),
                *(f"{each[key][0]} / {each[key][1]}" for key in ("nan", "infinite")),
            )
            for each in tensors
        ]
        Output.table(columns, rows, right=columns[1:])
    if objects:
        Output.table(_OBJECT, [tuple(each.values()) for each in objects])
    return tensors, objects
