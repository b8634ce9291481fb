"""Programs that know nothing of robust_dcp."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.harness.ranks import Outcome, run_alone

__all__ = ["run"]

SAVE = """
    import os, sys, torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import (
        DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter, async_save, load, save
    )
    from torch.distributed.checkpoint.metadata import Metadata

    path = sys.argv[1]
    state = {"w": torch.arange(10.0), "nested": {"step": 3}}
    empty = lambda: {"w": torch.zeros(10), "nested": {"step": 0}}

    def processes(kind):
        # Stock's own processes need a group of processes; ours do not.
        return {"async_checkpointer_type": kind} if os.environ.get("ROBUST_DCP") == "1" else {}

    def check(loaded):
        assert torch.equal(loaded["w"], torch.arange(10.0)) and loaded["nested"]["step"] == 3
"""


def run(path: Path, script: str, **environment: str) -> Outcome:
    """Run a program of its own, which has :data:`SAVE` before it."""
    done = run_alone(textwrap.dedent(SAVE) + textwrap.dedent(script), path, **environment)
    assert done.exitcode == 0, done
    return done
