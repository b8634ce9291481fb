"""The last few structures of this process: a save whose items are those of an earlier one takes its table as it is.

Owns the comparison of what was described with what is known; by value, every name, path and item, so nothing that
changed goes unseen. Called by ``save`` for each save.
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
"""Signatures that one structure keeps: it may be saved by several groups, or with other options."""

_ITEM_NBYTES = 500
"""What lists, names and paths take for each item, about."""


class KnownStructure:
    """The table of a state dict's items, with what every save of them needs and no save changes.

    Args:
        names: the FQN of each item, in the order of the state dict.
        structures: what each is.
        paths: the place of each in the nested state dict; ``None`` where the planner does not flatten.
        attributes: what the planner adds to ``Metadata``, encoded: a planner may change what it gave; 1 is not True.
        peers: as in :class:`StructureTable`.

    Attributes:
        table: the items, sorted.
        order: intp ``[N]``, for each item of the table its place in the state dict's order.
        expected: dtype and local size of each item of the table; ``None`` for an object.

    Raises:
        PlanConflict: a name stands for two items.
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
        """What it takes to keep this, about."""
        return sum(column.nbytes for column in self.table.columns) + _ITEM_NBYTES * len(self._names)

    def matches(
        self,
        names: list[str],
        structures: list[ItemStructure],
        paths: list[Path] | None,
        attributes: bytes,
        peers: tuple[int, ...] = (),
    ) -> bool:
        """Whether these are the items that this is the table of."""
        return (
            self._structures == structures
            and self._names == names
            and self._paths == paths
            and self._attributes == attributes
            and self._peers == peers
        )

    def signature(self, context: PlanContext) -> StructureSignature:
        """The signature of the table in ``context``; hashed once for each context."""
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
        cache: in which they are a table; ``None`` for one of its own.
        max_nbytes: memory that they may take together.
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
        """The structure of these items, made if it is not known.

        Args:
            names, structures: of each item, in the order of the state dict.
            mappings: FQN to place in the nested state dict; ``None`` where the planner does not flatten.
            attributes: what the planner adds to ``Metadata``.
            peers: as in :class:`StructureTable`.

        Raises:
            PlanConflict: a name stands for two items.
            RobustCheckpointError: a name has no path.
            TypeError, OverflowError, ValueError: what ``attributes`` has cannot be added to ``Metadata``.
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
"""Of this process, for all planners: a planner may live for one save."""
