"""A rank that fails, is killed, is late, or does something else: all ranks hear of it, and what was there stays."""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import Channel, CopyOptions, RobustReader, RobustWriter
from robust_dcp.comm import connections, patience
from robust_dcp.comm.connections import Connections
from robust_dcp.comm.link import Link
from tests.faults.disk import CHANGES, LONG_TESTS, Call, Fault, FaultDisk, kill
from tests.harness.faults import fail_in, kill_in, stand_still
from tests.harness.fingerprints import blank, differences
from tests.harness.ranks import errors, on_ranks, run_program, run_ranks, values
from tests.harness.verdicts import Verdict, verdict_of

SAVE_PHASES = ("plan", "write", "commit")
LOAD_PHASES = ("plan", "read", "apply")


def state(step: int) -> dict[str, Any]:
    return {"shared": torch.full((1000,), float(step)), f"own {dist.get_rank()}": torch.full((10,), float(step))}


def step_in(path: str, **options: Any) -> float:
    rank = dist.get_rank() if dist.is_initialized() else 0
    loaded = {"shared": torch.zeros(1000), f"own {rank}": torch.zeros(10)}
    robust_dcp.load(loaded, checkpoint_id=path, **options)
    (step,) = {each for tensor in loaded.values() for each in tensor.tolist()}
    return step


def save_with_a_fault(path: str, phase: str, error: BaseException) -> tuple[str, float]:
    robust_dcp.save(state(1), checkpoint_id=path)
    with fail_in(phase, rank=1, error=error, operation="save"):
        verdict = verdict_of(robust_dcp.save, state(2), checkpoint_id=path)
    dist.barrier()
    # Who was interrupted at the commit cannot be asked whether it was made, so nothing is removed then.
    has_claim = phase == "commit" and isinstance(error, KeyboardInterrupt)
    assert any("saving" in name for name in os.listdir(path)) == has_claim
    before = step_in(path)
    robust_dcp.save(state(3), checkpoint_id=path)
    assert step_in(path) == 3.0
    return f"{verdict.type_name} {verdict.message}", before


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        *((phase, LookupError("lost")) for phase in SAVE_PHASES),
        *((phase, KeyboardInterrupt("lost")) for phase in ("write", "commit")),
    ],
    ids=["plan", "write", "commit", "Ctrl-C in write", "Ctrl-C in commit"],
)
def test_a_rank_that_fails_in_a_phase_fails_the_save_on_all_ranks_and_the_checkpoint_stays(
    phase: str, error: BaseException, tmp_path: Path
) -> None:
    found = on_ranks(2, save_with_a_fault, str(tmp_path), phase, error)
    assert [before for _, before in found] == [1.0, 1.0]
    (told, _), (by_itself, _) = found
    assert "lost" in told and "rank 1" in told and type(error).__name__ in told
    assert by_itself == ("KeyboardInterrupt lost" if isinstance(error, KeyboardInterrupt) else told)


def load_with_a_fault(path: str, phase: str) -> None:
    robust_dcp.save(state(1), checkpoint_id=path)
    with fail_in(phase, rank=0, operation="load"):
        step_in(path)


@pytest.mark.parametrize("phase", LOAD_PHASES)
def test_a_rank_that_fails_in_a_phase_fails_the_load_on_all_ranks(phase: str, tmp_path: Path) -> None:
    for error in errors(run_ranks(2, load_with_a_fault, str(tmp_path), phase)):
        assert "as the test asked for" in error.message


def save_while_one_is_killed(path: str, phase: str, is_async: bool) -> str:
    save = (lambda *args, **kwargs: robust_dcp.async_save(*args, **kwargs).result()) if is_async else robust_dcp.save
    robust_dcp.save(state(1), checkpoint_id=path)
    with kill_in(phase, rank=1):
        return str(verdict_of(save, state(2), checkpoint_id=path, timeout_seconds=20))


@pytest.mark.parametrize(("phase", "is_async"), [*((phase, False) for phase in SAVE_PHASES), ("stage", True)])
def test_a_rank_that_is_killed_in_a_phase_is_named_by_the_others(phase: str, is_async: bool, tmp_path: Path) -> None:
    survivor, killed, other = run_ranks(3, save_while_one_is_killed, str(tmp_path), phase, is_async)
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (survivor, other):
        assert "rank 1" in values([outcome])[0]
    assert step_in(str(tmp_path)) == 1.0


