"""What ranks cannot save or load together is one error on all of them, in words, before anything is changed."""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import robust_dcp
from robust_dcp import PlanConflict, RobustLoadPlanner, RobustPlanner, RobustWriter
from tests.faults.disk import FaultDisk
from tests.harness.fingerprints import fingerprint
from tests.harness.ranks import in_ranks, values
from tests.harness.verdicts import Verdict, verdict_of

StateDict = dict[str, Any]


# --- saves ------------------------------------------------------------------------------------------------------------


def partial(rank: int) -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}


def partial_in_one_dimension(rank: int) -> StateDict:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    return {"deep": {"w": DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()])}}


def shard_is_missing(rank: int) -> StateDict:
    shards = [LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)]
    sharded = init_from_local_shards(shards, 2 * dist.get_world_size(), 3)
    return {"w": sharded} if rank != 1 else {"other": 1}


def one_name_by_two_paths(rank: int) -> StateDict:
    return {"a.w": torch.ones(2)} if rank == 0 else {"a": {"w": torch.ones(2)}}


def one_name_twice(rank: int) -> StateDict:
    return {"w": torch.ones(2)} if rank == 0 else {"a.w": torch.ones(2), "a": {"w": torch.ones(2)}}


CONFLICTS: dict[str, tuple[Callable[[int], StateDict], str, list[str]]] = {
    # state dict of a rank, key of the conflict, words of the message
    "tensor and object": (lambda rank: {"w": torch.ones(2) if rank else "text"}, "w", ["object", "float32"]),
    "shapes": (lambda rank: {"w": torch.ones(2 + rank)}, "w", ["[2]", "[3]"]),
    "dimensions": (lambda rank: {"w": torch.ones((2,) * (1 + rank))}, "w", ["[2]", "[2, 2]"]),
    "dtypes": (lambda rank: {"w": torch.ones(2).to([torch.float32, torch.int32, torch.bool][rank])}, "w", ["int32"]),
    "Partial": (partial, "w", ["Partial", "redistribute"]),
    "Partial in one dimension": (partial_in_one_dimension, "deep.w", ["Partial"]),
    "a shard that nobody passed": (shard_is_missing, "w", ["gap"]),
    "one name by two paths": (one_name_by_two_paths, "a.w", ["flattened"]),
    "one name twice on a rank": (one_name_twice, "a.w", ["flatten to the name"]),
}


def run_into_conflicts(directory: str) -> list[tuple[str, Verdict]]:
    found = []
    robust_dcp.save({"good": torch.ones(3)}, checkpoint_id=directory)
    dist.barrier()  # the coordinator has tidied up
    files = sorted(os.listdir(directory))
    for case, (make, _, _) in CONFLICTS.items():
        dist.barrier()
        found.append((case, verdict_of(robust_dcp.save, make(dist.get_rank()), checkpoint_id=directory)))
        writer, planner = RobustWriter(directory), RobustPlanner()
        stock = verdict_of(dcp.save, make(dist.get_rank()), storage_writer=writer, planner=planner, no_dist=True)
        assert stock.type_name == "CheckpointException", case
        assert f"{found[-1][1].type_name}: {found[-1][1].message.partition(chr(10))[0][:60]}" in stock.message, case
        dist.barrier()
        assert sorted(os.listdir(directory)) == files
    target = {"good": torch.zeros(3)}
    dcp.load(target, checkpoint_id=directory)
    assert target["good"].all()
    return found


def test_contradictions_name_the_key_on_all_ranks(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, run_into_conflicts, str(tmp_path / "checkpoint")))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for case, verdict in outcomes[0]:
        _, key, words = CONFLICTS[case]
        assert (verdict.type_name, verdict.fields["key"]) == ("PlanConflict", key), (case, verdict)
        assert all(word in verdict.message + verdict.failures for word in words), (case, verdict)


