"""What a load reads for each value of a state dict, and whether that can be filled: the read items of stock's planner,
without asking it each time.

Usually a tensor or shard of the state dict is one saved chunk. If the chunks differ, the index finds the overlaps. Both
stay in columns, and no read item is made. Without an index, parts of chunks go to stock's planner.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from robust_dcp.plan.state_dict import UNKNOWN, HeldStructures, holds_shards, own_chunks
from robust_dcp.staging.blocks import PLAIN, extent_nbytes
from robust_dcp.storage.index.stored_index import ChunkKind, StoredChunks, index_of
from robust_dcp.storage.layouts.places import Int64, Places
from robust_dcp.storage.metadata.metadata_file import StorageInfo
from robust_dcp.storage.reading.reads import PlannedItems


@torch.no_grad()
def plan_reads(state_dict: dict[str, Any], metadata: Metadata, before: PlannedItems) -> PlannedItems:
    """The items that stock's ``create_default_local_load_plan`` makes of ``state_dict``, in another order.

    Args:
        state_dict: FQN to value. Keys that ``metadata`` does not have are left out.
        before: items that are planned already. They are part of the plan.
    """
    index, names, kinds, places = index_of(metadata), [*before.names], [*before.kinds], before.places
    columns: list[tuple[Int64, Int64, Int64]] = [(before.kind_of, before.chunks, np.empty(0, dtype=np.int64))]
    first_of: dict[int, int] = {}  # by the id of a list of kinds, which the index keeps
    others: dict[str, Any] = {}
    held = HeldStructures(partial(find_state_dict_object, state_dict))
    for key, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(key)
        chunks: Any = getattr(saved, "chunks", None)
        wanted: Any = None
        if isinstance(chunks, StoredChunks):
            structure = held.of(key, value)
            wanted = chunks_held(value) if structure is UNKNOWN else () if structure is None else (structure,)
        if wanted and len(wanted) > 1 and len({chunk.offsets for chunk in wanted}) < len(wanted):
            wanted = None  # of shards of one place (tied weights), only stock's read items say which of them to fill
        if wanted is None and saved is not None:
            others[key] = value
        for chunk in wanted or ():
            rows, found = chunks.overlap(chunk.offsets, chunk.sizes)
            first = first_of.setdefault(id(found), len(kinds))
            kinds += found if first == len(kinds) else ()
            names += [key] * len(rows)
            columns.append((np.arange(first, first + len(rows)), rows - chunks.first, rows))
    kind_of, numbers, rows = map(np.concatenate, zip(*columns, strict=True))
    if index is not None and len(rows):
        places = places.followed_by(index.places(rows))
    of_others = [*before.others, *create_default_local_load_plan(others, metadata, strict=False).items]
    return PlannedItems(names, before.targets, kinds, kind_of, numbers, places, of_others)


def whole_tensors(state_dict: dict[str, Any], metadata: Metadata) -> PlannedItems:
    """The tensors for which the checkpoint has exactly the chunk, size and dtype that this rank holds.

    :func:`plan_reads` plans all other tensors.
    """
    index = index_of(metadata)
    names: list[str] = []
    targets: list[torch.Tensor] = []
    kind_of: list[int] = []
    kinds: list[ChunkKind] = []
    number_of: dict[int, int] = {}  # by the id of a structure, which ``held`` keeps; -1 if it is not a whole chunk
    held = HeldStructures(partial(find_state_dict_object, state_dict))
    for name, value in state_dict.items():
        structure = held.of(name, value)
        if structure is None or structure is UNKNOWN:
            continue
        local = value.to_local() if type(value) is DTensor else value
        number = number_of.get(id(structure))
        if number is None:
            is_whole = 0 not in structure.sizes and local.shape == structure.sizes
            number = number_of[id(structure)] = len(kinds) if is_whole else -1
            if is_whole:
                size, at, lengths = map(torch.Size, (structure.shape, structure.offsets, structure.sizes))
                kinds.append(ChunkKind(local.dtype, size, at, lengths))
        if number >= 0 and (local is value or local.dtype is value.dtype):
            names.append(name)
            targets.append(local)
            kind_of.append(number)
    asked, chunks, places = (
        _whole_chunks(names, kinds, kind_of, metadata) if index is None else index.find_whole(names, kinds, kind_of)
    )
    names, targets = [names[place] for place in asked], [targets[place] for place in asked]
    return PlannedItems(names, targets, kinds, np.array(kind_of, dtype=np.int64)[asked], chunks, places)


def _whole_chunks(
    names: Sequence[str], kinds: Sequence[ChunkKind], kind_of: Sequence[int], metadata: Metadata
) -> tuple[Int64, Int64, Places]:
    """What :meth:`StoredIndex.find_whole` finds in an index, from the metadata of a checkpoint without one."""
    rows: list[tuple[int, int, int, int, int]] = []
    files: dict[str, int] = {}
    stored: Mapping[Any, Any] = metadata.storage_data or {}
    for place, (name, number) in enumerate(zip(names, kind_of, strict=True)):
        kind, entry = kinds[number], metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata) or (entry.properties.dtype, entry.size) != kind[:2]:
            continue
        for row, chunk in enumerate(entry.chunks):
            if (chunk.offsets, chunk.sizes) == (kind.offsets, kind.lengths):
                info = stored.get(MetadataIndex(name, kind.offsets))
                if isinstance(info, StorageInfo) and not getattr(info, "transform_descriptors", None):
                    file = files.setdefault(info.relative_path, len(files))
                    rows.append((place, row, file, info.offset, info.length))
                break
    asked, chunks, *places = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return asked, chunks, Places(list(files), *places)


def chunks_held(value: Any) -> Sequence[ChunkStorageMetadata] | None:
    """The chunks that this rank holds of a tensor, as stock's planner sees them; ``None`` if it is not a tensor."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return ()
    chunks = own_chunks(value)
    if chunks is None and isinstance(value, torch.Tensor):
        return _create_chunk_list(value)
    return chunks