def fail_and_be_killed_in_what_follows(path: str, phase: str, hook: str) -> tuple[Verdict, float]:
    """Rank 0 fails in a phase, and rank 2 is killed as it begins to clean up."""
    robust_dcp.save(state(1), checkpoint_id=path)
    dies = mock.patch(hook, side_effect=lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    fails = fail_in(phase, rank=0, error=LookupError("lost"), operation="save")
    with fails, dies if dist.get_rank() == 2 else nullcontext():
        verdict = verdict_of(robust_dcp.save, state(2), checkpoint_id=path, timeout_seconds=20)
    return verdict, step_in(path, no_dist=True)


@pytest.mark.parametrize(
    ("phase", "hook", "logged", "is_kept"),
    [
        ("write", "storage.committing.save.Save.remove_files", "remove the files of this save together", False),
        ("commit", "plan.session.nothing_is_committed", "find out whether the checkpoint is committed", True),
    ],
)
def test_a_rank_that_is_killed_while_all_clean_up_hides_neither_the_error_nor_the_checkpoint(
    phase: str, hook: str, logged: str, is_kept: bool, tmp_path: Path
) -> None:
    """What may have been committed is kept."""
    outcomes = run_ranks(3, fail_and_be_killed_in_what_follows, str(tmp_path), phase, f"robust_dcp.{hook}")
    assert outcomes[2].exitcode == -signal.SIGKILL
    for verdict, step in values(outcomes[:2]):
        assert verdict.type_name == "RobustCheckpointError" and "lost" in str(verdict) and step == 1.0
    assert any(f"the ranks could not {logged}" in each.output for each in outcomes[:2])
    assert len(list(tmp_path.glob("__0_0.*.distcp"))) == 1 + is_kept


def come_too_late(path: str, late: int) -> Verdict:
    dist.barrier()
    given_up = Path(f"{path}.given up")
    is_late = dist.get_rank() == late
    while is_late and not given_up.exists():
        time.sleep(0.02)
    verdict = verdict_of(robust_dcp.save, state(0), checkpoint_id=path, timeout_seconds=30 if is_late else 1.5)
    given_up.touch()
    dist.barrier()  # all are here again: the next save works
    robust_dcp.save(state(1), checkpoint_id=path, timeout_seconds=30)
    assert step_in(path) == 1.0
    return verdict


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_is_named_on_both_sides_and_the_next_save_works(late: int, tmp_path: Path) -> None:
    for rank, verdict in enumerate(values(run_ranks(2, come_too_late, str(tmp_path / "checkpoint"), late))):
        assert verdict.type_name == "ExchangeTimeout" and verdict.fields["missing_ranks"] == [late]
        assert verdict.message.startswith(f"this rank ({late}) came after the others had given up") == (rank == late)


def fail_with_a_path(path: str) -> list[str]:
    """Rank 1 does something else, fails in its work, or fails between two exchanges."""
    rank, messages = dist.get_rank(), []
    for fault in ("is elsewhere", "fails", "leaves"):
        channel = Channel.for_group(operation=f"save {path}: {fault}", timeout_seconds=60)

        def fail_if(how: str, fault: str = fault) -> None:
            if rank == 1 and how == fault:
                raise LookupError(path)

        def save(channel: Channel = channel, fault: str = fault) -> None:
            phase = f"{'load' if rank == 1 and fault == 'is elsewhere' else 'save'} {path}"
            with channel.together():
                channel.barrier("begin")
                fail_if("leaves")
                channel.barrier(phase, lambda: fail_if("fails"))

        messages.append(verdict_of(save).message)
    return messages


def test_a_failure_at_a_path_that_is_no_utf8_is_told_in_words_on_all_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / os.fsdecode(b"\xff"))
    text = path.encode(errors="backslashreplace").decode()
    elsewhere, fails, leaves = zip(*on_ranks(2, fail_with_a_path, path), strict=True)
    words = (
        f"rank 0 is in barrier 'save {text}' of save {text}: is elsewhere; rank 1 is in barrier 'load {text}' of save"
    )
    assert all(words in each for each in elsewhere)
    assert all(f"failed on rank 1: LookupError: {text}" in each for each in fails)
    assert "was left by rank 1: LookupError" in leaves[0] and leaves[1] == path


