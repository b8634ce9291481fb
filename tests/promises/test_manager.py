"""A manager sees its own series and no other, keeps what it says, touches nothing else, and saves on a signal."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader

import robust_dcp
from robust_dcp import CheckpointManager, CorruptCheckpoint, StorageError
from robust_dcp.manager.preemption import _signals
from tests.cli.commands import shell
from tests.drain.checkpoints import ONE_THREAD
from tests.faults.disk import CHANGES, FaultDisk, kill
from tests.harness.damage import data_files
from tests.harness.faults import fail_in
from tests.harness.ranks import errors, run_ranks, values

TRACKER = "latest_checkpointed_iteration.txt"


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((50,), float(value))}


def loaded(path: Path) -> float:
    found = state(-1)
    robust_dcp.load(found, checkpoint_id=path)
    return float(found["weight"][0])


def save_by_stock(path: Path, value: float) -> None:
    dcp.save(state(value), checkpoint_id=path, no_dist=True)


def save_steps(manager: CheckpointManager, *steps: int, value: float = 0) -> list[int]:
    for step in steps:
        manager.save(step, state(value + step))
    return [each.step for each in manager.checkpoints()]


def content(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


class TestSeries:
    def test_a_name_may_hold_anything_before_the_step_but_a_digit_right_before_it(self, tmp_path: Path) -> None:
        for name in ("run 7, v1.2-{step}", "{{x}}_{step}", "{step}", "2024-01-{step}"):
            manager = CheckpointManager(tmp_path, name=name, keep_last=1)
            assert save_steps(manager, 1, 2) == [2]
        assert save_steps(CheckpointManager(tmp_path, name="{step:06d}"), 3) == [2, 3]  # zeros do not matter
        for name in ("v1{step}", ".hidden_{step}", "{step}{step}", "a/b_{step}", "checkpoint", "{epoch}", "{step:s}"):
            with pytest.raises(ValueError, match="name="):
                CheckpointManager(tmp_path, name=name)

    def test_a_checkpoint_of_ours_that_stock_has_replaced_is_not_ours_any_more(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_last=1)
        save_steps(manager, 1)
        save_by_stock(tmp_path / "step_1", 9)
        assert save_steps(manager, 2, 3) == [1, 3]

    def test_a_removal_that_was_cut_off_is_ended_by_its_own_series(self, tmp_path: Path) -> None:
        ema = CheckpointManager(tmp_path, name="ema_{step}", keep_last=1)
        save_steps(ema, 1)
        (tmp_path / "ema_1").rename(tmp_path / ".robust_dcp.removing.ema_1")
        CheckpointManager(tmp_path, keep_last=1).prune()
        assert (tmp_path / ".robust_dcp.removing.ema_1").exists()
        ema.prune()
        assert not (tmp_path / ".robust_dcp.removing.ema_1").exists()


class TestCommands:
    def test_a_root_with_several_series_is_refused_until_one_is_named(self, tmp_path: Path) -> None:
        save_by_stock(tmp_path / "base_model_13", 1)
        save_by_stock(tmp_path / "actor_50", 1)
        for step in (100, 200):
            for name in ("actor", "critic"):
                save_steps(CheckpointManager(tmp_path, name=name + "_{step}"), step)
        states = {row[1]: row[4] for row in shell("ls", tmp_path).rows}
        assert states["actor_200"] == states["critic_200"] == "committed, latest" != states["actor_100"]
        ended = shell("prune", tmp_path, "--keep-last", 1, "--yes")
        assert ended.code == 2 and "holds 2 series of checkpoints" in ended.err and "--name 'actor_{step}'" in ended.err
        ended = shell("prune", tmp_path, "--keep-last", 1, "--yes", "--name", "actor_{step}")
        assert ended.code == 0
        assert (ended.rows[0][1], ended.rows[0][3]) == ("actor_50", "keep, robust_dcp has not saved it")
        assert sorted(path.name for path in tmp_path.glob("*_*0")) == [
            "actor_200",
            "actor_50",
            "critic_100",
            "critic_200",
        ]

    def test_checkpoints_of_others_are_no_series_to_choose_from(self, tmp_path: Path) -> None:
        for name in ("base_model_13", "step_1"):
            save_by_stock(tmp_path / name, 1)
        save_steps(CheckpointManager(tmp_path), 3, 4)
        assert shell("prune", tmp_path, "--keep-last", 1, "--yes").code == 0
        assert {path.name for path in tmp_path.iterdir()} == {"base_model_13", "step_1", "step_4", "latest"}


PASSING = (errno.ETIMEDOUT, errno.ESTALE, errno.EIO, errno.EMFILE)
CALLS = ["open:*.distcp", "open:step_2/.metadata", "stat:step_2/.metadata", "open:latest"]


class TestErrorsThatPass:
    @pytest.mark.parametrize(("call", "number"), list(zip(CALLS, PASSING, strict=True)))
    def test_what_the_file_system_refuses_once_is_tried_again_and_costs_no_step(
        self, call: str, number: int, tmp_path: Path
    ) -> None:
        """As a network file system does for a while."""
        save_steps(CheckpointManager(tmp_path), 1, 3, 2)
        found = state(-1)
        with FaultDisk(tmp_path, on={f"{call}#1": OSError(number, "")}) as disk:
            one = CheckpointManager(tmp_path).load_latest(found)
        assert fnmatch.filter(disk.names(), call.partition(":")[2])[1:], "the call was never made again"
        assert one is not None and one.checkpoint.step == found["weight"][0] == 2 and one.skipped == ()

    @pytest.mark.parametrize("call", [*CALLS, "list:."])
    def test_what_the_file_system_refuses_for_good_is_raised_and_no_older_step_is_loaded(
        self, call: str, tmp_path: Path
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 3, 2)
        found = state(-1)
        with FaultDisk(tmp_path, on={call: OSError(errno.ETIMEDOUT, "")}), pytest.raises(StorageError) as caught:
            CheckpointManager(tmp_path).load_latest(found)
        assert caught.value.errno == errno.ETIMEDOUT
        assert (found["weight"] == -1).all()

    def test_a_record_that_cannot_be_read_now_keeps_its_checkpoint(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path)
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
            manager.save(step, state(step), metrics={"loss": loss})
        with FaultDisk(tmp_path, on={"open:step_1/.robust_dcp.step.json": OSError(errno.EIO, "")}):
            CheckpointManager(tmp_path, keep_best="loss").prune()
        assert [each.step for each in manager.checkpoints()] == [1, 3]

    def test_a_note_of_a_copy_that_cannot_be_read_now_keeps_its_checkpoint(self, tmp_path: Path) -> None:
        """The copy may not have arrived. Here the bucket never answers, so it has not."""
        manager = CheckpointManager(tmp_path / "root", drain_to=tmp_path / "file" / "copies", drain_options=ONE_THREAD)
        (tmp_path / "file").write_text("no directory can be made below it")
        with contextlib.suppress(StorageError):  # of the copy, now or when it is waited for: the save is committed
            save_steps(manager, 1)
            robust_dcp.finish_async_saves()
        save_steps(CheckpointManager(tmp_path / "root"), 2, 3)
        note = "step_1/.robust_dcp.drain.json"
        with FaultDisk(tmp_path / "root", on={f"open:{note}": OSError(errno.EIO, "")}) as disk:
            CheckpointManager(tmp_path / "root", keep_last=1).prune()
        assert note in disk.names("open"), "the note was never looked at"
        assert [each.step for each in CheckpointManager(tmp_path / "root").checkpoints()] == [1, 3]


def save_and_be_killed(root: str, name: str, keep_last: int | None, step: int, value: float, number: int) -> int:
    manager = CheckpointManager(root, name=name, keep_last=keep_last)
    with FaultDisk(root, counted=CHANGES | {"open", "list"}, at=(number, kill)) as disk:
        manager.save(step, state(value))
    return disk.n_counted


@dataclass
class Expected:
    """What a series must be.

    Attributes:
        values: what each step may hold.
        order: how many saves there were before that of a step.
        named: what ``latest`` may name; ``None`` if it need not be there.
        foreign: steps that stock has saved.
        damaged: steps that do not load.
        n_saves: how many there were.
    """

    name: str
    keep_last: int | None
    values: dict[int, set[float]] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    named: set[int | None] = field(default_factory=lambda: {None})
    foreign: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    n_saves: int = 0

    def committed(self, step: int, value: float) -> None:
        self.n_saves += 1
        self.values[step], self.order[step], self.named = {value}, self.n_saves, {step}
        self.foreign.discard(step)
        self.damaged.discard(step)

    def kept(self, latest: int) -> set[int]:
        """What may not be removed, by the rules of docs/manager.md."""
        if self.keep_last is None:
            return set(self.values)
        steps = sorted(self.values)
        until_latest = [step for step in steps if step <= latest]
        return {*steps[-self.keep_last :], *until_latest[-self.keep_last :], latest, steps[-1], *self.foreign}

    def pruned_to(self, steps: set[int]) -> None:
        self.values = {step: values for step, values in self.values.items() if step in steps}
        self.damaged &= steps

    def loads(self, latest: int) -> list[int]:
        """The steps in the order in which they are tried."""
        rest = sorted(set(self.values) - {latest}, reverse=True)
        rest.sort(key=lambda step: step > latest and self.order[step] < self.order[latest])
        return [latest, *rest]


MOST_KILLS = 3
"""In one history: each takes a process, as long as ten other steps."""


class Roots(RuleBasedStateMachine):
    """Several series in one root beside what others have put there: saves, kills, damage, loads and removals."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="series-")))
        self.series: list[Expected] = []
        self.foreign: dict[Path, dict[str, bytes]] = {}
        self.n_values = 0
        self.n_kills = 0

    def teardown(self) -> None:
        self.stack.close()

    def put_foreign(self, name: str, make: Callable[[Path], object]) -> None:
        path = self.root / name
        make(path)
        self.foreign[path] = content(path)

    def manager(self, series: Expected) -> CheckpointManager:
        return CheckpointManager(self.root, name=series.name, keep_last=series.keep_last)

    def value(self) -> float:
        self.n_values += 1
        return float(self.n_values)

    @initialize(keep_last=st.lists(st.sampled_from([None, 1, 2]), min_size=3, max_size=3))
    def begin(self, keep_last: list[int | None]) -> None:
        names = ("step_{step}", "ema_{step}", "iter_{step:07d}")
        self.series = [Expected(name, number) for name, number in zip(names, keep_last, strict=True)]
        (self.root / TRACKER).write_text("7")
        self.series[2].named = {7}  # stock's checkpoints are named by the tracker alone, until we save there
        for name in ("pretrained7", "base_model_13"):
            self.put_foreign(name, lambda path: save_by_stock(path, 0.5))
        for name in ("wandb-2024", "worker0"):
            self.put_foreign(name, Path.mkdir)
            os.utime(self.root / name, (0, 0))

    @rule(which=st.integers(0, 2), step=st.integers(1, 9))
    def save(self, which: int, step: int) -> None:
        series, value = self.series[which], self.value()
        self.manager(series).save(step, state(value))
        series.committed(step, value)
        series.pruned_to(series.kept(step))
        assert [each.step for each in self.manager(series).checkpoints()] == sorted(series.values)

    @precondition(lambda self: self.n_kills < MOST_KILLS)
    @rule(which=st.integers(0, 2), step=st.integers(1, 9), number=st.integers(0, 60))
    def save_and_be_killed(self, which: int, step: int, number: int) -> None:
        series, value = self.series[which], self.value()
        arguments = (str(self.root), series.name, series.keep_last, step, value, number)
        self.n_kills += 1
        (outcome,) = run_ranks(1, save_and_be_killed, *arguments)
        assert outcome.error is None, str(outcome)
        steps = {each.step for each in self.manager(series).checkpoints()}
        before = set(series.values)
        holds = None
        if step in steps:
            with contextlib.suppress(CorruptCheckpoint):
                holds = loaded(Path(self.manager(series).path_of(step)))
        if holds == value or outcome.exitcode == 0:
            assert holds == value
            named = series.named
            series.committed(step, value)
            assert series.kept(step) <= steps <= before | {step}
            if outcome.exitcode != 0:  # it may have been killed before it moved the name
                series.named |= named
            series.pruned_to(steps)
        else:
            assert steps == before
        self.latest(series)

    def latest(self, series: Expected) -> int:
        """The step of the latest checkpoint, which is the one that is named, or the highest."""
        latest = self.manager(series).latest()
        assert (latest is None) == (not series.values)
        if latest is None:
            return -1
        highest = max(series.values)
        assert latest.step in {step if step in series.values else highest for step in series.named}
        return latest.step

    @rule(which=st.integers(0, 2), step=st.integers(1, 9))
    def save_by_stock_in_the_series(self, which: int, step: int) -> None:
        series, value = self.series[which], self.value()
        if step in series.values:
            return
        path = Path(self.manager(series).path_of(step))
        if path.exists():  # a save of ours was killed there
            return
        self.put_foreign(path.name, lambda path: save_by_stock(path, value))
        series.n_saves += 1
        series.values[step], series.order[step] = {value}, series.n_saves
        series.foreign.add(step)
        self.latest(series)

    @precondition(lambda self: any(each.values for each in self.series))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        series = data.draw(st.sampled_from([each for each in self.series if set(each.values) - each.foreign] or [None]))
        if series is None:
            return
        step = data.draw(st.sampled_from(sorted(set(series.values) - series.foreign)))
        for path in data_files(Path(self.manager(series).path_of(step))):
            path.unlink()
        series.damaged.add(step)

    @rule(which=st.integers(0, 2))
    def load(self, which: int) -> None:
        series, found = self.series[which], state(-1)
        manager = self.manager(series)
        if not series.values:
            assert manager.load_latest(found) is None
            return
        order = series.loads(self.latest(series))
        whole = [step for step in order if step not in series.damaged]
        if not whole:
            with pytest.raises(CorruptCheckpoint):
                manager.load_latest(found)
            return
        one = manager.load_latest(found)
        assert one is not None and one.checkpoint.step == whole[0]
        assert [each.path for each in one.skipped] == [manager.path_of(step) for step in order[: order.index(whole[0])]]
        assert found["weight"][0].item() in series.values[whole[0]]

    @rule(which=st.integers(0, 2))
    def prune(self, which: int) -> None:
        series = self.series[which]
        manager = self.manager(series)
        manager.prune()
        if series.values and series.keep_last is not None:
            series.pruned_to(series.kept(self.latest(series)))
        assert [each.step for each in manager.checkpoints()] == sorted(series.values)

    @invariant()
    def nothing_foreign_is_touched(self) -> None:
        for path, files in self.foreign.items():
            step = next((each for each in self.series if path.name.startswith(each.name.partition("{")[0])), None)
            if step is None:
                assert path.is_dir() and content(path) == files, path
            elif int(path.name.rpartition("_")[2]) in step.foreign:  # else we have saved over it, as we were asked to
                # A save of ours that was killed may have left its own files beside these.
                assert files.items() <= content(path).items(), path

    @invariant()
    def the_tracker_names_megatrons_series(self) -> None:
        if self.series and not self.series[2].n_saves:
            assert (self.root / TRACKER).read_text() == "7"


