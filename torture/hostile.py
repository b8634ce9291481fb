"""Loads thousands of hostile checkpoints, each in its own process with limits on time and memory.

    python -m torture.hostile --trials 2000 --seed 1
    python -m torture.hostile --only "special file|forged head"

A trial is *loaded* if the loaded values are the saved ones, or if a forged pickle was plain data after all. It is
*refused* if robust_dcp raises an exception that names the file. It is *lost* in every other case: other data, another
exception, a crash, code that was run, more than 20 seconds of CPU time, or more than 512 MiB.

Below 1,000 trials only some of the forged files are tried, as the seed draws, and a quarter of the large pickles, each
of which takes seconds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException

from robust_dcp.errors import RobustCheckpointError
from torture.forged import CANARY, REGISTERED
from torture.inputs import Input, all_forged, random_inputs
from torture.samples import WrongData, make_samples
from torture.trials import Result, Trial, main

SECONDS = 20.0
"""Of CPU time."""

WALL_SECONDS = 6 * SECONDS
"""The machine may be busy."""

GROWTH_NBYTES = 512 << 20
"""How much more memory than this process a load may take."""

LOST = "lost"

_PIPE_NBYTES = 4096


def make_trials(root: str, n_trials: int, seed: int) -> Iterator[Trial]:
    """Forged files, and random pickles."""
    forged = list(all_forged())
    every = 1 if n_trials >= 1000 else max(1, 2 * len(forged) // n_trials)
    large = [each for each in forged if each.group == "large pickle"]
    forged = [each for each in forged if each not in large][seed % every :: every]
    forged += large[seed % min(every, 4) :: min(every, 4)]
    for each in [*forged, *random_inputs(random.Random(seed), max(0, n_trials - len(forged)))]:
        yield Trial(each.group, each.name, partial(judge, each, root))


def judge(given: Input, root: str) -> Result:
    """Damage a copy of a sample, and load it. The samples are in ``root``."""
    directory = os.path.join(root, "work", "checkpoint")
    shutil.copytree(os.path.join(root, given.sample.name), directory)
    try:
        names = given.damage(directory)
        verdict, text = load_in_child(lambda: given.load(directory), names)
    finally:
        shutil.rmtree(os.path.dirname(directory))
    return Result([text] if verdict == LOST else [], verdict=verdict)


def load_in_child(load: Callable[[], object], names: str) -> tuple[str, str]:
    """Load in a forked child with limits.

    Args:
        load: loads, and raises :class:`WrongData` if the result is wrong.
        names: the path of the damaged file. A refusal has to name it.

    Returns:
        The verdict, and a text about it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(load, names, writer)
    os.close(writer)
    # What a child writes fits into the pipe, and it ends right after it.
    has_ended = bool(select.select([reader], [], [], WALL_SECONDS)[0])
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    verdict, _, text = os.read(reader, _PIPE_NBYTES).decode(errors="replace").partition(":")
    _, status = os.waitpid(child, 0)
    os.close(reader)
    if os.path.exists(CANARY):
        os.rmdir(CANARY)
        return LOST, "code of the checkpoint was run"
    if not has_ended:
        return LOST, f"no end within {WALL_SECONDS:g} seconds"
    return (verdict, text) if verdict else (LOST, f"ended with {os.waitstatus_to_exitcode(status)} and said nothing")


def _be_child(load: Callable[[], object], names: str, writer: int) -> None:
    """Run the load in the child. Never returns."""
    verdict, text = LOST, ""
    try:
        with suppress(OSError):  # the output of libraries does not belong into the table
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _forget_the_parents_memory()
        program = _program()
        before, begun = _most_rss_nbytes(), time.process_time()
        # With this limit an unlimited allocation fails, before it takes all memory of the machine.
        limit = _address_space_nbytes() + GROWTH_NBYTES + (2 << 30)
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
        if _program() != program:
            verdict, text = LOST, f"has changed the program; {text}"
        if used > SECONDS:
            verdict, text = LOST, f"took {used:.1f} seconds; {text}"
        if grown > GROWTH_NBYTES:
            verdict, text = LOST, f"took {grown >> 20} MiB; {text}"
    finally:
        with suppress(OSError):
            os.write(writer, f"{verdict}:{text}"[: _PIPE_NBYTES // 2].encode())
        sys.stdout.flush()
        os._exit(0)


def _program() -> object:
    """What no checkpoint may change: the classes that torch registers as safe, and whether there is a process group."""
    return torch.distributed.is_initialized(), [dict(vars(kind)) for kind in REGISTERED]


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


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        make_samples(root)
        sys.exit(main(__doc__, partial(make_trials, root), n_trials=2000))
