"""``robust-dcp inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from robust_dcp.cli.checkpoint import open_checkpoint, summary, summary_json
from robust_dcp.cli.output import FOUND, Output, number, size
from robust_dcp.contents.read import Contents, Item, fits
from robust_dcp.storage.files.paths import writer_of

__all__ = ["run"]


def run(path: str, pattern: list[str], *, table: bool, files: bool, ranks: bool, dtype: bool, depth: int) -> int:
    """Print what a checkpoint holds."""
    contents = open_checkpoint(path)
    Output.note(summary(contents))
    items = [item for item in contents if not pattern or fits(item.name, pattern)]
    if Output.as_json:
        Output.put(_as_json(contents, items))
    elif files:
        _show_files(contents)
    elif ranks:
        _show_ranks(contents)
    elif dtype:
        _show_dtypes(items)
    elif table:
        _show_table(items)
    else:
        _show_tree(items, depth)
    if pattern and not items:
        Output.note(f"No item has such a name: {' '.join(pattern)}")
        return FOUND
    return 0


def _show_table(items: Sequence[Item]) -> None:
    rows = (
        (
            item.name,
            *(item.words.split(" ", 1) if item.is_tensor else ("object", "")),
            len(item.chunks),
            size(item.nbytes),
            _first_file(item),
        )
        for item in items
    )
    Output.table(("name", "dtype", "shape", "chunks", "size", "file"), rows, right=("chunks", "size"))


def _first_file(item: Item) -> str:
    names = sorted({chunk.file for chunk in item.chunks if chunk.file is not None})
    return "" if not names else names[0] if len(names) == 1 else f"{names[0]} and {number(len(names) - 1, 'other')}"


def _show_files(contents: Contents) -> None:
    rows = (
        (file.name, None if file.nbytes is None else size(file.nbytes), file.n_chunks, file.problem or "")
        for file in contents.files
    )
    Output.table(("file", "size", "chunks", "problem"), rows, right=("size", "chunks"))


def _show_ranks(contents: Contents) -> None:
    n_files: Counter[int | None] = Counter()
    nbytes: Counter[int | None] = Counter()
    chunks: Counter[int | None] = Counter()
    for file in contents.files:
        writer = writer_of(file.name)
        rank = None if writer is None else writer.rank
        n_files[rank] += 1
        nbytes[rank] += file.nbytes or 0
        chunks[rank] += file.n_chunks
    rows = (
        ("unknown" if rank is None else rank, n_files[rank], size(nbytes[rank]), chunks[rank])
        for rank in sorted(n_files, key=lambda rank: -1 if rank is None else rank)
    )
    Output.table(("rank", "files", "size", "chunks"), rows, right=("rank", "files", "size", "chunks"))


def _show_dtypes(items: Sequence[Item]) -> None:
    n_items: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for item in items:
        n_items[item.dtype or "object"] += 1
        nbytes[item.dtype or "object"] += item.nbytes
    rows = ((dtype, n_items[dtype], size(count)) for dtype, count in nbytes.most_common())
    Output.table(("dtype", "items", "size"), rows, right=("items", "size"))


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
        keys = [str(key) for key in item.path] if item.path else []
        # A key of the nested dict may be an FQN itself: {"model": {"layers.0.weight": …}}.
        parts = [part for key in keys or [item.name] for part in key.split(".")]
        branch = root
        for part in [*parts[:-1], None]:
            branch.n_items += 1
            branch.nbytes += item.nbytes
            if part is not None:
                branch = branch.branches.setdefault(part, _Branch())
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
        "data_files": [
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "needed_nbytes": file.needed_nbytes,
                "chunks": file.n_chunks,
                "problem": file.problem,
            }
            for file in contents.files
        ],
    }
