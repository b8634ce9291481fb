"""Warns when stock code does something although the job has asked for robust_dcp.

Without the warning a user would think that robust_dcp wrote the checkpoint. Each reason is logged once a process, so
that the log does not fill up. This module imports nothing of Megatron. Replacements call it when they call the
original function.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["forget_said", "log_left_to_stock"]

logger = logging.getLogger(__name__)

_said: set[tuple[str, str]] = set()
_lock = threading.Lock()


def log_left_to_stock(what: str, why: str) -> None:
    """Warn that stock code does something, once a process for each ``what`` and ``why``.

    Args:
        what: what stock code does, such as ``"saves by zarr"``.
        why: the reason, and what to do about it if anything can be done. It must not name what differs from call to
            call, such as the path of a checkpoint: then every call would be logged.
    """
    with _lock:
        if (what, why) in _said:
            return
        _said.add((what, why))
    logger.warning("robust_dcp was asked for, but stock code does this: %s (%s)", what, why)


def forget_said() -> None:
    """Let every warning be logged once more. ``uninstall`` calls this, because ``install`` may follow."""
    with _lock:
        _said.clear()