class Own:
    """Not data: it could have any code."""


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def save_unloadable(directory: str, mode: Any) -> tuple[list[list[str]], Verdict | None]:
    """The warnings of two saves."""
    rank, found = dist.get_rank(), []
    state = {"w": torch.ones(3), f"own {rank}": Own(), "common": Own(), "plain": (1, "a")}
    planner = RobustPlanner(on_unloadable_object=mode, on_structure_change="quiet", on_replica_mismatch="ignore")
    for step in range(2):
        handler = Warnings()
        logging.getLogger("robust_dcp").addHandler(handler)
        verdict = verdict_of(robust_dcp.save, state, checkpoint_id=f"{directory}/{step}", planner=planner)
        logging.getLogger("robust_dcp").removeHandler(handler)
        found.append([message for message in handler.messages if "refuses" in message])
    dist.barrier()
    return found, verdict if mode == "error" else None


@pytest.mark.parametrize("mode", ["warn", "ignore", "error"])
def test_what_a_load_would_refuse_is_told_by_the_save_once_for_all_ranks(mode: str, tmp_path: Path) -> None:
    outcomes = values(in_ranks(2, save_unloadable, str(tmp_path / "c"), mode))
    if mode == "warn":
        told, by_others = (told for told, _ in outcomes)
        assert by_others == [[], []]
        for (message,) in told:  # the plan of the second save is reused
            for word in ("3 object(s)", "'own 0'", "'own 1'", "'common'", "Own", "rank 1", "add_safe_globals"):
                assert word in message
            assert "'plain'" not in message
        return
    assert [told for told, _ in outcomes] == [[[], []]] * 2
    one, other = (verdict for _, verdict in outcomes)
    assert one == other
    if one is not None:
        assert one.type_name == "UnsafeCheckpoint" and "own" in one.message and "Own" in one.message
        assert not (tmp_path / "c").exists()


def test_the_report_says_what_cannot_be_loaded_and_a_registered_class_can(tmp_path: Path) -> None:
    report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert report.unloadable_objects.keys() == {"own"}
    with torch.serialization.safe_globals([Own]):
        report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert report.unloadable_objects == {}


