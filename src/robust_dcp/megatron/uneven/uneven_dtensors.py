"""Finds the chunks of all uneven DTensors of a state dict in one exchange, in place of Megatron-FSDP's collectives.

Megatron-FSDP runs a collective for each mesh dimension of each DTensor, and each rank goes in the order of its own
keys. Here every rank tells the coordinator once which DTensors it holds and how large its parts are. The coordinator
answers where the parts begin. If nothing has changed on any rank since the last time, one exchange without payloads is
enough. Called by ``uneven_dtensor_patches``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import entry_point
from robust_dcp.megatron.uneven.uneven_chunk import UnevenChunk
from robust_dcp.megatron.uneven.uneven_offsets import solve
from robust_dcp.megatron.uneven.uneven_shards import (
    Describer,
    LocalPart,
    PlacedOffsets,
    ShardColumns,
    columns_of,
    describe,
)
from robust_dcp.structure_cache import CACHE, Table

__all__ = [
    "check_part",
    "defer_chunk",
    "dtensors_of",
    "fail_exchange",
    "place_chunks",
    "place_chunks_one_by_one",
    "spans_the_world",
]

PHASE = "uneven DTensors"

_OFFSETS: Table[bytes, tuple[bytes, PlacedOffsets]] = CACHE.table(
    "uneven offsets", lambda signature, known: sum(map(len, known[1].spreads)), max_nbytes=64 << 20
)
"""The offsets from earlier exchanges, with the identity of all ranks' signatures. The key is this rank's signature."""


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
    tensors: dict[str, DTensor] = {}
    parts: dict[str, LocalPart] = {}
    columns = ShardColumns([])
    signature = b""

    def offer() -> Offer:
        nonlocal columns, signature
        tensors.update(dtensors_of(state_dict))
        describer = Describer()
        parts.update({key: describer.part(key, value) for key, value in tensors.items()})
        columns = columns_of(parts)
        signature = hashlib.blake2b(msgspec.msgpack.encode(columns), digest_size=16).digest()
        known = _OFFSETS.get(signature)
        return Offer(signature=signature) if known is None else Offer(signature=signature, plan_id=known[0])

    agreement = channel.agree(PHASE, offer)
    made_for = agreement.signature
    known = _OFFSETS.get(signature)
    if known is not None and agreement.same_plan_id and agreement.plan_id == made_for:
        offsets = known[1]
    else:
        offsets = _exchanged(columns, channel)
        _OFFSETS.put(signature, (made_for, offsets))
    for key, begins in _by_key(columns, offsets):
        UnevenChunk.at(parts[key], begins).note_on(tensors[key])


def _exchanged(columns: ShardColumns, channel: Channel) -> PlacedOffsets:
    gathered = channel.gather(f"{PHASE}: shapes", lambda: columns if columns.spreads else None, ShardColumns)
    mine = channel.scatter(f"{PHASE}: offsets", lambda: solve(gathered or [], channel.ranks), PlacedOffsets)
    return mine or PlacedOffsets([])


def _by_key(columns: ShardColumns, offsets: PlacedOffsets) -> Iterator[tuple[str, tuple[int, ...]]]:
    for spread, begins in zip(columns.spreads, offsets.spreads, strict=True):
        for key, row in zip(spread.keys, spread.shapes(begins).tolist(), strict=True):
            yield key, tuple(row)


def fail_exchange(error: Exception, channel: Channel) -> None:
    """Tell the ranks that call :func:`place_chunks` that this rank has failed before its own call.

    Raises:
        RobustCheckpointError: always. All ranks raise the same error.
    """

    def failed() -> Offer:
        raise error

    channel.agree(PHASE, failed)


def defer_chunk(value: DTensor, timeout_seconds: float) -> None:
    """Note on a DTensor that its chunk is not known yet. Exchanges nothing.

    :func:`place_chunks` finds the chunk later, together with all others of the state dict. If the chunk is needed
    before that, the ranks of the mesh are asked. ``update_uneven_dtensor_chunk_metadata`` would have asked them now.
    """
    UnevenChunk.unknown(value, timeout_seconds).note_on(value)


def spans_the_world(state_dict: Mapping[Any, Any]) -> bool:
    """Whether the meshes of the DTensors cover all ranks. Then all ranks can be expected to take part."""
    meshes = {id(value.device_mesh): value.device_mesh for value in dtensors_of(state_dict).values()}
    ranks = {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}
    return not ranks or len(ranks) == dist.get_world_size()


def place_chunks_one_by_one(state_dict: Mapping[Any, Any], timeout_seconds: float) -> None:
    """Like :func:`place_chunks`, for meshes that do not cover all ranks.

    It goes through the keys in order, and asks the ranks of each DTensor's mesh.

    Raises:
        PlanConflict, ExchangeError: a DTensor does not fit together. The ranks of its mesh raise it.
    """
    for _, value in sorted(dtensors_of(state_dict).items()):
        chunk = UnevenChunk.unknown(value, timeout_seconds)
        chunk.find()
        chunk.note_on(value)


def check_part(value: DTensor) -> None:
    """Check this rank's part of a DTensor without asking other ranks.

    Raises:
        ValueError: the part is larger than the whole, or smaller along a dimension that is not cut.
    """
    part = describe("a DTensor", value)
    uncut = set(range(part.spread.ndim)) - set(part.spread.shard_dims)
    sizes, shape = part.sizes, part.global_shape
    if any(size > whole for size, whole in zip(sizes, shape, strict=True)) or (
        value._local_tensor.numel() and any(sizes[dim] != shape[dim] for dim in uncut)
    ):
        raise ValueError(
            f"the local tensor of shape {list(part.local_shape)} is no part of a DTensor of shape {list(shape)} with "
            f"{part.spread}"
        )
