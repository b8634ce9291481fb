"""Checkpoints by robust_dcp, by stock and by Megatron, made once for all tests of commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.checkpoints import make_all
from tests.harness.ranks import run_ranks, values


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    values(run_ranks(1, make_all, str(root)))
    return root


@pytest.fixture
def copy_of(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of them, to damage."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return copied
