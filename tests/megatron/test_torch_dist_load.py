"""``dist_checkpointing.load`` of Megatron with robust_dcp as the planner: as stock, but checked and told to all."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling

from benchmarks.collectives import counted_collectives
from demo import megatron_cpu
from robust_dcp import RobustCheckpointError
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.megatron import RobustLoadStrategy, common_state, versions
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from tests.harness.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import (
    Scenarios,
    chosen,
    cut,
    failures_of,
    per_rank_object,
    replicated,
    replicated_object,
    save,
)

SCENARIOS = Scenarios()


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    return SCENARIOS.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("loads"), timeout_seconds=150))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _state(factor: float = 1.0) -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "cut": cut("cut", factor * (torch.arange(6.0).reshape(2, 3) + 10 * rank)),
        "many": [replicated(f"many.{n}", factor * torch.full((n + 1,), n + 1.0)) for n in range(6)],
        "small": replicated("small", (factor * torch.ones(3)).to(torch.bfloat16)),
        "flag": replicated("flag", torch.tensor(factor > 0)),
        "rng": per_rank_object("rng", {"seed": rank} if factor else None),
        "shared": replicated_object("shared", [1, 2] if factor else None),
        "iteration": 7,
    }


def _template() -> dict[str, Any]:
    return _state(0.0)


def _plain(value: Any) -> Any:
    """A loaded state dict as values that can be compared."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def _load(directory: Path, template: Callable[[], dict[str, Any]] = _template, *args: Any, **options: Any) -> Any:
    return _plain(dist_checkpointing.load(template(), str(directory), *args, **options))


@SCENARIOS.add
def _both_ways(directory: Path) -> dict[str, Any]:
    save(_state(), directory / "stock", stock_strategy())
    with chosen():
        save(_state(), directory / "ours")
        with counted_collectives() as calls:
            ours = {who: _load(directory / who) for who in ("stock", "ours")}
    with_strategy = _load(directory / "stock", _template, RobustLoadStrategy(timeout_seconds=30))
    return {
        "stock": _load(directory / "stock"),
        "loads": [*ours.values(), _load(directory / "ours"), with_strategy],
        "calls": dict(calls),
    }


def test_each_loads_what_the_other_saved_without_a_world_collective(found: dict[str, list[Any]]) -> None:
    for loaded in found["_both_ways"]:
        assert loaded["loads"] == [loaded["stock"]] * 4
        assert loaded["calls"] == {}


@SCENARIOS.add
def _fully_parallel(directory: Path) -> dict[str, Any]:
    save(_state(), directory / "1", stock_strategy())
    plain = _load(directory / "1")
    results = {}
    for algorithm in ("broadcast", "gather_rounds"):
        wrapper = FullyParallelLoadStrategyWrapper(
            TorchDistLoadShardedStrategy(), dist.group.WORLD, exchange_algo=algorithm
        )
        with chosen(), counted_collectives() as calls:
            results[algorithm] = _load(directory / "1", _template, wrapper)
        results[f"{algorithm} gathers objects"] = calls["all_gather_object"] + calls["gather_object"]
    bound = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD)
    with chosen():
        without_data = _template()
        for shard in without_data["many"]:
            shard.data = None
        results["without data"] = _plain(dist_checkpointing.load(without_data, str(directory / "1"), bound))
    return {"plain": plain, **results}


def test_a_fully_parallel_load_gives_what_a_plain_one_gives(found: dict[str, list[Any]]) -> None:
    for loaded in found["_fully_parallel"]:
        assert loaded["broadcast"] == loaded["plain"]
        assert loaded["gather_rounds"] == loaded["plain"]
        assert loaded["without data"] == loaded["plain"]
        assert loaded["broadcast gathers objects"] == loaded["gather_rounds gathers objects"] == 0


