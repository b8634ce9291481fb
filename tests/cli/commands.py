"""Calls commands as a shell does, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest

from robust_dcp.cli.app import main


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
    goes_on = mock.patch.object(gc, "freeze")  # this process does, and a command's does not
    with (
        argv,
        goes_on,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


def started(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    program = [sys.executable, "-m", "robust_dcp.cli", *map(str, words)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options["env"] = {**os.environ, **path, **options.get("env", {})}
    return subprocess.Popen(program, text=True, **options)
