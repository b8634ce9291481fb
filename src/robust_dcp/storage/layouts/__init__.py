"""How the items of a checkpoint lie in files, by name. A layout is all that knows what a file of it looks like."""

from __future__ import annotations

from typing import Final

from robust_dcp.storage.layouts.protocol import FileName, Frame, Head, ItemColumns, Layout, PlacedTensor
from robust_dcp.storage.layouts.safetensors import SAFETENSORS
from robust_dcp.storage.layouts.torch_records import TORCH

__all__ = [
    "LAYOUTS",
    "SAFETENSORS",
    "TORCH",
    "FileName",
    "Frame",
    "Head",
    "ItemColumns",
    "Layout",
    "PlacedTensor",
    "layout_named",
]

LAYOUTS: Final[tuple[Layout, ...]] = (TORCH, SAFETENSORS)


def layout_named(name: str) -> Layout:
    """The layout called ``name``.

    Raises:
        ValueError: there is none.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"layout must be one of {', '.join(repr(layout.name) for layout in LAYOUTS)}, got {name!r}")