@SCENARIOS.add
def _strictness(directory: Path) -> dict[str, Any]:
    saved = _state()
    saved["more"] = replicated("more", torch.ones(2))
    save(saved, directory / "1", stock_strategy())

    def asked() -> dict[str, Any]:
        template = _template()
        del template["small"]
        if dist.get_rank() == 1:
            template["unknown"] = replicated("unknown", torch.zeros(2), replica_id=0)
        return template

    messages: dict[str, str] = {}

    def outcome(strict: StrictHandling) -> Any:
        try:
            return _load(directory / "1", asked, strict=strict)
        except (CheckpointingException, RobustCheckpointError) as error:
            messages[strict.value] = str(error)
            return "refused"

    with chosen():
        results = {strict.value: outcome(strict) for strict in StrictHandling}
    return {**results, "message": messages["raise_all"]}


def test_every_mode_of_strictness_does_what_it_says_and_refuses_on_all_ranks(found: dict[str, list[Any]]) -> None:
    for rank, results in enumerate(found["_strictness"]):
        for refused in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
            assert results[refused] == "refused"
        assert "more" in results["message"]
        assert "unknown" in results["message"]
        for passing in ("log_unexpected", "log_all", "ignore_all"):
            assert results[passing]["cut"] == results["ignore_all"]["cut"]
            assert "unknown" not in results[passing]
        unexpected = {"unknown"} if rank == 1 else set()
        assert results["return_unexpected"][1:] == [set(), unexpected]
        assert results["return_all"][1:] == [{"more", "small"}, unexpected]


def _with_garbage_for_metadata(directory: Path) -> None:
    """Overwrite what only somebody who decodes ``.metadata`` would read: an index is fitted by the last 4 KiB."""
    path = directory / METADATA_NAME
    data = path.read_bytes()
    assert len(data) > 3 * 4096
    path.write_bytes(bytes(4096) + data[4096:])


def _outcome(load: Callable[[], Any], directory: Path) -> Any:
    """What was loaded; or the class of the error, who failed, and the words of it in any order."""
    try:
        return _plain(load())
    except (CheckpointingException, RobustCheckpointError) as error:
        failures = [(each.rank, each.type_name) for each in getattr(error, "rank_failures", ())]
        return type(error).__name__, failures, sorted(re.findall(r"[\w.]+", str(error).replace(str(directory), "")))


def _all_outcomes(directory: Path) -> dict[str, Any]:
    def asked() -> dict[str, Any]:
        template = {**_template(), "wide": [replicated(f"wide.{n}", torch.zeros(2)) for n in range(100)]}
        del template["small"]
        if dist.get_rank() == 1:
            template["unknown"] = replicated("unknown", torch.zeros(2), replica_id=0)
            template["no object"] = ShardedObject("no_object", None, (1,), (0,))
        return template

    def of_another_shape() -> dict[str, Any]:
        return {**_template(), "small": replicated("small", torch.zeros(4 + dist.get_rank()))}

    def of_no_object() -> dict[str, Any]:
        return {**_template(), "more": replicated_object("none", None)}

    path = str(directory)
    wrapper = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD)
    ways: dict[str, Callable[[], Any]] = {
        "whole": lambda: _load(directory),
        "in parallel": lambda: _load(directory, _template, wrapper),
        "another shape": lambda: _load(directory, of_another_shape, validate_access_integrity=False),
        "no object": lambda: _load(directory, of_no_object),
        "tensors": lambda: sorted(dist_checkpointing.load_tensors_metadata(path)),
        "all": lambda: sorted(load_sharded_metadata(path)),
    }
    for strict in StrictHandling:
        ways[strict.value] = lambda strict=strict: _load(directory, asked, strict=strict)  # type: ignore[misc]
    return {name: _outcome(load, directory) for name, load in ways.items()}


@SCENARIOS.add
def _by_index(directory: Path) -> Any:
    wide = [replicated(f"wide.{n}", torch.ones(2)) for n in range(100)]
    with chosen():
        save({**_state(), "wide": wide}, directory / "indexed")
        if dist.get_rank() == 0:
            shutil.copytree(directory / "indexed", directory / "plain")
            (directory / "plain" / INDEX_NAME).unlink()
            _with_garbage_for_metadata(directory / "indexed")
        dist.barrier()
        return _all_outcomes(directory / "indexed"), _all_outcomes(directory / "plain")


