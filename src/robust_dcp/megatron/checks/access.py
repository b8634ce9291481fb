"""Checks Megatron's access rule: each shard must have its main replica on exactly one rank.

Each rank describes its sharded state dict as columns, and the columns of all ranks are checked together. This module
knows no process group. Called by ``validation`` for both save and load.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError, ranks_in_words
from robust_dcp.megatron.versions import ShardedBase, ShardedObject, is_main_replica

__all__ = ["AccessColumns", "Violation", "columns_of", "find_violation", "keys_of"]

_OBJECT = 1
_REGULAR = 2
_MAIN = 4

Ints = npt.NDArray[np.int64]


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
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    key_ids: bytes
    shape_ids: bytes
    flags: bytes
    offsets: bytes

    def signature(self) -> bytes:
        """A digest of 16 bytes. It is equal if, and only if, the columns are equal."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


@dataclass(frozen=True)
class Violation:
    """What is wrong with the accesses to one key.

    Attributes:
        key: the key of the ShardedTensor or ShardedObject.
        ranks: the ranks that hold the shards in conflict.
        message: the error message.
    """

    key: str
    ranks: tuple[int, ...]
    message: str


def columns_of(shards: Iterable[ShardedBase]) -> AccessColumns:
    """Describe the shards of one rank as columns.

    Raises:
        TypeError: a value is neither a ShardedTensor nor a ShardedObject.
    """
    keys: dict[str, int] = {}
    shapes: dict[tuple[str, tuple[int, ...]], int] = {}
    key_ids: list[int] = []
    shape_ids: list[int] = []
    flags = bytearray()
    offsets: list[int] = []
    for shard in shards:
        if isinstance(shard, ShardedObject):
            flag, dtype, local, cuts = _OBJECT | _REGULAR, "", (), shard.global_shape
        else:
            dtype, local, cuts = str(shard.dtype), tuple(shard.local_shape), shard.axis_fragmentations
            is_flat = getattr(shard, "flattened_range", None) is not None  # a part of a chunk (loads, up to 0.14)
            flag = 0 if cuts is None or is_flat else _REGULAR
            cuts = cuts or ()
        shape = (dtype, (len(shard.global_shape), *shard.global_shape, len(local), *local, *cuts))
        key_ids.append(keys.setdefault(shard.key, len(keys)))
        shape_ids.append(shapes.setdefault((shape[0], tuple(map(int, shape[1]))), len(shapes)))
        flags.append(flag | (_MAIN if is_main_replica(shard.replica_id) else 0))
        offsets.extend(map(int, shard.global_offset))
    return AccessColumns(
        keys=tuple(keys),
        shapes=tuple(shapes),
        key_ids=np.array(key_ids, dtype="<i4").tobytes(),
        shape_ids=np.array(shape_ids, dtype="<i4").tobytes(),
        flags=bytes(flags),
        offsets=np.array(offsets, dtype="<i8").tobytes(),
    )


def keys_of(all_columns: Sequence[AccessColumns]) -> list[str]:
    """All keys that at least one rank holds, sorted."""
    return sorted(set().union(*(columns.keys for columns in all_columns)))


@dataclass(frozen=True)
class _Shape:
    """One decoded row of ``AccessColumns.shapes``."""

    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, row: tuple[str, tuple[int, ...]]) -> _Shape:
        dtype, ints = row
        n_dims = ints[0]
        n_local = ints[1 + n_dims]
        local = ints[2 + n_dims : 2 + n_dims + n_local]
        return cls(dtype, ints[1 : 1 + n_dims], local, ints[2 + n_dims + n_local :])

    def __str__(self) -> str:
        return f"{self.dtype or 'object'} {list(self.global_shape)} cut into {list(self.cuts) or 'uneven parts'}"


class _AllRanks:
    """The columns of all ranks together, with one numbering of keys and shapes.

    Attributes:
        keys, shapes: the distinct keys and shapes of all ranks.
        key, shape, rank, flags: one value for each item of each rank.
        offsets: one row for each item, padded with zeros.
    """

    def __init__(self, all_columns: Sequence[AccessColumns]) -> None:
        keys: dict[str, int] = {}
        shapes: dict[tuple[str, tuple[int, ...]], int] = {}
        parts: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8], Ints]] = {}
        width = max((row[1][0] for columns in all_columns for row in columns.shapes), default=0)
        of_rank = []
        for columns in all_columns:
            part = parts.get(id(columns))  # replicas may share one object for their columns
            if part is None:
                key_map = np.array([keys.setdefault(key, len(keys)) for key in columns.keys], dtype=np.int32)
                shape_map = np.array([shapes.setdefault(row, len(shapes)) for row in columns.shapes], dtype=np.int32)
                part = parts[id(columns)] = (*_decoded(columns, key_map, shape_map), _padded_offsets(columns, width))
            of_rank.append(part)
        self.keys = list(keys)
        self.shapes = [_Shape.of(row) for row in shapes]
        self.key, self.shape, self.flags = (
            np.concatenate([part[column] for part in of_rank]) if of_rank else np.empty(0, np.int32)
            for column in range(3)
        )
        self.offsets: Ints = np.concatenate([part[3] for part in of_rank]) if of_rank else np.empty((0, 0), np.int64)
        self.rank = np.repeat(np.arange(len(of_rank)), [len(part[0]) for part in of_rank])


