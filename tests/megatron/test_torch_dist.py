"""``dist_checkpointing.save`` and ``load`` of Megatron with robust_dcp as the planner: as stock, but checked, and told
to all ranks."""

from __future__ import annotations

import argparse
import inspect
import os
import pickle
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import load as load_bound_early
from megatron.core.dist_checkpointing import save as save_bound_early
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

from benchmarks.collectives import counted_collectives
from robust_dcp import CorruptCheckpoint, PlanConflict, RobustCheckpointError, StorageError, UnsafeCheckpoint
from robust_dcp.megatron import RobustLoadStrategy, RobustSaveStrategy, common_state, versions
from tests.cli.commands import shell
from tests.harness.verdicts import lines_of_the_log
from tests.megatron.torch_dist import (
    Scenarios,
    chosen,
    cut,
    failures_of,
    made,
    per_rank_object,
    plain,
    replicated,
    replicated_object,
    save,
    stock_strategy,
)
from tests.storage.forged import Call

SCENARIOS = Scenarios()


def _halves(key: str, data: torch.Tensor) -> ShardedTensorFactory:
    """A factory as Megatron's SwiGLU has them: one tensor, saved as two."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return {name: cut(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat([parts["a"], parts["b"]]))


def _state(step: int = 3) -> dict[str, Any]:
    """Step 0 is what to load into."""
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "cut": cut("cut", step * (torch.arange(6.0).reshape(2, 3) + 10 * rank)),
        "halves": _halves("halves", step * (torch.arange(4.0) + 10 * rank)),
        "many": [replicated(f"many.{n}", step * torch.full((n + 1,), n + 1.0)) for n in range(6)],
        "small": replicated("small", (step * torch.ones(3)).to(torch.bfloat16)),
        "flag": replicated("flag", torch.tensor(step > 0)),
        "rng": per_rank_object("rng", {"seed": step + rank} if step else None),
        "shared": replicated_object("shared", [step] if step else None),
        "here": LocalNonpersistentObject(f"rank {rank}"),
    }
    return state | {"iteration": step, "args": argparse.Namespace(lr=0.5, name="gpt")} if step else state


def _template() -> dict[str, Any]:
    return _state(0)


def _one(value: float = 0.0) -> dict[str, Any]:
    return {"weight": cut("weight", torch.full((2,), value))}


def _load(directory: Path, template: Callable[[], dict[str, Any]] = _template, *args: Any, **options: Any) -> Any:
    return plain(dist_checkpointing.load(template(), str(directory), *args, **options))


def _parallel(**options: Any) -> FullyParallelLoadStrategyWrapper:
    return FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD, **options)


def _load_bound_early(directory: Path) -> Any:
    without_data = _template()
    for shard in without_data["many"]:
        shard.data = None
    return plain(load_bound_early(without_data, str(directory), _parallel()))


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "save": save,
    "bound early": lambda state, path: save_bound_early(state, str(made(path)), stock_strategy()),
    "parallel": lambda state, path: save(
        state, path, FullyParallelSaveStrategyWrapper(stock_strategy(), dist.group.WORLD)
    ),
    "strategy": lambda state, path: stock_strategy().save({"flag": state["flag"]}, made(path)),
}
LOADS: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "broadcast": lambda path: _load(path, _template, _parallel(exchange_algo="broadcast")),
    "gather_rounds": lambda path: _load(path, _template, _parallel(exchange_algo="gather_rounds")),
    "bound early": _load_bound_early,
}


@SCENARIOS.add
def each_loads_what_the_other_saved_by_every_way_and_without_object_collectives(directory: Path) -> None:
    """The switch at 0 leaves the same calls to stock."""
    torch.serialization.add_safe_globals([argparse.Namespace])
    save(_state(), directory / "stock", stock_strategy())
    expected = _load(directory / "stock")
    save(_state(), directory / "ours 1", RobustSaveStrategy())
    assert _load(directory / "stock", _template, RobustLoadStrategy()) == expected
    for switch in "10":
        with chosen(switch=switch):
            for name, save_by in SAVES.items():
                with counted_collectives() as calls:
                    save_by(_state(), directory / f"{name} {switch}")
                assert set(calls) <= {"barrier"} or switch == "0"
            dist.barrier()
            for name, load_by in LOADS.items():
                for saved in ("stock", "parallel 1") if switch == "1" else ("parallel 1",):
                    if switch == "0" and name == "gather_rounds":
                        continue  # gloo gathers no tensors of different sizes
                    with counted_collectives() as calls:
                        assert load_by(directory / saved) == expected
                    assert switch == "0" or calls["all_gather_object"] + calls["gather_object"] == 0
            for strategy in (TorchDistLoadShardedStrategy(), _parallel()):  # for callers that call them themselves
                assert strategy.load({"flag": _template()["flag"]}, directory / "strategy 1")["flag"].item() is True
    assert [_load(directory / f"{name} 1") for name in ("save", "bound early", "parallel", "ours")] == [expected] * 4
    assert {path.name for path in directory.iterdir() if (path / ".robust_dcp.index").exists()} == {
        path.name for path in directory.iterdir() if "1" in path.name
    }


@SCENARIOS.add
def a_strategy_that_saves_or_loads_in_its_own_way_is_left_to_do_so(directory: Path) -> None:
    asked: list[list[str]] = []

    class OwnSave(TorchDistSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(sorted(sharded_state_dict))
            return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])

    class OwnLoad(TorchDistLoadShardedStrategy):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            asked.append(sorted(sharded_state_dict))
            return {"weight": torch.full((2,), 7.0)}

    with chosen():
        save(_one(1.0), directory / "1", OwnSave("torch_dist", 1))
        save({**_one(1.0), "iteration": 3}, directory / "2")
        loaded = dist_checkpointing.load(_one(), str(directory / "2"), OwnLoad())
    assert ["weight"] in asked and asked[-1] == ["weight"]
    assert (len(asked), loaded["weight"].tolist(), loaded["iteration"]) == (2, [7.0, 7.0], 3)


# --- saving -----------------------------------------------------------------------------------------------------------


@SCENARIOS.add
def a_chunk_held_twice_by_a_rank_and_a_replica_without_data_are_no_conflict(directory: Path) -> None:
    state = {
        "embedding": replicated("tied", torch.ones(4)),
        "output": replicated("tied", torch.ones(4), replica_id=2),  # as with tied weights
        "gathered": replicated("gathered", torch.full((4,), 7.0)),
    }
    if dist.get_rank() == 1:
        state["gathered"].data = None
    save(state, directory / "1", RobustSaveStrategy(), validate_access_integrity=False)
    for strategy in (None, RobustLoadStrategy()):
        template = {name: replicated(each.key, torch.zeros(4), each.replica_id) for name, each in state.items()}
        loaded = dist_checkpointing.load(template, str(directory / "1"), strategy)
        assert [loaded[name].tolist() for name in state] == [[1.0] * 4, [1.0] * 4, [7.0] * 4]


@SCENARIOS.add
def what_a_rank_cannot_save_is_one_error_on_all_and_nothing_is_left(directory: Path) -> None:
    rank, failing_factory, without_data = dist.get_rank(), _state(1), _one()
    if rank == 1:
        failing_factory["halves"].build_fn = lambda *args: 1 / 0
        without_data["weight"].data = None
    with chosen():
        assert failures_of(lambda: save(failing_factory, directory / "1"))[1] == [(1, "division by zero")]
        ((failed, message),) = failures_of(lambda: save(without_data, directory / "2"))[1]
        assert failed == 1 and "`data` attr is None" in message
        ((failed, message),) = failures_of(lambda: save({**_one(), "hook": lambda: None}, directory / "3"))[1]
        assert failed == 0 and "lambda" in message
    assert not [path for name in "123" for path in (directory / name).iterdir()]


@SCENARIOS.add
def a_failure_to_write_metadata_json_is_an_error_on_all_ranks_and_megatron_finds_no_checkpoint(directory: Path) -> None:
    with chosen():
        made(directory / "1" / "metadata.json" / "x")
        error, failures = failures_of(lambda: dist_checkpointing.save(_state(1), str(directory / "1")))
        dist.barrier()
        assert isinstance(error, StorageError) and [rank for rank, _ in failures] == [0]
        failures_of(lambda: _load(directory / "1"))


@SCENARIOS.add
def a_structure_that_is_claimed_to_be_constant_is_validated_once_it_is_not(directory: Path) -> None:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    with chosen():
        save(_one(), directory / "1", strategy)
        grown = {**_one(), "rng": replicated_object("rng", 1)}
        grown["rng"].replica_id = 7
        error, _ = failures_of(lambda: save(grown, directory / "2", strategy, validate_access_integrity=False))
    assert isinstance(error, PlanConflict) and error.key == "rng/shard_0_1"


@SCENARIOS.add
def every_wrong_access_is_refused_on_all_ranks_and_says_what_is_wrong(directory: Path) -> None:
    rank = dist.get_rank()
    cases: dict[str, dict[str, Any]] = {
        "2 of 4 elements": {"w": cut("w", torch.ones(2), replica_id=rank)},
        "2 parts of an object that has 3": {"rng": ShardedObject("rng", 1, (3,), (rank,))},
        "its key is that of a tensor too": {
            "x": replicated("x", torch.ones(1), replica_id=0) if rank else ShardedObject("x", 1, (1,), (0,))
        },
        "of different dtypes": {"w": replicated("w", torch.ones(2, dtype=(torch.float32, torch.float16)[rank]))},
        "of different global sizes": {"w": replicated("w", torch.ones(2 + rank))},
        "two tensors that claim": {each: replicated("w", torch.ones(2), replica_id=rank) for each in ("one", "other")},
    }
    with chosen():
        for problem, state in cases.items():
            error, failures = failures_of(lambda state=state: save(state, directory / "1"))
            assert isinstance(error, CheckpointingException) and isinstance(error, PlanConflict)
            assert error.key.startswith(next(iter(state.values())).key) and failures == [], (
                problem,
                error.key,
                failures,
            )
            assert str(error).startswith("Invalid access pattern: ") and problem in str(error)
    assert not list((directory / "1").iterdir())


@SCENARIOS.add
def a_common_state_that_differs_is_logged_by_the_rank_that_differs(directory: Path) -> None:
    def state() -> dict[str, Any]:
        return {**_one(), "lr": {"now": 0.1 * dist.get_rank()}, "same": [1, 2]}

    messages = lines_of_the_log("robust_dcp.megatron.common_state")
    with chosen():
        save(state(), directory / "1", preprocess_common_before_consistancy_check=lambda common: {})
        assert messages == []
        save(state(), directory / "2")
    assert len(messages) == dist.get_rank()
    line = (
        "Rank 1 common state dict differs from rank 0 common state dict. Keys only on rank 0: [], Keys only on 1: [], "
    )
    assert all(message.startswith(f"{line}Mismatched keys: ['lr.now']") for message in messages)


@SCENARIOS.add
def main_replicas_that_two_ranks_claim_are_named_with_what_differs(directory: Path) -> None:
    rank = dist.get_rank()

    def state() -> dict[str, Any]:
        return {
            "differs": replicated("differs", torch.full((3,), float(rank)), replica_id=0),
            "equal": replicated("equal", torch.ones(3), replica_id=0),
            "object": ShardedObject("object", {"rank": rank}, (1,), (0,), replica_id=0),
            "unclaimed": replicated("unclaimed", torch.ones(3), replica_id=1),
            "right": replicated("right", torch.ones(3)),
        }

    messages = lines_of_the_log("robust_dcp.plan")
    with chosen():
        for step in ("1", "2"):
            save(state(), directory / step, validate_access_integrity=False)
        error, _ = failures_of(lambda: save(state(), directory / "3"))
    assert type(error).__name__ == "InvalidAccess"
    template = {"differs": replicated("differs", torch.zeros(3)), "unclaimed": replicated("unclaimed", torch.zeros(3))}
    loaded = dist_checkpointing.load(template, str(directory / "2"), validate_access_integrity=False)
    assert (loaded["differs"].tolist(), loaded["unclaimed"].tolist()) == ([0.0] * 3, [1.0] * 3)
    told = [message for message in messages if "main replica" in message]
    assert len(told) == (0 if rank else 2)  # once, though both saves are of such a state dict
    if rank == 0:
        assert "'unclaimed'" in told[0] and "right" not in "".join(told)
        for words in ("'differs' (rank 0 / rank 1)", "'equal' (ranks 0-1)", "'object/shard_0_1' (rank 0 / rank 1)"):
            assert words in told[1]


@SCENARIOS.add
def with_warn_a_job_goes_on_after_a_save_that_failed_and_ranks_hear_of_one_that_failed_before_it(
    directory: Path,
) -> None:
    """A module in the place of Megatron-LM's, whose ``save_checkpoint`` goes as that does: state, save, tracker."""
    rank, tracker = dist.get_rank(), directory / "latest_checkpointed_iteration.txt"
    for iteration in range(1, 6):
        made(directory / str(iteration))
    training = types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(iteration: int) -> str:
        state = _state(iteration)
        if iteration == 2:
            state = {"weight": cut("weight", torch.ones(2), replica_id=rank)}
        if iteration == 3 and rank == 1:  # as ``model.sharded_state_dict()`` may
            raise ValueError("no state dict of the optimizer")
        dist_checkpointing.save(state, str(directory / str(iteration)))
        if iteration == 5 and rank == 1:
            raise ValueError("after the save")
        if rank == 0:
            tracker.write_text(str(iteration))
        return "saved"

    save_checkpoint.__module__ = training.__name__
    training.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, training.__name__, training)
        messages = lines_of_the_log("robust_dcp.megatron.failures")
        with chosen(save_failure="warn"):
            assert [training.save_checkpoint(n) for n in (1, 2, 3)] == ["saved", None, None]
            dist.barrier()
            assert tracker.read_text() == "1"
            assert training.save_checkpoint(4) == "saved"
        with chosen():
            assert failures_of(lambda: training.save_checkpoint(3))[1] == [(1, "no state dict of the optimizer")]
            if rank == 1:
                with pytest.raises(ValueError, match="after the save"):
                    training.save_checkpoint(5)
            else:
                training.save_checkpoint(5)
    told = [message for message in messages if "training goes on" in message]
    assert any("no state dict of the optimizer" in message for message in told)
    assert sum("Invalid access pattern" in message for message in told) == (rank == 0)


