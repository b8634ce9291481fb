"""Megatron-LM #4910: saving optimizer state of Megatron-FSDP hangs in ``validate_uneven_dtensor`` until a watchdog.

Stock asks the ranks of each mesh dimension of each DTensor in turn, in the order of the state dict. A rank whose order
or keys are others answers for another tensor, or never.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("megatron.core")

from benchmarks.collectives import counted_collectives
from robust_dcp import PlanConflict
from robust_dcp.comm import Channel
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen
from tests.megatron.uneven_cases import uneven

_STOCK_WAITS_SECONDS = 3.0
"""Thirty minutes in the report."""

N_TENSORS = 5


def _meshes(count: int) -> list[DeviceMesh]:
    """Both ranks, each time in a group of its own: stock leaves it broken."""
    timeout = datetime.timedelta(seconds=_STOCK_WAITS_SECONDS)
    found = []
    for _ in range(count):
        dist.barrier()
        found.append(DeviceMesh.from_group(dist.new_group([0, 1], timeout=timeout), "cpu"))
    return found


def _rows(mesh: DeviceMesh, on_rank_0: int, on_rank_1: int) -> DTensor:
    held = (on_rank_0, on_rank_1)
    return uneven(mesh, [Shard(0)], (sum(held), 3), (held[dist.get_rank()], 3))


def _other_order(mesh: DeviceMesh) -> dict[str, Any]:
    """Rank 1 has its keys in another order, as an optimizer has that met its parameters in another order."""
    state = {"a": _rows(mesh, 2, 3), "b": _rows(mesh, 4, 5)}
    return dict(reversed(state.items())) if dist.get_rank() else state


def _missing_key(mesh: DeviceMesh) -> dict[str, Any]:
    state = {"a": _rows(mesh, 2, 3), "b": _rows(mesh, 4, 5), "c": _rows(mesh, 1, 6)}
    if dist.get_rank():
        del state["b"]
    return state


def _missing_last_key(mesh: DeviceMesh) -> dict[str, Any]:
    state = {"a": _rows(mesh, 2, 3), "b": _rows(mesh, 4, 5)}
    if dist.get_rank():
        del state["b"]
    return state


def _state_of_what_is_held(mesh: DeviceMesh) -> dict[str, Any]:
    """As an offloaded optimizer has it: a state for each parameter of which this rank's part is not empty."""
    state = {"a": _rows(mesh, 5, 0), "b": _rows(mesh, 4, 5)}
    if dist.get_rank():
        del state["a"]
    return state


_CASES: tuple[Callable[[DeviceMesh], dict[str, Any]], ...] = (
    _other_order,
    _missing_key,
    _missing_last_key,
    _state_of_what_is_held,
)


def _outcome(preprocess: Callable[[dict[str, Any]], Any], state: dict[str, Any]) -> dict[str, Any]:
    """Rows at which each part begins, or the error."""
    dist.barrier()
    try:
        preprocess(state)
    except Exception as error:
        return {"error": str(error), "is a PlanConflict": isinstance(error, PlanConflict)}
    return {key: value.__create_chunk_list__()[0].offsets[0] for key, value in state.items()}


def _as_the_splits_do(module: Any, mesh: DeviceMesh) -> None:
    """What ``make_fsdp_dtensor`` does with each half of each SwiGLU weight, and what follows for all of them."""
    state = {}
    for nth in range(N_TENSORS):
        value = _rows(mesh, 2, nth)
        module.validate_uneven_dtensor(value)
        module.update_uneven_dtensor_chunk_metadata(value)
        state[f"layer.{nth}"] = value
    module.preprocess_state_dict_for_uneven_dtensor(state)
    assert state["layer.4"].__create_chunk_list__()[0].offsets == (2 * dist.get_rank(), 0)


def _one_by_one(module: Any, state: dict[str, Any]) -> None:
    """In the order of this rank's keys."""
    for value in state.values():
        module.update_uneven_dtensor_chunk_metadata(value)
    for value in state.values():
        value.__create_chunk_list__()


