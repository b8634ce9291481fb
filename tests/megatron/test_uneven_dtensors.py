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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

pytest.importorskip("megatron.core")

from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as stock

from robust_dcp import RobustCheckpointError
from robust_dcp.comm import Channel
from robust_dcp.comm.loop import link_for
from robust_dcp.megatron import uneven as ours
from robust_dcp.megatron.uneven import place_chunks
from tests.megatron.torch_dist import Scenarios, chosen
from tests.megatron.uneven_cases import Meshes, cut, state_dicts, uneven

SCENARIOS = Scenarios(4)


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


@SCENARIOS.add
def chunks_and_write_items_are_those_of_stock(_: Path) -> None:
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
    assert compared > 25


@SCENARIOS.add
def what_does_not_fit_is_one_error_on_all_ranks(_: Path) -> None:
    rank, meshes = dist.get_rank(), Meshes()
    row, grid = meshes.by_name["row"], meshes.grid

    def rows(shape: tuple[int, int], *cuts: int) -> DTensor:
        return cut(row, [Shard(0)], shape, {0: [0, *cuts, shape[0]], 1: [0, shape[1]]})

    def of_row(shape: tuple[int, ...], *local: int) -> DTensor:
        return uneven(row, [Shard(0)], shape, local)

    whole = rows((8, 3), 1, 2, 5)
    good = {"good": whole}
    # As large as the tensor in all, and within it; but rank 1 and rank 2 share some elements.
    ragged = uneven(grid, [Shard(0), Shard(1)], (8, 8), [(2, 1), (6, 7), (6, 3), (2, 1)][rank])
    halves = uneven(grid, [Replicate(), Shard(0)], (8, 3), (4, 3))
    other_cut = uneven(row, [Shard(1)], (8, 8), (8, 2)) if rank == 3 else uneven(row, [Shard(0)], (8, 8), (2, 8))
    bad: list[tuple[dict[str, Any], str, str]] = [
        (good | ({} if rank == 2 else {"missing": whole}), "missing", "ranks [2] do not hold this key"),
        (good | ({} if rank == 3 else {"zz.last": whole}), "zz.last", "ranks [3] do not hold this key"),
        ({"one" if rank == 1 else "other": whole}, "one", "ranks [0, 2, 3] do not hold this key"),
        ({"long": of_row((8, 3), 3, 3)}, "long", "rank 2: [3, 3], rank 3: [3, 3]"),
        ({"short": of_row((8, 3), 1, 3)}, "short", "global shape [8, 3], which these local shapes do not make up"),
        ({"narrow": of_row((8, 3), 2, 2 if rank == 1 else 3)}, "narrow", "rank 1: [2, 2]"),
        ({"shape": of_row((8, 3) if rank else (9, 3), 2, 3)}, "shape", "has several global shapes, [9, 3] and another"),
        ({"cut": other_cut}, "cut", "on a mesh of shape [4] (cut along tensor dimension 1)"),
        ({"mesh": whole if rank else uneven(grid["tp"], [Shard(0)], (8, 3), (4, 3))}, "mesh", "a mesh of shape [2]"),
        ({"ragged": ragged}, "ragged", "rank 1: [6, 7], rank 2: [6, 3]"),
        ({} if rank == 3 else {"replica": halves}, "replica", "ranks [3] do not hold this key"),
        ({"flat": of_row((8, 3), *((6,) if rank == 1 else (2, 3)))}, "flat", "here a local tensor of shape [6]"),
        ({"sum": uneven(row, [Partial()], (8, 3), (8, 3))}, "sum", "neither Shard nor Replicate"),
        ({"a": {"b": whole}, "a.b": rows((8, 3), 1, 2, 5)}, "a.b", "two DTensors of the state dict have the name"),
    ]
    for state_dict, key, what in bad:
        told = _told(state_dict)
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, told)
        assert of_ranks == [told] * 4
        assert repr(key) in told and what in told and "'good'" not in told
    place_chunks(good, _channel())  # and the ranks are in step afterwards


@SCENARIOS.add
def empty_parts_missing_replicas_odd_cuts_and_other_meshes_are_fine(_: Path) -> None:
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
    # On the ranks that are not in its mesh it has no data.
    local = torch.empty(0 if rank else 3)
    single = DTensor.from_local(
        local, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False, shape=torch.Size((3,)), stride=(1,)
    )
    place_chunks({"mine": single}, channel)
    assert rank or _place(single) == ((0,), (3,))


def _place(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(_chunk(value).offsets), tuple(_chunk(value).sizes)


@SCENARIOS.add
def an_unchanged_state_dict_costs_one_header_a_rank(_: Path) -> None:
    row, channel, found = Meshes().by_name["row"], _channel(), []
    first = {f"layer.{n}": uneven(row, [Shard(0)], (8, 3), (2, 3)) for n in range(300)}
    other = {f"layer.{n}": uneven(row, [Shard(0)], (12, 3), (3, 3)) for n in range(300)}
    for state_dict in (first, first, other, first):
        place_chunks(state_dict, channel)
        found.append((channel.stats.exchanges, channel.stats.payload_nbytes_sent))
    assert _chunk(first["layer.7"]).offsets == (2 * dist.get_rank(), 0)
    assert [exchanges for exchanges, _ in found] == [3, 4, 7, 8]
    assert found[0][1] == found[1][1] and found[2][1] == found[3][1]


@SCENARIOS.add
def hooks_of_state_dict_ask_the_ranks_of_the_model(_: Path) -> None:
    """``state_dict()`` of a model on some of the ranks, of one on all; and what is seen without asking anybody."""
    hook: dict[str, Any] = {"__name__": "megatron_fsdp.fully_shard", "uneven_dtensor": stock}
    exec("def preprocess(state): return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)", hook)
    preprocess = hook["preprocess"]
    grid, row, rank = Meshes().grid, Meshes().by_name["row"], dist.get_rank()
    own = {
        "b": uneven(grid["tp"], [Shard(0)], (5, 2), (2 + rank % 2, 2)),
        "a": uneven(grid["tp"], [Shard(0)], (2,), (1,)),
    }
    with chosen():
        if rank < 2:
            preprocess(own)
            assert [tuple(_chunk(own[key]).offsets) for key in "ab"] == [(rank,), (2 * rank, 0)]
        everybodys = {"c": uneven(row, [Shard(0)], (4,), (1,))}
        preprocess(everybodys)
        assert tuple(_chunk(everybodys["c"]).offsets) == (rank,)


@SCENARIOS.add
def a_fused_projection_is_split_after_one_exchange_for_all_of_them(_: Path) -> None:
    """Split as GDN's are: where it is cut depends on where this rank's part begins."""

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
        stats = link_for(dist.group.WORLD).stats
        before = stats.exchanges
        by_ours = split()
    assert by_ours == by_stock
    assert stats.exchanges - before == 6  # three for the fused tensors and three for what they are split into


test_on_four_ranks = SCENARIOS.test()
