"""Show what a checkpoint holds: names, dtypes, shapes, chunks, and where they lie.

It reads .metadata only, and the sizes of the files.

Examples:
  robust-dcp inspect checkpoints/step_1000
  robust-dcp inspect checkpoints/step_1000 'model.layers.0.*' --table
  robust-dcp inspect checkpoints/step_1000 --files
  robust-dcp inspect checkpoints/step_1000 --json | jq '.items[].name'
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from robust_dcp.cli.arguments import number_in, place
from robust_dcp.cli.checkpoint import open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, Output, number, size
from robust_dcp.storage.files.paths import writer_of

if TYPE_CHECKING:
    from robust_dcp.contents import Contents, Item, StoredFile


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", type=place, help="The checkpoint's directory, or its URL.")
    parser.add_argument("pattern", nargs="*", help="Show only items with such names, for example 'model.*.weight'.")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--table", action="store_true", help="One line for each item instead of a tree.")
    shown.add_argument("--files", action="store_true", help="The data files instead of the items.")
    shown.add_argument("--ranks", action="store_true", help="What each rank has written instead of the items.")
    shown.add_argument("--depth", type=number_in(int, 1), default=3, help="How many levels of the tree are shown.")


def run(options: Namespace) -> int:
    """Print what a checkpoint holds."""
    contents, pattern = open_checkpoint(options.path), options.pattern
    from robust_dcp.names import fit_nothing

    Output.note(summary(contents))
    items = contents.items_that_fit(pattern)
    if Output.as_json:
        Output.put(_as_json(contents, items))
    elif options.files:
        rows = [
            (file.name, None if file.nbytes is None else size(file.nbytes), file.chunks, file.problem)
            for file in contents.files
        ]
        Output.table(("file", "size", "chunks", "problem"), rows, right=("size", "chunks"))
    elif options.ranks:
        files_of: dict[int, list[StoredFile]] = defaultdict(list)
        for file in contents.files:
            writer = writer_of(file.name.rpartition("/")[2])
            files_of[-1 if writer is None else writer.rank].append(file)
        of_ranks = [
            (
                "?" if rank < 0 else rank,
                len(files),
                sum(f.chunks for f in files),
                size(sum(f.nbytes or 0 for f in files)),
            )
            for rank, files in sorted(files_of.items())
        ]
        Output.table(("rank", "files", "chunks", "size"), of_ranks, right=("rank", "files", "chunks", "size"))
    elif options.table:
        columns = ("name", "dtype", "shape", "chunks", "size", "file")
        Output.table(columns, map(_row, items), right=("chunks", "size"))
    else:
        _show_tree(items, options.depth)
    mistyped = fit_nothing(pattern, [item.name for item in items])
    if mistyped:
        Output.note(f"No item has such a name: {' '.join(mistyped)}")
    return FOUND if mistyped else 0


def _row(item: Item) -> tuple[Any, ...]:
    names = sorted({chunk.file for chunk in item.chunks if chunk.file is not None})
    more = f" and {number(len(names) - 1, 'other')}" if len(names) > 1 else ""
    kind = (item.dtype, list(item.shape)) if item.is_tensor else ("object", None)
    return (item.name, *kind, len(item.chunks), size(item.nbytes), f"{names[0]}{more}" if names else None)


class _Branch:
    """A level of the tree: the items below a prefix of their names."""

    def __init__(self) -> None:
        self.branches: dict[str, _Branch] = {}
        self.items: list[tuple[str, Item]] = []
        self.n_items = 0
        self.nbytes = 0


def _show_tree(items: Sequence[Item], depth: int) -> None:
    root = _Branch()
    for item in items:
        parts = item.name.split(".")
        branch = root
        for part in parts[:-1]:
            branch = branch.branches.setdefault(part, _Branch())
            branch.n_items += 1
            branch.nbytes += item.nbytes
        branch.items.append((parts[-1], item))
    for line in _lines(root, depth, ""):
        Output.say(line)


def _lines(branch: _Branch, depth: int, indent: str) -> Iterator[str]:
    for name, below in branch.branches.items():
        while len(below.branches) == 1 and not below.items:  # a.b.c instead of three levels with one name each
            ((only, deeper),) = below.branches.items()
            name, below = f"{name}.{only}", deeper
        yield f"{indent}{name}  {number(below.n_items, 'item')}, {size(below.nbytes)}"
        if depth > 1:
            yield from _lines(below, depth - 1, indent + "  ")
    for name, item in branch.items:
        chunks = f" in {len(item.chunks)} chunks" if len(item.chunks) > 1 else ""
        yield f"{indent}{name}  {item.words}{chunks}, {size(item.nbytes)}"


def _as_json(contents: Contents, items: Sequence[Item]) -> dict[str, Any]:
    return {
        **summary_json(contents),
        "items": [
            {
                "name": item.name,
                "kind": "tensor" if item.is_tensor else "object",
                "dtype": item.dtype,
                "shape": item.shape,
                "nbytes": item.nbytes,
                "chunks": [chunk._asdict() for chunk in item.chunks],
            }
            for item in items
        ],
        "data_files": [{**file._asdict(), "problem": file.problem} for file in contents.files],
    }
