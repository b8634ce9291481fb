"""What becomes of every argument that Megatron has for checkpoints: a new one fails until somebody has decided."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist_strategies

from robust_dcp.megatron.options import OPTIONS
from tests.harness.verdicts import lines_of_the_log
from tests.megatron.torch_dist import Scenarios, chosen, replicated, save, stock_strategy

SCENARIOS = Scenarios()

_HONOURED = "honoured"
_NEEDLESS = "accepted, and not needed: docs/megatron.md says so, or a line of the log where others would miss it"
_MEGATRON = "Megatron's own code around the save or load does it, and still does"

_OF_CALLS = {
    _HONOURED: """
        sharded_state_dict checkpoint_dir sharded_strategy validate_access_integrity async_sharded_save strict
        preprocess_common_before_consistancy_check content_metadata async_strategy verify_integrity process_group
        backend version separation_hint strategy parallelization_group stream_ckpt_dequant
        """,
    _NEEDLESS: """
        common_strategy keep_only_main_replica thread_count cached_metadata cpu_shm_mode do_cache_distribution
        pg_cache_path pg_cache_create exchange_algo per_rank_object_load cache_metadata checkpoint_name
        """,
}
"""Arguments of ``dist_checkpointing.save`` and ``load``, and of the strategies that are taken over."""

_OF_COMMAND_LINE = {
    _HONOURED: """
        async_save async_strategy ckpt_format ckpt_fully_parallel_load ckpt_fully_parallel_save
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure
        ckpt_load_validate_sharding_integrity dist_ckpt_strictness verify_integrity stream_ckpt_dequant
        strict_fsdp_dtensor_load use_persistent_ckpt_worker dist_ckpt_format_deprecated use_dist_ckpt_deprecated
        ckpt_fully_parallel_save_deprecated
        """,
    _NEEDLESS: """
        dist_ckpt_workers async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm
        ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_per_rank_objects ckpt_pg_tensors_cache_create
        ckpt_pg_tensors_cache_path
        """,
    _MEGATRON: """
        save load save_interval save_retain_interval most_recent_k no_save_optim no_save_rng no_load_optim no_load_rng
        save_optim save_rng load_optim load_rng finetune pretrained_checkpoint ckpt_step exit_on_missing_checkpoint
        use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
        load_main_params_from_ckpt override_ckpt_iteration dist_ckpt_save_pre_mcore_014 ckpt_drop_redundant_extra_state
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient save_tokenizer_assets
        non_persistent_ckpt_type non_persistent_save_interval non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication replication_jump replication_factor
        save_activations_interval save_dgrads_interval save_wgrads_interval save_params_interval
        save_tokens_per_expert_interval
        """,
}
"""Destinations of the arguments that ``_add_checkpointing_args`` of Megatron-LM adds."""


def _undecided(names: set[str], decisions: dict[str, str]) -> list[str]:
    return sorted(names - {name for listed in decisions.values() for name in listed.split()})


def test_every_argument_of_calls_and_strategies_has_been_decided_on() -> None:
    calls: list[Any] = [
        dist_checkpointing.save,
        dist_checkpointing.load,
        torch_dist_strategies.TorchDistSaveShardedStrategy.__init__,
        torch_dist_strategies.TorchDistLoadShardedStrategy.__init__,
        fully_parallel.FullyParallelSaveStrategyWrapper.__init__,
        fully_parallel.FullyParallelLoadStrategyWrapper.__init__,
    ]
    names = {name for call in calls for name in inspect.signature(call).parameters}
    assert _undecided(names - {"self"}, _OF_CALLS) == []


def test_every_argument_of_the_command_line_has_been_decided_on() -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this package of Megatron-Core has no megatron.training; make test-compat has it")
    from megatron.training.arguments import _add_checkpointing_args

    parser = _add_checkpointing_args(argparse.ArgumentParser())
    names = {action.dest for action in parser._actions} - {"help"} - {option.dest for option in OPTIONS}
    assert len(names) > 30 and _undecided(names, _OF_COMMAND_LINE) == []


@SCENARIOS.add
def a_cache_that_robust_dcp_does_not_make_is_told_of_once(directory: Path) -> None:
    """A later job with stock would look for it."""
    wrapper = fully_parallel.FullyParallelSaveStrategyWrapper(stock_strategy(), dist.group.WORLD)
    wrapper.pg_cache_path, wrapper.pg_cache_create = str(directory / "cache"), True  # 0.20 has arguments for them
    messages = lines_of_the_log("robust_dcp.switch.patching")
    with chosen():
        for step in ("1", "2"):
            save({"weight": replicated("weight", torch.ones(2))}, directory / step, wrapper)
    assert len(messages) == 1 and "--ckpt-pg-tensors-cache-create" in messages[0] and "FileNotFound" in messages[0]
    assert not (directory / "cache").exists()


test_on_two_ranks = SCENARIOS.test()
