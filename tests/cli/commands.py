"""Calls commands as a shell does, in this process or in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from robust_dcp.cli.app import main

__all__ = ["Ended", "Shell", "in_a_process"]


class Ended(NamedTuple):
    """How a command has ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table, without the titles."""
        return [line.split("\t") for line in self.out.splitlines()[1:]]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process, where torch is imported already."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured = captured

    def __call__(self, *words: object) -> Ended:
        self._captured.readouterr()
        with mock.patch.object(sys, "argv", ["robust-dcp", *map(str, words)]), pytest.raises(SystemExit) as ended:
            main()
        found = self._captured.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code, found.out, found.err)


def in_a_process(*words: object, **environment: str) -> Ended:
    ran = subprocess.run(
        [sys.executable, "-m", "robust_dcp.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)