class Interrupted(RobustPlanner):
    """Ctrl-C on rank 1 while it writes."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return super().resolve_data(write_item)


def interrupt_one_rank(directory: str) -> tuple[str, str]:
    state = {f"w{dist.get_rank()}": torch.ones(400_000)}
    try:
        robust_dcp.save(state, checkpoint_id=directory, planner=Interrupted(), timeout_seconds=20)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ctrl_c_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    other, interrupted = values(in_ranks(2, interrupt_one_rank, str(tmp_path)))
    assert interrupted[0] == "KeyboardInterrupt"
    assert other[0] == "RobustCheckpointError" and "KeyboardInterrupt" in other[1]
    assert os.listdir(tmp_path) == []


# --- saves and loads --------------------------------------------------------------------------------------------------


def go_to_two_places(directory: str) -> Verdict:
    path = f"{directory}/{dist.get_rank()}"
    return verdict_of(robust_dcp.save, {"w": torch.ones(3)}, checkpoint_id=path, timeout_seconds=20)


def test_ranks_that_go_to_different_places_are_told(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, go_to_two_places, str(tmp_path))):
        assert verdict.type_name == "ExchangeError"
        assert f"{tmp_path}/0" in verdict.message and f"{tmp_path}/1" in verdict.message
    assert os.listdir(tmp_path) == []


def pass_what_is_no_dict(directory: str) -> list[list[str]]:
    module = torch.nn.Linear(2, 2)
    found = []
    robust_dcp.save({"model": module}, checkpoint_id=directory)
    for value in (module, torch.optim.SGD(module.parameters()), [torch.ones(2)], None, torch.ones(2)):
        # On one rank only, too: the others are not left waiting.
        for state_dict in (value, value if dist.get_rank() == 1 else {"model": module}):
            for call in (robust_dcp.save, robust_dcp.load):
                verdict = verdict_of(call, state_dict, checkpoint_id=directory, timeout_seconds=20)
                found.append([type(value).__name__, verdict.type_name, verdict.message])
    robust_dcp.load({"model": module}, checkpoint_id=directory)  # what the message says works
    return found


def test_what_is_no_dict_is_refused_on_all_ranks_with_what_to_pass(tmp_path: Path) -> None:
    first, second = values(in_ranks(2, pass_what_is_no_dict, str(tmp_path / "checkpoint")))
    assert first == second
    for kind, type_name, message in first:
        assert type_name == "RobustCheckpointError" and f"a {kind} was passed" in message
        assert ('{"model": model}' if kind in ("Linear", "SGD") else '{"name": value}') in message


class OtherPlanner(dcp.DefaultSavePlanner):
    pass


@pytest.mark.parametrize(
    ("options", "expected", "words"),
    [
        ({"storage_writer": dcp.FileSystemWriter("x"), "checkpoint_id": "x"}, TypeError, "FileSystemWriter"),
        ({"planner": OtherPlanner(), "checkpoint_id": "x"}, TypeError, "RobustPlanner"),
        ({}, ValueError, "checkpoint_id"),
        ({"checkpoint_id": "file/1"}, OSError, "directory"),
        ({"storage_writer": RobustWriter("saved", overwrite=False)}, OSError, "overwrite=False"),
    ],
)
def test_a_save_that_cannot_work_says_what_to_pass(
    options: Any, expected: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    robust_dcp.save({"w": torch.ones(2)}, checkpoint_id="saved")
    Path("file").touch()
    with pytest.raises(expected, match=words):
        robust_dcp.save({"w": torch.ones(2)}, **options)


@pytest.mark.parametrize("wrong", ["on_structure_change", "on_replica_mismatch", "on_unloadable_object"])
def test_an_unknown_option_is_refused_with_those_that_exist(wrong: str) -> None:
    with pytest.raises(ValueError, match='"error"'):
        RobustPlanner(**{wrong: "explode"})  # type: ignore[arg-type]


# --- loads ------------------------------------------------------------------------------------------------------------


def saved_state() -> StateDict:
    return {
        "weight": torch.arange(400_000, dtype=torch.float32),
        "nested": {"bias": torch.arange(7, dtype=torch.int32), "lr": 0.5},
        f"own{dist.get_rank()}": torch.full((100,), float(dist.get_rank())),
        "text": "saved",
    }


def misfit(state_dict: StateDict, kind: str) -> None:
    if kind in ("other shape", "many"):
        state_dict["nested"]["bias"] = torch.zeros(8, dtype=torch.int32)
    if kind in ("other dtype", "many"):
        state_dict["weight"] = torch.zeros(400_000, dtype=torch.float64)
    if kind == "missing key":
        state_dict["nested"]["biass"] = torch.zeros(7, dtype=torch.int32)
    if kind == "tensor for object":
        state_dict["text"] = torch.zeros(2)
    if kind == "object for tensor":
        state_dict["weight"] = "text"
    if kind == "many":
        state_dict |= {f"new{n}": torch.zeros(1) for n in range(30)}


MISFITS = {
    "other shape": ["nested.bias", "[8]", "[7]"],
    "other dtype": ["weight", "float64", "float32", "cast"],
    "missing key": ["nested.biass", "Missing key in checkpoint", "nested.bias'"],
    "tensor for object": ["text", "tensor", "object"],
    "object for tensor": ["weight", "str", "tensor"],
    "many": ["new0", "32 problem", "more"],
}


def load_what_does_not_fit(directory: str) -> list[tuple[str, Verdict]]:
    robust_dcp.save(saved_state(), checkpoint_id=directory)
    found = []
    for kind in MISFITS:
        for culprits in ((0, 1, 2), (1,)):
            state_dict = saved_state()
            if dist.get_rank() in culprits:
                misfit(state_dict, kind)
            before = fingerprint(state_dict)
            verdict = verdict_of(robust_dcp.load, state_dict, checkpoint_id=directory)
            assert fingerprint(state_dict) == before, kind
            assert verdict.failed_ranks == culprits, verdict
            found.append((kind, verdict))
    return found


def test_what_does_not_fit_is_one_error_on_all_ranks_and_nothing_is_modified(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, load_what_does_not_fit, str(tmp_path / "checkpoint")))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for kind, verdict in outcomes[0]:
        assert verdict.type_name == "PlanConflict"
        assert all(word in verdict.message for word in MISFITS[kind]), verdict


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


class Broken:
    """A ``Stateful`` that raises on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> StateDict:
        if dist.get_rank() == self.rank:
            raise LookupError("this rank has lost its state")
        return {"w": torch.ones(2)}

    def load_state_dict(self, state_dict: StateDict) -> None: ...


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


