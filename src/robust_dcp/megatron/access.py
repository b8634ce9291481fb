"""Megatron's access rule: each shard must have its main replica on exactly one rank. All ranks reach the same verdict.

Each rank describes its sharded state dict as columns, and the coordinator checks the columns of all ranks together. A
structure that was found valid before is not checked again. This module owns the rule, the exchange and the memory of
valid structures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import ExchangeError, entry_point, ranks_in_words
from robust_dcp.megatron.common_state import LeafDigests, leaf_digests, report_differences
from robust_dcp.megatron.failures import InvalidAccess, meet_before_saving
from robust_dcp.megatron.options import current_options
from robust_dcp.megatron.shards import ShardFacts
from robust_dcp.megatron.versions import KeyOnly, ShardedBase, ShardedObject, is_main_replica, nested_values
from robust_dcp.structure_cache import Cache

__all__ = [
    "AccessCheck",
    "Verdict",
    "agree_on_access",
    "determine_global_metadata",
    "validate_sharding_integrity",
]

_OBJECT, _REGULAR, _MAIN = 1, 2, 4

Ints = npt.NDArray[np.int64]
ShapeRow = tuple[str, tuple[int, ...]]


class AccessColumns(msgspec.Struct, frozen=True):
    """The ShardedTensors and ShardedObjects that one rank holds, in the order of its state dict. Little-endian.

    Attributes:
        keys: the distinct keys.
        shapes: the distinct ``(dtype, ints)``. The ints are the number of dimensions, then the global shape, the local
            shape and the fragmentation.
        key_ids, shape_ids: int32, one for each item: its place in ``keys`` and ``shapes``.
        flags: uint8, one for each item, with the bits object, regular grid and main replica.
        offsets: int64, the global offsets of all items, one item after the other.
    """

    keys: tuple[str, ...]
    shapes: tuple[ShapeRow, ...]
    key_ids: bytes
    shape_ids: bytes
    flags: bytes
    offsets: bytes

    @classmethod
    def of(cls, shards: Iterable[ShardedBase]) -> AccessColumns:
        """Describe the shards of one rank.

        Raises:
            TypeError: a value is neither a ShardedTensor nor a ShardedObject.
        """
        keys: dict[str, int] = {}
        shapes: dict[ShapeRow, int] = {}
        key_ids: list[int] = []
        shape_ids: list[int] = []
        flags = bytearray()
        offsets: list[int] = []
        for shard in shards:
            if isinstance(shard, ShardedObject):
                flag, dtype, local, cuts = _OBJECT | _REGULAR, "", (), shard.global_shape
            else:
                dtype, local, cuts = str(shard.dtype), tuple(shard.local_shape), shard.axis_fragmentations or ()
                flag = 0 if shard.axis_fragmentations is None else _REGULAR
            ints = (len(shard.global_shape), *shard.global_shape, len(local), *local, *cuts)
            key_ids.append(keys.setdefault(shard.key, len(keys)))
            shape_ids.append(shapes.setdefault((dtype, tuple(map(int, ints))), len(shapes)))
            flags.append(flag | (_MAIN if is_main_replica(shard.replica_id) else 0))
            offsets.extend(map(int, shard.global_offset))
        return cls(
            keys=tuple(keys),
            shapes=tuple(shapes),
            key_ids=np.array(key_ids, dtype="<i4").tobytes(),
            shape_ids=np.array(shape_ids, dtype="<i4").tobytes(),
            flags=bytes(flags),
            offsets=np.array(offsets, dtype="<i8").tobytes(),
        )

    def decoded(self, keys: Ints, shapes: Ints, width: int) -> tuple[Ints, Ints, Ints, Ints]:
        """For each item its key, its shape, its flags, and its offsets padded with zeros.

        Args:
            keys, shapes: the numbers that the keys and shapes of this rank have among those of all ranks.
            width: the largest number of dimensions on any rank.

        Raises:
            ExchangeError: the columns contradict each other.
        """
        key_ids, shape_ids = np.frombuffer(self.key_ids, "<i4"), np.frombuffer(self.shape_ids, "<i4")
        flags, offsets = np.frombuffer(self.flags, np.uint8), np.frombuffer(self.offsets, "<i8")
        fits = len(key_ids) == len(shape_ids) == len(flags)
        for ids, table in ((key_ids, keys), (shape_ids, shapes)):
            fits = fits and (not len(ids) or (ids.min() >= 0 and ids.max() < len(table)))
        counts = np.array([row[1][0] for row in self.shapes], dtype=np.int64)[shape_ids if fits else []]
        if not fits or len(offsets) != counts.sum():
            raise ExchangeError("columns of a sharded state dict do not fit each other", phase="validate")
        padded = np.zeros((len(counts), width), dtype=np.int64)
        padded[np.arange(width) < counts[:, None]] = offsets
        return keys[key_ids], shapes[shape_ids], flags.astype(np.int64), padded


class Verdict(msgspec.Struct, frozen=True):
    """What the coordinator found.

    Attributes:
        keys: the keys that any rank holds, if they were asked for.
        message: what is wrong; empty if the accesses are valid. ``key`` and ``ranks`` say where.
    """

    keys: tuple[str, ...] = ()
    key: str = ""
    ranks: tuple[int, ...] = ()
    message: str = ""

    @entry_point
    def raise_if_wrong(self) -> None:
        """Raise InvalidAccess if the accesses are not valid. All ranks raise it alike."""
        if self.message:
            raise InvalidAccess(self.message, key=self.key, ranks=list(self.ranks))

    def key_lists(self) -> list[list[KeyOnly]]:
        """The keys in place of the metadata of every rank, as if one rank held them all."""
        return [[KeyOnly(key) for key in self.keys]]


class _AllRanks:
    """The columns of all ranks together, with one numbering of keys and shapes.

    Attributes:
        keys, shapes: the distinct keys and shapes of all ranks.
        key, shape, rank, flags: one value for each item of each rank.
        offsets: one row for each item, padded with zeros.
    """

    def __init__(self, all_columns: Sequence[AccessColumns]) -> None:
        keys: dict[str, int] = {}
        shapes: dict[ShapeRow, int] = {}
        parts: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}
        width = max((row[1][0] for columns in all_columns for row in columns.shapes), default=0)
        for columns in all_columns:
            if id(columns) not in parts:  # replicas may share one object for their columns
                key_map = np.array([keys.setdefault(key, len(keys)) for key in columns.keys], dtype=np.int64)
                shape_map = np.array([shapes.setdefault(row, len(shapes)) for row in columns.shapes], dtype=np.int64)
                parts[id(columns)] = columns.decoded(key_map, shape_map, width)
        nothing = (np.empty(0, np.int64),) * 3 + (np.empty((0, width), np.int64),)
        of_rank = [parts[id(columns)] for columns in all_columns]
        self.keys = list(keys)
        self.shapes = [_Shape.of(row) for row in shapes]
        self.key, self.shape, self.flags, self.offsets = map(np.concatenate, zip(nothing, *of_rank, strict=True))
        self.rank = np.repeat(np.arange(len(of_rank)), [len(part[0]) for part in of_rank])

    def wrong(self, rows: npt.NDArray[np.intp], text: str) -> Verdict:
        ranks = tuple(sorted(set(self.rank[rows].tolist())))
        return Verdict(key=self.keys[int(self.key[int(rows[0])])], ranks=ranks, message=text)


@dataclass(frozen=True)
class _Shape:
    """One decoded row of ``AccessColumns.shapes``."""

    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, row: ShapeRow) -> _Shape:
        dtype, ints = row
        local = 2 + ints[0]
        cuts = local + ints[local - 1]
        return cls(dtype, ints[1 : local - 1], ints[local:cuts], ints[cuts:])

    def __str__(self) -> str:
        return f"{self.dtype or 'object'} {list(self.global_shape)} cut into {list(self.cuts) or 'uneven parts'}"


def find_violation(all_columns: Sequence[AccessColumns]) -> Verdict | None:
    """Find the first violation of Megatron's access rule. The rule is that of stock's ``validate_sharding_integrity``.

    For each key all ranks must agree whether it is a tensor or an object, and on dtype, global shape and cut. If the
    cut is regular, each chunk must have exactly one main replica. The same holds for each part of an object. Uneven
    cuts are checked by the plan later, as stock leaves them to DCP.

    Args:
        all_columns: the columns of each rank, in rank order.
    """
    ranks = _AllRanks(all_columns)
    return _disagreement(ranks) or _wrong_count(ranks)


def _disagreement(ranks: _AllRanks) -> Verdict | None:
    first = np.full(len(ranks.keys), -1, dtype=np.int64)
    first[ranks.key[::-1]] = np.arange(len(ranks.key))[::-1]
    like = first[ranks.key]
    kind = ranks.flags & (_OBJECT | _REGULAR)
    wholes: dict[Any, int] = {}  # shapes of the same whole tensor have the same number
    whole_of = [wholes.setdefault((shape.dtype, shape.global_shape), len(wholes)) for shape in ranks.shapes]
    whole = np.array(whole_of, dtype=np.int64)[ranks.shape]
    is_object = (kind & _OBJECT) != 0
    differs = kind != kind[like]
    differs |= ~is_object & (whole != whole[like])
    differs |= (kind == _REGULAR) & (kind[like] == _REGULAR) & (ranks.shape != ranks.shape[like])
    if not differs.any():
        return None
    key = int(ranks.key[int(np.flatnonzero(differs)[0])])
    rows = np.flatnonzero(ranks.key == key)
    held: dict[str, list[int]] = {}
    for row in rows.tolist():
        what = "a ShardedObject" if is_object[row] else f"a ShardedTensor {ranks.shapes[ranks.shape[row]]}"
        held.setdefault(what, []).append(int(ranks.rank[row]))
    told = "; ".join(f"{what} on {ranks_in_words(on)}" for what, on in list(held.items())[:8])
    return ranks.wrong(rows, f"ranks disagree on {ranks.keys[key]!r}: {told}")


def _wrong_count(ranks: _AllRanks) -> Verdict | None:
    is_regular = ranks.flags & _REGULAR != 0
    counted = np.flatnonzero((ranks.flags & _MAIN != 0) & is_regular)
    order = counted[np.lexsort((*ranks.offsets[counted].T, ranks.key[counted]))]
    key, offsets = ranks.key[order], ranks.offsets[order]
    twice = np.flatnonzero((key[1:] == key[:-1]) & (offsets[1:] == offsets[:-1]).all(axis=1))
    if len(twice):
        return _accessed_twice(ranks, order[int(twice[0]) : int(twice[0]) + 2])
    expected = np.zeros(len(ranks.keys), dtype=np.int64)
    chunks = np.array([math.prod(shape.cuts) for shape in ranks.shapes], dtype=np.int64)
    regular = np.flatnonzero(is_regular)[::-1]
    expected[ranks.key[regular]] = chunks[ranks.shape[regular]]
    found = np.bincount(key, minlength=len(ranks.keys))
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return None
    place = int(wrong[0])
    rows = np.flatnonzero(ranks.key == place)
    if ranks.flags[rows[0]] & _OBJECT:
        missing = int(expected[place] - found[place])
        text = f"Invalid access pattern: {missing} ShardedObject are missing: of {ranks.keys[place]!r}, "
    else:
        text = f"Invalid access pattern for ShardedTensor(key={ranks.keys[place]!r}): "
    holders = ranks_in_words(sorted({int(rank) for rank in ranks.rank[rows]}))
    text += f"{int(found[place])} of {int(expected[place])} shards have a main replica, among those on {holders}"
    return ranks.wrong(rows, text)


def _accessed_twice(ranks: _AllRanks, rows: npt.NDArray[np.intp]) -> Verdict:
    row = int(rows[0])
    key, shape = ranks.keys[int(ranks.key[row])], ranks.shapes[int(ranks.shape[row])]
    offset = ranks.offsets[row][: len(shape.global_shape)].tolist()
    holders = ranks_in_words([int(rank) for rank in ranks.rank[rows]])
    if ranks.flags[row] & _OBJECT:
        unique = f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape.global_shape))}"
        text = f"Duplicate ShardedObject keys: {[unique]}, main replicas on {holders}"
    else:
        text = (
            f"Invalid access pattern for ShardedTensor(key={key!r}): the shard at offset {offset} is the main replica "
            f"more than once, on {holders}; expected one"
        )
    return ranks.wrong(rows, text)


_RIGHT: Cache[tuple[tuple[int, ...], bytes], bytes] = Cache(
    lambda key, identity: 200 + 8 * len(key[0]), max_nbytes=1 << 20
)
"""Structures that were found valid. The key is the group and this rank's signature. The value is the identity, which is
a hash over the signatures of all ranks.

