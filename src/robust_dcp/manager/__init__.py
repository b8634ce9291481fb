"""The checkpoints of a run: steps, which one is the latest, and which ones are kept."""

from typing import TYPE_CHECKING

from robust_dcp.on_demand import names_from

if TYPE_CHECKING:
    from robust_dcp.manager.manager import CheckpointManager, LoadedCheckpoint, Skipped
    from robust_dcp.manager.policies import Checkpoint, KeepBest, KeepEvery, KeepLast, KeepPolicy

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
        "robust_dcp.manager.manager": ("CheckpointManager", "LoadedCheckpoint", "Skipped"),
        "robust_dcp.manager.policies": ("Checkpoint", "KeepBest", "KeepEvery", "KeepLast", "KeepPolicy"),
    },
)
