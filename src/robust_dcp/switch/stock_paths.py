"""Says what is not done by robust_dcp although the job has asked for it.

Owns the one mechanism for it: a warning for each kind of path, once a process, so that nobody takes a checkpoint for
ours that is not, and no log fills up with it. Imports nothing of Megatron. Called wherever a replacement gives way to
what it replaces.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["forget_said", "say_stays_stock"]

logger = logging.getLogger(__name__)

_said: set[str] = set()
_lock = threading.Lock()


def say_stays_stock(what: str, why: str) -> None:
    """Warn that robust_dcp has no part in something, once a process for each ``what``.

    Args:
        what: ``"saves by zarr"``, the subject of the sentence.
        why: the reason, and where there is one, what to do about it.
    """
    with _lock:
        if what in _said:
            return
        _said.add(what)
    logger.warning("robust_dcp was asked for, but %s: stock code does it (%s)", what, why)


def forget_said() -> None:
    """Say everything once more; called by ``uninstall``, for it may be installed again."""
    with _lock:
        _said.clear()
