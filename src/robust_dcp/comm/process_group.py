"""What depends on the version of torch: who is in a group, which store it meets in, how a gloo group is made.

Whatever was added or is private is looked for before it is used; torch 2.7 to 2.15 need nothing else of the package
to change. Called by the link when it connects; it keeps no state.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch.distributed as dist

__all__ = ["connect", "is_initialised", "members", "name_of", "own_store", "parent_of", "with_prefix"]

STORE_TIMEOUT_SECONDS = 30.0
"""How long one question to the store may take; it answers in microseconds unless its host is gone."""


def is_initialised() -> bool:
    """Whether there are other ranks to talk to at all."""
    return dist.is_available() and dist.is_initialized()


def parent_of(process_group: dist.ProcessGroup | None) -> Any:
    """The group meant: ``None`` is the default group."""
    return dist.group.WORLD if process_group is None else process_group


def members(parent: Any) -> tuple[int, tuple[int, ...]]:
    """This process's rank within ``parent`` and the global ranks of its members, in group order.

    Raises:
        ValueError: this process is not a member.
    """
    rank = dist.get_rank(parent)
    if rank < 0:
        raise ValueError("this rank is not a member of the process group that it was given")
    return rank, tuple(dist.get_process_group_ranks(parent))


def name_of(parent: Any) -> str:
    """The name of ``parent``, the same on all its members."""
    return str(parent.group_name)


def own_store(parent: Any) -> Any:
    """The store that the members of ``parent`` share, over a connection of our own where that can be had.

    A client of a ``TCPStore`` serves one call at a time: a thread that waits for a key would keep us waiting too.
    """
    store = _store_of(parent)
    clone = getattr(store, "clone", None)
    if clone is not None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can be cloned
            store = clone()
            store.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_SECONDS))
    return store


def _store_of(parent: Any) -> Any:
    get_group_store = getattr(parent, "get_group_store", None)
    if get_group_store is not None:
        with contextlib.suppress(RuntimeError):  # a group made by hand may have none
            store = get_group_store()
            if store is not None:
                return store
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def with_prefix(store: Any, prefix: str) -> Any:
    """``store``, with ``prefix`` before every key."""
    return dist.PrefixStore(prefix, store)


def connect(store: Any, prefix: str, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """A gloo backend among ``size`` processes that call this with the same ``prefix``; no other process takes part.

    ``GLOO_SOCKET_IFNAME`` chooses the interface, as for every gloo group. It is not registered with
    ``torch.distributed``: no other code can find it, and it ends when its last reference does.

    Raises:
        RuntimeError: some of them did not come within ``timeout``, or cannot be reached.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, timeout)
