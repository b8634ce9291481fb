"""A flattened state dict as the items that DCP saves: described, with the data of each item, and with a signature.

Stock's planner is asked once in each save for each kind of tensor. A save with the same items as one of the last saves
reuses its structure: every name, path and item is compared, so every change is noticed.

Some tensors say themselves which chunks of a larger tensor they hold, for example those of Megatron-FSDP. Up to torch
2.14 such a tensor has methods like ``__create_chunk_list__``. Since 2.15 four attributes suffice, those of
``torch.distributed.checkpoint.CheckpointableTensor``; older versions do not look at them. Stock describes them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.decoding import from_json
from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.items import (
    Form,
    ItemKind,
    Items,
    ItemStructure,
    Path,
    is_checkpointable,
    items_of,
    sorted_places,
)
from robust_dcp.staging.blocks import PLAIN, is_plain, on_cpu
from robust_dcp.staging.staging_buffers import TensorForm
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.record import bytes_of, framed_record, is_fixed_size
from robust_dcp.storage.writing.item_source import ItemSource, version_of
from robust_dcp.structure_cache import Cache


def flattened(state_dict: Mapping[Any, Any], *, is_nested: bool) -> tuple[dict[str, Any], dict[str, Path]]:
    """The values of a state dict by their names in a checkpoint, and the path of each: those of stock's planners, whose
    function takes four times as long.

    Args:
        is_nested: whether what lies in dicts and lists has a name of its own.

    Raises:
        PlanConflict: two values have one name.
    """
    flat, paths = dict[str, Any](), dict[str, Path]()
    _flatten(((str(key), value) for key, value in state_dict.items()), (), "", is_nested, flat, paths)
    return flat, paths if is_nested else {}


def _flatten(
    values: Iterable[tuple[str | int, Any]],
    path: Path,
    prefix: str,
    is_nested: bool,
    flat: dict[str, Any],
    paths: dict[str, Path],
) -> None:
    for key, value in values:
        name, path_of_value = f"{prefix}{key}" if prefix else str(key), (*path, key)
        if is_nested and type(value) not in PLAIN:
            if isinstance(value, Mapping):
                inner: Iterable[tuple[str | int, Any]] = ((str(each), below) for each, below in value.items())
                _flatten(inner, path_of_value, f"{name}.", is_nested, flat, paths)
                continue
            if isinstance(value, list) and _holds_values(value):
                _flatten(enumerate(value), path_of_value, f"{name}.", is_nested, flat, paths)
                continue
        if name in flat:
            raise PlanConflict(
                f"the state dict has two values that flatten to the name {name!r} (a key with dots and a nested dict, "
                "or a number and a text); rename one of them",
                key=name,
            )
        flat[name], paths[name] = value, path_of_value


def _holds_values(values: list[Any]) -> bool:
    """Whether what lies in a list has names of its own. A list of numbers, for example, is one object."""
    return any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and _holds_values(each)) for each in values
    )


# What each item is.

_KINDS = {
    WriteItemType.TENSOR: ItemKind.TENSOR,
    WriteItemType.SHARD: ItemKind.SHARD,
    WriteItemType.BYTE_IO: ItemKind.BYTES,
}
_TYPES = {kind: item_type for item_type, kind in _KINDS.items()}


ItemData = torch.Tensor | MetadataIndex
"""Where the data of an item is: the tensor or DTensor that holds it, or the index to ask the planner for."""

Lookup = Callable[[MetadataIndex], Any]

_OBJECT = ItemStructure(kind=ItemKind.BYTES, form=Form.VARIABLE)


def overridden(planner: Any, base: type, hooks: Iterable[str]) -> list[str]:
    """Those of the ``hooks`` that ``planner`` does not have from ``base``, a class that it derives from."""
    return [hook for hook in hooks if getattr(getattr(planner, hook), "__func__", None) is not getattr(base, hook)]


class DescribedItems(msgspec.Struct, frozen=True, eq=False):
    """The items of a state dict, in its order.

    Attributes:
        names: the FQN of each item.
        structures: the structure of each item.
        data: where the data of each item is.
    """

    names: list[str]
    structures: list[ItemStructure]
    data: list[ItemData]

    def write_item(self, place: int) -> WriteItem:
        """The write item that stock's planner would make, with the index that it uses."""
        data, structure = self.data[place], self.structures[place]
        if not isinstance(data, MetadataIndex):
            data = MetadataIndex(self.names[place], None if structure.kind == ItemKind.BYTES else structure.offsets)
        return write_item_of(data, structure)