Each rank offers the identity that it remembers. Validation is skipped only if all ranks offer the same identity and it
is equal to the one computed from the signatures of this exchange. So no rank relies on its memory alone.
"""


@dataclass(frozen=True, eq=False)
class AccessCheck:
    """One validation on one rank, after the exchange in which all ranks have offered the signatures of their columns.

    Attributes:
        columns: what this rank holds, and ``signature``: a digest of that, 16 bytes.
        agreement: what all ranks have offered.
    """

    channel: Channel
    columns: AccessColumns
    signature: bytes
    agreement: Agreement

    @property
    def is_known(self) -> bool:
        """Whether the structures of all ranks were validated before. All ranks get the same answer."""
        return self.agreement.same_plan_id and self.agreement.plan_id == self.agreement.signature

    def verdict(self, phase: str, *, with_keys: bool = False) -> Verdict:
        """Gather the columns on the coordinator, which checks them and sends its verdict to all ranks."""
        gathered = self.channel.gather(f"{phase}: shards", lambda: self.columns, AccessColumns)

        def judge() -> Verdict:
            held = [columns for columns in gathered or [] if columns is not None]
            found = find_violation(held) or Verdict()
            keys = sorted(set().union(*(columns.keys for columns in held))) if with_keys else ()
            return msgspec.structs.replace(found, keys=tuple(keys))

        verdict = self.channel.broadcast(f"{phase}: verdict", judge, Verdict)
        if not verdict.message:
            _RIGHT.put((self.channel.ranks, self.signature), self.agreement.signature)
        return verdict


def agree_on_access(
    channel: Channel,
    phase: str,
    shards: Callable[[], Sequence[Any] | ShardFacts],
    *,
    value: Callable[[], int] = lambda: 0,
) -> AccessCheck:
    """Run the first exchange of a save or load. Every rank prepares its shards and offers their signature.

    Args:
        shards: prepares the ShardedTensors and ShardedObjects of this rank. If it raises, all ranks raise.
        value: called after ``shards``. It returns 64 bits that all ranks compare.
    """
    described: list[tuple[AccessColumns, bytes]] = []

    def prepare() -> Offer:
        held = shards()
        described.append(held.once(described_facts) if isinstance(held, ShardFacts) else _described(held))
        signature = described[0][1]
        identity = _RIGHT.get((channel.ranks, signature)) or bytes(16)
        return Offer(signature=signature, plan_id=identity, value=value())

    agreement = channel.agree(phase, prepare)
    return AccessCheck(channel, *described[0], agreement)


def _described(shards: Iterable[ShardedBase]) -> tuple[AccessColumns, bytes]:
    columns = AccessColumns.of(shards)
    return columns, hashlib.blake2b(msgspec.msgpack.encode(columns), digest_size=16).digest()


def described_facts(facts: ShardFacts) -> tuple[AccessColumns, bytes]:
    return _described(facts.shards)


class GlobalMetadata(list[list[KeyOnly]]):
    """What our ``determine_global_metadata`` returns in place of the metadata of every rank.

    The accesses were checked already: :func:`validate_sharding_integrity` raises the verdict.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.key_lists())
        self.verdict = verdict


