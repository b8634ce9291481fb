"""An async save holds what the state dict held at the call, and is finished or as if never begun, whoever writes it."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, StorageError
from robust_dcp.comm.link import Link
from tests.faults.disk import LONG_TESTS, FaultDisk, Gate
from tests.harness.fingerprints import differences
from tests.harness.ranks import Job, on_ranks, run_program, run_ranks, values
from torture.async_kills import Kill
from torture.async_kills import judge as judge_kill
from torture.back_to_back import judge as judge_row
from torture.generations import is_gone, writer_pids
from torture.torn_copies import be_rank

MEGABYTE = 1 << 20


def loaded(path: Any, like: dict[str, Any]) -> dict[str, Any]:
    target = {key: torch.full_like(value, -1) for key, value in like.items()}
    robust_dcp.load(target, checkpoint_id=path)
    return target


def value_at(path: Path, key: str = "w") -> float:
    (value,) = set(loaded(path, {key: torch.zeros(9)})[key].tolist())
    return float(value)


# --- what it holds ----------------------------------------------------------------------------------------------------


def state_of(rank: int) -> dict[str, torch.Tensor]:
    sizes = [4 * MEGABYTE, 3 * MEGABYTE, MEGABYTE, MEGABYTE // 2, 1000, 7]
    return {f"{rank}.{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}


def save_and_overwrite(directory: str, staging: Any, executor: Any, limit_nbytes: int | None) -> list[tuple[str, bool]]:
    """Save twice, first where models are evaluated, and overwrite all as soon as that may be done."""
    rank, told = dist.get_rank(), []
    for step in range(2):
        state = state_of(rank)
        path = f"{directory}/{step}"
        limit = limit_nbytes and limit_nbytes * (1 + rank)
        options: Any = {"staging": staging, "executor": executor, "staging_nbytes": limit}
        with torch.inference_mode(step == 0):
            saving: Any = robust_dcp.async_save(state, checkpoint_id=path, **options)
        with saving:
            for tensor in state.values():
                tensor.fill_(-1)
        report = saving.result()
        assert differences(state_of(rank), loaded(path, state)) == []
        assert 0 < report.blocked_seconds <= report.seconds, f"{report.blocked_seconds} s of\n{report}"
        told.append((report.plan, "while training waited" in report.how[-1]))
        dist.barrier()
    return told


@pytest.mark.parametrize(
    ("staging", "executor", "limit_nbytes"),
    [
        ("full", "thread", None),
        ("full", "process", 0),
        ("full", "thread", 9 * MEGABYTE),
        ("lazy", "process", None),
        ("lazy", "thread", 0),
        ("lazy", "process", 9 * MEGABYTE),
    ],
)
def test_what_is_saved_is_what_the_state_dict_held_at_the_call(
    tmp_path: Path, staging: str, executor: str, limit_nbytes: int | None
) -> None:
    """What the host cannot hold is written while the caller waits; each rank has its own limit."""
    told = on_ranks(2, save_and_overwrite, str(tmp_path), staging, executor, limit_nbytes)
    for (_, first_waited), (plan, waited) in told:
        assert plan == "reused" and first_waited == waited == (limit_nbytes is not None)


def test_a_lazy_save_is_waited_for_by_the_next_optimizer_step_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 64)).sum().backward()
    held = {key: value.clone() for key, value in model.state_dict().items()}
    saving = robust_dcp.async_save(model.state_dict(), checkpoint_id=tmp_path, staging="lazy")
    saving.wait_before_step_of(optimizer)
    optimizer.step()
    assert saving.staging_completion.done()
    names = getattr(getattr(state_dict_saver, "AsyncSaveResponse", None), "__annotations__", ())  # since torch 2.9
    assert all(getattr(saving, name).result() != NotImplemented for name in names)
    saving.result()
    assert differences(held, loaded(tmp_path, held)) == []
    assert not torch.equal(model.weight, held["weight"])


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a save that runs while the program goes to another directory, and of a manager."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer = robust_dcp.RobustWriter("one", drain_to="copies/one")
    monkeypatch.chdir(tmp_path)
    gate, state = Gate(), {"w": torch.full((9,), 1.0)}
    manager = robust_dcp.CheckpointManager("run", drain_to="copies")
    with FaultDisk(tmp_path, on={"write:*.distcp": gate}):
        saving = robust_dcp.async_save(state, storage_writer=writer)
        monkeypatch.chdir("elsewhere")
        gate.opened.set()
        assert saving.result().checkpoint_id == "one"
    manager.save(7, state)
    assert robust_dcp.finish_async_saves(timeout_seconds=300)
    monkeypatch.chdir("..")
    assert os.listdir("elsewhere") == []
    assert all(value_at(Path(path)) == 1 for path in ("one", "copies/one", "run/step_7", "copies/step_7"))


# --- one after the other ----------------------------------------------------------------------------------------------


def ask_while_one_is_written(directory: str, executor: Any) -> bool:
    """Rank 1 alone is slow: when rank 0 asks for the next save, only rank 1 has one under way."""
    options: Any = {"executor": executor, "storage_writer": robust_dcp.RobustWriter(directory)}  # one for all

    def save(name: str, max_in_flight: int = 1) -> Any:
        path = f"{directory}/{name}"
        return robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=path, max_in_flight=max_in_flight, **options)

    save("0").result()
    writers = writer_pids()
    order: list[str] = []
    if executor == "process" and dist.get_rank() == 1:
        os.kill(writers[0], signal.SIGSTOP)
    gate = Gate()
    with FaultDisk(directory, on={"write:*.distcp": gate}):
        if dist.get_rank() == 0:
            gate.opened.set()
        first = save("1")
        second = save("2", max_in_flight=2)
        for name, each in (("first", first), ("second", second)):
            each.add_done_callback(lambda _, name=name: order.append(name))
        dist.barrier()
        gate.opened.set()
        if executor == "process" and dist.get_rank() == 1:
            os.kill(writers[0], signal.SIGCONT)
        third = save("3")  # one at a time: it waits
        assert first.done() and second.done() and order == ["first", "second"]
        third.result()
    return writer_pids() == writers


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_the_next_save_waits_and_one_process_writes_all(tmp_path: Path, executor: str) -> None:
    assert on_ranks(2, ask_while_one_is_written, str(tmp_path), executor) == [True] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_one_rank_alone_cannot_cancel_a_save_and_a_callback_may_wait_for_all(tmp_path: Path) -> None:
    finished: list[bool] = []
    gate = Gate()
    with FaultDisk(tmp_path, on={"write:*.distcp": gate}):
        saving: Any = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
        saving.add_done_callback(lambda _: finished.append(robust_dcp.finish_async_saves()))
        saving.add_done_callback(sys.exit)  # it ends nothing, and nobody waits for ever
        assert not saving.cancel() and not saving.cancelled()
        gate.opened.set()
        saving.result()
        finished.append(robust_dcp.finish_async_saves(timeout_seconds=300))
    assert finished == [True, True] and value_at(tmp_path) == 1.0


def test_a_callback_may_wait_for_a_save_that_it_calls(tmp_path: Path) -> None:
    outcomes: list[Any] = []

    def save_again(_: Any) -> None:
        for staging in ("full", "lazy"):
            saving = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path / staging, staging=staging)
            outcomes.append(saving.result())

    saving = robust_dcp.async_save({"w": torch.zeros(9)}, checkpoint_id=tmp_path / "first")
    saving.add_done_callback(save_again)
    assert robust_dcp.finish_async_saves() and len(outcomes) == 2
    assert [value_at(tmp_path / name) for name in ("first", "full", "lazy")] == [0.0, 1.0, 1.0]


def test_who_would_wait_for_ever_in_on_commit_is_told_so(tmp_path: Path) -> None:
    refused: list[str] = []

    def save_again() -> None:
        saving = robust_dcp.async_save(
            {"w": torch.ones(9)}, checkpoint_id=tmp_path / "again", staging="lazy", max_in_flight=2
        )
        for wait in (saving.wait_staged, saving.result, saving.exception, robust_dcp.finish_async_saves):
            with pytest.raises(RuntimeError, match="in a thread of your own") as error:
                wait()
            refused.append(str(error.value))

    robust_dcp.async_save({"w": torch.zeros(9)}, checkpoint_id=tmp_path / "first", on_commit=save_again).result()
    assert robust_dcp.finish_async_saves() and len(refused) == 4
    assert [value_at(tmp_path / name) for name in ("first", "again")] == [0.0, 1.0]


def test_stocks_types_choose_who_writes(tmp_path: Path) -> None:
    state = {"w": torch.ones(9)}
    for kind, writes_itself in ((AsyncCheckpointerType.THREAD, True), (AsyncCheckpointerType.PROCESS, False)):
        with FaultDisk(tmp_path) as disk:
            robust_dcp.async_save(state, checkpoint_id=tmp_path / kind.value, async_checkpointer_type=kind).result()
        assert any(name.endswith(".distcp") for name in disk.names("write")) is writes_itself


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("staging", "half", "staging is one of full, lazy"),
        ("staging_nbytes", -1, "staging_nbytes must be at least 0"),
        ("max_in_flight", 0, "max_in_flight must be at least 1"),
        ("async_checkpointer_type", "fiber", "executor is one of thread, process"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, argument: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        robust_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=tmp_path, **{argument: value})


# --- failures ---------------------------------------------------------------------------------------------------------


def fail_and_ask_on_one_rank(directory: str, executor: Any) -> list[str]:
    """Rank 1 has no room: the error is raised to who asks for it, and else by the next save, on all ranks."""
    rank, told = dist.get_rank(), []

    def limit(nbytes: int) -> None:
        for pid in (os.getpid(), *writer_pids()):  # a writer process that is started later has it too
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    def save(name: str) -> Any:
        return robust_dcp.async_save(
            {f"w{rank}": torch.ones(MEGABYTE)}, checkpoint_id=f"{directory}/{name}", executor=executor
        )

    if rank == 1:
        limit(1000)
    first = save("1")
    if rank == 0:
        with pytest.raises(StorageError) as caught:
            first.result()
        told.append(str(caught.value))
    else:
        while not first.done():
            threading.Event().wait(0.01)
    with pytest.raises(StorageError) as again:  # rank 1 has not asked, so all are told
        save("2")
    told.append(str(again.value))
    limit(resource.RLIM_INFINITY)
    save("3").result()
    assert robust_dcp.finish_async_saves()
    return told


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_the_error_of_a_save_is_raised_by_result_and_by_the_next_save_on_all_ranks(
    tmp_path: Path, executor: str
) -> None:
    told = on_ranks(2, fail_and_ask_on_one_rank, str(tmp_path), executor)
    assert [len(each) for each in told] == [2, 1]
    assert all("File too large" in each and "rank 1" in each for rank in told for each in rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]


def test_ctrl_c_ends_a_save_and_the_next_one_into_its_directory_works(tmp_path: Path) -> None:
    for where in ((RobustPlanner, "resolve_data"), (Link, "begin")):  # while it copies, and as it begins
        with mock.patch.object(*where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as interrupt:
            robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path)
        assert interrupt.tb is not None  # a notebook keeps that, and with it all that the save had


def test_a_synchronous_save_comes_after_the_async_ones_and_raises_their_error(tmp_path: Path) -> None:
    with FaultDisk(tmp_path, on={"write:1/*.distcp": OSError(errno.ENOSPC, "")}):
        robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "1")
        with pytest.raises(StorageError, match="full"):
            robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "2")
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "2")


class WaitsToCopy(RobustPlanner):
    """Copies nothing before ``event``."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def resolve_data(self, write_item: Any) -> Any:
        assert self.event.wait(300)
        return super().resolve_data(write_item)


