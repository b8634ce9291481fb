"""A conversion that is killed leaves the old target or the new one, and the next call finishes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("form", "layout", "renamed", "step", "at_least"),
    [
        ("torch", "torch", "swap", 1, 8),
        ("dcp", "safetensors", "rename", 3, 8),
        ("safetensors", "torch", "swap", 2, 10),
    ],
)
def test_whenever_a_conversion_is_killed_there_is_a_whole_target_and_the_next_call_finishes(
    form: str, layout: str, renamed: str, step: int, at_least: int, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.conversion.kills", tmp_path, form, layout, renamed, str(step)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= at_least