# Whether the memory of a tensor can be filled.

_MAPPING: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .(.)", re.MULTILINE)


def local_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that this rank holds of the values of a state dict, each with its name. Those without elements are
    left out, and those whose memory torch does not let us look at.
    """
    for name, value in values.items():
        parts = [value.to_local() if isinstance(value, DTensor) else value]
        if holds_shards(type(value)):
            parts = [shard.tensor for shard in value.local_shards()]
        for part in parts:
            if type(part) in PLAIN and part.layout is torch.strided and not part.is_meta and part.numel() > 0:
                yield name, part


def unusable_targets(targets: Sequence[tuple[str, torch.Tensor]], *, are_filled: bool = True) -> list[str]:
    """Find tensors that a load cannot fill, because their memory was freed, is read-only, or holds several elements in
    one place, of one tensor or of two. To write into the first two kinds would end the process.

    Args:
        targets: tensors as :func:`local_tensors` gives them.
        are_filled: whether they are written to. Otherwise only those whose memory was freed are found.

    Returns:
        one text for each such tensor, which says why.
    """
    begins, ends, held = list[int](), list[int](), list[int]()
    for _, tensor in targets:
        begin, storage = tensor.data_ptr(), tensor.untyped_storage()
        begins.append(begin)
        held.append(storage.data_ptr() + storage.nbytes())
        ends.append(begin + (tensor.nbytes if tensor.is_contiguous() else extent_nbytes(tensor)))
    addresses, problems = np.array(begins, dtype=np.uint64), list[str]()
    is_freed = (addresses == 0) | (np.array(ends, dtype=np.uint64) > np.array(held, dtype=np.uint64))
    for number in np.flatnonzero(is_freed).tolist():
        name, tensor = targets[number]
        data_end = tensor.storage_offset() * tensor.itemsize + ends[number] - begins[number]
        problems.append(
            f"{name!r} cannot be loaded into: its storage holds {tensor.untyped_storage().nbytes()} bytes where its "
            f"data ends at byte {data_end}: its memory was freed"
        )
    if problems or not are_filled:
        return problems
    problems = _overlaps(targets, addresses, np.array(ends, dtype=np.uint64))
    for number in np.flatnonzero(_are_read_only(addresses)).tolist():
        name, tensor = targets[number]
        if tensor.is_cpu:
            problems.append(f"{name!r} cannot be loaded into: its memory may not be written to")
    return problems


def names_of_one_memory(targets: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
    """The names whose tensor a later name has too, such as that of a tied weight. To read one of them is enough. As in
    stock, the last one counts if they were not tied when they were saved; reads of both at a time would mix them.
    """
    begins = [tensor.data_ptr() for _, tensor in targets]
    if len(set(begins)) == len(begins):
        return set()
    n_parts, n_there = Counter(name for name, _ in targets), Counter(begins)
    last: dict[tuple[Any, ...], str] = {}
    earlier = set()
    for begin, (name, tensor) in zip(begins, targets, strict=True):
        if n_there[begin] > 1 and n_parts[name] == 1:
            memory = _memory_of(tensor)
            if memory in last:
                earlier.add(last[memory])
            last[memory] = name
    return earlier


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where the elements of a tensor lie, in whatever order: the same for a weight, its transpose and a view of it."""
    steps: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if steps and stride == steps[-1][0] * steps[-1][1]:
            steps[-1] = steps[-1][0], steps[-1][1] * size
        elif size > 1:
            steps.append((stride, size))
    return tensor.data_ptr(), tensor.dtype, *steps


