"""How the items of a checkpoint are read: the options of ``RobustReader`` that concern them.

Owns their checks, and the size of a block. Called by ``reader``; ``read_items`` and its parts ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from robust_dcp.storage.reading.verification import Verify

__all__ = ["BLOCK_NBYTES", "ReadOptions"]

BLOCK_NBYTES: Final = 4 << 20
"""One read: large enough for a device to be at its speed, small enough to be divided between threads."""

_LEAST_BLOCK_NBYTES: Final = 64 << 10


@dataclass(frozen=True)
class ReadOptions:
    """See ``RobustReader``.

    Raises:
        ValueError: a number that must be positive is not.
    """

    threads: int
    verify_checksums: Verify
    trusted: bool
    buffer_bytes: int
    extension_registry: Any
    direct: bool | None
    block_bytes: int = BLOCK_NBYTES

    def __post_init__(self) -> None:
        if self.verify_checksums not in (True, False, "all"):
            raise ValueError(f'verify_checksums is True, False or "all", not {self.verify_checksums!r}')
        for name in ("threads", "buffer_bytes", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def fitted_block_nbytes(self) -> int:
        """Bytes of a block, so that all blocks take half of ``buffer_bytes`` at most.

        Each thread may have a block for itself, and as many hold groups of items.
        """
        return min(self.block_bytes, max(_LEAST_BLOCK_NBYTES, self.buffer_bytes // (4 * self.threads)))
