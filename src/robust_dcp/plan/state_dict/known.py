"""The last few structures of this process. A save with the same items as an earlier one reuses its table.

This module compares the described items with the known ones. It compares every name, path and item by value, so it
notices every change. The save planner calls it in each save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.plan.structure import (
    Attributes,
    ItemKind,
    ItemStructure,
    Path,
    PlanContext,
    StructureSignature,
    StructureTable,
    encode_attributes,
    sorted_places,
    table_of,
)
from robust_dcp.structure_cache import CACHE, StructureCache, Table

__all__ = ["STRUCTURES", "Expected", "KnownStructure", "KnownStructures"]

Expected = tuple[torch.dtype, torch.Size]

_CONTEXTS = 8
"""How many signatures one structure keeps. Several groups may save it, or it may be saved with other options."""

_ITEM_NBYTES = 500
"""Roughly how many bytes the lists, names and paths of one item take."""


class KnownStructure:
    """The table of a state dict's items, and what every save of these items needs.

    Args:
        names: the FQN of each item, in the order of the state dict.
        structures: the structure of each item.
        paths: the path of each item in the nested state dict; ``None`` if the planner does not flatten.
        attributes: what the planner adds to ``Metadata``. It is encoded, because a planner may modify its dict later,
            and because 1 == True in Python.
        peers: as in :class:`StructureTable`.

    Attributes:
        table: the items, sorted.
        order: intp ``[N]``, for each item of the table its place in the state dict.
        expected: the dtype and local size of each item of the table; ``None`` for an object.

    Raises:
        PlanConflict: a name belongs to two items.
    """

    def __init__(
        self,
        names: list[str],
        structures: list[ItemStructure],
        paths: list[Path] | None,
        attributes: bytes,
        peers: tuple[int, ...] = (),
    ) -> None:
        self._names = names
        self._structures = structures
        self._paths = paths
        self._attributes = attributes
        self._peers = peers
        order = sorted_places(names, structures)
        self.table: StructureTable = table_of(
            [names[place] for place in order],
            [structures[place] for place in order],
            None if paths is None else dict(zip(names, paths, strict=True)),
            attributes,
            peers,
        )
        self.order: npt.NDArray[np.intp] = np.array(order, dtype=np.intp)
        expected = {structure: _expected(structure) for structure in set(structures)}
        self.expected: list[Expected | None] = [expected[structures[place]] for place in order]
        self._signatures: dict[bytes, StructureSignature] = {}

    @property
    def nbytes(self) -> int:
        """Roughly how much memory this object takes."""
        return sum(column.nbytes for column in self.table.columns) + _ITEM_NBYTES * len(self._names)

    def matches(
        self,
        names: list[str],
        structures: list[ItemStructure],
        paths: list[Path] | None,
        attributes: bytes,
        peers: tuple[int, ...] = (),
    ) -> bool:
        """Whether this is the table of these items."""
        return (
            self._structures == structures
            and self._names == names
            and self._paths == paths
            and self._attributes == attributes
            and self._peers == peers
        )

    def signature(self, context: PlanContext) -> StructureSignature:
        """The signature of the table in ``context``. It is hashed once for each context."""
        key = context.encode()
        signature = self._signatures.get(key)
        if signature is None:
            signature = StructureSignature.of(self.table, context)
            if len(self._signatures) >= _CONTEXTS:
                self._signatures = {}
            self._signatures[key] = signature
        return signature


def _expected(structure: ItemStructure) -> Expected | None:
    if structure.kind == ItemKind.BYTES:
        return None
    return getattr(torch, structure.dtype), torch.Size(structure.sizes)


class KnownStructures:
    """The structures that were used last.

    Args:
        cache: the cache that holds them in a table; ``None`` for a cache of its own.
        max_nbytes: how much memory they may take together.
    """

    def __init__(self, cache: StructureCache | None = None, *, max_nbytes: int = 512 << 20) -> None:
        self._table: Table[KnownStructure, None] = (cache or StructureCache()).table(
            "structures", lambda known, _: known.nbytes, max_nbytes=max_nbytes
        )

    def of(
        self,
        names: list[str],
        structures: list[ItemStructure],
        mappings: Mapping[str, Path] | None,
        attributes: Attributes | None = None,
        peers: tuple[int, ...] = (),
    ) -> KnownStructure:
        """The structure of these items. It is made if it is not known.

        Args:
            names, structures: the FQN and structure of each item, in the order of the state dict.
            mappings: for each FQN its path in the nested state dict; ``None`` if the planner does not flatten.
            attributes: what the planner adds to ``Metadata``.
            peers: as in :class:`StructureTable`.

        Raises:
            PlanConflict: a name belongs to two items.
            RobustCheckpointError: a name has no path.
            TypeError, OverflowError, ValueError: ``attributes`` cannot be added to ``Metadata``.
        """
        paths = None if mappings is None else _paths_of(names, mappings)
        told = encode_attributes(attributes or {})
        known = (one for one, _ in self._table.latest_first())
        found = next((one for one in known if one.matches(names, structures, paths, told, peers)), None)
        if found is None:
            found = KnownStructure(names, structures, paths, told, peers)
        self._table.put(found, None)
        return found


def _paths_of(names: Sequence[str], mappings: Mapping[str, Path]) -> list[Path]:
    try:
        return [mappings[name] for name in names]
    except KeyError as missing:
        raise RobustCheckpointError(
            f"the planner's mappings have no path for {missing.args[0]!r}; a planner that adds items to the flattened "
            "state dict must add their paths too, or be made with flatten_state_dict=False"
        ) from None


STRUCTURES = KnownStructures(CACHE)
"""The structures of this process. All planners share them, because a planner may live for one save only."""
