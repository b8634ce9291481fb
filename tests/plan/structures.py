"""Structures for the tests of planning: items in a few words, the columns they make, and strategies that draw them.

Owns nothing that is promised to users. Columns are made by the package's own :func:`items_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from robust_dcp.items import Form, ItemKind, Items, ItemStructure, Path, items_of, sorted_places
from robust_dcp.plan.global_plan import GlobalPlan
from robust_dcp.plan.state_dict import OptionValue

__all__ = [
    "CONTEXT",
    "DTYPES",
    "Box",
    "Item",
    "World",
    "chunk",
    "chunk_of",
    "obj",
    "partitions",
    "rank_items",
    "table",
    "tensor",
    "worlds",
    "written_items",
]


@dataclass(frozen=True)
class Item:
    """One item of a rank; ``offset`` and ``size`` are those of its chunk."""

    name: str
    kind: ItemKind = ItemKind.BYTES
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    form: Form = Form.FIXED

    @property
    def numel(self) -> int:
        return int(np.prod(self.size, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return 0 if self.kind == ItemKind.BYTES else self.numel * self.dtype.itemsize

    @property
    def structure(self) -> ItemStructure:
        if self.kind == ItemKind.BYTES:
            return ItemStructure(self.kind, self.form)
        return ItemStructure(
            self.kind,
            self.form,
            str(self.dtype).removeprefix("torch."),
            str(self.layout).removeprefix("torch."),
            self.requires_grad,
            self.shape,
            self.offset,
            self.size,
        )


def tensor(name: str, shape: Sequence[int] = (4,), dtype: torch.dtype = torch.float32) -> Item:
    """A whole tensor that is not sharded."""
    shape = tuple(shape)
    return Item(name, ItemKind.TENSOR, shape, (0,) * len(shape), shape, dtype)


def chunk(
    name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], dtype: torch.dtype = torch.float32
) -> Item:
    """One chunk of a sharded tensor."""
    return Item(name, ItemKind.SHARD, tuple(shape), tuple(offset), tuple(size), dtype)


def obj(name: str) -> Item:
    """An item that is no tensor."""
    return Item(name, form=Form.VARIABLE)


def table(*items: Item, paths: Mapping[str, Path] | None = None) -> Items:
    """The columns of one rank that holds ``items``."""
    names, structures = [item.name for item in items], [item.structure for item in items]
    order = sorted_places(names, structures)
    return items_of([names[place] for place in order], [structures[place] for place in order], paths)


CONTEXT: Mapping[str, OptionValue] = {
    "ranks": "0,1",
    "flatten_state_dict": True,
    "files_per_rank": 2,
    "torch": "2.13.0",
}


def written_items(plan: GlobalPlan) -> list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """For each rank the (name, offsets, sizes) that it writes, as its share of the plan says."""
    return [
        [chunk_of(items, row) for row in np.flatnonzero(kept).tolist()]
        for items, kept in zip(plan.ranks, plan.kept, strict=True)
    ]


def chunk_of(items: Items, row: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The name, offsets and sizes of an item."""
    return items.names[items.name[row]], items.sizes[items.offset[row]], items.sizes[items.size[row]]


# Strategies.

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
_PARTS = st.one_of(st.sampled_from(["a", "b", "a.b", "weight", "0", "1", "", "é"]), st.integers(0, 11))


def _name_of(path: Path) -> str:
    return ".".join(str(part) for part in path)


_PATHS = st.lists(st.lists(_PARTS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique_by=_name_of)


@st.composite
def _some_tensor(draw: st.DrawFn, name: str) -> Item:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    offset = tuple(draw(st.integers(0, extent)) for extent in shape)
    return Item(
        name,
        kind=draw(st.sampled_from([ItemKind.TENSOR, ItemKind.SHARD])),
        shape=shape,
        offset=offset,
        size=tuple(draw(st.integers(0, extent - at)) for extent, at in zip(shape, offset, strict=True)),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from([torch.strided, torch.sparse_coo])),
        requires_grad=draw(st.booleans()),
        form=draw(st.sampled_from(list(Form))),
    )


