"""Names that the manager gives below its root."""

from __future__ import annotations

from typing import Final

__all__ = ["REMOVING_PREFIX"]

REMOVING_PREFIX: Final = ".robust_dcp.removing."
"""A checkpoint that is being removed has this before its name, so that nobody takes it for one."""
