"""However a process ends while it saves, the save is finished within a time of grace, or is as if never begun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import RobustWriter, StorageError
from robust_dcp.background import WRITERS, writer_process
from robust_dcp.background.save_queue import SaveQueue
from tests.api.gated_disks import GATES, FullDisk, GatedDisk, make_gates, open_gate, pid_at_gate
from tests.api.test_async_save import loaded
from tests.harness import disks
from tests.harness.ranks import in_ranks, values
from tests.support.waiting import wait_until

MEGABYTE = 1 << 20

# A save of the last value that stands still in one phase. Whoever waits for the save opens the gate; nothing else does.
SCRIPT = """
    import os, signal, sys, threading, time
    import torch
    import robust_dcp
    from robust_dcp import RobustWriter
    from robust_dcp.background import WRITERS, StagedSource, save_queue
    from robust_dcp.background.save_queue import SaveQueue
    from robust_dcp.started_save import StartedSave

    at_gate, gate = threading.Event(), threading.Event()
    path, executor, phase = sys.argv[1:]

    def stop_at(owner, name):
        step = getattr(owner, name)
        def stopped(*args, **kwargs):
            at_gate.set()
            assert gate.wait(60), "nobody waits for the save"
            return step(*args, **kwargs)
        setattr(owner, name, stopped)

    def opening_gate(wait):
        def wait_with_open_gate(*args, **kwargs):
            gate.set()
            return wait(*args, **kwargs)
        return wait_with_open_gate

    def begin():
        robust_dcp.save({"w": torch.zeros(9)}, checkpoint_id=path)
        owner = {"stage": (StagedSource, "copy"), "write": (StartedSave, "write"), "commit": (StartedSave, "commit")}
        stop_at(*owner[phase])
        saving = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=path, staging="lazy", executor=executor)
        assert at_gate.wait(60)
        print(*WRITERS.pids, flush=True)
        return saving
"""

WAITED_FOR = (
    "SaveQueue.wait = opening_gate(SaveQueue.wait)\n"
    "SaveQueue.wait_for_callbacks = opening_gate(SaveQueue.wait_for_callbacks)\n"
)


def run_script(path: Path, executor: str, phase: str, ending: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT) + "saving = begin()\n" + ending
    return subprocess.run(
        [sys.executable, "-c", script, str(path), executor, phase],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def value_at(path: Path) -> float:
    (value,) = set(loaded(str(path), {"w": torch.full((9,), -1.0)})["w"].tolist())
    return float(value)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("phase", ["stage", "write", "commit"])
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise KeyError('of the user')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", -signal.SIGTERM),
    ],
    ids=["exception", "SIGTERM"],
)
def test_a_process_that_ends_in_any_phase_finishes_its_save(
    tmp_path: Path, executor: str, phase: str, ending: str, code: int
) -> None:
    done = run_script(tmp_path / "checkpoint", executor, phase, WAITED_FOR + ending)
    assert done.returncode == code, done.stderr
    assert value_at(tmp_path / "checkpoint") == 1.0
    assert all(has_ended(int(pid)) for pid in done.stdout.split())


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_handler_of_the_users_own_stays_and_the_save_is_finished_when_it_exits(tmp_path: Path, executor: str) -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + WAITED_FOR
    done = run_script(
        tmp_path / "checkpoint", executor, "write", own + "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    assert done.returncode == 7, done.stderr
    assert value_at(tmp_path / "checkpoint") == 1.0


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("phase", ["write", "commit"])
def test_after_the_time_of_grace_a_process_ends_without_its_save(tmp_path: Path, executor: str, phase: str) -> None:
    done = run_script(
        tmp_path / "checkpoint",
        executor,
        phase,
        "save_queue.GRACE_SECONDS = 0.1\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)",
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stderr.count("the checkpoint before it is still there") == 1
    assert value_at(tmp_path / "checkpoint") == 0.0
    for pid in done.stdout.split():
        wait_until(lambda pid=pid: has_ended(int(pid)))  # type: ignore[misc]
    robust_dcp.save({"w": torch.full((9,), 2.0)}, checkpoint_id=tmp_path / "checkpoint")
    assert value_at(tmp_path / "checkpoint") == 2.0


def test_a_second_sigterm_does_not_make_the_time_of_grace_longer(tmp_path: Path) -> None:
    # Each wait takes all of the time that it is given, and is told of; before it, the launcher says it again.
    ending = """
waits = []
def wait(self, *, timeout_seconds=None, below=1):
    waits.append(timeout_seconds)
    if len(waits) < 4:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.05)
    return False
save_queue.SaveQueue.wait = wait
print_waits = lambda: print([a > b for a, b in zip(waits, waits[1:])], flush=True)
kill = os.kill
def kill_and_tell(pid, number):
    if signal.getsignal(number) is signal.SIG_DFL:
        print_waits()
    kill(pid, number)
save_queue.os.kill = kill_and_tell
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    done = run_script(tmp_path / "checkpoint", "thread", "write", ending)
    assert done.returncode == -signal.SIGTERM, done.stderr
    is_shorter = done.stdout.splitlines()[-1]  # than the wait before, for each wait
    assert "False" not in is_shorter and is_shorter.count("True") >= 3


