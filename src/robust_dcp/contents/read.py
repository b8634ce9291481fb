"""Reads what a checkpoint holds: from ``.metadata``, or from the headers of safetensors files where there is none."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any, Final

from robust_dcp.contents.items import Chunk, Contents, Item, StoredFile, natural
from robust_dcp.contents.stand_ins import Names, Unknown
from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, check_relative_path
from robust_dcp.storage.files.what_is_there import what_is_there
from robust_dcp.storage.files.whole_file import read_whole_file
from robust_dcp.storage.metadata.stored_pickle import corrupt, files_are_marked, unpickled

__all__ = ["METADATA_MAX_NBYTES", "holds_checkpoint", "read_contents"]

METADATA_MAX_NBYTES: Final = 16 << 30
_MAX_DIMENSIONS: Final = 64
_NOWHERE: Final = (None, None, None)

Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int | None, int | None, tuple[str, ...]]]
"""File, first byte, length and transforms of a chunk, by the name and the offsets of the chunk."""


def holds_checkpoint(disk: Disk, path: str) -> bool:
    """Whether there is a ``.metadata`` in ``path``, or a safetensors file."""
    return disk.exists(os.path.join(path, METADATA_NAME)) or bool(_safetensors_in(disk, path))


def read_contents(disk: Disk, path: str) -> Contents:
    """What the checkpoint in ``path`` holds.

    Raises:
        StorageError: there is no checkpoint, or it cannot be read.
        CorruptCheckpoint: its ``.metadata`` is not what a writer made, or makes no sense.
        UnsafeCheckpoint: it names files outside of the checkpoint, or was made to change this program.
    """
    metadata_path = os.path.join(path, METADATA_NAME)
    data = read_whole_file(disk, metadata_path, METADATA_MAX_NBYTES)
    if data is None:
        return _of_safetensors(disk, path)
    names = Names()
    metadata = unpickled(
        data, metadata_path, allowed=frozenset(), stand_ins=names.classes, registered={}, other=names.other
    )
    if not isinstance(metadata, names["Metadata"]):
        found = f"a {type(metadata).__name__}"
        if isinstance(metadata, Unknown):
            found = f"what {', '.join(names.unknown)} would make, which was not called"
        raise corrupt(metadata_path, "the pickle of a Metadata", found)
    try:
        places = _places(metadata.storage_data, names, metadata_path)
        items = _items(metadata, names, places)
    except errors.RobustCheckpointError:
        raise
    except Exception as error:  # values of other types than writers give them
        raise corrupt(metadata_path, "usable values", f"{type(error).__name__}: {error!s:.300}") from error
    files = _stored_files(disk, path, items)
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return Contents(
        path=path,
        layout="safetensors" if any(file.name.endswith(SAFETENSORS_SUFFIX) for file in files) else "torch",
        written_by="robust_dcp" if files_are_marked(data) else "torch",
        saved_seconds=disk.modified_seconds(metadata_path),
        save_id=save_id if isinstance(save_id, str) else None,
        items=items,
        files=files,
        unknown_classes=names.unknown,
    )


def _stored_files(disk: Disk, path: str, items: tuple[Item, ...]) -> tuple[StoredFile, ...]:
    """The files that hold these items, with the sizes that they have.

    Raises:
        StorageError: a file cannot be looked at.
    """
    needed: dict[str, int] = defaultdict(int)
    held: Counter[str] = Counter()
    for item in items:
        for chunk in item.chunks:
            if chunk.file is not None:
                held[chunk.file] += 1
                needed[chunk.file] = max(needed[chunk.file], (chunk.start or 0) + (chunk.stored_nbytes or 0))
    return tuple(
        StoredFile(name, _size_of(disk, os.path.join(path, name)), needed[name], held[name]) for name in sorted(held)
    )


def _size_of(disk: Disk, path: str) -> int | None:
    return disk.size(path) if disk.exists(path) else None


def _of_safetensors(disk: Disk, path: str) -> Contents:
    shards = _safetensors_in(disk, path)
    if not shards:
        raise errors.StorageError(
            f"{path} holds no checkpoint, because there is no {METADATA_NAME}: {what_is_there(disk, path)}",
            path=path,
            operation="open",
        )
    # The check of such files needs torch's dtypes. They are rare, so a second for the import of torch does no harm.
    from robust_dcp.storage.metadata.shard_metadata import metadata_of_shards

    metadata = metadata_of_shards(disk, path, shards)
    places: Places = {
        (index.fqn, tuple(index.offset or ())): (info.relative_path, info.offset, info.length, ())
        for index, info in metadata.storage_data.items()
    }
    tensors: dict[str, Any] = dict(metadata.state_dict_metadata)
    items = tuple(
        Item(
            name,
            None,
            str(tensor.properties.dtype).removeprefix("torch."),
            tuple(tensor.size),
            tuple(_chunk(name, tuple(chunk.offsets), tuple(chunk.sizes), places) for chunk in tensor.chunks),
        )
        for name, tensor in sorted(tensors.items(), key=lambda entry: natural(entry[0]))
    )
    return Contents(
        path=path,
        layout="safetensors",
        written_by="safetensors",
        saved_seconds=max(disk.modified_seconds(os.path.join(path, name)) for name in shards),
        save_id=None,
        items=items,
        files=_stored_files(disk, path, items),
    )


def _safetensors_in(disk: Disk, path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return sorted(name for name in disk.list_directory(path) if name.endswith(SAFETENSORS_SUFFIX))


def _places(storage_data: Any, names: Names, file: str) -> Places:
    places: Places = {}
    for index, info in (storage_data or {}).items():
        if not isinstance(index, names["MetadataIndex"]) or not isinstance(index.fqn, str):
            raise corrupt(file, "a MetadataIndex", type(index).__name__)
        start, nbytes = getattr(info, "offset", None), getattr(info, "length", None)
        if any(number is not None and (type(number) is not int or number < 0) for number in (start, nbytes)):
            raise corrupt(file, f"offset and length of {index.fqn}", f"{start!s:.60} and {nbytes!s:.60}")
        transforms = tuple(str(each)[:60] for each in getattr(info, "transform_descriptors", None) or ())
        name = check_relative_path(getattr(info, "relative_path", None), file=file)
        places[index.fqn, None if index.offset is None else _numbers(index.offset)] = (name, start, nbytes, transforms)
    return places


def _items(metadata: Any, names: Names, places: Places) -> tuple[Item, ...]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    found = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"a name is a {type(name).__name__}")
        path = _path_of(paths.get(name))
        if isinstance(entry, names["TensorStorageMetadata"]):
            chunks = tuple(_chunk(name, _numbers(c.offsets), _numbers(c.sizes), places) for c in entry.chunks)
            found.append(Item(name, path, str(entry.properties.dtype), _numbers(entry.size), chunks))
        elif isinstance(entry, names["BytesStorageMetadata"]):
            found.append(Item(name, path, None, (), (Chunk((), (), *places.get((name, None), _NOWHERE)),)))
        else:
            raise TypeError(f"{name} is a {type(entry).__name__}")
    return tuple(sorted(found, key=lambda item: natural(item.name)))


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], places: Places) -> Chunk:
    place = places.get((name, offsets)) or places.get((name, None)) or _NOWHERE
    return Chunk(offsets, sizes, *place)


def _numbers(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > _MAX_DIMENSIONS or any(type(value) is not int or value < 0 for value in found):
        raise ValueError(f"{found!s:.60} are no sizes")
    return found


def _path_of(keys: Any) -> tuple[str | int, ...] | None:
    if isinstance(keys, tuple) and keys and all(isinstance(key, (str, int)) for key in keys):
        return keys
    return None
