"""The options of a copy of a checkpoint: how fast, how patient, and what counts as verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

__all__ = ["CopyOptions", "VerifyCopy"]

VerifyCopy = Literal["store", "read"]

_MIB: Final = 1 << 20
_LEAST_PART_NBYTES: Final = 5 * _MIB  # S3 takes no smaller parts


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """How a checkpoint is copied.

    Args:
        threads: how many files are sent at once.
        part_bytes: how much is sent in one call. A file of more than 9,000 parts gets larger ones, since S3 takes at
            most 10,000.
        limit_bytes_per_second: how much is sent in a second at most, by all threads of this process together. ``None``
            sets no limit.
        retries: how often a call that failed is made once more, if that can help.
        call_timeout_seconds: how long one call may take.
        verify: ``"store"``: take the store's own checksum where it is provably one of the whole content (S3's ETag, if
            it is the MD5 of what was sent), and read the file back where there is none. ``"read"``: always read back.
        source_options, target_options: what fsspec passes to the store, such as ``{"endpoint_url": …}``.

    Raises:
        ValueError: an option is out of range.
    """

    threads: int = 8
    part_bytes: int = 16 * _MIB
    limit_bytes_per_second: float | None = None
    retries: int = 5
    call_timeout_seconds: float = 120.0
    verify: VerifyCopy = "store"
    source_options: Mapping[str, Any] = field(default_factory=dict)
    target_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verify not in get_args(VerifyCopy):
            raise ValueError(f'verify is "store" or "read", not {self.verify!r}')
        least = {"threads": 1, "part_bytes": _LEAST_PART_NBYTES, "retries": 0}
        for name, at_least in least.items():
            if getattr(self, name) < at_least:
                raise ValueError(f"{name} must be at least {at_least}, got {getattr(self, name)}")
        for name in ("limit_bytes_per_second", "call_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
