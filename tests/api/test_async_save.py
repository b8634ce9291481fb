"""An async save holds what the state dict held when it was asked for, whatever training does to it meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustWriter, StorageError
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.disks import FullDisk, GatedDisk
from tests.harness.ranks import in_ranks, values
from tests.support.torch_versions import needs_response

MEGABYTE = 1 << 20


def loaded(path: str, like: dict[str, Any]) -> dict[str, Any]:
    target = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in like.items()}
    robust_dcp.load(target, checkpoint_id=path)
    return target


def own_state() -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "shared": torch.arange(1000.0),
        f"own.{rank}": torch.full((MEGABYTE,), float(rank)),
        "step": 0,
        "nested": {"bfloat16": torch.ones(7, dtype=torch.bfloat16), "strided": torch.arange(12.0).reshape(3, 4).t()},
    }


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in state.items() if key != "nested"}, **state["nested"]}


def save_while_all_changes(directory: str, staging: Any, **more: Any) -> list[str]:
    state = own_state()
    outcomes = []
    for step in range(3):
        state["step"] = step
        path = f"{directory}/{step}"
        saving = robust_dcp.async_save(state, checkpoint_id=path, staging=staging, **more)
        state["step"] = -1
        if staging == "lazy":
            saving.wait_staged()
        for value in flat(state).values():
            if isinstance(value, torch.Tensor):
                value += 1
        report = (saving if staging == "full" else saving.upload_completion).result(timeout=60)
        outcomes.append(report.plan)
        want = own_state()
        for value in flat(want).values():
            if isinstance(value, torch.Tensor):
                value += step
        got = own_state()
        robust_dcp.load(got, checkpoint_id=path)
        assert got["step"] == step
        for key, value in flat(want).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(flat(got)[key], value), key
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("staging", ["full", "lazy"])
def test_what_is_saved_is_what_the_state_dict_held_at_the_call(tmp_path: Path, staging: str) -> None:
    outcomes = values(in_ranks(2, save_while_all_changes, str(tmp_path), staging))
    assert outcomes == [["built", "reused", "reused"]] * 2


def test_no_tensor_tears_while_a_thread_writes_all_the_time(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.zeros(MEGABYTE // 8) for n in range(32)}
    calm, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def train() -> None:
        while not over.is_set():
            for tensor in tensors.values():
                tensor += 1
            if not go_on.is_set():  # the main thread is about to save, and training may not run during the copy
                calm.set()
                go_on.wait()
                calm.clear()

    trainer = threading.Thread(target=train)
    go_on.set()
    trainer.start()
    try:
        for step in range(6):
            go_on.clear()
            assert calm.wait(timeout=60)
            held = float(tensors["w0"][0])
            saving = robust_dcp.async_save(tensors, checkpoint_id=str(tmp_path / str(step)))
            go_on.set()
            saving.result(timeout=60)
            for tensor in loaded(str(tmp_path / str(step)), tensors).values():
                assert torch.equal(tensor, torch.full_like(tensor, held))
    finally:
        over.set()
        go_on.set()
        trainer.join()


def test_a_lazy_save_is_waited_for_by_the_next_optimizer_step_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 64)).sum().backward()
    held = {key: value.clone() for key, value in model.state_dict().items()}
    saving = robust_dcp.async_save(model.state_dict(), checkpoint_id=str(tmp_path), staging="lazy")
    assert isinstance(saving, robust_dcp.AsyncSave)
    saving.wait_before_step_of(optimizer)
    optimizer.step()
    assert saving.staging_completion.done()
    assert not optimizer._optimizer_step_pre_hooks
    saving.upload_completion.result(timeout=60)
    got = loaded(str(tmp_path), held)
    assert all(torch.equal(got[key], value) for key, value in held.items())
    assert not torch.equal(model.weight, held["weight"])


@needs_response
def test_a_lazy_save_has_what_stock_calls_an_async_save_response(tmp_path: Path) -> None:
    with robust_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=str(tmp_path), staging="lazy") as saving:
        assert saving.staging_completion.done()
    for name in state_dict_saver.AsyncSaveResponse.__annotations__:
        assert getattr(saving, name).result(timeout=60) is not NotImplemented


def test_a_second_save_waits_for_room_and_is_committed_after_the_first(tmp_path: Path) -> None:
    disk, order = GatedDisk(), []
    first = robust_dcp.async_save({"w": torch.ones(9)}, storage_writer=RobustWriter(tmp_path / "1", disk=disk))
    second = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=str(tmp_path / "2"), max_in_flight=2)
    first.add_done_callback(lambda _: order.append("first"))
    second.add_done_callback(lambda _: order.append("second"))
    assert not (tmp_path / "2" / ".metadata").exists()
    threading.Timer(0.2, disk.gate.set).start()
    third = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=str(tmp_path / "3"))  # one at a time: it waits
    assert first.done() and second.done()
    assert order == ["first", "second"]
    third.result(timeout=60)


def skip_on_all_ranks(directory: str) -> list[bool]:
    # Rank 1 alone is slow: when rank 0 asks for the next save, only rank 1 has one under way.
    disk = GatedDisk()
    if dist.get_rank() == 0:
        disk.gate.set()
    first = robust_dcp.async_save({"w": torch.ones(9)}, storage_writer=RobustWriter(f"{directory}/1", disk=disk))
    skipped = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=f"{directory}/2", when_busy="skip")
    with pytest.raises(RobustCheckpointError, match="1 async saves are under way already"):
        robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=f"{directory}/3", when_busy="raise")
    disk.gate.set()
    first.result(timeout=60)
    dist.barrier()
    taken = robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=f"{directory}/4", when_busy="skip")
    return [skipped.result() is None, taken.result(timeout=60) is not None]


def test_a_save_is_skipped_or_refused_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    assert values(in_ranks(2, skip_on_all_ranks, str(tmp_path))) == [[True, True]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


def fail_and_ask_on_one_rank(directory: str) -> list[str]:
    rank = dist.get_rank()
    disk = FullDisk() if rank == 1 else PosixDisk()
    first = robust_dcp.async_save({f"w{rank}": torch.ones(9)}, storage_writer=RobustWriter(f"{directory}/1", disk=disk))
    told = []
    if rank == 0:
        with pytest.raises(StorageError) as caught:
            first.result(timeout=60)
        told.append(str(caught.value).splitlines()[0])
    else:
        robust_dcp.background.queue_of((0, 1)).wait()
    with pytest.raises(StorageError) as again:  # rank 1 has not asked, so all are told
        robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=f"{directory}/2")
    told.append(str(again.value).splitlines()[0])
    robust_dcp.async_save({"w": torch.ones(9)}, checkpoint_id=f"{directory}/3").result(timeout=60)
    assert robust_dcp.finish_async_saves()
    return told


def test_the_error_of_a_save_is_raised_by_result_and_by_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    told = values(in_ranks(2, fail_and_ask_on_one_rank, str(tmp_path)))
    assert len(told[0]) == 2 and len(told[1]) == 1
    assert all("No space left on device" in each for rank in told for each in rank)
    assert (tmp_path / "3" / ".metadata").exists() and not (tmp_path / "1" / ".metadata").exists()


def fail_to_resolve_on_one_rank(directory: str) -> str:
    weight = torch.ones(9)
    if dist.get_rank() == 1:
        weight.untyped_storage().resize_(0)
    saving = robust_dcp.async_save({f"w{dist.get_rank()}": weight}, checkpoint_id=directory)
    with pytest.raises(RobustCheckpointError) as caught:
        saving.result(timeout=60)
    return str(caught.value)


def test_a_tensor_that_cannot_be_copied_is_named_on_all_ranks(tmp_path: Path) -> None:
    for told in values(in_ranks(2, fail_to_resolve_on_one_rank, str(tmp_path / "checkpoint"))):
        assert "cannot save 'w1'" in told and "its memory was freed" in told and "rank 1" in told


def test_a_synchronous_save_comes_after_the_async_ones_and_raises_their_error(tmp_path: Path) -> None:
    robust_dcp.async_save({"w": torch.ones(9)}, storage_writer=RobustWriter(tmp_path / "1", disk=FullDisk()))
    with pytest.raises(StorageError, match="No space left on device"):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "2")
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "2")


def test_the_report_says_how_long_training_stood_still(tmp_path: Path) -> None:
    disk = GatedDisk()
    saving = robust_dcp.async_save({"w": torch.ones(9)}, storage_writer=RobustWriter(tmp_path, disk=disk))
    threading.Timer(0.5, disk.gate.set).start()
    report = saving.result(timeout=60)
    assert [phase.name for phase in report.phases] == ["plan", "stage", "write", "commit"]
    assert 0 < report.blocked_seconds < report.seconds


def run_script(path: Path, ending: str) -> subprocess.CompletedProcess[str]:
    script = f"""
        import os, signal, threading, time, torch, robust_dcp
        from robust_dcp import RobustWriter
        from tests.harness.disks import GatedDisk
        disk = GatedDisk()
        robust_dcp.save({{"w": torch.zeros(9)}}, checkpoint_id={str(path)!r})
        robust_dcp.async_save({{"w": torch.ones(9)}}, storage_writer=RobustWriter({str(path)!r}, disk=disk))
        opener = threading.Timer(0.5, disk.gate.set)
        opener.start()
        {ending}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    ],
    ids=["at the end of the script", "exit", "SIGTERM"],
)
def test_a_process_that_ends_finishes_its_save(tmp_path: Path, ending: str, code: int) -> None:
    done = run_script(tmp_path / "checkpoint", ending)
    assert done.returncode == code, done.stderr
    assert loaded(str(tmp_path / "checkpoint"), {"w": torch.zeros(9)})["w"].tolist() == [1.0] * 9


def test_a_process_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    done = run_script(tmp_path / "checkpoint", "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert loaded(str(tmp_path / "checkpoint"), {"w": torch.ones(9)})["w"].tolist() == [0.0] * 9
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("staging", "half", "staging is one of full, lazy"),
        ("when_busy", "hurry", "when_busy is one of wait, skip, raise"),
        ("max_in_flight", 0, "max_in_flight must be at least 1"),
        ("async_stager", object(), "robust_dcp.async_save copies by itself"),
        ("use_collectives", False, "use_collectives=True"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, argument: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        robust_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=str(tmp_path), **{argument: value})
