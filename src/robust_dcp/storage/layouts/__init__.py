"""Layouts: how the items of a checkpoint lie in files. Only a layout knows what its files look like."""

from __future__ import annotations

from typing import Final

from robust_dcp.storage.layouts.places import TORCH, Layout
from robust_dcp.storage.layouts.safetensors import SAFETENSORS

__all__ = [
    "LAYOUTS",
    "SAFETENSORS",
    "TORCH",
    "Layout",
    "layout_named",
]

LAYOUTS: Final[tuple[Layout, ...]] = (TORCH, SAFETENSORS)


def layout_named(name: str) -> Layout:
    """Find the layout called ``name``.

    Raises:
        ValueError: there is no such layout.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"layout must be one of {', '.join(repr(layout.name) for layout in LAYOUTS)}, got {name!r}")
