"""A killed rank is named at once though a child of it lives, which it has forked or started with all its files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.errors import ExchangeTimeout
from tests.harness.ranks import run_ranks, values

TIMEOUT_SECONDS = 200.0


def be_killed_with_a_child(path: str, kind: str) -> tuple[list[int] | None, bool]:
    Channel.for_group(operation="connect", timeout_seconds=TIMEOUT_SECONDS).barrier("connect")
    if dist.get_rank() == 1:
        if kind == "popen":
            child = subprocess.Popen(["sleep", "300"], close_fds=False).pid
        elif (child := os.fork()) == 0:
            time.sleep(300)
            os._exit(0)
        Path(path, "child").write_text(str(child))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout) as caught:
        Channel.for_group(operation="next", timeout_seconds=TIMEOUT_SECONDS).barrier("next")
    return caught.value.missing_ranks, time.monotonic() - began < TIMEOUT_SECONDS / 2


@pytest.mark.parametrize("kind", ["fork", "popen"])
def test_a_killed_rank_is_named_at_once_though_a_child_of_it_lives(kind: str, tmp_path: Path) -> None:
    try:
        survivor, killed = run_ranks(2, be_killed_with_a_child, str(tmp_path), kind)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert killed.exitcode == -signal.SIGKILL
    assert values([survivor]) == [([1], True)]
