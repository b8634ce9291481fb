"""A manager sees its own series and no other, keeps what it says, touches nothing else, and saves on a signal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import logging
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader

import robust_dcp
from robust_dcp import CheckpointManager, CorruptCheckpoint, KeepBest, KeepLast, RobustCheckpointError, StorageError
from tests.cli.commands import shell
from tests.drain.checkpoints import ONE_THREAD
from tests.faults.disk import CHANGES, Fault, FaultDisk, Gate, kill
from tests.harness.damage import data_files
from tests.harness.faults import fail_in, kill_in
from tests.harness.ranks import errors, run_ranks, values
from tests.promises.scenarios import content
from tests.storage.forged import Call

TRACKER = "latest_checkpointed_iteration.txt"


def state(value: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.full((50,), float(value)), f"own {rank}": torch.full((50,), value + rank / 10)}


def loaded(path: Path) -> float:
    found = state(-1)
    robust_dcp.load(found, checkpoint_id=path)
    return float(found["shared"][0])


def save_by_stock(path: Path, value: float) -> None:
    dcp.save(state(value), checkpoint_id=path, no_dist=True)


def save_steps(manager: CheckpointManager, *steps: int, value: float = 0) -> list[int]:
    for step in steps:
        manager.save(step, state(value + step))
    return [each.step for each in manager.checkpoints()]


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
        left = {path.name for path in tmp_path.glob("*_*0")}
        assert left == {"actor_200", "actor_50", "critic_100", "critic_200"}


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
        with FaultDisk(tmp_path, on={f"{call}#1": OSError(number, ""), "stat:step_2": OSError(number, "")}) as disk:
            one = CheckpointManager(tmp_path).load_latest(found)
        assert fnmatch.filter(disk.names(), call.partition(":")[2])[1:], "the call was never made again"
        assert one is not None and one.checkpoint.step == found["shared"][0] == 2 and one.skipped == ()

    @pytest.mark.parametrize("call", [*CALLS, "list:."])
    def test_what_the_file_system_refuses_for_good_is_raised_and_no_older_step_is_loaded(
        self, call: str, tmp_path: Path
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 3, 2)
        found = state(-1)
        with FaultDisk(tmp_path, on={call: OSError(errno.ETIMEDOUT, "")}), pytest.raises(StorageError) as caught:
            CheckpointManager(tmp_path).load_latest(found)
        assert caught.value.errno == errno.ETIMEDOUT
        assert (found["shared"] == -1).all()

    def test_on_commit_is_called_when_the_step_is_noted(self, tmp_path: Path) -> None:
        manager, latest = CheckpointManager(tmp_path), list[Any]()
        manager.save(1, state(1), on_commit=lambda: latest.append(manager.latest()))
        manager.async_save(2, state(2), on_commit=lambda: latest.append(manager.latest())).result()
        assert [each.step for each in latest] == [1, 2]

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
            if outcome.exitcode != 0 and (series is self.series[2] or None in named):
                series.named |= named  # killed before it moved Megatron's tracker, or wrote the first name
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
        assert found["shared"][0].item() in series.values[whole[0]]

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


# --- what is kept, loaded and removed, while disks refuse and other programs change what is there ---------------------

REFUSED = OSError(errno.EACCES, "")


class KeepFirst:
    def kept(self, checkpoints: Any) -> Any:
        return checkpoints[:1]


class BrokenPolicy:
    def kept(self, checkpoints: Any) -> Any:
        raise KeyError("a mistake in the policy")


POLICIES: list[tuple[dict[str, Any], list[int], bool]] = [
    ({}, [10, 20, 30, 40, 50], False),
    ({"keep_last": 2}, [40, 50], True),
    ({"keep_last": 1, "keep_every": 20}, [20, 40, 50], False),
    ({"keep_best": "loss"}, [30, 50], True),  # of 20 and 30, which are equally good, the newer one
    ({"keep": [KeepBest("loss", number=2, best="largest"), KeepLast(1)]}, [40, 50], False),
    ({"keep_best": "los"}, [10, 20, 30, 40, 50], True),  # no policy can say anything of them
    ({"keep_best": "los", "keep_last": 2}, [40, 50], False),
    ({"keep": [KeepBest("los"), KeepBest("loss")]}, [30, 50], False),
    ({"keep": [KeepFirst()]}, [10, 50], False),
    ({"keep": [BrokenPolicy()]}, [10, 20, 30, 40, 50], False),
]
"""Options, what is kept of the steps 10 to 50, and whether they are saved beside training."""


def save_by_each_policy(root: str) -> list[list[int]]:
    kept = []
    for number, (options, _, is_async) in enumerate(POLICIES):
        manager = CheckpointManager(f"{root}/{number}", **options)
        for step in (10, 20, 30, 40, 50):
            (manager.async_save if is_async else manager.save)(step, state(step), metrics={"loss": abs(step - 25.0)})
        robust_dcp.finish_async_saves()
        dist.barrier()
        kept.append([each.step for each in manager.checkpoints()])
    return kept


def test_what_a_policy_keeps_stays_and_so_does_the_newest(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_by_each_policy, str(tmp_path))) == [[kept for _, kept, _ in POLICIES]] * 2


def saves(step: Any, **options: Any) -> Callable[[Path], object]:
    return lambda root: CheckpointManager(root).save(step, state(1), **options)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda root: KeepLast(0), ValueError, "must be at least 1, and a whole number"),
        (lambda root: KeepBest("loss", best="lowest"), ValueError, "best is 'smallest' or 'largest'"),  # type: ignore[arg-type]
        (lambda root: CheckpointManager(root, keep_last=1.5), ValueError, "must be at least 1"),  # type: ignore[arg-type]
        (lambda root: CheckpointManager(root, drain_to=root.as_uri()), ValueError, "the manager's own root"),
        (lambda root: CheckpointManager(root).should_save(-1, every=1), ValueError, "from 0 on"),
        (lambda root: CheckpointManager(root).should_save(1, every=0), ValueError, "at least 1"),
        (lambda root: CheckpointManager(root, keep=[3]), TypeError, "has no method kept"),  # type: ignore[list-item]
        (lambda root: CheckpointManager(root, keep=[KeepLast]), TypeError, "has no method kept"),  # type: ignore[list-item]
        (lambda root: CheckpointManager(root, keep_best=["loss"]), ValueError, "the name of a metric"),  # type: ignore[arg-type]
        (lambda root: CheckpointManager(root, drain_to="nowhere://x/run"), ValueError, "nowhere"),
        (lambda root: CheckpointManager("memory://x/run", parity_nodes=2), ValueError, "parity_nodes is for a root"),
        (lambda root: CheckpointManager(root).load_latest({}, alow_missing=["x"]), TypeError, "alow_missing"),
        *((saves(step), ValueError, "a step is a whole|again") for step in (-1, 1.5, "3", None, 10**18)),
        (saves(1, metrics={"loss": None}), ValueError, "must be a number"),
        (saves(1, metrics={"loss": "low"}), ValueError, "must be a number"),
        (saves(1, metrics={"lo\udcffss": 1.0}), ValueError, "must be a number"),
        (saves(1, metrics={"loss": 10**400}), ValueError, "must be a number"),
        (saves(1, metrics={3: 1.0}), ValueError, "must be a number"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    call: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


class TestRecords:
    def test_a_metric_that_is_no_number_is_never_the_best_and_costs_no_other(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_best="loss", keep_last=1)
        for step, metrics in enumerate([{"loss": 2.0}, {"loss": float("nan"), "accuracy": 0.5}]):
            manager.save(step, state(step), metrics=metrics)
        assert [each.metrics for each in manager.checkpoints()] == [{"loss": 2.0}, {"accuracy": 0.5}]
        manager.save(torch.tensor(2), state(2))  # type: ignore[arg-type]  # a number of another library is a step
        assert [each.step for each in manager.checkpoints()] == [0, 2]

    def test_checkpoints_without_the_metric_stay_and_one_warning_names_the_metrics_that_there_are(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = CheckpointManager(tmp_path, keep_best="loss")
        for step, metrics in enumerate([{"loss": 2.0}, {"train_loss": 1.0}, None, {"loss": 3.0}, {"loss": 4.0}]):
            manager.save(step, state(step), metrics=metrics)
        assert [each.step for each in manager.checkpoints()] == [0, 1, 2, 4]
        (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "step_1" in warning and "'loss'" in warning and "they stay" in warning
        assert warning.endswith("The metrics that there are: loss, train_loss")

    @pytest.mark.parametrize("content", [b"{", b'{"step": "x"}', b'{"metrics": {"\xff": 1}}', b" " * (2 << 20)])
    def test_one_that_cannot_be_understood_is_no_reason_to_lose_a_checkpoint(
        self, content: bytes, tmp_path: Path
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 10)
        (tmp_path / "step_10" / ".robust_dcp.step.json").write_bytes(content)
        (checkpoint,) = CheckpointManager(tmp_path).checkpoints()
        assert checkpoint.step == 10 and checkpoint.metrics == {}


def load_what_is_there(root: str | Path, name: str = "step_{step}") -> tuple[int, float, list[str]]:
    found = state(-1)
    latest = CheckpointManager(root, name=name).load_latest(found)
    assert latest is not None
    return latest.checkpoint.step, found["shared"][0].item(), [each.reason for each in latest.skipped]


def save_on_all_ranks(root: str, *steps: int) -> list[int]:
    return save_steps(CheckpointManager(root), *steps)


class TestLoads:
    def test_a_run_that_finds_nothing_under_its_name_is_told_what_else_is_there(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for root in (tmp_path, tmp_path / "new"):
            assert CheckpointManager(root).load_latest(state(0)) is None and not caplog.records
        save_steps(CheckpointManager(tmp_path, name="ema_{step}"), 1)
        save_by_stock(tmp_path / "iter_0000003", 1)
        for root in (tmp_path, tmp_path / "ema_1"):
            assert CheckpointManager(root).load_latest(state(0)) is None
        of_root, of_checkpoint = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "holds no checkpoint called step_{step}, but" in of_root
        assert {"ema_{step}", "iter_{step}"} == set(of_root.partition("but ")[2].split(", "))
        assert of_checkpoint.endswith("but a checkpoint itself")

    def test_if_the_latest_is_damaged_the_newest_whole_one_is_loaded_and_the_others_are_named(
        self, tmp_path: Path
    ) -> None:
        values(run_ranks(2, save_on_all_ranks, str(tmp_path), 10, 20, 30, 40))
        os.truncate(data_files(tmp_path / "step_40")[1], 100)
        for step, metadata in ((30, b"nonsense"), (20, pickle.dumps(Call(os.abort)))):
            (tmp_path / f"step_{step}" / ".metadata").write_bytes(metadata)
            (tmp_path / f"step_{step}" / ".robust_dcp.index").unlink()
        for step, value, reasons in values(run_ranks(2, load_what_is_there, str(tmp_path))):
            assert (step, value) == (10, 10.0)
            assert "__" in reasons[0] and ".metadata" in reasons[1] and "abort" in reasons[2]
        for path in data_files(tmp_path / "step_10"):
            path.unlink()
        for error in errors(run_ranks(2, load_what_is_there, str(tmp_path))):
            assert error.type_name == "CorruptCheckpoint" and "none of the 4 checkpoints" in error.message
            assert all(f"step_{step}" in error.message for step in (10, 20, 30, 40))

    def test_the_path_may_be_no_utf_8(self, tmp_path: Path) -> None:
        root = os.path.join(tmp_path, os.fsdecode(b"\xff"))
        values(run_ranks(2, save_on_all_ranks, root, 10))
        assert values(run_ranks(2, load_what_is_there, root)) == [(10, 10.0, [])] * 2
        assert os.path.exists(os.path.join(root, "step_10", ".robust_dcp.index"))

    def test_a_checkpoint_that_does_not_fit_is_no_damaged_one(self, tmp_path: Path) -> None:
        save_steps(CheckpointManager(tmp_path), 10, 20)
        with pytest.raises(RobustCheckpointError, match="another key"):
            CheckpointManager(tmp_path).load_latest({"another key": torch.zeros(2)})


def fail_to_move_latest(root: str) -> str:
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    if dist.get_rank() == 0:
        (Path(root) / "latest").unlink()
        (Path(root) / "latest" / "in the way").mkdir(parents=True)
    with pytest.raises(RobustCheckpointError) as caught:
        manager.save(2, state(2))
    return str(caught.value)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:100],
    "cut off behind a dot": lambda data: data[: data.index(b".", 100) + 1],
    "flipped": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "zeros at its end": lambda data: data[:-50] + bytes(50),
}


@pytest.mark.parametrize("by", ["manager", "command", "policy of another metric"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_removals_leave_the_newest_checkpoint_that_is_whole(damage: str, by: str, tmp_path: Path) -> None:
    save_steps(CheckpointManager(tmp_path), 1, 2, 3, 4)
    for step in (3, 4):
        metadata = tmp_path / f"step_{step}" / ".metadata"
        metadata.write_bytes(DAMAGES[damage](metadata.read_bytes()))
    if by == "command":
        assert shell("prune", tmp_path, "--keep-last", 1, "--yes").code == 0
    else:
        options: dict[str, Any] = {"keep_last": 1} if by == "manager" else {"keep_best": "loss", "keep_every": 9}
        CheckpointManager(tmp_path, **options).prune()
    steps = [each.step for each in CheckpointManager(tmp_path).checkpoints()]
    assert 1 not in steps and {2, 4} <= set(steps)
    assert loaded(tmp_path / "step_2") == 2.0


class TestLatest:
    def test_if_it_cannot_move_all_ranks_are_told(self, tmp_path: Path) -> None:
        for told in values(run_ranks(2, fail_to_move_latest, str(tmp_path))):
            assert "is committed" in told and "latest" in told

    def test_it_is_what_megatrons_tracker_names_where_there_is_one(self, tmp_path: Path) -> None:
        for step in (100, 200):
            dcp.save(state(step), checkpoint_id=tmp_path / f"iter_{step:07d}", no_dist=True)
        (tmp_path / TRACKER).write_text("100")
        (tmp_path / "iter_0000300").mkdir()  # never committed
        name = "iter_{step:07d}"
        manager = CheckpointManager(tmp_path, name=name)
        assert [each.name for each in manager.checkpoints()] == ["iter_0000100", "iter_0000200"]
        assert load_what_is_there(tmp_path, name) == (100, 100.0, [])
        save_steps(manager, 400)
        assert (tmp_path / TRACKER).read_text() == "400"
        assert load_what_is_there(tmp_path, name) == (400, 400.0, [])
        (tmp_path / TRACKER).write_text("200")  # the job has gone on without the manager
        assert load_what_is_there(tmp_path, name) == (200, 200.0, [])

    def test_a_save_that_was_killed_before_it_was_named_is_later(self, tmp_path: Path) -> None:
        save_steps(CheckpointManager(tmp_path), 10, 20)
        (tmp_path / "latest").write_text("step_10")  # the job has gone back
        os.utime(tmp_path / "latest", (1, 1))  # as in a copy
        assert load_what_is_there(tmp_path) == (10, 10.0, [])
        for value, step in ((3, 30), (4, 20)):  # as if killed before they were named; the second is there already
            robust_dcp.save(state(value), checkpoint_id=tmp_path / f"step_{step}")
            assert load_what_is_there(tmp_path) == (step, value, [])


class SlowToLoad:
    """A ``Stateful`` during whose load the manager saves another step, and removes what is not kept."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.zeros(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.manager.save(2, state(2))


