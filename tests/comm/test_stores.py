"""Ranks find each other by whatever store their process group has."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from tests.harness.ranks import run_ranks, values


class OfPython(dist.Store):
    """A store with the methods that torchelastic's ``EtcdStore`` has, and no others."""

    def __init__(self, below: dist.Store) -> None:
        super().__init__()
        self._below = below

    def set(self, key: str, value: Any) -> None:
        self._below.set(key, value)

    def get(self, key: str) -> bytes:
        return self._below.get(key)

    def add(self, key: str, num: int) -> int:
        return self._below.add(key, num)

    def wait(self, keys: Iterable[str], timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        self._below.wait(list(keys), timeout)

    def check(self, keys: Iterable[str]) -> bool:
        return self._below.check(list(keys))


def save_and_load(path: str, of_python: bool) -> float:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = dist.FileStore(os.path.join(path, "store"), size)
    if of_python:
        store = OfPython(store)  # this name keeps it: C++ alone does not keep the Python part
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    robust_dcp.save({f"own{rank}": torch.full((3,), rank + 1.0)}, checkpoint_id=f"{path}/1", timeout_seconds=30)
    loaded = {f"own{1 - rank}": torch.zeros(3)}
    robust_dcp.load(loaded, checkpoint_id=f"{path}/1", timeout_seconds=30)
    return float(loaded[f"own{1 - rank}"][0])


def test_ranks_with_a_store_that_is_written_in_python_save_and_load(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_and_load, str(tmp_path), True, init=False)) == [2.0, 1.0]


def test_ranks_with_a_store_in_a_file_save_and_load(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_and_load, str(tmp_path), False, init=False)) == [2.0, 1.0]