@entry_point
def determine_global_metadata(
    _: Any, sharded_state_dict: dict[str, Any], process_group: dist.ProcessGroup | None = None
) -> tuple[list[Any], GlobalMetadata]:
    """Megatron's ``determine_global_metadata``. Ranks send columns to the coordinator. All ranks of the group call it.

    Returns:
        The metadata of this rank's shards, and the keys and the verdict for all ranks.

    Raises:
        RobustCheckpointError: any rank failed. Every rank raises it.
    """
    phase = "determine_global_metadata"
    channel = Channel.for_group(
        process_group, operation=phase, timeout_seconds=current_options().exchange_timeout_seconds
    )
    local: list[Any] = []
    meet_before_saving(is_last=False)

    def shards() -> list[Any]:
        local.extend(shard.without_data() for shard in nested_values(sharded_state_dict))
        return local

    return local, GlobalMetadata(agree_on_access(channel, phase, shards).verdict(phase, with_keys=True))


def validate_sharding_integrity(
    stock: Callable[..., None], global_metadata: Any, common_state_dict: Any = None
) -> None:
    """Megatron's ``validate_sharding_integrity``. All ranks raise the verdict of :func:`determine_global_metadata`."""
    if not isinstance(global_metadata, GlobalMetadata):
        stock(global_metadata, *([] if common_state_dict is None else [common_state_dict]))
        return
    if common_state_dict is not None:
        phase = "compare common state"
        timeout_seconds = current_options().exchange_timeout_seconds
        channel = Channel.for_group(None, operation=phase, timeout_seconds=timeout_seconds)
        digests: list[LeafDigests] = []

        def digest() -> Offer:
            digests.append(leaf_digests(common_state_dict))
            return Offer(value=digests[0].whole())

        if not channel.agree(phase, digest).same_value:
            report_differences(channel, "common state of rank 0", digests[0])
    global_metadata.verdict.raise_if_wrong()
