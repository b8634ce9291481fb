"""Switches Python's garbage collection off while thousands of objects are made.

``metadata_file`` and ``placed_reads`` use it, and so does ``planner`` for the plan of a load.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_garbage_collection"]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Millions of objects are made, and none of them is garbage. Looking for cycles among them would take most of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
