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
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from robust_dcp.errors import CorruptCheckpoint, PlanConflict
from robust_dcp.staging.blocks import Block, host_address
from robust_dcp.storage.files.paths import METADATA_NAME
from robust_dcp.storage.index.stored_index import ChunkKind
from robust_dcp.storage.layouts.footer import item_id, seed_of
from robust_dcp.storage.layouts.places import Places
from robust_dcp.storage.metadata.metadata_file import StorageInfo
from robust_dcp.storage.metadata.stored_pickle import without_garbage_collection
from robust_dcp.storage.records.checksum import crc32


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


_SMALL_NBYTES: Final = 64 << 10
"""An item up to this length is read whole: that takes no longer than reading a part of it. A gap up to this length
between two items is read as well.
"""


_MEDIUM_NBYTES: Final = 2 << 20
"""A longer item is read straight into its target, where that takes bytes. For a shorter one a copy is cheaper than the
read of its header that comes first.
"""


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
    def name(self) -> str:
        """The name of the item in errors."""
        index = self.item.storage_index
        return index.fqn if not index.offset else f"{index.fqn} at {list(index.offset)}"

    @property
    def is_whole(self) -> bool:
        """Whether all of the stored item is wanted."""
        return self.item.type == LoadItemType.BYTE_IO or self.item.lengths == self.shape


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


class Reads:
    """The reads of a load, ordered by file and by place in the file.

    Args:
        items: the items. A :class:`Read` is made of one that is in columns only if somebody asks for it.
        others: a read for each of the others.

    Attributes:
        order: int64, for each read its number among ``items``.
        places: where each lies.
    """

    def __init__(self, items: PlannedItems, others: Sequence[Read]) -> None:
        self.items = items
        self._n_columns = len(items.names)
        self._others = others
        _, paths, starts, lengths, *_ = zip(*others, strict=True) if others else ((),) * len(Read._fields)
        columns = np.arange(len(others)), np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        at = Places(paths, *columns)
        self.order, self.places = items.places.followed_by(at).sorted()

    @cached_property
    def item_ids(self) -> Int64:
        """int64: for each read its :func:`~robust_dcp.storage.layouts.footer.item_id`. Only files of ours need them."""
        seeds = [seed_of(tuple(kind.offsets)) for kind in self.items.kinds]
        kind_of = zip(self.items.names, self.items.kind_of.tolist(), strict=True)
        ids = [crc32(name.encode(errors="surrogatepass"), seeds[kind]) for name, kind in kind_of]
        ids += [item_id(read.item.storage_index.fqn, read.item.storage_index.offset or ()) for read in self._others]
        return np.array(ids, dtype=np.int64)[self.order]

    def read(self, place: int) -> Read:
        """The read at ``place``."""
        number, items, at = int(self.order[place]), self.items, self.places
        if number >= self._n_columns:
            return self._others[number - self._n_columns]
        kind, path = items.kinds[int(items.kind_of[number])], at.files[int(at.file[place])]
        start, nbytes = int(at.start[place]), int(at.nbytes[place])
        return Read(items.in_columns(number), path, start, nbytes, (), kind.dtype, kind.lengths)

    def groups(self, block_nbytes: int) -> list[Group]:
        """All reads. Items that lie next to each other are in groups of up to ``block_nbytes`` bytes.

        Items are alone if they are large, have transforms, or are wanted only in part.
        """
        _, file, start, nbytes = self.places
        is_part = np.array([(kind.part or kind).lengths != kind.lengths for kind in self.items.kinds], dtype=np.bool_)
        in_columns = is_part[self.items.kind_of] & (self.items.places.nbytes > _SMALL_NBYTES)
        others = [bool(read.transforms) or (read.nbytes > _SMALL_NBYTES and not read.is_whole) for read in self._others]
        is_alone = np.append(in_columns, np.array(others, dtype=np.bool_))[self.order]
        is_alone |= nbytes > min(block_nbytes, _MEDIUM_NBYTES)
        end = start + nbytes
        is_near = (file[1:] == file[:-1]) & (start[1:] - end[:-1] <= _SMALL_NBYTES) & ~is_alone[1:] & ~is_alone[:-1]
        firsts = [*np.flatnonzero(np.append(True, ~is_near)).tolist(), len(file)] if len(file) else []
        groups: list[Group] = []
        for first, stop in pairwise(firsts):
            if is_alone[first]:
                groups.append(Group(np.arange(first, stop), int(end[first]), self.read(first)))
                continue
            furthest = np.maximum.accumulate(end[first:stop])  # an item may end behind the next one
            at = first
            while at < stop:
                fits = int(np.searchsorted(furthest, start[at] + block_nbytes, side="right"))
                behind = max(first + fits, at + 1)
                groups.append(Group(np.arange(at, behind), int(furthest[behind - first - 1]), None))
                at = behind
        return groups


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
                name = Read(item, "", 0, 0, (), None, None).name
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
