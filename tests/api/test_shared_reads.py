"""Where ranks of a load need the same bytes, one of them reads each byte and the others get it: bit for bit as if all
had read, with one verdict whatever happens on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import RobustLoadPlanner, RobustReader, RobustWriter
from robust_dcp.comm.nodes import RANKS_PER_NODE
from robust_dcp.plan.readers import BUCKET_NBYTES
from robust_dcp.report import LoadReport
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, values

StateDict = dict[str, Any]

# Small ones that are packed, one that is not a multiple of anything, and one of more than two buckets.
NUMELS = {**{f"small.{n}": 2 + 37 * n for n in range(300)}, "odd": 300_001, "large": 2 * BUCKET_NBYTES // 4 + 77}


class CountingDisk(PosixDisk):
    """Counts the bytes that are read from data files, and can end the process at one of its reads."""

    def __init__(self, die_at: int | None = None) -> None:
        self.nbytes = 0
        self.reads = 0
        self.die_at = die_at

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        found = super().pread_into(file, buffer, offset)
        if not file.path.endswith((METADATA_NAME, INDEX_NAME)):
            self.nbytes += found
            self.reads += 1
            if self.reads == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return found


def full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(numel, generator=generator) for name, numel in NUMELS.items()}


def like(state_dict: StateDict, dtype: torch.dtype | None = None) -> StateDict:
    return {name: torch.zeros_like(value, dtype=dtype) for name, value in state_dict.items()}


def check_equal(found: StateDict, expected: StateDict) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def load(
    target: StateDict, directory: str, share_reads: bool | None = True, **kwargs: Any
) -> tuple[LoadReport, CountingDisk]:
    disk = CountingDisk()
    reader = RobustReader(directory, share_reads=share_reads, disk=disk)
    return robust_dcp.load(target, storage_reader=reader, **kwargs), disk


# Replicas of everything, as with DDP.


BOTH_LAYOUTS = pytest.mark.parametrize("layout", ["torch", "safetensors"])


def load_replicas(directory: str) -> dict[bool, tuple[int, LoadReport]]:
    found = {}
    for share_reads in (False, True):
        target: StateDict = {**like(full(1)), "step": 0}
        report, disk = load(target, directory, share_reads)
        check_equal(target, full(1))
        assert target["step"] == 7
        found[share_reads] = disk.nbytes, report
    return found


@BOTH_LAYOUTS
def test_of_replicas_each_byte_is_read_once(layout: str, tmp_path: Path) -> None:
    robust_dcp.save({**full(1), "step": 7}, storage_writer=RobustWriter(tmp_path, layout=layout), no_dist=True)
    nbytes = sum(value.nbytes for value in full(1).values())
    outcomes = values(in_ranks(4, load_replicas, str(tmp_path)))
    alone = [outcome[False][0] for outcome in outcomes]
    shared = [outcome[True][0] for outcome in outcomes]
    assert min(alone) > nbytes
    # Headers; a block may hold a few items that another rank was given.
    assert nbytes < sum(shared) < 1.15 * nbytes
    reports = [outcome[True][1] for outcome in outcomes]
    assert sum(report.nbytes - report.shared_nbytes for report in reports) == nbytes
    assert [phase.name for phase in reports[0].phases] == ["plan", "read", "share", "apply"]
    # Each rank passes on its share to at most all others, in buckets; and what is small goes together.
    n_buckets = nbytes // BUCKET_NBYTES + 4 * 3
    assert sum(report.phases[2].messages for report in reports) < 3 * n_buckets + 4 * 20
    assert sum(report.phases[2].payload_nbytes for report in reports) < 3 * nbytes + (1 << 12)


# Some ranks hold the same, as with HSDP; boxes that differ from those that were saved.


def laid_out(seed: int, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> StateDict:
    mesh = init_device_mesh("cpu", mesh_shape)
    matrices = {"m": torch.arange(24 * 18.0), "n": torch.arange(7 * 18.0)}
    return {
        name: distribute_tensor(value.view(-1, 18) * seed, mesh, placements, src_data_rank=None)
        for name, value in matrices.items()
    }


CUTS: dict[str, tuple[tuple[Placement, ...], tuple[int, ...]]] = {
    "hsdp": ((Replicate(), Shard(0)), (2, 2)),
    "rows": ((Shard(0),), (4,)),
    "columns": ((Shard(1),), (4,)),
    "replicated columns": ((Replicate(), Shard(1)), (2, 2)),
    "replicated": ((Replicate(),), (4,)),
}


def load_in_all_cuts(directory: str, layout: str) -> list[tuple[str, str, int]]:
    found = []
    for saved, (placements, mesh_shape) in CUTS.items():
        writer = RobustWriter(f"{directory}/{saved}", layout=layout)
        robust_dcp.save(laid_out(3, placements, mesh_shape), storage_writer=writer)
        for wanted, (placements, mesh_shape) in CUTS.items():
            target = laid_out(0, placements, mesh_shape)
            report, _ = load(target, f"{directory}/{saved}")
            for name, value in laid_out(3, placements, mesh_shape).items():
                assert torch.equal(target[name].to_local(), value.to_local()), (saved, wanted, name)
            found.append((saved, wanted, report.shared_nbytes))
    return found


@BOTH_LAYOUTS
def test_however_tensors_are_cut_what_is_loaded_is_what_was_saved(layout: str, tmp_path: Path) -> None:
    outcomes = values(in_ranks(4, load_in_all_cuts, str(tmp_path), layout))
    for cases in zip(*outcomes, strict=True):
        (saved, wanted, _), shared = cases[0], sum(nbytes for _, _, nbytes in cases)
        # Half of what HSDP's ranks need comes from others, three quarters of whole copies, nothing of shards. What was
        # cut by columns goes into parts of rows, which are not contiguous.
        copies = {"hsdp": 1, "replicated columns": 1, "replicated": 3}.get(wanted, 0)
        assert shared == copies * (24 + 7) * 18 * 4, (saved, wanted)


# Targets that do not take the bytes as they are stored.


def load_into_odd_targets(directory: str) -> tuple[int, int]:
    rank = dist.get_rank()
    target = like(full(1), torch.float64 if rank in (1, 4) else None)
    if rank == 2:
        target = {name: torch.zeros(numel, 2)[:, 1] for name, numel in NUMELS.items()}
    report, disk = load(target, directory, planner=RobustLoadPlanner(on_dtype_mismatch="cast"))
    check_equal({name: value.to(torch.float32) for name, value in target.items()}, full(1))
    return report.shared_nbytes, disk.nbytes


def test_ranks_share_what_is_converted_to_one_dtype_and_whatever_strides_it_goes_into(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    shared, read = zip(*values(in_ranks(5, load_into_odd_targets, str(tmp_path))), strict=True)
    nbytes = sum(value.nbytes for value in full(1).values())
    assert (shared[0] + shared[2] + shared[3], shared[1] + shared[4]) == (2 * nbytes, nbytes)
    assert 2 * nbytes < sum(read) < 2.3 * nbytes


def load_a_matrix_in_columns(directory: str) -> int:
    matrix = torch.arange(6.0 * 7 * (1 << 17)).view(6, 7, 1 << 17)
    robust_dcp.save({"m": matrix}, checkpoint_id=directory)
    whole = torch.zeros(6, 1 << 17, 8) if dist.get_rank() else torch.zeros(6, 1 << 17, 7)
    target = {"m": whole[:, :, :7].transpose(1, 2)}
    report, _ = load(target, directory)
    assert torch.equal(target["m"], matrix)
    return report.shared_nbytes


def test_a_large_tensor_passes_in_pieces_into_memory_of_any_strides(tmp_path: Path) -> None:
    shared = values(in_ranks(3, load_a_matrix_in_columns, str(tmp_path)))
    assert sum(shared) == 2 * 6 * 7 * (1 << 17) * 4 > 2 * BUCKET_NBYTES


# Objects.


class CountingPlanner(RobustLoadPlanner):
    """Counts the objects that it is handed."""

    n_objects = 0

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.n_objects += 1
        super().load_bytes(read_item, value)


def load_objects(directory: str, trusted_rank: int | None) -> tuple[int, int]:
    target: StateDict = {f"object.{number}": None for number in range(8)}
    disk, planner = CountingDisk(), CountingPlanner()
    reader = RobustReader(directory, share_reads=True, disk=disk, trusted=dist.get_rank() == trusted_rank)
    robust_dcp.load(target, storage_reader=reader, planner=planner)
    assert target == {f"object.{number}": list(range(1000 * number)) for number in range(8)}
    return disk.nbytes, planner.n_objects


def test_an_object_is_read_once_for_all_ranks_with_the_same_trust(tmp_path: Path) -> None:
    robust_dcp.save({f"object.{n}": list(range(1000 * n)) for n in range(8)}, checkpoint_id=tmp_path, no_dist=True)
    alone, n_objects = values(in_ranks(1, load_objects, str(tmp_path), None))[0]
    for trusted_rank, readers in ((None, 1), (2, 2)):
        read, handed = zip(*values(in_ranks(3, load_objects, str(tmp_path), trusted_rank)), strict=True)
        assert readers * alone <= sum(read) < (readers + 0.9) * alone
        assert set(handed) == {n_objects}


class PairedPlanner(DefaultLoadPlanner):
    """Wants to hear of each tensor, as Megatron-Core's planner does."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


