"""ms-swift's own ``save_mcore_checkpoint`` and ``load_mcore_checkpoint``: whole states.

It makes a new strategy for each save, and disables torch's checks of a plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from demo import megatron_cpu
from tests.frameworks.jobs import is_ours
from tests.harness.ranks import run_ranks, values
from tests.megatron import ms_swift
from tests.megatron.torch_dist import stock_strategy
from tests.megatron.whole_training import WholeTraining

pytestmark = pytest.mark.compat


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


def _save_and_load_whole_states(directory: Path) -> dict[str, Any]:
    import robust_dcp

    megatron_cpu.install()
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
