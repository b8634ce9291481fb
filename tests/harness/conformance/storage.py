"""The suite for a ``StorageWriter`` and a ``StorageReader``: what DCP promises, whoever writes the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.harness.conformance.round_trips import Plugins, load, rows, save, save_and_load_kind, save_and_load_step
from tests.harness.ranks import errors, run_ranks, values
from tests.harness.state_dicts import KINDS

__all__ = ["StorageConformance"]


class StorageConformance(Plugins):
    """Derive from it, and say how your writer and your reader are made. The class has to be one that ranks can import.

    All tests call stock's ``save`` and ``load`` in real processes on gloo, with stock's planners.
    """

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_saved_is_loaded_bit_for_bit(self, kind: str, tmp_path: Path) -> None:
        for wrong in values(run_ranks(4, save_and_load_kind, self, kind, tmp_path)):
            assert wrong == []

    @pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 3), (3, 1), (1, 4)])
    def test_a_checkpoint_is_loaded_by_another_number_of_ranks(self, savers: int, loaders: int, tmp_path: Path) -> None:
        values(run_ranks(savers, _save, self, tmp_path))
        for wrong in values(run_ranks(loaders, save_and_load_step, self, tmp_path, None, 1)):
            assert wrong == []

    def test_only_what_is_asked_for_is_loaded(self, tmp_path: Path) -> None:
        values(run_ranks(2, _save, self, tmp_path))
        for found in values(run_ranks(2, _load_one_key, self, tmp_path)):
            assert found == [1.0] * 5

    def test_checkpoints_beside_each_other_are_not_mixed(self, tmp_path: Path) -> None:
        for wrong in values(run_ranks(2, _save_two, self, tmp_path)):
            assert wrong == []

    def test_a_writer_and_a_reader_may_be_given_another_directory(self, tmp_path: Path) -> None:
        for wrong in values(run_ranks(2, _save_by_one_writer, self, tmp_path)):
            assert wrong == []

    def test_a_key_that_is_not_there_is_an_error_on_all_ranks(self, tmp_path: Path) -> None:
        values(run_ranks(2, _save, self, tmp_path))
        for error in errors(run_ranks(2, _load_a_missing_key, self, tmp_path)):
            assert "no such key" in error.message

    def test_a_rank_that_cannot_write_is_an_error_on_all_ranks(self, tmp_path: Path) -> None:
        for error in errors(run_ranks(2, _save_while_one_fails, self, tmp_path)):
            assert "this object cannot be pickled" in error.traceback_text

    def test_the_metadata_names_all_that_was_saved(self, tmp_path: Path) -> None:
        values(run_ranks(2, _save, self, tmp_path))
        metadata = self.reader(tmp_path).read_metadata()
        assert set(metadata.state_dict_metadata) == {"rows", "replicated", "step"}
        assert {index.fqn for index in metadata.storage_data or {}} == {"rows", "replicated", "step"}


def _save(plugins: StorageConformance, path: Path, step: int = 1) -> None:
    save(plugins, rows(step), path)


def _load_one_key(plugins: StorageConformance, path: Path) -> list[float]:
    found = {"replicated": torch.zeros(5)}
    load(plugins, found, path)
    return found["replicated"].tolist()


def _save_two(plugins: StorageConformance, path: Path) -> list[str]:
    for step in (1, 2):
        save(plugins, rows(step), path / str(step))
    return [wrong for step in (1, 2) for wrong in save_and_load_step(plugins, path / str(step), None, step)]


def _save_by_one_writer(plugins: StorageConformance, path: Path) -> list[str]:
    writer, reader = plugins.writer(path / "1"), plugins.reader(path / "1")
    for step in (1, 2):
        dcp.save(rows(step), checkpoint_id=path / str(step), storage_writer=writer, planner=plugins.save_planner())
    wrong = []
    for step in (1, 2):
        found = rows(-1)
        dcp.load(found, checkpoint_id=path / str(step), storage_reader=reader, planner=plugins.load_planner())
        wrong += [] if found["step"] == step and found["replicated"][0] == step else [f"step {step}: {found}"]
    return wrong


def _load_a_missing_key(plugins: StorageConformance, path: Path) -> None:
    load(plugins, {**rows(-1), "no such key": torch.zeros(2)}, path)


class _CannotBePickled:
    """An object that cannot be written."""

    def __reduce__(self) -> str:
        raise OSError("this object cannot be pickled")


def _save_while_one_fails(plugins: StorageConformance, path: Path) -> None:
    rank = dist.get_rank()
    save(plugins, {**rows(1), f"own {rank}": _CannotBePickled() if rank == 1 else rank}, path)
