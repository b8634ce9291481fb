"""Processes end as they would without robust_dcp: after a lost peer, a verdict, a fork, a retry and an async save."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import robust_dcp
from tests.promises.programs import run_program

_SAVE_AND_DIE = """
dist.init_process_group("gloo")
robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=60)
catch = sys.argv[1:] or os.environ["CATCH"]
dist.barrier()
if rank == VICTIM:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    robust_dcp.save(state(2), checkpoint_id=f"{path}/2", timeout_seconds=60)
except robust_dcp.ExchangeTimeout as error:
    print("named", error.missing_ranks, flush=True)
    if os.environ["CATCH"] == "1":
        sys.exit(1)
    raise
"""


@pytest.mark.parametrize("caught", ["0", "1"])
@pytest.mark.parametrize("victim", [1, 2])
def test_the_survivors_of_a_dead_rank_end_with_exit_code_1(tmp_path: Path, victim: int, caught: str) -> None:
    ended = run_program(_SAVE_AND_DIE.replace("VICTIM", str(victim)), tmp_path, env={"CATCH": caught})
    assert ended[victim].exitcode == -signal.SIGKILL
    for each in ended:
        if each.rank != victim:
            assert f"named [{victim}]" in each.output
            assert each.exitcode == 1


def test_the_survivors_of_a_rank_that_died_before_the_first_save_end_with_exit_code_1(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=4)
    """
    ended = run_program(script, tmp_path)
    assert [each.exitcode for each in ended] == [1, 1, 1, -signal.SIGKILL]
    assert all("3" in each.output and "ExchangeTimeout" in each.output for each in ended[:3])


def test_ten_retries_in_one_process_save_though_one_rank_fails_before_it_saves(tmp_path: Path) -> None:
    script = """
    import datetime
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    for attempt in range(10):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt}", store), rank=rank, world_size=size)
        try:
            if rank == attempt % size:
                raise RuntimeError("this rank fails before it saves")
            robust_dcp.save(state(attempt), checkpoint_id=f"{path}/{attempt}", timeout_seconds=2)
        except (RuntimeError, robust_dcp.ExchangeTimeout) as error:
            told = type(error).__name__
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt} again", store), rank=rank, world_size=size)
        robust_dcp.save(state(attempt), checkpoint_id=f"{path}/{attempt}", timeout_seconds=60)
        dist.destroy_process_group()
    print("saved ten times", flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.05)
    """
    # Without this barrier torch's own group may be destroyed on one rank while another still makes it.
    ended = run_program(script, tmp_path, size=3, timeout_seconds=200, env={"TORCH_DIST_INIT_BARRIER": "1"})
    assert [each.exitcode for each in ended] == [0, 0, 0]
    assert all("saved ten times" in each.output for each in ended)


def test_a_later_group_of_the_same_name_in_the_same_store_begins_anew(tmp_path: Path) -> None:
    script = """
    # A backend that keeps nothing in the store stands for one whose keys are always fresh.
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    for attempt in range(3):
        dist.init_process_group("fake", store=store, rank=rank, world_size=size)
        if rank or attempt:  # rank 0 does not come to the first attempt
            try:
                robust_dcp.save(state(attempt), checkpoint_id=f"{path}/{attempt}", timeout_seconds=3)
                print("saved", attempt, flush=True)
            except robust_dcp.ExchangeTimeout as error:
                print("failed", attempt, error.missing_ranks, flush=True)
        dist.destroy_process_group()
        store.add(f"left {attempt}", 1)
        while store.add(f"left {attempt}", 0) < size:
            time.sleep(0.02)
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    ended = run_program("from torch.testing._internal.distributed import fake_pg\n" + _dedent(script), tmp_path, size=3)
    assert [each.exitcode for each in ended] == [0, 0, 0]
    for each in ended:
        assert "saved 1" in each.output and "saved 2" in each.output
        assert each.rank == 0 or "failed 0 [0]" in each.output


def _dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


def test_a_forked_child_that_runs_its_exit_handlers_disturbs_nothing(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=30)
    for turn in range(3):
        child = os.fork()
        if child == 0:
            sys.exit(7)  # through all exit handlers, and the end of the interpreter
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        robust_dcp.save(state(turn), checkpoint_id=f"{path}/1", timeout_seconds=30)
    loaded = state(-1)
    robust_dcp.load(loaded, checkpoint_id=f"{path}/1", timeout_seconds=30)
    assert loaded["shared"][0] == 2
    dist.destroy_process_group()
    """
    for each in run_program(script, tmp_path, size=2, in_new_interpreter=True):
        assert each.output.count("child 7") == 3
        assert each.exitcode == 0