def test_no_rank_decodes_the_metadata_of_a_checkpoint_with_an_index_and_all_comes_out_the_same(
    found: dict[str, list[Any]],
) -> None:
    for indexed, plain in found["_by_index"]:
        assert indexed == plain
        assert indexed["in parallel"] == indexed["whole"]
        assert isinstance(indexed["whole"], dict) and isinstance(indexed["log_all"], dict)
        refused = ("another shape", "no object", "raise_all", "raise_unexpected", "assume_ok_unexpected")
        assert not any(isinstance(indexed[name], dict) for name in refused)


@SCENARIOS.add
def _common_state_as_an_object(directory: Path) -> Any:
    """As Megatron saves it from 0.19 on."""
    state: dict[str, Any] = {"wide": [replicated(f"wide.{n}", torch.ones(2)) for n in range(100)], "iteration": 7}
    if not versions.common_state_is_a_sharded_object():
        state["common"] = replicated_object(versions.COMMON_STATE_KEY, {"iteration": 7})
    with chosen():
        save(state, directory / "1")
        if dist.get_rank() == 0:
            (directory / "1" / common_state.COMMON_FILE).unlink(missing_ok=True)
            _with_garbage_for_metadata(directory / "1")
        dist.barrier()
        return dist_checkpointing.load_common_state_dict(str(directory / "1"))["iteration"]


def test_a_common_state_that_is_an_object_is_found_in_the_index(found: dict[str, list[Any]]) -> None:
    assert found["_common_state_as_an_object"] == [7, 7]


@SCENARIOS.add
def _flexible_shape(directory: Path) -> Any:
    save({"table": replicated("table", torch.ones(3, 2))}, directory / "1", stock_strategy())

    def template() -> dict[str, Any]:
        return {"table": replicated("table", torch.full((5, 2), 9.0), allow_shape_mismatch=True)}

    def strict() -> dict[str, Any]:
        return {"table": replicated("table", torch.full((5, 2), 9.0))}

    with chosen():
        ours = _load(directory / "1", template)
        error, failures = failures_of(lambda: _load(directory / "1", strict))
    return ours == _load(directory / "1", template), isinstance(error, CheckpointingException), failures


def test_a_tensor_of_another_shape_is_padded_if_that_is_allowed_and_refused_if_not(
    found: dict[str, list[Any]],
) -> None:
    for same, is_megatrons, failures in found["_flexible_shape"]:
        assert same
        assert is_megatrons
        assert {rank for rank, _ in failures} == {0, 1}
        assert "Global shape mismatch" in failures[0][1]


@SCENARIOS.add
def _metadata(directory: Path) -> dict[str, Any]:
    save(_state(), directory / "1", stock_strategy(), content_metadata={"a": 1})
    path = str(directory / "1")

    def look() -> dict[str, Any]:
        tensors = dist_checkpointing.load_tensors_metadata(path)
        everything = load_sharded_metadata(path)
        return {
            "tensors": {key: (tensor.dtype, tensor.global_shape) for key, tensor in tensors.items()},
            "all": {key: type(value).__name__ for key, value in everything.items()},
            "common": dist_checkpointing.load_common_state_dict(path),
            "content": dist_checkpointing.load_content_metadata(path),
            "plain": _plain(dist_checkpointing.load_plain_tensors(path)),
        }

    with chosen():
        ours = look()
    objects = sorted(key for key, kind in ours["all"].items() if kind == "ShardedObject")
    return {"same": ours == look(), "content": ours["content"], "objects": [k for k in objects if "common" not in k]}


def test_what_is_told_of_a_checkpoint_is_what_stock_tells(found: dict[str, list[Any]]) -> None:
    objects = ["rng/shard_0_2", "rng/shard_1_2", "shared/shard_0_1"]
    assert found["_metadata"] == [{"same": True, "content": {"a": 1}, "objects": objects}] * 2


