"""State dicts of which every value tells to which generation it belongs, and what a checkpoint holds of them.

Owns what is saved, the two readers that judge it (stock's and ours), and which processes a rank has started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import robust_dcp
from robust_dcp import RobustReader

__all__ = [
    "child_pids",
    "files_not_named",
    "generation_in",
    "is_gone",
    "make_state",
    "set_generation",
    "writer_pids",
]

_LARGE = 1 << 18
_N_SMALL = 20


def make_state(ranks: Sequence[int], generation: int) -> dict[str, Any]:
    """What these ranks hold together: some of it all of them, some of it each alone."""
    state: dict[str, Any] = {"shared": torch.zeros(1000), "step": generation, "nested": {"words": ""}}
    for rank in ranks:
        state[f"large.{rank}"] = torch.zeros(_LARGE + rank)
        state[f"integers.{rank}"] = torch.zeros(5000, dtype=torch.uint8)
        state[f"strided.{rank}"] = torch.zeros(300, 40, dtype=torch.bfloat16).t()
        for number in range(_N_SMALL):
            state[f"small.{rank}.{number}"] = torch.zeros(number + 1)
    set_generation(state, generation)
    return state


def set_generation(state: dict[str, Any], generation: int) -> None:
    """Change all values, in place, as an optimizer does."""
    state["step"] = generation
    state["nested"]["words"] = f"generation {generation}"
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value.copy_(_value(key, value, generation))


def generation_in(path: str, ranks: Sequence[int], known: Sequence[int]) -> int | str:
    """The generation that both readers find, whole; or what is wrong."""
    found = []
    for name, load in (("stock", _load_with_stock), ("ours", _load_with_ours)):
        state = make_state(ranks, -1)  # nothing in it was saved
        try:
            load(state, path)
        except BaseException as error:  # CheckpointException is no Exception
            return f"{name}: {type(error).__name__}: {error!s:.1000}"
        fitting = [generation for generation in known if _is_of(state, generation)]
        if not fitting:
            return f"{name}: step {state['step']} is loaded, and not everything is of one of the generations {known}"
        found += fitting
    return found[0] if len(set(found)) == 1 else f"stock and ours load other generations: {found}"


def files_not_named(path: str) -> list[str]:
    """Data files and temporary files that are no part of the checkpoint."""
    metadata = FileSystemReader(path).read_metadata()
    storage_data: dict[Any, Any] = metadata.storage_data
    named = {info.relative_path for info in storage_data.values()}
    names = sorted(os.listdir(path))
    return [name for name in names if name.endswith(".tmp") or not (name in named or name.startswith("."))]


def _value(key: str, like: torch.Tensor, generation: int) -> torch.Tensor:
    """Whole numbers below 251, which all of the dtypes can hold; another one at each place, in each tensor."""
    first = sum(key.encode()) + 31 * generation
    return (torch.arange(like.numel()).add_(first) % 251).reshape(like.shape).to(like.dtype)


def _is_of(state: dict[str, Any], generation: int) -> bool:
    if state["step"] != generation or state["nested"]["words"] != f"generation {generation}":
        return False
    return all(
        torch.equal(value, _value(key, value, generation))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    )


def _load_with_stock(state: dict[str, Any], path: str) -> None:
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)


def _load_with_ours(state: dict[str, Any], path: str) -> None:
    robust_dcp.load(state, storage_reader=RobustReader(path, verify_checksums="all"), no_dist=True)


def child_pids() -> list[int]:
    """The processes that this one has started; those that have ended are not among them.

    A thread's list of children is not asked: those of a thread that ends move to another one meanwhile.
    """
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # that process has ended meanwhile
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


def writer_pids() -> list[int]:
    """The writer processes of this rank."""
    pids: list[int] = []
    for pid in child_pids():
        with contextlib.suppress(OSError):
            if b"robust_dcp.writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
