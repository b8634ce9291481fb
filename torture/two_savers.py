"""Two jobs that save to one place at the same time: ``python -m torture.two_savers --trials 200 --seed 1``.

A job was started anew, and the one before it lives on. Both save, one step apart or at once, and in most trials one of
them is killed before or after some call to the disk or to the store; in a store in memory, which two processes cannot
share, a call fails in its place. Then a third job saves there. Whoever returns has its checkpoint there, whole: in a
store for good, and in a directory until another one returns. Nobody removes what another has staged.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

import robust_dcp
from robust_dcp import RobustCheckpointError
from tests.drain.test_stores import BUCKET, running_store
from tests.faults.disk import CHANGES, FaultDisk
from tests.harness.ranks import run_ranks
from torture.trials import Result, Trial, main

__all__ = ["KINDS", "make_trials"]

KINDS = {"s3": 90, "file": 60, "memory": 40}
"""How many calls a save makes there at most, nearly."""

_ALL_CALLS = f"{'|'.join(CHANGES)}:*"


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """All kinds in turn. One trial in five only races."""
    for number in range(seed * 1000, seed * 1000 + n_trials):
        kind = list(KINDS)[number % len(KINDS)]
        yield Trial(kind, f"seed {number}", partial(judge, kind, number))


def judge(kind: str, seed: int) -> Result:
    """Let two save, then a third one, and say what is wrong."""
    rng = random.Random(f"two savers {seed}")
    dies_at = 0 if rng.random() < 0.2 else rng.randrange(1, KINDS[kind])
    delays = rng.choice([(0.0, 0.0), (0.0, rng.random() * 0.3)])
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="two-savers-"))
        staging, options = f"{directory}/staging", dict[str, Any]()
        stack.enter_context(mock.patch.dict(os.environ, ROBUST_DCP_STAGING=staging))
        if kind == "s3":
            options = _store_options()
            stack.enter_context(mock.patch.dict(fsspec.config.conf, s3=options))
        url = {"s3": f"s3://{BUCKET}/{seed}", "file": f"file://{directory}/step", "memory": f"memory://{seed}/step"}[
            kind
        ]
        if kind == "memory":
            ends = _save_in_threads(url, dies_at, delays)
        else:
            before = rng.random() < 0.5
            outcomes = run_ranks(
                2, _save, url, directory, options, dies_at, delays, before, init=False, timeout_seconds=600
            )
            ends = [
                str(each.value) if each.exitcode == 0 else "killed" if each.exitcode < 0 else str(each.error)
                for each in outcomes
            ]
        return Result(list(_complaints(kind, url, Path(staging), ends)), verdict=" and ".join(sorted(map(_word, ends))))


@functools.cache
def _store_options() -> dict[str, Any]:
    """One store for all trials, until the process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running_store()).options


def _word(end: str) -> str:
    return end if end in ("returned", "killed") else "refused"


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300,), value), "v": torch.full((7,), value), "step": value}


def _loaded(place: str) -> float | str:
    """The value of the checkpoint there, or what is wrong with it."""
    state = _state(-1.0)
    try:
        robust_dcp.load(state, checkpoint_id=place)
    except RobustCheckpointError as error:
        return str(error).partition("\n")[0]
    values = {*state["w"].tolist(), *state["v"].tolist(), state["step"]}
    return values.pop() if len(values) == 1 else f"a mixture of {sorted(values)}"


def _complaints(kind: str, url: str, staging: Path, ends: list[str]) -> Iterator[str]:
    returned = [1.0 + rank for rank, end in enumerate(ends) if end == "returned"]
    there = _loaded(url)
    yield from (end for end in ends if end not in ("returned", "killed") and not end.startswith("refused: "))
    if kind != "file" and len(returned) > 1:
        yield f"both have returned, and {there} is there"
    if returned and there not in (returned if "killed" not in ends or kind != "file" else (1.0, 2.0)):
        yield f"{returned} returned, and {there} is there: {ends}"
    staged = {each: _loaded(str(each)) for each in staging.glob("*") if (each / ".metadata").exists()}
    try:
        robust_dcp.save(_state(3.0), checkpoint_id=url)
        now = _loaded(url)
        if now != 3.0 or (returned and kind != "file"):
            yield f"a third save has returned, and {now} is there; before: {there}"
    except RobustCheckpointError as error:
        now = _loaded(url)
        if now != there or not isinstance(now, float):
            yield f"a third save is refused ({error.message:.300}), and {now} is there; before: {there}"
    for each, value in staged.items():
        if _loaded(str(each)) != value or not isinstance(value, float):
            yield f"{each} held {value}, and holds {_loaded(str(each))} after a save of another job"


def _end_of(save: Callable[[], object]) -> str:
    try:
        save()
    except RobustCheckpointError as error:
        return f"refused: {error.message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def _save(
    url: str, directory: str, options: dict[str, Any], dies_at: int, delays: tuple[float, float], before: bool
) -> str:
    """One of two processes. Rank 0 may be killed at a call."""
    rank, n_calls, lock = int(os.environ["RANK"]), 0, threading.Lock()
    fsspec.config.conf["s3"] = options

    def count(_: Any = None) -> None:
        nonlocal n_calls
        with lock:
            n_calls += 1
            if n_calls == dies_at and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    Path(directory, f"ready {rank}").touch()
    while not all(Path(directory, f"ready {each}").exists() for each in range(2)):
        time.sleep(0.002)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FaultDisk(directory, on={_ALL_CALLS: count}))
        if options:
            import s3fs

            call = s3fs.S3FileSystem._call_s3

            async def counted(*args: Any, **more: Any) -> Any:
                if before:
                    count()
                answer = await call(*args, **more)
                if not before:
                    count()
                return answer

            stack.enter_context(mock.patch.object(s3fs.S3FileSystem, "_call_s3", counted))
        time.sleep(delays[rank])
        return _end_of(lambda: robust_dcp.save(_state(1.0 + rank), checkpoint_id=url))


def _save_in_threads(url: str, fails_at: int, delays: tuple[float, float]) -> list[str]:
    """Both in this process. One call of either fails for good."""
    numbers, ends = iter(range(1, 1 << 30)), ["", ""]

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if next(numbers) == fails_at:
                raise PermissionError("by the campaign")
            return function(*args, **more)

        return call

    def save(rank: int) -> None:
        time.sleep(delays[rank])
        ends[rank] = _end_of(lambda: robust_dcp.save(_state(1.0 + rank), checkpoint_id=url))

    names = ("pipe_file", "rm_file", "ls", "info", "cat_file", "open")
    patches: dict[str, Any] = {name: failing(getattr(MemoryFileSystem, name)) for name in names}
    with mock.patch.multiple(MemoryFileSystem, **patches):
        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return ends


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=200))