def freeze_once_in_commit(path: str, call: str, target: str | None) -> Verdict:
    """Rank 0 stands still from a call on until the others have given up on it, and then goes on."""
    rank, given_up = dist.get_rank(), f"{path}.given up"

    robust_dcp.save(state(1), checkpoint_id=path)
    writer = RobustWriter(path, drain_to=target, drain_options=CopyOptions(call_timeout_seconds=2))
    with FaultDisk(target or path, on={call: lambda call: stand_still(given_up)} if rank == 0 else {}):
        save = partial(robust_dcp.save, state(2), storage_writer=writer, timeout_seconds=4)
        verdict = verdict_of(save) if target is None else verdict_of(lambda: (save(), robust_dcp.finish_async_saves()))
    if rank == 1:
        Path(given_up).touch()
    return verdict


@pytest.mark.parametrize(
    ("call", "drains"),
    [("fsync:.metadata*#2", False), ("rename:.robust_dcp.index", False), ("fsync:.metadata*", True)],
)
def test_a_rank_that_stood_still_while_it_commits_does_not_commit_what_the_others_have_given_up(
    call: str, drains: bool, tmp_path: Path
) -> None:
    path, target = tmp_path / "checkpoint", str(tmp_path / "target") if drains else None
    verdicts = values(run_ranks(3, freeze_once_in_commit, str(path), call, target))
    assert [each.type_name for each in verdicts] == ["ExchangeTimeout"] * 3
    assert all("rank 0" in str(each) for each in verdicts)
    assert all("may be committed all the same" in str(each) for each in verdicts) == (not drains)
    assert step_in(str(path)) == (2.0 if drains else 1.0)
    assert not Path(f"{target}/.metadata").exists()


def fail_while_the_others_write(path: str, how: str) -> tuple[str, int]:
    """400 writes of 8 MiB are twenty seconds of the disk of rank 0. One block, seen by many names, takes no memory."""
    rank = dist.get_rank()
    own = dict.fromkeys((f"{rank} w{n}" for n in range(1 if rank else 400)), torch.ones(2 << 20))
    with FaultDisk(path, on={"write:*.distcp": FAILURES[how] if rank == 1 else lambda call: time.sleep(0.05)}) as disk:
        writer = RobustWriter(path, threads=1)
        verdict = verdict_of(robust_dcp.save, own, storage_writer=writer, timeout_seconds=4)
    Path(f"{path}.told").touch()
    return str(verdict), sum(call.nbytes for call in disk.calls if call.operation == "write")


FAILURES: dict[str, Fault] = {
    "fails": LookupError("lost"),
    "is killed": kill,
    "stands still": lambda call: stand_still(f"{os.path.dirname(call.path)}.told", signal.SIGKILL),
}


@pytest.mark.parametrize("how", FAILURES)
def test_ranks_that_still_write_stop_when_another_does_not_go_on(how: str, tmp_path: Path) -> None:
    writing, other = run_ranks(2, fail_while_the_others_write, str(tmp_path / "checkpoint"), how)
    ((message, nbytes),) = values([writing])
    assert "rank 1" in message and nbytes < 200 * (8 << 20)
    if how == "fails":
        assert "lost" in message and "lost" in values([other])[0][0] and not (tmp_path / "checkpoint").exists()
    else:
        assert other.exitcode == -signal.SIGKILL


def go_slowly(path: str) -> None:
    """Rank 1's disk takes longer for a save, and for a load, than the timeout."""

    def slow(call: Call) -> None:
        time.sleep(0.5 * call.nbytes / (1 << 20))

    own = {f"rank{dist.get_rank()}.{n}": torch.full((1 << 18,), 1.0 + n) for n in range(12)}
    found, reader = blank(own), RobustReader(path, threads=1, buffer_bytes=2 << 20)
    with FaultDisk(path, on={"write|read:__*": slow} if dist.get_rank() == 1 else {}):
        writer = RobustWriter(path, threads=1, buffer_bytes=1 << 20)
        robust_dcp.save(own, storage_writer=writer, timeout_seconds=5)
        robust_dcp.load(found, storage_reader=reader, timeout_seconds=5)
    assert differences(own, found) == []