# A history with kills takes seconds to run again, so a failing one is shown as it was found.
WITHOUT_SHRINKING = [phase for phase in Phase if phase is not Phase.shrink]


@pytest.mark.timeout(900)
class TestRoots(Roots.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=15, stateful_step_count=15, deadline=None, phases=WITHOUT_SHRINKING)


# --- a signal makes all ranks save at the same step -------------------------------------------------------------------

LAST_STEP = 10_000


def state_of_rank(step: int) -> dict[str, Any]:
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
                manager.async_save(step, state_of_rank(step)).result()
                robust_dcp.finish_async_saves()
            else:
                manager.save(step, state_of_rank(step))
            # The signal is delivered by now or soon. Without a handler of its own it ends this process.
            while rank in signals and not told:
                time.sleep(0.01)
            return told
    raise AssertionError("no step was asked for")


@pytest.mark.parametrize(
    ("signals", "every", "is_async", "own_handler"),
    [
        ({2: signal.SIGTERM}, 1, False, False),
        ({0: signal.SIGUSR1}, None, True, False),
        ({1: signal.SIGTERM, 3: signal.SIGUSR1}, 1, False, False),
        ({3: signal.SIGUSR1}, 7, True, True),
    ],
)
def test_all_ranks_save_at_the_same_step_and_who_was_signalled_ends_by_the_signal_or_has_its_handler_called(
    signals: dict[int, int], every: int | None, is_async: bool, own_handler: bool, tmp_path: Path
) -> None:
    outcomes = run_ranks(4, train, str(tmp_path), signals, every, is_async, own_handler, timeout_seconds=150)
    (step,) = {int(path.read_text()) for path in tmp_path.glob("asked.*")}
    assert len(list(tmp_path.glob("asked.*"))) == 4 and step % (every or 1) == 0
    ended = {outcome.rank: -outcome.exitcode for outcome in outcomes if outcome.exitcode != 0}
    called = {outcome.rank: outcome.value[0] for outcome in outcomes if outcome.value}
    signalled = {rank: int(number) for rank, number in signals.items()}
    assert (ended, called) == (({}, signalled) if own_handler else (signalled, {}))
    found = {f"weight {rank}": torch.zeros(10) for rank in range(4)}
    robust_dcp.load(found, checkpoint_id=tmp_path / f"step_{step}")
    assert all((tensor == step).all() for tensor in found.values())


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
                        manager.async_save(step, state_of_rank(step)).result()
                    else:
                        manager.save(step, state_of_rank(step))
            except robust_dcp.RobustCheckpointError:
                continue
    return steps


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_is_asked_for_again_and_one_that_succeeds_is_not(is_async: bool, tmp_path: Path) -> None:
    assert values(run_ranks(2, train_where_the_first_save_fails, str(tmp_path), is_async)) == [[2, 3], [2, 3]]


def save_before_and_after_the_signal(root: str) -> None:
    """``step_1`` is committed only once ``step_2`` is under way."""
    manager = CheckpointManager(root)
    manager.should_save(0)
    with FaultDisk(root, on={"rename:step_1/.metadata": lambda call: time.sleep(1.0)}):
        manager.async_save(1, state_of_rank(1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2, every=1)
        manager.async_save(2, state_of_rank(2))
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
