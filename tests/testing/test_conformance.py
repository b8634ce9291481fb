"""Our plugins pass the suites; stock's pass what DCP promises; what breaks a promise does not pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