@SCENARIOS.add
def a_separation_hint_keeps_tensors_in_files_of_their_own_that_megatron_can_remove(directory: Path) -> None:
    def state(value: float = 0.0) -> dict[str, Any]:
        rank = dist.get_rank()
        return {
            **{n: cut(f"optimizer.{n}", torch.full((300, 3), value + rank)) for n in "abcdef"},
            "weight": cut("weight", torch.full((2, 2), value + rank)),
            "step": replicated_object("optimizer.step", value),
            "rng": per_rank_object("rng", rank),
        }

    def names(path: Path) -> set[str]:
        return {re.sub(r"\.\w{16}\.", ".", file.name) for file in path.glob("*.distcp")}

    for hint in ("optimizer", "nothing"):
        strategy, path = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint=hint), directory / hint
        with chosen(writer_threads="2"):
            for value in (1.0, 2.0):  # the second over the first, of which nothing is left
                save(state(value), path, strategy)
        apart = {f"optimizer__{rank}_{number}.distcp" for rank in (0, 1) for number in (2, 3)}
        rest = {f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1)}
        every = {f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1, 2)}
        assert names(path) == (apart | rest if hint == "optimizer" else every), names(path)
        expected = plain(dist_checkpointing.load(state(), str(path)))
        assert expected["a"][1][0] == [2.0 + dist.get_rank()] * 3 and expected["step"] == 2.0
        with chosen():
            assert plain(dist_checkpointing.load(state(), str(path))) == expected
        dist.barrier()
    with pytest.raises(ValueError, match="cannot begin the name of a file"), chosen():
        save(state(), directory / "3", TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="a/b"))
    if not versions.common_state_is_a_sharded_object():
        return  # up to 0.18 stock's function asks this torch for an attribute that it has not
    with chosen():
        if dist.get_rank() == 0:
            dist_checkpointing.serialization.remove_sharded_tensors(directory / "optimizer", "optimizer")
        dist.barrier()
        assert names(directory / "optimizer") == rest
        left = {key: value for key, value in state().items() if key in ("weight", "rng")}
        loaded = plain(dist_checkpointing.load(left, str(directory / "optimizer")))
        assert all(loaded[key] == expected[key] for key in left)
        failures_of(lambda: dist_checkpointing.load(state(), str(directory / "optimizer")))


