"""Which node this rank is on. Ranks on one node share its page cache and its drives.

Two ranks are on one node if they report the same host name and boot id. To set nodes by hand, use
``ROBUST_DCP_RANKS_PER_NODE=8``: ranks 0 to 7 of a group are then one node, 8 to 15 the next, wherever they run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from robust_dcp.environment import value_of

RANKS_PER_NODE = "ROBUST_DCP_RANKS_PER_NODE"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_of(rank: int, environment: Mapping[str, str] = os.environ) -> int:
    """A positive number of 63 bits. It is the same on all ranks that share a node.

    Raises:
        ValueError: the value of the environment variable is not a number of ranks.
    """
    number = _given_node(rank, environment)
    if number is not None:
        return number
    boot = ""
    with contextlib.suppress(OSError):  # there is none outside Linux
        boot = BOOT_ID.read_text().strip()
    # Use both. Containers on different machines may share a name; so may machines on different networks.
    name = f"host {socket.gethostname()} boot {boot}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 | 1


def node_name(rank: int, environment: Mapping[str, str] = os.environ) -> str:
    """The host name, for people. If nodes are set by hand, the number of the node follows.

    Raises:
        ValueError: as :func:`node_of`.
    """
    number = _given_node(rank, environment)
    return socket.gethostname() if number is None else f"{socket.gethostname()} node {number - 1}"


def _given_node(rank: int, environment: Mapping[str, str]) -> int | None:
    """The number of the node, from 1 on, if nodes are set by hand."""
    number = value_of(RANKS_PER_NODE, environment)
    return None if number is None else rank // int(number) + 1
