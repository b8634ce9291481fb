"""The reads of a load: what is read, from where, into which tensor, and what is read together.

A load plan may hold thousands of tensors, and of parts of tensors. What is looked up in an index stays in columns
(:class:`PlannedItems`) until it is read. Everyone else sees it as the ordinary list of read items that DCP's planner
makes. What is not copied in columns either is a :class:`Read`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.collector import without_garbage_collection
from robust_dcp.errors import CorruptCheckpoint, PlanConflict
from robust_dcp.staging.blocks import Block, host_address
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.index.stored_index import ChunkKind
from robust_dcp.storage.layouts.places import Places
from robust_dcp.storage.metadata.metadata_file import StorageInfo


def may_ask_early(planner: LoadPlanner) -> bool:
    """Whether we may ask for targets at any time, and fill them on other threads.

    A planner whose ``commit_tensor`` does nothing cannot depend on when it is called. Other planners (Megatron-Core's)
    are asked for a target only once the data is there, and the target is committed at once.
    """
    return getattr(type(planner), "commit_tensor", None) is DefaultLoadPlanner.commit_tensor


def target_of(planner: LoadPlanner, item: ReadItem, *, early: bool) -> torch.Tensor:
    """The tensor that ``item`` is to be read into.

    Args:
        early: whether :func:`may_ask_early` holds.

    Raises:
        ValueError: the tensor has another size than ``item``.
        PlanConflict: the tensor's memory was freed.
    """
    target: torch.Tensor = planner.resolve_tensor(item)
    try:
        host_address(target)
    except RuntimeError as error:
        name = item.dest_index.fqn
        raise PlanConflict(f"{name!r} cannot be loaded into: {error}", key=name) from error
    if target.requires_grad or not early:  # planners get detached tensors to commit, as from DCP
        target = target.detach()
    if target.size() != item.lengths and target.size() != torch.Size(item.lengths):
        raise ValueError(
            f"the planner asked for {list(item.lengths)} elements of {item.storage_index}, and gave a tensor of "
            f"size {list(target.size())} for them"
        )
    return target


Int64 = npt.NDArray[np.int64]

_ZEROS: Final = torch.Size([0] * 64)  # the most dimensions that torch allows


_NONE: Final[Int64] = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class PlannedItems(Sequence[ReadItem]):
    """The items of a load plan. Those in columns come first: tensors that are read exactly as they were saved, and then
    parts of saved chunks.

    Attributes:
        names: the name of each item in columns.
        targets: this rank's tensor for each of the first ones, which are whole. It has the dtype and size of its kind
            and is strided. No negation, conjugation or quantization stands between its memory and its values.
        kinds: the kinds of chunks.
        kind_of: int64, the number of each item's kind.
        chunks: int64, for each the number of its chunk among the saved chunks of the tensor.
        places: where each chunk lies.
        others: all other items.
        planner: the planner that made the plan. The targets are used only if the reader gets this planner with the
            plan.
    """

    names: Sequence[str] = ()
    targets: Sequence[torch.Tensor] = ()
    kinds: Sequence[ChunkKind] = ()
    kind_of: Int64 = field(default_factory=_NONE.copy)
    chunks: Int64 = field(default_factory=_NONE.copy)
    places: Places = Places((), _NONE, _NONE, _NONE)  # noqa: RUF009 (it is never changed)
    others: Sequence[ReadItem] = ()
    planner: LoadPlanner | None = None

    @classmethod
    def of(cls, items: Sequence[ReadItem]) -> PlannedItems:
        """These items. In a plan of another planner none are in columns."""
        return items if isinstance(items, cls) else cls(others=items)

    def without(self, names: set[str]) -> PlannedItems:
        """The whole tensors among these items, without those of these names."""
        kept = [place for place, name in enumerate(self.names) if name not in names]
        files, *columns = self.places
        return PlannedItems(
            [self.names[place] for place in kept],
            [self.targets[place] for place in kept],
            self.kinds,
            self.kind_of[kept],
            self.chunks[kept],
            Places(files, *(column[kept] for column in columns)),
        )

    def data_nbytes(self, metadata: Metadata | None) -> int:
        """The bytes of stored tensor data that these items read."""
        total = int(np.array([kind.nbytes for kind in self.kinds], dtype=np.int64)[self.kind_of].sum())
        saved = {} if metadata is None else metadata.state_dict_metadata
        for item in self.others:
            entry = saved.get(item.storage_index.fqn)
            if item.type == LoadItemType.TENSOR and isinstance(entry, TensorStorageMetadata):
                total += prod(item.lengths) * int(entry.properties.dtype.itemsize)
        return total

    def in_columns(self, place: int) -> ReadItem:
        """What is at ``place`` in the columns as a read item, as DCP's planner makes it."""
        kind, chunk = self.kinds[int(self.kind_of[place])], int(self.chunks[place])
        zeros = _ZEROS[: len(kind.offsets)]
        box, in_chunk, in_box, lengths = kind.part or (kind.offsets, zeros, zeros, kind.lengths)
        wanted, stored = MetadataIndex(self.names[place], box), MetadataIndex(self.names[place], kind.offsets, chunk)
        return ReadItem(LoadItemType.TENSOR, wanted, in_box, stored, in_chunk, lengths)

    @cached_property
    def _all(self) -> list[ReadItem]:
        return [*map(self.in_columns, range(len(self.names))), *self.others]

    def __len__(self) -> int:
        return len(self.names) + len(self.others)

    def __getitem__(self, place: Any) -> Any:
        return self._all[place]

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return list, (self._all,)


class Read(NamedTuple):
    """One read item, and where it lies.

    Attributes:
        item: what the planner asked for.
        relative_path, offset, nbytes: where the stored item lies: its file, first byte and length.
        transforms: the names of the transforms that its bytes went through when they were saved.
        dtype, shape: those of the stored chunk according to the metadata; ``None`` where finding them takes a search.
    """

    item: ReadItem
    relative_path: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    dtype: torch.dtype | None
    shape: torch.Size | None

    @property
    def is_whole(self) -> bool:
        """Whether all of the stored item is wanted."""
        return self.item.type == LoadItemType.BYTE_IO or self.item.lengths == self.shape


def item_name(item: ReadItem) -> str:
    """The name of a stored item in errors."""
    index = item.storage_index
    return index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"


class Group(msgspec.Struct, eq=False):
    """Items that are read together.

    Attributes:
        places: theirs among the reads of a load.
        end: they end before this byte of their file.
        alone: the item, if it is the only one, and is not read in a block with others; else ``None``.
        target: where it is read to, if that is known before.
        block: what several items are read into, once that has begun.
        nbytes: the memory that the read takes, besides blocks.
        result: for a block where its bytes begin and how many were found; for an item that is alone a tensor or bytes,
            or ``None`` if its target was filled.
    """

    places: Int64
    end: int
    alone: Read | None
    target: torch.Tensor | None = None
    block: Block | None = None
    nbytes: int = 0
    result: Future[Any] = msgspec.field(default_factory=Future)


def reads_of(items: Sequence[ReadItem], metadata: Metadata, directory: str) -> list[Read]:
    """Find where ``items`` lie.

    Raises:
        CorruptCheckpoint: ``metadata`` does not say where an item lies.
    """
    reads = []
    with without_garbage_collection():
        for item in items:
            index = item.storage_index
            info: Any = metadata.storage_data.get(index)
            if not isinstance(info, StorageInfo):
                name = item_name(item)
                raise CorruptCheckpoint(
                    f"{METADATA_NAME} in {directory} lists {name!r} but not where its data lies: it was never written",
                    file=METADATA_NAME,
                    item=name,
                    expected="storage info",
                    found=type(info).__name__,
                )
            dtype = shape = None
            entry, number = metadata.state_dict_metadata.get(index.fqn), index.index
            if isinstance(entry, TensorStorageMetadata) and number is not None and 0 <= number < len(entry.chunks):
                chunk = entry.chunks[number]
                if chunk.offsets == index.offset:
                    dtype, shape = entry.properties.dtype, torch.Size(chunk.sizes)
            transforms = tuple(getattr(info, "transform_descriptors", None) or ())
            reads.append(Read(item, info.relative_path, info.offset, info.length, transforms, dtype, shape))
    return reads