@SCENARIOS.add
def a_rank_that_fails_while_others_are_in_a_collective_of_megatron_or_save_nothing_raises_its_own_error_soon(
    directory: Path,
) -> None:
    """Stock raises it at once, and the launcher ends the job."""
    rank, training = dist.get_rank(), types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(is_frozen: bool) -> None:
        if rank == 1:
            raise LookupError("the data loader has no state")
        if not is_frozen:
            dist.barrier()  # maybe_save_dataloader_state

    save_checkpoint.__module__ = training.__name__
    training.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    messages = lines_of_the_log("robust_dcp.megatron.failures")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, training.__name__, training)
        for is_frozen in (False, True):
            for save_failure in ("raise", "warn"):
                with chosen(timeout_seconds=0.5, save_failure=save_failure):
                    if rank == 1:
                        with pytest.raises(LookupError, match="no state"):
                            training.save_checkpoint(is_frozen)
                        if not is_frozen:
                            dist.barrier()  # a process that ends would end this, too
                    else:
                        training.save_checkpoint(is_frozen)
                dist.barrier()
    assert sum("were waited for for up to 0.5 seconds" in message for message in messages) == 4 * rank
    with chosen():
        save(_one(2.0), directory / "1")
        assert _load(directory / "1", _one)["weight"][1] == [2.0, 2.0]


