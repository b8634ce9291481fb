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
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import ExchangeError, entry_point, ranks_in_words
from robust_dcp.megatron.failures import InvalidAccess
from robust_dcp.megatron.shards import ShardFacts
from robust_dcp.megatron.versions import KeyOnly
from robust_dcp.structure_cache import Cache

_OBJECT, _REGULAR, _MAIN = 1, 2, 4

Ints = npt.NDArray[np.int64]


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """How a tensor is cut. An object has no dtype and no local shape, and one part in each place."""

    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    cuts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype or 'object'} {list(self.global_shape)} cut into {list(self.cuts) or 'uneven parts'}"


class AccessColumns(msgspec.Struct, frozen=True):
    """The ShardedTensors and ShardedObjects that one rank holds, in the order of its state dict. Little-endian.

    Attributes:
        keys: the distinct keys.
        shapes: the distinct dtypes, shapes and cuts.
        key_ids, shape_ids: int32, one for each item: its place in ``keys`` and ``shapes``.
        flags: uint8, one for each item, with the bits object, regular grid and main replica.
        offsets: int64, the global offsets of all items, one item after the other.
    """

    keys: tuple[str, ...]
    shapes: tuple[_Shape, ...]
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
        shapes: dict[_Shape, int] = {}
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
            shape = _Shape(dtype, *(tuple(map(int, each)) for each in (shard.global_shape, local, cuts)))
            key_ids.append(keys.setdefault(shard.key, len(keys)))
            shape_ids.append(shapes.setdefault(shape, len(shapes)))
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
        counts = np.array([len(shape.global_shape) for shape in self.shapes], dtype=np.int64)[shape_ids if fits else []]
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
        shapes: dict[_Shape, int] = {}
        parts: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}
        width = max((len(shape.global_shape) for columns in all_columns for shape in columns.shapes), default=0)
        for columns in all_columns:
            if id(columns) not in parts:  # replicas may share one object for their columns
                key_map = np.array([keys.setdefault(key, len(keys)) for key in columns.keys], dtype=np.int64)
                shape_map = np.array([shapes.setdefault(each, len(shapes)) for each in columns.shapes], dtype=np.int64)
                parts[id(columns)] = columns.decoded(key_map, shape_map, width)
        nothing = (np.empty(0, np.int64),) * 3 + (np.empty((0, width), np.int64),)
        of_rank = [parts[id(columns)] for columns in all_columns]
        self.keys = list(keys)
        self.shapes = list(shapes)
        self.key, self.shape, self.flags, self.offsets = map(np.concatenate, zip(nothing, *of_rank, strict=True))
        self.rank = np.repeat(np.arange(len(of_rank)), [len(part[0]) for part in of_rank])

    def wrong(self, rows: npt.NDArray[np.intp], text: str) -> Verdict:
        ranks = tuple(sorted(set(self.rank[rows].tolist())))
        return Verdict(key=self.keys[int(self.key[int(rows[0])])], ranks=ranks, message=text)


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
    holders = ranks_in_words(sorted({int(rank) for rank in ranks.rank[rows]}))
    kind = "ShardedObject" if ranks.flags[rows[0]] & _OBJECT else "ShardedTensor"
    return ranks.wrong(
        rows,
        f"Invalid access pattern for {kind}(key={ranks.keys[place]!r}): {int(found[place])} of {int(expected[place])} "
        f"shards have a main replica, among those on {holders}",
    )


def _accessed_twice(ranks: _AllRanks, rows: npt.NDArray[np.intp]) -> Verdict:
    row = int(rows[0])
    offset = ranks.offsets[row][: len(ranks.shapes[int(ranks.shape[row])].global_shape)].tolist()
    kind = "ShardedObject" if ranks.flags[row] & _OBJECT else "ShardedTensor"
    return ranks.wrong(
        rows,
        f"Invalid access pattern for {kind}(key={ranks.keys[int(ranks.key[row])]!r}): the shard at offset {offset} is "
        f"the main replica more than once, on {ranks_in_words([int(rank) for rank in ranks.rank[rows]])}; expected one",
    )


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
    offered: list[tuple[AccessColumns, bytes]] = []

    def prepare() -> Offer:
        held = shards()
        offered.append(held.once(described) if isinstance(held, ShardFacts) else described(held))
        signature = offered[0][1]
        identity = _RIGHT.get((channel.ranks, signature)) or bytes(16)
        return Offer(signature=signature, plan_id=identity, value=value())

    agreement = channel.agree(phase, prepare)
    return AccessCheck(channel, *offered[0], agreement)


def described(held: Sequence[Any] | ShardFacts) -> tuple[AccessColumns, bytes]:
    """The columns of some shards, and a digest of them."""
    columns = AccessColumns.of(held.shards if isinstance(held, ShardFacts) else held)
    return columns, hashlib.blake2b(msgspec.msgpack.encode(columns), digest_size=16).digest()
