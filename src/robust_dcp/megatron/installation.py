"""Lets robust_dcp save and load Megatron's checkpoints, and undoes that.

Owns :func:`install` and :func:`uninstall`, the tables of what is taken over, and the log line that says so. There are
several ways to switch robust_dcp on, and all of them end in :func:`install`. This module imports nothing of Megatron.
Called by users, ``__main__`` and ``robust_dcp_autoload``.
"""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module, metadata

import torch

from robust_dcp.environment import check, value_of
from robust_dcp.megatron.hooks.arguments import PATCHES as ARGUMENT_PATCHES
from robust_dcp.megatron.hooks.options import Planner, choose_planner
from robust_dcp.switch.announcement import announce
from robust_dcp.switch.patching import Patch, Patches
from robust_dcp.switch.stock_paths import forget_said
from robust_dcp.version import __version__

__all__ = ["TABLES", "install", "patches_of", "uninstall"]

logger = logging.getLogger(__name__)

TABLES: dict[str, str] = {
    "saving.save_patches": "saves of torch_dist",
    "loading.load_patches": "loads of torch_dist",
    "formats.dcp_patches": "torch_dcp and fsdp_dtensor",
    "uneven.uneven_dtensor_patches": "uneven DTensors",
}
"""The modules of this package that have a table ``PATCHES``, and what each table takes over."""


class _Installed:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.patches: dict[str, Patches] = {}
        self.announced = False


_installed = _Installed()


def install(planner: Planner = "robust_dcp") -> None:
    """Let robust_dcp save and load Megatron's distributed checkpoints in this process.

    Megatron's modules that are imported already are patched now. The others are patched when they are imported. A
    second call can only change the planner. Call this on every rank. It exchanges nothing.

        import robust_dcp.megatron

        robust_dcp.megatron.install()

    Args:
        planner: the planner to use if neither the argument ``--ckpt-planner`` nor ``ROBUST_DCP`` names one. With
            ``"default"`` only the arguments are added to Megatron's parser, and no save or load is replaced.

    Raises:
        ValueError: an environment variable has an invalid value (:func:`robust_dcp.environment.check`), or ``planner``
            is neither ``"robust_dcp"`` nor ``"default"``.
    """
    if planner not in ("robust_dcp", "default"):
        raise ValueError(f"install(planner={planner!r}): expected 'robust_dcp' or 'default'")
    check()
    if value_of("ROBUST_DCP") is False:  # it wins over all that asks for robust_dcp
        planner = "default"
    choose_planner(planner)
    _put_in_place("arguments", ARGUMENT_PATCHES)
    if planner == "robust_dcp":
        for table in TABLES:
            _put_in_place(table, patches_of(table))


def uninstall() -> None:
    """Undo :func:`install`: put back the original object of every replaced attribute, and stop watching imports.

    Parsers that were made in the meantime keep our arguments. It is harmless to call this twice or without
    :func:`install`.
    """
    with _installed.lock:
        in_place, _installed.patches = _installed.patches, {}
        _installed.announced = False
        choose_planner("default")
        forget_said()
    for patches in reversed(list(in_place.values())):
        patches.remove()


def patches_of(table: str) -> tuple[Patch, ...]:
    """The patches of one of :data:`TABLES`."""
    found: tuple[Patch, ...] = import_module(f"robust_dcp.megatron.{table}").PATCHES
    return found


def _put_in_place(table: str, patches: tuple[Patch, ...]) -> None:
    with _installed.lock:
        if table in _installed.patches:
            return
        in_place = _installed.patches[table] = Patches(patches, None if table == "arguments" else _announce)
    in_place.apply()


def _announce(patch: Patch) -> None:
    """Log once on rank 0 what is taken over. This happens with the first patched module, when the version is known."""
    if not patch.module.startswith("megatron."):
        return
    with _installed.lock:
        if _installed.announced:
            return
        _installed.announced = True
    taken_over = ", ".join(TABLES.values())
    announce(
        logger,
        f"robust_dcp {__version__} is the planner of Megatron's checkpoints: it takes over {taken_over} "
        f"(megatron-core {_megatron_version()}, torch {torch.__version__})",
    )


def _megatron_version() -> str:
    """The version of the imported sources. They need not be an installed package."""
    if "megatron.core" in sys.modules:
        version = getattr(import_module("megatron.core.package_info"), "__version__", None)
        if version is not None:
            return str(version)
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "unknown"
