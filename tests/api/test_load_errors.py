"""A load that does not fit, or that meets damage, is one error on all ranks, and changes nothing that it need not."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import robust_dcp
from robust_dcp import RobustLoadPlanner, RobustReader
from robust_dcp.comm import patience
from robust_dcp.storage.metadata.metadata_file import encode_metadata
from robust_dcp.storage.records.torch_zip import record_template
from tests.api.test_cached_plans import blank
from tests.api.test_failures import Broken
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.fingerprints import fingerprint
from tests.harness.ranks import in_ranks, run_ranks, values

StateDict = dict[str, Any]


def saved_state() -> StateDict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "weight": torch.arange(400_000, dtype=torch.float32),
        "nested": {"bias": torch.arange(7, dtype=torch.int32), "lr": 0.5},
        f"own{rank}": torch.full((100,), float(rank)),
        "text": "saved",
    }


def other_shape(state_dict: StateDict) -> None:
    state_dict["nested"]["bias"] = torch.zeros(8, dtype=torch.int32)


def other_dtype(state_dict: StateDict) -> None:
    state_dict["weight"] = torch.zeros(400_000, dtype=torch.float64)


def missing_key(state_dict: StateDict) -> None:
    state_dict["nested"]["biass"] = torch.zeros(7, dtype=torch.int32)


def tensor_for_object(state_dict: StateDict) -> None:
    state_dict["text"] = torch.zeros(2)


def object_for_tensor(state_dict: StateDict) -> None:
    state_dict["weight"] = "text"


def many_problems(state_dict: StateDict) -> None:
    other_shape(state_dict)
    other_dtype(state_dict)
    state_dict |= {f"new{n}": torch.zeros(1) for n in range(30)}


MISFITS = {
    other_shape: ["nested.bias", "[8]", "[7]"],
    other_dtype: ["weight", "float64", "float32", "cast"],
    missing_key: ["nested.biass", "Missing key in checkpoint", "nested.bias'"],
    tensor_for_object: ["text", "tensor", "object"],
    object_for_tensor: ["weight", "str", "tensor"],
    many_problems: ["new0", "32 problem", "more"],
}


def load_what_does_not_fit(directory: str) -> list[tuple[str, Verdict]]:
    robust_dcp.save(saved_state(), checkpoint_id=directory)
    found = []
    for misfit in MISFITS:
        for culprits in ((0, 1, 2), (1,)):
            state_dict = blank(saved_state())
            if dist.get_rank() in culprits:
                misfit(state_dict)
            before = fingerprint(state_dict)
            verdict = verdict_of(robust_dcp.load, state_dict, checkpoint_id=directory)
            assert fingerprint(state_dict) == before, misfit
            assert verdict.failed_ranks == culprits, verdict
            found.append((misfit.__name__, verdict))
    return found


def test_what_does_not_fit_is_one_error_on_all_ranks_and_nothing_is_modified(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, load_what_does_not_fit, str(tmp_path / "checkpoint")))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    words = {misfit.__name__: each for misfit, each in MISFITS.items()}
    for misfit, verdict in outcomes[0]:
        assert verdict.type_name == "PlanConflict"
        assert all(word in verdict.message for word in words[misfit]), verdict


def load_with_options(directory: str) -> None:
    robust_dcp.save(saved_state(), checkpoint_id=directory)
    state_dict: StateDict = {"weight": torch.zeros(400_000, dtype=torch.float64)}
    robust_dcp.load(state_dict, checkpoint_id=directory, planner=RobustLoadPlanner(on_dtype_mismatch="cast"))
    assert torch.equal(state_dict["weight"], torch.arange(400_000, dtype=torch.float64))
    state_dict = {"new": torch.full((2,), 3.0), "text": "", "new object": "kept"}
    report = robust_dcp.load(state_dict, checkpoint_id=directory, planner=RobustLoadPlanner(allow_partial_load=True))
    assert state_dict["new"].tolist() == [3.0, 3.0]
    assert state_dict["text"] == "saved" and state_dict["new object"] == "kept"
    assert report.missing_keys == ("new", "new object")
    assert "weight" in report.unread_keys and report.items == 1


def test_casts_and_partial_loads_are_done_on_request(tmp_path: Path) -> None:
    values(in_ranks(2, load_with_options, str(tmp_path / "checkpoint")))


def load_broken_stateful(directory: str) -> list[Verdict]:
    robust_dcp.save({"broken": {"w": torch.full((2,), 3.0)}, "other": torch.ones(1)}, checkpoint_id=directory)
    verdicts = []
    for rank in (0, 1):
        state_dict: StateDict = {"broken": Broken(rank), "other": torch.zeros(1)}
        verdicts.append(verdict_of(robust_dcp.load, state_dict, checkpoint_id=directory))
        assert state_dict["other"].item() == 0
    return verdicts


def test_a_stateful_that_raises_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    outcomes = values(in_ranks(2, load_broken_stateful, str(tmp_path / "checkpoint")))
    assert outcomes[0] == outcomes[1]
    for rank, verdict in enumerate(outcomes[0]):
        assert verdict.type_name == "RobustCheckpointError" and verdict.failed_ranks == (rank,)
        assert "lost its state" in verdict.failures


def keep_objects_unflattened(directory: str) -> StateDict:
    state_dict = {"text": "saved", "nested": {"deep": (1, 2)}, "w": torch.ones(2)}
    robust_dcp.save(state_dict, checkpoint_id=directory, planner=robust_dcp.RobustPlanner(flatten_state_dict=False))
    target = {"text": "", "nested": {"deep": ()}, "w": torch.zeros(2)}
    robust_dcp.load(target, checkpoint_id=directory, planner=RobustLoadPlanner(flatten_state_dict=False))
    return target


def test_objects_are_loaded_without_flattening_too(tmp_path: Path) -> None:
    (found,) = values(run_ranks(1, keep_objects_unflattened, str(tmp_path), init=False))
    assert found["text"] == "saved" and found["nested"] == {"deep": (1, 2)} and found["w"].tolist() == [1, 1]


# Damage.


def save_here(directory: str) -> None:
    robust_dcp.save(saved_state(), checkpoint_id=directory)


def load_here(directory: str, keys: list[str], loader: str = "ours") -> Verdict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    full = blank(saved_state())
    wanted = [key.replace("own", f"own{rank}") for key in keys] or list(full)
    state_dict = {key: full[key] for key in wanted}
    if loader == "stock":
        return verdict_of(lambda: [dcp.load(state_dict, checkpoint_id=directory), state_dict][1])
    return verdict_of(lambda: [robust_dcp.load(state_dict, checkpoint_id=directory), state_dict][1])


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def place_of(directory: str, fqn: str) -> tuple[str, int, int]:
    """(file, offset, length) of an item."""
    for index, info in RobustReader(directory).read_metadata().storage_data.items():
        if index.fqn == fqn:
            return os.path.join(directory, info.relative_path), info.offset, info.length
    raise KeyError(fqn)


def test_a_flipped_byte_of_one_ranks_data_is_corrupt_on_all_ranks(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    values(in_ranks(2, save_here, directory))
    file, offset, length = place_of(directory, "own1")
    template = record_template(torch.float32, (100,))
    assert template is not None and template.nbytes == length
    flip(file, offset + template.header_nbytes + 10)
    for verdict in values(in_ranks(2, load_here, directory, [])):
        assert verdict.type_name == "CorruptCheckpoint" and verdict.failed_ranks == (1,)
        assert verdict.fields["item"].startswith("own1") and verdict.fields["file"] == file
    # What is not damaged still loads.
    for verdict in values(in_ranks(2, load_here, directory, ["weight", "nested", "text"])):
        assert verdict.type_name == ""


def change_metadata(directory: str, change: Any) -> None:
    metadata = copy.deepcopy(RobustReader(directory).read_metadata())  # what the index says cannot be changed
    change(metadata)
    Path(directory, ".metadata").write_bytes(encode_metadata(metadata))


def climb_out(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../elsewhere/" + info.relative_path)


def drop_a_chunk(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["weight"]
    entry.chunks[0] = type(entry.chunks[0])(offsets=torch.Size([0]), sizes=torch.Size([399_999]))


def forget_where(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "weight")]


def point_elsewhere(metadata: Any) -> None:
    places = metadata.storage_data
    index = next(index for index in places if index.fqn == "weight")
    other: MetadataIndex = next(index for index in places if index.fqn == "own0")
    places[index] = places[other]


@pytest.mark.parametrize(
    ("change", "type_name", "words"),
    [
        (climb_out, "UnsafeCheckpoint", '".."'),
        (drop_a_chunk, "CorruptCheckpoint", "weight"),
        (forget_where, "CorruptCheckpoint", "weight"),
        (point_elsewhere, "CorruptCheckpoint", "weight"),
    ],
)
def test_metadata_that_lies_is_refused_on_all_ranks(change: Any, type_name: str, words: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    values(in_ranks(2, save_here, directory))
    # The metadata of a path that climbs out cannot even be decoded, so it is made with the real files in that place.
    os.rename(directory, tmp_path / "elsewhere")
    directory = str(tmp_path / "elsewhere")
    change_metadata(directory, change)
    for verdict in values(in_ranks(2, load_here, directory, [])):
        assert verdict.type_name == type_name, verdict
        assert words in verdict.message


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def save_a_payload(directory: str, mark: str) -> None:
    dcp.save({"object": Payload(mark), "w": torch.ones(2)}, checkpoint_id=directory)


def load_the_payload(directory: str, loader: str) -> Verdict:
    state_dict = {"object": None, "w": torch.zeros(2)}
    load = dcp.load if loader == "stock" else robust_dcp.load
    reader = RobustReader(directory) if loader == "stock + reader" else None
    if reader is not None:
        return verdict_of(dcp.load, state_dict, storage_reader=reader)
    return verdict_of(load, state_dict, checkpoint_id=directory)


@pytest.mark.parametrize("where", ["object", "metadata"])
def test_a_payload_runs_in_stock_and_never_in_ours(where: str, tmp_path: Path) -> None:
    directory, mark = str(tmp_path / "checkpoint"), str(tmp_path / "it ran")
    values(run_ranks(1, save_a_payload, directory, mark, init=False))
    if where == "metadata":
        Path(directory, ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    for loader in ("ours", "stock + reader"):
        for verdict in values(in_ranks(2, load_the_payload, directory, loader)):
            assert "UnsafeCheckpoint" in verdict.type_name + verdict.message, verdict
            assert "add_safe_globals" in verdict.message
        assert not os.path.exists(mark)
    values(run_ranks(1, load_the_payload, directory, "stock", init=False))
    assert os.path.exists(mark)


def test_a_directory_without_a_checkpoint_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, load_here, str(tmp_path), [])):
        assert verdict.type_name == "StorageError" and "no checkpoint was committed" in verdict.message


def load_from_two_places(directory: str) -> Verdict:
    patience.ELSEWHERE_SECONDS = 2.0
    return verdict_of(
        robust_dcp.load, saved_state(), checkpoint_id=f"{directory}/{dist.get_rank()}", timeout_seconds=20
    )


def test_ranks_that_load_from_different_places_are_told(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, load_from_two_places, str(tmp_path))):
        assert verdict.type_name == "ExchangeError"
        assert f"{tmp_path}/0" in verdict.message and f"{tmp_path}/1" in verdict.message