def test_a_multi_storage_client_path_is_refused() -> None:
    with pytest.raises(ValueError, match="msc://profile/checkpoint"):
        RobustSaveStrategy().save({}, "msc://profile/checkpoint")


# --- loading ----------------------------------------------------------------------------------------------------------


@SCENARIOS.add
def every_mode_of_strictness_does_what_it_says_and_refuses_on_all_ranks(directory: Path) -> None:
    save({**_state(), "more": replicated("more", torch.ones(2))}, directory / "1", stock_strategy())

    def asked() -> dict[str, Any]:
        template = _template()
        del template["small"]
        if dist.get_rank() == 1:
            template["unknown"] = replicated("unknown", torch.zeros(2), replica_id=0)
        return template

    results: dict[str, Any] = {}
    with chosen():
        for strict in StrictHandling:
            try:
                results[strict.value] = _load(directory / "1", asked, strict=strict)
            except (CheckpointingException, RobustCheckpointError) as error:  # noqa: PERF203
                results[strict.value] = str(error)
    for refused in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        assert isinstance(results[refused], str), refused
    assert "more" in results["raise_all"] and "unknown" in results["raise_all"]
    for passing in ("log_unexpected", "log_all", "ignore_all"):
        assert results[passing]["cut"] == results["ignore_all"]["cut"]
        assert "unknown" not in results[passing]
    unexpected = {"unknown"} if dist.get_rank() == 1 else set()
    assert results["return_unexpected"][1:] == (set(), unexpected)
    assert results["return_all"][1:] == ({"more", "small"}, unexpected)