def save_with_two_managers(root: str) -> tuple[list[int], str]:
    """Both ranks are jobs of their own that save other steps below one root, and remove at the same time."""
    first = dist.get_rank()
    manager = CheckpointManager(root, keep_last=2)
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group()
    saved: list[int] = []
    try:
        for step in range(first, 20, 2):
            manager.save(step, state(step))
            saved.append(step)
    except StorageError as error:
        return saved, error.message
    return saved, ""


class TestRemovals:
    def test_what_a_symbolic_link_leads_to_is_never_removed_and_what_is_no_checkpoint_is_in_nobodys_way(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept, root = tmp_path / "kept for good", tmp_path / "root"
        robust_dcp.save(state(1), checkpoint_id=kept)
        root.mkdir()
        (root / "worker0").write_text("a log")
        links = {"step_1": kept, ".robust_dcp.removing.step_1": kept, "step_2": "step_2", "step_3": "nowhere"}
        for link, target in links.items():
            (root / link).symlink_to(target)
        assert save_steps(CheckpointManager(root, keep_last=1), 11, 12, 13) == [1, 13]
        assert loaded(kept) == 1 and (root / "worker0").read_text() == "a log"
        assert not (root / "step_12").exists()
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        "call", ["stat:step_1/.metadata#1", "stat:step_1/.metadata#2", "rename:.robust_dcp.removing.step_1"]
    )
    def test_one_that_cannot_be_looked_at_or_removed_does_not_keep_others_from_being_removed(
        self, call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2, 3)
        manager = CheckpointManager(tmp_path, keep_last=1)
        with FaultDisk(tmp_path, on={call: REFUSED}):
            assert manager.prune() == [str(tmp_path / "step_2")]
        assert [each.step for each in manager.checkpoints()] == [1, 3]
        if call.startswith("rename"):
            assert "step_1 is not removed: rename " in caplog.text
            return
        with FaultDisk(tmp_path, on={call: REFUSED}), pytest.raises(StorageError, match="Permission denied"):
            manager.checkpoints()  # it may be the latest

    @pytest.mark.parametrize(("error", "is_told"), [(PermissionError(13, "no"), True), (FileNotFoundError(), False)])
    def test_files_that_cannot_be_removed_are_told_and_removed_later(
        self, error: OSError, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 1, 2)

        def fail(path: str) -> None:
            raise error

        with monkeypatch.context() as changed:
            changed.setattr(shutil, "rmtree", fail)
            CheckpointManager(tmp_path, keep_last=1).prune()
        assert ("step_1 is not removed: " in caplog.text) is is_told
        assert not (tmp_path / "step_1").exists()  # no half checkpoint has its name
        CheckpointManager(tmp_path, keep_last=1).prune()
        assert sorted(os.listdir(tmp_path)) == ["latest", "step_2"]

    @pytest.mark.parametrize("file_system", ["local", "nfs"])
    def test_a_load_holds_the_checkpoint_that_it_reads(
        self, file_system: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        lock, manager = fcntl.flock, CheckpointManager(tmp_path, keep_last=1)

        def lock_on_nfs(fd: int, operation: int) -> None:
            if operation & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "only for a file that is open for writing")
            lock(fd, operation)

        if file_system == "nfs":
            monkeypatch.setattr(fcntl, "flock", lock_on_nfs)
        robust_dcp.save({"slow": {"value": torch.ones(3)}}, checkpoint_id=manager.path_of(1))
        robust_dcp.load({"slow": SlowToLoad(manager)}, checkpoint_id=manager.path_of(1))
        assert [each.step for each in manager.checkpoints()] == [1, 2]
        assert manager.prune() == [str(tmp_path / "step_1")]

    def test_what_another_manager_removes_right_after_its_commit_is_no_failure_of_its_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_steps(CheckpointManager(tmp_path), 20)
        other = CheckpointManager(tmp_path, keep_last=1)
        with FaultDisk(tmp_path, on={"rename:latest": lambda rename: shutil.rmtree(tmp_path / "step_10")}):
            save_steps(CheckpointManager(tmp_path), 10)
        assert "step_10 was removed right after its commit" in caplog.text
        save_steps(CheckpointManager(tmp_path), 15, 30)
        caplog.clear()
        with FaultDisk(tmp_path, on={"create:step_15/*": lambda create: shutil.rmtree(tmp_path / "step_15")}):
            assert other.prune() == [str(tmp_path / "step_15"), str(tmp_path / "step_20")] and not caplog.text
        assert load_what_is_there(tmp_path) == (30, 30.0, [])

    def test_of_two_jobs_that_save_below_one_root_at_once_one_goes_on_and_loses_nothing(self, tmp_path: Path) -> None:
        outcomes = values(run_ranks(2, save_with_two_managers, str(tmp_path)))
        refusals = [message for _, message in outcomes if message]
        assert len(refusals) <= 1 and all("has taken over the series" in message for message in refusals)
        manager, last = (
            CheckpointManager(tmp_path, keep_last=2),
            {saved[-1] for saved, message in outcomes if not message},
        )
        assert last and last <= {each.step for each in manager.checkpoints()}
        found = {"shared": torch.zeros(50)}
        latest = manager.load_latest(found)
        assert latest is not None and found["shared"][0] == latest.checkpoint.step and latest.skipped == ()

    def test_what_killed_jobs_have_left_of_latest_is_removed_an_hour_later(self, tmp_path: Path) -> None:
        manager, mark, an_hour_ago = (
            CheckpointManager(tmp_path, keep_last=1, name="iter_{step}"),
            "0" * 16,
            time.time() - 4000,
        )
        save_steps(manager, 1)
        names = [f"latest.iter_.{mark}.tmp", f"{TRACKER}.{mark}.tmp"]
        others = [
            f"latest.{mark}.tmp",
            f"latest.iter_.{mark[1:]}.tmp",
            f"latest.iter_.{mark}",
            f"latest.iter_.{'1' * 16}.tmp",
        ]
        for name in (*names, *others):
            (tmp_path / name).touch()
            if "1" not in name:
                os.utime(tmp_path / name, (an_hour_ago, an_hour_ago))
        save_steps(manager, 2)
        assert sorted(os.listdir(tmp_path)) == sorted([*others, "iter_2", "latest.iter_"])

    def test_whoever_waits_for_all_saves_waits_for_the_removals_too(self, tmp_path: Path) -> None:
        manager, gate = CheckpointManager(tmp_path, keep_last=1), Gate()
        manager.save(1, state(1))
        with FaultDisk(tmp_path, on={"rename:.robust_dcp.removing.*": gate}):
            manager.async_save(2, state(2)).result()
            assert not robust_dcp.finish_async_saves(timeout_seconds=0.1) and (tmp_path / "step_1").exists()
            gate.opened.set()
            assert robust_dcp.finish_async_saves() and not (tmp_path / "step_1").exists()


