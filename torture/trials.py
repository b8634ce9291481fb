"""One trial: a load in a process of its own, with limits, and what became of it.

Owns the child process, its limits and the verdict. Never decides what is loaded.
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
"""``"loaded"``, ``"refused"`` or ``"lost"``, and what is to be said about it."""

LOST = "lost"

_PIPE_NBYTES = 4096


class WrongData(Exception):
    """A load gave something else than was saved."""


def run_trial(load: Callable[[], None], names: str, *, seconds: float, growth_nbytes: int, canary: str) -> Verdict:
    """Call ``load`` in a forked child.

    Args:
        load: loads, and raises :class:`WrongData` if the outcome is not what it should be.
        names: what a refusal has to name: the path of what was damaged.
        seconds: of a processor that it may take, and six times that by the clock: the machine may have more to do.
        growth_nbytes: memory that it may take, over that of this process.
        canary: a path that must not come to exist.

    Returns:
        ``lost`` for anything but success, or an exception of ours (or Megatron's own) that names the file.
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
    """What the child writes until it closes its end; ``None`` if it takes too long."""
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
    """In the child; never returns."""
    verdict, text = LOST, ""
    try:
        with suppress(OSError):  # what is printed by libraries belongs to no table
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _forget_the_parents_memory()
        before, begun = _most_rss_nbytes(), time.process_time()
        # An allocation that nothing limits fails here, before it takes the machine with it.
        limit = _address_space_nbytes() + growth_nbytes + (2 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            load()
            verdict = "loaded"
        except RobustCheckpointError as error:
            is_named = names in str(error)
            verdict = "refused" if is_named else LOST
            text = f"{type(error).__name__}: {error!s:.300}" + ("" if is_named else " (does not name the file)")
        except CheckpointingException as error:  # Megatron's own word where there is no checkpoint of its
            verdict, text = "refused" if names in str(error) else LOST, f"CheckpointingException: {error!s:.300}"
        except WrongData as error:
            text = f"wrong data: {error!s:.300}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error!s:.300}"
        gc.collect()  # what was built is freed too
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
    """Count from what is used now: a fork takes over a peak, and free pages of the heap in which growth would hide."""
    gc.freeze()  # what the parent has made is no garbage of this trial
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of resident memory


def _most_rss_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