@SCENARIOS.add
def no_rank_decodes_the_metadata_of_a_checkpoint_with_an_index_and_all_comes_out_the_same(directory: Path) -> None:
    state = {**_state(), "wide": [replicated(f"wide.{n}", torch.ones(2)) for n in range(100)]}
    if not versions.common_state_is_a_sharded_object():  # as Megatron saves it from 0.19 on
        state["common"] = replicated_object(versions.COMMON_STATE_KEY, {"iteration": 7})

    def outcomes(path: Path) -> list[Any]:
        error, _ = failures_of(lambda: _load(path, lambda: {**_template(), "no": replicated("no", torch.ones(2))}))
        names = sorted(load_sharded_metadata(str(path)))
        return [_load(path), _load(path, _template, _parallel()), names, type(error).__name__]

    with chosen():
        save(state, directory / "indexed")
        if dist.get_rank() == 0:
            shutil.copytree(directory / "indexed", directory / "plain")
            (directory / "plain" / ".robust_dcp.index").unlink()
            # Only somebody who decodes it would read what is overwritten: an index is fitted by the last 4 KiB.
            data = (directory / "indexed" / ".metadata").read_bytes()
            assert len(data) > 3 * 4096
            (directory / "indexed" / ".metadata").write_bytes(bytes(4096) + data[4096:])
        dist.barrier()
        assert outcomes(directory / "indexed") == outcomes(directory / "plain")
        dist.barrier()
        if dist.get_rank() == 0:
            (directory / "indexed" / common_state.COMMON_FILE).unlink(missing_ok=True)
        dist.barrier()
        assert dist_checkpointing.load_common_state_dict(str(directory / "indexed"))["iteration"] in (3, 7)


