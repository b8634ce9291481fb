"""One switch for all: robust_dcp in the place of ``torch.distributed.checkpoint``, and of Megatron's checkpoints.

Owns :func:`install` and :func:`uninstall`, and the line in the log that says what was taken over. Called by users, and
by ``robust_dcp_autoload`` where ``ROBUST_DCP=1`` stands in the environment.
"""

from __future__ import annotations

import logging
import threading
from importlib import import_module

import torch

from robust_dcp.switch.announcement import announce
from robust_dcp.switch.dcp_patches import PATCHES, TAKEN_OVER
from robust_dcp.switch.patching import Patches
from robust_dcp.switch.stock_paths import forget_said
from robust_dcp.version import __version__

__all__ = ["install", "uninstall"]

logger = logging.getLogger(__name__)

_MEGATRON = "robust_dcp.megatron.installation"


class _Installed:
    """What is in place in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.patches: Patches | None = None


_installed = _Installed()


def install() -> None:
    """Let robust_dcp do what this process asks ``torch.distributed.checkpoint`` to save and load, and Megatron too.

    ``ROBUST_DCP=1`` in the environment does the same in every process, without a change in the program. Calling it
    again changes nothing. Call it on every rank; it exchanges nothing.

        import robust_dcp

        robust_dcp.install()

    Functions that a module has bound by ``from torch.distributed.checkpoint import save`` are replaced there as well.
    What robust_dcp cannot stand in for, such as storage writers of other packages, stays stock, and is said once in the
    log.

    Raises:
        ValueError: a variable of the environment has no meaning.
    """
    megatron = import_module(_MEGATRON)
    with _installed.lock:
        if _installed.patches is not None:
            return
        megatron.uninstall()  # replacements that look who calls have to be outside of those that do not
        _installed.patches = patches = Patches(PATCHES)
    try:
        patches.apply()
        patches.replace_bound_names(besides=("torch", "robust_dcp"))  # these call each other's functions, and mean them
        megatron.install()
    except BaseException:
        uninstall()
        raise
    _announce()


def uninstall() -> None:
    """Put back every attribute that :func:`install` has replaced. Doing it twice, or without it, is harmless."""
    import_module(_MEGATRON).uninstall()
    with _installed.lock:
        patches, _installed.patches = _installed.patches, None
        forget_said()
    if patches is not None:
        patches.remove()


def _announce() -> None:
    *names, last = TAKEN_OVER
    announce(
        logger,
        f"robust_dcp {__version__} takes over {', '.join(names)} and {last} of torch.distributed.checkpoint "
        f"(torch {torch.__version__})",
    )
