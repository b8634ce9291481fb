"""Layouts: how the items of a checkpoint lie in files. Only a layout knows what its files look like."""

from __future__ import annotations

from typing import Final

from robust_dcp.storage.layouts.places import TORCH, Layout
from robust_dcp.storage.layouts.safetensors import SAFETENSORS

LAYOUTS: Final[dict[str, Layout]] = {layout.name: layout for layout in (TORCH, SAFETENSORS)}


def layout_named(name: str) -> Layout:
    """Find the layout called ``name``.

    Raises:
        ValueError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {name!r}")
    return LAYOUTS[name]