def describe_items(
    state_dict: Mapping[str, Any], lookup: Lookup, *, is_coordinator: bool = False, by_lookup: bool = False
) -> DescribedItems:
    """Describe the items that stock's ``create_default_local_save_plan`` makes of ``state_dict``.

    ``requires_grad`` of a DTensor is the DTensor's own flag. Stock looks at its local tensor. There the flag depends on
    the grad mode of the thread that saves, so a save on a background thread would get another plan.

    Args:
        state_dict: FQN to value, flattened as the planner wants it.
        lookup: the planner's ``lookup_object``.
        is_coordinator: as stock's planner takes it.
        by_lookup: whether ``lookup`` is not stock's. Then a value does not show what will be written for it.

    Raises:
        PlanConflict: a DTensor is a pending reduction (``Partial``).
        RobustCheckpointError: a value cannot be described. The error names it.
    """
    names: list[str] = []
    structures: list[ItemStructure] = []
    data: list[ItemData] = []
    held = HeldStructures(lookup, is_coordinator=is_coordinator)
    with torch.no_grad():  # so that to_local() of a DTensor returns its local tensor, not a node of an autograd graph
        for name, value in state_dict.items():
            structure: ItemStructure | None = UNKNOWN
            if not by_lookup:
                structure = held.of(name, value)
                if structure is UNKNOWN and not (
                    isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")
                ):
                    names.append(name)
                    structures.append(_OBJECT)
                    data.append(MetadataIndex(name))
                    continue
            if structure is UNKNOWN:
                is_sharded_tensor = holds_shards(type(value))
                for index, each, found in held.by_stock(name, value):
                    # Keep the shards of a ShardedTensor now: each lookup searches through all of them.
                    is_held = is_sharded_tensor and type(found) in PLAIN
                    names.append(index.fqn)
                    structures.append(each)
                    data.append(found if is_held else index)
            elif structure is not None:
                names.append(name)
                structures.append(structure)
                data.append(value)
            elif type(value) is not DTensor:
                raise RobustCheckpointError(f"torch's save planner makes no write item for the tensor {name!r}")
    return DescribedItems(names, structures, data)


UNKNOWN: Final = ItemStructure(kind=ItemKind.BYTES, form=Form.VARIABLE, dtype="unknown")
"""The structure of a value of which only stock's planner can tell what this rank holds."""


