"""The keyed exchange finds what stock's collectives find, whatever ranks hold, and names what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

pytest.importorskip("megatron.core")

from robust_dcp import RobustCheckpointError
from robust_dcp.comm import Channel
from robust_dcp.megatron import uneven as ours
from robust_dcp.megatron.uneven import place_chunks
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen
from tests.megatron.uneven_cases import Meshes, cut, held_by_rank_0, state_dicts, uneven


def _channel() -> Channel:
    return Channel.for_group(operation="uneven DTensors", timeout_seconds=20)


def _chunk(value: DTensor) -> ChunkStorageMetadata:
    (chunk,) = value.__create_chunk_list__()
    return chunk


def _items(value: DTensor) -> list[Any]:
    return list(value.__create_write_items__("name", value))


def _told(state_dict: dict[str, Any]) -> str:
    """The error of an exchange that has to fail."""
    with pytest.raises(RobustCheckpointError) as caught:
        place_chunks(state_dict, _channel())
    return f"{type(caught.value).__name__}: {caught.value}"


def _finds_what_stock_finds() -> int:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as stock

    meshes, channel, compared = Meshes(), _channel(), 0

    @settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(state_dicts(meshes))
    def compare(state_dict: dict[str, DTensor]) -> None:
        nonlocal compared
        expected = {}
        for key, value in state_dict.items():
            stock.update_uneven_dtensor_chunk_metadata(value)
            expected[key] = (_chunk(value), _items(value))
        backwards = dict(reversed(state_dict.items())) if dist.get_rank() % 2 else state_dict
        place_chunks({"model": backwards}, channel)
        for key, value in state_dict.items():
            assert (_chunk(value), _items(value)) == expected[key]
            assert type(_chunk(value).offsets) is tuple
            ours.update_uneven_dtensor_chunk_metadata(stock, value)
            assert (_chunk(value), _items(value)) == expected[key]
            assert ours.gather_and_compute_chunk_metadata(stock, value) == expected[key][0]
            compared += 1

    compare()
    return compared


def _refuses() -> dict[str, str]:
    """What each rank is told in cases that have no answer."""
    rank, meshes = dist.get_rank(), Meshes()
    row, grid = meshes.by_name["row"], meshes.grid

    def rows(shape: tuple[int, int], *cuts: int) -> DTensor:
        return cut(row, [Shard(0)], shape, {0: [0, *cuts, shape[0]], 1: [0, shape[1]]})

    good = {"good": rows((8, 3), 1, 2, 5)}
    bad = {"missing": good | ({} if rank == 2 else {"missing": rows((8, 3), 1, 2, 5)})}
    bad["last"] = good | ({} if rank == 3 else {"zz.last": rows((8, 3), 1, 2, 5)})
    bad["renamed"] = {"one" if rank == 1 else "other": rows((8, 3), 1, 2, 5)}
    bad["too long"] = {"long": uneven(row, [Shard(0)], (8, 3), (3, 3))}
    bad["too short"] = {"short": uneven(row, [Shard(0)], (8, 3), (1, 3))}
    bad["narrow"] = {"narrow": uneven(row, [Shard(0)], (8, 3), (2, 2 if rank == 1 else 3))}
    bad["other global shape"] = {"shape": uneven(row, [Shard(0)], (8, 3) if rank else (9, 3), (2, 3))}
    bad["other cut"] = {"cut": uneven(row, [Shard(1 if rank == 3 else 0)], (8, 8), (8, 2) if rank == 3 else (2, 8))}
    bad["other mesh"] = {"mesh": rows((8, 3), 1, 2, 5) if rank else uneven(grid["tp"], [Shard(0)], (8, 3), (4, 3))}
    # As large as the tensor in all, and within it; but rank 1 and rank 2 share some elements.
    bad["ragged"] = {"ragged": uneven(grid, [Shard(0), Shard(1)], (8, 8), [(2, 1), (6, 7), (6, 3), (2, 1)][rank])}
    halves = uneven(grid, [Replicate(), Shard(0)], (8, 3), (4, 3))
    bad["half a replica"] = {} if rank == 3 else {"replica": halves}
    bad["dimensions"] = {"flat": uneven(row, [Shard(0)], (8, 3), (6,) if rank == 1 else (2, 3))}
    bad["partial"] = {"sum": uneven(row, [Partial()], (8, 3), (8, 3))}
    bad["twice"] = {"a": {"b": rows((8, 3), 1, 2, 5)}, "a.b": rows((8, 3), 1, 2, 5)}
    told = {name: _told(state_dict) for name, state_dict in bad.items()}
    place_chunks(good, _channel())  # and the ranks are in step afterwards
    return told


def _accepts() -> str:
    rank, meshes, channel = dist.get_rank(), Meshes(), _channel()
    row = meshes.by_name["row"]
    replica = {} if rank == 1 else {"replica": uneven(row, [Replicate()], (3, 3), (3, 3))}
    place_chunks(replica, channel)
    assert [tuple(_chunk(value).offsets) for value in replica.values()] == [(0, 0)] * (rank != 1)
    # As an optimizer has no state where a rank's part is empty.
    state = {} if rank == 2 else {"exp_avg": uneven(row, [Shard(0)], (6, 3), (2, 3))}
    place_chunks(state, channel)
    begins = [(0, 0), (2, 0), None, (4, 0)][rank]
    assert [tuple(_chunk(value).offsets) for value in state.values()] == ([] if begins is None else [begins])
    # As Megatron-FSDP stands in for such a state: flat, though the tensor is not.
    local = torch.empty(0) if rank == 2 else torch.empty(2, 3)
    mocked = DTensor.from_local(local, row, [Shard(0)], run_check=False, shape=torch.Size((6, 3)), stride=(3, 1))
    place_chunks({"mock": mocked}, channel)
    assert _place(mocked) == ((begins, (2, 3)) if begins else ((4,), (0,)))
    # Cut after 2 rows on the left and after 6 on the right: no grid, but each element once.
    shifted = uneven(meshes.grid, [Shard(0), Shard(1)], (8, 8), [(2, 4), (6, 4), (6, 4), (2, 4)][rank])
    place_chunks({"shifted": shifted}, channel)
    assert _place(shifted)[0] == [(0, 0), (0, 4), (2, 0), (6, 4)][rank]
    # One name, another tensor on each pipeline stage or of each expert-parallel rank.
    own = uneven(meshes.grid["tp"], [Shard(0)], (4 + rank // 2, 2), (2 + (rank // 2) * (rank % 2), 2))
    place_chunks({"expert.0": own}, channel)
    assert _place(own) == [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 0), (2, 2)), ((2, 0), (3, 2))][rank]
    single = held_by_rank_0()
    place_chunks({"mine": single}, channel)
    assert rank or _place(single) == ((0,), (3,))
    return "accepted"


def _place(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(_chunk(value).offsets), tuple(_chunk(value).sizes)


def _tells_the_others() -> str:
    row = Meshes().by_name["row"]
    state_dict = {"weight": uneven(row, [Shard(0)], (8, 3), (2, 3))}
    if dist.get_rank() != 2:
        return _told(state_dict)
    with pytest.raises(RobustCheckpointError) as caught:
        ours.handle_in_state_dict(lambda state: state["exp_avg"], {})
    return f"{type(caught.value).__name__}: {caught.value}"


def _repeats() -> list[tuple[int, int]]:
    """Exchanges and payload bytes of a save, of the next, of one with another shape, and of the first again."""
    row, channel, found = Meshes().by_name["row"], _channel(), []
    first = {f"layer.{n}": uneven(row, [Shard(0)], (8, 3), (2, 3)) for n in range(300)}
    other = {f"layer.{n}": uneven(row, [Shard(0)], (12, 3), (3, 3)) for n in range(300)}
    for state_dict in (first, first, other, first):
        with channel.recording() as stats:
            place_chunks(state_dict, channel)
        found.append((stats.exchanges, stats.payload_nbytes_sent))
    assert _chunk(first["layer.7"]).offsets == (2 * dist.get_rank(), 0)
    return found


def _in_hooks() -> dict[str, Any]:
    """``state_dict()`` of a model on some of the ranks, of one on all; and what is seen without asking anybody."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as stock

    hook: dict[str, Any] = {"__name__": "megatron_fsdp.fully_shard", "uneven_dtensor": stock}
    exec("def preprocess(state): return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)", hook)
    preprocess = hook["preprocess"]
    grid, row, rank, found = Meshes().grid, Meshes().by_name["row"], dist.get_rank(), {}
    own = {
        "b": uneven(grid["tp"], [Shard(0)], (5, 2), (2 + rank % 2, 2)),
        "a": uneven(grid["tp"], [Shard(0)], (2,), (1,)),
    }
    with chosen():
        if rank < 2:
            preprocess(own)
            found["some"] = [tuple(_chunk(own[key]).offsets) for key in "ab"]
        everybodys = {"c": uneven(row, [Shard(0)], (4,), (1,))}
        preprocess(everybodys)
        found["all"] = tuple(_chunk(everybodys["c"]).offsets)
    for local in ((9, 3), (2, 2)):
        with pytest.raises(ValueError, match="is no part of a DTensor"):
            ours.validate_uneven_dtensor(None, uneven(row, [Shard(0)], (8, 3), local))
    ours.validate_uneven_dtensor(None, uneven(row, [Shard(0)], (8, 3), (0, 3)))
    return found