def load_nothing(directory: str) -> Verdict:
    return verdict_of(robust_dcp.load, saved_state(), checkpoint_id=directory)


def test_a_directory_without_a_checkpoint_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, load_nothing, str(tmp_path))):
        assert verdict.type_name == "StorageError" and "no checkpoint was committed" in verdict.message


def load_torch_save_file(path: str) -> torch.Tensor:
    state = {"w": torch.zeros(4)}
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    robust_dcp.load(state, storage_reader=reader, planner=planner, checkpoint_id=path)
    return state["w"]


def test_a_reader_that_takes_no_more_than_the_first_torch_asked_for_is_used(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "model.pt")
    for loaded in values(in_ranks(2, load_torch_save_file, str(tmp_path / "model.pt"))):
        assert torch.equal(loaded, torch.arange(4.0))


def test_objects_are_loaded_without_flattening_and_streams_of_bytes_are_data(tmp_path: Path) -> None:
    state_dict = {"text": "saved", "nested": {"deep": (1, 2)}, "w": torch.ones(2), "extra": io.BytesIO(b"scales")}
    robust_dcp.save(state_dict, checkpoint_id=tmp_path, planner=RobustPlanner(flatten_state_dict=False))
    target = {"text": "", "nested": {"deep": ()}, "w": torch.zeros(2), "extra": io.BytesIO()}
    robust_dcp.load(target, checkpoint_id=tmp_path, planner=RobustLoadPlanner(flatten_state_dict=False))
    assert target["text"] == "saved" and target["nested"] == {"deep": (1, 2)} and target["w"].tolist() == [1, 1]
    assert target["extra"].getvalue() == b"scales"


# --- tensors that change while they are saved -------------------------------------------------------------------------


NUMEL = 2 << 20  # 8 MiB

SAVERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "ours": lambda state, path: robust_dcp.save(state, checkpoint_id=path),
    "stock with our plugins": lambda state, path: dcp.save(
        state, storage_writer=RobustWriter(path), planner=RobustPlanner()
    ),
}


@contextmanager
def changed_all_the_time(tensor: torch.Tensor) -> Iterator[None]:
    """A side thread adds to a tensor, whatever training does."""
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            tensor.add_(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tensor_of(kind: str) -> torch.Tensor:
    local = torch.zeros(NUMEL)
    if kind == "transposed":
        return local.view(2, -1).t()
    if kind == "parameter":
        return torch.nn.Parameter(local, requires_grad=False)
    if kind == "DTensor":
        return DTensor.from_local(local, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], run_check=False)
    return local


