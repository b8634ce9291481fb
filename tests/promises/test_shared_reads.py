"""Where ranks of a load need the same bytes, one of them reads each byte and the others get it: bit for bit as if all
had read, with one verdict whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from robust_dcp import LoadReport, RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from tests.faults.disk import FaultDisk
from tests.harness.damage import flip_bit
from tests.harness.fingerprints import blank, differences
from tests.harness.ranks import on_ranks, run_ranks, values
from tests.harness.verdicts import Verdict, verdict_of

StateDict = dict[str, Any]
RANKS_PER_NODE = "ROBUST_DCP_RANKS_PER_NODE"

# Small ones that are packed, one that is not a multiple of anything, and one that is passed on in pieces.
NUMELS = {**{f"small.{n}": 2 + 37 * n for n in range(300)}, "odd": 300_001, "large": 4_200_077}
NBYTES = 4 * sum(NUMELS.values())


def full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(numel, generator=generator) for name, numel in NUMELS.items()}


@contextmanager
def counting(directory: str) -> Iterator[list[int]]:
    """The bytes that this process reads from data files."""
    nbytes: list[int] = []
    with FaultDisk(directory, on={"read:[_s]*": lambda call: nbytes.append(call.nbytes)}):
        yield nbytes


def load(target: StateDict, directory: str, share_reads: bool | None = True, **options: Any) -> LoadReport:
    return robust_dcp.load(target, storage_reader=RobustReader(directory, share_reads=share_reads), **options)


def load_replicas(directory: str) -> dict[bool, tuple[int, LoadReport]]:
    found = {}
    for share_reads in (False, True):
        target = blank({**full(1), "step": 7})
        with counting(directory) as nbytes:
            report = load(target, directory, share_reads)
        assert differences({**full(1), "step": 7}, target) == []
        found[share_reads] = sum(nbytes), report
    return found


@pytest.mark.parametrize("by", ["torch", "safetensors", "stock"])
def test_of_replicas_each_byte_is_read_once(by: Any, tmp_path: Path) -> None:
    state = {**full(1), "step": 7}
    if by == "stock":
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        robust_dcp.save(state, storage_writer=RobustWriter(tmp_path, layout=by), no_dist=True)
    outcomes = on_ranks(4, load_replicas, str(tmp_path))
    assert min(outcome[False][0] for outcome in outcomes) > NBYTES
    # Headers; a block may hold a few items that another rank was given.
    assert NBYTES < sum(outcome[True][0] for outcome in outcomes) < 1.2 * NBYTES
    reports = [outcome[True][1] for outcome in outcomes]
    assert sum(report.nbytes - report.shared_nbytes for report in reports) == NBYTES
    assert [phase.name for phase in reports[0].phases] == ["plan", "read", "share", "apply"]
    assert sum(report.phases[2].payload_nbytes for report in reports) < 3 * NBYTES + (1 << 12)


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


def load_in_all_cuts(directory: str, layout: Any) -> list[tuple[str, str, int]]:
    found = []
    for saved, cut in CUTS.items():
        writer = RobustWriter(f"{directory}/{saved}", layout=layout)
        robust_dcp.save(laid_out(3, *cut), storage_writer=writer)
        for wanted, other_cut in CUTS.items():
            target = laid_out(0, *other_cut)
            report = load(target, f"{directory}/{saved}")
            for name, value in laid_out(3, *other_cut).items():
                assert torch.equal(target[name].to_local(), value.to_local()), (saved, wanted, name)
            found.append((saved, wanted, report.shared_nbytes))
    return found


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_however_tensors_are_cut_what_is_loaded_is_what_was_saved(layout: str, tmp_path: Path) -> None:
    outcomes = on_ranks(4, load_in_all_cuts, str(tmp_path), layout)
    for cases in zip(*outcomes, strict=True):
        (saved, wanted, _), shared = cases[0], sum(nbytes for _, _, nbytes in cases)
        # Half of what HSDP's ranks need comes from others, three quarters of whole copies, nothing of shards.
        copies = {"hsdp": 1, "replicated columns": 1, "replicated": 3}.get(wanted, 0)
        assert shared == copies * (24 + 7) * 18 * 4, (saved, wanted)


def load_into_odd_targets(directory: str) -> tuple[int, int]:
    """Some ranks convert, one loads into every second element, one into the columns of a matrix."""
    rank = dist.get_rank()
    target = blank(full(1))
    if rank in (1, 4):
        target = {name: value.double() for name, value in target.items()}
    if rank == 2:
        target = {name: torch.zeros(numel, 2)[:, 1] for name, numel in NUMELS.items()}
    with counting(directory) as nbytes:
        report = load(target, directory, planner=RobustLoadPlanner(on_dtype_mismatch="cast"))
    assert differences(full(1), {name: value.float() for name, value in target.items()}) == []
    return report.shared_nbytes, sum(nbytes)


def test_ranks_share_what_is_converted_to_one_dtype_and_whatever_strides_it_goes_into(tmp_path: Path) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    shared, read = zip(*on_ranks(5, load_into_odd_targets, str(tmp_path)), strict=True)
    assert (shared[0] + shared[2] + shared[3], shared[1] + shared[4]) == (2 * NBYTES, NBYTES)
    assert 2 * NBYTES < sum(read) < 2.3 * NBYTES


class CountingPlanner(RobustLoadPlanner):
    """Counts the objects that it is handed."""

    n_objects = 0

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.n_objects += 1
        super().load_bytes(read_item, value)


def load_objects(directory: str, trusted_rank: int | None) -> tuple[int, int]:
    target: StateDict = {f"object.{number}": None for number in range(8)}
    planner = CountingPlanner()
    reader = RobustReader(directory, share_reads=True, trusted=dist.get_rank() == trusted_rank)
    with counting(directory) as nbytes:
        robust_dcp.load(target, storage_reader=reader, planner=planner)
    assert target == {f"object.{number}": list(range(1000 * number)) for number in range(8)}
    return sum(nbytes), planner.n_objects


def test_an_object_is_read_once_for_all_ranks_whatever_they_trust(tmp_path: Path) -> None:
    robust_dcp.save({f"object.{n}": list(range(1000 * n)) for n in range(8)}, checkpoint_id=tmp_path, no_dist=True)
    alone, n_objects = on_ranks(1, load_objects, str(tmp_path), None)[0]
    for trusted_rank in (None, 2):
        read, handed = zip(*on_ranks(3, load_objects, str(tmp_path), trusted_rank), strict=True)
        assert alone <= sum(read) < 1.9 * alone
        assert set(handed) == {n_objects}


def load_what_is_wrong(directory: str) -> list[Verdict]:
    """A damaged tensor, and an object that one rank trusts and the other does not."""
    found = [verdict_of(load, blank(full(1)), f"{directory}/damaged")]
    for trusted_rank in range(dist.get_world_size()):  # one of them reads it
        trusted = dist.get_rank() == trusted_rank
        for planner in (RobustLoadPlanner(trusted=trusted), PairedPlanner()):  # it trusts everything, as stock's
            reader = RobustReader(f"{directory}/unsafe", share_reads=True, trusted=trusted)
            found.append(verdict_of(robust_dcp.load, {"o": None}, storage_reader=reader, planner=planner))
    return found


def test_damage_and_what_one_rank_trusts_alone_are_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    unloadable = RobustPlanner(on_unloadable_object="ignore")
    robust_dcp.save({"o": print}, checkpoint_id=tmp_path / "unsafe", planner=unloadable, no_dist=True)
    robust_dcp.save(full(1), checkpoint_id=tmp_path / "damaged", no_dist=True)
    marked = full(1)["odd"].numpy().tobytes()[1000:1064]
    (path,) = (path for path in (tmp_path / "damaged").iterdir() if marked in path.read_bytes())
    flip_bit(path, path.read_bytes().index(marked))
    outcomes = on_ranks(4, load_what_is_wrong, str(tmp_path))
    for damaged, *unsafe in outcomes:
        assert damaged.type_name == "CorruptCheckpoint" and damaged.message == outcomes[0][0].message
        assert damaged.fields["file"] == str(path) and damaged.fields["item"] == "odd at [0]"
        assert len(damaged.failed_ranks) == 1  # the rank that was to read it
        assert [each.type_name for each in unsafe] == ["UnsafeCheckpoint"] * 8


class PairedPlanner(DefaultLoadPlanner):
    """Wants to hear of each tensor, as Megatron-Core's planner does."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


