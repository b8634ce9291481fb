"""The options of ``RobustWriter`` and ``RobustReader``: how the files of a checkpoint are written and read.

This module owns the options, their checks, and defaults that fit the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, Literal, TypedDict, TypeVar, get_type_hints

from robust_dcp.storage.layouts.places import PAGE_NBYTES, TORCH, Layout
from robust_dcp.storage.layouts.safetensors import SAFETENSORS

_MIB: Final = 1 << 20

BLOCK_NBYTES: Final = 8 * _MIB
"""The size of one write or read. Four threads that copy less at a time between host and device do not reach 0.95 of
what one large copy does.
"""

BLOCKS_PER_THREAD: Final = 2
"""One block is written while a device copies into the other."""

_FILES_PER_RANK: Final = 2
"""With direct I/O several threads can write one file at once. Writes through the page cache to one file take turns."""

_LEAST: Final = {
    "threads": 1,
    "files_per_rank": 1,
    "buffer_bytes": BLOCKS_PER_THREAD * PAGE_NBYTES,
    "parity_nodes": 2,
}


_LEAST_READ_BLOCK_NBYTES: Final = 64 << 10


LAYOUTS: Final[dict[str, Layout]] = {layout.name: layout for layout in (TORCH, SAFETENSORS)}


def layout_named(name: str) -> Layout:
    """Find the layout called ``name``.

    Raises:
        ValueError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {name!r}")
    return LAYOUTS[name]