def save_while_it_changes(path: str, kind: str, saver: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    state = {f"rank {rank}": tensor_of(kind) if kind != "DTensor" else torch.zeros(3), "fine": torch.ones(4)}
    changed = state[f"rank {rank}"]
    if kind == "DTensor":
        changed = state["sharded"] = tensor_of(kind)
    SAVERS[saver](state, path)
    told = "saved"
    with changed_all_the_time(changed if rank == 1 else torch.zeros(2)):
        try:
            SAVERS[saver](state, path)
        except (PlanConflict, CheckpointException) as error:  # stock wraps the errors of ranks into its own
            told = str(error)
    dist.barrier()
    loaded = {key: torch.ones_like(value) if torch.is_tensor(value) else value for key, value in state.items()}
    robust_dcp.load(loaded, checkpoint_id=path)
    same = all(not value.any() for key, value in loaded.items() if key != "fine")
    return told, same and bool(loaded["fine"].eq(1).all())


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", ["plain", "transposed", "parameter", "DTensor"])
def test_a_side_thread_that_changes_a_tensor_fails_the_save_on_all_ranks(kind: str, saver: str, tmp_path: Path) -> None:
    for told, before_stays in values(in_ranks(2, save_while_it_changes, str(tmp_path), kind, saver)):
        assert ("'sharded'" if kind == "DTensor" else "'rank 1'") in told and "changed while it was saved" in told
        assert before_stays


def test_a_change_between_two_writes_fails_the_save(tmp_path: Path) -> None:
    """As by a hook that somebody calls between two writes."""
    tensor = torch.zeros(NUMEL)

    def save() -> None:
        robust_dcp.save({"w": tensor}, checkpoint_id=tmp_path)

    save()
    changing = FaultDisk(tmp_path, on={"write:*.distcp": lambda call: tensor.add_(1)})
    with changing, pytest.raises(PlanConflict, match="'w' was changed while it was saved"):
        save()
    found = {"w": torch.ones(NUMEL)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert not found["w"].any() and tensor.any()
    save()
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["w"], tensor)


def test_a_tensor_without_a_count_of_its_changes_is_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"large": torch.ones(NUMEL), "small": torch.ones(4)}
    robust_dcp.save(state, checkpoint_id=tmp_path)
    found = {"large": torch.zeros(NUMEL), "small": torch.zeros(4)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert found["large"].all() and found["small"].all()


# --- values that differ between ranks under one name ------------------------------------------------------------------


_SMALL = 64 << 10


def _differing_state() -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    return {
        "iteration": 7,
        "rng": {"torch": torch.get_rng_state(), "python": (rank, "state")},
        "holds a tensor": ("alike", torch.ones(5)),
        "small": torch.full((_SMALL,), rank, dtype=torch.uint8),
        "large": torch.zeros(_SMALL + 1, dtype=torch.uint8),
        **{f"filler{n}": torch.zeros(1 << 20) for n in range(6)},
    }


def _save_what_differs(path: Path, mode: Any) -> tuple[Any, list[str], dict[str, Any]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    planner = RobustPlanner(on_replica_mismatch=mode)
    try:
        found: Any = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner).differing_replicas
    except PlanConflict as error:
        return (error.key, error.ranks), lines, {}
    again = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner)
    assert (again.plan, again.differing_replicas) == ("reused", {})
    loaded = _differing_state()
    robust_dcp.load(loaded, checkpoint_id=path)
    return found, lines, {"python": loaded["rng"]["python"], "small": loaded["small"][0].item()}


_DIFFERING = dict.fromkeys(("rng.python", "rng.torch", "small"), (0, 1, 2))


def test_what_differs_is_named_once_and_the_lowest_ranks_copy_is_saved(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, _save_what_differs, tmp_path / "saved", "warn"))
    for found, _, loaded in outcomes:
        assert found == _DIFFERING
        assert loaded == {"python": (0, "state"), "small": 0}
    lines = [lines for _, lines, _ in outcomes]
    assert [len(each) for each in lines] == [1, 0, 0]
    assert all(repr(key) in lines[0][0] for key in _DIFFERING)
    assert "holds a tensor" not in lines[0][0]


def test_what_differs_is_an_error_on_request_before_anything_is_written(tmp_path: Path) -> None:
    for found, _, _ in values(in_ranks(3, _save_what_differs, tmp_path / "refused", "error")):
        assert found == ("rng.python", [0, 1, 2])
    assert not (tmp_path / "refused").exists()


def test_what_differs_is_nobodys_business_on_request(tmp_path: Path) -> None:
    for found, lines, loaded in values(in_ranks(3, _save_what_differs, tmp_path / "saved", "ignore")):
        assert (found, lines) == ({}, [])
        assert loaded == {"python": (0, "state"), "small": 0}


class _CountsPickles:
    """An object that counts how often its process pickles it."""

    n_pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        type(self).n_pickled += 1
        return dict, ()


def _pickles_in_repeated_saves(directory: Path) -> list[int]:
    found = []
    for step in range(3):
        robust_dcp.save({"o": _CountsPickles()}, checkpoint_id=directory / str(step))
        found.append(_CountsPickles.n_pickled)
    return found


def test_a_repeated_save_pickles_only_what_it_writes(tmp_path: Path) -> None:
    writing, other = values(in_ranks(2, _pickles_in_repeated_saves, tmp_path))
    assert other == [other[0]] * 3
    assert writing[2] - writing[1] == writing[1] - writing[0] > 0
