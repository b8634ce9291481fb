"""Processes end as they would without robust_dcp: after a lost peer, a verdict, a fork, a retry and an async save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from tests.faults.disk import LONG_TESTS
from tests.harness.ranks import run_program, run_ranks, values
from tests.harness.torch_versions import needs_lazy_connections

_SAVE_AND_DIE = """
dist.init_process_group("gloo")
if HAS_SAVED:
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=60)
dist.barrier()
if rank == VICTIM:  # before it saves, or while it writes
    robust_dcp.on_event(lambda event: IS_CAUGHT and event.name != "progress" or os.kill(os.getpid(), signal.SIGKILL))
try:
    robust_dcp.save(state(2), checkpoint_id=f"{path}/2", timeout_seconds=60 if HAS_SAVED else 4)
except robust_dcp.ExchangeTimeout as error:
    print("named", error.missing_ranks, flush=True)
    if IS_CAUGHT:
        os._exit(1)  # at once, and rank 0 takes the store along
    raise
"""


@pytest.mark.parametrize(("has_saved", "victim", "is_caught"), [(True, 1, False), (True, 2, True), (False, 3, False)])
def test_the_survivors_of_a_dead_rank_end_with_exit_code_1(
    has_saved: bool, victim: int, is_caught: bool, tmp_path: Path
) -> None:
    script = _SAVE_AND_DIE.replace("HAS_SAVED", str(has_saved)).replace("IS_CAUGHT", str(is_caught))
    ended = run_program(script.replace("VICTIM", str(victim)), tmp_path)
    assert ended[victim].exitcode == -signal.SIGKILL
    for each in ended:
        if each.rank != victim:
            assert f"named [{victim}]" in each.output
            assert each.exitcode == 1


def test_retries_in_one_process_save_though_one_rank_fails_before_it_saves(tmp_path: Path) -> None:
    script = f"""
store = store_of_rank_0()
for attempt in range({10 if LONG_TESTS else 4}):
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{{attempt}}", store), rank=rank, world_size=size)
    try:
        if rank == attempt % size:
            raise RuntimeError("this rank fails before it saves")
        robust_dcp.save(state(attempt), checkpoint_id=f"{{path}}/{{attempt}}", timeout_seconds=2)
    except (RuntimeError, robust_dcp.ExchangeTimeout) as error:
        told = type(error).__name__
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{{attempt}} again", store), rank=rank, world_size=size)
    robust_dcp.save(state(attempt), checkpoint_id=f"{{path}}/{{attempt}}", timeout_seconds=60)
    dist.destroy_process_group()
print("saved each time", flush=True)
stay_until_all_are_done(store)
"""
    # Without this barrier torch's own group may be destroyed on one rank while another still makes it.
    env = {"TORCH_DIST_INIT_BARRIER": "1"}
    ended = run_program(script, tmp_path, size=3, env=env)
    assert all(each.exitcode == 0 and "saved each time" in each.output for each in ended)


def test_a_later_group_of_the_same_name_in_the_same_store_begins_anew(tmp_path: Path) -> None:
    script = """
    store = store_of_rank_0()
    for attempt in range(3):
        join_by(store)
        if rank or attempt:  # rank 0 does not come to the first attempt
            try:
                robust_dcp.save(state(attempt), checkpoint_id=f"{path}/{attempt}", timeout_seconds=60 if attempt else 3)
                print("saved", attempt, flush=True)
            except robust_dcp.ExchangeTimeout as error:
                print("failed", attempt, error.missing_ranks, flush=True)
        dist.destroy_process_group()
        store.add(f"left {attempt}", 1)
        while store.add(f"left {attempt}", 0) < size:
            time.sleep(0.02)
    """
    ended = run_program(script, tmp_path, size=3)
    assert [each.exitcode for each in ended] == [0, 0, 0]
    for each in ended:
        assert "saved 1" in each.output and "saved 2" in each.output
        assert each.rank == 0 or "failed 0 [0]" in each.output


def test_a_forked_child_that_runs_its_exit_handlers_disturbs_nothing(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=30)
    for turn in range(2):
        child = os.fork()
        if child == 0:
            sys.exit(7)  # through all exit handlers, and the end of the interpreter
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        robust_dcp.save(state(turn), checkpoint_id=f"{path}/1", timeout_seconds=30)
    loaded = state(-1)
    robust_dcp.load(loaded, checkpoint_id=f"{path}/1", timeout_seconds=30)
    assert loaded["shared"][0] == 1
    dist.destroy_process_group()
    """
    for each in run_program(script, tmp_path, size=2, in_new_interpreter=True):
        assert each.output.count("child 7") == 2
        assert each.exitcode == 0


