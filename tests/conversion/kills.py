"""Kills a conversion before each of its calls to files, and looks at what is there: run as a program, because it forks.

    python -m tests.conversion.kills ROOT FORM LAYOUT swap|rename STEP

``rename`` is a system that cannot swap two names in one step. ``STEP`` is 3 to kill before every third call. The
program prints how often it has killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import robust_dcp
from robust_dcp.conversion import workplace
from robust_dcp.conversion.convert import convert
from robust_dcp.storage.pieces import PieceReader, batches_of
from tests.harness.file_calls import FileCalls

STATE = {"a": torch.arange(100.0), "b": torch.ones(7, 5), "c": torch.zeros(3, dtype=torch.int64)}


def in_child(work: Callable[[], object]) -> int:
    """How a process ends that does ``work``."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make(root: Path, target: Path, how: dict[str, Any]) -> None:
    convert(root / "source", target, overwrite=True, max_shard_nbytes=150, **how)


def bytes_of(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def is_new(target: Path) -> bool:
    if target.is_file():
        found = torch.load(target)
    else:
        reader = PieceReader(target, buffer_nbytes=1 << 20)
        (batch,) = batches_of(reader.tensors.values(), 1 << 20)
        found = {p.tensor.name: value for p, value in zip(batch, reader.read(batch), strict=True)}
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def check_and_repeat(root: Path, place: Path, how: dict[str, Any], swaps: bool) -> None:
    target = place / "target"
    assert {path.name for path in place.iterdir()} <= {"target", "target.converting"}, list(place.iterdir())
    if target.exists():
        assert bytes_of(target) == bytes_of(root / "old") or is_new(target)
    else:
        assert not swaps
        assert bytes_of(place / "target.converting" / "replaced") == bytes_of(root / "old")
    make(root, target, how)
    assert is_new(target)
    assert {path.name for path in place.iterdir()} == {"target"}, list(place.rglob("*"))


def main(root: Path, form: str, layout: str, renamed: str, step: int) -> int:
    how = {"form": form, "layout": layout}
    swaps = renamed == "swap"
    if not swaps:
        vars(workplace)["exchange_names"] = lambda one, other: False

    def prepare() -> None:
        robust_dcp.save(dict(STATE), checkpoint_id=root / "source")
        robust_dcp.save({"a": torch.ones(3)}, checkpoint_id=root / "older")
        convert(root / "older", root / "old", **how)  # type: ignore[arg-type]

    assert in_child(prepare) == 0
    for n_kills, number in enumerate(itertools.count(0, step)):
        place = root / str(number)
        place.mkdir()
        copy = shutil.copytree if (root / "old").is_dir() else shutil.copy
        copy(root / "old", place / "target")

        def killed(number: int = number, place: Path = place) -> None:
            FileCalls(place, killed_before=number)
            make(root, place / "target", how)

        code = in_child(killed)
        if code == 0:
            return n_kills
        assert code == -signal.SIGKILL, code
        assert in_child(lambda place=place: check_and_repeat(root, place, how, swaps)) == 0, f"killed before {number}"  # type: ignore[misc]
    raise AssertionError


if __name__ == "__main__":
    root, form, layout, renamed, step = sys.argv[1:]
    print(main(Path(root), form, layout, renamed, int(step)))
