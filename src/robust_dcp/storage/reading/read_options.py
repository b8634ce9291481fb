"""How the items of a checkpoint are read: the options of ``RobustReader``.

Owns the options, their checks and their defaults. Made by users and by ``reader``; ``plan_reader`` asks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from robust_dcp.storage.reading.verification import Verify
from robust_dcp.storage.writing.write_options import default_threads

__all__ = ["BLOCK_NBYTES", "ReadOptions"]

BLOCK_NBYTES: Final = 4 << 20
"""One read: large enough for a device to be at its speed, small enough to be divided between threads."""

_LEAST_BLOCK_NBYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How ``RobustReader`` reads.

    Args:
        threads: reads in flight; by default 2 for each core of the rank's share of the node, between 4 and 8.
        verify_checksums: compare what is read, whole items and slices, with the CRC-32s that were written with it.
            ``True``: whatever has checksums that cover it, or nearly so; stock's have one for each item, so slices of
            large items by stock are not compared. ``"all"``: all of each item where it takes that, and what has no
            checksum is an error. ``False``: nothing is compared, to save what can be saved of a damaged checkpoint.
        trusted: let items that are no tensors run code when they are loaded, as stock does.
        buffer_bytes: limit for what has been read and not yet handed over. One item may exceed it.
        block_bytes: bytes of one read. Blocks get smaller to keep ``buffer_bytes``.
        direct: read past the page cache (``O_DIRECT``). ``None``: where the file system can do that, the bytes are not
            in the cache (each large read asks first, which changes nothing there), and no other rank of the node reads
            the same. ``True``: always, or it is an error; ``False``: never. Small reads always go through the cache.
        share_reads: of what several ranks of a load need, each byte is read by one of them and passed on to the others
            over the network. ``None``: where these ranks are on several nodes. The same on all ranks. Only
            ``robust_dcp.load`` does that, and only for planners whose ``commit_tensor`` is ``DefaultLoadPlanner``'s.
        extension_registry: as for stock's reader; by default the transforms that come with torch.

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
    block_bytes: int = BLOCK_NBYTES
    direct: bool | None = None
    share_reads: bool | None = None
    extension_registry: Any = None

    def __post_init__(self) -> None:
        if self.verify_checksums not in (True, False, "all"):
            raise ValueError(f'verify_checksums is True, False or "all", not {self.verify_checksums!r}')
        for name in ("threads", "buffer_bytes", "block_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def n_threads(self) -> int:
        """Reads in flight."""
        return default_threads(least=4, most=8) if self.threads is None else self.threads

    @property
    def fitted_block_nbytes(self) -> int:
        """Bytes of a block, so that all blocks take half of ``buffer_bytes`` at most.

        Each thread may have a block for itself, and as many hold groups of items.
        """
        return min(self.block_bytes, max(_LEAST_BLOCK_NBYTES, self.buffer_bytes // (4 * self.n_threads)))
