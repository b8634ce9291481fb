"""What the caller has passed is the caller's: its planner, reader and dict hold what stock's would hold, and its
directory is left alone after the commit."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata

import robust_dcp
from robust_dcp import RobustReader
from tests.harness.ranks import on_ranks
from tests.harness.verdicts import lines_of_the_log, verdict_of


@contextmanager
def switched() -> Iterator[None]:
    robust_dcp.install()
    try:
        yield
    finally:
        robust_dcp.uninstall()


def ways_to_save(path: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    return {
        "id": lambda state: dcp.save(state, checkpoint_id=path),
        "writer": lambda state: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
        "planner": lambda state: dcp.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner()),
        "async": lambda state: dcp.async_save(state, checkpoint_id=path).result(),
    }


def save_and_rename(root: str) -> list[tuple[str, list[str], int]]:
    """Rank 0 renames the directory as soon as its own save has returned, before others have told their listeners. The
    files that this rank has opened to read after the commit, and how many names are in what the save has returned."""
    opened: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(root):
            is_committed = os.path.exists(os.path.join(os.path.dirname(arguments[0]), ".metadata"))
            if is_committed and (arguments[2] or 0) & os.O_ACCMODE == os.O_RDONLY:
                opened.append(arguments[0])

    sys.addaudithook(note)
    rank, results, barrier = dist.get_rank(), [], dist.barrier
    listening = robust_dcp.on_event(lambda event: rank and event.name == "ended" and barrier())
    with switched():
        for how in ways_to_save(""):
            opened.clear()
            saved = ways_to_save(f"{root}/{how}.tmp")[how]({"p": torch.ones(64), "step": 1})
            read = list(opened)
            if rank == 0:
                os.rename(f"{root}/{how}.tmp", f"{root}/{how}")
                barrier()
            barrier()
            if rank:
                os.symlink(f"{root}/{how}", f"{root}/{how}.tmp")
            barrier()
            assert isinstance(saved, Metadata)
            results.append((how, read, len(saved.state_dict_metadata)))
    listening.stop()
    return results


def test_nothing_is_read_after_the_commit_and_rank_0_may_rename_it_while_others_return(tmp_path: Path) -> None:
    _, results = on_ranks(2, save_and_rename, str(tmp_path))
    assert results == [(how, [], 2) for how in ways_to_save("")]


def held(planner: Any) -> dict[str, Any]:
    """What a planner or a reader tells, in plain values."""
    told = {name: value for name, value in vars(planner).items() if not name.startswith("_")}
    metadata = told.pop("metadata", None)
    told["metadata"] = None if metadata is None else sorted(metadata.state_dict_metadata)
    if "storage_data" in told:
        told["storage_data"] = sorted((index.fqn, str(index.offset)) for index in told["storage_data"])
    for name in ("state_dict", "original_state_dict"):
        told[name] = sorted(told.get(name, ()))
    if "plan" in told:
        told["plan"] = [(item.index.fqn, item.type) for item in told["plan"].items], told["plan"].planner_data
    return {name: value for name, value in told.items() if name not in ("fs", "transforms", "path", "load_id")}


@pytest.mark.parametrize("flatten", [True, False])
def test_planner_and_reader_of_the_caller_hold_what_stocks_would_hold(flatten: bool, tmp_path: Path) -> None:
    def state(missing: str = "") -> dict[str, Any]:
        values = {"model": {"w": torch.zeros(3), "b": torch.zeros(2)}, "step": 1, missing: 0}
        return {name: value for name, value in values.items() if name}

    def told(path: Path) -> list[Any]:
        saver = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
        dcp.save(state(), checkpoint_id=path, planner=saver)
        loader, reader = dcp.DefaultLoadPlanner(flatten_state_dict=flatten), dcp.FileSystemReader(path)
        load_id = reader.load_id
        dcp.load(state(), storage_reader=reader, planner=loader)
        assert reader.load_id == load_id
        assert reader.storage_data.keys() == dcp.FileSystemReader(path).read_metadata().storage_data.keys()
        lacking = dcp.DefaultLoadPlanner(flatten_state_dict=flatten)
        assert verdict_of(dcp.load, state("new"), checkpoint_id=path, planner=lacking).type_name
        assert set(lacking.state_dict) - set(lacking.metadata.state_dict_metadata) == {"new"}
        of_saver = held(saver)
        return [{name: each for name, each in of_saver.items() if name != "global_plan"}, held(loader), held(reader)]

    by_stock = told(tmp_path / "stock")
    with switched():
        assert told(tmp_path / "ours") == by_stock
    loader = dcp.DefaultLoadPlanner(flatten_state_dict=flatten)
    robust_dcp.load(state(), checkpoint_id=tmp_path / "ours", planner=loader)
    assert held(loader) == by_stock[1]


class CountingReader(RobustReader):
    resets: tuple[Any, ...] = ()

    def reset(self, checkpoint_id: Any = None) -> None:
        self.resets = (*self.resets, checkpoint_id)
        super().reset(checkpoint_id)


class CountingWriter(dcp.FileSystemWriter):
    resets: tuple[Any, ...] = ()

    def reset(self, checkpoint_id: Any = None) -> None:
        self.resets = (*self.resets, checkpoint_id)
        super().reset(checkpoint_id)


def test_nothing_is_reset_where_stock_runs_and_does_not_reset(tmp_path: Path) -> None:
    plans = type("Plans", (dcp.DefaultLoadPlanner,), {"create_global_plan": lambda own, plans: plans})
    state = {"w": torch.ones(2)}
    with switched():
        writer, reader = CountingWriter(tmp_path), CountingReader(tmp_path)
        dcp.save(state, storage_writer=writer)
        dcp.load(state, storage_reader=reader, planner=plans())
        assert (writer.resets, reader.resets) == ((), ())
        given = dcp.FileSystemReader(tmp_path)
        given.reset = lambda *_: pytest.fail("reset() was called")  # type: ignore[method-assign]
        dcp.load(state, storage_reader=given)


class Plain(StreamTransformExtension):
    @staticmethod
    def from_descriptor(version: str) -> Plain:
        return Plain()

    @staticmethod
    def registry_name() -> str:
        return "stream.plain"

    def get_descriptor(self) -> str:
        return "stream.plain/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def test_a_reader_with_a_registry_of_its_own_stays_stocks(tmp_path: Path) -> None:
    registry = ExtensionRegistry()
    registry.register(Plain)
    with switched():
        lines = lines_of_the_log()
        dcp.save({"a": torch.arange(4.0)}, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Plain()]))
        state = {"a": torch.zeros(4)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path, _extension_registry=registry))
    assert torch.equal(state["a"], torch.arange(4.0))
    assert any("an extension registry of its own" in line for line in lines)


class Own(ValueError):
    pass


ERRORS = [ValueError("no room"), KeyError("lr"), FileNotFoundError(2, "No such file"), Own("mine"), RuntimeError()]


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise self.error
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def failures_of(path: str) -> list[tuple[str, str, str, str]]:
    told = []
    for error in ERRORS:
        with pytest.raises(dcp.api.CheckpointException) as raised, switched():
            dcp.save({"a": Raises(error)}, checkpoint_id=path)
        (failure,) = raised.value.failures.items()
        rank, (rebuilt, _) = failure
        told.append((rank, type(rebuilt).__name__, str(rebuilt)))
    return told


def test_an_error_holds_what_each_rank_has_raised_under_its_rank(tmp_path: Path) -> None:
    expected = [(1, type(error).__name__, str(error)) for error in ERRORS]
    assert on_ranks(2, failures_of, str(tmp_path)) == [expected, expected]


class Noting(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.__dict__.setdefault("keys_set", []).append(key)
        super().__setitem__(key, value)


def test_only_what_has_no_state_dict_is_set_in_the_dict_of_the_caller(tmp_path: Path) -> None:
    def state() -> Noting:
        return Noting({"model": torch.nn.Linear(2, 2), "w": torch.ones(2), "step": 3})

    dcp.save(dict(state()), checkpoint_id=tmp_path)
    by_stock, by_ours = state(), state()
    dcp.load(by_stock, checkpoint_id=tmp_path)
    with switched():
        dcp.load(by_ours, checkpoint_id=tmp_path)
    assert sorted(by_ours.keys_set) == sorted(by_stock.keys_set) == ["step", "w"]


def save_beside_a_socket(path: str) -> bool:
    """Whether a socket of the caller still waits for what comes, where new ones of Python do not."""
    socket.setdefaulttimeout(60.0)
    try:
        with socket.create_server(("127.0.0.1", 0)) as own:
            own.settimeout(None)
            own.set_inheritable(True)
            robust_dcp.save({"w": torch.ones(2)}, checkpoint_id=path, process_group=dist.new_group())
            return os.get_blocking(own.fileno())
    finally:
        socket.setdefaulttimeout(None)


def test_a_socket_of_the_caller_waits_as_before(tmp_path: Path) -> None:
    assert on_ranks(2, save_beside_a_socket, str(tmp_path)) == [True, True]
