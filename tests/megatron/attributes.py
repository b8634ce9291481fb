"""Compares the functions of real Megatron before, during and after ``install``, in a process of its own.

First Megatron is imported after ``install``, then before it. ``test_autoload`` runs it.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any


def _import_megatron() -> None:
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.transformer.fsdp_dtensor_checkpoint  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401


def _functions() -> dict[str, Any]:
    """All functions that modules and classes of Megatron and torch hold, by the name there."""
    found = {}
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("megatron", "torch")]:
        if not isinstance(module, types.ModuleType):
            continue
        classes = [each for each in list(vars(module).values()) if isinstance(each, type)]
        holders = {module.__name__: module, **{f"{each.__module__}.{each.__qualname__}": each for each in classes}}
        for holder_name, holder in holders.items():
            for name, value in list(vars(holder).items()):
                if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
                    found[f"{holder_name}.{name}"] = value
    return found


def _ours() -> set[str]:
    """The names of those whose code stands in robust_dcp."""
    codes = {name: getattr(getattr(each, "__func__", each), "__code__", None) for name, each in _functions().items()}
    return {name for name, code in codes.items() if code is not None and "/robust_dcp/" in code.co_filename}


def _main() -> None:
    import robust_dcp.megatron
    from robust_dcp.installation import PATCHES

    robust_dcp.megatron.install()
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    _import_megatron()
    assert len(_ours()) > 10
    robust_dcp.megatron.uninstall()
    assert _ours() == set(), _ours()

    robust_dcp.megatron.install("default")  # adds the arguments, and replaces nothing else
    assert _ours() == set()
    robust_dcp.megatron.uninstall()
    before, finders = _functions(), list(sys.meta_path)
    robust_dcp.megatron.install()
    robust_dcp.megatron.install()
    replaced = {name for name, value in _functions().items() if value is not before.get(name)}
    left = {f"{patch.module}.{patch.name}" for patch in PATCHES} & before.keys() - replaced
    assert left == set(), left
    for name in ("save", "load", "serialization.load"):  # those that Megatron has imported early are ours too
        assert f"megatron.core.dist_checkpointing.{name}" in _ours()
    robust_dcp.megatron.uninstall()
    assert _functions() == before
    assert sys.meta_path == finders


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main()