def _splits_fused() -> dict[str, Any]:
    """A fused projection, split as GDN's are: where it is cut depends on where this rank's part begins."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as stock

    def split_dtensor(value: DTensor, sizes: list[int]) -> Iterator[DTensor]:
        """As Megatron-FSDP's, which in some versions hands torch a list where it wants a tuple."""
        chunk, begin = stock.gather_and_compute_chunk_metadata(value), 0
        for size in sizes:
            first = min(max(begin - chunk.offsets[0], 0), chunk.sizes[0])
            last = min(max(begin + size - chunk.offsets[0], 0), chunk.sizes[0])
            piece = uneven(value.device_mesh, [Shard(0)], (size, value.shape[1]), (last - first, value.shape[1]))
            stock.update_uneven_dtensor_chunk_metadata(piece)
            yield piece
            begin += size

    def handle_gdn_in_state_dict(model: Any, model_state: dict[str, Any], _: Any) -> dict[str, Any]:
        pieces = split_dtensor(model_state["fused"], [3, 4, 5])
        return {f"fused.{name}": piece for name, piece in zip("qkv", pieces, strict=True)}

    def split() -> dict[str, Any]:
        row = Meshes().by_name["row"]
        fused = cut(row, [Shard(0)], (12, 2), {0: [0, 1, 4, 10, 12], 1: [0, 2]})
        pieces = handle_gdn_in_state_dict(None, {"fused": fused}, None)
        stock.preprocess_state_dict_for_uneven_dtensor(pieces)
        return {key: (_chunk(value), tuple(value.shape)) for key, value in pieces.items()}

    by_stock = split()
    handle_gdn_in_state_dict = partial(ours.handle_gdn_in_state_dict, handle_gdn_in_state_dict)
    with chosen():
        stats = Channel.for_group().stats
        before = stats.exchanges
        by_ours = split()
        exchanges = stats.exchanges - before
    return {"same": by_ours == by_stock, "exchanges": exchanges}


