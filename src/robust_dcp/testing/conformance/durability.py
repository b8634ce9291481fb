"""The suite for whole or not at all: a save that fails, or is killed anywhere, leaves the checkpoint that was there.

DCP promises less: stock's ``FileSystemWriter`` overwrites in place, and does not pass.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from robust_dcp.testing.conformance.round_trips import Plugins, load, rows, save
from robust_dcp.testing.damage import data_files, flip_bit
from robust_dcp.testing.file_calls import FileCalls
from robust_dcp.testing.fingerprints import differences
from robust_dcp.testing.ranks import errors, run_ranks, values

__all__ = ["DurabilityConformance"]


class DurabilityConformance(Plugins):
    """Derive from it, and say how your writer and your reader are made. The class has to be one that ranks can import.

    A save is killed before each call that opens, renames or removes a file (of Python code: each that raises an
    auditing event of PEP 578).
    """

    def test_killed_before_any_file_call_the_old_or_the_new_checkpoint_is_there(self, tmp_path: Path) -> None:
        (calls,) = values(run_ranks(1, _count_file_calls, self, tmp_path / "counted"))
        assert calls > 0
        for number in range(calls):
            path = tmp_path / str(number)
            (outcome,) = run_ranks(1, _save_until_killed, self, path, number)
            assert outcome.exitcode == -signal.SIGKILL, f"it was not killed before call {number}: {outcome}"
            (steps,) = values(run_ranks(1, _steps_found, self, path))
            assert steps in (["1"], ["2"]), f"killed before call {number} of {calls}: it loads as {steps}"

    def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(self, tmp_path: Path) -> None:
        errors(run_ranks(2, _fail_over_a_checkpoint, self, tmp_path))
        assert values(run_ranks(2, _steps_found, self, tmp_path)) == [["1"], ["1"]]

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


def _count_file_calls(plugins: DurabilityConformance, path: Path) -> int:
    save(plugins, rows(1), path)
    seen = FileCalls(path)
    save(plugins, rows(2), path)
    return seen.count


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