def go_on_as_another_job(root: str, loads: bool, *steps: int) -> list[str]:
    """Save as a job that was just started, and return what it has warned of."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    manager = CheckpointManager(root)
    if loads:
        manager.load_latest({"shared": torch.zeros(50)})
    for step in steps:
        manager.save(step, state(1000 + step))
    return messages


def save_beside_another_job(root: str, is_saving: str, may_go_on: str) -> None:
    manager = CheckpointManager(root)
    manager.save(10, state(10))

    def wait(event: Any) -> None:
        if (event.name, event.phase) == ("phase_started", "write"):
            Path(is_saving).touch()
            wait_for(Path(may_go_on))

    with robust_dcp.on_event(wait):
        manager.save(20, state(20))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def another_job(root: Path, *steps: int, loads: bool = False, n_ranks: int = 1) -> list[str]:
    (messages, *_) = values(run_ranks(n_ranks, go_on_as_another_job, str(root), loads, *steps))
    return [each for each in messages if "job" in each]


def save_with_all_ranks_refused(root: str) -> str:
    manager = CheckpointManager(root)
    manager.save(10, state(10))
    if dist.get_rank() == 0:
        another = run_ranks(1, go_on_as_another_job, root, False, 11, init=False)
        values(another)
    with pytest.raises(StorageError) as caught:
        manager.save(12, state(12))
    return caught.value.message


class TestTwoLiveJobs:
    """Agents are killed, workers live on, and the job is started again."""

    TAKEN_OVER = (
        r"^job \w{16} \(process \d+ on host \S+\) has taken over the series in .* since .*this job .*stops saving"
    )

    def test_the_older_one_stops_saving_and_what_the_newer_one_has_saved_stays(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, keep_last=1)
        save_steps(manager, 10, 20)
        assert another_job(tmp_path, 21, 22) == []
        for step in (22, 30):
            with pytest.raises(StorageError, match=self.TAKEN_OVER):
                manager.save(step, state(step))
            with pytest.raises(StorageError, match=self.TAKEN_OVER):
                manager.async_save(step, state(step))
        assert load_what_is_there(tmp_path) == (22, 1022.0, []) and not (tmp_path / "step_30").exists()
        manager.load_latest(state(-1))  # it goes on from there on purpose
        assert manager.save(30, state(30)) and load_what_is_there(tmp_path) == (30, 30.0, [])

    def test_the_older_one_is_the_one_that_looked_first_whoever_saves_first(self, tmp_path: Path) -> None:
        """Both have loaded step 100. The new one has saved step 110 before the old one does."""
        another_job(tmp_path, 100)
        manager = CheckpointManager(tmp_path)
        assert manager.load_latest(state(-1)) is not None
        assert another_job(tmp_path, 110, loads=True) == []
        with pytest.raises(StorageError, match=self.TAKEN_OVER):
            manager.save(110, state(110))
        assert load_what_is_there(tmp_path) == (110, 1110.0, [])

    def test_a_save_that_was_under_way_is_committed_and_does_not_become_the_latest(self, tmp_path: Path) -> None:
        manager, steps = CheckpointManager(tmp_path), [11]
        manager.save(10, state(10))

        def take_over(event: Any) -> None:
            if (event.name, event.phase) == ("phase_started", "write") and steps:
                another_job(tmp_path, steps.pop())

        with (
            robust_dcp.on_event(take_over),
            pytest.raises(StorageError, match=r"step_20 is committed, but.*taken over"),
        ):
            manager.save(20, state(20))
        assert load_what_is_there(tmp_path) == (11, 1011.0, [])
        assert loaded(tmp_path / "step_20") == 20

    def test_the_newer_one_warns_once_and_goes_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        root, is_saving, may_go_on = tmp_path / "root", tmp_path / "is saving", tmp_path / "may go on"
        with ThreadPoolExecutor(1) as pool:
            older = pool.submit(run_ranks, 1, save_beside_another_job, str(root), str(is_saving), str(may_go_on))
            wait_for(is_saving)
            manager = CheckpointManager(root)
            manager.load_latest(state(-1))
            may_go_on.touch()
            values(older.result())
        save_steps(manager, 11, 12)
        warnings = [each for each in caplog.messages if "saved by an older job that still runs" in each]
        assert len(warnings) == 1 and "step_20" in warnings[0]
        assert load_what_is_there(root) == (12, 12.0, [])

    def test_all_ranks_are_told(self, tmp_path: Path) -> None:
        # Rank 0 starts a server of ranks of its own, which loads torch.
        first, second = values(run_ranks(2, save_with_all_ranks_refused, str(tmp_path), timeout_seconds=180))
        assert first == second and "has taken over the series" in first

    def test_who_goes_back_on_purpose_or_copies_a_step_to_here_is_no_stranger(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root, other = tmp_path / "root", tmp_path / "other"
        another_job(root, 100, 110)
        (root / "latest").write_text("step_100")
        assert another_job(root, 110, 120, loads=True, n_ranks=2) == []
        manager = CheckpointManager(root)
        save_steps(manager, 130)
        another_job(other, 140)
        shutil.copytree(other / "step_140", root / "step_140")
        shutil.copy(other / "latest", root / "latest")
        save_steps(manager, 150)
        save_steps(CheckpointManager(root), 120, 160)  # another manager of this job
        assert not [each for each in caplog.messages if "job" in each]


def be_killed_at_the_commit(root: str) -> None:
    with kill_in("commit", rank=0):
        CheckpointManager(root).save(1, state(1))


class TestCrashedSaves:
    def test_what_is_ours_is_removed(self, tmp_path: Path) -> None:
        run_ranks(1, be_killed_at_the_commit, str(tmp_path))
        assert not (tmp_path / "step_1/.metadata").exists() and data_files(tmp_path / "step_1")
        (tmp_path / "step_1/notes.txt").write_text("mine")
        assert save_steps(CheckpointManager(tmp_path, keep_last=1), 6) == [6]
        assert os.listdir(tmp_path / "step_1") == ["notes.txt"]

    def test_a_manager_that_sweeps_gives_way_to_a_save_that_begins(self, tmp_path: Path) -> None:
        """It looks into the directory of the step because of what a crashed save has left there."""
        step = tmp_path / "step_1"
        step.mkdir()
        (step / f".robust_dcp.saving.{'0' * 16}").touch()
        has_claimed, has_begun = threading.Event(), threading.Event()
        claimed: set[int] = set()

        def meet(call: object) -> None:
            if threading.get_ident() not in claimed:
                return
            if threading.current_thread() is threading.main_thread():
                threading.Timer(0.05, has_begun.set).start()
            else:
                has_claimed.set()
                has_begun.wait(20)

        on: dict[str, Fault] = {"list:step_1": meet}
        on["create:step_1/.robust_dcp.saving.*"] = lambda call: claimed.add(threading.get_ident())
        with ThreadPoolExecutor(1) as thread, FaultDisk(tmp_path, on=on):
            sweeping = thread.submit(CheckpointManager(tmp_path).prune)
            assert has_claimed.wait(300)
            CheckpointManager(tmp_path).save(1, state(1))
            assert sweeping.result() == []
        with FaultDisk(tmp_path, on={"list:step_1#1": lambda call: shutil.rmtree(step)}):  # by another manager
            CheckpointManager(tmp_path).save(1, state(2))
        assert loaded(step) == 2


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
            if len(signals) == 1:  # a thread that sleeps does not know what the ranks do
                threading.Timer(0.05, os.kill, (os.getpid(), signals[rank])).start()
            else:  # two signals are to come in one step
                os.kill(os.getpid(), signals[rank])
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
    outcomes = run_ranks(4, train, str(tmp_path), signals, every, is_async, own_handler)
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
    def end(number: int, frame: object) -> None:
        raise RobustCheckpointError("what a handler raises says nothing of the save")

    call_back = Future._invoke_callbacks

    def call_back_late(future: Future[Any]) -> None:  # whoever has waited for the outcome goes on by then
        time.sleep(0.3)
        call_back(future)

    manager, steps = CheckpointManager(root), []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if is_async else end)
    with mock.patch.object(Future, "_invoke_callbacks", call_back_late):
        for step in range(6):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if manager.should_save(step, every=1):
                steps.append(step)
                try:
                    fault = fail_in("write", rank=0) if len(steps) == 1 else contextlib.nullcontext()
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
    """``step_1`` is committed only once ``step_2`` is under way, and the copy of ``step_2`` takes a while."""
    manager = CheckpointManager(root, drain_to=f"{root}/far")
    manager.should_save(0)
    slow = ("rename:step_1/.metadata", "rename:far/step_2/.metadata")
    with FaultDisk(root, on={call: lambda call: time.sleep(1.0) for call in slow}):
        manager.async_save(1, state_of_rank(1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2, every=1)
        manager.async_save(2, state_of_rank(2))
        robust_dcp.finish_async_saves()
    signal.pause()  # until the signal is delivered


def test_an_earlier_async_save_that_ends_meanwhile_does_not_end_the_process_and_its_copies_arrive(
    tmp_path: Path,
) -> None:
    (outcome,) = run_ranks(1, save_before_and_after_the_signal, str(tmp_path))
    assert outcome.exitcode == -signal.SIGTERM, str(outcome)
    assert (tmp_path / "step_2/.metadata").exists() and (tmp_path / "far/step_2/.metadata").exists()


def ask_for_different_steps(root: str) -> bool:
    return CheckpointManager(root).should_save(dist.get_rank())


def test_ranks_that_ask_for_different_steps_are_told(tmp_path: Path) -> None:
    for error in errors(run_ranks(2, ask_for_different_steps, str(tmp_path))):
        assert error.type_name == "ExchangeError" and "and for another step on another rank" in error.message


def use_workers(root: str) -> list[int]:
    """Workers of a DataLoader are forked, and ended by SIGTERM."""
    CheckpointManager(root).should_save(0)
    for _ in range(20):
        child = os.fork() or os._exit(time.sleep(60) or 0)  # type: ignore[func-returns-value]
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM, "a signal that comes right after the fork is lost"
    loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    found = [int(each) for each in loader]
    workers = list(loader._iterator._workers)  # type: ignore[union-attr]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 2
    os._exit(0 if found == list(range(8)) else 1)  # the loader would complain of workers that were ended


def test_forked_children_end_by_the_signal_as_ever(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, use_workers, str(tmp_path))
    assert outcome.exitcode == 0, str(outcome)


def test_the_first_call_comes_from_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="has to be called from the main thread"):
        thread.submit(CheckpointManager(tmp_path).should_save, 0).result()
