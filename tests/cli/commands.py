"""Calls commands as a shell does, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from robust_dcp.cli.app import main

__all__ = ["Ended", "Shell", "in_a_process", "shell"]


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


def shell(*words: object) -> Ended:
    """Run a command in this process, where torch is imported already."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["robust-dcp", *map(str, words)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


Shell = Callable[..., Ended]


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
