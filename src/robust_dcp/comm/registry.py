"""Which link belongs to which process group. Each process makes one link per group and keeps it while the group lives.

This module never sends anything: a link connects at its first use. Only ``Channel.for_group`` calls it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from robust_dcp.comm import process_group
from robust_dcp.comm.link import Link
from robust_dcp.comm.meeting import Meeting

__all__ = ["link_for", "local_link"]


class _Registry:
    """The links of this process by group. The references are weak, so a destroyed group takes its link along."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakKeyDictionary[Any, Link] = weakref.WeakKeyDictionary()
        self._of_the_parent: list[dict[Any, Link]] = []

    def find_or_make(self, parent: Any) -> Link:
        process_group.members(parent)  # raises if this process is not in the group: torch then passes a number
        with self._lock:
            if parent not in self._links:
                self._links[parent] = link = _make_link(parent)
                weakref.finalize(parent, link.close)  # this runs at exit too, before Python clears modules
            return self._links[parent]

    def forget_all(self) -> None:
        """Forget all links in a forked child. The connections are the parent's, and gloo's threads do not exist
        here."""
        self._lock = threading.Lock()
        self._of_the_parent.append(dict(self._links))
        self._links.clear()


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.forget_all)


def link_for(parent: Any) -> Link:
    """The link among the members of ``parent``.

    Raises:
        ValueError: this process is not a member of ``parent``.
    """
    return _registry.find_or_make(parent)


def local_link(global_rank: int = 0) -> Link:
    """A link for a rank that talks to nobody."""
    return Link(rank=0, ranks=(global_rank,), meeting=None)


def _make_link(parent: Any) -> Link:
    rank, ranks = process_group.members(parent)
    if len(ranks) == 1:
        return local_link(ranks[0])
    name = f"robust_dcp/{process_group.name_of(parent)}"
    meeting = Meeting(process_group.store_opener(parent), name, rank)
    return Link(rank=rank, ranks=ranks, meeting=meeting, store_host=process_group.store_host(parent))
