"""What the page cache holds is asked without reading: a load finds the cache as the one before has found it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.storage.files import kernel
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.kernel import cached_nbytes
from tests.faults.disk import FaultDisk
from tests.harness.ranks import run_ranks, values

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")
FILE_NBYTES = (6 << 20) + 1234


def forget(path: Path) -> None:
    """Have the kernel drop the file from its page cache."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(FILE_NBYTES))
    forget(path)
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    opened = os.open(file, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    yield opened
    os.close(opened)


def is_in_memory(path: Path) -> bool:
    """Whether the file system has no device, so that all of each file is in the cache at any time (tmpfs)."""
    opened = Disk().open_read(str(path), direct=None)
    Disk().close(opened)
    return opened.alignment is None


@pytest.mark.parametrize("has_cachestat", [True, False])
def test_the_pages_that_were_read_are_cached_and_no_others(
    file: Path, fd: int, has_cachestat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that does not know cachestat is asked by mincore."""
    if not has_cachestat:
        monkeypatch.setattr(kernel, "_CACHESTAT", 100_000)  # no such call: ENOSYS
    ask, elsewhere = cached_nbytes, FILE_NBYTES if is_in_memory(file) else 0
    assert ask(fd, 0, FILE_NBYTES) == elsewhere
    os.pread(fd, 2 << 20, 1 << 20)
    assert ask(fd, 0, FILE_NBYTES) == (elsewhere or 2 << 20)
    assert ask(fd, 1 << 20, 2 << 20) == 2 << 20
    assert ask(fd, (1 << 20) + 5, 10) == 10
    assert ask(fd, 3 << 20, 1 << 20) == min(elsewhere, 1 << 20)
    os.pread(fd, 100, FILE_NBYTES - 100)
    assert ask(fd, FILE_NBYTES - 100, 100) == 100
    assert ask(fd, FILE_NBYTES + PAGE_NBYTES, 100) == 0
    assert ask(fd, 0, 0) == 0


@pytest.mark.parametrize(("cached", "past_the_cache"), [(0.0, True), (0.25, True), (0.75, False), (1.0, False)])
def test_a_read_goes_to_where_most_of_its_bytes_are(tmp_path: Path, cached: float, past_the_cache: bool) -> None:
    value = torch.rand(3 << 18)
    robust_dcp.save({"w": value}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = (path for path in tmp_path.glob("*.distcp") if path.stat().st_size > value.nbytes)
    forget(file)
    opened = os.open(file, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(opened, int(value.nbytes * cached), 0)
    os.close(opened)
    found = {"w": torch.zeros(3 << 18)}
    with FaultDisk(tmp_path) as disk:
        robust_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["w"], value)
    is_direct = any(call.is_direct for call in disk.calls if call.operation == "read")
    assert is_direct == (past_the_cache and not is_in_memory(file))


def cached_share(directory: Path) -> float:
    """Of all bytes of a checkpoint's data files."""
    found = total = 0
    for path in directory.glob("*.distcp"):
        opened = os.open(path, os.O_RDONLY)
        nbytes = os.fstat(opened).st_size
        found, total = found + cached_nbytes(opened, 0, nbytes), total + nbytes
        os.close(opened)
    return found / total


def load_on_a_rank(path: str, names: list[str]) -> None:
    mine = names if len(names) == 1 else [names[dist.get_rank()]]
    state_dict = {name: torch.zeros(3 << 20) for name in mine}
    robust_dcp.load(state_dict, checkpoint_id=path)
    assert all(bool((value == 7).all()) for value in state_dict.values())


@pytest.mark.parametrize(("names", "is_kept"), [(["a"], True), (["a", "b"], False)])
def test_what_several_ranks_of_a_node_read_goes_through_the_cache(
    tmp_path: Path, names: list[str], is_kept: bool
) -> None:
    path = tmp_path / "step"
    robust_dcp.save({name: torch.full((3 << 20,), 7.0) for name in names}, checkpoint_id=path, no_dist=True)
    for file in path.iterdir():
        forget(file)
    in_memory = cached_share(path) == 1.0
    values(run_ranks(2, load_on_a_rank, str(path), names))
    assert (cached_share(path) > 0.9) == (is_kept or in_memory)
