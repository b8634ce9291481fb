"""The checkpoints of a run: steps, which one is the latest, and which ones are kept."""

from typing import TYPE_CHECKING

from robust_dcp.on_demand import names_from

if TYPE_CHECKING:
    from robust_dcp.manager.manager import CheckpointManager, LoadedCheckpoint, Skipped
    from robust_dcp.manager.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy
    from robust_dcp.manager.series import Checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "LoadedCheckpoint",
    "Skipped",
]

__getattr__, __dir__ = names_from(
    __name__,
    {
        "robust_dcp.manager.series": ("Checkpoint",),
        "robust_dcp.manager.manager": ("CheckpointManager", "LoadedCheckpoint", "Skipped"),
        "robust_dcp.manager.policies": ("KeepBest", "KeepEvery", "KeepLast", "KeepPolicy"),
    },
)
