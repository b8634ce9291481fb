"""One switch lets robust_dcp save and load for ``torch.distributed.checkpoint`` and for Megatron.

Owns :func:`install` and :func:`uninstall`, and the log line that says what is taken over. Called by users, and by
``robust_dcp_autoload`` if ``ROBUST_DCP=1`` is in the environment.
"""

from __future__ import annotations

import logging
import threading
from importlib import import_module

import torch

from robust_dcp.environment import check, value_of
from robust_dcp.switch.announcement import announce
from robust_dcp.switch.dcp_patches import PATCHES, TAKEN_OVER
from robust_dcp.switch.patching import Patches
from robust_dcp.switch.stock_paths import forget_said
from robust_dcp.version import __version__

__all__ = ["install", "uninstall"]

logger = logging.getLogger(__name__)

_MEGATRON = "robust_dcp.megatron.installation"


class _Installed:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.patches: Patches | None = None


_installed = _Installed()


def install() -> None:
    """Let robust_dcp run this process's saves and loads by ``torch.distributed.checkpoint``, and those of Megatron.

    ``ROBUST_DCP=1`` in the environment does the same in every process, without a change to the program. A second call
    changes nothing. Call this on every rank. It exchanges nothing.

        import robust_dcp

        robust_dcp.install()

    A module may have imported a function by ``from torch.distributed.checkpoint import save``. It is replaced there
    too. Stock code still runs the calls that robust_dcp does not support, such as those with a storage writer of
    another package. Each such case is logged once.

    ``ROBUST_DCP=0`` in the environment wins: then this does nothing, and says so.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    check()
    if value_of("ROBUST_DCP") is False:
        announce(logger, "robust_dcp.install() does nothing, because ROBUST_DCP=0 is in the environment")
        return
    megatron = import_module(_MEGATRON)
    with _installed.lock:
        if _installed.patches is not None:
            return
        megatron.uninstall()  # Megatron's replacements look at the caller, so they must wrap ours, which do not
        _installed.patches = patches = Patches(PATCHES)
    try:
        patches.apply()
        patches.replace_bound_names(besides=("torch", "robust_dcp"))  # these mean the originals
        megatron.install()
    except BaseException:
        uninstall()
        raise
    _announce()


def uninstall() -> None:
    """Put back every attribute that :func:`install` has replaced. It is harmless to call this twice, or without
    :func:`install`."""
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
