"""A save removes what it replaces and what saves of ours have left, and nothing else, whatever it is called."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, StorageError
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import in_ranks, run_ranks, values
from tests.support.simulated_disk import WatchedDisk
from tests.support.torch_versions import needs_use_collectives

StateDict = dict[str, Any]

LOOK_ALIKES = [
    "optimizer__0_0.distcp",
    "backup__12_3.distcp",
    "__7_0.distcp",
    "__0_9.distcp",
    "__0_0.3.distcp",
    "shard-00001-model-00001-of-00002.safetensors.3.part",
    ".metadata.tmp",
    ".metadata.0123456789abcdef.tmp",
    "__0.metadata.tmp",
    ".robust_dcp.index.0123456789abcdef.tmp",
    "notes.txt",
]


def state_dict(step: int = 1) -> StateDict:
    return {**{f"w{n}": torch.full((500 + 300_000 * n,), float(step)) for n in range(3)}, "text": f"step {step}"}


def check_loads(directory: Path, step: int) -> None:
    for load in (robust_dcp.load, dcp.load):
        found = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else "" for key, v in state_dict().items()}
        load(found, checkpoint_id=str(directory))
        assert found["text"] == f"step {step}" and all(bool((found[f"w{n}"] == step).all()) for n in range(3))


def put(directory: Path, names: list[str] = LOOK_ALIKES) -> dict[str, bytes]:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text(f"what a user keeps in {name}")
    return contents(directory, names)


def contents(directory: Path, names: list[str]) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in names}


def options_of(layout: str, tmp_path: Path) -> dict[str, Any]:
    stripes = [tmp_path / "nvme0", tmp_path / "nvme1"] if layout == "stripes" else []
    for stripe in stripes:
        stripe.mkdir(exist_ok=True)
    return {"layout": "torch" if stripes else layout, "stripe_paths": stripes}


@pytest.mark.parametrize("layout", ["torch", "safetensors", "stripes"])
def test_the_first_save_into_a_directory_leaves_files_with_names_like_ours_alone(layout: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    users = put(directory)
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(directory, **options_of(layout, tmp_path)))
    assert contents(directory, LOOK_ALIKES) == users
    if layout != "safetensors":
        check_loads(directory, 1)
        robust_dcp.save(state_dict(2), storage_writer=RobustWriter(directory, **options_of(layout, tmp_path)))
        assert contents(directory, LOOK_ALIKES) == users
        check_loads(directory, 2)


def test_what_stays_is_named_in_the_log_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, ["__7_0.distcp"])
    with caplog.at_level(logging.WARNING):
        robust_dcp.save(state_dict(), checkpoint_id=tmp_path)
    assert "1 files are kept, as neither the .metadata that was replaced names them" in caplog.text
    assert "__7_0.distcp" in caplog.text


def test_a_stock_checkpoint_whose_metadata_was_moved_away_can_be_moved_back(tmp_path: Path) -> None:
    dcp.save(state_dict(1), checkpoint_id=str(tmp_path))
    (tmp_path / ".metadata").rename(tmp_path / "kept")
    stock = contents(tmp_path, ["__0_0.distcp"])
    robust_dcp.save(state_dict(2), checkpoint_id=tmp_path)
    check_loads(tmp_path, 2)
    assert contents(tmp_path, ["__0_0.distcp"]) == stock
    (tmp_path / "kept").replace(tmp_path / ".metadata")
    check_loads(tmp_path, 1)


class Waits(dcp.DefaultSavePlanner):
    """Stops in the middle of its data until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.n_resolved = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.n_resolved += 1
        if self.n_resolved == 3:
            self.is_there.set()
            assert self.may_go_on.wait(60)
        return super().resolve_data(write_item)


class OurWaits(Waits, RobustPlanner):
    def __init__(self) -> None:
        RobustPlanner.__init__(self)
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.n_resolved = 0


