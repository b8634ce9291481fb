"""What tests watch and pretend: the calls to files in a directory, a death before one of them, and other nodes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from robust_dcp.testing.conformance import StorageConformance
from robust_dcp.testing.file_calls import FileCalls
from robust_dcp.testing.nodes import become_node, can_become_node
from robust_dcp.testing.ranks import RanksOverran, errors, run_ranks, values


def write_and_rename(path: str, killed_before: int | None) -> list[str]:
    """What a process does to files below ``path``. A process of its own, because nobody takes an audit hook away."""
    os.makedirs(path)
    seen = FileCalls(path, killed_before=killed_before)
    (Path(path) / "new").write_text("text")
    os.rename(os.path.join(path, "new"), os.path.join(path, "there"))
    os.remove(os.fsencode(path) + b"/there")
    Path(path + ".elsewhere").write_text("not watched")
    assert seen.count == len(seen.calls)
    return seen.calls


def test_the_calls_to_files_of_a_directory_are_seen_in_order_and_no_others(tmp_path: Path) -> None:
    ((calls),) = values(run_ranks(1, write_and_rename, str(tmp_path / "watched"), None))
    assert calls == ["open new", "os.rename new", "os.remove there"]


def test_a_process_is_killed_right_before_the_call_that_was_asked_for(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, write_and_rename, str(tmp_path / "watched"), 1)
    assert outcome.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path / "watched") == ["new"], "it was written, and not renamed"


def be_two_nodes(shared: str, own: str) -> tuple[str, list[str]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    become_node(f"node{rank}", shared, os.path.join(own, str(rank)))
    Path(shared, f"of {rank}").write_text("")
    return socket.gethostname(), os.listdir(shared)


@pytest.mark.skipif(not can_become_node(), reason="this process may not make namespaces")
def test_each_node_has_a_name_and_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    found = values(run_ranks(2, be_two_nodes, str(tmp_path / "shared"), str(tmp_path / "own")))
    assert found == [("node0", ["of 0"]), ("node1", ["of 1"])]
    assert os.listdir(tmp_path / "shared") == []


def be_a_node_over_nothing(path: str) -> None:
    become_node("node", os.path.join(path, "missing"), os.path.join(path, "own"))


@pytest.mark.skipif(not can_become_node(), reason="this process may not make namespaces")
def test_a_node_over_a_directory_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    (error,) = errors(run_ranks(1, be_a_node_over_nothing, str(tmp_path)))
    assert error.is_a(FileNotFoundError) and "No such file or directory" in error.message


def test_elsewhere_than_on_linux_nobody_becomes_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    can_become_node.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_become_node()
    can_become_node.cache_clear()


def wait_or_leave(path: str) -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    Path(path).touch()
    signal.pause()


def test_ranks_that_take_too_long_are_ended_and_what_became_of_each_is_said(tmp_path: Path) -> None:
    for seconds in (2, 8, 32, 128):  # a busy machine may need long to start two ranks, and a rank is late even then
        with pytest.raises(RanksOverran, match=rf"still running after {seconds} seconds") as caught:
            run_ranks(2, wait_or_leave, str(tmp_path / "there"), init=False, timeout_seconds=seconds)
        if "rank 1 still running" not in str(caught.value):
            break
    assert "rank 0 still running" in str(caught.value)
    assert "rank 1 ended with exit code 3" in str(caught.value)


def test_a_suite_that_does_not_say_what_it_tries_is_told_which_method_is_missing(tmp_path: Path) -> None:
    class Mine(StorageConformance):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine has to say how its writer is made: def writer\(self, path\)"):
        Mine().writer(tmp_path)
    with pytest.raises(NotImplementedError, match=r"Mine has to say how its reader is made: def reader\(self, path\)"):
        Mine().reader(tmp_path)
