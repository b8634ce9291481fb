"""RobustPlanner and RobustLoadPlanner under stock's save and load: what each rank gets back, and what is refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, _version

import robust_dcp
from robust_dcp import PlanConflict, RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from robust_dcp.plan.save_planner import CommittedMetadata
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.storage.index.form import MAX_NAME_NBYTES
from tests.harness.ranks import errors, on_ranks, run_ranks
from tests.harness.torch_versions import needs_use_collectives


def state() -> dict[str, Any]:
    return {f"own{dist.get_rank()}": torch.ones(2), "shared": torch.zeros(3), "step": 4}


def metadata_of_a_stock_save(path: str) -> Any:
    metadata = dcp.save(state(), storage_writer=RobustWriter(path), planner=RobustPlanner())
    data = pickle.dumps(metadata)
    again = pickle.loads(data)
    read = RobustReader(path).read_metadata()
    for found in (metadata, again):
        assert isinstance(found, CommittedMetadata)
        assert sorted(found.state_dict_metadata) == sorted(read.state_dict_metadata)
        assert dict(found.planner_data) == dict(read.planner_data)
        assert {index.fqn for index in found.storage_data} == {index.fqn for index in read.storage_data}
        assert found.storage_meta is not None and str(found.storage_meta.checkpoint_id) == path
        assert found.version == read.version
    return sorted(metadata.state_dict_metadata), len(data)


def test_the_metadata_that_stocks_save_returns_is_that_of_the_checkpoint_and_small_to_send(tmp_path: Path) -> None:
    for names, nbytes in on_ranks(2, metadata_of_a_stock_save, str(tmp_path / "1")):
        assert names == ["own0", "own1", "shared", "step"]
        assert nbytes < 500


def save_by_itself(path: str, options: dict[str, bool]) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path), planner=RobustPlanner(), **options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"no_dist": True}, "no_dist=True in a job of 2 ranks needs RobustWriter"),
        pytest.param(
            {"use_collectives": False}, "RobustPlanner plans for all ranks together", marks=needs_use_collectives
        ),
    ],
)
def test_by_stocks_writer_ranks_that_plan_together_do_not_each_save_for_themselves(
    option: dict[str, bool], words: str, tmp_path: Path
) -> None:
    caught = errors(run_ranks(2, save_by_itself, str(tmp_path / "1"), option))
    assert any(words in error.message for error in caught) and not (tmp_path / "1" / ".metadata").exists()


def test_hooks_out_of_order_are_an_error_that_names_the_one_that_is_missing() -> None:
    planner = RobustPlanner()
    with pytest.raises(robust_dcp.RobustCheckpointError, match="create_local_plan\\(\\) must be called before"):
        planner.create_global_plan([])
    loading = RobustLoadPlanner()
    loading.set_up_planner({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="was not given the checkpoint's metadata"):
        loading.create_local_plan()


def test_values_have_the_names_and_paths_that_stocks_planner_gives_them() -> None:
    weight = torch.ones(2)
    state_dict: dict[Any, Any] = {
        "model": OrderedDict({"a.b": weight, "": {"": torch.nn.Parameter(weight)}, 3: {None: weight, (1, 2): 5}}),
        "lists": [weight, {"lr": 1}, [1, [weight]], [1, 2], (weight,), None],
        "empty": [{}, [], [{}], weight],
        "objects": {"numbers": [1, 2], "texts": ["a", ["b"]], "none": None, "tuple": ({"w": weight},), "list": []},
        7: weight,
        "": {"x": weight},
    }
    stocks = DefaultSavePlanner()
    stocks.set_up_planner(state_dict)
    for planner in (RobustPlanner(), RobustLoadPlanner()):
        planner.set_up_planner(state_dict)
        assert list(planner.state_dict) == list(stocks.state_dict)
        assert planner.mappings == stocks.mappings
        assert all(value is stocks.state_dict[name] for name, value in planner.state_dict.items())


def test_keys_that_nobody_asked_for_are_listed_by_the_planner(tmp_path: Path) -> None:
    robust_dcp.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "step": 3}, checkpoint_id=tmp_path)
    planner = RobustLoadPlanner()
    dcp.load({"model": {"a": torch.zeros(2)}}, storage_reader=RobustReader(tmp_path), planner=planner)
    assert planner.unread_keys == ("model.b", "step") and planner.missing_keys == ()


def test_lists_of_checkpoints_from_before_torch_2_4_are_loaded_under_their_old_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.3 wrote a list without tensors as one object."""
    with monkeypatch.context() as patch:
        patch.setattr(_version, "_derived_version", "2_3")
        saved = {"groups": [{"lr": 0.5}, {"lr": 0.25}], "w": torch.ones(2)}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert sorted(RobustReader(tmp_path).read_metadata().state_dict_metadata) == ["groups", "w"]
    loaded = {"groups": [{"lr": 0.0}, {"lr": 0.0}], "w": torch.zeros(2)}
    robust_dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["groups"] == [{"lr": 0.5}, {"lr": 0.25}] and loaded["w"].tolist() == [1.0, 1.0]
    with pytest.raises(PlanConflict, match=r"\[5\] for 'w'"):  # what does not fit is still refused in our words
        robust_dcp.load({"groups": [{"lr": 0.0}, {"lr": 0.0}], "w": torch.zeros(5)}, checkpoint_id=tmp_path)


