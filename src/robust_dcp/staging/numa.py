"""Places memory on a NUMA node: that of the device, or of the processor, that copies tensors into it.

Linux places a page of memory when it is first touched, on the node of the processor that touches it. This module finds
the processors near a device, and runs threads on these only. ``staging_buffers`` uses it to touch new memory; the
writer process uses it to run near the device, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["cpus_near", "pci_address", "run_near", "stay_near"]

_SYS: Final = Path("/sys")

_THREADS: Final = 4
"""More threads would not be faster, because the memory of a node limits them. And other ranks start beside this one."""


def cpus_near(address: str | None, root: Path = _SYS) -> frozenset[int]:
    """The processors on the node of a device that this process may use.

    Args:
        address: the PCI address of the device; ``None`` for the processor that this thread runs on.
        root: the directory in which the kernel describes its devices.

    Returns:
        All processors of this process if the node is not known, or if this process may use none of its processors.
    """
    own = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    node = _node_of_this_thread(root) if address is None else _node_of(address, root)
    if node is None:
        return own
    return own & _cpus_of(root / f"devices/system/node/node{node}") or own


def pci_address(device: torch.device) -> str | None:
    """The PCI address of a CUDA device, as the kernel writes it; ``None`` if torch does not say."""
    known: Any = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_bus_id"):
        return None
    return f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"


def stay_near(cpus: Iterable[int]) -> None:
    """Let the calling thread, and threads that it starts later, run on these processors only."""
    if cpus:
        with suppress(OSError, AttributeError):  # this process has lost some of them meanwhile, or this is not Linux
            os.sched_setaffinity(0, cpus)


def run_near(cpus: frozenset[int], work: Callable[[int, int], Any], nbytes: int, part_nbytes: int) -> None:
    """Do work on ``nbytes`` bytes with a few threads that run on these processors. The calling thread waits.

    Args:
        work: called with the begin and the end of each part. It must release the GIL.
        part_nbytes: length of each part but the last.

    Raises:
        Exception: any error of ``work``.
    """
    begins = range(0, nbytes, part_nbytes)
    threads = max(min(len(begins), len(cpus), _THREADS), 1)
    with ThreadPoolExecutor(threads, "robust_dcp-touch", stay_near, (cpus,)) as pool:
        for _ in pool.map(lambda begin: work(begin, min(begin + part_nbytes, nbytes)), begins):
            pass


def _node_of(address: str, root: Path) -> int | None:
    try:
        node = int((root / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # a machine with one node may report -1


def _node_of_this_thread(root: Path) -> int | None:
    try:
        cpu = ctypes.CDLL(None).sched_getcpu()
        nodes = sorted((root / "devices/system/node").glob("node[0-9]*"))
    except (OSError, AttributeError):
        return None
    return next((int(node.name.removeprefix("node")) for node in nodes if cpu in _cpus_of(node)), None)


def _cpus_of(node: Path) -> frozenset[int]:
    """The processors in a list such as ``0-3,8``."""
    cpus: set[int] = set()
    with suppress(OSError, ValueError):
        for part in (node / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