def _decoded(
    columns: AccessColumns, key_map: npt.NDArray[np.int32], shape_map: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    key_ids = np.frombuffer(columns.key_ids, "<i4")
    shape_ids = np.frombuffer(columns.shape_ids, "<i4")
    flags = np.frombuffer(columns.flags, np.uint8)
    fits = len(key_ids) == len(shape_ids) == len(flags)
    for ids, table in ((key_ids, key_map), (shape_ids, shape_map)):
        fits = fits and (not len(ids) or (ids.min() >= 0 and ids.max() < len(table)))
    if not fits:
        raise ExchangeError("columns of a sharded state dict do not fit each other", phase="validate")
    return key_map[key_ids], shape_map[shape_ids], flags


def _padded_offsets(columns: AccessColumns, width: int) -> Ints:
    n_dims = np.array([row[1][0] for row in columns.shapes], dtype=np.int64)
    counts = n_dims[np.frombuffer(columns.shape_ids, "<i4")] if len(n_dims) else np.empty(0, np.int64)
    padded = np.zeros((len(counts), width), dtype=np.int64)
    offsets = np.frombuffer(columns.offsets, "<i8")
    if len(offsets) != counts.sum():
        raise ExchangeError("offsets of a sharded state dict do not fit its shapes", phase="validate")
    padded[np.arange(width) < counts[:, None]] = offsets
    return padded


def find_violation(all_columns: Sequence[AccessColumns]) -> Violation | None:
    """Find the first violation of Megatron's access rule. The rule is that of stock's ``validate_sharding_integrity``.

    For each key all ranks must agree whether it is a tensor or an object, and on dtype, global shape and cut. If the
    cut is regular, each chunk must have exactly one main replica. The same holds for each part of an object. Uneven
    cuts are checked by the plan later, as stock leaves them to DCP.

    Args:
        all_columns: the columns of each rank, in rank order.
    """
    ranks = _AllRanks(all_columns)
    return _disagreement(ranks) or _wrong_count(ranks)


def _disagreement(ranks: _AllRanks) -> Violation | None:
    first = np.full(len(ranks.keys), -1, dtype=np.int64)
    first[ranks.key[::-1]] = np.arange(len(ranks.key))[::-1]
    like = first[ranks.key]
    kind = ranks.flags & (_OBJECT | _REGULAR)
    is_regular_tensor = (kind == _REGULAR) & (kind[like] == _REGULAR)
    wholes = _numbered([(shape.dtype, shape.global_shape) for shape in ranks.shapes])[ranks.shape]
    is_object = (kind & _OBJECT) != 0
    differs = kind != kind[like]
    differs |= ~is_object & (wholes != wholes[like])
    differs |= is_regular_tensor & (ranks.shape != ranks.shape[like])
    if not differs.any():
        return None
    key = int(ranks.key[int(np.flatnonzero(differs)[0])])
    rows = np.flatnonzero(ranks.key == key)
    held: dict[str, list[int]] = {}
    for row in rows.tolist():
        what = "a ShardedObject" if is_object[row] else f"a ShardedTensor {ranks.shapes[ranks.shape[row]]}"
        held.setdefault(what, []).append(int(ranks.rank[row]))
    told = "; ".join(f"{what} on {ranks_in_words(on)}" for what, on in list(held.items())[:8])
    return _violation(ranks, rows, f"ranks disagree on {ranks.keys[key]!r}: {told}")


def _wrong_count(ranks: _AllRanks) -> Violation | None:
    counted = np.flatnonzero((ranks.flags & _MAIN != 0) & (ranks.flags & _REGULAR != 0))
    order = counted[np.lexsort((*ranks.offsets[counted].T, ranks.key[counted]))]
    key, offsets = ranks.key[order], ranks.offsets[order]
    twice = np.flatnonzero((key[1:] == key[:-1]) & (offsets[1:] == offsets[:-1]).all(axis=1))
    if len(twice):
        return _accessed_twice(ranks, order[int(twice[0]) : int(twice[0]) + 2])
    expected = np.zeros(len(ranks.keys), dtype=np.int64)
    chunks = np.array([math.prod(shape.cuts) for shape in ranks.shapes], dtype=np.int64)
    regular = np.flatnonzero(ranks.flags & _REGULAR != 0)[::-1]
    expected[ranks.key[regular]] = chunks[ranks.shape[regular]] if len(chunks) else 0
    found = np.bincount(key, minlength=len(ranks.keys)) if len(ranks.keys) else np.empty(0, np.int64)
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return None
    place = int(wrong[0])
    rows = np.flatnonzero(ranks.key == place)
    missing = int(expected[place] - found[place])
    if ranks.flags[rows[0]] & _OBJECT:
        text = f"Invalid access pattern: {missing} ShardedObject are missing: of {ranks.keys[place]!r}, "
    else:
        text = f"Invalid access pattern for ShardedTensor(key={ranks.keys[place]!r}): "
    holders = ranks_in_words(sorted({int(rank) for rank in ranks.rank[rows]}))
    text += f"{int(found[place])} of {int(expected[place])} shards have a main replica, among those on {holders}"
    return _violation(ranks, rows, text)


def _accessed_twice(ranks: _AllRanks, rows: npt.NDArray[np.intp]) -> Violation:
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
    return _violation(ranks, rows, text)


def _violation(ranks: _AllRanks, rows: npt.NDArray[np.intp], text: str) -> Violation:
    return Violation(ranks.keys[int(ranks.key[int(rows[0])])], tuple(sorted(set(ranks.rank[rows].tolist()))), text)


def _numbered(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Number the values, so that equal values have equal numbers."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
