"""Directories for the matrices of faults."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = "/dev/shm"


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: a matrix makes hundreds of checkpoints, and would wait for a disk."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="robust_dcp-", dir=_MEMORY))
    yield path
    shutil.rmtree(path)
