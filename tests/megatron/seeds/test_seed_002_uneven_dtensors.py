"""Megatron-LM #4910: saving optimizer state of Megatron-FSDP hangs in ``validate_uneven_dtensor`` until a watchdog.

Stock asks the ranks of each mesh dimension of each DTensor in turn, in the order of the state dict. A rank whose order
or keys are others answers for another tensor, or never.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("megatron.core")

from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

from benchmarks.collectives import counted_collectives
from robust_dcp import PlanConflict
from robust_dcp.comm.loop import link_for
from tests.megatron.torch_dist import Scenarios, chosen
from tests.megatron.uneven_cases import uneven

SCENARIOS = Scenarios()
_STOCK_WAITS = datetime.timedelta(seconds=3)
"""Thirty minutes in the report."""
_TENSORS = 5


def _mesh() -> DeviceMesh:
    """Both ranks, in a group of its own: stock leaves it broken."""
    dist.barrier()
    return DeviceMesh.from_group(dist.new_group([0, 1], timeout=_STOCK_WAITS), "cpu")


def _state(order: str) -> dict[str, DTensor]:
    """DTensors of which rank 0 holds the first 5, 4, 2 and 1 rows and rank 1 the other 0, 5, 3 and 6, in this order."""
    mesh, rank = _mesh(), dist.get_rank()
    held = {"e": (5, 0), "b": (4, 5), "a": (2, 3), "c": (1, 6)}
    return {key: uneven(mesh, [Shard(0)], (sum(held[key]), 3), (held[key][rank], 3)) for key in order}


def _outcome(preprocess: Callable[[dict[str, Any]], Any], state: dict[str, Any]) -> Any:
    """Rows at which each part begins, or the error."""
    dist.barrier()
    try:
        preprocess(state)
        return {key: value.__create_chunk_list__()[0].offsets[0] for key, value in state.items()}
    except Exception as error:
        return error


def _one_by_one(state: dict[str, Any]) -> None:
    """In the order of this rank's keys, as the splits do. Newer versions sort them where all are asked for at once."""
    for value in state.values():
        uneven_dtensor.update_uneven_dtensor_chunk_metadata(value)


def _at_once(state: dict[str, Any]) -> None:
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)


@SCENARIOS.add
def where_ranks_differ_in_order_stock_is_silently_wrong_and_ours_right_or_refuses(_: Path) -> None:
    rank = dist.get_rank()
    mine = ("ab", "ba")[rank]
    # Rank 1's part of "b" begins at row 4; stock puts it where rank 0's part of "a" ends.
    assert _outcome(_one_by_one, _state(mine)) == ({"a": 0, "b": 0}, {"b": 2, "a": 4})[rank]
    with chosen(timeout_seconds=60):
        assert _outcome(_at_once, _state(mine)) == ({"a": 0, "b": 0}, {"b": 4, "a": 2})[rank]
        told = str(_outcome(_one_by_one, _state(mine)))
    assert "of shape [5, 3]" in told and "of shape [9, 3]" in told


@SCENARIOS.add
def stock_waits_for_a_rank_without_the_key_until_its_group_ends_and_names_nobody(_: Path) -> None:
    for of_rank_0, of_rank_1 in (("abc", "ac"), ("eb", "b")):
        outcome = _outcome(_at_once, _state((of_rank_0, of_rank_1)[dist.get_rank()]))
        if dist.get_rank() == 0:
            assert isinstance(outcome, Exception) and not isinstance(outcome, PlanConflict)
            assert "imed out" in str(outcome) or "losed" in str(outcome), outcome
            assert "rank 1" not in str(outcome).lower()
        else:  # goes on, and waits in the next collective
            assert outcome.keys() == set(of_rank_1)
            assert "c" not in outcome or outcome["c"] == 4  # where rank 0's part of "b" ends


@SCENARIOS.add
def ours_names_the_key_and_the_rank_that_lacks_it_on_all_ranks(_: Path) -> None:
    with chosen(timeout_seconds=60):
        for orders in (("abc", "ac"), ("ab", "a")):
            error = _outcome(_at_once, _state(orders[dist.get_rank()]))
            assert isinstance(error, PlanConflict)
            assert "'b' (ranks [0, 1])" in str(error) and "ranks [1] do not hold this key" in str(error)


@SCENARIOS.add
def ours_saves_optimizer_states_that_exist_only_where_a_part_does(_: Path) -> None:
    """As an offloaded optimizer has it: a state for each parameter of which this rank's part is not empty."""
    rank = dist.get_rank()
    with chosen(timeout_seconds=60):
        assert _outcome(_at_once, _state(("eb", "b")[rank])) == ({"e": 0, "b": 0}, {"b": 4})[rank]


@SCENARIOS.add
def collectives_of_stock_grow_with_the_tensors_and_ours_do_not(_: Path) -> None:
    """What ``make_fsdp_dtensor`` does with each half of each SwiGLU weight, and what follows for all of them."""

    def split() -> dict[str, int]:
        mesh, rank = _mesh(), dist.get_rank()
        state = {f"layer.{n}": uneven(mesh, [Shard(0)], (2 + n, 3), ((2, n)[rank], 3)) for n in range(_TENSORS)}
        with counted_collectives() as called:
            for value in state.values():
                uneven_dtensor.validate_uneven_dtensor(value)
                uneven_dtensor.update_uneven_dtensor_chunk_metadata(value)
            _at_once(state)
        assert state["layer.4"].__create_chunk_list__()[0].offsets == (2 * rank, 0)
        return dict(called)

    called = split()
    assert (called["all_gather_object"], called["all_reduce"]) == (3 * _TENSORS, _TENSORS)
    with chosen(timeout_seconds=60):
        stats = link_for(dist.group.WORLD).stats
        before = stats.exchanges
        assert (split(), stats.exchanges - before) == ({}, 3)  # who holds what, and where it begins


test_on_two_ranks = SCENARIOS.test()
