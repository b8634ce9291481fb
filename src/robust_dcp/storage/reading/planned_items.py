"""The items that a load plan reads, without a Python object for each tensor that is read exactly as it was saved.

This module owns the list of read items in DCP's ``LoadPlan``. ``RobustReader`` reads its columns. Anyone else sees an
ordinary list of the read items that DCP's planner makes. ``plan.load_items`` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.storage.index import ChunkKind, WholeChunks
from robust_dcp.storage.layouts.footer import seed_of
from robust_dcp.storage.records.checksum import crc32

__all__ = ["PlannedItems", "WholeTensors", "whole_item"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WholeTensors:
    """Tensors that are read exactly as they were saved, in columns.

    Attributes:
        names: the name of each tensor.
        targets: this rank's tensor for each, of the dtype and size of its kind.
        kinds: the distinct pairs of dtype and size.
        kind_of: int64, the number of each tensor's kind.
        chunks: int64, for each the number of its chunk among the saved chunks of the tensor.
        files: relative paths of the files.
        file_of, start, nbytes: int64, where each lies: the number of its file, its first byte, its length in bytes.
    """

    names: Sequence[str]
    targets: Sequence[torch.Tensor]
    kinds: Sequence[ChunkKind]
    kind_of: Int64
    chunks: Int64
    files: Sequence[str]
    file_of: Int64
    start: Int64
    nbytes: Int64

    @classmethod
    def found(
        cls,
        names: Sequence[str],
        targets: Sequence[torch.Tensor],
        kinds: Sequence[ChunkKind],
        kind_of: Sequence[int],
        chunks: WholeChunks,
    ) -> WholeTensors:
        """The tensors of ``names`` for which ``chunks`` holds a saved chunk."""
        if len(chunks.asked) < len(names):
            asked = chunks.asked.tolist()
            names, targets = [names[place] for place in asked], [targets[place] for place in asked]
        return cls(
            names,
            targets,
            kinds,
            np.array(kind_of, dtype=np.int64)[chunks.asked],
            chunks.chunk,
            chunks.files,
            chunks.file,
            chunks.start,
            chunks.nbytes,
        )

    @classmethod
    def none(cls) -> WholeTensors:
        """No tensors."""
        empty: Int64 = np.empty(0, dtype=np.int64)
        return cls((), (), (), empty, empty, (), empty, empty, empty)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors."""
        counts = np.bincount(self.kind_of, minlength=len(self.kinds)).tolist()
        return sum(count * kind.nbytes for count, kind in zip(counts, self.kinds, strict=True))

    @property
    def items(self) -> Int64:
        """int64: for each tensor the :func:`~robust_dcp.storage.layouts.footer.item_id` of its saved chunk."""
        seeds = [seed_of(tuple(kind.offsets)) for kind in self.kinds]
        names = (name.encode(errors="surrogatepass") for name in self.names)
        return np.fromiter(map(crc32, names, [seeds[kind] for kind in self.kind_of.tolist()]), dtype=np.int64)

    def item(self, place: int) -> ReadItem:
        """The tensor at ``place`` as a read item, as DCP's planner makes it."""
        kind = self.kinds[int(self.kind_of[place])]
        return whole_item(self.names[place], kind.offsets, kind.lengths, int(self.chunks[place]))


class PlannedItems(Sequence[ReadItem]):
    """The items of a load plan. The items of :attr:`whole` come first.

    Args:
        whole: the tensors that are read as they were saved.
        others: everything else.
        planner: the planner that made the plan. The targets in ``whole`` are used only if the reader gets this planner
            with the plan.
    """

    def __init__(self, whole: WholeTensors, others: list[ReadItem], planner: LoadPlanner) -> None:
        self.whole = whole
        self.others = others
        self.planner = planner

    @cached_property
    def _all(self) -> list[ReadItem]:
        return [self.whole.item(place) for place in range(len(self.whole))] + self.others

    def __len__(self) -> int:
        return len(self.whole) + len(self.others)

    @overload
    def __getitem__(self, place: int) -> ReadItem: ...

    @overload
    def __getitem__(self, place: slice) -> list[ReadItem]: ...

    def __getitem__(self, place: int | slice) -> ReadItem | list[ReadItem]:
        return self._all[place]

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> Any:
        return list, (self._all,)


def whole_item(name: str, offsets: torch.Size, lengths: torch.Size, chunk: int) -> ReadItem:
    """The read item that reads all of the saved chunk with this number into all that this rank holds of the tensor."""
    zeros = _zeros(len(offsets))
    stored = MetadataIndex(name, offsets, chunk)
    wanted = stored if chunk == 0 else MetadataIndex(name, offsets, 0)
    return ReadItem(LoadItemType.TENSOR, wanted, zeros, stored, zeros, lengths)


@cache
def _zeros(n_dimensions: int) -> torch.Size:
    return torch.Size([0] * n_dimensions)