def load_with_a_planner_that_commits(directory: str) -> int:
    target = like(full(1))
    report, _ = load(target, directory, planner=PairedPlanner() if dist.get_rank() == 1 else None)
    check_equal(target, full(1))
    return report.shared_nbytes


def test_a_planner_that_hears_of_each_tensor_has_all_of_them_read(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    assert values(in_ranks(2, load_with_a_planner_that_commits, str(tmp_path))) == [0, 0]


def test_what_stock_saved_is_shared_as_well(tmp_path: Path) -> None:
    dcp.save({**full(1), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    for outcome in values(in_ranks(2, load_replicas, str(tmp_path))):
        assert outcome[True][1].shared_nbytes > 0


# The switch.


def load_with_the_default(directory: str) -> list[int]:
    return [load(like(full(1)), directory, share_reads)[0].shared_nbytes for share_reads in (None, False, True)]


@pytest.mark.parametrize(("ranks_per_node", "shares"), [("1", True), ("2", False)])
def test_by_default_reads_are_shared_between_nodes(ranks_per_node: str, shares: bool, tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    outcomes = in_ranks(2, load_with_the_default, str(tmp_path), env={RANKS_PER_NODE: ranks_per_node})
    for by_default, off, on in values(outcomes):
        assert off == 0 < on
        assert by_default == (on if shares else 0)


def load_with_other_switches(directory: str) -> Verdict:
    switch = {0: None, 1: True, 2: None, 3: False}[dist.get_rank()]
    target = like(full(1))
    verdict = verdict_of(load, target, directory, switch)
    assert not any(value.any() for value in target.values())
    return verdict


def test_ranks_with_another_switch_than_the_coordinator_are_named(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    for verdict in values(in_ranks(4, load_with_other_switches, str(tmp_path))):
        assert verdict.type_name == "PlanConflict"
        assert verdict.fields == {"key": "share_reads", "ranks": [0, 1, 3]}
        assert "share_reads is None on rank 0, True on rank 1, False on rank 3" in verdict.message


def load_with_a_number_without_meaning(directory: str) -> Verdict:
    if dist.get_rank() == 1:
        os.environ[RANKS_PER_NODE] = "two"
    return verdict_of(load, like(full(1)), directory, None)


def test_a_number_of_ranks_without_meaning_is_an_error_on_all_that_names_rank_and_variable(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    for verdict in values(in_ranks(2, load_with_a_number_without_meaning, str(tmp_path))):
        assert verdict.failed_ranks == (1,)
        assert f"{RANKS_PER_NODE}='two'" in verdict.message + verdict.failures


# Failures.


def load_what_is_damaged(directory: str) -> tuple[Verdict, int]:
    return verdict_of(load, like(full(1)), directory), dist.get_rank()


def test_damage_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    marked = full(1)["odd"].numpy().tobytes()[1000:1064]
    (path,) = (path for path in tmp_path.iterdir() if marked in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(marked)] ^= 1
    path.write_bytes(data)
    verdicts = [verdict for verdict, _ in values(in_ranks(4, load_what_is_damaged, str(tmp_path)))]
    for verdict in verdicts:
        assert verdict.type_name == "CorruptCheckpoint"
        assert verdict.fields["file"] == str(path) and verdict.fields["item"] == "odd at [0]"
        assert len(verdict.failed_ranks) == 1  # the rank that was to read it
        assert verdict.message == verdicts[0].message
