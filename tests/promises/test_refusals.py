"""A file system that refuses a call, or does half of it, costs a save and nothing else, and an error says which."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Collection
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from robust_dcp import StorageError
from tests.faults.disk import CHANGES, Call, Fault, FaultDisk, Full, each_call, short
from tests.promises.scenarios import SAVES, SCENARIOS, Scenario, generation, save, state, where

REFUSALS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "EPERM", "ESTALE", "EMFILE", "ETIMEDOUT", "ENOTCONN")
EVERYTHING = CHANGES | {"open", "read", "close", "list", "stat", "room", "lock"}
EVERY = {"overwrite": 4, "load": 2, "manager": 20, "copy": 15, "convert-dcp": 40, "convert-torch": 40}
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
        prepare=scenario.prepare,
        fault=refuse,
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


def test_a_file_system_without_locks_links_or_preallocation_is_good_enough(memory_path: Path) -> None:
    path = str(memory_path / "c")
    lacks: dict[str, Fault] = {
        "lock": OSError(errno.ENOLCK, ""),
        "link": OSError(errno.EPERM, ""),
        "allocate": OSError(errno.EOPNOTSUPP, ""),
        "fsync:c": OSError(errno.EINVAL, ""),
    }
    with FaultDisk(memory_path, on=lacks):
        for value in (1, 2):
            save(path, value)
            assert generation(path) == value


@pytest.mark.parametrize("moment", ["create:__*", "create:.metadata.*", "rename:.robust_dcp.index"])
def test_a_save_gives_way_to_another_program_that_has_saved_meanwhile(moment: str, memory_path: Path) -> None:
    """Stock knows no locks. Its checkpoint is whole, and nobody has replaced it knowingly."""
    path = str(memory_path / "c")
    save(path, 1)

    def save_by_stock(call: Call) -> None:
        dcp.save(state(7), storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False), no_dist=True)

    if moment.startswith("rename"):  # the last look is behind; what was overwritten is overwritten as a whole
        with FaultDisk(memory_path, on={f"{moment}#1": save_by_stock}):
            save(path, 2)
        assert generation(path) == 2
        return
    with FaultDisk(memory_path, on={f"{moment}#1": save_by_stock}), pytest.raises(StorageError, match=r"\.metadata"):
        save(path, 2)
    assert generation(path) == 7
    save(path, 9)
    assert generation(path) == 9
