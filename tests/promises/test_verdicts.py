"""What cannot be saved or loaded is one error on all ranks, in words, before anything is changed."""

from __future__ import annotations

import gc
import io
import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import robust_dcp
from robust_dcp import PlanConflict, RobustCheckpointError, RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from tests.faults.disk import Fault, FaultDisk
from tests.harness.fingerprints import fingerprint
from tests.harness.ranks import on_ranks
from tests.harness.verdicts import Verdict, lines_of_the_log, verdict_of

StateDict = dict[str, Any]


def partial(rank: int) -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}


def shard_is_missing(rank: int) -> StateDict:
    shards = [LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)]
    sharded = init_from_local_shards(shards, 2 * dist.get_world_size(), 3)
    return {"w": sharded} if rank != 1 else {"other": 1}


def one_name_twice(rank: int) -> StateDict:
    return {"w": torch.ones(2)} if rank == 0 else {"a.w": torch.ones(2), "a": {"w": torch.ones(2)}}


CONFLICTS: dict[str, tuple[Callable[[int], StateDict], str, list[str]]] = {
    # state dict of a rank, key of the conflict, words of the message
    "tensor and object": (lambda rank: {"w": torch.ones(2) if rank else "text"}, "w", ["object", "float32"]),
    "shapes": (lambda rank: {"w": torch.ones(2 + rank)}, "w", ["[2]", "[3]"]),
    "Partial": (partial, "w", ["Partial", "redistribute"]),
    "a shard that nobody passed": (shard_is_missing, "w", ["gap"]),
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
    outcomes = on_ranks(3, run_into_conflicts, str(tmp_path / "checkpoint"))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for case, verdict in outcomes[0]:
        _, key, words = CONFLICTS[case]
        assert (verdict.type_name, verdict.fields["key"]) == ("PlanConflict", key), (case, verdict)
        assert all(word in str(verdict) for word in words), (case, verdict)


UNSAVABLE: dict[str, Callable[[], Any]] = {
    "a function without a name": lambda: lambda: None,
    "a tensor without data": lambda: torch.empty(2, device="meta"),
    "a tensor of rows of several lengths": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("case", UNSAVABLE)
def test_a_value_that_cannot_be_saved_is_named(case: str, tmp_path: Path) -> None:
    with pytest.raises(robust_dcp.RobustCheckpointError, match=r"'outer\.inner'"):
        robust_dcp.save({"w": torch.ones(2), "outer": {"inner": UNSAVABLE[case]()}}, checkpoint_id=tmp_path / "c")


class Own:
    """Not data: it could have any code."""


def save_unloadable(directory: str, mode: Any) -> tuple[list[str], Verdict]:
    """The warnings of two saves, of which the second reuses the plan."""
    lines = lines_of_the_log()
    state = {"w": torch.ones(3), f"own {dist.get_rank()}": Own(), "common": Own(), "plain": (1, "a")}
    planner = RobustPlanner(on_unloadable_object=mode, on_structure_change="quiet", on_replica_mismatch="ignore")
    for step in range(2):
        verdict = verdict_of(robust_dcp.save, state, checkpoint_id=f"{directory}/{step}", planner=planner)
    dist.barrier()
    return [line for line in lines if "refuses" in line], verdict


@pytest.mark.parametrize("mode", ["warn", "ignore", "error"])
def test_what_a_load_would_refuse_is_told_by_the_save_once_for_all_ranks(mode: str, tmp_path: Path) -> None:
    (told, verdict), (by_other, other) = on_ranks(2, save_unloadable, str(tmp_path / "c"), mode)
    assert by_other == [] and len(told) == (2 if mode == "warn" else 0)
    for message in told:
        for word in ("3 object(s)", "'own 0'", "'own 1'", "'common'", "Own", "rank 1", "the top", "add_safe"):
            assert word in message
        assert "'plain'" not in message
    assert (verdict.type_name == "UnsafeCheckpoint" and "Own" in verdict.message) is (mode == "error")
    assert (tmp_path / "c").exists() is (mode != "error") and (verdict == other or mode != "error")


def test_the_report_says_what_cannot_be_loaded_and_a_registered_class_can(tmp_path: Path) -> None:
    report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert report.unloadable_objects.keys() == {"own"}
    with torch.serialization.safe_globals([Own]):
        report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert report.unloadable_objects == {}


class Broken:
    """A ``Stateful`` that raises on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> StateDict:
        if dist.get_rank() == self.rank:
            raise LookupError("this rank has lost its state")
        return {"w": torch.ones(2)}

    def load_state_dict(self, state_dict: StateDict) -> None: ...


def freed_on_rank_1(numel: int, stride: int = 1) -> torch.Tensor:
    weight = torch.ones(numel)[::stride]
    if dist.get_rank() == 1:
        weight.untyped_storage().resize_(0)
    return weight


def save(path: str, state: StateDict, **options: Any) -> object:
    return robust_dcp.save(state, checkpoint_id=path, timeout_seconds=60, **options)


def save_async(path: str, state: StateDict, **options: Any) -> object:
    saving: Any = robust_dcp.async_save(state, checkpoint_id=path, timeout_seconds=60, **options)
    return saving.result()


def load(path: str, state: StateDict) -> object:
    return robust_dcp.load(state, checkpoint_id=path, timeout_seconds=60)


def load_or_save(path: str, state: StateDict) -> object:
    return (load if dist.get_rank() == 1 else save)(path, state)


def next_to(path: str) -> str:
    return os.path.join(os.path.dirname(path), "next")


def on_commit(rank: int) -> dict[str, Any]:
    return {"on_commit": (lambda: None) if dist.get_rank() == rank else None}


W = {"w": torch.ones(2)}
FREED = ["was freed", "rank 1"]
ON_COMMIT = "on_commit was given on rank {0}, and not on rank {1}: give it on all ranks"
DIFFER: dict[str, tuple[Callable[[str], object], str, list[str]]] = {
    # a call, the error, words of it
    "places": (lambda path: save(f"{path}/{dist.get_rank()}", W), "ExchangeError", ["/0", "/1"]),
    "operations": (lambda path: load_or_save(path, W), "ExchangeError", ["save", "load"]),
    "layouts": (
        lambda path: save(path, W, storage_writer=RobustWriter(path, layout=LAYOUTS[dist.get_rank()])),
        "PlanConflict",
        ["rank 1", "layout"],
    ),
    "no checkpoint": (lambda path: load(path, dict(W)), "StorageError", ["no checkpoint was committed"]),
    "on_commit": (lambda path: save(path, W, **on_commit(0)), "ExchangeError", [ON_COMMIT.format(0, 1)]),
    "on_commit, async": (lambda path: save_async(path, W, **on_commit(1)), "ExchangeError", [ON_COMMIT.format(1, 0)]),
    "a save of what raises": (lambda path: save(path, {"b": Broken(0)}), "RobustCheckpointError", ["lost its state"]),
    "a load that raises": (
        lambda path: load(next_to(path), {"b": Broken(1)}),
        "RobustCheckpointError",
        ["lost its"],
    ),
    "freed": (lambda path: save_async(path, {"f": freed_on_rank_1(9)}), "RobustCheckpointError", ["'f'", *FREED]),
    # It is too large to be compared between ranks, so nobody looks at it before it is copied.
    "freed, large": (
        lambda path: save_async(path, {f"f{dist.get_rank()}": freed_on_rank_1(1 << 20, stride=2)}),
        "RobustCheckpointError",
        ["'f1'", *FREED],
    ),
}
LAYOUTS: Any = ("torch", "safetensors")


def differ(directory: str) -> list[tuple[str, Verdict]]:
    found = []
    for case, (call, _, _) in DIFFER.items():
        found.append((case, verdict_of(call, f"{directory}/{case}")))
        dist.barrier()
        save(next_to(f"{directory}/{case}"), {"b": W})
    return found


def test_ranks_that_differ_are_told_so_alike_and_the_next_save_works(tmp_path: Path) -> None:
    outcomes = on_ranks(2, differ, str(tmp_path))
    for (case, verdict), (_, other) in zip(*outcomes, strict=True):
        _, type_name, words = DIFFER[case]
        assert (verdict.type_name, verdict.message) == (type_name, other.message), (case, verdict)
        assert all(word in str(verdict) for word in words), (case, verdict)
    assert [path.parent.name for path in tmp_path.rglob(".metadata")] == ["next"]
    assert not [path for path in tmp_path.glob("on_commit*") if path.is_dir()]  # nobody has begun to write


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
    first, second = on_ranks(2, pass_what_is_no_dict, str(tmp_path / "checkpoint"))
    assert first == second
    for kind, type_name, message in first:
        assert type_name == "RobustCheckpointError" and f"a {kind} was passed" in message
        assert ('{"model": model}' if kind in ("Linear", "SGD") else '{"name": value}') in message


def own(planner: type, **hooks: Any) -> Any:
    return type("Own", (planner,), hooks)()


@pytest.mark.parametrize(
    ("options", "expected", "words"),
    [
        ({"storage_writer": dcp.FileSystemWriter("x"), "checkpoint_id": "x"}, TypeError, "FileSystemWriter"),
        ({"planner": own(dcp.DefaultSavePlanner), "checkpoint_id": "x"}, TypeError, "RobustPlanner"),
        ({"planner": own(robust_dcp.RobustPlanner, finish_plan=id), "checkpoint_id": "x"}, TypeError, "finish_plan"),
        ({}, ValueError, "checkpoint_id"),
        ({"checkpoint_id": "file/1"}, OSError, "directory"),
        ({"storage_writer": RobustWriter("saved", overwrite=False)}, OSError, "overwrite=False"),
        ({"checkpoint_id": ""}, ValueError, "it is empty"),
        ({"checkpoint_id": "a\0b"}, ValueError, "it has a zero byte"),
        ({"checkpoint_id": "link/1"}, OSError, "link to nothing: mount or make what it points to"),
        ({"checkpoint_id": "x", "kind": 3}, ValueError, "kind is 3"),
        ({"checkpoint_id": "x", "timeout_seconds": "300"}, ValueError, "timeout_seconds is '300'"),
        ({"checkpoint_id": "x", "deadline_seconds": 0}, ValueError, "deadline_seconds is 0"),
    ],
)
def test_a_save_that_cannot_work_says_what_to_pass(
    options: Any, expected: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    robust_dcp.save({"w": torch.ones(2)}, checkpoint_id="saved")
    Path("file").touch()
    Path("link").symlink_to("nothing")
    with pytest.raises(expected, match=words):
        robust_dcp.save({"w": torch.ones(2)}, **options)
    assert not Path("x").exists()


@pytest.mark.parametrize("wrong", [{"direct": "yes"}, {"overwrite": None}, {"report": 2}])
def test_a_flag_of_a_writer_is_true_or_false(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is True"):
        RobustWriter("x", **wrong)


@pytest.mark.parametrize("wrong", [{"direct": "yes"}, {"trusted": "no"}, {"share_reads": "x"}])
def test_a_flag_of_a_reader_is_true_or_false(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is True"):
        robust_dcp.RobustReader("x", **wrong)


@pytest.mark.parametrize("wrong", ["on_structure_change", "on_replica_mismatch", "on_unloadable_object"])
def test_an_unknown_option_is_refused_with_those_that_exist(wrong: str) -> None:
    with pytest.raises(ValueError, match='"error"'):
        RobustPlanner(**{wrong: "explode"})  # type: ignore[arg-type]


def saved_state() -> StateDict:
    shards = [LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], 0)] if dist.get_rank() == 0 else []
    return {
        "weight": torch.arange(400_000, dtype=torch.float32),
        "nested": {"bias": torch.arange(7, dtype=torch.int32), "lr": [init_from_local_shards(shards, 2, 3), range(3)]},
        f"own{dist.get_rank()}": torch.full((100,), float(dist.get_rank())),
        "text": "saved",
    }


def misfit(state_dict: StateDict, kind: str) -> None:
    if kind in ("other shape", "many"):
        state_dict["nested"]["bias"] = torch.zeros(8, dtype=torch.int32)
    if kind in ("other dtype", "many"):
        state_dict["weight"] = torch.zeros(400_000, dtype=torch.float64)
    if kind == "missing key":
        state_dict["net"] = state_dict.pop("nested")
    if kind == "tensor for object":
        state_dict["text"] = torch.zeros(2)
    if kind == "object for tensor":
        state_dict["weight"] = "text"
    if kind == "many":
        state_dict |= {f"new{n}": torch.zeros(1) for n in range(30)}


MISFITS = {
    "other shape": ["nested.bias", "[8]", "[7]"],
    "other dtype": ["weight", "float64", "float32", "cast"],
    "missing key": ["Missing key in checkpoint: 'net.bias'", "with 'nested.' in place of 'net.'", "the checkpoint has"],
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
    """Rank 0 lists what does not fit, and names the checkpoint. The others say it in one line."""
    outcomes = on_ranks(3, load_what_does_not_fit, str(tmp_path / "checkpoint"))
    assert outcomes[1] == outcomes[2]
    for kind, verdict in outcomes[0]:
        assert verdict.type_name == "PlanConflict" and f"fit the checkpoint {tmp_path}/checkpoint, " in verdict.message
        assert all(word in verdict.message for word in MISFITS[kind]), verdict
    for (_, of_coordinator), (_, verdict) in zip(*outcomes[:2], strict=True):
        assert verdict.type_name == "PlanConflict" and verdict.failed_ranks == of_coordinator.failed_ranks
        assert f"{tmp_path}/checkpoint" in verdict.message and "\n" not in verdict.message


def load_with_options(directory: str) -> None:
    robust_dcp.save(saved_state(), checkpoint_id=directory)
    robust_dcp.load(saved_state(), checkpoint_id=directory)
    state_dict: StateDict = {"weight": torch.zeros(400_000, dtype=torch.float64)}
    robust_dcp.load(state_dict, checkpoint_id=directory, planner=RobustLoadPlanner(on_dtype_mismatch="cast"))
    assert torch.equal(state_dict["weight"], torch.arange(400_000, dtype=torch.float64))
    state_dict = {"new": torch.full((2,), 3.0), "text": "", "new object": Path("kept")}
    report = robust_dcp.load(state_dict, checkpoint_id=directory, planner=RobustLoadPlanner(allow_partial_load=True))
    assert "new object" in str(report)
    assert [state_dict["new"].tolist(), *map(state_dict.get, ("text", "new object"))] == [[3, 3], "saved", Path("kept")]
    assert report.missing_keys == ("new", "new object") and "weight" in report.unread_keys and report.items == 1


def load_what_is_missing(directory: str, words: dict[str, Any]) -> tuple[Any, list[str]]:
    """What each rank prints of a load on more ranks than have saved, and what the log says at WARNING."""
    rank, options = dist.get_rank(), dict(words)
    if "allow_partial_load" in options:
        options["planner"] = RobustLoadPlanner(allow_partial_load=options.pop("allow_partial_load"))
    state_dict = {"encoder": torch.zeros(3), "decoder": torch.zeros(3), f"rng.{rank}": rank}
    lines = lines_of_the_log()
    verdict = verdict_of(robust_dcp.load, state_dict, checkpoint_id=directory, **options)
    report, told = verdict.value, list(lines)
    of_failures = "".join(failure.message for failure in verdict.rank_failures)
    shown = (str(report).partition("  keys: ")[2], report.missing_keys) if report else of_failures
    return shown, told


MISSING: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "all": ({"allow_partial_load": True}, ("decoder", "rng (1: 'rng.1')", "not have 2", "asked for 1"), ()),
    "named": ({"allow_missing": ["rng.*", "dec*"], "ignore": ["old.*"]}, (), ("decoder", "rng", "old")),
    "some": ({"allow_missing": ["dec*", "rng.1"]}, ("asked for 1 of its 3 keys: old",), ("decoder",)),
    "too few": ({"allow_missing": ["rng.*"]}, (), ()),
    "none": ({}, (), ()),
}
"""Options of a load, what the log of rank 0 says of keys, and what it does not say."""


def load_with_missing_keys(directory: str) -> list[tuple[Any, list[str]]]:
    state_dict = {"encoder": torch.ones(3), "old.weight": torch.ones(3), "rng.0": 0}
    robust_dcp.save(state_dict if dist.get_rank() == 0 else {}, checkpoint_id=directory)
    return [load_what_is_missing(directory, words) for words, _, _ in MISSING.values()]


def test_keys_that_may_be_missing_are_named_by_patterns_and_all_others_are_told(tmp_path: Path) -> None:
    ranks = on_ranks(2, load_with_missing_keys, str(tmp_path / "checkpoint"))
    of_rank = [dict(zip(MISSING, outcomes, strict=True)) for outcomes in ranks]
    for kind, (_, said, unsaid) in MISSING.items():
        log = " ".join(of_rank[0][kind][1])
        assert all(word in log for word in said) and not any(word in log for word in unsaid), (kind, log)
        assert bool(log) == bool(said) and not of_rank[1][kind][1]
    for kind in ("too few", "none"):
        assert "'decoder'" in of_rank[0][kind][0] and ("'rng.1'" in of_rank[0][kind][0]) == (kind == "none")
    for kind in ("all", "named", "some"):
        assert [rank[kind][0][1] for rank in of_rank] == [("decoder",), ("decoder", "rng.1")]
        assert all("decoder" in rank[kind][0][0] for rank in of_rank)
    for words in ({"allow_missing": "rng.*"}, {"ignore": "rng.*"}):
        with pytest.raises(TypeError, match="is a list of patterns"):
            robust_dcp.load({}, checkpoint_id=tmp_path / "checkpoint", **words)  # type: ignore[arg-type]
    planner = RobustLoadPlanner()
    with pytest.raises(ValueError, match="to the planner that you pass"):
        robust_dcp.load({}, checkpoint_id=tmp_path / "checkpoint", planner=planner, allow_missing=["rng.*"])


def test_casts_and_partial_loads_are_done_on_request(tmp_path: Path) -> None:
    on_ranks(2, load_with_options, str(tmp_path / "checkpoint"))


class BrokenReader(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        raise OSError(5, "Input/output error")


def test_a_load_from_nowhere_is_refused_and_the_error_of_a_reader_of_ones_own_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass checkpoint_id, the directory to load from, or storage_reader"):
        robust_dcp.load({"w": torch.ones(3)})
    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises((robust_dcp.RobustCheckpointError, OSError), match="Input/output error"):
        robust_dcp.load({"w": torch.zeros(3)}, storage_reader=BrokenReader(tmp_path))


def load_torch_save_file(path: str) -> torch.Tensor:
    state = {"w": torch.zeros(4)}
    for reader, place in ((BroadcastingTorchSaveReader(), path), (BroadcastingTorchSaveReader(path), None)):
        robust_dcp.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner(), checkpoint_id=place)
    return state["w"]


def test_a_reader_that_takes_no_more_than_the_first_torch_asked_for_is_used(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "model.pt")
    for loaded in on_ranks(2, load_torch_save_file, str(tmp_path / "model.pt")):
        assert torch.equal(loaded, torch.arange(4.0))


def test_objects_are_loaded_without_flattening_and_streams_of_bytes_are_data(tmp_path: Path) -> None:
    state_dict = {"text": "saved", "nested": {"deep": (1, 2)}, "w": torch.ones(2), "extra": io.BytesIO(b"scales")}
    robust_dcp.save(state_dict, checkpoint_id=tmp_path, planner=RobustPlanner(flatten_state_dict=False))
    target = {"text": "", "nested": {"deep": ()}, "w": torch.zeros(2), "extra": io.BytesIO()}
    robust_dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert target["text"] == "saved" and target["nested"] == {"deep": (1, 2)} and target["w"].tolist() == [1, 1]
    assert target["extra"].getvalue() == b"scales"


MEMORY = torch.zeros(64)
OVERLAPS: dict[str, tuple[dict[str, Callable[[], torch.Tensor]], str | None]] = {
    "windows": ({"w": lambda: MEMORY.as_strided((4, 4), (2, 1))}, "'w' cannot be loaded into: its own elements"),
    "expanded": ({"w": lambda: MEMORY[:4].expand(4, 4)}, "'w' cannot be loaded into: its own elements"),
    "neighbours": ({"a": lambda: MEMORY[:5], "b": lambda: MEMORY[4:8]}, "'b' .* shares memory with 'a'"),
    "one within": ({"a": lambda: MEMORY[4:6], "b": lambda: MEMORY.view(8, 8)}, "'a' .* shares memory with 'b'"),
    "other dtype": ({"a": lambda: MEMORY.view(torch.int8)[6:9], "b": lambda: MEMORY[2:4]}, "'b' .* memory with 'a'"),
    "crossing": (
        {"a": lambda: MEMORY.view(8, 8)[:, 3], "b": lambda: MEMORY.view(8, 8)[3]},
        "shares memory with '[ab]'",
    ),
    "in part": ({"a": lambda: MEMORY.view(8, 8), "b": lambda: MEMORY.view(8, 8)[1:].T}, "'b' .* memory with 'a'"),
    "side by side": ({"a": lambda: MEMORY.view(8, 8)[:, :3], "b": lambda: MEMORY.view(8, 8)[:, 3:]}, None),
    "every other": ({"a": lambda: MEMORY[::2], "b": lambda: MEMORY[1::2], "c": lambda: torch.zeros(3).t()}, None),
    "tied": ({"a": lambda: MEMORY[:5], "b": lambda: MEMORY[:5]}, None),
    "tied, transposed": ({"a": lambda: MEMORY.view(4, 16), "b": lambda: MEMORY.view(4, 16).T}, None),
    "tied, flat": ({"a": lambda: MEMORY.view(4, 16).T, "b": lambda: MEMORY}, None),
}


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("by_index", [True, False])
def test_targets_that_share_memory_are_named_before_anything_is_changed(
    kind: str, by_index: bool, tmp_path: Path
) -> None:
    """But a weight may have two names. Values that were two when they were saved are not mixed: the last counts."""
    made, words = OVERLAPS[kind]
    saved = {name: torch.rand(make().shape).to(make().dtype) + n for n, (name, make) in enumerate(made.items())}
    (robust_dcp.save if by_index else dcp.save)(saved, checkpoint_id=tmp_path)
    MEMORY.zero_()
    target = {name: make() for name, make in made.items()}
    if words is not None:
        with pytest.raises(PlanConflict, match=words):
            robust_dcp.load(target, checkpoint_id=tmp_path)
        assert not MEMORY.any()
        return
    robust_dcp.load(target, checkpoint_id=tmp_path)
    for name in target if "tied" not in kind else "b":
        assert torch.equal(target[name], saved[name])


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "tensor": lambda: torch.arange(3.0),
    "scalar": lambda: torch.tensor(2.0),
    "number": lambda: 5,
    "dict": lambda: {"a": 1, "b": {"c": 2}},
    "dict of a tensor": lambda: {"a": torch.ones(2)},
    "list": lambda: [1, 2],
    "empty dict": dict,
}
REFUSED = {("number", "tensor"), ("list", "tensor"), ("dict", "dict of a tensor")}
"""Stock puts the object in the place of the tensor."""


@pytest.mark.parametrize("by", ["ours", "switch"])
def test_a_value_of_another_kind_takes_its_place_or_is_refused_as_in_stock(by: str, tmp_path: Path) -> None:
    """Such as ``None`` in the place of a tensor or of a dict, and a dict where nothing was saved."""
    for (saved, make), (there, target_of) in itertools.product(VALUES.items(), VALUES.items()):
        path = tmp_path / f"{saved}-{there}"
        (dcp if "empty" in saved else robust_dcp).save({"v": make(), "w": 1}, checkpoint_id=path)
        targets = [{"v": target_of(), "w": 0} for _ in range(2)]
        expected = verdict_of(dcp.load, targets[0], checkpoint_id=path)
        if by == "switch":
            robust_dcp.install()
        verdict = verdict_of((dcp if by == "switch" else robust_dcp).load, targets[1], checkpoint_id=path)
        robust_dcp.uninstall()
        is_refused = bool(expected.type_name) or (saved, there) in REFUSED
        assert bool(verdict.type_name) == is_refused, (saved, there, verdict)
        if not is_refused:
            assert str(targets[0]) == str(targets[1]), (saved, there)


def flattened_as_by_torch_2_3(planner: dcp.DefaultSavePlanner, state: StateDict) -> StateDict:
    values: StateDict = {}
    planner.mappings = {}

    def put(path: Any, value: Any) -> None:
        name = ".".join(map(str, path))
        values[name], planner.mappings[name] = value, path

    traverse_state_dict_v_2_3(state, put)
    return values


class AsBefore(dcp.DefaultSavePlanner):
    """Saves as torch 2.3 did: a dict or list of plain values is one object."""

    def set_up_planner(self, state_dict: StateDict, *args: Any, **kwargs: Any) -> None:
        self.flatten_state_dict = False
        values = flattened_as_by_torch_2_3(self, state_dict)
        paths = self.mappings
        super().set_up_planner(values, *args, **kwargs)
        self.flatten_state_dict, self.mappings = True, paths


class Progress:
    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> StateDict:
        return {"step": self.step, "seen": {"tokens": self.step}, "history": [{"at": self.step}]}

    def load_state_dict(self, state: StateDict) -> None:
        self.step = state["seen"]["tokens"] + state["history"][0]["at"] - state["step"]


def test_checkpoints_of_torch_2_3_are_loaded_whatever_was_one_object_there(tmp_path: Path) -> None:
    def made(seed: int) -> StateDict:
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1 * seed)
        if seed == 1:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        plain = {"epoch": seed, "lrs": [seed], "empty": {}}
        mixed = {"n": seed, "t": torch.full((2,), float(seed)), "inner": {"n": seed}}
        return {"model": model, "optim": optimizer, "progress": Progress(seed), "plain": plain, "mixed": mixed}

    def content(state: StateDict) -> str:
        model, optimizer = state["model"].state_dict(), state["optim"].state_dict()
        return str((model, optimizer, state["progress"].step, state["plain"], state["mixed"]))

    saved = made(1)
    named = dict(zip(("model", "optim"), get_state_dict(saved["model"], saved["optim"]), strict=True))
    dcp.save({**saved, **named}, checkpoint_id=tmp_path, planner=AsBefore(flatten_sharded_tensors=False))
    loaded = made(2)
    robust_dcp.load(loaded, checkpoint_id=tmp_path)
    assert content(loaded) == content(saved)


def test_a_model_on_the_meta_device_is_loaded_by_one_process_without_a_group(tmp_path: Path) -> None:
    robust_dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path)
    target = {"model": {"w": torch.empty(6, device="meta")}}
    robust_dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["w"], torch.arange(6.0))


def test_a_missing_key_names_the_saved_one_that_looks_most_like_it(tmp_path: Path) -> None:
    keys = [f"layers.{n}.attention.{name}" for n in range(300) for name in ("query", "key", "value")]
    robust_dcp.save({key: torch.ones(1) for key in keys}, checkpoint_id=tmp_path)
    for asked, near in (("layers.7.atention.query", "layers.7.attention.query"), ("layer.9.attention.key", None)):
        target = {key: torch.zeros(1) for key in keys[30:]} | {asked: torch.zeros(1)}
        with pytest.raises(PlanConflict, match=f"Missing key in checkpoint: '{asked}'") as error:
            robust_dcp.load(target, checkpoint_id=tmp_path)
        assert near is None or f"(it has '{near}')" in str(error.value)
    with pytest.raises(PlanConflict) as error:
        robust_dcp.load({"scheduler": 1}, checkpoint_id=tmp_path)
    assert "it has" not in str(error.value)


NUMEL = 2 << 20  # 8 MiB


def dtensor() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.zeros(NUMEL), mesh, [Shard(0)], run_check=False)


CHANGED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(NUMEL),
    "transposed": lambda: torch.zeros(2, NUMEL // 2).t(),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(NUMEL), requires_grad=False),
    "DTensor": dtensor,
}


def save_while_it_changes(directory: str) -> list[tuple[str, str]]:
    """On rank 1 somebody changes a tensor between two writes, as a side thread may."""
    rank, told = dist.get_rank(), []

    def by_stock(state: StateDict, path: str) -> None:
        dcp.save(state, storage_writer=RobustWriter(path), planner=RobustPlanner())

    for kind, make in CHANGED.items():
        for call in (lambda state, path: robust_dcp.save(state, checkpoint_id=path), by_stock):
            path = f"{directory}/{len(told)}"
            name = "sharded" if kind == "DTensor" else f"rank {rank}"
            state = {name: make(), "fine": torch.ones(4)}
            changed = state[name]
            call(state, path)
            changes: dict[str, Fault] = {"write:*.distcp": lambda call, changed=changed: changed.add_(1)}  # type: ignore[misc]
            with FaultDisk(path, on=changes if rank == 1 else {}):
                told.append((kind, verdict_of(call, state, path).message))
            dist.barrier()
            loaded = {name: torch.ones_like(changed), "fine": torch.zeros(4)}
            robust_dcp.load(loaded, checkpoint_id=path)
            assert not loaded[name].any() and loaded["fine"].all(), "the checkpoint before is not there"
            call(state, path)
    return told


def test_a_tensor_that_changes_while_it_is_saved_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    for told in on_ranks(2, save_while_it_changes, str(tmp_path)):
        for kind, message in told:
            assert ("'sharded'" if kind == "DTensor" else "'rank 1'") in message, (kind, message)
            assert "changed while it was saved" in message, (kind, message)


def test_a_tensor_without_a_count_of_its_changes_is_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"large": torch.ones(NUMEL), "small": torch.ones(4)}
    robust_dcp.save(state, checkpoint_id=tmp_path)
    found = {"large": torch.zeros(NUMEL), "small": torch.zeros(4)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert found["large"].all() and found["small"].all()


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
    lines = lines_of_the_log()
    planner = RobustPlanner(on_replica_mismatch=mode, kind=mode)
    try:
        found: Any = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner).differing_replicas
    except PlanConflict as error:
        return (error.key, error.ranks), lines, {}
    again = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner)
    assert (again.plan, again.differing_replicas) == ("reused", {})
    loaded = _differing_state()
    robust_dcp.load(loaded, checkpoint_id=path)
    return found, lines, {"python": loaded["rng"]["python"], "small": loaded["small"][0].item()}


@pytest.mark.parametrize(
    ("mode", "found", "n_lines"),
    [
        ("warn", dict.fromkeys(("rng.python", "rng.torch", "small"), (0, 1, 2)), 1),
        ("ignore", {}, 0),
        ("error", ("rng.python", [0, 1, 2]), 0),
    ],
)
def test_what_differs_is_named_once_or_an_error_and_the_lowest_ranks_copy_is_saved(
    mode: str, found: Any, n_lines: int, tmp_path: Path
) -> None:
    outcomes = on_ranks(3, _save_what_differs, tmp_path / "saved", mode)
    assert [outcome[0] for outcome in outcomes] == [found] * 3
    loaded = {} if mode == "error" else {"python": (0, "state"), "small": 0}
    assert [outcome[2] for outcome in outcomes] == [loaded] * 3
    assert (tmp_path / "saved").exists() is (mode != "error")
    lines = [outcome[1] for outcome in outcomes]
    assert [len(each) for each in lines] == [n_lines, 0, 0]
    for line in lines[0]:
        assert all(repr(key) in line for key in found) and "holds a tensor" not in line


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
    writing, other = on_ranks(2, _pickles_in_repeated_saves, tmp_path)
    assert other == [other[0]] * 3
    assert writing[2] - writing[1] == writing[1] - writing[0] > 0


# --- what a load puts into --------------------------------------------------------------------------------------------

Another: Any = type("Another", (dcp.DefaultLoadPlanner,), {})
LOADERS: dict[str, Callable[[dict[Any, Any], Path | str], object]] = {
    "ours": lambda state, path: robust_dcp.load(state, checkpoint_id=path),
    "stock with our plugins": lambda state, path: dcp.load(
        state, storage_reader=RobustReader(path), planner=RobustLoadPlanner()
    ),
    "another planner": lambda state, path: robust_dcp.load(state, checkpoint_id=path, planner=Another()),
}


@pytest.mark.parametrize(("loader", "saver"), [("ours", robust_dcp), ("stock with our plugins", dcp)])
def test_what_lies_under_int_keys_is_loaded_whatever_it_is(loader: str, saver: Any, tmp_path: Path) -> None:
    def state(number: int) -> dict[Any, Any]:
        nested = {
            "state": {0: {"step": number, "w": torch.full((2,), number)}, 7: f"text {number}", (1, "a"): (number,)},
            "list": [{3: number}, torch.full((1,), number)],
        }
        return nested if loader != "ours" else {**nested, 0: number, 1: torch.full((1,), number)}

    saver.save(state(5), checkpoint_id=tmp_path)
    found = state(1)
    LOADERS[loader](found, tmp_path)
    assert str(found) == str(state(5))
    robust_dcp.save(state(7), checkpoint_id=tmp_path, planner=RobustPlanner(flatten_state_dict=False))
    robust_dcp.load(found, checkpoint_id=tmp_path, planner=RobustLoadPlanner(flatten_state_dict=False))
    assert str(found) == str(state(7))


def freed(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def read_only(path: str) -> torch.Tensor:
    np.zeros(64, dtype=np.float32).tofile(f"{path}/array")
    return torch.from_numpy(np.memmap(f"{path}/array", dtype=np.float32, mode="r"))


TARGETS: dict[str, tuple[Callable[[str], torch.Tensor], str]] = {
    # how a target is made, and what the error says
    "freed": (lambda path: freed(0), "freed"),
    "freed in part": (lambda path: freed(100), "freed"),
    "read only": (read_only, "written to"),
    "expanded": (lambda path: torch.zeros(1).expand(2), "share memory"),
    "sparse, and dense in the checkpoint": (lambda path: torch.zeros(2, 2).to_sparse_csr(), "copy_"),
}


def load_into(path: str, how: str) -> list[Verdict]:
    """In a process of its own, which such a load would end."""
    robust_dcp.save({"target": torch.ones(TARGETS[how][0](path).shape)}, checkpoint_id=f"{path}/saved")
    names = LOADERS if how == "freed" else ("ours", "stock with our plugins")
    return [verdict_of(LOADERS[name], {"target": TARGETS[how][0](path)}, f"{path}/saved") for name in names]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("how", TARGETS)
def test_targets_that_cannot_be_filled_are_refused_by_name(how: str, tmp_path: Path) -> None:
    for verdict in on_ranks(1, load_into, str(tmp_path), how)[0]:
        assert "'target'" in str(verdict) and TARGETS[how][1] in str(verdict)


def test_tensors_that_are_tied_or_lie_side_by_side_are_loaded(tmp_path: Path) -> None:
    tied, row, wide = torch.zeros(4, 4), torch.zeros(100), torch.zeros(8, 100)
    targets = [tied, tied, tied[:], row[:50], row[50:], wide[:, :50], wide[:, 50:], torch.zeros(0)]
    targets += [torch.zeros(3, 1).expand(3, 1), torch.zeros(4, 4).t()]
    expected = {f"t{number}": torch.full(each.shape, 3.0) for number, each in enumerate(targets)}
    robust_dcp.save(expected, checkpoint_id=tmp_path)
    robust_dcp.load({f"t{number}": each for number, each in enumerate(targets)}, checkpoint_id=tmp_path)
    assert all(each.eq(3).all() for each in targets)


def test_nothing_of_what_was_passed_is_kept_and_no_file_is_open(tmp_path: Path) -> None:
    """Without the garbage collector, which training loops switch off."""
    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    calls: list[tuple[Callable[..., object], StateDict]] = [
        (robust_dcp.save, {"own": lambda: 0}),
        (lambda *args, **options: robust_dcp.async_save(*args, **options).result(), {"own": lambda: 0}),
        (robust_dcp.load, {"own": 0}),
        (robust_dcp.load, {}),
    ]
    gc.disable()
    try:
        for number, (call, more) in enumerate(calls):
            tensor = torch.zeros(3)
            kept = weakref.ref(tensor)
            with suppress(RobustCheckpointError):
                call({"w": tensor, **more}, checkpoint_id=tmp_path)
            robust_dcp.finish_async_saves()  # until then it is remembered who has asked for an error
            del tensor
            assert kept() is None, number
            assert not [
                fd for fd in os.listdir("/proc/self/fd") if str(tmp_path) in os.path.realpath(f"/proc/self/fd/{fd}")
            ]
    finally:
        gc.enable()
