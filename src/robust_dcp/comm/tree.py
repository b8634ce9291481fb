"""The tree over the ranks of a group. Every exchange goes up this tree and down again.

It is the binomial tree. Number the ranks by their distance from the root; to find the parent of a rank, clear the
lowest set bit of its number. For example 6 (``110``) has the parent 4 (``100``). So the ranks below a rank are
consecutive, the tree is log2(size) deep, and a rank has two connections on average and at most log2(size). This module
holds numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Tree:
    """The place of ``rank`` in the tree under ``root``, in a group of ``size`` ranks.

    >>> tree = Tree(rank=4, size=8)
    >>> tree.parent, tree.children, tree.below
    (0, (5, 6), range(4, 8))
    """

    rank: int
    size: int
    root: int = 0

    @property
    def _place(self) -> int:
        """The distance from the root, counted upwards. After the last rank it goes on at rank 0."""
        return (self.rank - self.root) % self.size

    def _rank_at(self, place: int) -> int:
        return (place + self.root) % self.size

    @cached_property
    def parent(self) -> int | None:
        """The parent of this rank; ``None`` for the root."""
        place = self._place
        return self._rank_at(place & (place - 1)) if place else None

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The children in the order of places. The ranks below the first come before those below the second."""
        found, step, place = [], 1, self._place
        while place + step < self.size and not place & step:
            found.append(self._rank_at(place + step))
            step <<= 1
        return tuple(found)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that this one talks to."""
        return self.children if self.parent is None else (self.parent, *self.children)

    @property
    def below(self) -> range:
        """The places of this rank and of all ranks below it."""
        place = self._place
        reach = place & -place if place else self.size
        return range(place, min(place + reach, self.size))

    def places_below(self, child: int) -> range:
        """The places of ``child`` and of all ranks below it."""
        return Tree(child, self.size, self.root).below

    @property
    def ranks_by_place(self) -> list[int]:
        """All ranks of the group by their distance from the root."""
        return [self._rank_at(place) for place in range(self.size)]