def test_a_rank_that_writes_or_reads_slowly_is_waited_for(tmp_path: Path) -> None:
    on_ranks(3, go_slowly, str(tmp_path / "checkpoint"))


def save_as_another_version(path: str, where: str) -> Verdict:
    other = mock.patch(where, 99 if where.endswith("VERSION") else "99.0")
    with other if dist.get_rank() == 1 else nullcontext():
        return verdict_of(robust_dcp.save, state(1), checkpoint_id=path, timeout_seconds=10)


@pytest.mark.parametrize(
    "where", ["robust_dcp.comm.frames.PROTOCOL_VERSION", "robust_dcp.plan.save_planner.__version__"]
)
def test_a_rank_of_another_version_is_an_error_on_all_ranks_that_names_it(where: str, tmp_path: Path) -> None:
    for verdict in values(run_ranks(3, save_as_another_version, str(tmp_path), where)):
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
    on_ranks(2, save_first, str(path))
    shutil.copytree(path, memory_path / "whole")
    n_calls = values(run_ranks(2, save_and_be_killed, str(memory_path / "whole"), killed, -1))[killed]
    left = []
    for number in range(killed, n_calls, 1 if LONG_TESTS else 8):
        directory = str(memory_path / f"call{number}")
        shutil.copytree(path, directory)
        outcomes = run_ranks(2, save_and_be_killed, directory, killed, number)
        assert outcomes[killed].exitcode == -signal.SIGKILL
        left.append(step_in(directory))
        on_ranks(2, save_first, directory)  # what was left behind is in nobody's way
    assert left == sorted(left) and set(left) <= {1.0, 2.0} and left[0] == 1.0


def save_at_once(path: str) -> list[float]:
    """Two saves are under way beside training, and something else is loaded."""
    robust_dcp.save(state(7), checkpoint_id=f"{path}/7")
    saving = [robust_dcp.async_save(state(step), checkpoint_id=f"{path}/{step}") for step in (1, 2)]
    loaded = step_in(f"{path}/7")
    for each in saving:
        each.result()
    return [loaded, step_in(f"{path}/1"), step_in(f"{path}/2")]


def test_operations_that_overlap_on_one_group_do_not_disturb_each_other(tmp_path: Path) -> None:
    assert on_ranks(3, save_at_once, str(tmp_path)) == [[7.0, 1.0, 2.0]] * 3


_DISTURBED = """
import random, socket, struct, threading
from robust_dcp.comm.frames import Frame, Kind, operation_id, phase_id

store = store_of_rank_0()
join_by(store)  # so the ports are those of our own group
ended, sent = threading.Event(), set()


def ports():
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # closed meanwhile
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    listening = {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}
    return listening - {int(os.environ["MASTER_PORT"])}


def disturb():
    rng = random.Random(rank)
    noise = rng.randbytes(200)
    name = f"save {path}/0"
    guess = Frame(Kind.GONE, operation_id(name), 0, 0, phase_id("agree"), body=struct.pack("<2I", 1, 0)).encode()
    while not ended.wait(0.02):
        for port in ports():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    sized = struct.pack("<q", rng.randrange(8)) + guess
                    stranger.sendall(rng.choice([b"", noise, sized, b"GET / HTTP/1.1\\r\\n\\r\\n"]))
                    sent.add(port)
            except OSError:
                pass


threading.Thread(target=disturb, daemon=True).start()
for turn in range(5):
    robust_dcp.save(state(turn), checkpoint_id=f"{path}/{turn}", timeout_seconds=30)
    time.sleep(0.1)
ended.set()
print("saved", len(sent) > 0, flush=True)
stay_until_all_are_done(store)
"""


