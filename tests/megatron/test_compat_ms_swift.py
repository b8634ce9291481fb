"""ms-swift's own ``save_mcore_checkpoint`` and ``load_mcore_checkpoint``: whole states.

It makes a new strategy for each save, and disables torch's checks of a plan. Its wheel lies on ``PYTHONPATH`` (``make
test-compat``). Its dependencies do not, so that what the module imports of them is replaced by stand-ins here. No line
of the functions that run is changed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from demo import megatron_cpu
from tests.frameworks.jobs import is_ours
from tests.harness.ranks import run_ranks, values
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
    disable_global_validation()
    utils = megatron_lm_utils()
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
    found = values(run_ranks(2, _save_and_load_whole_states, tmp_path))
    assert found == [{"ours": [True] * 3, "stock": [True] * 3, "same": [True] * 3}] * 2
    for name in ("stock", "sync", "async"):
        for iteration in (1, 2):
            assert is_ours(tmp_path / name / f"iter_{iteration:07d}") is (name != "stock")


def _identity(value: Any) -> Any:
    return value


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not needed to save a checkpoint")


_STAND_INS: dict[str, dict[str, Any]] = {
    "mcore_bridge": {"set_random_seed": _unused, "split_cp_inputs": _unused, "unwrap_model": unwrap_model},
    "transformers": {},
    "transformers.utils": {"is_torch_npu_available": lambda: False},
    "swift": {},
    "swift.utils": {
        "check_json_format": _identity,
        "get_logger": lambda: logging.getLogger("swift"),
        "init_process_group": _unused,
        "is_master": lambda: dist.get_rank() == 0,
        "set_device": _unused,
    },
    "swift.megatron": {},
    "swift.megatron.utils": {},
    "swift.megatron.utils.megatron_fsdp_checkpoint": {"save_checkpoint": _unused, "build_rng_state": _unused},
}


def _source(name: str) -> Path:
    spec = importlib.util.find_spec("swift")
    assert spec is not None and spec.origin is not None, "ms-swift is not on the path: run make test-compat"
    return Path(spec.origin).parent / name


def megatron_lm_utils() -> ModuleType:
    """``swift.megatron.utils.megatron_lm_utils``: ``save_mcore_checkpoint``, ``load_mcore_checkpoint``, the queue."""
    folder = _source("megatron/utils")
    for name, attributes in _STAND_INS.items():
        sys.modules[name] = stand_in = ModuleType(name)
        stand_in.__path__ = []
        vars(stand_in).update(attributes)
    for name in ("patcher", "megatron_lm_utils"):
        full_name = f"swift.megatron.utils.{name}"
        spec = importlib.util.spec_from_file_location(full_name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[full_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["swift.megatron.utils.megatron_lm_utils"]


def disable_global_validation() -> None:
    """What ms-swift does when it starts: ``_validate_global_plan`` of torch finds nothing wrong with any plan."""
    wanted = ("_dcp_validation_returns_errors", "_patch_validate_non_overlapping_shards_metadata")
    tree = ast.parse(_source("megatron/init.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(tree.body) == len(wanted)
    namespace: dict[str, Any] = {"inspect": inspect, "logger": logging.getLogger("swift")}
    exec(compile(tree, "swift/megatron/init.py", "exec"), namespace)
    namespace[wanted[1]]()
