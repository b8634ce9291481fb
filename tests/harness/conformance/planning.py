"""The suite for a ``SavePlanner`` and a ``LoadPlanner``: what DCP promises, whoever makes the plans."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tests.harness.conformance.round_trips import Plugins, load, rows, save, save_and_load_kind, save_and_load_step
from tests.harness.fingerprints import differences
from tests.harness.ranks import errors, run_ranks, values
from tests.harness.state_dicts import KINDS

__all__ = ["PlannerConformance"]


class PlannerConformance(Plugins):
    """Derive from it, and say how your planners are made. The class has to be one that ranks can import.

    All tests call stock's ``save`` and ``load`` in real processes on gloo, with stock's writer and reader.
    """

    def writer(self, path: Path) -> dcp.StorageWriter:
        """Stock's, if your planner does not need its own."""
        return dcp.FileSystemWriter(path)

    def reader(self, path: Path) -> dcp.StorageReader:
        """Stock's, if your planner does not need its own."""
        return dcp.FileSystemReader(path)

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_saved_is_loaded_bit_for_bit(self, kind: str, tmp_path: Path) -> None:
        for wrong in values(run_ranks(4, save_and_load_kind, self, kind, tmp_path)):
            assert wrong == []

    def test_every_element_is_written_exactly_once(self, tmp_path: Path) -> None:
        values(run_ranks(4, _save_all_layouts, self, tmp_path))
        metadata = self.reader(tmp_path).read_metadata()
        assert _gaps_and_overlaps(metadata) == []

    def test_a_key_that_comes_or_goes_between_two_saves_is_saved_or_not(self, tmp_path: Path) -> None:
        for wrong in values(run_ranks(2, _save_changing_state, self, tmp_path)):
            assert wrong == []

    def test_a_repeated_save_saves_the_new_values(self, tmp_path: Path) -> None:
        for wrong in values(run_ranks(2, _save_again, self, tmp_path)):
            assert wrong == []

    def test_a_key_that_is_not_there_is_an_error_on_all_ranks(self, tmp_path: Path) -> None:
        values(run_ranks(2, _save_again, self, tmp_path))
        for error in errors(run_ranks(2, _load_a_missing_key, self, tmp_path)):
            assert "no such key" in error.message

    def test_a_tensor_of_another_size_is_an_error_and_no_tensor_changes(self, tmp_path: Path) -> None:
        values(run_ranks(2, _save_again, self, tmp_path))
        for message, rest in values(run_ranks(2, _load_another_size, self, tmp_path)):
            assert "replicated" in message
            assert rest == [0.0]


def _save_all_layouts(plugins: PlannerConformance, path: Path) -> None:
    save(plugins, {**KINDS["dtensors"](1), **KINDS["shapes"](1)}, path)


def _gaps_and_overlaps(metadata: Metadata) -> list[str]:
    """Tensors of which not every element stands in exactly one chunk, and chunks that were not written, once."""
    wrong = []
    written = Counter((index.fqn, tuple(index.offset or ())) for index in metadata.storage_data or {})
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        times = torch.zeros(entry.size, dtype=torch.int32)
        for chunk in entry.chunks:
            ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            times[tuple(slice(start, end) for start, end in zip(chunk.offsets, ends, strict=True))] += 1
            if written[name, tuple(chunk.offsets)] != 1:
                wrong.append(f"{name}: chunk {tuple(chunk.offsets)} has {written[name, tuple(chunk.offsets)]} places")
        if not bool((times == 1).all()):
            wrong.append(f"{name}: elements are written {sorted(set(times.flatten().tolist()))} times")
    return wrong


def _save_changing_state(plugins: PlannerConformance, path: Path) -> list[str]:
    """One planner, as a training loop keeps it; a rank's state grows, changes its shape, and shrinks again."""
    planner, rank = plugins.save_planner(), dist.get_rank()
    states: list[dict[str, Any]] = [
        rows(1),
        {**rows(2), f"new on rank {rank}": torch.full((3,), 2.0)},
        {**rows(3), f"new on rank {rank}": torch.full((3 + rank,), 3.0)},
        rows(4),
    ]
    wrong = []
    for step, state_dict in enumerate(states):
        place = path / str(step)
        dcp.save(state_dict, storage_writer=plugins.writer(place), planner=planner)
        found = {**rows(-1), **{key: torch.zeros_like(state_dict[key]) for key in state_dict if key not in rows(1)}}
        load(plugins, found, place)
        wrong += [f"save {step}: {each}" for each in differences(state_dict, found)]
        names = {name for name in plugins.reader(place).read_metadata().state_dict_metadata if "new" in name}
        expected = {f"new on rank {each}" for each in range(dist.get_world_size())} if len(state_dict) > 3 else set()
        wrong += [] if names == expected else [f"save {step}: it names {names}, not {expected}"]
    return wrong


def _save_again(plugins: PlannerConformance, path: Path) -> list[str]:
    planner = plugins.save_planner()
    wrong = []
    for step in (1, 2, 3):
        place = path / str(step)
        dcp.save(rows(step), storage_writer=plugins.writer(place), planner=planner)
        wrong += [f"save {step}: {each}" for each in save_and_load_step(plugins, place, None, step)]
    return wrong


def _load_a_missing_key(plugins: PlannerConformance, path: Path) -> None:
    load(plugins, {**rows(-1), "no such key": torch.zeros(2)}, path / "1")


def _load_another_size(plugins: PlannerConformance, path: Path) -> tuple[str, list[float]]:
    found = {"replicated": torch.zeros(7), "rows": rows(0)["rows"]}
    before = torch.zeros(1)
    found["rows"].to_local().zero_()
    try:
        load(plugins, found, path / "1")
    except BaseException as error:  # stock's CheckpointException is no Exception
        return f"{error}", (found["rows"].to_local().abs().sum().reshape(1) + before).tolist()
    return "nothing was raised", []
