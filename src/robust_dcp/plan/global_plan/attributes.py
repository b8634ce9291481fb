"""Merges the attributes of DCP's ``Metadata`` that the planners of all ranks add. ``make`` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.structure import StructureTable, attributes_of

__all__ = ["merge_attributes"]


def merge_attributes(tables: Sequence[StructureTable]) -> dict[str, dict[str, Any]]:
    """Attribute -> name -> fact, over all ranks.

    Raises:
        PlanConflict: two ranks have different facts for one name.
    """
    merged: dict[str, dict[str, Any]] = {}
    told_by: dict[tuple[str, str], int] = {}
    for rank, data in _distinct(tables):
        for attribute, facts in attributes_of(data).items():
            known = merged.setdefault(attribute, {})
            for name, fact in facts.items():
                first = told_by.setdefault((attribute, name), rank)
                if known.setdefault(name, fact) != fact:
                    raise PlanConflict(
                        f"{attribute}[{name!r}] of the metadata is {known[name]!r} on rank {first} and {fact!r} on "
                        f"rank {rank}; a name must mean the same tensor on every rank of the group",
                        key=name,
                        ranks=[first, rank],
                    )
    return merged


def _distinct(tables: Sequence[StructureTable]) -> list[tuple[int, bytes]]:
    """The distinct attributes, each with the first rank that has them. Replicas have the same ones."""
    first: dict[bytes, int] = {}
    for rank, table in enumerate(tables):
        first.setdefault(table.attributes, rank)
    return [(rank, data) for data, rank in first.items() if data]
