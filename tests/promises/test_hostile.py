"""Hostile checkpoints are refused within limits of time and memory, and nothing of them is run: some of each kind."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")


def test_no_hostile_input_is_lost() -> None:
    """The campaign of ``make torture``, with another seed each time; in a process of its own, because it forks."""
    seed = random.randrange(1 << 30)
    command = [sys.executable, "-W", "ignore", "-m", "torture.hostile", "--trials", "120", "--seed", str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    assert " trials, 0 broke a promise" in ended.stdout.splitlines()[-1]