def hang_in_the_disk_of_one_writer(directory: str, can_be_killed: bool) -> tuple[str, list[str], bool]:
    """Rank 0's writer hangs in a call to its disk, and so does not stop; rank 1's disk is full."""
    writer_process._STOP_SECONDS = writer_process._END_SECONDS = 0.2  # type: ignore[misc]
    if not can_be_killed:  # as in a call of the kernel that cannot be interrupted
        subprocess.Popen.kill = lambda self: None  # type: ignore[method-assign]
    rank = dist.get_rank()
    robust_dcp.save({f"w{rank}": torch.zeros(9)}, checkpoint_id=f"{directory}/checkpoint")
    dist.barrier()  # rank 0 leaves its report after the commit
    before = sorted(os.listdir(f"{directory}/checkpoint"))
    gates = make_gates(directory)
    disk = FullDisk() if rank == 1 else GatedDisk()
    saving = robust_dcp.async_save(
        {f"w{rank}": torch.ones(MEGABYTE)},
        storage_writer=RobustWriter(f"{directory}/checkpoint", disk=disk),
        executor="process",
    )
    pid = pid_at_gate(gates)
    dist.barrier()
    if rank == 1:
        open_gate(gates)
    with pytest.raises(StorageError, match="there is no space") as caught:
        saving.result(timeout=60)
    was_killed = has_ended(pid)
    if not can_be_killed and rank == 0:
        with contextlib.suppress(ProcessLookupError):  # it ends by itself if it hears that its rank has given it up
            os.kill(pid, signal.SIGKILL)
    dist.barrier()
    left = sorted(set(os.listdir(f"{directory}/checkpoint")) - set(before))
    os.environ.pop(GATES, None)
    dist.barrier()
    robust_dcp.async_save(
        {f"w{rank}": torch.full((9,), 2.0)}, checkpoint_id=f"{directory}/checkpoint", executor="process"
    ).result(timeout=60)
    got = loaded(f"{directory}/checkpoint", {f"w{rank}": torch.zeros(9)})
    assert got[f"w{rank}"].tolist() == [2.0] * 9
    assert (WRITERS.pids == [pid]) == (rank == 1)
    return str(caught.value), left, was_killed


def test_a_writer_that_does_not_stop_is_killed_and_costs_its_save_alone(tmp_path: Path) -> None:
    told = values(in_ranks(2, hang_in_the_disk_of_one_writer, str(tmp_path), True, timeout_seconds=120))
    assert all("rank 1" in words for words, _, _ in told)
    assert [left for _, left, _ in told] == [[], []]
    assert [was_killed for _, _, was_killed in told] == [True, False]


def test_a_writer_that_cannot_even_be_killed_does_not_hold_up_its_rank(tmp_path: Path) -> None:
    told = values(in_ranks(2, hang_in_the_disk_of_one_writer, str(tmp_path), False, timeout_seconds=120))
    assert all("rank 1" in words for words, _, _ in told)


def test_sigterm_is_handled_whatever_the_main_thread_does_just_then(tmp_path: Path) -> None:
    """Also while it looks up the queue of a save, which takes a lock that the handler takes too."""
    ending = (
        "class Queues(dict):\n"
        "    def __contains__(self, key):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return super().__contains__(key)\n"
        "save_queue._QUEUES._queues = Queues(save_queue._QUEUES._queues)\n"
        "threading.Timer(20, os._exit, [9]).start()  # it hangs\n"
        "save_queue.queue_of((0,))"
    )
    done = run_script(tmp_path / "checkpoint", "thread", "write", WAITED_FOR + ending)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert value_at(tmp_path / "checkpoint") == 1.0


def test_who_waits_for_a_save_does_not_wait_for_the_callbacks_of_its_future() -> None:
    looked, gone_on = threading.Event(), threading.Event()

    class Queue(SaveQueue):
        @property
        def n_under_way(self) -> int:
            n_under_way = super().n_under_way
            looked.set()
            return n_under_way

    queue = Queue()
    waited_for: list[bool] = []
    saving = queue.submit(lambda: looked.wait(60))
    saving.add_done_callback(lambda _: waited_for.append(gone_on.wait(20)))
    assert queue.wait(timeout_seconds=60)
    gone_on.set()
    assert queue.wait_for_callbacks(60)
    assert waited_for == [True]


def test_one_rank_alone_cannot_cancel_a_save(tmp_path: Path) -> None:
    disk = disks.GatedDisk()
    writer = RobustWriter(tmp_path / "checkpoint", disk=disk)
    saving = robust_dcp.async_save({"w": torch.ones(9)}, storage_writer=writer)
    assert isinstance(saving, Future)
    assert not saving.cancel() and not saving.cancelled()
    disk.gate.set()
    saving.result(timeout=60)
    assert value_at(tmp_path / "checkpoint") == 1.0


def test_a_callback_may_wait_for_all_saves_that_are_over_when_it_runs(tmp_path: Path) -> None:
    finished: list[bool] = []
    saving = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "checkpoint")
    assert isinstance(saving, Future)
    saving.add_done_callback(lambda _: finished.append(robust_dcp.finish_async_saves()))
    robust_dcp.finish_async_saves()
    assert finished == [True]