_MOST_COMPARED: Final = 1 << 30
"""Larger stretches of memory that tensors with gaps share are not looked at. Such a tensor has a gigabyte or more."""


def _overlaps(
    targets: Sequence[tuple[str, torch.Tensor]], begins: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]
) -> list[str]:
    """Find tensors whose elements share memory with others, where the others have some of their elements only: tied
    weights are one tensor of two names.
    """
    if not targets:
        return []
    problems = []
    order = np.argsort(begins, kind="stable")
    is_joined = begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]
    bounds = [0, *(np.flatnonzero(~is_joined) + 1).tolist(), len(order)]
    for start, stop in pairwise(bounds):
        if stop - start > 1 or not targets[order[start]][1].is_contiguous():
            run = {_memory_of(targets[number][1]): targets[number] for number in order[start:stop].tolist()}
            problems += _overlaps_within(list(run.values()))
    return problems


def _overlaps_within(targets: list[tuple[str, torch.Tensor]]) -> list[str]:
    """The same of tensors between the first and the last of which no memory is free of them."""
    if len(targets) == 1 and _is_injective(targets[0][1]):
        return []
    # In units of the largest size that divides all places, one truth value each.
    unit = math.gcd(*(n for _, each in targets for n in (each.itemsize, each.data_ptr() - targets[0][1].data_ptr())))
    base = min(tensor.data_ptr() for _, tensor in targets)
    n_units = max(tensor.data_ptr() - base + extent_nbytes(tensor) for _, tensor in targets) // unit
    if n_units > _MOST_COMPARED:
        return []

    def units(mask: npt.NDArray[np.bool_], tensor: torch.Tensor) -> npt.NDArray[np.bool_]:
        each = tensor.itemsize // unit
        strides = [stride * each for stride in tensor.stride()]
        return np.lib.stride_tricks.as_strided(
            mask[(tensor.data_ptr() - base) // unit :], (*tensor.shape, each), (*strides, 1)
        )

    problems, taken = [], np.zeros(n_units, dtype=np.bool_)
    for number, (name, tensor) in enumerate(targets):
        if not _is_injective(tensor):
            own = np.zeros(n_units, dtype=np.bool_)
            units(own, tensor)[...] = True
            if np.count_nonzero(own) < tensor.nbytes // unit:
                problems.append(f"{name!r} cannot be loaded into: its own elements share memory")
                continue
        if units(taken, tensor).any():
            for other, its_tensor in targets[:number]:
                own = np.zeros(n_units, dtype=np.bool_)
                units(own, its_tensor)[...] = True
                if units(own, tensor).any():
                    problems.append(f"{name!r} cannot be loaded into: it shares memory with {other!r}")
                    break
        units(taken, tensor)[...] = True
    return problems


def _is_injective(tensor: torch.Tensor) -> bool:
    """Whether it is plain from the strides that no two elements share memory."""
    next_free = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < next_free:
            return False
        next_free += stride * (size - 1)
    return True


def _are_read_only(addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which addresses are in memory that may not be written to: of a file that was mapped to be read, for example."""
    mappings: list[tuple[int, int]] = []
    with suppress(OSError), open("/proc/self/maps", "rb") as file:  # other systems do not tell
        for begin, end, may_write in _MAPPING.findall(file.read()):
            if may_write != b"w":
                mappings.append((int(begin, 16), int(end, 16)))
    starts, stops = np.array(mappings or [(0, 0)], dtype=np.uint64).T
    number = np.searchsorted(starts, addresses, side="right")
    inside: npt.NDArray[np.bool_] = (number > 0) & (addresses < stops[number - 1])
    return inside
