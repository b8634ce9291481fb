"""How a rank's files are written: threads, blocks, memory, direct I/O; and what fits the machine where nobody says.

Owns the options of ``engine`` and their defaults. Made by ``writer``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from robust_dcp.storage.layouts.places import PAGE_NBYTES

__all__ = ["WriteOptions", "default_buffer_bytes", "default_threads"]

_MIB: Final = 1 << 20

BLOCK_NBYTES: Final = 8 * _MIB
BLOCKS_PER_THREAD: Final = 2
"""One that is written while a device copies into the other."""


@dataclass(frozen=True)
class WriteOptions:
    """Options of one rank's writing.

    Attributes:
        threads: that write at the same time, each one block.
        block_bytes: bytes of one write.
        buffer_bytes: bound of the memory that bytes pass through; blocks get smaller, and threads fewer, to keep it.
        direct: ``None`` for direct I/O where the file system has it, ``True`` to insist on it, ``False`` for the page
            cache.
        stripe_paths: directories on other mounts that take the files; empty for the checkpoint's own.
        checksums: whether records get the CRC-32 of their data. Without, they get 0, as from ``torch.save`` after
            ``torch.serialization.set_crc32_options(False)``, and readers verify nothing.
    """

    threads: int = 2
    block_bytes: int = BLOCK_NBYTES
    buffer_bytes: int = 256 * _MIB
    direct: bool | None = None
    stripe_paths: tuple[str, ...] = ()
    checksums: bool = True

    def __post_init__(self) -> None:
        least = {"threads": 1, "block_bytes": PAGE_NBYTES, "buffer_bytes": BLOCKS_PER_THREAD * PAGE_NBYTES}
        for name, at_least in least.items():
            if getattr(self, name) < at_least:
                raise ValueError(f"{name} must be at least {at_least}, got {getattr(self, name)}")

    @classmethod
    def of_this_machine(
        cls,
        *,
        threads: int | None = None,
        block_bytes: int | None = None,
        buffer_bytes: int | None = None,
        direct: bool | None = None,
        stripe_paths: tuple[str, ...] = (),
        checksums: bool = True,
    ) -> WriteOptions:
        """The options given, and for the others what fits this machine and the ranks on it."""
        return cls(
            threads=default_threads() if threads is None else threads,
            block_bytes=BLOCK_NBYTES if block_bytes is None else block_bytes,
            buffer_bytes=default_buffer_bytes() if buffer_bytes is None else buffer_bytes,
            direct=direct,
            stripe_paths=stripe_paths,
            checksums=checksums,
        )

    def fitted(self, page_nbytes: int) -> tuple[int, int]:
        """(threads, bytes of a block) that together stay within ``buffer_bytes``; blocks are whole pages."""
        threads = min(self.threads, max(self.buffer_bytes // (BLOCKS_PER_THREAD * page_nbytes), 1))
        block_nbytes = min(self.block_bytes, self.buffer_bytes // (BLOCKS_PER_THREAD * threads))
        return threads, max(block_nbytes // page_nbytes, 1) * page_nbytes


def default_threads(*, least: int = 2, most: int = 4) -> int:
    """Threads that keep a drive busy without taking a node's cores: they wait for it most of the time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(2 * cores // _ranks_on_this_node(), least), most)


def default_buffer_bytes() -> int:
    """A 64th of the node's memory, divided over its ranks; between 32 MiB and 1 GiB for each."""
    return min(max(_memory_nbytes() // 64 // _ranks_on_this_node(), 32 * _MIB), 1024 * _MIB)


def _ranks_on_this_node() -> int:
    given = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    return max(int(given), 1) if given.isdecimal() else 1


def _memory_nbytes() -> int:
    """What this process may use at most: the machine's memory, or the control group's limit."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:  # no control groups, or their first version
        return nbytes
    return min(nbytes, int(limit)) if limit.isdecimal() else nbytes