def save_in_two_threads(path: str, n_groups: int, options: dict[str, str]) -> list[float]:
    """Rank 0 has copied what thread 0 saves before what thread 1 does, and rank 1 the other way round. The values of
    what has arrived."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(n_groups)]
    may_copy = [threading.Event() for _ in range(2)]
    may_copy[rank].set()
    saves: list[Any] = [None, None]

    def save(thread: int) -> None:
        places = {name: f"{value}/{thread}" for name, value in options.items()}
        saves[thread] = robust_dcp.async_save(
            {f"w{rank}": torch.full((9,), float(thread))},
            storage_writer=RobustWriter(f"{path}/{thread}", **places),
            process_group=groups[thread % n_groups],
            planner=WaitsToCopy(may_copy[thread]),
            timeout_seconds=60,
        )
        may_copy[1 - rank].set()

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for saving in saves:
        saving.result()
    robust_dcp.finish_async_saves()
    return [value_at(Path(options.get("drain_to", path), f"{thread}"), f"w{rank}") for thread in range(2)]


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("is_drained", [False, True], ids=["", "drained"])
def test_saves_that_two_threads_call_at_once_do_not_wait_for_each_other(
    n_groups: int, is_drained: bool, tmp_path: Path
) -> None:
    """Each rank is done first with another of them."""
    options = {"drain_to": str(tmp_path / "copies")} if is_drained else {}
    path = str(tmp_path / "saves")
    assert values(run_ranks(2, save_in_two_threads, path, n_groups, options)) == [[0.0, 1.0]] * 2


def save_often_in_a_process(directory: str) -> tuple[int, int]:
    """The writer's memory after a few saves and after many, in bytes. Nobody has kept the working directory."""
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    state = {f"layers.{number}.weight": torch.full((16,), float(number)) for number in range(4_000)}
    nbytes = []
    for number in range(14):
        report = robust_dcp.async_save(state, checkpoint_id=directory, executor="process").result()
        assert report.identical_to == (directory if number else "")  # by the checksums that the writer has made
        (writer,) = writer_pids()
        nbytes.append(int(Path(f"/proc/{writer}/statm").read_text().split()[1]) * resource.getpagesize())
    return nbytes[3], nbytes[-1]


