"""Which link belongs to which process group and purpose: made once in a process, kept while the group lives.

It never sends anything: a link connects when it is first used. Called by ``Channel.for_group`` only.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any

from robust_dcp.comm import process_group
from robust_dcp.comm.connect import open_gloo
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.link import Connection, Link
from robust_dcp.comm.nodes import NodeMap
from robust_dcp.comm.roll_call import LocalStore, RollCall
from robust_dcp.comm.transport import LocalTransport

__all__ = ["link_for", "local_link"]


class _Registry:
    """The links of this process, by group (weakly: a destroyed group takes its links along) and purpose."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakKeyDictionary[Any, dict[str, Link]] = weakref.WeakKeyDictionary()
        self._of_the_parent: list[dict[Any, dict[str, Link]]] = []

    def find_or_make(self, parent: Any, purpose: str) -> Link:
        process_group.members(parent)  # for a group that this process is not in, torch has no object but a number
        with self._lock:
            links = self._links.setdefault(parent, {})
            if purpose not in links:
                links[purpose] = _make_link(parent, purpose)
            return links[purpose]

    def close_all(self) -> None:
        """At exit, before the interpreter takes modules apart, so that gloo's threads end in order."""
        for links in list(self._links.values()):
            for link in links.values():
                link.close_transport()

    def forget_all(self) -> None:
        """In a forked child: the connections are the parent's, and gloo would wait for threads that are not here."""
        self._lock = threading.Lock()
        self._of_the_parent.append(dict(self._links))
        self._links.clear()


_registry = _Registry()
atexit.register(_registry.close_all)
os.register_at_fork(after_in_child=_registry.forget_all)


def link_for(parent: Any, purpose: str) -> Link:
    """The link among the members of ``parent`` for ``purpose``.

    Raises:
        ValueError: this process is not a member of ``parent``.
    """
    return _registry.find_or_make(parent, purpose)


def local_link(global_rank: int = 0) -> Link:
    """A link to nobody else."""
    return Link(
        rank=0,
        ranks=(global_rank,),
        roll_call=RollCall(LocalStore(), 0),
        open_transport=lambda generation, deadline: Connection(LocalTransport(), NodeMap.unknown(1)),
    )


def _make_link(parent: Any, purpose: str) -> Link:
    rank, ranks = process_group.members(parent)
    if len(ranks) == 1:
        return local_link(ranks[0])
    store = process_group.own_store(parent)
    prefix = f"robust_dcp/{process_group.name_of(parent)}/{purpose}"
    # A store can outlive a process group, which is then made again under the same name. All its members count alike
    # how often they came, so nobody reads what an earlier life left behind.
    life = store.add(f"{prefix}/lives/{rank}", 1)
    prefix = f"{prefix}/{life}"
    roll_call = RollCall(process_group.with_prefix(store, prefix), rank)

    def open_transport(generation: int, deadline: Deadline) -> Connection:
        return open_gloo(store, prefix, roll_call, rank, len(ranks), generation, deadline)

    return Link(rank=rank, ranks=ranks, roll_call=roll_call, open_transport=open_transport)