def _stock_and_ours() -> dict[str, Any]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    meshes = _meshes(2 * len(_CASES) + 3)
    with counted_collectives() as called:
        _as_the_splits_do(uneven_dtensor, meshes.pop())
    found["stock's collectives"] = dict(called)
    preprocess = uneven_dtensor.preprocess_state_dict_for_uneven_dtensor
    # As the splits do: preprocess_state_dict_for_uneven_dtensor sorts the keys in newer versions.
    found["stock, one by one"] = _outcome(lambda state: _one_by_one(uneven_dtensor, state), _other_order(meshes.pop()))
    for case in _CASES[1:]:
        found[f"stock{case.__name__}"] = _outcome(preprocess, case(meshes.pop()))
    with chosen(timeout_seconds=60):
        preprocess = uneven_dtensor.preprocess_state_dict_for_uneven_dtensor
        found["ours, one by one"] = _outcome(
            lambda state: _one_by_one(uneven_dtensor, state), _other_order(meshes.pop())
        )
        for case in _CASES:
            found[f"ours{case.__name__}"] = _outcome(preprocess, case(meshes.pop()))
        stats = Channel.for_group().stats
        before = stats.exchanges
        with counted_collectives() as called:
            _as_the_splits_do(uneven_dtensor, meshes.pop())
        found["our collectives"] = (dict(called), stats.exchanges - before)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return values(run_ranks(2, _stock_and_ours, timeout_seconds=150))


def test_stock_gives_silently_wrong_offsets_where_ranks_differ_in_order(found: list[dict[str, Any]]) -> None:
    # Rank 1's part of "b" begins at row 4; stock puts it where rank 0's part of "a" ends.
    assert [rank["stock, one by one"] for rank in found] == [{"a": 0, "b": 0}, {"b": 2, "a": 4}]


def test_ours_finds_offsets_whatever_the_order(found: list[dict[str, Any]]) -> None:
    assert [rank["ours_other_order"] for rank in found] == [{"a": 0, "b": 0}, {"b": 4, "a": 2}]


def test_stock_waits_for_a_rank_without_the_key_until_its_group_ends_and_names_nobody(
    found: list[dict[str, Any]],
) -> None:
    for case in ("missing_key", "missing_last_key", "state_of_what_is_held"):
        stuck = found[0][f"stock_{case}"]
        assert not stuck["is a PlanConflict"]
        assert "imed out" in stuck["error"] or "losed" in stuck["error"], stuck
        assert "rank 1" not in stuck["error"].lower()
        assert "error" not in found[1][f"stock_{case}"]  # goes on, and waits in the next collective
    assert found[1]["stock_missing_key"] == {"a": 2, "c": 4}  # "c" where rank 0's part of "b" ends


def test_ours_refuses_to_pair_other_tensors_where_they_are_asked_for_one_by_one(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "of shape [5, 3]" in rank["ours, one by one"]["error"]
        assert "of shape [9, 3]" in rank["ours, one by one"]["error"]


@pytest.mark.parametrize("case", ["missing_key", "missing_last_key"])
def test_ours_names_the_key_and_the_rank_that_lacks_it_on_all_ranks(found: list[dict[str, Any]], case: str) -> None:
    told = [rank[f"ours_{case}"] for rank in found]
    assert told[0] == told[1]
    assert told[0]["is a PlanConflict"]
    assert "'b' (ranks [0, 1])" in told[0]["error"]
    assert "ranks [1] do not hold this key" in told[0]["error"]


def test_ours_saves_optimizer_states_that_exist_only_where_a_part_does(found: list[dict[str, Any]]) -> None:
    assert [rank["ours_state_of_what_is_held"] for rank in found] == [{"a": 0, "b": 0}, {"b": 4}]


def test_collectives_do_not_grow_with_the_tensors(found: list[dict[str, Any]]) -> None:
    for rank in found:
        called = rank["stock's collectives"]
        assert (called["all_gather_object"], called["all_reduce"]) == (3 * N_TENSORS, N_TENSORS)
        assert rank["our collectives"] == ({}, 3)  # who holds what, and where it begins
