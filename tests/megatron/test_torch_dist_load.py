"""``dist_checkpointing.load`` of Megatron with robust_dcp as the planner: as stock, but checked and told to all."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import load as load_bound_early
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling

from benchmarks.collectives import counted_collectives
from robust_dcp import RobustCheckpointError, UnsafeCheckpoint
from robust_dcp.megatron import RobustLoadStrategy, common_state, versions
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
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
    warnings_of,
)

SCENARIOS = Scenarios()


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


def _one(value: float = 0.0) -> dict[str, Any]:
    return {"weight": cut("weight", torch.full((2,), value))}


def _plain(value: Any) -> Any:
    """A loaded state dict as values that can be compared."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def _load(directory: Path, template: Callable[[], dict[str, Any]] = _template, *args: Any, **options: Any) -> Any:
    return _plain(dist_checkpointing.load(template(), str(directory), *args, **options))


def _parallel(**options: Any) -> FullyParallelLoadStrategyWrapper:
    return FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD, **options)


@SCENARIOS.add
def each_loads_what_the_other_saved_by_every_way_and_without_a_world_collective(directory: Path) -> None:
    save(_state(), directory / "stock", stock_strategy())
    by_stock = _load(directory / "stock")
    assert _load(directory / "stock", _template, RobustLoadStrategy()) == by_stock
    with chosen():
        save(_state(), directory / "ours")
        with counted_collectives() as calls:
            assert _load(directory / "stock") == _load(directory / "ours") == by_stock
        assert dict(calls) == {}
        for algorithm in ("broadcast", "gather_rounds"):
            with counted_collectives() as calls:
                assert _load(directory / "stock", _template, _parallel(exchange_algo=algorithm)) == by_stock
            assert calls["all_gather_object"] + calls["gather_object"] == 0
        without_data = _template()
        for shard in without_data["many"]:
            shard.data = None
        assert _plain(load_bound_early(without_data, str(directory / "stock"), _parallel())) == by_stock
        for strategy in (TorchDistLoadShardedStrategy(), _parallel()):  # for callers that call them themselves
            assert strategy.load({"flag": _template()["flag"]}, directory / "ours")["flag"].item() is True
    assert _load(directory / "ours") == by_stock
    with chosen(switch="0"):
        assert _load(directory / "stock", _template, _parallel()) == _load(directory / "ours") == by_stock


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
    assert results["return_unexpected"][1:] == [set(), unexpected]
    assert results["return_all"][1:] == [{"more", "small"}, unexpected]


def _with_garbage_for_metadata(directory: Path) -> None:
    """Overwrite what only somebody who decodes ``.metadata`` would read: an index is fitted by the last 4 KiB."""
    path = directory / METADATA_NAME
    data = path.read_bytes()
    assert len(data) > 3 * 4096
    path.write_bytes(bytes(4096) + data[4096:])


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
            (directory / "plain" / INDEX_NAME).unlink()
            _with_garbage_for_metadata(directory / "indexed")
        dist.barrier()
        assert outcomes(directory / "indexed") == outcomes(directory / "plain")
        dist.barrier()
        if dist.get_rank() == 0:
            (directory / "indexed" / common_state.COMMON_FILE).unlink(missing_ok=True)
        dist.barrier()
        assert dist_checkpointing.load_common_state_dict(str(directory / "indexed"))["iteration"] == 7


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
def what_is_told_of_a_checkpoint_is_what_stock_tells(directory: Path) -> None:
    save(_state(), directory / "1", stock_strategy(), content_metadata={"a": 1})
    path = str(directory / "1")

    def look() -> list[Any]:
        tensors = dist_checkpointing.load_tensors_metadata(path)
        return [
            {key: (tensor.dtype, tensor.global_shape) for key, tensor in tensors.items()},
            {key: type(value).__name__ for key, value in load_sharded_metadata(path).items()},
            dist_checkpointing.load_common_state_dict(path),
            dist_checkpointing.load_content_metadata(path),
            _plain(dist_checkpointing.load_plain_tensors(path)),
        ]

    with chosen():
        ours = look()
    assert ours == look() and ours[3] == {"a": 1}


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@SCENARIOS.add
def code_in_the_common_state_is_refused_on_all_ranks_and_not_run(directory: Path) -> None:
    save(_one(1.0), directory / "1", stock_strategy())
    if dist.get_rank() == 0:
        with (directory / "1" / "common.pt").open("wb") as file:
            torch.save({"x": _Evil(directory / "ran")}, file, pickle_module=pickle)
    dist.barrier()
    with chosen():
        error, _ = failures_of(lambda: _load(directory / "1", _one))
    assert isinstance(error, UnsafeCheckpoint) and not (directory / "ran").exists()


@SCENARIOS.add
def a_strategy_that_is_passed_without_install_runs_no_code_of_metadata(directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(exist_ok=True)
        (directory / METADATA_NAME).write_bytes(pickle.dumps(_Evil(directory / "ran")))
    dist.barrier()
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
    with chosen(), warnings_of("robust_dcp.switch.patching") as messages:
        assert outcome() == by_stock
    assert len(messages) == 1 and "loads of of_tomorrow checkpoints (only torch_dist is taken over)" in messages[0]


@SCENARIOS.add
def a_strategy_that_loads_in_its_own_way_is_asked_and_the_common_state_is_there(directory: Path) -> None:
    asked: list[list[str]] = []

    class Own(TorchDistLoadShardedStrategy):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            asked.append(sorted(sharded_state_dict))
            return {"weight": torch.full((2,), 7.0)}

    with chosen():
        save({**_one(1.0), "iteration": 3}, directory / "1")
        loaded = dist_checkpointing.load(_one(), str(directory / "1"), Own())
    assert (asked, loaded["weight"].tolist(), loaded["iteration"]) == ([["weight"]], [7.0, 7.0], 3)


test_on_two_ranks = SCENARIOS.test()
