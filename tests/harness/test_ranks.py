"""The harness keeps its word: outcomes in order, failures told apart, deadlines kept, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from robust_dcp.errors import ExchangeTimeout, RankFailure
from robust_dcp.testing.ranks import RanksOverran, errors, run_ranks, values


def _rank_and_sum() -> tuple[int, torch.Tensor]:
    tensor = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def _threads_of_the_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def _raise_on_rank(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ExchangeTimeout(
            "rank 7 is missing", failures=[RankFailure(7, "OSError", "gone")], missing_ranks=[7], timeout_seconds=2.5
        )
    return "fine"


def _kill_rank(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()  # gloo sees the connection of the killed rank close
    return "noticed"


def _say_and_hang_on_rank(rank: int) -> None:
    print("about to wait")
    if int(os.environ["RANK"]) == rank:
        os.write(2, f"child {subprocess.Popen(['sleep', '1000']).pid}\n".encode())
        threading.Event().wait()


def _leave_a_child() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def _stop_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()


def _raise_while_others_wait_for_that_rank() -> float:
    if dist.get_rank() == 0:
        raise CheckpointException("rank 0 gives up", {})
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.barrier()
    return time.monotonic() - began


def _return_early_on_rank_0_then_use_the_others() -> int:
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return 0
    for _ in range(200):
        dist.barrier(pair)
    return dist.get_rank()


def _environment_and_directory(name: str) -> tuple[str | None, str]:
    return os.environ.get(name), os.getcwd()


def _initialised_by_itself() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, dist.get_world_size()


def _return_a_lambda() -> object:
    return lambda: None


def _return_zeros(nbytes: int) -> bytes:
    return bytes(nbytes)


def _write_output() -> None:
    print("from Python")
    os.write(2, b"from C\n")


def test_every_rank_has_its_own_rank_and_a_working_group() -> None:
    results = values(run_ranks(4, _rank_and_sum))
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(torch.equal(tensor, torch.full((3,), 10.0)) for _, tensor in results)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_ranks_are_forked_from_a_process_without_threads() -> None:
    assert values(run_ranks(1, _threads_of_the_server, init=False)) == [1]


def test_the_process_that_ranks_are_forked_from_asks_for_no_device() -> None:
    script = """
import torch
asked = []
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
import robust_dcp.testing.preload
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_rank_starts_in_milliseconds_once_the_server_runs() -> None:
    values(run_ranks(1, _threads_of_the_server, init=False))
    began = time.monotonic()
    values(run_ranks(2, _rank_and_sum))
    assert time.monotonic() - began < 2  # importing torch alone takes longer


def test_an_exception_is_told_with_its_fields_and_the_other_ranks_keep_their_values() -> None:
    outcomes = run_ranks(3, _raise_on_rank, 1, failed_ranks_stay_seconds=0)
    assert [outcome.value for outcome in outcomes] == ["fine", None, "fine"]
    assert [outcome.exitcode for outcome in outcomes] == [0, 1, 0]
    (error,) = errors(outcomes, ranks=[1])
    assert error.type_name == "ExchangeTimeout"
    assert error.is_a(TimeoutError) and error.is_a(CheckpointException) and not error.is_a(KeyError)
    assert error.message == "rank 7 is missing"
    assert error.fields["missing_ranks"] == [7]
    assert error.rank_failures == (RankFailure(7, "OSError", "gone"),)
    assert "_raise_on_rank" in error.traceback_text


def test_values_of_a_run_with_a_failed_rank_fail_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] did not return.*_raise_on_rank.*rank 7 is missing"):
        values(run_ranks(2, _raise_on_rank, 0))


def test_errors_of_a_run_with_a_rank_that_returned_fail() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not raise"):
        errors(run_ranks(2, _raise_on_rank, 0))


def test_a_killed_rank_has_the_exit_code_of_the_signal_and_no_error() -> None:
    outcomes = run_ranks(3, _kill_rank, 2)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, -signal.SIGKILL]
    assert [outcome.value for outcome in outcomes] == ["noticed", "noticed", None]
    assert outcomes[2].error is None
    with pytest.raises(AssertionError, match=r"(?s)ranks \[2\] did not return.*exit code -9"):
        values(outcomes)


def test_an_overrun_ends_all_ranks_and_their_children_and_shows_the_stacks() -> None:
    began = time.monotonic()
    with pytest.raises(RanksOverran) as caught:
        run_ranks(2, _say_and_hang_on_rank, 1, timeout_seconds=1.5, init=False)
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert "ranks [1] were still running after 1.5 seconds" in text
    assert "rank 0 returned" in text
    assert "in _say_and_hang_on_rank" in text.split("--- rank 1")[1]
    assert "about to wait" in text
    assert _ends_soon(int(text.split("child ")[1].split()[0]))


def test_what_a_rank_started_ends_with_it_though_the_rank_returned() -> None:
    (child,) = values(run_ranks(1, _leave_a_child, init=False))
    assert _ends_soon(child)


def test_an_overrun_shows_the_stack_of_a_rank_that_was_stopped() -> None:
    with pytest.raises(RanksOverran, match="in _stop_on_rank"):
        run_ranks(2, _stop_on_rank, 0, timeout_seconds=2)


def test_a_rank_that_raised_is_let_go_while_others_wait_for_it() -> None:
    outcomes = run_ranks(2, _raise_while_others_wait_for_that_rank, timeout_seconds=30, failed_ranks_stay_seconds=0.2)
    (error,) = errors(outcomes, ranks=[0])
    assert error.is_a(CheckpointException)
    assert outcomes[1].value < 20


def test_a_rank_that_returned_keeps_its_connections_until_the_others_are_done() -> None:
    assert values(run_ranks(3, _return_early_on_rank_0_then_use_the_others)) == [0, 1, 2]


def test_ranks_see_the_callers_environment_and_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROBUST_DCP_TEST", "from the caller")
    monkeypatch.chdir(tmp_path)
    seen = values(run_ranks(2, _environment_and_directory, "ROBUST_DCP_TEST", init=False))
    assert seen == [("from the caller", str(tmp_path))] * 2
    seen = values(run_ranks(1, _environment_and_directory, "ROBUST_DCP_TEST", init=False, env={"ROBUST_DCP_TEST": "x"}))
    assert seen == [("x", str(tmp_path))]


def test_without_init_a_rank_can_initialise_the_group_as_under_torchrun() -> None:
    assert values(run_ranks(2, _initialised_by_itself, init=False)) == [(False, 2), (False, 2)]


def test_a_value_that_cannot_be_pickled_is_an_error_of_the_rank() -> None:
    (error,) = errors(run_ranks(1, _return_a_lambda, init=False))
    assert "pickle" in error.traceback_text


def test_a_value_larger_than_a_pipe_arrives() -> None:
    assert values(run_ranks(2, _return_zeros, 1 << 24, init=False)) == [bytes(1 << 24)] * 2


def test_the_output_of_each_rank_is_kept() -> None:
    (outcome,) = run_ranks(1, _write_output, init=False)
    assert outcome.output == "from Python\nfrom C\n"


def _ends_soon(pid: int) -> bool:
    """Whether ``pid`` is gone, or a zombie, within a few seconds: a signal takes a moment to arrive."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
