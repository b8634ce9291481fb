"""Finds the chunks of all uneven DTensors of a state dict in one exchange, in place of Megatron-FSDP's collectives.

Megatron-FSDP runs a collective for each mesh dimension of each DTensor, and each rank goes in the order of its own
keys. Here every rank tells the coordinator once which DTensors it holds and how large its parts are. The coordinator
answers where the parts begin. If nothing has changed on any rank since the last time, one exchange without payloads is
enough.

| function of Megatron-FSDP | what runs in its place |
| --- | --- |
| ``preprocess_state_dict_for_uneven_dtensor`` | one keyed exchange for all DTensors (:func:`place_chunks`) |
| ``update_uneven_dtensor_chunk_metadata`` | notes that the chunk is not known yet; no exchange |
| ``validate_uneven_dtensor`` | nothing: the exchange checks all parts |
| ``gather_and_compute_chunk_metadata`` | the known chunk, or an exchange with the ranks of the mesh |
| ``make_fsdp_dtensor`` in the SwiGLU, GDN and MLA splits | the original without ``run_check``, a world collective |
| ``handle_*_in_state_dict`` | the original; if it fails, waiting ranks are told. Before GDN's there is one exchange |
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import PlanConflict, entry_point
from robust_dcp.megatron.failures import is_shared, meet_before_saving
from robust_dcp.megatron.options import current_options
from robust_dcp.megatron.uneven_offsets import solve
from robust_dcp.megatron.uneven_parts import LocalPart, PlacedOffsets, ShardColumns, columns_of, describe
from robust_dcp.structure_cache import Cache

PHASE = "uneven DTensors"

Function = Callable[..., Any]

_OFFSETS: Cache[bytes, tuple[bytes, PlacedOffsets]] = Cache(max_nbytes=64 << 20)
"""The offsets from earlier exchanges, with the identity of all ranks' signatures. The key is this rank's signature."""


class UnevenChunk:
    """Says which part of its DTensor a local tensor is. It is stored on the local tensor, and keeps no tensor alive.

    If the offsets are not known, the ranks in the mesh are asked when they are first needed.

    Attributes:
        part: the DTensor as this rank holds it.
    """

    def __init__(self, part: LocalPart, offsets: tuple[int, ...] | None = None, mesh: Any = None) -> None:
        self.part = part
        self._mesh = mesh
        self._chunk = None if offsets is None else _chunk(part, offsets)

    @classmethod
    def unknown(cls, value: DTensor) -> UnevenChunk:
        return cls(describe("a DTensor", value), mesh=value.device_mesh)

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
            self._chunk = _chunk(self.part, _asked(self.part, self._mesh))
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


def _chunk(part: LocalPart, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
    # Megatron-FSDP makes plain tuples here too. An empty part may have fewer dimensions than the tensor.
    n_dimensions = len(part.local_shape)
    return ChunkStorageMetadata(offsets=offsets[:n_dimensions], sizes=part.local_shape)  # type: ignore[arg-type]


class _Extent(msgspec.Struct, frozen=True):
    """The part of a DTensor that a rank holds together with the ranks that it has asked so far."""

    global_shape: list[int]
    shard_dims: list[int]
    sizes: list[int]


def _asked(part: LocalPart, mesh: Any) -> tuple[int, ...]:
    """Find the offsets of ``part`` by asking the ranks along each sharded mesh dimension in turn."""
    global_shape, spread = list(part.global_shape), part.spread
    shard_dims, sizes, offsets = list(spread.shard_dims), list(part.sizes), [0] * spread.ndim
    for mesh_dim in spread.order:
        dim = spread.shard_dims[mesh_dim]
        channel = _channel(mesh.get_group(mesh_dim), "parts of a DTensor")
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


def _channel(group: Any = None, operation: str = PHASE) -> Channel:
    timeout_seconds = current_options().exchange_timeout_seconds
    return Channel.for_group(group, operation=operation, timeout_seconds=timeout_seconds)


def dtensors_of(state_dict: Mapping[Any, Any]) -> dict[str, DTensor]:
    """The DTensors in nested dicts. The name of each is its keys, joined by dots.

    As in Megatron-FSDP, lists are not searched. A DTensor is left out if this rank is not in its mesh.

    Raises:
        ValueError: two DTensors have the same name.
    """
    found: dict[str, DTensor] = {}
    for path, value in _walk(state_dict, ()):
        key = ".".join(map(str, path))
        if key in found:
            raise ValueError(f"two DTensors of the state dict have the name {key!r}: rename one of them")
        if value.device_mesh.get_coordinate() is not None:
            found[key] = value
    return found


def _walk(value: Mapping[Any, Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], DTensor]]:
    for key, each in value.items():
        if isinstance(each, dict):
            yield from _walk(each, (*path, key))
        elif isinstance(each, DTensor):
            yield (*path, key), each


@entry_point
def place_chunks(state_dict: Mapping[Any, Any], channel: Channel) -> None:
    """Find the chunk of every DTensor of a state dict, and store it on the local tensor. All ranks of ``channel`` call.

    Afterwards ``__create_chunk_list__`` and ``__create_write_items__`` of the local tensors return the same as after
    ``preprocess_state_dict_for_uneven_dtensor`` of ``megatron_fsdp/uneven_dtensor.py``.

    Args:
        state_dict: ranks may hold different keys in different orders. All ranks of a DTensor's mesh must hold it,
            except for ranks with an empty part.
        channel: a channel with all ranks of all the meshes.

    Raises:
        PlanConflict: a key is missing on a rank with a part that is not empty, the parts overlap, leave gaps or do not
            add up to the global shape, or ranks disagree about a shape. It names keys and ranks. All ranks raise it.
        RobustCheckpointError: something else failed on any rank. All ranks raise it.
    """

    def look() -> tuple[dict[str, DTensor], dict[str, LocalPart], ShardColumns, bytes]:
        tensors = dtensors_of(state_dict)
        spreads: dict[Any, Any] = {}
        parts = {key: describe(key, value, spreads) for key, value in tensors.items()}
        columns = columns_of(parts)
        signature = hashlib.blake2b(msgspec.msgpack.encode(columns), digest_size=16).digest()
        return tensors, parts, columns, signature

    def offer(seen: tuple[Any, Any, Any, bytes]) -> Offer:
        solved = _OFFSETS.get(seen[-1])
        return Offer(signature=seen[-1]) if solved is None else Offer(signature=seen[-1], same=solved[0])

    (tensors, parts, columns, signature), agreement = channel.agree(PHASE, look, offer)
    made_for = agreement.signature
    solved = _OFFSETS.get(signature)
    if solved is not None and agreement.is_same and agreement.same == made_for:
        offsets = solved[1]
    else:
        _, gathered = channel.gather(f"{PHASE}: shapes", lambda: columns if columns.spreads else None, ShardColumns)
        _, share = channel.scatter(f"{PHASE}: offsets", lambda: solve(gathered or [], channel.ranks), PlacedOffsets)
        offsets = share or PlacedOffsets([])
        _OFFSETS.put(signature, (made_for, offsets), sum(map(len, offsets.spreads)))
    for spread, begins in zip(columns.spreads, offsets.spreads, strict=True):
        for key, row in zip(spread.keys, spread.shapes(begins).tolist(), strict=True):
            UnevenChunk(parts[key], tuple(row)).note_on(tensors[key])


def _spans_the_world(state_dict: Mapping[Any, Any]) -> bool:
    """Whether the meshes of the DTensors cover all ranks. Then all ranks can be expected to take part."""
    meshes = {id(value.device_mesh): value.device_mesh for value in dtensors_of(state_dict).values()}
    ranks = {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}
    return not ranks or len(ranks) == dist.get_world_size()


def _among_ranks(ours: Function) -> Function:
    """Call stock's function, the first argument, where there are no ranks to talk to, as in a simulated job."""

    @functools.wraps(ours)
    def replacement(stock: Function, *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return stock(*args, **kwargs)
        return ours(stock, *args, **kwargs)

    return replacement


@_among_ranks
def preprocess_state_dict_for_uneven_dtensor(_: Function, state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """All ranks call this, but for the hook of ``state_dict()`` in ``fully_shard``: there only the ranks of that model
    do. If these are not all ranks, each DTensor's mesh is asked, key by key in their order."""
    caller = str(sys._getframe(3).f_globals.get("__name__"))  # above are the two replacements
    if caller.endswith(".fully_shard") and not _spans_the_world(state_dict):
        for _key, value in sorted(dtensors_of(state_dict).items()):
            chunk = UnevenChunk.unknown(value)
            chunk.find()
            chunk.note_on(value)
        return state_dict
    meet_before_saving(is_last=False)
    place_chunks(state_dict, _channel())
    return state_dict


@_among_ranks
def update_uneven_dtensor_chunk_metadata(_: Function, dtensor: DTensor) -> None:
    """Note on a DTensor that its chunk is not known yet. :func:`place_chunks` finds it later, with all others."""
    UnevenChunk.unknown(dtensor).note_on(dtensor)


@_among_ranks
def validate_uneven_dtensor(_: Function, dtensor: DTensor) -> None:
    """Ask no rank, and check nothing: :func:`place_chunks` checks the parts of all DTensors together."""


@_among_ranks
def gather_and_compute_chunk_metadata(_: Function, dtensor: DTensor) -> ChunkStorageMetadata:
    """The stored chunk. If none is stored, or for another part, find it now with the ranks of the mesh."""
    noted = getattr(getattr(dtensor._local_tensor, "__create_chunk_list__", None), "__self__", None)
    if isinstance(noted, UnevenChunk) and noted.part == describe("a DTensor", dtensor):
        return noted.find()
    return UnevenChunk.unknown(dtensor).find()


@_among_ranks
def make_fsdp_dtensor(stock: Function, *args: Any, run_check: bool = False, **kwargs: Any) -> Any:
    """Without ``run_check``, which gathers an object from all ranks for each tensor of a tensor-parallel model."""
    return stock(*args, run_check=False, **kwargs)


@_among_ranks
def handle_in_state_dict(stock: Function, *args: Any, **kwargs: Any) -> Any:
    """Call ``handle_*_in_state_dict``. If it raises, raise on the other ranks too. They would wait in the next exchange
    of DTensors.

    Within Megatron-LM's ``save_checkpoint`` the ranks meet before that exchange and hear of the error there.
    """
    try:
        return stock(*args, **kwargs)
    except Exception as error:
        if is_shared():
            raise
        failure = error

        def failed() -> Offer:
            raise failure

        _channel().agree(PHASE, failed)
        raise


@_among_ranks
def handle_gdn_in_state_dict(stock: Function, model: Any, model_state_dict: Any, optimizer_state_dict: Any) -> Any:
    """A fused projection is split by where its parts begin. One exchange finds that for all projections first."""
    meet_before_saving(is_last=False)
    place_chunks({"model": model_state_dict, "optimizer": optimizer_state_dict}, _channel())
    return handle_in_state_dict(stock, model, model_state_dict, optimizer_state_dict)