@SCENARIOS.add
def a_tensor_of_another_shape_is_padded_if_that_is_allowed_and_refused_if_not(directory: Path) -> None:
    save({"table": replicated("table", torch.ones(3, 2))}, directory / "1", stock_strategy())

    def template(**options: Any) -> dict[str, Any]:
        return {"table": replicated("table", torch.full((5, 2), 9.0), **options)}

    with chosen():
        ours = _load(directory / "1", lambda: template(allow_shape_mismatch=True))
        error, failures = failures_of(lambda: _load(directory / "1", template))
    assert ours == _load(directory / "1", lambda: template(allow_shape_mismatch=True))
    assert isinstance(error, CheckpointingException) and {rank for rank, _ in failures} == {0, 1}
    assert "Global shape mismatch" in failures[0][1]


@SCENARIOS.add
def a_rank_loads_by_itself_where_megatron_does_and_hears_of_its_own_failures_only(directory: Path) -> None:
    """From 0.18 on, if nothing is validated. The other rank is elsewhere all the time."""
    if versions.load_is_collective():
        return
    save({**_one(3.0), "iteration": 7}, directory / "1", stock_strategy())
    path, group = str(directory / "1"), dist.new_group([0])

    def whole(key: str = "weight") -> dict[str, Any]:
        return {"weight": replicated(key, torch.zeros(4), replica_id=0)}

    with chosen(timeout_seconds=2):
        if dist.get_rank() == 0:
            for strategy in (None, RobustLoadStrategy(), FullyParallelLoadStrategyWrapper(RobustLoadStrategy(), group)):
                for strict in ("assume_ok_unexpected", "log_unexpected", "raise_unexpected"):
                    loaded = dist_checkpointing.load(
                        whole(), path, strategy, validate_access_integrity=False, strict=strict
                    )
                    assert (loaded["weight"].tolist(), loaded["iteration"]) == ([3.0] * 4, 7)
            assert dist_checkpointing.load_plain_tensors(path)["weight"].tolist() == [3.0] * 4
            assert RobustLoadStrategy().load(whole(), path)["weight"].tolist() == [3.0] * 4
            failures_of(lambda: dist_checkpointing.load(whole("unknown"), path, validate_access_integrity=False))


