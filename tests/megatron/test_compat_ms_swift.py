"""ms-swift's own ``save_mcore_checkpoint`` and ``load_mcore_checkpoint``: whole states, and adapters only.

It makes a new strategy for each save, and disables torch's checks of a plan.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from demo import megatron_cpu
from tests.frameworks.jobs import is_ours
from tests.harness.ranks import run_ranks, values
from tests.megatron import ms_swift
from tests.megatron.stock import stock_strategy
from tests.megatron.whole_training import WholeTraining
from tests.megatron.without_cuda import redirect_cuda

pytestmark = pytest.mark.compat


class _Model:
    """What ms-swift asks of a model: adapters and base weights, cut among the ranks."""

    def __init__(self, *adapters: str) -> None:
        self.adapters = adapters

    def sharded_state_dict(self, **_: Any) -> dict[str, ShardedTensor]:
        names = ["layer.base_layer.weight", *(f"layer.{name}.default.weight" for name in self.adapters)]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        data = {name: torch.full((3, 4), float(place * ranks + rank)) for place, name in enumerate(names)}
        return {
            name: ShardedTensor.from_rank_offsets(f"model.{name}", value, (0, rank, ranks))
            for name, value in data.items()
        }


def _arguments(directory: Path, *, async_save: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        output_dir=str(directory),
        mcore_model=str(directory),
        async_save=async_save,
        bf16=True,
        data_parallel_random_init=False,
        dist_ckpt_save_pre_mcore_014=False,
        dist_ckpt_optim_fully_reshardable=False,
        finetune=False,
        no_load_optim=False,
        no_load_rng=False,
        no_save_optim=False,
        no_save_rng=False,
        pipeline_model_parallel_size=1,
        tensor_model_parallel_size=1,
        tuner_type="full",
        use_distributed_optimizer=True,
        use_megatron_fsdp=False,
    )


def _load_with_stock(directory: Path, adapters: tuple[str, ...]) -> bool:
    wanted = {name: shard for name, shard in _Model(*adapters).sharded_state_dict().items() if "lora" in name}
    expected = {name: shard.data.clone() for name, shard in wanted.items()}
    for shard in wanted.values():
        shard.data.zero_()
    loaded = dist_checkpointing.load({"model": wanted}, str(directory))
    equal = all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
    return equal and loaded["iteration"] == int(directory.name.removeprefix("iter_"))


def _save_three_times(directory: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    import robust_dcp.megatron

    megatron_cpu.install()
    torch.cuda.get_rng_state = lambda *args: torch.zeros(8, dtype=torch.uint8)
    parallel_state.initialize_model_parallel(1, 1)
    ms_swift.disable_global_validation()
    utils = ms_swift.megatron_lm_utils()
    os.environ["ROBUST_DCP"] = "1"
    robust_dcp.megatron.install()
    strategies: list[Any] = []
    made = TorchDistSaveShardedStrategy.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        strategies.append(self)

    TorchDistSaveShardedStrategy.__init__ = remember
    adapters: list[tuple[str, ...]] = [("lora_A",), ("lora_A",), ("lora_A", "lora_B")]
    for iteration, names in enumerate(adapters, start=1):
        utils.save_mcore_checkpoint(_arguments(directory), [_Model(*names)], iteration=iteration, peft_format=True)
    plans = [str(strategy.last_report.plan) for strategy in strategies]
    robust_dcp.megatron.uninstall()
    stock_strategy()
    folders = [directory / f"iter_{iteration:07d}" for iteration in (1, 2, 3)]
    return {
        "plans": plans,
        "loaded": [_load_with_stock(folder, names) for folder, names in zip(folders, adapters, strict=True)],
        "tracker": (directory / "latest_checkpointed_iteration.txt").read_text(),
    }


def test_each_of_three_saves_is_whole_and_reuses_what_is_the_same(tmp_path: Path) -> None:
    """The plan cache does not live on the strategy; what is checked does not rest on torch's own checks."""
    found = values(run_ranks(2, _save_three_times, tmp_path, timeout_seconds=120))
    for rank in found:
        assert rank["plans"][:2] == ["built", "reused"]
        assert rank["plans"][2] == "rebuilt"
        assert rank["loaded"] == [True, True, True]
        assert rank["tracker"] == "3"


def _save_and_load_whole_states(directory: Path) -> dict[str, Any]:
    import robust_dcp

    redirect_cuda()
    ms_swift.disable_global_validation()
    utils = ms_swift.megatron_lm_utils()
    saved: dict[str, list[torch.Tensor]] = {}

    def save(name: str, *, async_save: bool = False) -> None:
        training, arguments = WholeTraining(seed=1), _arguments(directory / name, async_save=async_save)
        parts = [training.model], training.optimizer, training.scheduler
        for iteration in (1, 2):
            training.step()
            saved[name] = training.state()
            utils.save_mcore_checkpoint(arguments, *parts, iteration=iteration)
        training.step()
        utils.maybe_finalize_async_save(arguments, blocking=True)

    def is_loaded(name: str) -> bool:
        training = WholeTraining(seed=2)
        parts = [training.model], training.optimizer, training.scheduler
        assert utils.load_mcore_checkpoint(_arguments(directory / name), *parts) == 2
        return all(map(torch.equal, training.state(), saved[name]))

    stock_strategy()
    save("stock")
    robust_dcp.install()
    save("sync")
    save("async", async_save=True)
    ours = [is_loaded(name) for name in saved]
    robust_dcp.uninstall()
    stock_strategy()
    same = [all(map(torch.equal, saved[name], saved["stock"])) for name in saved]
    return {"ours": ours, "stock": [is_loaded(name) for name in saved], "same": same}


def test_whole_states_go_both_ways_between_ours_and_stock_and_training_is_the_same(tmp_path: Path) -> None:
    found = values(run_ranks(2, _save_and_load_whole_states, tmp_path, timeout_seconds=150))
    assert found == [{"ours": [True] * 3, "stock": [True] * 3, "same": [True] * 3}] * 2
    for name in ("stock", "sync", "async"):
        for iteration in (1, 2):
            assert is_ours(tmp_path / name / f"iter_{iteration:07d}") is (name != "stock")