@SCENARIOS.add
def _removed(directory: Path) -> Any:
    with chosen():
        save(_state(), directory / "1")
        dist.barrier()
        if dist.get_rank() == 0:
            try:
                dist_checkpointing.remove_sharded_tensors(str(directory / "1"), "many.")
            except AttributeError:  # 0.18 asks the save strategy, which cannot
                RobustLoadStrategy().remove_sharded_tensors(str(directory / "1"), "many.")
        dist.barrier()

    def template() -> dict[str, Any]:
        return {key: value for key, value in _template().items() if key != "many"}

    keys = sorted(dist_checkpointing.load_tensors_metadata(str(directory / "1")))
    return keys, _load(directory / "1", template)["small"][1]


def test_tensors_can_be_removed_from_a_checkpoint_and_the_others_still_load(found: dict[str, list[Any]]) -> None:
    assert found["_removed"] == [(["cut", "flag", "small"], [1.0, 1.0, 1.0])] * 2


def _flip(path: Path, where: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(where)] ^= 1
    path.write_bytes(data)


@SCENARIOS.add
def _damaged(directory: Path) -> Any:
    with chosen():
        save({"weight": cut("weight", torch.full((64,), 1.25 + dist.get_rank()))}, directory / "1")
        if dist.get_rank() == 0:
            needle = torch.full((64,), 2.25).numpy().tobytes()
            (path,) = (each for each in (directory / "1").glob("*.distcp") if needle in each.read_bytes())
            _flip(path, needle)
        dist.barrier()
        error, failures = failures_of(
            lambda: _load(directory / "1", lambda: {"weight": cut("weight", torch.zeros(64))})
        )
    return isinstance(error, CorruptCheckpoint), [rank for rank, _ in failures]


def test_a_flipped_bit_that_one_rank_reads_is_an_error_on_all(found: dict[str, list[Any]]) -> None:
    assert found["_damaged"] == [(True, [1])] * 2


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@SCENARIOS.add
def _unsafe(directory: Path) -> Any:
    save({"weight": cut("weight", torch.ones(2))}, directory / "1", stock_strategy())
    if dist.get_rank() == 0:
        with (directory / "1" / "common.pt").open("wb") as file:
            torch.save({"x": _Evil(directory / "ran")}, file, pickle_module=pickle)
    dist.barrier()
    with chosen():
        error, _ = failures_of(lambda: _load(directory / "1", lambda: {"weight": cut("weight", torch.ones(2))}))
    return isinstance(error, UnsafeCheckpoint), (directory / "ran").exists()


def test_code_in_the_common_state_is_refused_on_all_ranks_and_not_run(found: dict[str, list[Any]]) -> None:
    assert found["_unsafe"] == [(True, False)] * 2


@SCENARIOS.add
def _twice_the_main_replica(directory: Path) -> Any:
    save({"weight": cut("weight", torch.ones(2))}, directory / "1", stock_strategy())

    def overlapping() -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(2), (0, 0, 2))}

    with chosen():
        error, _ = failures_of(lambda: _load(directory / "1", overlapping))
        loaded = _load(directory / "1", overlapping, validate_access_integrity=False)
    return isinstance(error, CheckpointingException), str(error), loaded["weight"][1]


def test_a_shard_that_two_ranks_claim_is_refused_unless_that_is_not_to_be_validated(
    found: dict[str, list[Any]],
) -> None:
    for is_megatrons, message, loaded in found["_twice_the_main_replica"]:
        assert is_megatrons
        assert "'weight'" in message
        assert "ranks 0-1" in message
        assert loaded == [1.0, 1.0]


@SCENARIOS.add
def _no_checkpoint(directory: Path) -> Any:
    with chosen():
        error, failures = failures_of(lambda: _load(directory / "none"))
    return isinstance(error, CheckpointingException), [rank for rank, _ in failures], str(error).count("does not exist")


def test_a_directory_that_is_not_there_is_megatrons_exception_on_all_ranks(found: dict[str, list[Any]]) -> None:
    for is_megatrons, ranks, n_told in found["_no_checkpoint"]:
        assert (is_megatrons, ranks) == (True, [0])
        assert n_told >= 1