@SCENARIOS.add
def what_is_told_of_a_checkpoint_is_what_stock_tells(directory: Path) -> None:
    state = {key: value for key, value in _state().items() if key != "args"}
    save(state, directory / "1", stock_strategy(), content_metadata={"a": 1, "dp_cp_group": object()})
    path = str(directory / "1")

    def look() -> list[Any]:
        tensors = dist_checkpointing.load_tensors_metadata(path)
        return [
            {key: (tensor.dtype, tensor.global_shape) for key, tensor in tensors.items()},
            {key: type(value).__name__ for key, value in load_sharded_metadata(path).items()},
            dist_checkpointing.load_common_state_dict(path),
            dist_checkpointing.load_content_metadata(path),
            plain(dist_checkpointing.load_plain_tensors(path)),
        ]

    with chosen():
        ours = look()
    assert ours == look() and ours[3] == {"a": 1}


@SCENARIOS.add
def code_in_the_common_state_or_in_metadata_is_refused_on_all_ranks_and_not_run(directory: Path) -> None:
    """In ``.metadata`` also by a strategy that is passed without install."""
    save(_one(1.0), directory / "1", stock_strategy())
    evil = Call(os.mkdir, str(directory / "ran"))
    if dist.get_rank() == 0:
        torch.save({"x": evil}, directory / "1" / "common.pt")
        (directory / ".metadata").write_bytes(pickle.dumps(evil))
    dist.barrier()
    with chosen():
        error, _ = failures_of(lambda: _load(directory / "1", _one))
    assert isinstance(error, UnsafeCheckpoint)
    for look in (RobustLoadStrategy().load_tensors_metadata, RobustLoadStrategy().load_sharded_metadata):
        with pytest.raises(UnsafeCheckpoint):
            look(str(directory))
    assert not (directory / "ran").exists()


@SCENARIOS.add
def a_shard_that_two_ranks_claim_is_refused_unless_that_is_not_to_be_validated(directory: Path) -> None:
    save(_one(1.0), directory / "1", stock_strategy())

    def overlapping() -> dict[str, Any]:
        shard = replicated("weight", torch.zeros(2), replica_id=0)
        shard.global_shape, shard.axis_fragmentations = (4,), (2,)
        return {"weight": shard}

    with chosen():
        error, _ = failures_of(lambda: _load(directory / "1", overlapping))
        assert _load(directory / "1", overlapping, validate_access_integrity=False)["weight"][1] == [1.0, 1.0]
        assert isinstance(error, CheckpointingException)
        assert "'weight'" in str(error) and "ranks 0-1" in str(error)
        group = dist.new_group([1])  # its rank is named as the job knows it
        if "process_group" in inspect.signature(load_bound_early).parameters and dist.get_rank() == 1:  # from 0.20 on
            without_main = {"weight": replicated("weight", torch.zeros(4), replica_id=1)}
            error, _ = failures_of(
                lambda: dist_checkpointing.load(without_main, str(directory / "1"), process_group=group)
            )
            assert isinstance(error, PlanConflict) and list(error.ranks) == [1]
            assert "on rank 1 has no main" in str(error), str(error)


