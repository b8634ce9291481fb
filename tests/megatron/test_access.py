"""Megatron's access rule on columns: the same answers as ``validate_sharding_integrity`` of stock, key by key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from robust_dcp.comm import wire
from robust_dcp.errors import ExchangeError
from robust_dcp.megatron.checks.access import AccessColumns, columns_of, find_violation, keys_of

_KEYS = st.sampled_from(["a", "b", "layers.0.weight"])


def _tensor(key: str, offset: tuple[int, int], cuts: tuple[int, int], replica: int, dtype: torch.dtype) -> Any:
    local = (2, 3)
    return ShardedTensor(
        key,
        None,
        dtype,
        local,
        tuple(size * cut for size, cut in zip(local, cuts, strict=True)),
        tuple(size * (place % cut) for size, place, cut in zip(local, offset, cuts, strict=True)),
        cuts,
        replica,
    )


def _object(key: str, offset: int, n_parts: int, replica: int) -> Any:
    return ShardedObject(f"object.{key}", None, (n_parts,), (offset % n_parts,), replica)


_CUTS = st.sampled_from([(1, 1), (2, 1), (2, 2)])
_REPLICAS = st.sampled_from([0, 0, 0, 1, (0, 0), (0, 1)])
_SHARDS = st.one_of(
    st.builds(
        _tensor,
        _KEYS,
        st.tuples(st.integers(0, 1), st.integers(0, 1)),
        _CUTS,
        _REPLICAS,
        st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    ),
    st.builds(_object, _KEYS, st.integers(0, 2), st.just(2), _REPLICAS),
)


def _stock_accepts(monkeypatch: pytest.MonkeyPatch, held: list[list[Any]]) -> bool:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    try:
        validation.validate_sharding_integrity(held)
    except (AssertionError, validation.CheckpointingException):
        return False
    return True


@given(held=st.lists(st.lists(_SHARDS, max_size=5), min_size=1, max_size=4))
def test_what_stock_accepts_and_refuses_is_what_the_columns_say(held: list[list[Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        accepted = _stock_accepts(monkeypatch, held)
    violation = find_violation([columns_of(rank) for rank in held])
    assert (violation is None) == accepted
    if violation is not None:
        holders = {rank for rank, shards in enumerate(held) for shard in shards if shard.key == violation.key}
        assert set(violation.ranks) <= holders
        assert violation.key.removeprefix("object.") in violation.message


@given(shards=st.lists(_SHARDS, max_size=8))
def test_columns_survive_their_way_to_the_coordinator(shards: list[Any]) -> None:
    columns = columns_of(shards)
    received = wire.decode(wire.encode(columns), AccessColumns)
    assert received == columns
    assert received.signature() == columns.signature()
    assert keys_of([received]) == sorted({shard.key for shard in shards})


def _grid(rank: int, n_ranks: int, **changes: Any) -> list[Any]:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, n_ranks))
    for name, value in changes.items():
        setattr(shard, name, value)
    return [shard]


@pytest.mark.parametrize(
    "change",
    [
        {"key": "v"},
        {"dtype": torch.float16},
        {"replica_id": 1},
        {"global_offset": (2, 0)},
        {"global_shape": (8, 3)},
        {"axis_fragmentations": None},
    ],
)
def test_whatever_changes_in_a_shard_changes_the_signature(change: dict[str, Any]) -> None:
    assert columns_of(_grid(0, 2)).signature() != columns_of(_grid(0, 2, **change)).signature()


def test_uneven_parts_are_left_to_the_plan() -> None:
    held = [columns_of(_grid(rank, 3, axis_fragmentations=None)) for rank in (0, 1)]
    assert find_violation(held) is None


def test_a_gap_is_told_with_the_number_of_shards_that_are_there() -> None:
    found = find_violation([columns_of(_grid(0, 3)), columns_of(_grid(2, 3))])
    assert found is not None
    assert (found.key, found.ranks) == ("w", (0, 1))
    assert "2 of 3 shards have a main replica" in found.message


def _columns() -> AccessColumns:
    shards = [_tensor(key, (0, 0), (2, 2), 0, torch.float32) for key in ("a", "b")]
    return columns_of([*shards, _object("c", 0, 1, 0)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda columns: {"key_ids": b"\x09\x00\x00\x00" + columns.key_ids[4:]},
            "columns of a sharded state dict",
        ),
        (lambda columns: {"shape_ids": b"\xff" * 4 + columns.shape_ids[4:]}, "columns of a sharded state dict"),
        (lambda columns: {"flags": columns.flags[1:]}, "columns of a sharded state dict"),
        (lambda columns: {"offsets": columns.offsets[8:]}, "offsets of a sharded state dict do not fit its shapes"),
    ],
    ids=["key", "shape", "flags", "offsets"],
)
def test_columns_of_a_rank_that_do_not_fit_each_other_are_refused(damage: Any, message: str) -> None:
    """They have come from another rank, so a wrong number in them must not select something else."""
    good = _columns()
    with pytest.raises(ExchangeError, match=message):
        find_violation([good, msgspec.structs.replace(good, **damage(good))])
