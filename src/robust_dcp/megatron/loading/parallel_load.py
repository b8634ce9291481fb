"""Fully parallel load: each shard is read by one rank of a group, which then hands it to those that need it too.

Owns the distribution and its exchange, without object collectives: what each rank needs travels as columns over the
Channel, objects as bytes that are checked before they are decoded, tensors by ``tensor_exchange`` over the group.
Called by ``loading`` and, for ``FullyParallelLoadStrategyWrapper.load``, by ``load_patches``.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError, PlanConflict, entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises, told_by_who_failed
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.megatron.loading.load_strategy import ReaderOfKnownMetadata, read_sharded
from robust_dcp.megatron.loading.tensor_exchange import Transfer, exchange_tensors
from robust_dcp.megatron.versions import ShardedBase, ShardedObject
from robust_dcp.planner.save import checkpoint_name
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.objects import load_object

__all__ = ["ShardId", "distribute", "load_in_parallel"]

ShardId = tuple[str, tuple[int, ...], str]
"""Key, then global offset (of an object its shape too; of a flattened range its ends), then dtype (empty: object)."""


class _Wanted(msgspec.Struct, frozen=True):
    """What one rank needs: distinct shards, and the bytes of each (0 for an object)."""

    shards: tuple[ShardId, ...]
    nbytes: tuple[int, ...]


class _Share(msgspec.Struct, frozen=True):
    """What one rank does: for each of its shards the rank that reads it and those that want it, and in the same order
    on all ranks where each stands in the whole list."""

    readers: tuple[int, ...]
    wanted_by: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]


class _MetadataFile(msgspec.Struct, frozen=True):
    data: bytes


class _Objects(msgspec.Struct, frozen=True):
    """The bytes of objects, by key."""

    data: dict[str, bytes]


@entry_point
def load_in_parallel(
    wrapper: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], timeout_seconds: float
) -> dict[str, Any]:
    """What ``FullyParallelLoadStrategyWrapper.load`` loads, on all ranks of its parallelization group.

    Args:
        wrapper: Megatron's wrapper; its group and the attributes of its base strategy count, and no cached
            distribution: this one is made anew, at the cost of one gather and one scatter.
        sharded_state_dict: factories applied; leaves are replaced by what was loaded, in a new state dict.
        checkpoint_dir: the checkpoint's directory.
        timeout_seconds: of each exchange.

    Raises:
        RobustCheckpointError: on every rank of the group, whichever of them failed.
    """
    group = wrapper.parallelization_group
    channel = Channel.for_group(group, operation="parallel load", timeout_seconds=timeout_seconds)
    with as_megatron_raises():
        return _ParallelLoad(wrapper, sharded_state_dict, directory_path(checkpoint_dir), channel).run()


def distribute(
    wanted: Sequence[Sequence[tuple[ShardId, int]]],
) -> list[tuple[ShardId, int, tuple[int, ...]]]:
    """Which rank reads which shard.

    The shards that fewest ranks want go first, the larger before the smaller, each to the rank with the least to read
    among those that want it; as in Megatron, so that the load is spread as a save is.

    Args:
        wanted: for each rank its distinct shards, with their bytes.

    Returns:
        (shard, its reader, the ranks that want it), in an order that does not depend on that of the ranks' shards.

    Raises:
        PlanConflict: ranks want one shard in different dtypes or sizes.
    """
    holders: dict[ShardId, list[int]] = {}
    sizes: dict[ShardId, int] = {}
    dtypes: dict[tuple[str, tuple[int, ...]], ShardId] = {}
    for rank, shards in enumerate(wanted):
        for shard, nbytes in shards:
            first = dtypes.setdefault(shard[:2], shard)
            if first != shard or sizes.setdefault(shard, nbytes) != nbytes:
                raise PlanConflict(
                    f"ranks want the shard of {shard[0]!r} at {list(shard[1])} in different forms: {first[2]} of "
                    f"{sizes[first]} bytes on rank {holders[first][0]}, {shard[2]} of {nbytes} bytes on rank "
                    f"{rank}",
                    key=shard[0],
                    ranks=[holders[first][0], rank],
                )
            holders.setdefault(shard, []).append(rank)
    load = [0] * len(wanted)
    found = []
    alone = [shard for shard, ranks in holders.items() if len(ranks) == 1]
    for shard in alone:
        load[holders[shard][0]] += sizes[shard]
    everywhere = [(nbytes, rank) for rank, nbytes in enumerate(load)]
    heapq.heapify(everywhere)
    for shard in sorted(holders, key=lambda shard: (len(holders[shard]), -sizes[shard], shard)):
        ranks = holders[shard]
        if len(ranks) == 1:
            reader = ranks[0]
        elif len(ranks) == len(wanted):
            while everywhere[0][0] != load[everywhere[0][1]]:  # it was given others in between
                heapq.heapreplace(everywhere, (load[everywhere[0][1]], everywhere[0][1]))
            reader = everywhere[0][1]
            load[reader] += sizes[shard]
        else:
            reader = min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += sizes[shard]
        found.append((shard, reader, tuple(ranks)))
    return found


class _ParallelLoad:
    """One load on one rank of the group."""

    def __init__(self, wrapper: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: str, channel: Channel) -> None:
        self._wrapper = wrapper
        self._sharded = sharded_state_dict
        self._directory = checkpoint_dir
        self._channel = channel
        self._phase = f"parallel load {checkpoint_name(checkpoint_dir)}"
        self._held: dict[ShardId, ShardedBase] = {}
        self._loaded: dict[ShardId, Any] = {}
        self._object_bytes: dict[str, bytes] = {}

    def run(self) -> dict[str, Any]:
        share = self._share()
        reader = self._reader()
        self._channel.barrier(f"{self._phase}: read", lambda: self._read(share, reader))
        self._exchange_objects(share)
        self._exchange_tensors(share)
        return self._filled()

    def _share(self) -> _Share:
        def want() -> _Wanted:
            for shard in versions.nested_values(self._sharded):
                self._held.setdefault(_shard_id(shard), shard)
            return _Wanted(tuple(self._held), tuple(_nbytes(shard) for shard in self._held.values()))

        gathered = self._channel.gather(f"{self._phase}: wanted", want, _Wanted)

        def share_out() -> list[_Share]:
            wanted = [list(zip(each.shards, each.nbytes, strict=True)) if each else [] for each in gathered or []]
            return _shares(wanted)

        share = self._channel.scatter(f"{self._phase}: shares", share_out, _Share)
        if share is None or len(share.readers) != len(self._held):
            raise ExchangeError("the coordinator sent no share of this load", phase=self._phase)
        return share

    def _reader(self) -> ReaderOfKnownMetadata:
        reader = ReaderOfKnownMetadata(self._directory)
        message = self._channel.broadcast(
            f"{self._phase}: metadata", lambda: _MetadataFile(reader.metadata_bytes()), _MetadataFile
        )
        return ReaderOfKnownMetadata(self._directory, message.data)

    def _read(self, share: _Share, reader: ReaderOfKnownMetadata) -> None:
        own = [shard for shard, by in zip(self._held, share.readers, strict=True) if by == self._channel.rank]
        with told_by_who_failed(0):
            read = read_sharded(
                {str(place): self._held[shard] for place, shard in enumerate(own)},
                reader,
                timeout_seconds=self._channel.timeout_seconds,
                no_dist=True,
                stream_dequantize=getattr(self._wrapper.base_strategy, "stream_ckpt_dequant", None),
                keep_object_bytes=True,
            )
        self._loaded = {shard: read.state_dict[str(place)] for place, shard in enumerate(own)}
        self._object_bytes = read.object_bytes
        strategy = self._wrapper.base_strategy
        strategy.cached_global_metadata = self._wrapper.cached_global_metadata = read.metadata

    def _exchange_objects(self, share: _Share) -> None:
        """The objects that several ranks want: to the coordinator, and from it to all that want any."""
        names = {shard: held.unique_key for shard, held in self._held.items() if isinstance(held, ShardedObject)}
        rank = self._channel.rank
        mine: dict[str, bytes] = {}
        n_wanted = 0
        for shard, by, wanted_by in zip(self._held, share.readers, share.wanted_by, strict=True):
            if shard not in names or len(wanted_by) == 1:
                continue
            if by == rank:
                mine[names[shard]] = self._object_bytes[names[shard]]
            else:
                n_wanted += 1
        gathered = self._channel.gather(
            f"{self._phase}: objects",
            lambda: _Objects(mine) if mine else None,
            _Objects,
            offer=lambda _: Offer(value=n_wanted),
        )
        if not self._channel.last_agreement.highest:
            return

        def all_objects() -> _Objects:
            return _Objects({key: data for each in gathered or [] if each for key, data in each.data.items()})

        objects = self._channel.broadcast(f"{self._phase}: all objects", all_objects, _Objects).data

        def decode() -> None:
            for shard, name in names.items():
                if shard not in self._loaded:
                    self._loaded[shard] = load_object(
                        objects[name], file=self._directory, item=name, trusted=current_options().trusted
                    )[0]

        self._channel.barrier(f"{self._phase}: decode objects", decode)

    def _exchange_tensors(self, share: _Share) -> None:
        transfers = []
        for shard, by, wanted_by, place in zip(self._held, share.readers, share.wanted_by, share.order, strict=True):
            if len(wanted_by) > 1 and shard[2]:
                transfers.append(Transfer(place, shard, by, wanted_by))

        def targets() -> None:
            for transfer in transfers:
                shard = self._held[transfer.shard]
                if transfer.reader == self._channel.rank:
                    self._loaded[transfer.shard] = versions.dequantized(self._loaded[transfer.shard])
                else:
                    self._loaded[transfer.shard] = versions.target_of(shard)

        self._channel.barrier(f"{self._phase}: targets", targets)
        exchange_tensors(sorted(transfers), self._loaded, self._channel, self._wrapper.parallelization_group)
        self._channel.barrier(f"{self._phase}: exchanged")

    def _filled(self) -> dict[str, Any]:
        def fill(value: Any) -> Any:
            return self._loaded[_shard_id(value)] if isinstance(value, ShardedBase) else value

        filled: dict[str, Any] = versions.dict_list_map_outplace(fill, self._sharded)
        return filled


def _shares(wanted: Sequence[Sequence[tuple[ShardId, int]]]) -> list[_Share]:
    whole = distribute(wanted)
    places = {shard: place for place, (shard, _, _) in enumerate(whole)}
    shares = []
    for rank in wanted:
        rows = [places[shard] for shard, _ in rank]
        readers = tuple(whole[row][1] for row in rows)
        shares.append(_Share(readers, tuple(whole[row][2] for row in rows), tuple(rows)))
    return shares


def _shard_id(shard: ShardedBase) -> ShardId:
    offset = tuple(map(int, shard.global_offset))
    if isinstance(shard, ShardedObject):
        return shard.key, (*offset, *map(int, shard.global_shape)), ""
    part = getattr(shard, "flattened_range", None)
    ends = () if part is None else (int(part.start), int(part.stop))
    return shard.key, (*offset, *ends), str(shard.dtype)


def _nbytes(shard: ShardedBase) -> int:
    if isinstance(shard, ShardedObject):
        return 0
    part = getattr(shard, "flattened_range", None)
    numel = math.prod(shard.local_shape) if part is None else part.stop - part.start
    return int(numel) * int(shard.dtype.itemsize)
