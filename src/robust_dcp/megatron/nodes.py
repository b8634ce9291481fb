"""What a replaced node gets before Megatron-LM loads from drives of each node.

A resumed job reads ``latest_checkpointed_iteration.txt`` on every rank, takes the greatest iteration, and looks into
the directory of that iteration on every rank.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.megatron.options import current_options, is_chosen
from robust_dcp.nodes.files import make_whole
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, absolute, is_url
from robust_dcp.storage.files.small_files import read_hint
from robust_dcp.storage.files.what_is_there import TRACKER_NAME

_IS_THERE = 1
_MOST_NBYTES = 64


def _iteration(data: bytes) -> int:
    return -1 if data.strip() == b"release" else int(data)


def make_nodes_whole(root: Any) -> None:
    """Before Megatron-LM loads from ``root``: if some ranks see a later iteration than others, or one that others do
    not see, their nodes get what they lack of it, and the tracker.

    Raises:
        CorruptCheckpoint: more nodes are lost than the others make up for.
    """
    if not (is_chosen() and isinstance(root, str) and dist.is_initialized()) or is_url(root):
        return
    root = absolute(root)
    disk, tracker = Disk(), os.path.join(root, TRACKER_NAME)
    timeout_seconds = current_options().exchange_timeout_seconds
    channel = Channel.for_group(None, operation=f"Megatron: look into {root}", timeout_seconds=timeout_seconds)

    def look() -> Offer:
        iteration = read_hint(disk, tracker, _iteration, what="an iteration", at_most=_MOST_NBYTES)
        if iteration is None or not 0 <= iteration < 1 << 62:
            return Offer()
        is_there = disk.exists(os.path.join(_directory_of(root, iteration), METADATA_NAME))
        return Offer(value=iteration + 1, flags=_IS_THERE if is_there else 0)

    _, agreement = channel.agree("iterations", look)
    n_there, n_ranks = agreement.count(_IS_THERE), agreement.n_ranks
    if not n_there or (n_there == n_ranks and agreement.lowest == agreement.highest):
        return
    latest = agreement.highest - 1
    make_whole(channel, "make nodes whole", _directory_of(root, latest))

    def note() -> None:
        if look().value != latest + 1:
            disk.mkdirs(root)
            disk.replace_file(tracker, str(latest).encode())

    channel.barrier("tracker", note)


def _directory_of(root: str, iteration: int) -> str:
    return os.path.join(root, f"iter_{iteration:07d}")
