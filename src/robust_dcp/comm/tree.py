"""The tree over the ranks of a group. Every exchange goes up this tree and down again.

It is the binomial tree. Number the ranks by their distance from the root; to find the parent of a rank, clear the
lowest set bit of its number. For example 6 (``110``) has the parent 4 (``100``). So the ranks below a rank are
consecutive, the tree is log2(size) deep, and a rank has two connections on average and at most log2(size). This module
holds numbers only.
"""

from __future__ import annotations


class Tree:
    """The place of ``rank`` in the tree under ``root``, in a group of ``size`` ranks.

    >>> tree = Tree(rank=4, size=8)
    >>> tree.parent, tree.children, tree.below
    (0, (5, 6), [4, 5, 6, 7])

    Attributes:
        parent: the parent of this rank; ``None`` for the root.
        children: in the order of places. The ranks below the first come before those below the second.
        neighbours: the ranks that this one talks to.
    """

    def __init__(self, rank: int, size: int, root: int = 0) -> None:
        self.rank, self.size, self.root = rank, size, root
        place = (rank - root) % size
        self._places = range(place, min(place + (place & -place or size), size))
        self.parent = ((place & (place - 1)) + root) % size if place else None
        steps = range((len(self._places) - 1).bit_length())
        self.children = tuple([(place + (1 << step) + root) % size for step in steps])
        self.neighbours = self.children if self.parent is None else (self.parent, *self.children)

    @property
    def below(self) -> list[int]:
        """This rank and all ranks below it, by their distance from the root."""
        return [(place + self.root) % self.size for place in self._places]

    def ranks_below(self, child: int) -> list[int]:
        """``child`` and all ranks below it."""
        return Tree(child, self.size, self.root).below