class HeldStructures(msgspec.Struct, eq=False):
    """The structures of the tensors of one state dict of which this rank holds one chunk.

    Args:
        lookup: gives the tensor that holds the data of an item.
        is_coordinator: as stock's planner takes it.
    """

    lookup: Lookup
    is_coordinator: bool = False
    _found: dict[tuple[Any, ...], ItemStructure | None] = {}

    def of(self, name: str, value: Any) -> ItemStructure | None:
        """The structure of a tensor that is one item, ``None`` if this rank saves no item of it, or ``UNKNOWN``."""
        kind = type(value)
        local = value.to_local() if kind is DTensor else value
        # With Megatron-FSDP attributes of a tensor, or of its local tensor, tell the chunks. They follow from nothing
        # else then.
        if (
            not is_plain(local)
            or local.is_meta
            or (local.__dict__ and has_own_chunks(local))
            or (kind is DTensor and "__create_chunk_list__" in vars(value))
        ):
            return UNKNOWN
        key: tuple[Any, ...] = (local.dtype, value.requires_grad, value.shape)
        if kind is DTensor:
            # Equal placements may have different classes, which place differently (_StridedShard in torch 2.7).
            placements = value.placements
            key = (*key, local.shape, id(value.device_mesh), placements, tuple(map(type, placements)))
        found = self._found.get(key, UNKNOWN)
        if found is not UNKNOWN:
            return found
        # We do not know whether other people's placement classes compare everything that matters. Stock refuses pending
        # reductions (``Partial``).
        may_repeat = kind is not DTensor or (
            not _is_pending(value) and all(type(each).__module__.startswith("torch.") for each in value.placements)
        )
        described = self.by_stock(name, value) if may_repeat else [(None, UNKNOWN, None)]
        if len(described) > 1:
            raise RobustCheckpointError(
                f"torch's save planner makes {len(described)} write items for the tensor {name!r}, not one"
            )
        structure = self._found[key] = described[0][1] if described else None
        return structure

    def by_stock(self, name: str, value: Any) -> list[tuple[MetadataIndex, ItemStructure, Any]]:
        """For each item of any value its index, its structure, and the data that was looked up."""
        if isinstance(value, DTensor) and _is_pending(value):
            raise PlanConflict(
                f"the DTensor {name!r} has a Partial placement ({value.placements}): its value is a reduction that has "
                "not been done. Call .redistribute() to Replicate or Shard before saving",
                key=name,
            )
        described: list[tuple[MetadataIndex, ItemStructure, Any]] = []
        try:
            for place, item in enumerate(create_default_local_save_plan({name: value}, self.is_coordinator).items):
                index, tensor_data = item.index, item.tensor_data
                if tensor_data is None:
                    described.append((index, _OBJECT, None))
                    continue
                if index.index is None and holds_shards(type(value)):
                    index = MetadataIndex(index.fqn, index.offset, place)  # a hint where lookup should look first
                data, properties, chunk = self.lookup(index), tensor_data.properties, tensor_data.chunk
                is_fixed = (
                    isinstance(data, torch.Tensor)
                    and is_fixed_size(data)
                    and framed_record(properties.dtype, tuple(chunk.sizes)) is not None
                )
                structure = ItemStructure(
                    kind=_KINDS[item.type],
                    form=Form.FIXED if is_fixed else Form.VARIABLE,
                    dtype=str(properties.dtype).removeprefix("torch."),
                    layout=str(properties.layout).removeprefix("torch."),
                    requires_grad=bool(value.requires_grad if isinstance(value, DTensor) else properties.requires_grad),
                    shape=tuple(map(int, tensor_data.size)),  # a jagged tensor has sizes that are no numbers
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                )
                described.append((index, structure, data))
        except RobustCheckpointError:
            raise
        except Exception as error:
            raise RobustCheckpointError(f"cannot plan {name!r}: {type(error).__name__}: {error}") from error
        return described