def test_strangers_who_connect_to_the_ports_of_ranks_and_send_what_they_like_fail_no_save(tmp_path: Path) -> None:
    ended = run_program(_DISTURBED, tmp_path, size=3)
    assert all(each.exitcode == 0 and "saved True" in each.output for each in ended), [each.output for each in ended]


_TAKEN = """
import socket, struct
from unittest import mock
from robust_dcp.comm.connections import Connections

store = store_of_rank_0()
join_by(store)
listen, strangers = Connections.listen, []


def listen_to_strangers(self):
    listen(self)
    for place in range(size if not strangers else 0):
        strangers.append(socket.create_connection((self.here.address, int(self.here.port))))
        strangers[-1].sendall(struct.pack("<q", place))
    time.sleep(0.5)  # gloo reads that


with mock.patch.object(Connections, "listen", listen_to_strangers):
    robust_dcp.save(state(1), checkpoint_id=f"{path}/0", timeout_seconds=30)
print("saved", len(strangers), flush=True)
stay_until_all_are_done(store)
"""


def test_strangers_who_take_the_places_of_ranks_while_these_connect_fail_no_save(tmp_path: Path) -> None:
    """gloo knows a rank that connects by a small number, and anybody may send it. It is not the network that fails."""
    ended = run_program(_TAKEN, tmp_path, size=3)
    assert all(each.exitcode == 0 and "saved 3" in each.output for each in ended), [each.output for each in ended]


def save_while_rank_2_is_killed_at_the_network(path: str, call: str, number: int) -> Verdict:
    method, count = getattr(Connections, call), itertools.count()

    def count_and_call(self: Connections, *args: Any) -> Any:
        if dist.get_rank() == 2 and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args)

    with mock.patch.object(Connections, call, count_and_call):
        return verdict_of(robust_dcp.save, state(2), checkpoint_id=path, timeout_seconds=20)


NETWORK_CALLS = {"make_group": 1, "start": 10}
"""How many of them are tried. Rank 2 of five has a parent and a child."""


@pytest.mark.parametrize("call", NETWORK_CALLS)
def test_a_rank_that_is_killed_before_any_call_to_the_network_is_named_by_all_others(call: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    on_ranks(5, save_first, path)
    for number in range(0, NETWORK_CALLS[call], 1 if LONG_TESTS else 2):
        outcomes = run_ranks(5, save_while_rank_2_is_killed_at_the_network, path, call, number)
        assert outcomes[2].exitcode == -signal.SIGKILL
        verdicts = values([outcome for outcome in outcomes if outcome.rank != 2])
        assert [verdict.fields.get("missing_ranks") for verdict in verdicts] == [[2]] * 4, (number, verdicts)
        assert step_in(path) == 1.0


def stand_still_while_connecting(path: str) -> float:
    """Rank 1 connects right after rank 0 has given up to wait for it. By chance gloo lets one or the other call."""
    start, break_up, has_given_up = Connections.start, Link.break_up, Path(f"{path}.given up")

    def stand_still_and_start(self: Connections, verb: Any, peer: int, tag: int, data: Any) -> Any:
        while dist.get_rank() == 1 and tag == connections.GREETING_TAG and not has_given_up.exists():
            time.sleep(0.001)
        return start(self, verb, peer, tag, data)

    def give_up(self: Link, *args: Any) -> Any:
        has_given_up.touch()
        return break_up(self, *args)

    with (
        mock.patch.object(Connections, "start", stand_still_and_start),
        mock.patch.object(Link, "break_up", give_up),
        mock.patch.object(connections, "_CONNECT_TIMEOUT", datetime.timedelta(seconds=0.2)),  # gloo waits 5 times that
        mock.patch.object(patience, "GREETING_SECONDS", 2.0),  # where the kernel of rank 1 takes the call of rank 0
    ):
        for _ in range(3):
            has_given_up.unlink(missing_ok=True)
            group = dist.new_group()
            robust_dcp.save(state(3), checkpoint_id=path, process_group=group, timeout_seconds=30)
    return step_in(path)


def test_a_rank_that_stands_still_while_it_connects_is_waited_for_and_ends_no_other(tmp_path: Path) -> None:
    assert on_ranks(2, stand_still_while_connecting, str(tmp_path / "checkpoint")) == [3.0, 3.0]
