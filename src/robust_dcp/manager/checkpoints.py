"""The checkpoints that lie below one directory: ours, stock's and Megatron's.

Owns which directories count as checkpoints, and which step they are of. Reads names and small files, never data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from robust_dcp.manager.records import read_record
from robust_dcp.on_demand import errors
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME

__all__ = ["Checkpoint", "find_checkpoints", "step_of", "uncommitted_directories"]

# step_1000, iter_0001000 (Megatron), global_step1000 (DeepSpeed, verl), checkpoint-1000 (transformers), step-1000
# (torchtitan), 1000.
_STEP: Final = re.compile(r"(?P<prefix>[A-Za-z][A-Za-z_=-]*)?(?P<step>\d{1,18})")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: the number in its name.
        path: its directory.
        saved_seconds: when it was committed, in seconds since 1970, by the clock of the file system.
        metrics: what the training loop said of it, such as ``{"loss": 2.31}``.
        provenance: with what it was made: git commit, digest of the configuration, versions, number of ranks.
    """

    step: int
    path: str
    saved_seconds: float = field(compare=False, default=0.0)
    metrics: Mapping[str, float] = field(compare=False, default_factory=dict)
    provenance: Mapping[str, Any] = field(compare=False, default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.path)


def step_of(name: str) -> int | None:
    """The step that the name of a directory says; ``None`` if it is not the name of a checkpoint."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found["step"])


def find_checkpoints(disk: Disk, root: str) -> list[Checkpoint]:
    """The committed checkpoints right below ``root``, by step. One that vanishes meanwhile is none.

    Raises:
        StorageError: ``root`` cannot be looked at.
    """
    found = []
    for step, path in _named_by_step(disk, root):
        try:
            if not disk.exists(os.path.join(path, METADATA_NAME)):  # not by an error, because our errors need torch
                continue
            saved_seconds = disk.modified_seconds(os.path.join(path, METADATA_NAME))
            record = read_record(disk, path)
        except errors.StorageError:
            continue
        found.append(Checkpoint(step, path, saved_seconds, record.metrics, record.provenance))
    return sorted(found)


def uncommitted_directories(disk: Disk, root: str) -> list[str]:
    """Directories that have the name of a checkpoint, and hold none. One that we may not look into may hold one."""
    found = []
    for _, path in _named_by_step(disk, root):
        try:
            is_there = disk.exists(os.path.join(path, METADATA_NAME))
        except errors.StorageError:  # not by suppress, which would import torch even if nothing is raised
            continue
        if not is_there:
            found.append(path)
    return found


def _named_by_step(disk: Disk, root: str) -> list[tuple[int, str]]:
    if not disk.exists(root):
        return []
    steps = [(step_of(name), os.path.join(root, name)) for name in disk.list_directory(root)]
    # A log named worker0 is no checkpoint, and no leftover of one.
    return [(step, path) for step, path in steps if step is not None and os.path.isdir(path)]
