"""A rank that fails, is killed, is late, or does something else: all ranks hear of it, and what was there stays."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import RobustReader, RobustWriter
from tests.faults.disk import CHANGES, Call, FaultDisk, kill
from tests.harness.faults import delay_in, fail_in, kill_in
from tests.harness.ranks import errors, in_ranks, values
from tests.harness.verdicts import Verdict, verdict_of

SAVE_PHASES = ("plan", "write", "commit")
LOAD_PHASES = ("plan", "read", "apply")


def state(step: int) -> dict[str, Any]:
    return {"shared": torch.full((1000,), float(step)), f"own {dist.get_rank()}": torch.full((10,), float(step))}


def step_in(path: str) -> float:
    loaded = state(0)
    robust_dcp.load(loaded, checkpoint_id=path)
    return float(loaded["shared"][0])


def save_with_a_fault(path: str, phase: str) -> tuple[str, float]:
    robust_dcp.save(state(1), checkpoint_id=path)
    message = ""
    with fail_in(phase, rank=1, error=LookupError("lost"), operation="save"):
        try:
            robust_dcp.save(state(2), checkpoint_id=path)
        except robust_dcp.RobustCheckpointError as error:
            message = str(error)
    dist.barrier()
    assert not [name for name in os.listdir(path) if "saving" in name], "the claim on the directory is left"
    before = step_in(path)
    robust_dcp.save(state(3), checkpoint_id=path)
    assert step_in(path) == 3.0
    return message, before


@pytest.mark.parametrize("phase", SAVE_PHASES)
def test_a_rank_that_fails_in_a_phase_fails_the_save_on_all_ranks_and_the_checkpoint_stays(
    phase: str, tmp_path: Path
) -> None:
    for message, before in values(in_ranks(2, save_with_a_fault, str(tmp_path), phase)):
        assert "lost" in message and "rank 1" in message
        assert before == 1.0


def load_with_a_fault(path: str, phase: str) -> None:
    robust_dcp.save(state(1), checkpoint_id=path)
    with fail_in(phase, rank=0, operation="load"):
        step_in(path)


@pytest.mark.parametrize("phase", LOAD_PHASES)
def test_a_rank_that_fails_in_a_phase_fails_the_load_on_all_ranks(phase: str, tmp_path: Path) -> None:
    for error in errors(in_ranks(2, load_with_a_fault, str(tmp_path), phase)):
        assert "as the test asked for" in error.message


def save_while_one_is_killed(path: str, phase: str, is_async: bool) -> str:
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=20)
    try:
        with kill_in(phase, rank=1):
            if is_async:
                robust_dcp.async_save(state(2), checkpoint_id=path, timeout_seconds=20).result()
            else:
                robust_dcp.save(state(2), checkpoint_id=path, timeout_seconds=20)
    except robust_dcp.RobustCheckpointError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("phase", "is_async"), [*((phase, False) for phase in SAVE_PHASES), ("stage", True)])
def test_a_rank_that_is_killed_in_a_phase_is_named_by_the_others(phase: str, is_async: bool, tmp_path: Path) -> None:
    survivor, killed, other = in_ranks(3, save_while_one_is_killed, str(tmp_path), phase, is_async)
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (survivor, other):
        assert "rank 1" in values([outcome])[0]
    assert values(in_ranks(1, step_in, str(tmp_path))) == [1.0]


def save_with_a_late_rank(path: str) -> str:
    arrived = threading.Event()
    threading.Timer(0.2, arrived.set).start()
    with delay_in("write", rank=1, until=arrived.wait):
        robust_dcp.save(state(1), checkpoint_id=path)
    return "late" if arrived.is_set() or dist.get_rank() != 1 else "not late"


def come_too_late(path: str, late: int) -> Verdict:
    dist.barrier()
    given_up = Path(f"{path}.given up")
    while dist.get_rank() == late and not given_up.exists():
        time.sleep(0.02)
    verdict = verdict_of(robust_dcp.save, state(0), checkpoint_id=path, timeout_seconds=1.5)
    given_up.touch()
    dist.barrier()  # all are here again: the next save works
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=30)
    assert step_in(path) == 1.0
    return verdict


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_is_named_on_both_sides_and_the_next_save_works(late: int, tmp_path: Path) -> None:
    for rank, verdict in enumerate(values(in_ranks(2, come_too_late, str(tmp_path / "checkpoint"), late))):
        assert verdict.type_name == "ExchangeTimeout" and verdict.fields["missing_ranks"] == [late]
        assert verdict.message.startswith(f"this rank ({late}) came after the others had given up") == (rank == late)


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_with_a_late_rank, str(tmp_path))) == ["late", "late"]


class CannotBePickled:
    def __reduce__(self) -> str:
        raise LookupError("lost")


def fail_while_the_others_write(path: str) -> tuple[str, int]:
    if dist.get_rank() == 1:
        own: dict[str, Any] = {"object": CannotBePickled()}
    else:  # 200 writes of 8 MiB: ten seconds of this disk. One block, seen by many names, takes no memory.
        own = dict.fromkeys((f"w{n}" for n in range(200)), torch.ones(2 << 20))
    with FaultDisk(path, on={"write:*.distcp": lambda call: time.sleep(0.05)}) as disk:
        verdict = verdict_of(robust_dcp.save, own, storage_writer=robust_dcp.RobustWriter(path, threads=1))
    return str(verdict), sum(call.nbytes for call in disk.calls if call.operation == "write")


def test_ranks_that_still_write_stop_when_another_has_failed(tmp_path: Path) -> None:
    (message, nbytes), (other, _) = values(in_ranks(2, fail_while_the_others_write, str(tmp_path)))
    assert "lost" in message and "rank 1" in message and "lost" in other
    assert nbytes < 100 * (8 << 20)
    assert os.listdir(tmp_path) == []


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"rank{dist.get_rank()}.{n}": torch.full((1 << 18,), value + n) for n in range(8)}


def go_slowly(path: str) -> tuple[Any, Any]:
    """Rank 1's disk takes longer for a save, and for a load, than the timeout."""

    def slow(call: Call) -> None:
        time.sleep(0.7 * call.nbytes / (1 << 20))

    reader = RobustReader(path, threads=1, buffer_bytes=4 << 20)
    with FaultDisk(path, on={"write|read:__*": slow} if dist.get_rank() == 1 else {}):
        writer = RobustWriter(path, threads=1, buffer_bytes=2 << 20)
        saved = robust_dcp.save(tensors(1), storage_writer=writer, timeout_seconds=4)
        found = tensors(0)
        loaded = robust_dcp.load(found, storage_reader=reader, timeout_seconds=4)
    assert all(torch.equal(found[key], value) for key, value in tensors(1).items())
    return saved.stragglers, loaded.stragglers