class WriteKeywords(TypedDict, total=False):
    """:class:`WriteOptions` as keywords of ``RobustWriter``."""

    layout: str
    threads: int | None
    files_per_rank: int | None
    buffer_bytes: int | None
    direct: bool | None
    overwrite: bool
    report: bool
    parity_nodes: int | None


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How ``RobustWriter`` writes. An option that is ``None`` is chosen for the machine and the ranks on it.

    Args:
        layout: ``"torch"``: files of torch-save records, which DCP's ``FileSystemReader`` and Megatron-Core read.
            ``"safetensors"``: files that ``HuggingFaceStorageReader`` and ``safetensors`` read. Objects and some dtypes
            do not fit into these; each rank writes them to one more file of records, which only ``RobustReader`` reads.
            This layout needs ``RobustPlanner`` and a directory without a checkpoint, because readers of safetensors
            read every file in it.
        threads: how many threads write at the same time in each rank. The default is a few, depending on the cores and
            ranks of the node.
        files_per_rank: how many files hold a rank's tensors; the same on all ranks. The default is ``threads`` if that
            is given, else 2.
        buffer_bytes: limit for the memory of each rank that data passes through, whatever the sizes of tensors. The
            default is 1/64 of the node's memory, divided among its ranks. Blocks, which have 8 MiB, get smaller, and
            threads fewer, to keep it.
        direct: ``None``: use direct I/O where the file system has it. ``True``: always; a file system without it is a
            ``StorageError``. ``False``: use the page cache. The last few bytes of each file always go through it.
        overwrite: whether a committed checkpoint in the directory may be replaced.
        report: whether each save leaves ``.robust_dcp.report.json`` beside the checkpoint: how long each rank took, how
            it wrote, how the plan was made, and how large the modules are.
        parity_nodes: where each node saves to a drive of its own: about how many nodes form a group. Beside training
            they make parity, for ``1 / (parity_nodes - 1)`` more bytes, by which the checkpoint outlives the loss of
            any one node of each group. 2 is a mirror. The same on all ranks. ``None``: no parity.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> options = robust_dcp.WriteOptions(threads=2, buffer_bytes=64 << 20, overwrite=False)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     writer = robust_dcp.RobustWriter(path, options=options)
        ...     report = robust_dcp.save({"w": torch.ones(4)}, storage_writer=writer)
        >>> report.peak_buffer_nbytes <= options.buffer_bytes
        True
    """

    layout: str = "torch"
    threads: int | None = None
    files_per_rank: int | None = None
    buffer_bytes: int | None = None
    direct: bool | None = None
    overwrite: bool = True
    report: bool = True
    parity_nodes: int | None = None

    def __post_init__(self) -> None:
        layout_named(self.layout)
        _check_flags(self)
        for name, at_least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < at_least:
                raise ValueError(f"{name} must be at least {at_least}, got {value}")

    @property
    def n_files(self) -> int:
        """How many files hold a rank's tensors.

        All ranks must agree on it, and they may run on different machines. So the default does not depend on the
        machine.
        """
        return self.files_per_rank or self.threads or _FILES_PER_RANK

    def fitted(self, page_nbytes: int) -> tuple[int, int]:
        """(threads, bytes of a block) that together stay within ``buffer_bytes``. Blocks are whole pages."""
        buffer_bytes = self.buffer_bytes
        if buffer_bytes is None:
            buffer_bytes = min(max(_node_nbytes() // 64 // ranks_on_this_node(), 32 * _MIB), 1024 * _MIB)
        threads = default_threads() if self.threads is None else self.threads
        threads = min(threads, max(buffer_bytes // (BLOCKS_PER_THREAD * page_nbytes), 1))
        block_nbytes = min(BLOCK_NBYTES, buffer_bytes // (BLOCKS_PER_THREAD * threads))
        return threads, max(block_nbytes // page_nbytes, 1) * page_nbytes


_hints_of = cache(get_type_hints)  # it compiles the text of each: 0.7 ms


def _check_flags(options: WriteOptions | ReadOptions) -> None:
    for name, hint in _hints_of(type(options)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(options, name)
        if hint in (bool, bool | None) and value not in (True, False) and not (value is None and hint is not bool):
            raise ValueError(f"{name} is True{' or False' if hint is bool else ', False or None'}, not {value!r}")


Verify = bool | Literal["all"]
"""``True``: verify what costs little. ``"all"``: data that cannot be verified is an error. ``False``: verify
nothing.
"""


class ReadKeywords(TypedDict, total=False):
    """:class:`ReadOptions` as keywords of ``RobustReader``."""

    threads: int | None
    verify_checksums: Verify
    trusted: bool
    buffer_bytes: int
    direct: bool | None
    share_reads: bool | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How ``RobustReader`` reads.

    Args:
        threads: how many reads run at once. The default is 2 for each core of this rank's share of the node, but at
            least 4 and at most 8.
        verify_checksums: whether to compare whole items and slices with the CRC-32s that were saved. ``True``: compare
            everything that can be verified with little extra reading. Checkpoints by DCP have one checksum for each
            item, so slices of their large items are not compared. ``"all"``: compare everything, and read all of an
            item if that is needed; an item without a checksum is an error. ``False``: compare nothing, to rescue what
            is left of a damaged checkpoint.
        trusted: allow items that are not tensors to run code when they are loaded, as DCP does.
        buffer_bytes: limit for bytes that were read and not yet handed over. A single item may exceed it.
        direct: whether to read past the page cache (``O_DIRECT``). ``None``: do so where the file system can, the bytes
            are not in the cache, and no other rank of the node reads the same. Each large read asks the cache first;
            asking does not change it. ``True``: always; a file system that cannot is an error. ``False``: never. Small
            reads always go through the cache.
        share_reads: if several ranks need the same bytes, one of them reads them and sends them to the others over the
            network. ``None``: do so where these ranks are on several nodes. Pass the same value on all ranks. Only
            ``robust_dcp.load`` shares reads, and only if the planner's ``commit_tensor`` is that of
            ``DefaultLoadPlanner``.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> options = robust_dcp.ReadOptions(verify_checksums="all", buffer_bytes=64 << 20)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=path)
        ...     reader = robust_dcp.RobustReader(path, options=options)
        ...     report = robust_dcp.load({"w": torch.zeros(4)}, storage_reader=reader)
        >>> report.unverified_nbytes, report.peak_buffer_nbytes <= options.buffer_bytes
        (0, True)
    """

    threads: int | None = None
    verify_checksums: Verify = True
    trusted: bool = False
    buffer_bytes: int = 1 << 30
    direct: bool | None = None
    share_reads: bool | None = None

    def __post_init__(self) -> None:
        if self.verify_checksums not in (True, False, "all"):
            raise ValueError(f'verify_checksums is True, False or "all", not {self.verify_checksums!r}')
        _check_flags(self)
        for name in ("threads", "buffer_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    def fitted(self) -> tuple[int, int]:
        """(threads, bytes of a block), such that all blocks together take at most half of ``buffer_bytes``.

        Each thread may use one block, and as many more may hold groups of items.
        """
        threads = default_threads(least=4, most=8) if self.threads is None else self.threads
        return threads, min(BLOCK_NBYTES, max(_LEAST_READ_BLOCK_NBYTES, self.buffer_bytes // (4 * threads)))


Options = TypeVar("Options")


def given_options(kind: type[Options], options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options of a writer or reader, which were given as an object or by keywords.

    Raises:
        ValueError: both were given, or an option is out of range.
        TypeError: there is no such option.
    """
    if options is not None and keywords:
        raise ValueError(
            f"{', '.join(keywords)} and options were given: give all options in one way, or pass "
            f"options=dataclasses.replace(options, {next(iter(keywords))}=…)"
        )
    unknown = [name for name in keywords if name not in kind.__annotations__]
    if unknown:
        near = get_close_matches(unknown[0], kind.__annotations__, n=1, cutoff=0.5)
        what = f"; did you mean {near[0]}?" if near else f": {', '.join(kind.__annotations__)}"
        writer = "RobustWriter" if kind is WriteOptions else "RobustReader"
        raise TypeError(f"{writer} has no option {unknown[0]!r}{what}")
    return kind(**keywords) if options is None else options


def default_threads(*, least: int = 2, most: int = 4) -> int:
    """How many threads keep a drive busy without taking all cores of a node. They wait for the drive most of the
    time.
    """
    return min(max(2 * available_cores() // ranks_on_this_node(), least), most)


@cache
def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _node_nbytes() -> int:
    """The memory that this process and the other ranks of its node may use."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            limit = file.read().strip()
    except OSError:  # there are no control groups, or only version 1
        limit = ""
    return min(nbytes, int(limit)) if limit.isdecimal() else nbytes


def ranks_on_this_node() -> int:
    """How many ranks the launcher has started on this node; 1 if it does not say."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return max(int(given), 1) if given.isdecimal() else 1
