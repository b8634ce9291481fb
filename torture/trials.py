"""One trial: it loads in a new process with limits, and judges the result.

Owns the child process, its limits and the verdict. It does not decide what is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException

from robust_dcp.errors import RobustCheckpointError

__all__ = ["LOST", "Verdict", "WrongData", "run_trial"]

Verdict = tuple[str, str]
"""``"loaded"``, ``"refused"`` or ``"lost"``, and a text about it."""

LOST = "lost"

_PIPE_NBYTES = 4096


class WrongData(Exception):
    """The loaded values are not those that were saved."""


def run_trial(load: Callable[[], None], names: str, *, seconds: float, growth_nbytes: int, canary: str) -> Verdict:
    """Call ``load`` in a forked child.

    Args:
        load: loads, and raises :class:`WrongData` if the result is wrong.
        names: the path of the damaged file. A refusal has to name it.
        seconds: the limit for CPU time. The limit for wall time is six times as long, because the machine may be busy.
        growth_nbytes: how much more memory than this process the child may take.
        canary: a path that must not come to exist.

    Returns:
        The verdict. It is ``lost`` except after a success, or after an exception of ours (or Megatron's own) that
        names the file.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(load, names, seconds, growth_nbytes, writer)
    os.close(writer)
    told = _told_by(reader, 6 * seconds)
    if told is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    if os.path.exists(canary):
        os.rmdir(canary)
        return LOST, "code of the checkpoint was run"
    if told is None:
        return LOST, f"no end within {6 * seconds} seconds"
    if os.WIFSIGNALED(status):
        return LOST, f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    verdict, _, text = told.partition(":")
    return (verdict, text) if verdict else (LOST, f"ended with {status} and said nothing")


def _told_by(reader: int, seconds: float) -> str | None:
    """What the child writes until it closes its end, or ``None`` if it takes too long."""
    told = b""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while True:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            return None
        data = os.read(reader, _PIPE_NBYTES)
        if not data:
            return told.decode(errors="replace")
        told += data


def _run_child(load: Callable[[], None], names: str, seconds: float, growth_nbytes: int, writer: int) -> None:
    """Run the load in the child. Never returns."""
    verdict, text = LOST, ""
    try:
        with suppress(OSError):  # the output of libraries does not belong into the table
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _forget_the_parents_memory()
        before, begun = _most_rss_nbytes(), time.process_time()
        # With this limit an unlimited allocation fails, before it takes all memory of the machine.
        limit = _address_space_nbytes() + growth_nbytes + (2 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            load()
            verdict = "loaded"
        except RobustCheckpointError as error:
            is_named = names in str(error)
            verdict = "refused" if is_named else LOST
            text = f"{type(error).__name__}: {error!s:.300}" + ("" if is_named else " (does not name the file)")
        except CheckpointingException as error:  # Megatron's own error if there is no Megatron checkpoint
            verdict, text = "refused" if names in str(error) else LOST, f"CheckpointingException: {error!s:.300}"
        except WrongData as error:
            text = f"wrong data: {error!s:.300}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error!s:.300}"
        gc.collect()  # the time to free the objects counts too
        grown = _most_rss_nbytes() - before
        used = time.process_time() - begun
        if used > seconds:
            verdict, text = LOST, f"took {used:.1f} seconds; {text}"
        if grown > growth_nbytes:
            verdict, text = LOST, f"took {grown >> 20} MiB; {text}"
    finally:
        with suppress(OSError):
            os.write(writer, f"{verdict}:{text}"[: _PIPE_NBYTES // 2].encode())
        sys.stdout.flush()
        os._exit(0)


def _forget_the_parents_memory() -> None:
    """Count memory from the present use. A fork inherits the parent's peak, and free heap pages that hide growth."""
    gc.freeze()  # garbage of the parent must not count for this trial
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of resident memory


def _most_rss_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
