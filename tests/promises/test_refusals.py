"""A file system that refuses a call, or does half of it, costs a save and nothing else, and an error says which."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, StorageError
from tests.faults.disk import CHANGES, Fault, FaultDisk, Full, each_call, short
from tests.harness.hosts import become_node, can_become_node
from tests.harness.ranks import run_ranks, values
from tests.harness.verdicts import verdict_of
from tests.promises.scenarios import SAVES, SCENARIOS, Scenario, generation, save, where

REFUSALS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "EPERM", "ESTALE", "EMFILE", "ETIMEDOUT", "ENOTCONN")
EVERYTHING = CHANGES | {"open", "read", "close", "list", "stat", "room", "lock"}
EVERY = {"overwrite": 6, "load": 3, "manager": 25, "copy": 20, "convert-dcp": 40, "convert-torch": 40}
"""Each so many-th call is tried, from a place that is drawn; of other scenarios each tenth."""


AROUND_THE_COMMIT = {"fsync", "close", "rename"}


@pytest.mark.parametrize(
    ("scenario", "counted"),
    [*((scenario, EVERYTHING) for scenario in SCENARIOS), *((scenario, AROUND_THE_COMMIT) for scenario in SAVES[:2])],
    ids=lambda value: str(value) if isinstance(value, Scenario) else "all" if value is EVERYTHING else "commit",
)
def test_a_refused_call_ends_in_an_error_that_names_the_path_and_loses_nothing(
    scenario: Scenario, counted: Collection[str], memory_path: Path
) -> None:
    names = itertools.cycle(random.sample(REFUSALS, len(REFUSALS)))
    codes: dict[int, int] = {}

    def refuse(number: int) -> Fault:
        codes[number] = getattr(errno, next(names))
        return OSError(codes[number], "")

    for number, call, directory, raised in each_call(
        scenario.act,
        memory_path,
        refuse,
        prepare=scenario.prepare,
        counted=counted,
        every=EVERY.get(scenario.name, 10) if counted is EVERYTHING else 1,
    ):
        what = f"call {number}, {call.operation} {call.path}, {errno.errorcode[codes[number]]}: {raised!r}"
        with where(what):
            left = scenario.check(directory)
            if raised is None:  # it was possible without
                assert left == scenario.may_leave[-1]
            elif not scenario.name.startswith("convert"):  # a command says it by its exit code
                assert isinstance(raised, StorageError)
                assert raised.errno == codes[number]
                assert raised.path is not None and os.path.dirname(call.path) in str(raised)
            scenario.check_next(directory)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_reads_and_writes_that_do_half_of_it_go_on(scenario: Scenario, memory_path: Path) -> None:
    directory = str(memory_path / "d")
    scenario.prepare(directory)
    with FaultDisk(directory, on={"read|write": short}) as disk:
        scenario.act(directory)
        assert scenario.check(directory) == scenario.may_leave[-1]
    assert {call.operation for call in disk.calls} & {"read", "write"}


@pytest.mark.parametrize("scenario", SAVES, ids=str)
@pytest.mark.parametrize("operation", ["write", "write|allocate"])
def test_a_disk_that_fills_up_anywhere_costs_only_that_save(
    scenario: Scenario, operation: str, memory_path: Path
) -> None:
    for room_nbytes in (0, 100, 4_000, 9_000, 17_000):
        directory = str(memory_path / str(room_nbytes))
        scenario.prepare(directory)
        with FaultDisk(directory, on={operation: Full(room_nbytes)}), pytest.raises(StorageError) as raised:
            scenario.act(directory)
        assert raised.value.errno == errno.ENOSPC
        assert "full" in str(raised.value)
        assert scenario.check(directory) == scenario.may_leave[0]
        rest = [path.name for path in Path(directory).rglob("*") if path.name.startswith(("__", "shard-"))]
        assert rest == [] or scenario.may_leave[0] is not None, "a failed save takes its files with it"
        scenario.check_next(directory)


def test_a_file_system_without_locks_or_preallocation_is_good_enough(memory_path: Path) -> None:
    path = str(memory_path / "c")
    lacks: dict[str, Fault] = {
        "lock": OSError(errno.ENOLCK, ""),
        "allocate": OSError(errno.EOPNOTSUPP, ""),
        "fsync:c": OSError(errno.EINVAL, ""),
    }
    with FaultDisk(memory_path, on=lacks):
        for value in (1, 2):
            save(path, value)
            assert generation(path) == value


# --- a disk that is too small: an error on all ranks before the first byte --------------------------------------------


MIB = 1 << 20


def save_somehow(how: str, path: str, free_nbytes: int) -> str:
    """Save where the file system says that it has so much room."""
    state = {f"rank {dist.get_rank()}": torch.ones(MIB)}
    writer: Any = RobustWriter(path, layout=how if how == "safetensors" else "torch")  # type: ignore[arg-type]
    room = mock.Mock(f_bavail=free_nbytes, f_bfree=free_nbytes, f_frsize=1, f_blocks=1)
    calls: dict[str, Callable[[], Any]] = {
        "stock with our plugins": lambda: dcp.save(state, storage_writer=writer, planner=RobustPlanner()),
        "async": lambda: robust_dcp.async_save(state, storage_writer=writer).result(),  # type: ignore[union-attr]
    }
    with FaultDisk(path) as disk, mock.patch.object(os, "statvfs", return_value=room):
        verdict = verdict_of(calls.get(how, lambda: robust_dcp.save(state, storage_writer=writer)))
    assert any(name.startswith(("__", "shard")) for name in disk.names("create")) is (verdict.message == "")
    return verdict.message or "saved"


@pytest.mark.parametrize("user", [0, 1000])
def test_root_may_fill_the_reserved_blocks_and_nobody_else_may(user: int, tmp_path: Path) -> None:
    room = mock.Mock(f_bavail=0, f_bfree=1 << 30, f_frsize=1, f_blocks=1 << 30)
    with mock.patch.object(os, "statvfs", return_value=room), mock.patch.object(os, "geteuid", return_value=user):
        verdict = verdict_of(robust_dcp.save, {"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    assert verdict.type_name == ("" if user == 0 else "StorageError"), verdict


def save_where_one_rank_would_fit(path: str, how: str) -> list[str]:
    """Each of two ranks needs 4 MiB. First there is room for one of them, then for both, then again for one."""
    found = []
    for free_nbytes in (6 * MIB, 9 * MIB, 6 * MIB):
        directory = f"{path}/{len(found)}" if how == "safetensors" else path  # it replaces no checkpoint
        found.append(save_somehow(how, directory, free_nbytes))
    return found


@pytest.mark.parametrize("how", ["torch", "safetensors", "stock with our plugins", "async"])
def test_nothing_is_written_where_all_ranks_together_have_no_room(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    for before, fits, after in values(run_ranks(2, save_where_one_rank_would_fit, str(directory), how)):
        assert fits == "saved"
        for told in (before, after):  # the second plan is reused; what is replaced does not count
            for word in ("no room", f"{6 * MIB} are free", "bytes are needed", "ranks 0-1", "nothing was written"):
                assert word in told
    if how != "safetensors":
        found = {"rank 0": torch.zeros(MIB), "rank 1": torch.zeros(MIB)}
        robust_dcp.load(found, checkpoint_id=directory)
        assert found["rank 0"].all() and found["rank 1"].all()


def save_on_nodes(path: str, nodes: str) -> str:
    """Each rank is on a node that has a directory of its own under the same path."""
    rank = int(os.environ["RANK"])
    become_node(f"host-{rank}", path, Path(nodes, str(rank)))
    dist.init_process_group("gloo")
    return save_somehow("torch", path, 5 * MIB)


def test_each_node_needs_room_for_its_own_ranks_only(tmp_path: Path) -> None:
    if not can_become_node():
        pytest.skip("no process can see a directory of its own under one path here")
    for place in ("checkpoint", "nodes/0", "nodes/1"):
        (tmp_path / place).mkdir(parents=True)
    run = run_ranks(2, save_on_nodes, str(tmp_path / "checkpoint"), str(tmp_path / "nodes"), init=False)
    assert values(run) == ["saved", "saved"]
