"""Runs Megatron-LM's own tests of distributed checkpoints on eight ranks with CPUs: ``python megatron_on_cpu.py FILE``.

Megatron starts each of its tests with torchrun, and pytest runs in each rank. Here the ranks are forked from a process
that has imported Megatron, and six tests at most share them. What a rank starts is forked too: to import everything
anew takes longer than the others wait for it. Gloo takes the place of NCCL. Each of its groups polls in a thread, so
the groups that Megatron forgets after a test are destroyed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import outcomes
import pytest
import torch

from demo import megatron_cpu

__all__ = ["main"]

_N_RANKS = 8
_TESTS_A_SESSION = 6
_SESSION_SECONDS = 600
_GLOO_TIMEOUT = timedelta(seconds=60)
"""Where one rank fails, the others wait in a collective. On GPUs they do so for a minute too."""


def _patch_torch() -> None:
    distributed = torch.distributed
    init_process_group, new_group = distributed.init_process_group, distributed.new_group

    def init_with_gloo(*args: Any, **options: Any) -> None:
        init_process_group(*args, **options | {"backend": "gloo", "timeout": _GLOO_TIMEOUT})

    def new_gloo_group(*args: Any, **options: Any) -> Any:
        backend = None if options.get("backend") is None else "gloo"
        return new_group(*args, **options | {"backend": backend, "timeout": _GLOO_TIMEOUT})

    for owner in (distributed, distributed.distributed_c10d):
        owner.init_process_group, owner.new_group = init_with_gloo, new_gloo_group
    forking = multiprocessing.get_context("fork")
    for owner in (multiprocessing, torch.multiprocessing):
        owner.get_context = lambda method=None: forking
    megatron_cpu.install()


def _patch_megatron() -> None:
    from megatron.core import parallel_state, utils
    from packaging.version import Version

    if utils.get_te_version() is None:  # Megatron-Core 0.16 compares it without asking
        utils._te_version = Version("0")
    forget = parallel_state.destroy_model_parallel

    def destroy_model_parallel() -> None:
        groups = parallel_state._global_process_group_list or ()
        forget()
        for group in groups:
            if group in torch.distributed.distributed_c10d._world.pg_map:
                torch.distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def _no_download(**_options: Any) -> None:
    raise ImportError("tests of checkpoints need no data")


def _fork(work: Any) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            code = work()
        os._exit(code)
    return pid


def _session(arguments: list[str], rank: int, port: int, scratch: Path) -> int:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": _N_RANKS, "MASTER_ADDR": "localhost"}
    os.environ.update({name: str(value) for name, value in (environment | {"MASTER_PORT": port}).items()})
    # Megatron's tests meet in a directory above that of each rank.
    return int(pytest.main([*arguments, "--basetemp", str(scratch / f"rank{rank}")], plugins=[outcomes]))


class _Collected:
    """A plugin that notes which tests there are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._path.write_text("\n".join(item.nodeid for item in session.items))


def _sessions(options: list[str], tests: list[str], scratch: Path) -> Iterator[list[str]]:
    """The tests by session. They are collected by a process of its own: that makes a group and reads arguments."""
    path = scratch / "collected"
    collected = _Collected(path)
    os.waitpid(_fork(lambda: int(pytest.main([*options, "--collect-only", *tests], plugins=[collected]))), 0)
    names = path.read_text().splitlines()[:: int(os.environ["STOCK_EVERY"])] if path.exists() else []
    for first in range(0, len(names), _TESTS_A_SESSION):
        yield names[first : first + _TESTS_A_SESSION]


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def _run_ranks(arguments: list[str], scratch: Path) -> None:
    port = _free_port()
    ranks = {_fork(lambda rank=rank: _session(arguments, rank, port, scratch)) for rank in range(_N_RANKS)}
    ends = time.monotonic() + _SESSION_SECONDS
    while ranks and time.monotonic() < ends:
        time.sleep(0.05)
        ranks = {pid for pid in ranks if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if len(ranks) < _N_RANKS:  # they go through the same tests, so the others are over soon, or never
            ends = min(ends, time.monotonic() + 2 * _GLOO_TIMEOUT.total_seconds())
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(arguments: list[str]) -> int:
    """Run tests, six in a session of eight ranks."""
    options = [each for each in arguments if not each.startswith("tests/")]
    tests = [each for each in arguments if each.startswith("tests/")]
    scratch = Path(os.environ["STOCK_OUTCOMES"]).parent
    torch.set_num_threads(1)
    _patch_torch()
    data = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    data.download_and_extract_asset = _no_download  # type: ignore[attr-defined]
    sys.modules[data.__name__] = data
    import megatron.training.training  # noqa: F401  once for all ranks

    _patch_megatron()
    for number, names in enumerate(_sessions(options, tests, scratch)):
        directory = scratch / f"session{number}"
        directory.mkdir()
        _run_ranks([*options, *names], directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
