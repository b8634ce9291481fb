"""Jobs for tests: processes that stay, and run one function after the other as ranks.

job = Job(2)
assert job.run(save_something, path) == [0, 1]
job.restart()
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Job"]


class Job:
    """Ranks on gloo, which all run the same functions in turn.

    Args:
        n_ranks: how many.
    """

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "robust_dcp.api"])
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(self._n_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._n_ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on all ranks, and return what it returned on each.

        Raises:
            AssertionError: it raised on some rank, or a rank has ended. The message has all tracebacks.
        """
        for connection in self._connections:
            connection.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self._n_ranks:
            for connection in wait([each for n, each in enumerate(self._connections) if n not in answers]):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._connections[rank].recv()
                except EOFError:
                    answers[rank] = False, "the process has ended"
        failed = [f"rank {rank}: {answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
        if failed:
            raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(self._n_ranks)]

    def restart(self) -> None:
        """End all processes, and start new ones that remember nothing."""
        self.end()
        self._start()

    def end(self) -> None:
        """End all processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=30)
            process.kill()
            process.join()


def _serve(connection: Connection, rank: int, n_ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer: tuple[bool, Any] = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
    dist.destroy_process_group()