def test_the_memory_of_a_writer_process_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    ((few, many),) = values(run_ranks(1, save_often_in_a_process, str(tmp_path / "checkpoint")))
    assert many - few < 3 * MEGABYTE


def fail_beside_a_writer_that_stands_still(directory: str, can_be_killed: bool) -> str:
    """Rank 1's writer has no room, and rank 0's does not hear that it is to stop."""
    writer_process: Any = importlib.import_module("robust_dcp.writer_process")
    writer_process._END_SECONDS = 1.0
    if not can_be_killed:  # as in a call of the kernel that cannot be interrupted
        subprocess.Popen.kill = lambda self: None  # type: ignore[method-assign]
    rank = dist.get_rank()

    def save(value: float, numel: int = 9) -> Any:
        state = {f"w{rank}": torch.full((numel,), value)}
        return robust_dcp.async_save(state, checkpoint_id=directory, executor="process")

    save(0.0).result()
    dist.barrier()
    before, (writer,) = sorted(os.listdir(directory)), writer_pids()
    dist.barrier()
    if rank == 0:
        os.kill(writer, signal.SIGSTOP)
    else:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(StorageError) as caught:
        save(1.0, MEGABYTE).result()
    if rank == 0 and not can_be_killed:
        os.kill(writer, signal.SIGKILL)
    elif rank == 1:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert sorted(os.listdir(directory)) == before or not can_be_killed
    dist.barrier()
    save(2.0).result()
    assert value_at(Path(directory), f"w{rank}") == 2.0
    assert (writer_pids() == [writer]) == (rank == 1)
    return str(caught.value)


