"""The checkpoints of a run: steps, which one is the latest, and which ones are kept."""

from robust_dcp.manager.checkpoints import Checkpoint
from robust_dcp.manager.manager import CheckpointManager, LoadedCheckpoint, Skipped
from robust_dcp.manager.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy

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
