"""The step, the metrics and the provenance of a checkpoint.

They are in the file ``.robust_dcp.step.json`` beside ``.metadata``. A checkpoint without this file can be loaded like
any other; it only has no metrics. A file with another form is treated as if it were not there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.commit import commit_metadata
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.whole_file import read_whole_file
from robust_dcp.version import __version__

__all__ = ["RECORD_NAME", "StepRecord", "digest_of", "provenance_of", "read_record", "write_record"]

RECORD_NAME: Final = ".robust_dcp.step.json"

_MAX_NBYTES: Final = 1 << 20
_GIT_SECONDS: Final = 5.0


class StepRecord(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        step: of training.
        metrics: numbers by their names.
        provenance: see :func:`provenance_of`.
    """

    step: int = 0
    metrics: dict[str, float] = {}
    provenance: dict[str, Any] = {}


def read_record(disk: Disk, path: str) -> StepRecord:
    """The record of a checkpoint; an empty one if there is none, or none that can be understood."""
    path = os.path.join(path, RECORD_NAME)
    if not disk.exists(path):
        return StepRecord()
    try:
        data = read_whole_file(disk, path, _MAX_NBYTES)
        return StepRecord() if data is None else msgspec.json.decode(data, type=StepRecord)
    except (errors.RobustCheckpointError, msgspec.DecodeError, UnicodeDecodeError):
        return StepRecord()


def write_record(disk: Disk, path: str, record: StepRecord) -> None:
    """Write it durably, in one step.

    Raises:
        StorageError: a call failed.
    """
    commit_metadata(disk, path, msgspec.json.format(msgspec.json.encode(record)), name=RECORD_NAME)


def provenance_of(*, config_digest: str | None, world_size: int) -> dict[str, Any]:
    """The versions, the commit and the configuration that a checkpoint is made with.

    Args:
        config_digest: by :func:`digest_of`; ``None`` if there is no configuration.
        world_size: how many ranks save.
    """
    import torch

    return {
        "robust_dcp": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "world_size": world_size,
        "git": _git(),
        "config_digest": config_digest,
    }


def digest_of(config: Any) -> str:
    """SHA-256 of the configuration of a run. The order of keys does not matter. Other objects count as their text.

    Raises:
        ValueError: it holds itself, or keys or text that JSON cannot hold.
    """
    try:
        plain = msgspec.to_builtins(config, enc_hook=str, str_keys=True, order="deterministic")
        return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"config has no digest, because JSON cannot hold it: {error}; pass a dict of plain values"
        ) from error


def _git() -> Mapping[str, Any] | None:
    """The commit of the program that runs, and whether its files were changed since; ``None`` outside of git."""
    directory = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()

    def ask(*arguments: str) -> str:
        command = ("git", "-C", directory, *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "is_changed": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
