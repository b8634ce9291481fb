"""The small parts of an index that are no columns: JSON.

Owns what may stand in them. ``build`` writes them, ``stored_index`` reads them.
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
    """What ``Metadata`` says besides its items.

    Attributes:
        version: of DCP's format.
        has_paths: whether names have a place in a nested state dict (``planner_data``).
        storage_meta: as the writer gave it.
    """

    version: str | None
    has_paths: bool
    storage_meta: StoredMeta | None
