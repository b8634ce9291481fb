"""Copies of checkpoints in durable storage: by a call, or in the background of the job that saves."""

from typing import TYPE_CHECKING

from robust_dcp.on_demand import names_from

if TYPE_CHECKING:
    from robust_dcp.drain.copy import CopyResult, copy_checkpoint
    from robust_dcp.drain.drain import Drain, remove_staging, staging_directory
    from robust_dcp.drain.nearest import nearest_copy
    from robust_dcp.drain.record import awaited_copy, is_awaited

__all__ = [
    "CopyResult",
    "Drain",
    "awaited_copy",
    "copy_checkpoint",
    "is_awaited",
    "nearest_copy",
    "remove_staging",
    "staging_directory",
]

__getattr__, __dir__ = names_from(
    __name__,
    {
        "robust_dcp.drain.copy": ("CopyResult", "copy_checkpoint"),
        "robust_dcp.drain.drain": ("Drain", "remove_staging", "staging_directory"),
        "robust_dcp.drain.nearest": ("nearest_copy",),
        "robust_dcp.drain.record": ("awaited_copy", "is_awaited"),
    },
)