def test_a_rank_that_writes_or_reads_slowly_is_waited_for(tmp_path: Path) -> None:
    assert len(values(in_ranks(3, go_slowly, str(tmp_path / "checkpoint"), timeout_seconds=150))) == 3


def save_as_another_version(path: str, where: str) -> Verdict:
    with mock.patch(where, 99 if where.endswith("VERSION") else "99.0"):
        if dist.get_rank() == 1:
            return verdict_of(robust_dcp.save, state(1), checkpoint_id=path, timeout_seconds=10)
    return verdict_of(robust_dcp.save, state(1), checkpoint_id=path, timeout_seconds=10)


@pytest.mark.parametrize(
    "where", ["robust_dcp.comm.frames.PROTOCOL_VERSION", "robust_dcp.plan.save_planner.__version__"]
)
def test_a_rank_of_another_version_is_an_error_on_all_ranks_that_names_it(where: str, tmp_path: Path) -> None:
    for verdict in values(in_ranks(3, save_as_another_version, str(tmp_path), where)):
        assert verdict.type_name in ("ExchangeError", "PlanConflict", "ExchangeTimeout"), verdict
        assert "version" in str(verdict) and "1" in str(verdict)
    assert list(tmp_path.iterdir()) == []


def save_and_be_killed(path: str, killed: int, number: int) -> int:
    """Rank ``killed`` is killed before a call to its files. Returns how many calls it makes."""
    is_killed = dist.get_rank() == killed and number >= 0
    with FaultDisk(path, counted=CHANGES, at=(number, kill) if is_killed else None) as disk:
        robust_dcp.save(state(2), checkpoint_id=path, timeout_seconds=20)
    return disk.n_counted