def test_a_thread_of_the_user_saves_loads_and_copies_when_main_has_returned(tmp_path: Path) -> None:
    script = """
    import concurrent.futures, contextlib, threading
    pool = concurrent.futures.ThreadPoolExecutor(1)
    def save_and_load():
        with contextlib.suppress(RuntimeError):  # raised once Python is about to end, and only waits for this thread
            while pool.submit(int):
                time.sleep(0.02)
        robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=60)
        robust_dcp.load(loaded := state(-1), checkpoint_id=path, timeout_seconds=60)
        robust_dcp.copy_checkpoint(path, f"{path}.copy{rank}")
        print("loaded", loaded["shared"][0].item(), flush=True)
    dist.init_process_group("gloo")
    saving = threading.Thread(target=lambda: robust_dcp.async_save(state(0), checkpoint_id=path, timeout_seconds=60))
    saving.start()  # Python has no handler for SIGTERM then
    saving.join()
    threading.Thread(target=save_and_load).start()
    """
    for each in run_program(script, tmp_path, size=2, in_new_interpreter=True):
        assert "loaded 1.0" in each.output and each.exitcode == 0, each.output
        assert each.output.count("SIGTERM will end this process before its async saves are over") == 1


def test_an_error_is_heard_at_once_though_children_that_the_ranks_forked_hold_the_connections(tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=40)
    child = os.fork()
    if child == 0:
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
    os.kill(child, signal.SIGKILL)
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
    loaded = {"shared": torch.zeros(nbytes // 4), "own1": torch.zeros(nbytes // 4)}
    robust_dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert loaded["shared"][-1] == 3 and loaded["own1"][-1] == 4


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_async_save_that_fails_after_the_group_is_destroyed_ends_the_process_with_the_error(
    tmp_path: Path, is_asked: bool
) -> None:
    script = f"""
    dist.init_process_group("gloo")
    def fail(*_):
        raise OSError("this disk fails")
    if rank == 1:  # it makes its data file durable while the save is under way
        os.fsync = os.fdatasync = fail
    future = robust_dcp.async_save(state(3), checkpoint_id=path, timeout_seconds=60)
    dist.destroy_process_group()
    if {is_asked}:
        assert future.exception() is not None
    """
    for each in run_program(script, tmp_path, size=2):
        assert each.exitcode == int(not is_asked)
        assert ("Error: " in each.output and "this disk fails" in each.output) or is_asked


@pytest.mark.parametrize(
    ("fork", "words"),
    [
        ("os.fork()", "the next save is committed"),
        # Python's handlers of forks do not run.
        ("__import__('ctypes').CDLL(None).fork()", "it has ended, and its lock is held by process CHILD, which it has"),
    ],
)
def test_a_child_that_was_forked_within_a_save_does_not_hold_the_lock_of_its_killed_parent_or_is_named(
    fork: str, words: str, tmp_path: Path
) -> None:
    script = """
    import signal

    def fork_and_die(event):
        if any(".saving." in name for name in (os.listdir(path) if os.path.isdir(path) else [])):
            if os.fork() == 0:  # such as a worker of a DataLoader
                open(path + ".part", "w").write(str(os.getpid()))
                os.rename(path + ".part", path + ".forked")
                while not os.path.exists(path + ".over"):
                    time.sleep(0.01)
                os._exit(0)
            while not os.path.exists(path + ".forked"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    import time
    parent = os.fork()
    if parent == 0:
        robust_dcp.on_event(fork_and_die)
        robust_dcp.save(state(1), checkpoint_id=path)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    try:
        robust_dcp.save(state(1), checkpoint_id=path)
        print("the next save is committed", flush=True)
    except robust_dcp.StorageError as error:
        print("the next save is refused:", error.message.replace(open(path + ".forked").read(), "CHILD"), flush=True)
    finally:
        open(path + ".over", "w").close()
    """
    (ended,) = run_program(script.replace("os.fork() == 0:  # such", f"{fork} == 0:  # such"), tmp_path, size=1)
    assert words in ended.output, ended.output


def test_a_writer_process_that_cannot_be_started_is_told_with_the_limits(tmp_path: Path) -> None:
    script = """
    import subprocess

    def refuse(*args, **more):
        raise BlockingIOError(11, "Resource temporarily unavailable")  # as the system does over `ulimit -u`

    subprocess.Popen = refuse
    try:
        robust_dcp.async_save(state(1), checkpoint_id=path, executor="process").result()
    except robust_dcp.RobustCheckpointError as error:
        print("told:", error.message, flush=True)
    """
    (ended,) = run_program(script, tmp_path, size=1)
    assert "writer process cannot be started" in ended.output and "`ulimit -u`" in ended.output, ended.output


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


@pytest.mark.parametrize("turn", range(3 if LONG_TESTS else 1))
def test_ranks_that_end_right_after_the_verdict_of_a_failed_load_all_get_it(turn: int, tmp_path: Path) -> None:
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=60)
    try:
        robust_dcp.load({"shared": torch.zeros(7)}, checkpoint_id=path, timeout_seconds=60)
    except BaseException as error:
        print("verdict", type(error).__name__, flush=True)
        os._exit(3)
    """
    ended = run_program(script, tmp_path)
    verdicts = {each.output.partition("verdict ")[2].split("\n")[0] for each in ended}
    assert len(verdicts) == 1 and "ExchangeTimeout" not in verdicts, verdicts
    assert {each.exitcode for each in ended} == {3}


@needs_lazy_connections
def test_many_groups_cost_few_open_files_and_threads_and_groups_that_are_made_anew_no_more(tmp_path: Path) -> None:
    script = """
import threading
store = store_of_rank_0()
counts, kept = [], []
for attempt in range(8):
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt}", store), rank=rank, world_size=size)
    robust_dcp.save(state(attempt), checkpoint_id=f"{path}/1", timeout_seconds=30)
    plugins = {"storage_writer": robust_dcp.RobustWriter(f"{path}/2"), "planner": robust_dcp.RobustPlanner()}
    kept.append(dist.checkpoint.save(state(attempt), **plugins))
    if attempt == 7:
        break
    dist.destroy_process_group()
    counts.append(len(os.listdir("/proc/self/fd")))
