"""Faults on purpose happen where they were asked for, and do to a save what real ones do."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from tests.harness.damage import cut_short, data_files, flip_bit
from tests.harness.disks import FullDisk, GatedDisk, SlowDisk
from tests.harness.faults import delay_in, fail_in, kill_in
from tests.harness.ranks import errors, run_ranks, values

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
    before = step_in(path)
    robust_dcp.save(state(3), checkpoint_id=path)
    assert step_in(path) == 3.0
    return message, before


@pytest.mark.parametrize("phase", SAVE_PHASES)
def test_a_rank_that_fails_in_a_phase_fails_the_save_on_all_ranks_and_the_checkpoint_stays(
    phase: str, tmp_path: Path
) -> None:
    for message, before in values(run_ranks(2, save_with_a_fault, str(tmp_path), phase)):
        assert "lost" in message and "rank 1" in message
        assert before == 1.0


def load_with_a_fault(path: str, phase: str) -> None:
    robust_dcp.save(state(1), checkpoint_id=path)
    with fail_in(phase, rank=0, operation="load"):
        step_in(path)


@pytest.mark.parametrize("phase", LOAD_PHASES)
def test_a_rank_that_fails_in_a_phase_fails_the_load_on_all_ranks(phase: str, tmp_path: Path) -> None:
    for error in errors(run_ranks(2, load_with_a_fault, str(tmp_path), phase)):
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
    survivor, killed, other = run_ranks(3, save_while_one_is_killed, str(tmp_path), phase, is_async)
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (survivor, other):
        assert "rank 1" in values([outcome])[0]
    assert values(run_ranks(1, step_in, str(tmp_path))) == [1.0]


def save_with_a_late_rank(path: str) -> str:
    arrived = threading.Event()
    threading.Timer(0.2, arrived.set).start()
    with delay_in("write", rank=1, until=arrived.wait):
        robust_dcp.save(state(1), checkpoint_id=path)
    return "late" if arrived.is_set() or dist.get_rank() != 1 else "not late"


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_with_a_late_rank, str(tmp_path))) == ["late", "late"]


def fail_elsewhere(path: str) -> float:
    with (
        fail_in("read", rank=0),
        fail_in("write", rank=7),
        fail_in("plan", rank=0, operation="load"),
    ):
        robust_dcp.save(state(1), checkpoint_id=path)
    return step_in(path)


def test_other_phases_ranks_and_operations_are_left_alone_and_so_is_what_comes_after(tmp_path: Path) -> None:
    assert values(run_ranks(1, fail_elsewhere, str(tmp_path))) == [1.0]


def test_a_phase_that_no_operation_has_is_refused_with_those_there_are() -> None:
    with (
        pytest.raises(ValueError, match=r"no phase 'wrote'.*save: plan, stage, write, commit"),
        fail_in("wrote", rank=0),
    ):
        pass


def save_on_disk_with_room(path: str, room_nbytes: int) -> str:
    disk = FullDisk(room_nbytes) if dist.get_rank() == 1 else None
    own = {f"own {dist.get_rank()}": torch.ones(1 << 20)}
    try:
        robust_dcp.save(own, storage_writer=robust_dcp.RobustWriter(path, disk=disk))
    except robust_dcp.StorageError as error:
        return str(error)
    return "saved"


def test_a_full_disk_has_room_for_so_much_and_then_says_what_the_system_says(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_on_disk_with_room, str(tmp_path / "room"), 1 << 30)) == ["saved", "saved"]
    for message in values(run_ranks(2, save_on_disk_with_room, str(tmp_path / "full"), 1 << 20)):
        assert "ENOSPC" in message and "free space" in message


def save_through_a_gate(path: str) -> bool:
    disk = GatedDisk()
    saving: Any = robust_dcp.async_save(state(1), storage_writer=robust_dcp.RobustWriter(path, disk=disk))
    was_done = saving.done()
    disk.gate.set()
    saving.result()
    return bool(was_done)


def test_a_gated_disk_holds_a_save_until_the_gate_is_opened(tmp_path: Path) -> None:
    assert values(run_ranks(1, save_through_a_gate, str(tmp_path))) == [False]


def test_a_slow_disk_is_slow_by_the_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slept: list[float] = []
    monkeypatch.setattr("tests.harness.disks.time.sleep", slept.append)
    writer = robust_dcp.RobustWriter(tmp_path, disk=SlowDisk(1 << 20))
    robust_dcp.save({"w": torch.ones(1 << 20)}, storage_writer=writer)
    assert max(slept) > 3.0  # 4 MiB at 1 MiB a second; nobody slept really


def test_a_bit_is_flipped_and_put_back_and_a_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x00\x01\x02")
    flip_bit(path, -1, bit=7)
    assert path.read_bytes() == b"\x00\x01\x82"
    flip_bit(path, 2, bit=7)
    cut_short(path, 1)
    assert path.read_bytes() == b"\x00\x01"
    for offset, bit in ((2, 0), (-3, 0), (0, 8)):
        with pytest.raises(ValueError, match="there is no bit"):
            flip_bit(path, offset, bit)


def test_the_data_files_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    assert [path.name for path in data_files(tmp_path)] == ["__0_0.distcp"]
    cut_short(data_files(tmp_path)[0], 400)
    with pytest.raises(robust_dcp.CorruptCheckpoint):
        robust_dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