@SCENARIOS.add
def a_checkpoint_that_lacks_a_file_is_megatrons_exception_on_all_ranks(directory: Path) -> None:
    save(_one(1.0), directory / "1", stock_strategy())
    with chosen():
        for missing, told in (
            (None, "does not exist"),
            ("common.pt", "common.pt does not exist"),
            ("metadata.json", "is not a distributed checkpoint"),
        ):
            path = directory / ("none" if missing is None else "1")
            if missing is not None and dist.get_rank() == 0:
                (path / missing).unlink(missing_ok=True)
            dist.barrier()
            if missing == "common.pt" and versions.common_state_is_a_sharded_object():
                continue
            error, failures = failures_of(lambda path=path: _load(path, _one))
            assert isinstance(error, CheckpointingException) and [rank for rank, _ in failures] == [0]
            assert told in str(error)


@SCENARIOS.add
def the_common_state_of_another_save_is_an_error_that_names_its_file(directory: Path) -> None:
    path = directory / "1" / "common.pt"
    with chosen():
        for iteration in (1, 2):
            save({**_one(1.0 * iteration), "iteration": iteration}, directory / str(iteration))
        if versions.common_state_is_a_sharded_object():
            return
        if dist.get_rank() == 0:
            path.write_bytes((directory / "2" / "common.pt").read_bytes())
        dist.barrier()
        for look in (lambda path: _load(path, _one), dist_checkpointing.load_common_state_dict):
            error, _ = failures_of(lambda look=look: look(path.parent))
            assert isinstance(error, CorruptCheckpoint) and error.file == str(path)
        verified = shell("verify", path.parent)
        assert verified.code and "common.pt" in verified.out + verified.err
        # From 0.19 on it lies with the shards. A job that is killed right after its commit leaves this file.
        with mock.patch.object(versions, "common_state_is_a_sharded_object", return_value=True):
            save({**_one(3.0), "iteration": 3}, path.parent)
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes((directory / "2" / "common.pt").read_bytes())
            dist.barrier()
            assert dist_checkpointing.load_common_state_dict(str(path.parent))["iteration"] == 3


@SCENARIOS.add
def a_checkpoint_of_another_format_is_left_to_megatron_and_that_is_said(directory: Path) -> None:
    save(_one(1.0), directory / "1", stock_strategy())
    if dist.get_rank() == 0:
        path = directory / "1" / "metadata.json"
        path.write_text(path.read_text().replace('"torch_dist"', '"of_tomorrow"'))
    dist.barrier()

    def outcome() -> Any:
        try:
            return _load(directory / "1", _one)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    by_stock = outcome()
    messages = lines_of_the_log("robust_dcp.switch.patching")
    with chosen():
        assert outcome() == by_stock
    assert len(messages) == 1 and "loads of of_tomorrow checkpoints (only torch_dist is taken over)" in messages[0]


@SCENARIOS.add
def a_save_that_is_committed_after_the_common_state_was_read_is_loaded_whole(directory: Path) -> None:
    """A rank builds its factories when the common state has been read, and no shard."""
    with chosen():
        for step in (1, 2, 3):
            save(_state(step), directory / str(step))

    def template(*commits_in_between: int) -> dict[str, Any]:
        halves, numbers = _halves("halves", torch.zeros(4)), iter(commits_in_between)

        def build(*args: Any) -> Any:
            number = next(numbers, None)
            if dist.get_rank() == 0 and number is not None:
                shutil.rmtree(directory / "latest")
                shutil.copytree(directory / str(number), directory / "latest")
            return halves.build_fn(*args)

        return _template() | {"halves": ShardedTensorFactory("halves", halves.data, build, halves.merge_fn)}

    if dist.get_rank() == 0:
        shutil.copytree(directory / "1", directory / "latest")
    dist.barrier()
    with chosen():
        loaded = _load(directory / "latest", lambda: template(2))
        assert loaded == _load(directory / "2") and loaded["iteration"] == 2
        with pytest.raises(StorageError, match="latest was overwritten while it was loaded: load it again once"):
            _load(directory / "latest", lambda: template(3, 1))
        assert _load(directory / "latest")["iteration"] == 1


test_on_two_ranks = SCENARIOS.test()
