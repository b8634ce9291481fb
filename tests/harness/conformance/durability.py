"""The suite for whole or not at all: a save that fails, or is killed anywhere, leaves the checkpoint that was there.

DCP promises less: stock's ``FileSystemWriter`` overwrites in place, and does not pass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.conformance.round_trips import Plugins, load, rows, save
from tests.harness.damage import data_files, flip_bit
from tests.harness.file_calls import FileCalls
from tests.harness.fingerprints import differences
from tests.harness.ranks import errors, run_ranks, values

__all__ = ["DurabilityConformance"]


class DurabilityConformance(Plugins):
    """Derive from it, and say how your writer and your reader are made. The class has to be one that ranks can import.

    A save is killed before each call that opens, renames or removes a file (of Python code: each that raises an
    auditing event of PEP 578). Syncs are seen if they are calls of ``os.fsync`` or ``os.fdatasync``.
    """

    def test_killed_before_any_file_call_the_old_or_the_new_checkpoint_is_there(self, tmp_path: Path) -> None:
        (calls,) = values(run_ranks(1, _file_calls, self, tmp_path / "counted"))
        assert calls, "the save opened, renamed and removed no file in the directory that the writer was given"
        for number, call in enumerate(calls):
            path = tmp_path / str(number)
            (outcome,) = run_ranks(1, _save_until_killed, self, path, number)
            assert outcome.exitcode == -signal.SIGKILL, f"it was not killed before call {number}: {outcome}"
            (steps,) = values(run_ranks(1, _steps_found, self, path))
            assert steps in (["1"], ["2"]), (
                f"a save of step 2 over step 1 was killed before its call {number} of {len(calls)}, {call}: "
                f"the directory loads as {steps}, and neither as step 1 nor as step 2"
            )

    def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(self, tmp_path: Path) -> None:
        errors(run_ranks(2, _fail_over_a_checkpoint, self, tmp_path))
        assert values(run_ranks(2, _steps_found, self, tmp_path)) == [["1"], ["1"]]

    def test_a_save_that_returns_has_synced_its_files(self, tmp_path: Path) -> None:
        (names,) = values(run_ranks(1, _names_not_synced, self, tmp_path))
        assert not names, f"a power cut after the save may lose {', '.join(names)}: call os.fsync on each file"

    def test_a_flipped_bit_is_found_or_does_no_harm(self, tmp_path: Path) -> None:
        values(run_ranks(1, _save_step, self, tmp_path, 1))
        for path in data_files(tmp_path):
            (found,) = values(run_ranks(1, _steps_found_with_each_bit_flipped, self, tmp_path, path))
            for offset, steps in found.items():
                assert steps in (["1"], ["refused"]), f"bit {offset % 8} of byte {offset} of {path.name}: {steps}"


class _CannotBePickled:
    def __reduce__(self) -> str:
        raise OSError("this object cannot be pickled")


def _save_step(plugins: DurabilityConformance, path: Path, step: int) -> None:
    save(plugins, rows(step), path)


def _steps_found_with_each_bit_flipped(plugins: DurabilityConformance, path: Path, file: Path) -> dict[int, list[str]]:
    """What is found with one bit flipped at a time, by its offset in a file. All in one process, which takes 1/10 of
    the time."""
    found = {}
    nbytes = file.stat().st_size
    for offset in range(0, nbytes, max(1, nbytes // 64)):
        flip_bit(file, offset, bit=offset % 8)
        found[offset] = _steps_found(plugins, path)
        flip_bit(file, offset, bit=offset % 8)
    return found


def _names_not_synced(plugins: DurabilityConformance, path: Path) -> list[str]:
    """``.metadata`` and the data files (all without a dot before their name) that were not synced when a save returned.

    This process ends after the test, so nothing is put back."""
    synced: set[tuple[int, int]] = set()

    def watch(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(file: Any) -> None:
            sync(file)
            found = os.fstat(file if isinstance(file, int) else file.fileno())
            synced.add((found.st_dev, found.st_ino))

        return watched

    for name in ("fsync", "fdatasync"):
        setattr(os, name, watch(getattr(os, name)))
    save(plugins, rows(1), path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [
        file.name
        for file in files
        if (file.name == ".metadata" or not file.name.startswith("."))
        and (file.stat().st_dev, file.stat().st_ino) not in synced
    ]


def _file_calls(plugins: DurabilityConformance, path: Path) -> list[str]:
    save(plugins, rows(1), path)
    seen = FileCalls(path)
    save(plugins, rows(2), path)
    return seen.calls


def _save_until_killed(plugins: DurabilityConformance, path: Path, number: int) -> None:
    save(plugins, rows(1), path)
    FileCalls(path, killed_before=number)
    save(plugins, rows(2), path)


def _fail_over_a_checkpoint(plugins: DurabilityConformance, path: Path) -> None:
    save(plugins, rows(1), path)
    rank = int(os.environ["RANK"])
    save(plugins, {**rows(2), f"own {rank}": _CannotBePickled() if rank == 1 else rank}, path)


def _steps_found(plugins: DurabilityConformance, path: Path) -> list[str]:
    """Which step the directory loads as: one, ``"refused"``, or what it is mixed from."""
    found = rows(-1)
    try:
        load(plugins, found, path)
    except BaseException:
        return ["refused"]
    for step in (1, 2):
        if not differences(rows(step), found):
            return [str(step)]
    return ["mixed", *differences(rows(1), found)]
