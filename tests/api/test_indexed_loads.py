"""A load looks up what it asks for in the index: nothing that all ranks are sent grows with the checkpoint."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import run_ranks, values


class NotingDisk(PosixDisk):
    """Notes which of the two files it opens to read them.

    Args:
        path, here: what lies in ``path`` for others lies in ``here`` for this rank, as on disks of nodes.
    """

    def __init__(self, path: str = "", here: str = "") -> None:
        self.opened: list[str] = []
        self._path, self._here = path, here

    def _of(self, path: str) -> str:
        return path.replace(self._path, self._here, 1) if self._path else path

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        if os.path.basename(path) in (INDEX_NAME, METADATA_NAME):
            self.opened.append(os.path.basename(path))
        return super().open_read(self._of(path), direct=direct)

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        self.opened.remove(os.path.basename(file.path))  # it was opened for the lock alone
        return super().lock(file, shared=shared)

    def exists(self, path: str) -> bool:
        return super().exists(self._of(path))

    def size(self, file: OpenFile | str) -> int:
        return super().size(self._of(file) if isinstance(file, str) else file)


def _state(value: float, placement: Any, n: int = 300) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        f"layer.{number}.w": distribute_tensor(
            (value + number) * torch.arange(96.0).reshape(8, 12), mesh, [placement], src_data_rank=None
        )
        for number in range(n)
    }
    return {"model": weights, "step": int(value), "list": [torch.full((2,), value), value]}


def _flat(state: dict[str, Any]) -> list[Any]:
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in state["model"].values()]
    return [each.tolist() for each in whole] + [state["step"], state["list"][0].tolist(), state["list"][1]]


def _loaded(path: str, placement: Any, here: str = "", **options: Any) -> tuple[bool, Any, list[str], list[str]]:
    """Whether what was saved came back, the report, which files were opened, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    disk, found = NotingDisk(path if here else "", here), _state(0.0, placement)
    reader = robust_dcp.RobustReader(path, disk=disk, **options)
    report = robust_dcp.load(found, storage_reader=reader)
    logging.getLogger("robust_dcp").removeHandler(handler)
    return _flat(found) == _flat(_state(1.0, Shard(0))), report, disk.opened, lines


def load_with_and_without(path: str) -> Any:
    rank = dist.get_rank()
    robust_dcp.save(_state(1.0, Shard(0)), checkpoint_id=path)
    told = []
    for placement in (Shard(0), Shard(1), Replicate()):
        same, report, opened, lines = _loaded(path, placement)
        told.append((same, opened, lines, report.unread_keys, report.missing_keys))
    sent = sum(phase.payload_nbytes for phase in report.phases)
    dist.barrier()
    if rank == 0:
        os.unlink(os.path.join(path, INDEX_NAME))
    dist.barrier()
    same, report, opened, lines = _loaded(path, Shard(1))
    told.append((same, opened, lines, report.unread_keys, report.missing_keys))
    return told, sent, sum(phase.payload_nbytes for phase in report.phases)


def test_ranks_find_their_items_in_the_index_and_are_sent_nothing_else(tmp_path: Path) -> None:
    found = values(run_ranks(2, load_with_and_without, str(tmp_path / "c")))
    for rank, (told, _, _) in enumerate(found):
        assert all(same for same, *_ in told)
        expected = [INDEX_NAME, METADATA_NAME] if rank == 0 else [INDEX_NAME]  # the tail, to see whether they fit
        assert [opened for _, opened, *_ in told] == [expected] * 3 + [[METADATA_NAME] if rank == 0 else []]
        assert all((lines, unread, missing) == ([], (), ()) for _, _, lines, unread, missing in told)
    (_, sent, sent_without), _ = found
    assert sent < 1000 < sent_without


