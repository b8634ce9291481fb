"""ms-swift's own code that saves and loads Megatron checkpoints, from its wheel, without what it needs to train.

Its wheel lies on ``PYTHONPATH`` (``make test-compat``); its dependencies do not, so that what the module imports of
them is replaced by stand-ins here. No line of the functions that run is changed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model

__all__ = ["disable_global_validation", "megatron_lm_utils"]


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
