"""The tree over the ranks of a group that every exchange goes up and then down: who is next to whom.

Pure numbers. It is the binomial tree: a rank's distance from the root has its parent at the same number without its
lowest set bit. So the ranks below a rank are neighbours in the order of ranks, the tree is log2(size) deep, and a rank
has two connections on average, log2(size) at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["Tree"]


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
        """The distance from the root, counted upwards and around."""
        return (self.rank - self.root) % self.size

    def _rank_at(self, place: int) -> int:
        return (place + self.root) % self.size

    @cached_property
    def parent(self) -> int | None:
        """``None`` for the root."""
        place = self._place
        return self._rank_at(place & (place - 1)) if place else None

    @cached_property
    def children(self) -> tuple[int, ...]:
        """In the order of places: the ranks below the first come before those below the second."""
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
        """All ranks of the group, from the root on."""
        return [self._rank_at(place) for place in range(self.size)]
