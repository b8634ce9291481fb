"""Compares what two checkpoints hold: names, kinds, dtypes and shapes. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from robust_dcp.contents.read import Contents, Item

__all__ = ["ChangedItem", "StructureDifference", "compare_structures"]


@dataclass(frozen=True)
class ChangedItem:
    """An item that both checkpoints have, and how it differs in words: ``"float32 [4] -> bfloat16 [4]"``."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class StructureDifference:
    """The difference of two structures.

    Attributes:
        added: items that only the second checkpoint has.
        removed: items that only the first has.
        changed: items of another kind, dtype or shape; with ``chunks`` also those that are cut otherwise.
        common: names of items whose values can be compared.
    """

    added: tuple[Item, ...]
    removed: tuple[Item, ...]
    changed: tuple[ChangedItem, ...]
    common: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def compare_structures(
    first: Contents, second: Contents, *, is_wanted: Callable[[str], bool], chunks: bool = False
) -> StructureDifference:
    """Compare the items of two checkpoints by name.

    Args:
        is_wanted: which names to compare.
        chunks: whether to compare also how tensors are cut into chunks.
    """
    before = {name: item for name, item in first.by_name.items() if is_wanted(name)}
    after = {name: item for name, item in second.by_name.items() if is_wanted(name)}
    both = [name for name in before if name in after]
    changed = []
    for name in both:
        one, other = before[name].words, after[name].words
        if one == other and chunks and _chunks(before[name]) != _chunks(after[name]):
            one, other = (f"{item.words} in {len(item.chunks)} chunks" for item in (before[name], after[name]))
            other = other if one != other else f"{other}, cut otherwise"
        if one != other:
            changed.append(ChangedItem(name, one, other))
    return StructureDifference(
        added=tuple(item for name, item in after.items() if name not in before),
        removed=tuple(item for name, item in before.items() if name not in after),
        changed=tuple(changed),
        common=tuple(name for name in both if before[name].words == after[name].words),
    )


def _chunks(item: Item) -> frozenset[tuple[tuple[int, ...], tuple[int, ...]]]:
    return frozenset((chunk.offsets, chunk.sizes) for chunk in item.chunks)
