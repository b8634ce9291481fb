"""Our plugins pass the suites."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp

from robust_dcp import RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from tests.harness.conformance import DurabilityConformance, PlannerConformance, StorageConformance


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
