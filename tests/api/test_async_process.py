"""An async save whose files another process writes: whatever becomes of that process, a save is whole or not at all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustWriter, StorageError
from robust_dcp.background import WRITERS
from robust_dcp.staging import SHARED_STAGING
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api.gated_disks import GATES, FullDisk, GatedDisk, make_gates, open_gate, pid_at_gate
from tests.api.test_async_save import loaded, save_while_all_changes
from tests.harness.ranks import in_ranks, values

MEGABYTE = 1 << 20


def save(state: dict[str, Any], path: Any, **options: Any) -> Any:
    return robust_dcp.async_save(state, storage_writer=RobustWriter(path, **options), executor="process")


def test_what_is_saved_is_what_the_state_dict_held_at_the_call(tmp_path: Path) -> None:
    for outcomes in values(in_ranks(2, save_by_process, str(tmp_path), timeout_seconds=120)):
        assert outcomes == [["built", "reused", "reused"], ["reused", "reused", "reused"]]


def save_by_process(directory: str) -> list[list[str]]:
    return [
        save_while_all_changes(f"{directory}/{staging}", staging, executor="process") for staging in ("full", "lazy")
    ]


def test_one_process_writes_all_saves_and_this_one_writes_none(tmp_path: Path) -> None:
    WRITERS.close()
    pids = set()
    for step in range(3):
        save({"w": torch.full((MEGABYTE,), float(step))}, tmp_path / str(step)).result(timeout=60)
        (pid,) = WRITERS.pids
        pids.add(pid)
        assert loaded(str(tmp_path / str(step)), {"w": torch.zeros(MEGABYTE)})["w"].tolist()[-1] == step
    assert len(pids) == 1 and os.getpid() not in pids


def save_while_one_is_written(directory: str) -> None:
    gates = make_gates(directory)
    first = save({"w": torch.zeros(9)}, f"{directory}/1", disk=GatedDisk())
    pid = pid_at_gate(gates)
    second = robust_dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id=f"{directory}/2", executor="process", max_in_flight=2
    )
    skipped = robust_dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id=f"{directory}/3", executor="process", when_busy="skip"
    )
    open_gate(gates)
    first.result(timeout=60)
    second.result(timeout=60)
    assert skipped.result() is None
    assert WRITERS.pids == [pid]


def test_a_save_that_is_asked_for_while_another_is_written_starts_no_second_process(tmp_path: Path) -> None:
    values(in_ranks(1, save_while_one_is_written, str(tmp_path)))


def kill_the_writer(directory: str) -> list[str]:
    """On rank 1, while it writes."""
    rank = dist.get_rank()
    robust_dcp.save({f"w{rank}": torch.zeros(9)}, checkpoint_id=f"{directory}/checkpoint")
    gates = make_gates(directory) if rank == 1 else None
    dist.barrier()
    before = sorted(os.listdir(f"{directory}/checkpoint"))
    dist.barrier()
    saving = save({f"w{rank}": torch.ones(MEGABYTE)}, f"{directory}/checkpoint", disk=GatedDisk())
    if gates is not None:
        os.kill(pid_at_gate(gates), signal.SIGKILL)
    with pytest.raises(RobustCheckpointError) as caught:
        saving.result(timeout=60)
    dist.barrier()
    assert sorted(os.listdir(f"{directory}/checkpoint")) == before
    got = {f"w{rank}": torch.ones(9)}
    robust_dcp.load(got, checkpoint_id=f"{directory}/checkpoint")
    assert got[f"w{rank}"].tolist() == [0.0] * 9
    os.environ.pop(GATES, None)
    dist.barrier()
    report = save({f"w{rank}": torch.full((9,), 2.0)}, f"{directory}/checkpoint").result(timeout=60)
    robust_dcp.load(got, checkpoint_id=f"{directory}/checkpoint")
    assert got[f"w{rank}"].tolist() == [2.0] * 9 and report.digest is not None
    return str(caught.value).splitlines()


def test_a_writer_that_is_killed_costs_its_save_alone(tmp_path: Path) -> None:
    for told in values(in_ranks(2, kill_the_writer, str(tmp_path), timeout_seconds=120)):
        assert "the writer process of rank 1" in told[0] and "killed by SIGKILL" in told[0], told


def fail_on_one_rank(directory: str) -> str:
    """Rank 1's disk is full; rank 0's writer is in the middle of its write when that is found out."""
    rank = dist.get_rank()
    gates = make_gates(directory)
    disk = GatedDisk() if rank == 0 else FullDisk()
    saving = save({f"w{rank}": torch.ones(8 * MEGABYTE)}, f"{directory}/checkpoint", disk=disk)
    pid = pid_at_gate(gates)
    dist.barrier()
    open_gate(gates)
    with pytest.raises(StorageError, match="there is no space") as caught:
        saving.result(timeout=60)
    assert WRITERS.pids == [pid]  # told to stop, it is there for the next save
    assert caught.value.errno == 28
    dist.barrier()
    return str(caught.value)


def test_an_error_on_one_rank_stops_the_writers_of_all_which_remove_what_they_wrote(tmp_path: Path) -> None:
    for told in values(in_ranks(2, fail_on_one_rank, str(tmp_path), timeout_seconds=120)):
        assert "rank 1" in told
    assert not (tmp_path / "checkpoint").exists()


def run_script(path: Path, ending: str) -> subprocess.Popen[str]:
    script = f"""
        import os, signal, sys, time, torch, robust_dcp
        from robust_dcp import RobustWriter
        from robust_dcp.background import WRITERS
        from tests.api.gated_disks import GatedDisk, make_gates, open_gate, pid_at_gate
        os.environ["RANK"] = "0"
        robust_dcp.save({{"w": torch.zeros(9)}}, checkpoint_id={str(path / "checkpoint")!r})
        gates = make_gates({str(path)!r})
        writer = RobustWriter({str(path / "checkpoint")!r}, disk=GatedDisk())
        saving = robust_dcp.async_save({{"w": torch.ones(9)}}, storage_writer=writer, executor="process")
        pid = pid_at_gate(gates)
        print(pid, flush=True)
        sys.stdin.readline()
        {ending}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("ending", "code", "value"),
    [
        ("open_gate(gates)", 0, 1.0),
        ("os.killpg(0, signal.SIGINT) if open_gate(gates) is None else None; time.sleep(60)", -signal.SIGINT, 1.0),
        ("open_gate(gates); os.killpg(0, signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, 1.0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 0.0),
        ("if os.fork() == 0: time.sleep(60)\n        os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 0.0),
    ],
    ids=["at the end of the script", "SIGINT to all", "SIGTERM to all", "SIGKILL", "SIGKILL with a forked child"],
)
def test_the_process_ends_with_its_rank_and_after_its_last_save(
    tmp_path: Path, ending: str, code: int, value: float
) -> None:
    script = run_script(tmp_path, ending)
    try:
        assert script.stdin is not None and script.stdout is not None and script.stderr is not None
        descriptor = os.pidfd_open(int(script.stdout.readline()))
        script.stdin.write("\n")
        script.stdin.flush()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(30_000), "the writer process outlives its rank"
        os.close(descriptor)
        assert script.wait(timeout=60) == code, script.stderr.read()
        got = loaded(str(tmp_path / "checkpoint"), {"w": torch.ones(9)})
        assert got["w"].tolist() == [value] * 9
    finally:
        for stream in (script.stdin, script.stdout, script.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_stocks_types_choose_who_writes(tmp_path: Path) -> None:
    SHARED_STAGING.release()
    for kind, is_shared in ((AsyncCheckpointerType.THREAD, False), (AsyncCheckpointerType.PROCESS, True)):
        robust_dcp.async_save(
            {"w": torch.ones(9)}, checkpoint_id=str(tmp_path / kind.value), async_checkpointer_type=kind
        ).result(timeout=60)
        assert (SHARED_STAGING.kept_nbytes > 0) == is_shared
    with pytest.raises(ValueError, match='THREAD and executor="process"'):
        robust_dcp.async_save(
            {"w": torch.ones(9)},
            checkpoint_id=str(tmp_path / "3"),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            executor="process",
        )


def test_a_disk_that_the_process_cannot_make_is_refused_at_once(tmp_path: Path) -> None:
    class OwnDisk(PosixDisk):
        pass

    with pytest.raises(ValueError, match="makes the disk anew in the writer process"):
        save({"w": torch.ones(9)}, tmp_path, disk=OwnDisk())


def test_an_error_of_the_disk_is_the_same_as_in_this_process(tmp_path: Path) -> None:
    told = []
    for executor in ("thread", "process"):
        with pytest.raises(StorageError) as caught:
            robust_dcp.async_save(
                {"w": torch.ones(9)}, storage_writer=RobustWriter(tmp_path, disk=FullDisk()), executor=executor
            ).result(timeout=60)
        told.append((type(caught.value), caught.value.errno, caught.value.operation, str(caught.value.message)))
    assert told[0] == told[1]
    assert list(tmp_path.iterdir()) == []
