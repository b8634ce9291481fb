"""Ranks that are threads of this process, and talk to each other over gloo as processes would: for many of them.

Only for what needs no state of a process: exchanges of a ``Channel``, not whole saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from benchmarks.ranks import use_loopback
from robust_dcp.comm import Channel
from robust_dcp.comm.link import Link
from robust_dcp.comm.meeting import Meeting
from robust_dcp.comm.operation import Operation

__all__ = ["channel_of", "run_in_threads"]

R = TypeVar("R")

_STACK_NBYTES = 512 << 10


def run_in_threads(world_size: int, function: Callable[[Link], R]) -> list[R]:
    """``function(link)`` on each of ``world_size`` ranks; what each returned, in rank order.

    Raises:
        Exception: what a rank raised, that of the lowest.
    """
    use_loopback()
    store, ranks = dist.HashStore(), tuple(range(world_size))
    links = [Link(rank=rank, ranks=ranks, meeting=Meeting(lambda: store, "benchmark", rank)) for rank in ranks]
    before = threading.stack_size(_STACK_NBYTES)
    try:
        with ThreadPoolExecutor(world_size) as pool:
            return [future.result() for future in [pool.submit(function, link) for link in links]]
    finally:
        for link in links:
            link.close()
        threading.stack_size(before)


def channel_of(link: Link, operation: str, timeout_seconds: float = 300.0) -> Channel:
    """What ``Channel.for_group`` gives a rank that is a process."""
    return Channel(Operation(link, operation, timeout_seconds), coordinator_rank=0)