def test_an_error_is_heard_at_once_though_children_that_the_ranks_forked_hold_the_connections(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=40)
    if os.fork() == 0:
        time.sleep(40)
        os._exit(0)
    began = time.monotonic()
    try:
        channel = robust_dcp.Channel.for_group(operation="more", timeout_seconds=40)
        channel.barrier("b")
        with channel.together():
            if rank == 1:
                raise OSError("this rank fails")
            channel.barrier("c")
    except (OSError, robust_dcp.ExchangeError) as error:
        print("heard after", time.monotonic() - began, type(error).__name__, flush=True)
    os._exit(0)
    """
    for each in run_program(script, tmp_path, size=3):
        assert float(each.output.partition("heard after ")[2].split()[0]) < 20
        assert each.exitcode == 0


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 26])
def test_an_async_save_is_finished_though_the_group_is_destroyed_and_main_ends(tmp_path: Path, nbytes: int) -> None:
    script = f"""
    dist.init_process_group("gloo")
    robust_dcp.async_save(state(3, {nbytes} // 4), checkpoint_id=path, timeout_seconds=60)
    dist.destroy_process_group()
    """
    assert [each.exitcode for each in run_program(script, tmp_path, size=2)] == [0, 0]
    import torch

    loaded = {"shared": torch.zeros(nbytes // 4), "own1": torch.zeros(nbytes // 4)}
    robust_dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert loaded["shared"][-1] == 3 and loaded["own1"][-1] == 4


@pytest.mark.parametrize("asked", ["0", "1"])
def test_an_async_save_that_fails_after_the_group_is_destroyed_ends_the_process_with_the_error(
    tmp_path: Path, asked: str
) -> None:
    script = """
    dist.init_process_group("gloo")
    def fail(*_):
        raise OSError("this disk fails")
    if rank == 1:  # it makes its data file durable while the save is under way
        os.fsync = os.fdatasync = fail
    future = robust_dcp.async_save(state(3), checkpoint_id=path, timeout_seconds=60)
    dist.destroy_process_group()
    if os.environ["ASKED"] == "1":
        assert future.exception() is not None
    """
    for each in run_program(script, tmp_path, size=2, env={"ASKED": asked}):
        assert each.exitcode == (0 if asked == "1" else 1)
        assert ("Error: " in each.output and "this disk fails" in each.output) or asked == "1"


def test_a_child_that_is_forked_within_a_save_leaves_the_lock_of_its_parent(tmp_path: Path) -> None:
    script = """
    import atexit
    import fcntl
    found = []

    def fork(event):
        files = [name for name in os.listdir(path) if ".saving." in name] if os.path.isdir(path) else []
        if found or not files:
            return
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()  # as at the end of Python; an exception would fail the save in the child
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with open(os.path.join(path, files[0])) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.append("free")
            except BlockingIOError:
                found.append("locked")

    robust_dcp.on_event(fork)
    robust_dcp.save(state(1), checkpoint_id=path)
    print("the save is", found, flush=True)
    """
    (ended,) = run_program(script, tmp_path, size=1)
    assert ended.exitcode == 0
    assert "the save is ['locked']" in ended.output


def test_ranks_that_end_right_after_the_verdict_of_a_failed_load_all_get_it(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=60)
    wrong = {"shared": torch.zeros(7)}
    try:
        robust_dcp.load(wrong, checkpoint_id=path, timeout_seconds=60)
    except BaseException as error:
        print("verdict", type(error).__name__, flush=True)
        os._exit(3)
    """
    for turn in range(3):
        directory = tmp_path / f"{turn}"
        directory.mkdir()
        ended = run_program(script, directory)
        verdicts = {each.output.partition("verdict ")[2].split("\n")[0] for each in ended}
        assert len(verdicts) == 1 and "ExchangeTimeout" not in verdicts, verdicts
        assert {each.exitcode for each in ended} == {3}


def test_groups_that_are_made_anew_leave_no_open_files(tmp_path: Path) -> None:
    script = """
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    counts = []
    for attempt in range(12):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt}", store), rank=rank, world_size=size)
        robust_dcp.save(state(attempt), checkpoint_id=f"{path}/1", timeout_seconds=30)
        dist.destroy_process_group()
        counts.append(len(os.listdir("/proc/self/fd")))
    print("open files", *counts, flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.05)
    """
    for each in run_program(script, tmp_path, size=2):
        counts = [int(count) for count in each.output.partition("open files ")[2].split("\n")[0].split()]
        assert counts[-1] <= counts[2] + 2, counts
        assert each.exitcode == 0


def test_many_groups_cost_few_open_files_and_threads(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    import threading
    groups = [dist.new_group(list(range(size))) for _ in range(20)]
    dist.barrier()
    files, threads, began = len(os.listdir("/proc/self/fd")), threading.active_count(), time.monotonic()
    for number, group in enumerate(groups):
        robust_dcp.save(state(number), checkpoint_id=f"{path}/{number}", process_group=group, timeout_seconds=60)
    print("more files", len(os.listdir("/proc/self/fd")) - files, "more threads", threading.active_count() - threads,
          "seconds", time.monotonic() - began, flush=True)
    dist.barrier()
    """
    for each in run_program(script, tmp_path, size=4):
        words = each.output.split()
        assert int(words[words.index("files") + 1]) <= 20 * 11  # on rank 0, which has the store
        assert int(words[words.index("threads") + 1]) <= 3
        assert each.exitcode == 0


def test_ranks_whose_store_is_frozen_give_up_in_time_and_end_at_once(tmp_path: Path) -> None:
    script = """
    import atexit, subprocess
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 0:  # it hosts the store, and the others have not asked that for anything yet
        subprocess.Popen(["sh", "-c", f"sleep 30; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    atexit.register(lambda: print("ended after", time.monotonic() - began, flush=True))
    try:
        robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=4)
    except robust_dcp.ExchangeTimeout as error:
        print("named", error.missing_ranks, "after", time.monotonic() - began, flush=True)
        sys.exit(1)
    """
    frozen, *others = run_program(script, tmp_path, size=3, in_new_interpreter=True, timeout_seconds=90)
    assert frozen.exitcode == -signal.SIGKILL
    for each in others:
        assert "named [0] after" in each.output and each.exitcode == 1
        named, ended = (float(each.output.partition(f"{word} after ")[2].split()[0]) for word in ("[0]", "ended"))
        assert ended - named < 8, "EXIT_SECONDS had to end it"