def test_a_writer_process_that_does_not_stop_does_not_hold_up_its_rank(tmp_path: Path) -> None:
    with Job(2) as job:
        for can_be_killed in (True, False):
            for told in job.run(fail_beside_a_writer_that_stands_still, f"{tmp_path}/{can_be_killed}", can_be_killed):
                assert "rank 1" in told and "File too large" in told


# --- the process ends -------------------------------------------------------------------------------------------------

_SAVE_AND_END = """
    import threading
    from tests.faults.disk import FaultDisk, Gate
    from torture.generations import writer_pids

    lock = threading.Lock()  # which both the main thread and the save need

    def committed():
        with lock:
            pass

    def save(value):
        state = {{"w": torch.full((9,), value)}}
        return robust_dcp.async_save(state, checkpoint_id=path, executor={executor!r}, on_commit=committed)

    save(0.0).result()
    writers = writer_pids()
    print("writers", *writers, flush=True)
    gate = Gate()
    FaultDisk(path, on={{{calls!r}: gate}}).install()
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    saving = save(1.0)
    assert writers or gate.is_there.wait(300)

    def go_on():
        gate.opened.set()
        for writer in writers:
            os.kill(writer, signal.SIGCONT)

    {ending}
"""
_WITHIN_GRACE = "threading.Timer(0.2, go_on).start(); "
_TERMINATED = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
_TERMINATED_IN_A_LOCK = "\n    with lock: os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)"
_TERMINATED_WHILE_IT_SAVES = """
    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # only then may the save end, else the next one would begin
        go_on()

    threading.Timer(0.1, terminate).start()
    while True:
        if robust_dcp.finish_async_saves(timeout_seconds=0.0):
            robust_dcp.async_save({"w": torch.zeros(9)}, checkpoint_id=path)
"""
_OUT_OF_GRACE = "robust_dcp.save_queue.GRACE_SECONDS = 0.1; "


