"""Kills copies of checkpoints and lets them go on: ``python -m torture.drains --trials 100 --seed 1``.

In each trial a checkpoint is copied to a place. Before a random call to a file, or a random request to the store, the
process is killed. At the place there must then be no checkpoint, or the whole one. The copy is started again, and may
be killed once more. In every second trial another save has replaced the source then. In the end the checkpoint must be
there, and nothing that the killed copies have left. Another checkpoint cannot be copied there.

Two trials of three copy to a directory. The third copies to an S3 server on this machine, by a proxy that also cuts
connections and answers with errors now and then.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from typing import Any

import fsspec
import torch

import robust_dcp
from robust_dcp import CopyOptions, RobustReader, StorageError, copy_checkpoint
from robust_dcp.storage.remote.remote_disk import RemoteDisk
from tests.harness.file_calls import FileCalls
from tests.harness.ranks import run_ranks, values
from torture.campaign import run_campaign
from torture.object_store import BUCKET, Fault, faulty_proxy, options_for, s3_server

__all__ = ["run_trial", "server_of_this_process"]

_FAULTS: tuple[Fault, ...] = ("cut request", "cut answer", "500", "503")
_N_ITEMS = 3_000_000  # two files of more than one part of 5 MiB each, in a store


def _state(value: float, n_items: int) -> dict[str, Any]:
    return {"one": torch.full((n_items,), value), "two": torch.full((n_items + 7,), value)}


def _copy_to_directory(source: str, target: str, killed_before: int | None) -> int:
    """Returns how many calls to files were made."""
    calls = FileCalls(target, killed_before)
    copy_checkpoint(source, target, options=CopyOptions(threads=1))
    return calls.count


def _copy_to_store(source: str, url: str, endpoint: str, killed_before: int | None, seed: int) -> int:
    """Returns how many requests were made."""
    draw = random.Random(seed)
    lock = threading.Lock()
    count = 0

    def decide(method: str, path: str) -> Fault | None:
        nonlocal count
        with lock:
            if count == killed_before:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return draw.choice(_FAULTS) if draw.random() < 0.05 else None

    with faulty_proxy(endpoint) as proxy:
        proxy.fault = decide
        options = CopyOptions(threads=2, part_bytes=5 << 20, target_options=options_for(proxy.endpoint))
        copy_checkpoint(source, url, options=options)
    return count


def _loaded(place: str, endpoint: str, n_items: int) -> list[float]:
    found = _state(-1.0, n_items)
    disk = RemoteDisk(place, storage_options=options_for(endpoint)) if endpoint else None
    robust_dcp.load(found, storage_reader=RobustReader(place, disk=disk))
    values_found: list[float] = torch.cat(list(found.values())).unique().tolist()
    return values_found


def _names_at(place: str, endpoint: str) -> set[str]:
    filesystem, root = fsspec.url_to_fs(place, **(options_for(endpoint) if endpoint else {}))
    filesystem.invalidate_cache()
    return {str(path).rpartition("/")[2] for path in filesystem.find(root)}


@functools.cache
def server_of_this_process() -> str:
    """The URL of an S3 server that ends with this process."""
    return _KEPT.enter_context(s3_server())


_KEPT = ExitStack()


def run_trial(seed: int) -> list[str]:
    """Run one trial.

    Returns:
        What was wrong, in words; nothing if all was right.
    """
    draw = random.Random(seed)
    to_store = seed % 3 == 0
    endpoint = server_of_this_process() if to_store else ""
    n_items = _N_ITEMS if to_store else 5000
    with tempfile.TemporaryDirectory() as root:
        for name, value in (("new", 1.0), ("other", 3.0)):
            robust_dcp.save(_state(value, n_items), checkpoint_id=f"{root}/{name}")
        target = f"s3://{BUCKET}/trial_{seed}_{os.getpid()}" if to_store else f"{root}/target"

        def attempt(place: str, killed_before: int | None) -> Any:
            if to_store:
                arguments: tuple[Any, ...] = (f"{root}/new", place, endpoint, killed_before, draw.randrange(1 << 30))
                return run_ranks(1, _copy_to_store, *arguments, init=False, timeout_seconds=120)
            return run_ranks(1, _copy_to_directory, f"{root}/new", place, killed_before, init=False)

        counted = values(attempt(f"{target}_counted", None))[0]
        wrong: list[str] = []
        killed: list[int] = []
        expected = 1.0
        for _ in range(draw.choice((1, 1, 2))):
            killed.append(draw.randrange(counted))
            (outcome,) = attempt(target, killed[-1])
            if outcome.exitcode not in (0, -signal.SIGKILL):
                wrong.append(f"it failed: {outcome}")
            is_there = ".metadata" in _names_at(target, endpoint)
            wrong += _wrong_with(target, endpoint, n_items, expected) if is_there else []
            if not is_there and draw.random() < 0.5:
                expected += 1.0
                robust_dcp.save(_state(expected, n_items), checkpoint_id=f"{root}/new")
        values(attempt(target, None))
        wrong += _wrong_with(target, endpoint, n_items, expected)
        if _names_at(target, endpoint) != _names_at(f"{root}/new", ""):
            wrong.append(f"left at the target: {sorted(_names_at(target, endpoint))}")
        try:
            store = options_for(endpoint) if to_store else {}
            copy_checkpoint(f"{root}/other", target, options=CopyOptions(target_options=store))
            wrong.append("another checkpoint was copied over it")
        except StorageError:
            wrong += _wrong_with(target, endpoint, n_items, expected)
        return [f"killed before {killed} of {counted} calls: {each}" for each in wrong]


def _wrong_with(target: str, endpoint: str, n_items: int, expected: float) -> list[str]:
    try:
        found = _loaded(target, endpoint, n_items)
    except Exception as error:
        return [f"it does not load: {error}"]
    return [] if found == [expected] else [f"it holds {found}, and not {expected}"]


if __name__ == "__main__":
    with _KEPT:
        sys.exit(run_campaign(__doc__, run_trial, trials=100))