print("open files", *counts, flush=True)
groups = [dist.new_group(list(range(size))) for _ in range(20)]
dist.barrier()
files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
for number, group in enumerate(groups):
    robust_dcp.save(state(number), checkpoint_id=f"{path}/1", process_group=group, timeout_seconds=60)
print("more", len(os.listdir("/proc/self/fd")) - files, threading.active_count() - threads, flush=True)
dist.barrier()
stay_until_all_are_done(store)
"""
    for each in run_program(script, tmp_path, size=4):
        counts = [int(count) for count in each.output.partition("open files ")[2].split("\n")[0].split()]
        # What gloo closes in threads of its own may be open for a moment.
        assert min(counts[-3:]) <= min(counts[:3]) + 2, counts
        files, threads = each.output.partition("more ")[2].split()[:2]
        assert int(files) <= 20 * 11 and int(threads) <= 3  # on rank 0, which has the store
        assert each.exitcode == 0


def test_a_limit_of_open_files_that_is_too_low_is_raised_or_named_and_the_process_stays(tmp_path: Path) -> None:
    script = """
import resource
dist.init_process_group("gloo")
groups = [dist.new_group(list(range(size))) for _ in range(2)]
low, (_, hard) = len(os.listdir("/proc/self/fd")) + 40, resource.getrlimit(resource.RLIMIT_NOFILE)
for group, hard in zip(groups, (hard, low)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        robust_dcp.save(state(1), checkpoint_id=path, process_group=group, timeout_seconds=60)
        print("saved with", resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low, flush=True)
    except robust_dcp.RobustCheckpointError as error:
        print("told", error, flush=True)
"""
    for each in run_program(script, tmp_path):
        assert "saved with True" in each.output and "raise the hard limit" in each.output, each.output
        assert each.exitcode == 0


def test_ranks_whose_store_is_frozen_give_up_in_time_and_end_at_once(tmp_path: Path) -> None:
    script = """
    import atexit, subprocess
    with open(f"{path}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 0:  # it hosts the store, and the others have not asked that for anything yet
        wait = " || ".join(f"kill -0 {open(f'{path}.{other}').read()} 2>/dev/null" for other in (1, 2))
        wait = f"n=0; while [ $n -lt 400 ] && {{ {wait}; }}; do n=$((n + 1)); sleep 0.1; done"
        subprocess.Popen(["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=4)
    except robust_dcp.ExchangeTimeout as error:
        print("named", error.missing_ranks, "after", time.monotonic() - began, flush=True)
        atexit._run_exitfuncs()  # as at the end of Python
        print("ended after", time.monotonic() - began, flush=True)
        sys.exit(1)
    """
    frozen, *others = run_program(script, tmp_path, size=3)
    assert frozen.exitcode == -signal.SIGKILL
    for each in others:
        assert "named [0] after" in each.output and each.exitcode == 1
        named, ended = (float(each.output.partition(f"{word} after ")[2].split()[0]) for word in ("[0]", "ended"))
        assert ended - named < 11, "EXIT_SECONDS had to end it"


_WAITS_IN_C = """
import pathlib

dist.init_process_group("gloo")
if WATCHES:
    robust_dcp.CheckpointManager(path).should_save(1)
saving = robust_dcp.async_save(state(1, 10 if IS_OVER else 4_000_000), checkpoint_id=f"{path}/1")
if IS_OVER:
    saving.result()
pid = torch.tensor([os.getpid()])
dist.broadcast(pid, src=0)
if rank == 0:
    dist.recv(torch.zeros(3), src=1)  # rank 1 sends nothing, so this returns only when rank 1 has ended
    print("returned")
else:
    time.sleep(0.5)  # rank 0 is about to wait. If it does not yet, it ends all the same
    for seconds in SIGNALS:
        os.kill(pid.item(), signal.SIGTERM)
        time.sleep(seconds)
    status, ends_at = pathlib.Path(f"/proc/{pid.item()}/status"), time.monotonic() + 60
    while status.exists() and "(zombie)" not in status.read_text() and time.monotonic() < ends_at:
        time.sleep(0.05)
    saving.exception()
"""


@pytest.mark.parametrize(
    ("is_over", "watches", "signals"),
    [(True, False, [0]), (False, False, [0]), (True, True, [1.5, 0])],
    ids=["no save is under way", "a save is under way", "the second signal, with should_save"],
)
def test_sigterm_ends_a_rank_that_waits_in_a_collective(
    is_over: bool, watches: bool, signals: list[float], tmp_path: Path
) -> None:
    """Python's own handlers run when the call in C returns. A save that is under way is finished before."""
    script = _WAITS_IN_C.replace("WATCHES", str(watches)).replace("IS_OVER", str(is_over))
    ended, _ = run_program(script.replace("SIGNALS", str(signals)), tmp_path, size=2)
    assert ended.exitcode == -signal.SIGTERM and "returned" not in ended.output
    wanted = {"shared": torch.zeros(10 if is_over else 4_000_000)}
    robust_dcp.load(wanted, checkpoint_id=tmp_path / "checkpoint/1", no_dist=True)
    assert wanted["shared"].unique().tolist() == [1.0]


def save_where_no_thread_starts_once(path: str) -> list[str]:
    """Rank 1 refuses its first async save. What it holds then is never written."""
    start, refused = threading.Thread.start, []

    def start_once(thread: threading.Thread) -> None:
        if dist.get_rank() == 1 and thread.name.startswith("robust_dcp-async-save") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    outcomes = []
    threading.Thread.start = start_once  # type: ignore[method-assign]
    for version in range(1, 4):
        state = {f"own{dist.get_rank()}": torch.full((9,), float(version))}
        try:
            robust_dcp.async_save(state, checkpoint_id=path, timeout_seconds=60).result()
            outcomes.append("saved")
        except RuntimeError:
            outcomes.append("refused")
    return outcomes


def test_a_save_that_was_refused_is_not_written_later(tmp_path: Path) -> None:
    saved = values(run_ranks(2, save_where_no_thread_starts_once, str(tmp_path / "c")))
    assert saved == [["refused", "saved", "saved"]] * 2
    wanted = {"own0": torch.zeros(9), "own1": torch.zeros(9)}
    robust_dcp.load(wanted, checkpoint_id=tmp_path / "c", no_dist=True)
    assert [tensor.unique().tolist() for tensor in wanted.values()] == [[3.0], [3.0]]


def run_where_no_thread_starts(path: str) -> list[str]:
    """What the operations end with, if rank 1 can start no thread."""
    state = {f"own{dist.get_rank()}": torch.ones(9)}
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def outcome(operation: Callable[[], object]) -> str:
        dist.barrier()
        if dist.get_rank() == 1:
            threading.Thread.start = refuse  # type: ignore[method-assign]
        try:
            operation()
            return "returned"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]

    options: dict[str, Any] = {"checkpoint_id": path, "timeout_seconds": 60}
    outcomes = [outcome(lambda: robust_dcp.save(state, **options))]
    robust_dcp.save(state, **options)
    outcomes.append(outcome(lambda: robust_dcp.save(state, **options)))
    outcomes.append(outcome(lambda: robust_dcp.async_save(state, **options).result()))
    outcomes.append(outcome(lambda: robust_dcp.load(state, **options)))
    robust_dcp.save(state, **options)
    return outcomes


def test_where_no_thread_can_be_started_all_ranks_hear_which_limit_to_look_at(tmp_path: Path) -> None:
    rank_0, rank_1 = values(run_ranks(2, run_where_no_thread_starts, str(tmp_path / "c")))
    for one, other in zip(rank_0, rank_1, strict=True):
        assert one.partition(":")[0] == other.partition(":")[0] != "RuntimeError"
        assert "rank 1" in one and "`ulimit -u`" in one and "`ulimit -u`" in other