@contextmanager
def running(planner: Waits, save: Any) -> Iterator[None]:
    """Another save, stopped in the middle for the time of the block; it ends well after that."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            save()
        except BaseException as error:
            failures.append(error)
            planner.is_there.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert planner.is_there.wait(60)
    try:
        yield
    finally:
        planner.may_go_on.set()
        thread.join()
    assert failures == []


def test_a_stock_save_that_is_running_keeps_its_files(tmp_path: Path) -> None:
    planner = Waits()
    with running(planner, lambda: dcp.save(state_dict(1), checkpoint_id=str(tmp_path), planner=planner)):
        robust_dcp.save(state_dict(2), checkpoint_id=tmp_path)
        check_loads(tmp_path, 2)
    check_loads(tmp_path, 1)  # it was the last to commit


def test_while_a_save_of_ours_is_running_another_one_is_told_who_it_is(tmp_path: Path) -> None:
    planner = OurWaits()
    with running(planner, lambda: robust_dcp.save(state_dict(1), checkpoint_id=tmp_path, planner=planner)):
        there = {name for name in os.listdir(tmp_path) if name.endswith(".distcp")}
        assert there
        before = set(os.listdir(tmp_path))
        with pytest.raises(StorageError, match=rf"another save is running into .* \(process {os.getpid()} on"):
            robust_dcp.save(state_dict(2), checkpoint_id=tmp_path)
        assert set(os.listdir(tmp_path)) == before
    check_loads(tmp_path, 1)
    left = {name for name in os.listdir(tmp_path) if name.endswith(".distcp")}
    assert left == there
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".robust_dcp.saving")]
    robust_dcp.save(state_dict(2), checkpoint_id=tmp_path)
    check_loads(tmp_path, 2)


def save_alone(directory: str, step: int) -> None:
    dcp.save(state_dict(step), checkpoint_id=directory, use_collectives=False)


@needs_use_collectives
def test_a_stock_checkpoint_without_collectives_never_dangles(tmp_path: Path) -> None:
    values(in_ranks(2, save_alone, str(tmp_path), 1))
    before = sorted(os.listdir(tmp_path))
    stock = contents(tmp_path, before)
    assert "__0.metadata" in before and "__1.metadata" in before
    for step in (2, 3):
        robust_dcp.save(state_dict(step), checkpoint_id=tmp_path)
        check_loads(tmp_path, step)
        assert contents(tmp_path, before) == stock


def kill_at(directory: str, layout: str, stripes: list[str], number: int | None) -> int:
    def kill(call: int) -> None:
        if call == number:
            os.kill(os.getpid(), signal.SIGKILL)

    disk: Any = WatchedDisk(PosixDisk(), before=kill)
    robust_dcp.save(
        state_dict(), storage_writer=RobustWriter(directory, layout=layout, stripe_paths=stripes, disk=disk)
    )
    return len(disk.calls)


@pytest.mark.parametrize("layout", ["torch", "safetensors", "stripes"])
def test_what_a_killed_save_has_left_is_removed_by_the_next_and_what_a_user_puts_beside_it_is_not(
    layout: str, tmp_path: Path
) -> None:
    options = options_of(layout, tmp_path)
    stripes = [str(stripe) for stripe in options["stripe_paths"]]
    whole = tmp_path / "whole"
    (n_calls,) = values(run_ranks(1, kill_at, str(whole), options["layout"], stripes, None, init=False))
    expected = sorted(os.listdir(whole))
    for number in range(1, n_calls, 4):
        directory = tmp_path / str(number)
        (outcome,) = run_ranks(1, kill_at, str(directory), options["layout"], stripes, number, init=False)
        assert outcome.exitcode == -signal.SIGKILL
        is_committed = (directory / ".metadata").exists()
        if is_committed and layout == "safetensors":  # which cannot be replaced
            continue
        users = put(directory)
        robust_dcp.save(state_dict(2), storage_writer=RobustWriter(directory, **options))
        assert contents(directory, LOOK_ALIKES) == users
        left = sorted(set(os.listdir(directory)) - set(LOOK_ALIKES))
        assert len(left) == len(expected), (number, left)
        if not is_committed and layout == "safetensors":
            assert len([n for n in left if n.startswith("shard")]) == len(
                [n for n in expected if n.startswith("shard")]
            )
        on_stripes = [
            name for stripe in stripes for place in Path(stripe).glob(f"{number}-*") for name in place.iterdir()
        ]
        assert len(on_stripes) == (len([n for n in left if n.endswith(".distcp")]) if stripes else 0)
        if layout != "safetensors":
            check_loads(directory, 2)


def test_a_metadata_that_cannot_be_read_costs_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    robust_dcp.save(state_dict(1), checkpoint_id=tmp_path)
    before = [name for name in os.listdir(tmp_path) if name.endswith(".distcp")]
    old = contents(tmp_path, before)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        robust_dcp.save(state_dict(2), checkpoint_id=tmp_path)
    check_loads(tmp_path, 2)
    assert contents(tmp_path, before) == old
    assert "no file that it may name is removed" in caplog.text
