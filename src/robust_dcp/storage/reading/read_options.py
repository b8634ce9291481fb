"""The options of ``RobustReader``: how the items of a checkpoint are read.

This module owns the options, their checks and their defaults. Users and ``reader`` make them; ``load`` uses
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from robust_dcp.storage.reading.stored_item import Verify
from robust_dcp.storage.writing.write_options import BLOCK_NBYTES, default_threads

_LEAST_BLOCK_NBYTES: Final = 64 << 10


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
        for name in ("threads", "buffer_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    def fitted(self) -> tuple[int, int]:
        """(threads, bytes of a block), such that all blocks together take at most half of ``buffer_bytes``.

        Each thread may use one block, and as many more may hold groups of items.
        """
        threads = default_threads(least=4, most=8) if self.threads is None else self.threads
        return threads, min(BLOCK_NBYTES, max(_LEAST_BLOCK_NBYTES, self.buffer_bytes // (4 * threads)))
