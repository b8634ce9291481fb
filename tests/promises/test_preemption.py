"""A signal on any rank makes all ranks save at the same step; then the process ends as it would have."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter
from robust_dcp.manager.preemption import _signals
from robust_dcp.storage.files.disk import Disk
from tests.harness.faults import fail_in
from tests.harness.ranks import errors, run_ranks, values

LAST_STEP = 10_000


def state(step: int) -> dict[str, Any]:
    return {f"weight {dist.get_rank()}": torch.full((10,), float(step)), "step": step}


def train(root: str, signals: dict[int, int], every: int | None, is_async: bool, own_handler: bool) -> list[int]:
    """Train until a save was asked for. Some ranks are signalled meanwhile, each at a moment of its own."""
    rank = dist.get_rank()
    told: list[int] = []
    if own_handler:
        for number in set(signals.values()):
            signal.signal(number, lambda number, frame: told.append(number))
    manager = CheckpointManager(root)
    for step in range(LAST_STEP):
        if step == 5 and rank in signals:
            # A thread that sleeps does not know what the ranks do. Two signals are to come in one step.
            delay_seconds = 0.05 if len(signals) == 1 else 0
            threading.Timer(delay_seconds, os.kill, (os.getpid(), signals[rank])).start()
            while len(signals) > 1 and not _signals.noted:
                time.sleep(0.001)
        time.sleep(0.002)
        if manager.should_save(step, every=every):
            Path(root, f"asked.{rank}").write_text(str(step))
            if is_async:
                manager.async_save(step, state(step)).result()
                robust_dcp.finish_async_saves()
            else:
                manager.save(step, state(step))
            # The signal is delivered by now or soon. Without a handler of its own it ends this process.
            while rank in signals and not told:
                time.sleep(0.01)
            return told
    raise AssertionError("no step was asked for")


def asked(root: Path) -> set[int]:
    return {int(path.read_text()) for path in root.glob("asked.*")}


@pytest.mark.parametrize(
    ("signals", "every", "is_async"),
    [
        ({2: signal.SIGTERM}, 1, False),
        ({0: signal.SIGUSR1}, None, True),
        ({1: signal.SIGTERM, 3: signal.SIGUSR1}, 1, False),
        ({3: signal.SIGTERM}, 7, True),
    ],
)
def test_all_ranks_save_at_the_same_step_and_who_was_signalled_ends_by_the_signal(
    signals: dict[int, int], every: int | None, is_async: bool, tmp_path: Path
) -> None:
    outcomes = run_ranks(4, train, str(tmp_path), signals, every, is_async, False, timeout_seconds=150)
    (step,) = asked(tmp_path)
    assert len(list(tmp_path.glob("asked.*"))) == 4 and step % (every or 1) == 0
    assert [outcome.exitcode for outcome in outcomes if outcome.rank not in signals] == [0] * (4 - len(signals))
    ended = {outcome.rank: -outcome.exitcode for outcome in outcomes if outcome.exitcode != 0}
    assert ended == {rank: int(number) for rank, number in signals.items()}
    found = {f"weight {rank}": torch.zeros(10) for rank in range(4)}
    robust_dcp.load(found, checkpoint_id=tmp_path / f"step_{step}")
    assert all((tensor == step).all() for tensor in found.values())


def test_a_handler_of_the_program_s_own_is_called_after_the_save(tmp_path: Path) -> None:
    outcomes = run_ranks(4, train, str(tmp_path), {2: signal.SIGUSR1}, 1, False, True, timeout_seconds=150)
    assert values(outcomes) == [[], [], [int(signal.SIGUSR1)], []]


def train_where_the_first_save_fails(root: str, is_async: bool) -> list[int]:
    manager, steps = CheckpointManager(root), []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for step in range(6):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if manager.should_save(step, every=1):
            steps.append(step)
            try:
                fault = fail_in("plan", rank=0) if len(steps) == 1 else contextlib.nullcontext()
                with fault:
                    if is_async:
                        manager.async_save(step, state(step)).result()
                    else:
                        manager.save(step, state(step))
            except robust_dcp.RobustCheckpointError:
                continue
    return steps


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_is_asked_for_again_and_one_that_succeeds_is_not(is_async: bool, tmp_path: Path) -> None:
    assert values(run_ranks(2, train_where_the_first_save_fails, str(tmp_path), is_async)) == [[2, 3], [2, 3]]


class SlowToCommit(Disk):
    """Commits ``step_1`` only once ``step_2`` is under way."""

    def rename(self, source: str, target: str) -> None:
        if target.endswith("step_1/.metadata"):
            time.sleep(1.0)
        super().rename(source, target)


def save_before_and_after_the_signal(root: str) -> None:
    manager = CheckpointManager(root, disk=SlowToCommit())
    manager.should_save(0)
    manager.async_save(1, state(1), storage_writer=RobustWriter(manager.path_of(1), disk=SlowToCommit()))
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(2, every=1)
    manager.async_save(2, state(2))
    robust_dcp.finish_async_saves()
    signal.pause()  # until the signal is delivered


def test_an_earlier_async_save_that_ends_meanwhile_does_not_end_the_process(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, save_before_and_after_the_signal, str(tmp_path), timeout_seconds=150)
    assert outcome.exitcode == -signal.SIGTERM, str(outcome)
    assert (tmp_path / "step_2/.metadata").exists()


def ask_for_different_steps(root: str) -> bool:
    return CheckpointManager(root).should_save(dist.get_rank())


def test_ranks_that_ask_for_different_steps_are_told(tmp_path: Path) -> None:
    for error in errors(run_ranks(2, ask_for_different_steps, str(tmp_path))):
        assert error.type_name == "ExchangeError" and "and for another step on another rank" in error.message


def use_workers(root: str) -> list[int]:
    """Workers of a DataLoader are forked, and ended by SIGTERM."""
    CheckpointManager(root).should_save(0)
    loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    found = [int(each) for each in loader]
    iterator = loader._iterator
    assert iterator is not None
    workers = list(iterator._workers)  # type: ignore[attr-defined]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 2
    os._exit(0 if found == list(range(8)) else 1)  # the loader would complain of workers that were ended


def test_forked_children_end_by_the_signal_as_ever(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, use_workers, str(tmp_path))
    assert outcome.exitcode == 0, str(outcome)


def test_the_first_call_comes_from_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="has to be called from the main thread"):
        thread.submit(CheckpointManager(tmp_path).should_save, 0).result()


@pytest.mark.parametrize(("step", "every"), [(-1, 1), (1, 0)])
def test_what_makes_no_sense_is_refused(step: int, every: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"from 0 on|at least 1"):
        CheckpointManager(tmp_path).should_save(step, every=every)