def _all(_: Path) -> dict[str, Any]:
    return {
        function.__name__: function()
        for function in (
            _finds_what_stock_finds,
            _refuses,
            _accepts,
            _tells_the_others,
            _repeats,
            _in_hooks,
            _splits_fused,
        )
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(4, _all, tmp_path_factory.mktemp("uneven"), timeout_seconds=150))


def test_chunks_and_write_items_are_those_of_stock(found: list[dict[str, Any]]) -> None:
    assert len({rank["_finds_what_stock_finds"] for rank in found}) == 1
    assert found[0]["_finds_what_stock_finds"] > 25


@pytest.mark.parametrize(
    ("case", "keys", "what"),
    [
        ("missing", ["missing"], "ranks [2] do not hold this key"),
        ("last", ["zz.last"], "ranks [3] do not hold this key"),
        ("renamed", ["one", "other"], "ranks [0, 2, 3] do not hold this key"),
        ("too long", ["long"], "rank 2: [3, 3], rank 3: [3, 3]"),
        ("too short", ["short"], "global shape [8, 3], which these local shapes do not make up"),
        ("narrow", ["narrow"], "rank 1: [2, 2]"),
        ("other global shape", ["shape"], "has several global shapes, [9, 3] and another"),
        (
            "other cut",
            ["cut"],
            "rank 3 holds it with 2 dimensions on a mesh of shape [4] (cut along tensor dimension 1)",
        ),
        ("other mesh", ["mesh"], "rank 0 holds it with 2 dimensions on a mesh of shape [2]"),
        ("ragged", ["ragged"], "rank 1: [6, 7], rank 2: [6, 3]"),
        ("half a replica", ["replica"], "ranks [3] do not hold this key"),
        (
            "dimensions",
            ["flat"],
            "the DTensor 'flat' has shape [8, 3] and here a local tensor of shape [6]",
        ),
        ("partial", ["sum"], "neither Shard nor Replicate"),
        ("twice", ["a.b"], "two DTensors of the state dict have the name 'a.b'"),
    ],
)
def test_what_does_not_fit_is_one_error_on_all_ranks(
    found: list[dict[str, Any]], case: str, keys: list[str], what: str
) -> None:
    told = [rank["_refuses"][case] for rank in found]
    assert len(set(told)) == 1
    assert told[0].startswith(("PlanConflict: ", "RobustCheckpointError: "))
    assert what in told[0]
    assert all(repr(key) in told[0] for key in keys)
    assert "'good'" not in told[0]


def test_empty_parts_missing_replicas_odd_cuts_and_other_meshes_are_fine(found: list[dict[str, Any]]) -> None:
    assert [rank["_accepts"] for rank in found] == ["accepted"] * 4


def test_a_rank_that_fails_before_the_exchange_is_named_to_the_others(found: list[dict[str, Any]]) -> None:
    told = {rank["_tells_the_others"] for rank in found}
    assert len(told) == 1
    assert "rank 2: KeyError: 'exp_avg'" in told.pop()


def test_an_unchanged_state_dict_costs_one_header_a_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert [exchanges for exchanges, _ in rank["_repeats"]] == [3, 1, 3, 1]
        assert [nbytes for _, nbytes in rank["_repeats"]][1::2] == [0, 0]


def test_a_fused_projection_is_split_after_one_exchange_for_all_of_them(found: list[dict[str, Any]]) -> None:
    # Three for the fused tensors and three for what they are split into.
    assert all(rank["_splits_fused"] == {"same": True, "exchanges": 6} for rank in found)


def test_hooks_of_state_dict_ask_the_ranks_of_the_model(found: list[dict[str, Any]]) -> None:
    assert [rank["_in_hooks"].get("some") for rank in found] == [[(0,), (0, 0)], [(1,), (2, 0)], None, None]
    assert [rank["_in_hooks"]["all"] for rank in found] == [(0,), (1,), (2,), (3,)]
