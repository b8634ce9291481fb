"""Counts how often Python code calls the collectives of ``torch.distributed``. For benchmarks and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["OBJECT_COLLECTIVES", "counted_collectives"]

OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
_COLLECTIVES = (
    *OBJECT_COLLECTIVES,
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count this process's calls within the block, by name. Functions imported by ``from … import …`` are missed."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
