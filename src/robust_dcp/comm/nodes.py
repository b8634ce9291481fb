"""Which ranks of a group share a node, and whether gathers go through node leaders: one map, the same on all ranks.

It owns what a rank says of its node, the two environment variables, and the map that is made of what all ranks said.
It never talks to anyone: ranks publish their claims when they connect (:mod:`robust_dcp.comm.connect`), the last to
come makes the map and publishes it, and all others read those bytes. The gather asks it who leads whom.

* ``ROBUST_DCP_RANKS_PER_NODE=n``: the ranks ``0 .. n-1``, ``n .. 2n-1``, ... of the group count as nodes, wherever they
  run. Without it, ranks of one host and boot do. A rank without it, in a group where others have it, is on its host.
* ``ROBUST_DCP_TWO_LEVEL_GATHER=auto|on|off``: ``auto`` (default) for gathers in two levels from
  ``TWO_LEVEL_FROM_RANKS`` ranks on, if there are several nodes and one of them has several ranks. What rank 0 of the
  group has counts for all; the values of other ranks are checked, and otherwise ignored.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import msgspec

__all__ = ["RANKS_PER_NODE", "TWO_LEVEL_FROM_RANKS", "TWO_LEVEL_GATHER", "NodeClaim", "NodeMap", "check_environment"]

RANKS_PER_NODE = "ROBUST_DCP_RANKS_PER_NODE"
TWO_LEVEL_GATHER = "ROBUST_DCP_TWO_LEVEL_GATHER"

TWO_LEVEL_FROM_RANKS = 64
"""Smaller groups gather in one level: a second one costs a round of frames, and their coordinator is not busy."""

Switch = Literal["auto", "on", "off"]

_SWITCHES = ("auto", "on", "off")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NodeClaim(msgspec.Struct, array_like=True, frozen=True):
    """What a rank says of itself. ``node``: equal on ranks that share one; ``switch``: its wish for two levels."""

    node: str
    switch: Switch

    @classmethod
    def of_this_process(cls, rank: int, environment: Mapping[str, str] = os.environ) -> NodeClaim:
        """Never raises: a malformed variable counts as not set here, and :func:`check_environment` tells of it."""
        ranks_per_node, switch = _ranks_per_node(environment), _switch(environment)
        if ranks_per_node is None:
            boot = ""
            with contextlib.suppress(OSError):  # there is none outside Linux
                boot = _BOOT_ID.read_text().strip()
            # Containers may have equal names on different machines, and machines equal names on different networks.
            node = f"host {socket.gethostname()} boot {boot}"
        else:
            node = f"node {rank // ranks_per_node} of {ranks_per_node} ranks each"
        return cls(node, switch or "auto")


class NodeMap(msgspec.Struct, array_like=True, frozen=True):
    """The nodes of a group.

    Attributes:
        node_of: for each rank of the group the number of its node, in the order of the nodes' first ranks.
        switch: of rank 0.
    """

    node_of: tuple[int, ...]
    switch: Switch

    @classmethod
    def of(cls, claims: Sequence[NodeClaim]) -> NodeMap:
        """The map for the claims of all ranks, in rank order."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(claim.node, len(numbers)) for claim in claims), claims[0].switch)

    @classmethod
    def unknown(cls, size: int) -> NodeMap:
        """For ``size`` ranks of which not all have said where they are: each is alone, and gathers have one level."""
        return cls(tuple(range(size)), "off")

    @property
    def gathers_in_two_levels(self) -> bool:
        if self.switch != "auto":
            return self.switch == "on"
        n_nodes = len(set(self.node_of))
        return len(self.node_of) >= TWO_LEVEL_FROM_RANKS and 1 < n_nodes < len(self.node_of)

    def leaders(self, coordinator_rank: int) -> tuple[int, ...]:
        """For each rank the leader of its node: its lowest rank, but on the coordinator's node the coordinator."""
        lowest: dict[int, int] = {self.node_of[coordinator_rank]: coordinator_rank}
        return tuple(lowest.setdefault(node, rank) for rank, node in enumerate(self.node_of))


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a variable of this module that has a value without meaning.

    Raises:
        ValueError: says which, what was found and what is expected.
    """
    if _ranks_per_node(environment) is None and environment.get(RANKS_PER_NODE):
        raise ValueError(f"{RANKS_PER_NODE} is {environment[RANKS_PER_NODE]!r}: set it to a number of ranks from 1 on")
    if _switch(environment) is None:
        raise ValueError(f"{TWO_LEVEL_GATHER} is {environment[TWO_LEVEL_GATHER]!r}: set it to one of {_SWITCHES}")


def _ranks_per_node(environment: Mapping[str, str]) -> int | None:
    text = environment.get(RANKS_PER_NODE, "")
    # Digits only, and few: int() would take " +1_0 ", and digits of other scripts.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0 else None


def _switch(environment: Mapping[str, str]) -> Switch | None:
    text = environment.get(TWO_LEVEL_GATHER) or "auto"
    return cast(Switch, text) if text in _SWITCHES else None