@st.composite
def rank_items(draw: st.DrawFn) -> tuple[list[Item], dict[str, Path]]:
    """The items of one rank, valid by themselves but otherwise of any kind, and the path of each name."""
    items: list[Item] = []
    paths: dict[str, Path] = {}
    for path in draw(_PATHS):
        name = _name_of(path)
        paths[name] = path
        if draw(st.integers(0, 3)) == 0:
            items.append(obj(name))
            continue
        first = draw(_some_tensor(name))
        items.append(first)
        has_second: bool = draw(st.booleans())
        if first.shape and has_second:
            items.append(replace(first, offset=(first.offset[0] + 7, *first.offset[1:])))
    return items, paths


@dataclass(frozen=True)
class World:
    """What every rank holds; consistent, so a plan exists."""

    ranks: tuple[tuple[Item, ...], ...]

    @property
    def tables(self) -> list[Items]:
        return [table(*items) for items in self.ranks]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name to global size."""
        return {i.name: i.shape for items in self.ranks for i in items if i.kind != ItemKind.BYTES}

    @property
    def objects(self) -> dict[str, list[int]]:
        """Name to the ranks that hold it."""
        found: dict[str, list[int]] = {}
        for rank, items in enumerate(self.ranks):
            for item in items:
                if item.kind == ItemKind.BYTES:
                    found.setdefault(item.name, []).append(rank)
        return found


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _cut(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box in two, and the parts again: everything from whole tensors over grids to bricks; parts may be empty."""
    offset, size = box
    if depth == 0 or not size or draw(st.integers(0, 4)) == 0:
        return [box]
    dim = draw(st.integers(0, len(size) - 1))
    at = draw(st.integers(0, size[dim]))
    left = (offset, (*size[:dim], at, *size[dim + 1 :]))
    right = ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
    return [*_cut(draw, left, depth - 1), *_cut(draw, right, depth - 1)]


def _grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A regular or irregular grid, as meshes of DTensors make."""
    spans = []
    for extent in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=2)))
        edges = [0, *(c for c in cuts if c < extent), extent]
        spans.append([(low, high - low) for low, high in itertools.pairwise(edges)])
    return [(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in itertools.product(*spans)]


@st.composite
def partitions(draw: st.DrawFn, max_dims: int = 3) -> tuple[tuple[int, ...], list[Box]]:
    """A global size and chunks that cover it exactly; offsets repeat only where chunks are empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=max_dims)))
    if draw(st.booleans()):
        return shape, _grid(draw, shape)
    return shape, _cut(draw, ((0,) * len(shape), shape), depth=3)


@st.composite
def worlds(draw: st.DrawFn, min_ranks: int = 2, max_ranks: int = 4) -> World:
    """Ranks with sharded tensors, replicas of their chunks, objects, and ranks that hold nothing."""
    n_ranks = draw(st.integers(min_ranks, max_ranks))
    held: list[dict[tuple[str, tuple[int, ...]], Item]] = [{} for _ in range(n_ranks)]
    holders: st.SearchStrategy[set[int]] = st.sets(st.integers(0, n_ranks - 1), min_size=1)
    for number in range(draw(st.integers(1, 5))):
        shape, boxes = draw(partitions())
        dtype = draw(st.sampled_from(DTYPES))
        # Filled chunks first: a rank has one item for each (name, offsets), so an empty one gives way.
        for offset, size in sorted(boxes, key=lambda box: 0 in box[1]):
            item = chunk(f"t{number}", shape, offset, size, dtype)
            for rank in draw(holders):
                held[rank].setdefault((item.name, offset), item)
    for number in range(draw(st.integers(0, 2))):
        for rank in draw(holders):
            held[rank][f"o{number}", ()] = obj(f"o{number}")
    return World(tuple(tuple(items.values()) for items in held))