def save_first(path: str) -> None:
    robust_dcp.save(state(1), checkpoint_id=path)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_ranks_may_be_killed_at_any_call(killed: int, memory_path: Path) -> None:
    path = memory_path / "0"
    values(in_ranks(2, save_first, str(path)))
    shutil.copytree(path, memory_path / "whole")
    n_calls = values(in_ranks(2, save_and_be_killed, str(memory_path / "whole"), killed, -1))[killed]
    left = []
    for number in range(killed, n_calls, 5):
        directory = str(memory_path / f"call{number}")
        shutil.copytree(path, directory)
        outcomes = in_ranks(2, save_and_be_killed, directory, killed, number)
        assert outcomes[killed].exitcode == -signal.SIGKILL
        left.append(values(in_ranks(1, step_in, directory))[0])
        values(in_ranks(2, save_first, directory))  # what was left behind is in nobody's way
    assert left == sorted(left) and set(left) <= {1.0, 2.0} and left[0] == 1.0


def save_or_load(path: str) -> None:
    robust_dcp.save(state(1), checkpoint_id=path)
    if dist.get_rank() == 1:
        step_in(path)
    else:
        robust_dcp.save(state(2), checkpoint_id=path)


def test_ranks_in_different_operations_are_told_who_does_what(tmp_path: Path) -> None:
    for error in errors(in_ranks(3, save_or_load, str(tmp_path))):
        assert error.is_a(robust_dcp.ExchangeError) and "save" in error.message and "load" in error.message
    assert values(in_ranks(1, step_in, str(tmp_path))) == [1.0]


def save_with_other_options(path: str) -> None:
    layout: Any = "safetensors" if dist.get_rank() == 1 else "torch"
    robust_dcp.save(state(1), storage_writer=robust_dcp.RobustWriter(path, layout=layout))


def test_ranks_with_other_options_are_named_with_the_options(tmp_path: Path) -> None:
    for error in errors(in_ranks(3, save_with_other_options, str(tmp_path))):
        assert "rank 1" in error.message and "layout" in error.message
    assert list(tmp_path.iterdir()) == []


def save_at_once(path: str) -> list[float]:
    """Two saves are under way beside training, and something else is loaded."""
    robust_dcp.save(state(7), checkpoint_id=f"{path}/7")
    saving = [robust_dcp.async_save(state(step), checkpoint_id=f"{path}/{step}") for step in (1, 2)]
    loaded = step_in(f"{path}/7")
    for each in saving:
        each.result()
    return [loaded, step_in(f"{path}/1"), step_in(f"{path}/2")]


def test_operations_that_overlap_on_one_group_do_not_disturb_each_other(tmp_path: Path) -> None:
    assert values(in_ranks(3, save_at_once, str(tmp_path))) == [[7.0, 1.0, 2.0]] * 3


def stop_in_a_save(path: str) -> str:
    robust_dcp.save(state(1), checkpoint_id=path)
    pid = Path(f"{path}.pid")
    if dist.get_rank() == 1:
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        robust_dcp.save(state(2), checkpoint_id=path, timeout_seconds=3)
    except robust_dcp.ExchangeTimeout as error:
        os.kill(int(pid.read_text()), signal.SIGKILL)
        return str(error)
    return "saved"


def test_a_rank_that_is_stopped_is_named_within_the_timeout(tmp_path: Path) -> None:
    first, stopped = in_ranks(2, stop_in_a_save, str(tmp_path / "checkpoint"))
    assert "rank 1" in values([first])[0]
    assert stopped.exitcode == -signal.SIGKILL
    assert values(in_ranks(1, step_in, str(tmp_path / "checkpoint"))) == [1.0]