def load_by_each_switch(directory: str) -> tuple[list[int], Any]:
    rank = dist.get_rank()
    shared = [load(blank(full(1)), directory, share_reads).shared_nbytes for share_reads in (None, False, True)]
    target = blank(full(1))
    shared.append(load(target, directory, planner=PairedPlanner() if rank == 1 else None).shared_nbytes)
    assert differences(full(1), target) == []
    target = blank(full(1))
    verdict = verdict_of(load, target, directory, rank == 1)
    assert not any(value.any() for value in target.values())
    return shared, verdict


@pytest.mark.parametrize(("ranks_per_node", "shares"), [("1", True), ("2", False)])
def test_by_default_reads_are_shared_between_nodes_and_another_switch_than_the_coordinators_is_named(
    ranks_per_node: str, shares: bool, tmp_path: Path
) -> None:
    robust_dcp.save(full(1), checkpoint_id=tmp_path, no_dist=True)
    outcomes = run_ranks(2, load_by_each_switch, str(tmp_path), env={RANKS_PER_NODE: ranks_per_node})
    for (by_default, off, on, with_planner_that_commits), verdict in values(outcomes):
        assert off == with_planner_that_commits == 0 < on
        assert by_default == (on if shares else 0)
        assert verdict.type_name == "PlanConflict" and verdict.fields == {"key": "share_reads", "ranks": [0, 1]}
        assert "share_reads is False on rank 0, True on rank 1" in verdict.message


def load_two_at_once(directory: Path, numels: tuple[int, int]) -> list[str]:
    def state(value: float, numel: int) -> StateDict:
        return {f"t{n}": torch.full((numel + n,), value + n) for n in range(6)}

    for number, numel in enumerate(numels):
        robust_dcp.save(state(10.0 * number, numel), checkpoint_id=directory / str(number))

    def wrong_keys(number: int) -> list[str]:
        wrong = []
        for _ in range(3):
            found, expected = state(-1.0, numels[number]), state(10.0 * number, numels[number])
            load(found, str(directory / str(number)))
            wrong += differences(expected, found)
        return wrong

    with ThreadPoolExecutor(2) as pool:
        return [each for found in pool.map(wrong_keys, range(2)) for each in found]


@pytest.mark.parametrize("numels", [(300_000, 300_000), (300_000, 100_000)])
def test_two_loads_at_once_on_one_group_get_what_was_saved(numels: tuple[int, int], tmp_path: Path) -> None:
    assert on_ranks(2, load_two_at_once, tmp_path, numels) == [[], []]
