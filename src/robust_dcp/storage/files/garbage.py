"""No look for garbage while objects are made by the ten thousand.

Called by ``metadata_file`` and ``placed_reads``, and by ``planner`` for what a load plans.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_garbage_collection"]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Millions of objects are made, none of them garbage: looking for cycles takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
