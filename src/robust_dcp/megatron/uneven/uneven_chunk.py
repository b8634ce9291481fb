"""The chunk of one uneven DTensor: the offsets and sizes of the part that this rank holds.

Owns :class:`UnevenChunk`. It is stored on the local tensor, where DCP asks it through ``__create_chunk_list__`` and
``__create_write_items__``. It can also find the chunk of a single DTensor. ``uneven_dtensors`` makes it. It keeps no
tensor alive.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.comm import Channel
from robust_dcp.errors import PlanConflict
from robust_dcp.megatron.uneven.uneven_shards import LocalPart, describe

__all__ = ["UnevenChunk", "chunk_of"]


class _Extent(msgspec.Struct, frozen=True):
    """The part of a DTensor that a rank holds together with the ranks that it has asked so far."""

    global_shape: list[int]
    shard_dims: list[int]
    sizes: list[int]


class UnevenChunk:
    """Says which part of its DTensor a local tensor is.

    Attributes:
        part: the DTensor as this rank holds it.
    """

    def __init__(self, part: LocalPart, chunk: ChunkStorageMetadata | None, mesh: Any, timeout_seconds: float) -> None:
        self.part = part
        self._chunk = chunk
        self._mesh = mesh
        self._timeout_seconds = timeout_seconds

    @classmethod
    def at(cls, part: LocalPart, offsets: tuple[int, ...]) -> UnevenChunk:
        """The chunk that begins at ``offsets``."""
        return cls(part, _chunk(part, offsets), None, 0.0)

    @classmethod
    def unknown(cls, value: DTensor, timeout_seconds: float) -> UnevenChunk:
        """A chunk that is found when it is first needed, by asking the ranks in the mesh of ``value``."""
        return cls(describe("a DTensor", value), None, value.device_mesh, timeout_seconds)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenChunk:
        """Return itself. A copy of the tensor is the same part of the same DTensor, and a mesh cannot be copied."""
        return self

    def note_on(self, value: DTensor) -> None:
        """Store this chunk on the local tensor of ``value``, under the names by which DCP asks for it."""
        local: Any = value._local_tensor
        local.__create_chunk_list__ = self.chunk_list
        local.__create_write_items__ = self.write_items

    def find(self) -> ChunkStorageMetadata:
        """Return the chunk. If it is not known, ask the ranks of the mesh; then all of them have to call this.

        Raises:
            PlanConflict: the chunk was not known, and the parts of the asked ranks do not make up the whole tensor.
            ExchangeError: a rank did not come, or came with another tensor.
        """
        if self._chunk is None:
            self._chunk = _chunk(self.part, _asked(self.part, self._mesh, self._timeout_seconds))
        return self._chunk

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        return [self.find()]

    def write_items(self, fqn: str, tensor: DTensor) -> list[WriteItem]:
        """One write item, or none if the part is empty."""
        local = tensor.to_local()
        if local.numel() == 0:
            return []
        chunk = self.find()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=tensor.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_of(value: DTensor, timeout_seconds: float) -> ChunkStorageMetadata:
    """The stored chunk of ``value``. If none is stored, find it now with the ranks of its mesh.

    Raises:
        PlanConflict, ExchangeError: as :meth:`UnevenChunk.find`.
    """
    noted = getattr(getattr(value._local_tensor, "__create_chunk_list__", None), "__self__", None)
    if isinstance(noted, UnevenChunk) and noted.part == describe("a DTensor", value):
        return noted.find()
    return UnevenChunk.unknown(value, timeout_seconds).find()


def _chunk(part: LocalPart, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
    # Megatron-FSDP makes plain tuples here too. An empty part may have fewer dimensions than the tensor.
    n_dimensions = len(part.local_shape)
    return ChunkStorageMetadata(offsets=offsets[:n_dimensions], sizes=part.local_shape)  # type: ignore[arg-type]


def _asked(part: LocalPart, mesh: Any, timeout_seconds: float) -> tuple[int, ...]:
    """Find the offsets of ``part`` by asking the ranks along each sharded mesh dimension in turn."""
    global_shape, spread = list(part.global_shape), part.spread
    shard_dims, sizes, offsets = list(spread.shard_dims), list(part.sizes), [0] * spread.ndim
    for mesh_dim in spread.order:
        dim = spread.shard_dims[mesh_dim]
        group = mesh.get_group(mesh_dim)
        channel = Channel.for_group(group, operation="parts of a DTensor", timeout_seconds=timeout_seconds)
        extent = partial(_Extent, global_shape, shard_dims, list(sizes))
        phase = f"the parts of a DTensor of shape {global_shape}"
        extents = channel.all_gather(phase, extent, _Extent)
        if any((each.global_shape, each.shard_dims) != (global_shape, shard_dims) for each in extents):
            held = {channel.ranks[i]: (each.global_shape, each.shard_dims) for i, each in enumerate(extents)}
            raise PlanConflict(
                f"ranks have come with DTensors of other shapes or cuts: {held}; every rank of a mesh has to ask for "
                "the same DTensors in the same order, or for a whole state dict at once",
                ranks=sorted(held),
            )
        offsets[dim] = offsets[dim] + sum(each.sizes[dim] for each in extents[: channel.rank])
        sizes[dim] = sum(each.sizes[dim] for each in extents)
    if sizes != global_shape:
        raise PlanConflict(
            f"the parts of a DTensor of shape {global_shape} on ranks {list(spread.mesh_ranks)} make up {sizes}",
            ranks=sorted(spread.mesh_ranks),
        )
    return tuple(offsets)
