"""The environment of a process: the variables of robust_dcp with what each may be, and the node that it runs on.

A job that asks for robust_dcp by a mistyped value would train for hours without it. So a value that nobody can
understand ends the process at ``import torch``. This module needs the standard library only, because it is asked there.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

_PREFIX: Final = "ROBUST_DCP_"
_SWITCH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.lower() not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return choices[text.lower()]

    return parse


def _whole_number_from(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # int() would also accept " +1_0 " and digits of other scripts
        if re.fullmatch("0*[1-9][0-9]{0,15}", text) is None or int(text) < least:
            raise ValueError(f"a whole number from {least} on")
        return int(text)

    return parse


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("a positive number of seconds")
    return value


VARIABLES: Final[Mapping[str, Callable[[str], Any]]] = {
    "ROBUST_DCP": _one_of(_SWITCH),
    "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": _positive_seconds,
    "ROBUST_DCP_PARITY_NODES": _whole_number_from(2),
    "ROBUST_DCP_PROGRESS": _one_of(_SWITCH),
    "ROBUST_DCP_PROVE": _one_of(_SWITCH),
    "ROBUST_DCP_RANKS_PER_NODE": _whole_number_from(1),
    "ROBUST_DCP_SAVE_FAILURE": _one_of({"raise": "raise", "warn": "warn"}),
    "ROBUST_DCP_STAGING": str,
    "ROBUST_DCP_TRUSTED": _one_of(_SWITCH),
    "ROBUST_DCP_WRITER_THREADS": _whole_number_from(1),
}
"""By name: what makes a value of the text. Its ``ValueError`` says what the text may be."""


def value_of(variable: str, environment: Mapping[str, str] = os.environ) -> Any:
    """The value of a variable; ``None`` if it is not set, or empty.

    Raises:
        ValueError: it has a value that makes no sense. The message says which, what is expected and what was found.
    """
    text = environment.get(variable, "")
    if not text:
        return None
    try:
        return VARIABLES[variable](text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r} in the environment: expected {error}") from None


def check(environment: Mapping[str, str] = os.environ, *, is_asked_for: bool = True) -> None:
    """Look at all variables.

    Args:
        is_asked_for: whether the process uses robust_dcp. Otherwise names that are mistyped harm nobody.

    Raises:
        ValueError: as :func:`value_of`, for the first one that makes no sense; or a name is almost that of a variable.
    """
    for variable in VARIABLES:
        value_of(variable, environment)
    ends = {each.removeprefix(_PREFIX): each for each in VARIABLES if each.startswith(_PREFIX)}
    for name, text in environment.items() if is_asked_for else ():
        if text and name.startswith(_PREFIX) and name not in VARIABLES:
            from difflib import get_close_matches  # nobody else needs it here

            near = get_close_matches(name.removeprefix(_PREFIX), ends, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"{name}={text!r} in the environment: expected the name {ends[near[0]]}")


# Ranks on one node share its page cache and its drives. Two ranks are on one node if they report the same host name and
# boot id. Where that does not tell, ROBUST_DCP_RANKS_PER_NODE=8 says that ranks 0 to 7 of a group are one node.


@cache
def boot_id() -> str:
    """An id of this boot of this machine; empty if the system does not have one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:  # only Linux has it
        return ""


def node_of(rank: int) -> int:
    """A positive number of 63 bits. It is the same on all ranks that share a node.

    Raises:
        ValueError: as :func:`value_of`.
    """
    ranks_per_node = value_of("ROBUST_DCP_RANKS_PER_NODE")
    if ranks_per_node is not None:
        return rank // int(ranks_per_node) + 1
    # Use both. Containers on different machines may share a name; so may machines on different networks.
    name = f"host {socket.gethostname()} boot {boot_id()}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 | 1


def node_name(rank: int) -> str:
    """The host name, for people. If nodes are set by hand, the number of the node follows.

    Raises:
        ValueError: as :func:`value_of`.
    """
    ranks_per_node = value_of("ROBUST_DCP_RANKS_PER_NODE")
    return socket.gethostname() + ("" if ranks_per_node is None else f" node {rank // ranks_per_node}")