def test_of_a_wrapper_that_renames_all_keys_the_wrapper_is_said_once(tmp_path: Path) -> None:
    saved = {f"module.layer{n}.weight": torch.ones(2) for n in range(4)}
    robust_dcp.save(saved, checkpoint_id=tmp_path)
    with pytest.raises(PlanConflict) as caught:
        robust_dcp.load({f"layer{n}.weight": torch.ones(2) for n in range(4)}, checkpoint_id=tmp_path)
    assert str(caught.value).count("under such names as 'module.layer") == 1


@pytest.mark.parametrize("trusted", [False, True])
def test_an_object_whose_bytes_are_no_pickle_is_named_with_its_file(trusted: bool, tmp_path: Path) -> None:
    robust_dcp.save({"epoch": {"name": "x" * 50}}, checkpoint_id=tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    data = bytearray(path.read_bytes())
    place = data.index(b"x" * 50)
    data[place - 20 : place + 20] = b"\xff" * 40
    path.write_bytes(data)
    reader = RobustReader(tmp_path, verify_checksums=False, trusted=trusted)
    with pytest.raises(robust_dcp.CorruptCheckpoint) as caught:
        robust_dcp.load({"epoch": {"name": ""}}, storage_reader=reader)
    assert "epoch.name" in str(caught.value) and path.name in str(caught.value)


def test_it_is_enough_to_tell_the_reader_or_the_planner_to_trust(tmp_path: Path) -> None:
    robust_dcp.save({"own": print}, checkpoint_id=tmp_path)
    planner, reader = RobustLoadPlanner(trusted=True), RobustReader(tmp_path, trusted=True)
    for told in ({"planner": planner}, {"storage_reader": reader}):
        robust_dcp.load(loaded := {"own": None}, checkpoint_id=tmp_path, **told)
        assert loaded["own"] is print


def test_a_name_that_is_no_text_is_refused_and_shown(tmp_path: Path) -> None:
    with pytest.raises(PlanConflict) as caught:
        robust_dcp.save({"odd \udcff name": torch.arange(4.0), "w": torch.ones(2)}, checkpoint_id=tmp_path / "1")
    assert r"the name 'odd \udcff name' cannot be encoded in UTF-8" in str(caught.value)
    assert not (tmp_path / "1").exists()


def test_a_name_that_is_too_long_for_an_index_costs_the_index_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x" * (MAX_NAME_NBYTES + 1): torch.arange(4.0), "w": torch.ones(2)}
    robust_dcp.save(state, checkpoint_id=tmp_path)
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    robust_dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert not (tmp_path / INDEX_NAME).exists()
    assert "the checkpoint gets no index, so a load takes longer: names of an index have at most" in caplog.text
