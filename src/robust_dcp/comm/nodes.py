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

__all__ = ["RANKS_PER_NODE", "node_of"]

RANKS_PER_NODE = "ROBUST_DCP_RANKS_PER_NODE"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_of(rank: int, environment: Mapping[str, str] = os.environ) -> int:
    """A positive number of 63 bits. It is the same on all ranks that share a node.

    Raises:
        ValueError: the value of the environment variable is not a number of ranks.
    """
    text = environment.get(RANKS_PER_NODE, "")
    if text:
        # Check the digits ourselves: int() would also accept " +1_0 " and digits of other scripts.
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            raise ValueError(f"{RANKS_PER_NODE} is {text!r}: set it to a number of ranks from 1 on")
        return rank // int(text) + 1
    boot = ""
    with contextlib.suppress(OSError):  # there is none outside Linux
        boot = _BOOT_ID.read_text().strip()
    # Use both. Containers on different machines may share a name; so may machines on different networks.
    name = f"host {socket.gethostname()} boot {boot}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 | 1
