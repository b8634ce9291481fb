"""What a replaced node gets before Megatron-LM loads from drives of each node.

A resumed job reads ``latest_checkpointed_iteration.txt`` on every rank, takes the greatest iteration, and looks into
the directory of that iteration on every rank.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import entry_point
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.options import current_options, is_chosen, megatron_arguments
from robust_dcp.nodes.files import make_whole
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, absolute, is_url
from robust_dcp.storage.files.small_files import read_hint
from robust_dcp.storage.files.what_is_there import TRACKER_NAME

logger = logging.getLogger(__name__)

_HAS_TRACKER, _IS_THERE = 1, 2
_MOST_NBYTES = 64


@entry_point
def load_checkpoint(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron-LM's ``load_checkpoint``. If some ranks see a later iteration than others, or one that others do not
    see, their nodes first get what they lack of it, and the tracker.

    Raises:
        CorruptCheckpoint: more nodes are lost than the others make up for.
    """
    bound = inspect.signature(stock).bind(*args, **kwargs)
    bound.apply_defaults()
    root = getattr(megatron_arguments(), bound.arguments.get("load_arg", "load"), None)
    if is_chosen() and isinstance(root, str) and not is_url(root) and dist.is_initialized():
        with as_megatron_raises():
            _make_nodes_whole(absolute(root))
    return stock(*args, **kwargs)


def _make_nodes_whole(root: str) -> None:
    disk, tracker = Disk(), os.path.join(root, TRACKER_NAME)
    timeout_seconds = current_options().exchange_timeout_seconds
    channel = Channel.for_group(None, operation=f"Megatron: look into {root}", timeout_seconds=timeout_seconds)

    def look() -> Offer:
        iteration = read_hint(disk, tracker, int, what="a number of an iteration", at_most=_MOST_NBYTES)
        if iteration is None or not 0 <= iteration < 1 << 62:  # or a release
            return Offer()
        is_there = disk.exists(os.path.join(_directory_of(root, iteration), METADATA_NAME))
        return Offer(value=iteration + 1, flags=_HAS_TRACKER | (_IS_THERE if is_there else 0))

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