def holds_shards(kind: type) -> bool:
    """Whether values of this class are torch's ``ShardedTensor`` or similar."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "local_shards")


def _is_pending(value: DTensor) -> bool:
    return any(placement.is_partial() for placement in value.placements)


def write_item_of(index: MetadataIndex, structure: ItemStructure) -> WriteItem:
    """The write item for ``structure``, as stock's planner makes it.

    ``pin_memory`` and ``memory_format`` have their defaults. torch has deprecated both, and no reader looks at them.
    """
    if structure.kind == ItemKind.BYTES:
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    return WriteItem(
        index=index,
        type=_TYPES[structure.kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(structure.offsets), sizes=torch.Size(structure.sizes)),
            properties=TensorProperties(
                dtype=getattr(torch, structure.dtype),
                layout=getattr(torch, structure.layout),
                requires_grad=structure.requires_grad,
            ),
            size=torch.Size(structure.shape),
        ),
    )


def has_own_chunks(value: Any) -> bool:
    """Whether a tensor says itself which chunks it holds."""
    return (
        hasattr(value, "__create_chunk_list__")
        or hasattr(value, "__create_write_items__")
        or hasattr(value, "__get_tensor_shard__")
        or is_checkpointable(value)
    )


def own_chunks(value: Any) -> Sequence[ChunkStorageMetadata] | None:
    """The chunks that a tensor says it holds; ``None`` if it says nothing."""
    create_chunk_list = getattr(value, "__create_chunk_list__", None)
    if callable(create_chunk_list):
        chunks: Sequence[ChunkStorageMetadata] = create_chunk_list()
        return chunks
    if is_checkpointable(value):
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(value.global_offsets, value.local_sizes, strict=True)
        ]
    return None


# The signature of a structure. If every rank shows the one that a cached plan was made for, the plan still holds.

SIGNATURE_NBYTES = 16

OptionValue = str | int | float | bool | None


def encode_context(options: Mapping[str, OptionValue]) -> bytes:
    """Encode what a plan depends on besides the structure: the ranks of the group, options and versions, by name.

    The order in which they are given does not change the bytes.
    """
    return msgspec.json.encode(dict(sorted(options.items())))


def difference_of_contexts(here: bytes, there: bytes) -> str:
    """Say in words what differs between two encoded contexts."""
    try:
        own, other = (from_json(each, dict[str, OptionValue]) for each in (here, there))
    except ValueError:
        return "it cannot be read"
    found = [
        f"{name} is {other.get(name)!r} there and {own.get(name)!r} here"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
    return ", ".join(found) or "it is of another form"


@dataclass(frozen=True)
class StructureSignature:
    """128 bits over the structure of one rank's state dict and its context (BLAKE2b, RFC 7693).

    Two saves that have the same signature on every rank need the same plan. The order of a dict does not change the
    signature; neither do the contents and addresses of tensors.

    >>> StructureSignature(bytes(16)).hex
    '00000000000000000000000000000000'
    """

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != SIGNATURE_NBYTES:
            raise ValueError(f"a structure signature has {SIGNATURE_NBYTES} bytes, got {len(self.value)}")

    @property
    def hex(self) -> str:
        return self.value.hex()

    def __str__(self) -> str:
        return self.hex

    @classmethod
    def of(cls, items: Items, context: bytes) -> StructureSignature:
        """The signature of items in an encoded context."""
        digest = hashlib.blake2b(digest_size=SIGNATURE_NBYTES, person=b"rdcp-structure")
        for part in (
            context,
            _encoded(items.names),
            msgspec.msgpack.encode(items.properties),
            msgspec.msgpack.encode(items.sizes),
            # The path tells the key "a.b" from "b" within "a", and the key "0" from the index 0.
            msgspec.msgpack.encode(items.paths),
            *(column.tobytes() for column in items.columns),
            msgspec.msgpack.encode(items.peers),
        ):
            # Each part comes after its length. So bytes that move from one part to the next change the hash.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return cls(digest.digest())


def _encoded(strings: Sequence[str]) -> bytes:
    try:
        return msgspec.msgpack.encode(strings)
    except UnicodeEncodeError:
        name = next(each for each in strings if each.encode(errors="ignore").decode() != each)
        raise PlanConflict(f"the name {name!r} cannot be encoded in UTF-8; give this value another name") from None


# What a save needs of the items.

Resolved = torch.Tensor | io.BytesIO
_ShareColumns = tuple[list[str], list[TensorForm | None], list[tuple[int, ...]]]
_Parts = tuple[list[str], list[ItemStructure], list[Path] | None, tuple[int, ...]]

_ITEM_NBYTES: Final = 500
"""Roughly how many bytes the lists, names and paths of one item take."""

_CONTEXTS: Final = 8
"""How many signatures one structure keeps. Several groups may save it, or it may be saved with other options."""


class KnownStructure:
    """The structure of a state dict, and what every save of these items needs.

    Args:
        parts: names, structures and paths of the items in the order of the state dict, and peers.

    Attributes:
        items: the items, sorted.
        order: intp ``[N]``, for each of them its place in the state dict.
        nbytes: roughly how much memory this takes.

    Raises:
        PlanConflict: a name belongs to two items.
    """

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts
        names, structures, paths, peers = parts
        order = sorted_places(names, structures)
        self.items: Items = items_of(
            [names[place] for place in order],
            [structures[place] for place in order],
            None if paths is None else dict(zip(names, paths, strict=True)),
            peers,
        )
        self.order: npt.NDArray[np.intp] = np.array(order, dtype=np.intp)
        self._of_share: tuple[npt.NDArray[np.intp], _ShareColumns] | None = None
        self.nbytes = sum(column.nbytes for column in self.items.columns) + _ITEM_NBYTES * len(order)
        self._signatures: dict[bytes, StructureSignature] = {}

    def signature(self, context: bytes) -> StructureSignature:
        """The signature of the items in an encoded context. It is hashed once for each context."""
        if context not in self._signatures:
            if len(self._signatures) >= _CONTEXTS:
                self._signatures.clear()
            self._signatures[context] = StructureSignature.of(self.items, context)
        return self._signatures[context]

    def of_share(self, kept: npt.NDArray[np.intp]) -> _ShareColumns:
        """Of the items that a rank writes their names, their forms (``None`` for objects), and their offsets. A
        repeated save, which writes the same ones, looks none of them up.
        """
        if self._of_share is None or self._of_share[0] is not kept:
            names, structures, _, _ = self.parts
            places = self.order[kept].tolist()
            forms: dict[ItemStructure, TensorForm | None] = {
                each: None if each.kind == ItemKind.BYTES else (getattr(torch, each.dtype), torch.Size(each.sizes))
                for each in {structures[place] for place in places}
            }
            self._of_share = (
                kept,
                (
                    [names[place] for place in places],
                    [forms[structures[place]] for place in places],
                    [structures[place].offsets for place in places],
                ),
            )
        return self._of_share[1]


_STRUCTURES: Final[Cache[KnownStructure, None]] = Cache(max_nbytes=512 << 20)
"""The last structures of this process. All planners share them, because a planner may live for one save only."""


def structure_of(
    described: DescribedItems,
    mappings: Mapping[str, Path] | None,
    peers: tuple[int, ...] = (),
) -> KnownStructure:
    """The structure of these items. It is made if it is not known.

    Args:
        mappings: for each FQN its path in the nested state dict; ``None`` if the planner does not flatten.
        peers: as in :class:`~robust_dcp.items.Items`.

    Raises:
        PlanConflict: a name belongs to two items, or has no path.
    """
    paths = None if mappings is None else [mappings.get(name, ()) for name in described.names]
    parts = (described.names, described.structures, paths, peers)
    found = next((known for known, _ in _STRUCTURES.latest_first() if known.parts == parts), None)
    if found is None:
        found = KnownStructure(parts)
    _STRUCTURES.put(found, None, found.nbytes)
    return found


class StateDictSource(ItemSource):
    """The values of a state dict, as items.

    Use it only for a planner with stock's ``lookup_object`` and ``resolve_data`` for tensors, because it does not call
    them if it knows the result. The caller has to switch grad mode off in its thread. Otherwise DTensors would be
    resolved through autograd.

    Args:
        items: the described items.
        structure: the structure of these items.
        kept: the places of the items that are written among ``structure.items``, in plan order.
        lookup: the planner's ``lookup_object``.
        resolve: the planner's ``resolve_data``.
    """

    def __init__(
        self,
        items: DescribedItems,
        structure: KnownStructure,
        kept: npt.NDArray[np.intp],
        lookup: Callable[[MetadataIndex], Resolved],
        resolve: Callable[[WriteItem], Resolved],
    ) -> None:
        places: list[int] = structure.order[kept].tolist()
        super().__init__(*structure.of_share(kept))
        self._data: list[ItemData] = list(map(items.data.__getitem__, places))
        self.holds_wrappers = DTensor in set(map(type, self._data))
        self._lookup = lookup
        self._resolve = resolve

    def resolve(self, place: int) -> Resolved:
        data = self._data[place]
        if isinstance(data, MetadataIndex):
            if self.expected[place] is None:
                return self._resolve(WriteItem(index=data, type=WriteItemType.BYTE_IO))
            return self._lookup(data)
        if type(data) is DTensor:
            local: torch.Tensor = data.to_local()
            return local
        return data

    def versions(self, places: Sequence[int]) -> list[int]:
        found = []
        for data in map(self._data.__getitem__, places):
            if type(data) is DTensor:
                # A change of a DTensor counts there only, and a change of its local tensor only here.
                local = version_of(data._local_tensor)
                found.append(-1 if local < 0 else local + data._version)
            else:
                found.append(-1 if isinstance(data, MetadataIndex) else version_of(data))
        return found


def digest_of(data: torch.Tensor | io.BytesIO) -> int:
    """A digest of what would be written for a value. It does not depend on where and how the value lies in memory.

    Equal objects may have different bytes in rare cases (the order of a set of strings). So a difference is a reason
    for a warning, and no proof.

    Returns:
        64 bits. 0 means that the bytes of this kind of tensor cannot be read; no digest is 0.
    """
    if isinstance(data, io.BytesIO):
        return int.from_bytes(hashlib.blake2b(data.getbuffer(), digest_size=8).digest(), "little") or 1
    if not is_plain(data) or data.is_meta:
        return 0
    return 1 << 32 | crc32(bytes_of(on_cpu(data.detach()).contiguous()))
