"""What is made of a source: its items under their new names, with the dtypes that they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from robust_dcp.conversion.outline import Outline, Path, outline_of_paths, with_items
from robust_dcp.conversion.rules import Rules
from robust_dcp.conversion.sources import Source
from robust_dcp.storage.pieces import NamedTensor, Piece

__all__ = ["ConversionPlan", "dtype_named", "plan_conversion"]


@dataclass(frozen=True)
class ConversionPlan:
    """The items of the target.

    Attributes:
        source: where the data comes from.
        tensors: with new names and dtypes, in the order of the source.
        objects: new names of other items.
        paths: their keys in a nested state dict.
        unused: patterns of the rules that no item has fitted.
    """

    source: Source
    tensors: tuple[NamedTensor, ...]
    objects: tuple[str, ...]
    paths: dict[str, Path]
    unused: tuple[str, ...]
    _sources: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def outline(self) -> Outline:
        """How the items are nested.

        Raises:
            ValueError: two items are in each other's way.
        """
        if self.source.outline is None:
            return outline_of_paths(self.paths)
        kept = {new for new, old in self._sources.items() if new == old}
        return with_items(self.source.outline, kept, (new for new in self._sources if new not in kept))

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The data of pieces of :attr:`tensors`, contiguous and cast."""
        asked = []
        for piece in pieces:
            tensor = self.source.tensors[self._sources[piece.tensor.name]]
            asked.append(piece._replace(tensor=tensor))
        found = self.source.read(asked)
        return [value.to(piece.tensor.dtype).contiguous() for value, piece in zip(found, pieces, strict=True)]

    def load(self, name: str) -> Any:
        """An object, by its new name."""
        return self.source.load(self._sources[name])


def plan_conversion(source: Source, rules: Rules) -> ConversionPlan:
    """Apply the rules.

    Raises:
        ValueError: two items would get one name, or a dtype is unknown, or nothing is left.
    """
    names = rules.names([*source.tensors, *source.objects])
    for _, dtype in rules.dtypes:
        dtype_named(dtype)
    tensors = []
    for new, old in names.items():
        tensor = source.tensors.get(old)
        if tensor is not None:
            wanted = rules.dtype(new) if tensor.dtype.is_floating_point else None
            tensors.append(NamedTensor(new, dtype_named(wanted) if wanted else tensor.dtype, tensor.shape))
    if not names:
        raise ValueError("no item has a name that --select and --exclude let through")
    return ConversionPlan(
        source,
        tuple(tensors),
        tuple(new for new, old in names.items() if old not in source.tensors),
        {new: _path(new, old, source.paths.get(old)) for new, old in names.items()},
        tuple(rules.unused(names)),
        names,
    )


def _path(new: str, old: str, path: Path | None) -> Path:
    """An item that keeps its name keeps its place, and one with a new name stands under that name."""
    return path if path is not None and new == old else (new,)


def dtype_named(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``.

    Raises:
        ValueError: torch has no floating dtype of that name.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name!r} is no floating dtype of torch, such as bfloat16, float32 or float8_e4m3fn")
    return found