def end(tmp_path: Path, executor: str, calls: str, ending: str) -> tuple[int, str]:
    script = _SAVE_AND_END.format(executor=executor, calls=calls, ending=ending)
    (ended,) = run_program(script, tmp_path, size=1)
    writers = ended.output.partition("writers")[2].splitlines()[0].split()
    for pid in writers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGCONT)
        until = time.monotonic() + 60
        while not is_gone(int(pid)):
            assert time.monotonic() < until, "the writer process outlives its rank"
            time.sleep(0.01)
    assert bool(writers) is (executor == "process")
    return ended.exitcode, ended.output


ENDINGS = {
    # what the process does, its exit code, and whether its save is finished
    "end": (_WITHIN_GRACE + "pass", 0, True),
    "exception": (_WITHIN_GRACE + "raise KeyError('of the user')", 1, True),
    "SIGTERM": (_WITHIN_GRACE + _TERMINATED, -signal.SIGTERM, True),
    "SIGTERM in a call": (_TERMINATED_WHILE_IT_SAVES, -signal.SIGTERM, True),
    "SIGTERM in a lock": (_WITHIN_GRACE + _TERMINATED_IN_A_LOCK, -signal.SIGTERM, True),
    "own handler": (f"{_WITHIN_GRACE}signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); {_TERMINATED}", 7, True),
    "out of grace": (_OUT_OF_GRACE + _TERMINATED, -signal.SIGTERM, False),
    "SIGKILL": (_OUT_OF_GRACE + _TERMINATED.replace("SIGTERM", "SIGKILL"), -signal.SIGKILL, False),
}
WRITING, COMMITTING, IN_A_PROCESS = ("thread", "write:*.distcp"), ("thread", "rename:.metadata"), ("process", "none")
SHORT = [
    *((WRITING, ending) for ending in ("end", "SIGTERM in a call", "own handler", "out of grace")),
    *((COMMITTING, ending) for ending in ("exception", "SIGTERM in a lock", "SIGKILL")),
    *((IN_A_PROCESS, ending) for ending in ("SIGTERM", "out of grace", "SIGKILL")),
]
WHOLE = [(when, ending) for when in (WRITING, COMMITTING, IN_A_PROCESS) for ending in ENDINGS]


@pytest.mark.parametrize(("when", "ending"), WHOLE if LONG_TESTS else SHORT)
def test_a_process_that_ends_finishes_its_save_within_the_time_of_grace(
    tmp_path: Path, when: tuple[str, str], ending: str
) -> None:
    script, code, is_finished = ENDINGS[ending]
    exitcode, output = end(tmp_path, *when, script)
    assert exitcode == code
    assert output.count("the checkpoint before it is still there") == (ending == "out of grace")
    assert value_at(tmp_path / "checkpoint") == float(is_finished)
    robust_dcp.save({"w": torch.full((9,), 2.0)}, checkpoint_id=tmp_path / "checkpoint")
    assert value_at(tmp_path / "checkpoint") == 2.0


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_default_timeout_of_sockets_is_that_of_the_program_alone(tmp_path: Path, executor: str) -> None:
    script = f"""
        import socket
        socket.setdefaulttimeout(0.01)
        for value in range(2):
            state = {{f"o{{number}}": number for number in range(5_000)}}  # what is told of them comes in parts
            state["w"] = torch.full((9,), float(value))
            robust_dcp.async_save(state, checkpoint_id=path, executor={executor!r}).result()
        {_TERMINATED}
    """
    (ended,) = run_program(script, tmp_path, size=1)
    assert ended.exitcode == -signal.SIGTERM, ended.output
    assert value_at(tmp_path / "checkpoint") == 1.0


# --- a part of each campaign of torture -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kill",
    [
        Kill(1, 3, 1, "thread", "trainer", 4, "lazy", 2),
        Kill(2, 2, 0, "thread", "trainer", 16, "waves", 1),
        Kill(3, 2, 1, "process", "writer", 3, "full", 1),
        Kill(4, 2, 0, "process", "trainer", 3, "lazy", 1),
    ],
    ids=lambda kill: kill.kind,
)
def test_whoever_is_killed_during_an_async_save_no_checkpoint_is_lost(kill: Kill) -> None:
    assert judge_kill(kill).complaints == []


@pytest.mark.parametrize("way", ["thread, lazy", "process, full"])
def test_no_copy_is_torn_while_a_thread_writes_all_the_time(tmp_path: Path, way: str) -> None:
    assert values(run_ranks(2, be_rank, way, 2, 1, str(tmp_path))) == [[], []]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_saves_back_to_back_leave_nothing_behind(executor: str) -> None:
    options = {"executor": executor, "max_in_flight": 2}
    assert judge_row(options, 12, 1).complaints == []
