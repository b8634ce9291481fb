"""Compares the attributes of real Megatron before, during and after ``install``, in a process of its own.

First Megatron is imported after ``install``, then before it. ``test_install`` runs it.
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


def _attributes() -> dict[Any, Any]:
    """Each patch, and what its module or class holds under that name; ``None`` if nothing."""
    from robust_dcp.installation import PATCHES

    found = {}
    for patch in PATCHES:
        owner: Any = sys.modules.get(patch.module)
        *path, name = patch.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        found[patch] = None if owner is None else vars(owner).get(name)
    return found


def _names_with_our_code() -> set[tuple[str, str]]:
    """Names in modules and classes of Megatron and torch whose code stands in robust_dcp."""
    found = set()
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("megatron", "torch")]:
        if not isinstance(module, types.ModuleType):
            continue
        for holder in [module, *(value for value in list(vars(module).values()) if isinstance(value, type))]:
            for name, value in list(vars(holder).items()):
                function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(function, types.FunctionType) and "/robust_dcp/" in function.__code__.co_filename:
                    found.add((holder.__name__, name))
    return found


def _main() -> None:
    import robust_dcp.megatron

    robust_dcp.megatron.install()
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    _import_megatron()
    assert len(_names_with_our_code()) > 10
    robust_dcp.megatron.uninstall()
    assert _names_with_our_code() == set(), _names_with_our_code()

    robust_dcp.megatron.install("default")  # adds the arguments, and replaces nothing else
    assert _names_with_our_code() == set()
    robust_dcp.megatron.uninstall()
    before, finders = _attributes(), list(sys.meta_path)
    robust_dcp.megatron.install()
    robust_dcp.megatron.install()
    unchanged = [patch for patch, value in _attributes().items() if value is before[patch] is not None]
    assert unchanged == [], unchanged
    ours = _names_with_our_code()
    assert len(ours) > 10  # each name that Megatron has imported early is ours too
    for module, name in (("", "save"), ("", "load"), (".serialization", "load")):
        assert (f"megatron.core.dist_checkpointing{module}", name) in ours
    robust_dcp.megatron.uninstall()
    assert all(value is before[patch] for patch, value in _attributes().items())
    assert _names_with_our_code() == set()
    assert sys.meta_path == finders


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main()
