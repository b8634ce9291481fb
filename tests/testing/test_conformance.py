"""Our plugins pass the suites; stock's pass what DCP promises; what breaks a promise does not pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from robust_dcp import RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from robust_dcp.testing.conformance import DurabilityConformance, PlannerConformance, StorageConformance


class TestOurStorage(StorageConformance):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return RobustWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return RobustReader(path)


class TestOurPlanners(PlannerConformance):
    def save_planner(self) -> dcp.SavePlanner:
        return RobustPlanner()

    def load_planner(self) -> dcp.LoadPlanner:
        return RobustLoadPlanner()


class TestOurDurability(DurabilityConformance):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return RobustWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return RobustReader(path)


class TestStocksStorage(StorageConformance):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return dcp.FileSystemReader(path)


class TestStocksPlanners(PlannerConformance):
    pass


class StocksDurability(DurabilityConformance):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return dcp.FileSystemReader(path)


@pytest.mark.parametrize(
    "promise",
    [
        StocksDurability.test_killed_before_any_file_call_the_old_or_the_new_checkpoint_is_there,
        StocksDurability.test_a_save_that_fails_leaves_the_checkpoint_that_was_there,
        StocksDurability.test_a_flipped_bit_is_found_or_does_no_harm,
    ],
)
def test_stock_is_neither_whole_nor_not_there(promise: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        promise(StocksDurability(), tmp_path)


class ForgetfulPlanner(dcp.DefaultSavePlanner):
    """Keeps its first plan, as a cached plan that nobody proves."""

    first: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.first = self.first or plan
        return self.first


class Forgetful(PlannerConformance):
    def save_planner(self) -> dcp.SavePlanner:
        return ForgetfulPlanner()


def test_a_planner_that_drops_what_is_new_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="new on rank"):
        Forgetful().test_a_key_that_comes_or_goes_between_two_saves_is_saved_or_not(tmp_path)


class WritesTwicePlanner(dcp.DefaultSavePlanner):
    """Does not know that copies are copies."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        entry = metadata.state_dict_metadata["replicated"]
        entry.chunks = entry.chunks * 2
        return plans, metadata


class WritesTwice(PlannerConformance):
    def save_planner(self) -> dcp.SavePlanner:
        return WritesTwicePlanner()


def test_a_planner_that_writes_an_element_twice_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="replicated"):
        WritesTwice().test_every_element_is_written_exactly_once(tmp_path)


class ReadsZeros(StorageConformance):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return ZerosReader(path)


class ZerosReader(dcp.FileSystemReader):
    """Forgets what it has read."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        planner.commit_tensor = lambda item, tensor: tensor.zero_()
        return super().read_data(plan, planner)


def test_a_reader_that_gives_zeros_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected"):
        ReadsZeros().test_what_is_saved_is_loaded_bit_for_bit("plain", tmp_path)


class NeverSyncs(StocksDurability):
    def writer(self, path: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(path, sync_files=False)


def test_a_writer_that_does_not_sync_its_files_does_not_pass(tmp_path: Path) -> None:
    StocksDurability().test_a_save_that_returns_has_synced_its_files(tmp_path / "stock")
    with pytest.raises(AssertionError, match=r"may lose .*\.distcp: call os\.fsync"):
        NeverSyncs().test_a_save_that_returns_has_synced_its_files(tmp_path / "never")


class LosesARecord(StorageConformance):
    """Rank 1 does not write the last of its items."""

    def writer(self, path: Path) -> dcp.StorageWriter:
        return LosingWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return dcp.FileSystemReader(path)


class LosingWriter(dcp.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Any:
        items = plan.items[:-1] if dist.get_rank() == 1 else plan.items
        return super().write_data(replace(plan, items=items), planner)


def test_a_writer_that_loses_a_record_does_not_pass_and_the_record_is_named_in_a_few_lines(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"raised on ranks \[.*KeyError: MetadataIndex") as failed:
        LosesARecord().test_what_is_saved_is_loaded_bit_for_bit("shapes", tmp_path)
    assert len(str(failed.value).splitlines()) < 20


class SwapsShards(StorageConformance):
    """Gives two shards of equal size each other's places."""

    def writer(self, path: Path) -> dcp.StorageWriter:
        return SwappingWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return dcp.FileSystemReader(path)


class SwappingWriter(dcp.FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        flat = [result for of_rank in results for result in of_rank]
        one, other = (n for n, result in enumerate(flat) if result.index.fqn == "rows")
        places = flat[one].storage_data, flat[other].storage_data
        flat[one], flat[other] = (
            replace(flat[one], storage_data=places[1]),
            replace(flat[other], storage_data=places[0]),
        )
        super().finish(metadata, [flat])


def test_a_writer_that_swaps_two_shards_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="/'rows': expected"):
        SwapsShards().test_a_checkpoint_is_loaded_by_another_number_of_ranks(2, 3, tmp_path)


class IgnoresOffsets(StorageConformance):
    """Reads each slice from the beginning of its record."""

    def writer(self, path: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        return FromTheBeginning(path)


class FromTheBeginning(dcp.FileSystemReader):
    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        items = [replace(item, storage_offsets=torch.Size([0] * len(item.storage_offsets))) for item in plan.items]
        return super().read_data(replace(plan, items=items), planner)


def test_a_reader_that_ignores_offsets_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="/'rows': expected"):
        IgnoresOffsets().test_a_checkpoint_is_loaded_by_another_number_of_ranks(2, 3, tmp_path)


class MetadataFirst(StocksDurability):
    """Gives its data files their names when ``.metadata`` is there already."""

    def writer(self, path: Path) -> dcp.StorageWriter:
        return MetadataFirstWriter(path)


class MetadataFirstWriter(dcp.FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        names = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        for name in names:
            (Path(self.path) / name).rename(Path(self.path) / f"{name}.new")
        super().finish(metadata, results)
        for name in names:
            (Path(self.path) / f"{name}.new").rename(Path(self.path) / name)


def test_a_writer_that_commits_before_its_data_is_there_does_not_pass_and_the_call_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"killed before its call \d+ of \d+, [a-z.]+ .*: the directory loads as"):
        MetadataFirst().test_killed_before_any_file_call_the_old_or_the_new_checkpoint_is_there(tmp_path)