def load_where_nodes_see_different_directories(path: str, others: str) -> Any:
    rank = dist.get_rank()
    robust_dcp.save(_state(1.0, Shard(0)), checkpoint_id=path)
    dist.barrier()  # rank 0 has tidied up
    if rank == 1:
        shutil.copytree(path, f"{path}-of-1")
        if others == "no index":
            os.unlink(f"{path}-of-1/{INDEX_NAME}")
        elif others == "another index":
            robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{path}-other", no_dist=True)
            shutil.copy(f"{path}-other/{INDEX_NAME}", f"{path}-of-1/{INDEX_NAME}")
        elif others == "damaged":
            Path(f"{path}-of-1/{INDEX_NAME}").write_bytes(b"\0" * 5000)
    dist.barrier()
    same, _, opened, lines = _loaded(path, Shard(1), f"{path}-of-1" if rank == 1 else "")
    return same, opened, len(lines)


@pytest.mark.parametrize("others", ["the same", "no index", "another index", "damaged"])
def test_a_rank_that_does_not_see_the_index_is_sent_the_metadata(others: str, tmp_path: Path) -> None:
    found = values(run_ranks(2, load_where_nodes_see_different_directories, str(tmp_path / "c"), others))
    assert [same for same, *_ in found] == [True, True]
    assert found[0][1].count(METADATA_NAME) == (1 if others == "the same" else 2)
    assert METADATA_NAME not in found[1][1]
    assert found[1][2] == (others == "damaged")


def load_with_damage(path: str, section: str, share_reads: bool) -> Any:
    rank = dist.get_rank()
    robust_dcp.save(_state(1.0, Shard(0)), checkpoint_id=path)
    dist.barrier()  # rank 0 has tidied up
    if rank == 1:
        path_of_1 = f"{path}-of-1"
        shutil.copytree(path, path_of_1)
        data = bytearray(Path(path_of_1, INDEX_NAME).read_bytes())
        entry = data.index(section.encode().ljust(16, b"\0"))
        data[int.from_bytes(data[entry + 24 : entry + 32], "little")] ^= 0xFF
        Path(path_of_1, INDEX_NAME).write_bytes(data)
    dist.barrier()
    placement = Replicate() if share_reads else Shard(1)
    same, _, _, lines = _loaded(path, placement, f"{path}-of-1" if rank == 1 else "", share_reads=share_reads)
    return same, lines


@pytest.mark.parametrize(
    ("section", "share_reads"),
    [("name_ends", False), ("chunk_offset", True), ("chunk_start", False), ("chunk_start", True), ("files", True)],
)
def test_a_rank_whose_index_is_damaged_goes_on_with_the_metadata(
    section: str, share_reads: bool, tmp_path: Path
) -> None:
    found = values(run_ranks(2, load_with_damage, str(tmp_path / "c"), section, share_reads))
    assert [same for same, _ in found] == [True, True]
    assert found[0][1] == []
    assert len(found[1][1]) == 1 and section in found[1][1][0] and "read instead" in found[1][1][0]


def test_stock_and_its_planner_take_what_the_index_says(tmp_path: Path) -> None:
    state = {"a": {"w": torch.arange(12.0), "list": [torch.ones(2), "text"]}, "step": 3}
    robust_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for planner in (dcp.DefaultLoadPlanner(), robust_dcp.RobustLoadPlanner()):
        disk = NotingDisk()
        found = {"a": {"w": torch.zeros(12), "list": [torch.zeros(2), ""]}, "step": 0}
        reader = robust_dcp.RobustReader(tmp_path, disk=disk)
        dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        assert found["a"]["w"].tolist() == state["a"]["w"].tolist()  # type: ignore[index]
        assert found["step"] == 3 and found["a"]["list"][1] == "text"  # type: ignore[index]
        assert INDEX_NAME in disk.opened
    read = robust_dcp.RobustReader(tmp_path).read_metadata()
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    for metadata in (read, copy.deepcopy(read)):
        metadata.storage_meta = stock.storage_meta
        assert metadata == stock and stock == metadata


def test_what_was_not_asked_for_is_looked_up_when_somebody_asks(tmp_path: Path) -> None:
    robust_dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    planner = robust_dcp.RobustLoadPlanner(allow_partial_load=True)
    first = robust_dcp.load({"a": torch.zeros(2), "c": 1}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    robust_dcp.load({"b": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert (first.missing_keys, first.unread_keys) == (("c",), ("b",))
