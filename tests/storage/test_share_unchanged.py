"""What an earlier checkpoint holds is not written again, and the new checkpoint is whole without the earlier one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter, SaveReport, WriteOptions
from robust_dcp.background.messages import options_message
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts.footer import FileSums
from robust_dcp.storage.records.block_sums import SUM_NBYTES, sums_of
from robust_dcp.storage.writing.earlier_file import EarlierFile
from tests.harness.damage import data_files
from tests.harness.ranks import run_ranks
from tests.support.sharing_disks import MAKE, CopyingDisk, mounted, shared_nbytes, why_not_mounted
from tests.support.simulated_disk import WatchedDisk, runs_with_each_call_failing

MIB = 1 << 20
BLOCK_NBYTES = 1 << 20

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=MAKE)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on a file system on which files can share bytes."""
    why_not = why_not_mounted(request.param)
    if why_not is not None:
        pytest.skip(why_not)
    with mounted(request.param, tmp_path_factory.mktemp("shared")) as directory:
        yield directory


@pytest.fixture
def root(real: Path) -> Iterator[Path]:
    yield real / "run"
    shutil.rmtree(real / "run")


def tensors() -> Tensors:
    """Large ones in pieces, some that share a block, many small ones, and sizes that fill no page."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"tower": 2 * MIB, "embedding": MIB + 5, "head": MIB // 2, "odd": 300_001, "bias": 999}
    made = {name: torch.rand(size, generator=generator) for name, size in sizes.items()}
    return {**made, **{f"small.{n}": torch.rand(500, generator=generator) for n in range(700)}}


def train(state: Tensors, *, without: tuple[str, ...] = ()) -> None:
    for name in ("head", "bias", "small.3"):
        if name not in without:
            state[name] += 1
    state["embedding"][MIB // 2] += 1  # one row


def save(state: Any, path: Path, **options: Any) -> SaveReport:
    writer = RobustWriter(path, **{"share_unchanged": True, "block_bytes": BLOCK_NBYTES, **options})
    return robust_dcp.save(state, storage_writer=writer)


def check(path: Path, state: Tensors, *, by_stock: bool = True) -> None:
    for load in (robust_dcp.load, dcp.load) if by_stock else (robust_dcp.load,):
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        report = load(target, checkpoint_id=path)
        assert all(torch.equal(target[name], state[name]) for name in state)
        if load is robust_dcp.load:
            assert report.unverified_nbytes == 0


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_real_files_share_what_is_unchanged_and_need_nothing_of_the_earlier_checkpoint(
    layout: str, direct: bool | None, root: Path
) -> None:
    state = tensors()
    save(state, root / "1", layout=layout, direct=direct)
    train(state)
    report = save(state, root / "2", layout=layout, direct=direct, previous=root / "1")
    files = [root / "2" / name for name in report.files]
    assert 0.7 * report.nbytes < report.unchanged_nbytes < 0.95 * report.nbytes
    assert sum(map(shared_nbytes, files)) >= report.unchanged_nbytes
    assert f"sharing with {root / '1'}" in report.how
    for name in data_files(root / "1"):  # overwrite some of the earlier checkpoint in place, then remove all of it
        with (root / "1" / name).open("r+b") as file:
            file.seek(MIB)
            file.write(bytes(MIB))
            os.fsync(file.fileno())
    check(root / "2", state, by_stock=layout == "torch")
    shutil.rmtree(root / "1")
    check(root / "2", state, by_stock=layout == "torch")


def test_the_earlier_checkpoint_may_go_while_the_new_one_is_loaded(root: Path) -> None:
    state = tensors()
    save(state, root / "1")
    save(state, root / "2", previous=root / "1")
    removed = WatchedDisk(PosixDisk(), before=lambda number: shutil.rmtree(root / "1", ignore_errors=True))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    robust_dcp.load(target, storage_reader=robust_dcp.RobustReader(root / "2", disk=removed))
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert not (root / "1").exists()


def test_an_async_save_and_a_manager_share_with_the_checkpoint_before(root: Path) -> None:
    state = tensors()
    manager = CheckpointManager(root)
    reports = []
    for step in range(3):
        train(state)
        writer = RobustWriter("replaced by the manager", share_unchanged=True, block_bytes=BLOCK_NBYTES)
        reports.append(manager.async_save(step, state, storage_writer=writer).result())
    assert [bool(report.unchanged_nbytes) for report in reports] == [False, True, True]
    for checkpoint in manager.checkpoints()[:-1]:
        shutil.rmtree(checkpoint.path)
    check(Path(manager.checkpoints()[-1].path), state)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_unchanged_bytes_are_not_written(layout: str, direct: bool | None, tmp_path: Path) -> None:
    state = tensors()
    disk = WatchedDisk(CopyingDisk())
    save(state, tmp_path / "1", layout=layout, direct=direct, disk=disk)
    train(state, without=("head", "bias", "small.3"))
    report = save(state, tmp_path / "2", layout=layout, direct=direct, disk=disk, previous=tmp_path / "1")
    # One block of the embedding has changed; the pages at the ends of files and pieces are written.
    assert 0 < report.nbytes - report.unchanged_nbytes < 2 * BLOCK_NBYTES
    check(tmp_path / "2", state, by_stock=layout == "torch")


def test_the_same_writer_shares_with_its_last_save_and_a_directory_with_its_own_checkpoint(tmp_path: Path) -> None:
    state = tensors()
    options: Any = {"share_unchanged": True, "block_bytes": BLOCK_NBYTES, "disk": CopyingDisk()}
    writer = RobustWriter(tmp_path / "1", **options)
    found = [robust_dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer) for name in "123"]
    found += [robust_dcp.save(state, storage_writer=RobustWriter(tmp_path / "3", **options)) for _ in range(3)]
    assert [report.unchanged_nbytes > 0.9 * report.nbytes for report in found] == [False, *[True] * 5]
    check(tmp_path / "3", state)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSPC, errno.EIO])
def test_where_files_cannot_share_everything_is_written_and_the_report_says_why(code: int, tmp_path: Path) -> None:
    state = tensors()
    save(state, tmp_path / "1")
    report = save(state, tmp_path / "2", previous=tmp_path / "1", disk=CopyingDisk(code))
    assert report.unchanged_nbytes == 0
    said = "another file system" if code == errno.EXDEV else errno.errorcode[code].replace("ENOTSUP", "EOPNOTSUPP")
    assert any(said in each.replace("ENOTSUP", "EOPNOTSUPP") for each in report.how), report.how
    check(tmp_path / "2", state)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path("/dev/shm") / f"robust_dcp-{os.getpid()}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def test_tmpfs_and_another_file_system_are_written_to(shm: Path, tmp_path: Path) -> None:
    state = tensors()
    save(state, tmp_path / "1")
    for previous, path in ((tmp_path / "1", shm / "1"), (shm / "1", shm / "2")):
        report = save(state, path, previous=previous)
        assert report.unchanged_nbytes == 0
        assert any(f"not sharing with {previous}" in each for each in report.how)
        check(path, state)


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory", "other tensors", "stock", "safetensors"])
def test_an_earlier_checkpoint_of_another_kind_costs_nothing_but_the_sharing(what: str, tmp_path: Path) -> None:
    state = tensors()
    previous = tmp_path / "1"
    if what == "a file":
        previous.write_bytes(b"no checkpoint")
    elif what == "an empty directory":
        previous.mkdir()
    elif what == "other tensors":
        save({name: tensor[: len(tensor) // 2] for name, tensor in state.items()}, previous)
    elif what == "stock":
        dcp.save(state, checkpoint_id=previous)
    elif what == "safetensors":
        save(state, previous, layout="safetensors")
    report = save(state, tmp_path / "2", previous=previous, disk=CopyingDisk())
    assert report.unchanged_nbytes == 0
    assert any(f"not sharing with {previous}" in each for each in report.how)
    check(tmp_path / "2", state)


@pytest.mark.parametrize("direct", [None, False])
def test_a_byte_that_has_rotted_in_the_earlier_file_is_not_inherited(direct: bool | None, tmp_path: Path) -> None:
    state = {"tower": torch.rand(4 * MIB)}
    save(state, tmp_path / "1", direct=direct)
    (name,) = data_files(tmp_path / "1")
    with (tmp_path / "1" / name).open("r+b") as file:
        file.seek(5 * MIB + 7)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    report = save(state, tmp_path / "2", direct=direct, previous=tmp_path / "1", disk=CopyingDisk())
    assert 0 < report.unchanged_nbytes <= report.nbytes - BLOCK_NBYTES
    assert any("do not fit their checksums" in each for each in report.how)
    check(tmp_path / "2", state)


def test_a_block_that_cannot_be_read_back_is_written(tmp_path: Path) -> None:
    class Unreadable(CopyingDisk):
        def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
            if str(tmp_path / "2") in file.path and offset > 2 * MIB and memoryview(buffer).nbytes > 4096:
                raise storage_error("read", file.path, OSError(errno.EIO, os.strerror(errno.EIO)))
            return super().pread_into(file, buffer, offset)

    state = {"tower": torch.rand(2 * MIB)}
    save(state, tmp_path / "1")
    report = save(state, tmp_path / "2", previous=tmp_path / "1", disk=Unreadable())
    assert 0 < report.unchanged_nbytes <= 3 * MIB
    check(tmp_path / "2", state)


def test_whichever_call_fails_a_whole_checkpoint_is_there(shm: Path) -> None:
    first, second = {"w": torch.rand(MIB)}, {"w": torch.rand(MIB)}
    second["w"][: MIB // 2] = first["w"][: MIB // 2]
    runs = []

    def save_twice(disk: WatchedDisk) -> None:
        path = shm / str(len(runs))
        runs.append(path)
        save(first, path, files_per_rank=1, threads=1)
        report = save(second, path, files_per_rank=1, threads=1, disk=disk)
        assert report.unchanged_nbytes or len(runs) > 1
        check(path, second, by_stock=False)

    disks = runs_with_each_call_failing(save_twice, CopyingDisk)
    assert sum("share_extents" in disk.operations for disk in disks) > 20
    for path in runs:
        target = {"w": torch.zeros(MIB)}
        robust_dcp.load(target, checkpoint_id=path)
        assert any(torch.equal(target["w"], state["w"]) for state in (first, second))


class KillingDisk(CopyingDisk):
    """Kills its process right after it has shared some ranges."""

    def __init__(self, n_ranges: int) -> None:
        super().__init__()
        self.n_ranges = n_ranges

    def share_extents(self, source: OpenFile, target: OpenFile, offset: int, nbytes: int) -> tuple[int, int]:
        shared = super().share_extents(source, target, offset, nbytes)
        self.n_ranges -= 1
        if self.n_ranges <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return shared


def save_and_die(path: str, n_ranges: int) -> None:
    state = tensors()
    train(state)
    save(state, Path(path), disk=KillingDisk(n_ranges))


def test_a_save_that_is_killed_while_it_shares_leaves_the_earlier_checkpoint_whole(shm: Path) -> None:
    state = tensors()
    save(state, shm / "run")
    (outcome,) = run_ranks(1, save_and_die, str(shm / "run"), 6)
    assert outcome.exitcode == -signal.SIGKILL
    check(shm / "run", state)
    train(state)
    assert save(state, shm / "run", disk=CopyingDisk()).unchanged_nbytes
    check(shm / "run", state)
    named = {file.name for file in data_files(shm / "run")}
    assert set(os.listdir(shm / "run")) == named | {".metadata", ".robust_dcp.index", ".robust_dcp.report.json"}


def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    state = tensors()
    save(state, tmp_path / "1")
    options: Any = {"buffer_bytes": 3 * MIB, "threads": 1, "files_per_rank": 2, "disk": CopyingDisk()}
    report = save(state, tmp_path / "2", previous=tmp_path / "1", **options)
    assert 0 < report.peak_buffer_nbytes <= 3 * MIB
    assert report.unchanged_nbytes > report.nbytes // 2


def test_options_that_cannot_be_kept_are_refused_and_the_others_reach_a_writer_process() -> None:
    with pytest.raises(ValueError, match="needs checksums=True"):
        WriteOptions(share_unchanged=True, checksums=False)
    with pytest.raises(ValueError, match="is a URL"):
        WriteOptions(share_unchanged=True, previous="s3://bucket/run")
    message = options_message(WriteOptions(share_unchanged=True, previous=Path("/run/1")))
    assert WriteOptions(**message) == WriteOptions(share_unchanged=True, previous="/run/1", stripe_paths=())


def earlier_file(at: list[int], data: list[bytes]) -> EarlierFile:
    sums = FileSums()
    for offset, each in zip(at, data, strict=True):
        crcs = np.array(sums_of(memoryview(each)), dtype=np.uint32)
        sums.add(np.array([offset]), np.array([len(each)]), crcs)
    return EarlierFile(OpenFile("earlier", -1), sums.columns())


def test_the_ends_of_a_part_count_as_their_neighbours_do() -> None:
    data = np.random.default_rng(0).bytes(4 * SUM_NBYTES + 100)
    earlier = earlier_file([1000], [data])
    changed = bytearray(data)
    changed[2 * SUM_NBYTES + 5] ^= 1

    def likely(begin: int, end: int) -> list[tuple[int, int]]:
        sums = sums_of(memoryview(changed)[begin:end], begin)
        found = earlier.likely_in_payload(1000, len(data), begin, end, sums)
        return [(first - 1000, last - 1000) for first, last in found]

    assert likely(0, len(data)) == [(0, 2 * SUM_NBYTES), (3 * SUM_NBYTES, len(data))]
    assert likely(10, 2 * SUM_NBYTES) == [(10, 2 * SUM_NBYTES)]
    assert likely(10, 2 * SUM_NBYTES + 1) == [(10, 2 * SUM_NBYTES + 1)]
    assert likely(10, SUM_NBYTES - 1) == []  # no whole block, so nothing is known
    assert likely(3 * SUM_NBYTES - 1, len(data)) == [(3 * SUM_NBYTES - 1, len(data))]
    assert earlier.likely_in_payload(1001, len(data), 0, 1, [0]) == ()
    assert earlier.likely_in_payload(1000, len(data) - 1, 0, 1, [0]) == ()


def test_of_a_block_of_items_those_are_found_that_are_equal_in_whole() -> None:
    generator = np.random.default_rng(1)
    nbytes = [0, 10, SUM_NBYTES + 3, 0, 70, 0, 2 * SUM_NBYTES]
    at = [int(n) for n in 64 + np.cumsum([0, *nbytes[:-1]])]
    data = [generator.bytes(n) for n in nbytes]
    earlier = earlier_file(at, data)
    for changed in range(len(data)):
        now = [bytes([each[0] ^ 1]) + each[1:] if n == changed and each else each for n, each in enumerate(data)]
        sums = np.array([crc for each in now for crc in sums_of(memoryview(each))], dtype=np.uint32)
        found = earlier.likely_in_block(np.array(at), np.array(nbytes), sums)
        covered = {byte for begin, end in found for byte in (begin, end - 1)}
        for n, each in enumerate(data):
            if each:
                is_found = any(begin <= at[n] and at[n] + len(each) <= end for begin, end in found)
                assert is_found == (n != changed), (n, changed)
        assert covered <= {byte for n, each in enumerate(data) for byte in (at[n], at[n] + len(each) - 1)}
