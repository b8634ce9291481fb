"""The small parts of an index that are not columns, in JSON.

This module owns what they may contain. ``build`` writes them, ``stored_index`` reads them.
"""

from __future__ import annotations

import msgspec

__all__ = ["IndexMeta", "StoredMeta"]


class StoredMeta(msgspec.Struct, frozen=True):
    """DCP's ``StorageMeta``."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: tuple[str, ...] = ()


class IndexMeta(msgspec.Struct, frozen=True):
    """The fields of ``Metadata`` other than its items.

    Attributes:
        version: the version of DCP's format.
        has_paths: whether names have a place in a nested state dict (``planner_data``).
        storage_meta: what the writer gave.
    """

    version: str | None
    has_paths: bool
    storage_meta: StoredMeta | None
