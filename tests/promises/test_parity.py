"""A checkpoint on drives of each node outlives the loss of a node of each group: its files are made anew.

The ranks of all cases are the same eight processes. A case is saved by some of them, each of which sees the directory
of a node of its own under one path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter
from tests.cli.commands import shell
from tests.faults.disk import Call, FaultDisk, Gate, kill
from tests.harness.damage import flip_bit
from tests.harness.hosts import become_node, can_become_node
from tests.harness.ranks import on_ranks, run_ranks


@pytest.fixture(autouse=True, scope="module")
def _nodes() -> None:  # no mark, which each rank would find out anew
    if not can_become_node():
        pytest.skip("neither root nor user namespaces: no process can see a directory of its own")


SIZE = 8
_GROUPS: dict[int, Any] = {}


def group_of(n_ranks: int) -> Any:
    """The group of the first ranks. All ranks call this."""
    if n_ranks not in _GROUPS:
        _GROUPS[n_ranks] = dist.new_group(list(range(n_ranks)))
    return _GROUPS[n_ranks]


def become(tmp: str, node: str) -> str:
    """See the directory of a node. Returns the path under which all nodes see theirs."""
    seen = Path(tmp, "seen")
    seen.mkdir(exist_ok=True)
    become_node(f"host-{node}", seen, Path(tmp, "nodes", node))
    return str(seen / "ckpt")


def files_of(tmp: str, node: str, kind: str = "nodes") -> dict[str, str]:
    """The digest of each file on a node, but for the report, which one rank writes for itself."""
    files = [each for each in Path(tmp, kind, node, "ckpt").glob("*") if "report" not in each.name]
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def values_of(n_ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_ranks)
    return {
        "rows": torch.randn(53, 7, generator=generator),
        "columns": torch.randn(5, 3000, generator=generator).to(torch.bfloat16),
        "replicas": torch.arange(300),
    }


def state_of(kind: str, group: Any, *, blank: bool) -> dict[str, Any]:
    """What a rank holds: parts of DTensors, an FSDP2 model, or different amounts, and nothing on the last rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if kind == "uneven":
        value = torch.full((rank * 40_000 + 1,), -1.0 if blank else float(rank))
        return {} if rank == size - 1 else {f"of_{rank}": value}
    mesh = DeviceMesh.from_group(group, "cpu")
    if kind == "fsdp2":
        torch.manual_seed(int(blank))
        model = torch.nn.Sequential(torch.nn.Linear(32, 33), torch.nn.Linear(33, 7))
        fully_shard(model, mesh=mesh)
        return {"model": model}
    placements = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(value) if blank else value, mesh, [placements[name]])
        for name, value in values_of(size).items()
    }
    return {**state, "object": "" if blank else "of all " * 50}


def digest(state: dict[str, Any]) -> str:
    """Of everything that a rank holds."""
    parts: list[Any] = []
    for name, value in sorted(state.items()):
        if isinstance(value, torch.nn.Module):
            value = {key: each.to_local().tolist() for key, each in value.state_dict().items()}
        elif isinstance(value, torch.Tensor) and hasattr(value, "to_local"):
            value = value.to_local()
        parts.append((name, value.tolist() if isinstance(value, torch.Tensor) else value))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def save(tmp: str, placing: str, kind: str, k: int | None) -> str:
    """Save on nodes. What the report says of their protection, on each rank."""
    group, rank = group_of(len(placing)), dist.get_rank()
    if rank >= len(placing):
        return ""
    path = become(tmp, placing[rank])
    report = robust_dcp.save(
        state_of(kind, group, blank=False),
        storage_writer=RobustWriter(path, parity_nodes=k),
        process_group=group,
        timeout_seconds=30,
    )
    robust_dcp.finish_async_saves()
    return report.protection


def lose_and_load(tmp: str, placing: str, kind: str, lost: Sequence[str], other: str) -> str:
    """Lose nodes, and load on others. Returns the error, if there is one; and where a lost node is there again, which
    of its files are not as they were."""
    rank, groups = dist.get_rank(), {size: group_of(size) for size in sorted({len(placing), len(other)})}
    if rank == 0:
        for node in lost:
            shutil.rmtree(Path(tmp, "nodes", node, "ckpt"), ignore_errors=True)
    dist.barrier()
    result = ""
    if rank < len(other):
        group = groups[len(other)]
        path = become(tmp, other[rank])
        state = state_of(kind, group, blank=True)
        try:
            robust_dcp.load(state, checkpoint_id=path, process_group=group, timeout_seconds=30)
            if kind == "dtensors":
                state = {name: value.full_tensor() if name != "object" else value for name, value in state.items()}
                expected = {**values_of(len(placing)), "object": "of all " * 50}
            else:
                expected = state_of(kind, group, blank=False)
            assert digest(state) == digest(expected)
        except Exception as error:  # so that no rank waits for this one
            result = f"{type(error).__name__}: {error}"
    dist.barrier()
    return result


def keep(tmp: str, kind: str = "kept") -> None:
    """Remember what is on all nodes."""
    shutil.rmtree(Path(tmp, kind), ignore_errors=True)
    shutil.copytree(Path(tmp, "nodes"), Path(tmp, kind))


def restore(tmp: str, kind: str = "kept") -> None:
    """Put back what was on all nodes. The directories of the nodes stay, because they are mounted."""
    for node in os.listdir(Path(tmp, "nodes")):
        shutil.rmtree(Path(tmp, "nodes", node, "ckpt"), ignore_errors=True)
        if Path(tmp, kind, node, "ckpt").exists():
            shutil.copytree(Path(tmp, kind, node, "ckpt"), Path(tmp, "nodes", node, "ckpt"))


@pytest.mark.parametrize(
    ("placing", "kind", "k", "groups"),
    [
        ("ab", "dtensors", 2, ["ab"]),
        ("abc", "uneven", 8, ["abc"]),
        ("aabb", "fsdp2", 2, ["ab"]),
        ("abcdefgh", "uneven", 8, ["abcdefgh"]),
        ("abcdefgh", "dtensors", 4, ["abcd", "efgh"]),
        ("abbcdde", "dtensors", 2, ["ab", "cde"]),
    ],
)
def test_each_node_in_turn_is_lost_and_made_anew(
    tmp_path: Path, placing: str, kind: str, k: int, groups: list[str]
) -> None:
    tmp, nodes = str(tmp_path), sorted(set(placing))
    protections = on_ranks(SIZE, save, tmp, placing, kind, k)
    size_of = {node: len(group) for group in groups for node in group}
    expected = [f"any 1 of {size_of[node]} nodes" for node in placing]
    assert protections[: len(placing)] == expected
    keep(tmp)
    for group in groups:
        for node in group if len(nodes) < 8 else group[:1] + group[-1:]:
            assert not any(on_ranks(SIZE, lose_and_load, tmp, placing, kind, node, placing)), node
            is_needed = list(Path(tmp, "kept", node, "ckpt").glob("*.distcp"))  # by that load
            assert not is_needed or files_of(tmp, node).items() >= files_of(tmp, node, "kept").items(), node
            assert not list(Path(tmp, "nodes").glob("*/ckpt/*.tmp"))
    restore(tmp)
    one_of_each = [group[0] for group in groups]
    assert not any(on_ranks(SIZE, lose_and_load, tmp, placing, kind, one_of_each, placing))
    # Which of two empty directories is whose, nobody knows.
    there, kept = ({each for node in nodes for each in files_of(tmp, node, kind).items()} for kind in ("nodes", "kept"))
    assert there >= kept


def test_a_load_by_other_ranks_on_fewer_nodes_makes_files_anew_and_stock_reads_all_in_one_directory(
    tmp_path: Path,
) -> None:
    tmp = str(tmp_path)
    on_ranks(SIZE, save, tmp, "aabbccdd", "dtensors", 4)
    keep(tmp)
    for lost, other in (("a", "dbc"), ("d", "aabbcc"), ("b", "cad"), ("c", "xxaabbdd")):
        assert not any(on_ranks(SIZE, lose_and_load, tmp, "aabbccdd", "dtensors", lost, other)), lost
        data = list(Path(tmp, "nodes").glob("*/ckpt/*.distcp"))
        assert {each.name for each in data} == {each.name for each in Path(tmp, "kept").glob("*/ckpt/*.distcp")}
        target = tmp_path / f"one_{lost}"
        target.mkdir()
        for each in (*data, next(Path(tmp, "nodes").glob("*/ckpt/.metadata"))):
            shutil.copy(each, target)
        state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in values_of(SIZE).items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(target), no_dist=True)
        assert all(torch.equal(state[key], value) for key, value in values_of(SIZE).items())
        restore(tmp)


def test_a_file_that_has_become_a_link_to_nowhere_is_made_anew(tmp_path: Path) -> None:
    tmp = str(tmp_path)
    on_ranks(SIZE, save, tmp, "abc", "dtensors", 3)
    keep(tmp)
    file = sorted(Path(tmp, "nodes", "b", "ckpt").glob("*.distcp"))[0]
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    assert not any(on_ranks(SIZE, lose_and_load, tmp, "abc", "dtensors", "", "abc"))
    assert not file.is_symlink() and files_of(tmp, "b") == files_of(tmp, "b", "kept")


def test_two_lost_nodes_of_a_group_are_named_with_their_group_and_what_is_there(tmp_path: Path) -> None:
    tmp = str(tmp_path)
    on_ranks(SIZE, save, tmp, "abcd", "dtensors", 4)
    keep(tmp)
    for error in on_ranks(SIZE, lose_and_load, tmp, "abcd", "dtensors", "bd", "abcd")[:4]:
        assert re.search(
            "the group of host-a, host-b, host-c, host-d has lost 2 nodes, host-b, host-d, and its parity makes up for "
            "one; there is what host-a, host-c has written",
            error,
        )
    restore(tmp)
    parity = next(Path(tmp, "nodes", "a", "ckpt").glob(".robust_dcp.parity.*"))
    parity.unlink()
    error, *_ = on_ranks(SIZE, lose_and_load, tmp, "abcd", "dtensors", "c", "abcd")
    assert "the group of host-a, host-b, host-c, host-d has lost host-c, and the parity on host-a" in error
    restore(tmp)
    assert on_ranks(SIZE, save, tmp, "abcd", "dtensors", None)[:4] == [""] * 4
    assert not list(Path(tmp, "nodes").glob("*/ckpt/.robust_dcp.parity*"))  # that of the checkpoint before
    error, *_ = on_ranks(SIZE, lose_and_load, tmp, "abcd", "dtensors", "c", "abcd")
    assert "no node of this load has parity by which" in error


# --- what fails, and who keeps what


def save_steps(tmp: str, placing: str, faults: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    """Save a step for each fault, which strikes the last rank while parity is made; ``direct``: the drive refuses
    direct I/O. What the report says of each, and which steps the manager keeps after it."""
    group, rank = group_of(len(placing)), dist.get_rank()
    if rank >= len(placing):
        return []
    root, outcomes = os.path.dirname(become(tmp, placing[rank])), []
    manager = CheckpointManager(f"{root}/ckpt", keep_last=1, parity_nodes=8, process_group=group)
    for step, fault in enumerate(faults, 1):
        gate = Gate()  # no parity is made before the save has removed what goes
        on: dict[str, Any] = {"create:.robust_dcp.parity*": gate}
        if fault is not None and rank == len(placing) - 1:
            on |= {"read|write": refuse_direct} if fault == "direct" else {fault: OSError(errno.ENOSPC, "no space")}
        with FaultDisk(root, on=on):
            report = manager.save(step, state_of("dtensors", group, blank=False))
            gate.opened.set()
            robust_dcp.finish_async_saves()
        dist.barrier(group)
        outcomes.append((report.protection, [each.step for each in manager.checkpoints()]))
    return outcomes


def refuse_direct(call: Call) -> None:
    if call.is_direct:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def load_latest(tmp: str, placing: str, lost: dict[str, str]) -> tuple[int, str]:
    """Lose a step, or all, on nodes, and load the latest. Which step that is, and why others were skipped."""
    group, rank = group_of(len(placing)), dist.get_rank()
    if rank == 0:
        for node, step in lost.items():
            shutil.rmtree(Path(tmp, "nodes", node, "ckpt", step))
    dist.barrier()
    if rank >= len(placing):
        return 0, ""
    state = state_of("dtensors", group, blank=True)
    loaded = CheckpointManager(become(tmp, placing[rank]), process_group=group).load_latest(state)
    assert loaded is not None
    assert torch.equal(state["rows"].full_tensor(), values_of(len(placing))["rows"])
    return loaded.checkpoint.step, "".join(each.reason for each in loaded.skipped)


@pytest.mark.parametrize(
    "fault", ["allocate|truncate:.robust_dcp.parity*", "write:.robust_dcp.parity*", "read:*.distcp"]
)
def test_parity_that_cannot_be_made_costs_nothing_but_itself_and_a_manager_keeps_the_last_protected_checkpoint(
    tmp_path: Path, fault: str
) -> None:
    tmp = str(tmp_path)
    faults = [None, fault, fault, "direct", None]
    protections, kept = zip(*on_ranks(SIZE, save_steps, tmp, "abc", faults)[1], strict=True)
    assert protections[0] == protections[3] == protections[4] == "any 1 of 3 nodes"
    assert all(each.startswith("not protected: ") and "ENOSPC" in each for each in protections[1:3])
    assert kept == ([1], [1, 2], [1, 3], [1, 4], [4, 5])
    assert not list(tmp_path.glob("nodes/*/ckpt/*/*.tmp"))
    assert on_ranks(SIZE, load_latest, tmp, "abc", {"a": ""})[0] == (5, "")
    step, reason = on_ranks(SIZE, load_latest, tmp, "abc", {"a": "", "c": "step_5"})[0]
    assert step == 4 and "has lost 2 nodes, host-a, host-c" in reason


def save_and_die(tmp: str, placing: str) -> None:
    """Save a step. The last rank is killed before it has copied a file; the others have copied theirs."""
    group, rank = group_of(len(placing)), dist.get_rank()
    root, is_protected = become(tmp, placing[rank]), threading.Event()

    def die(call: Call) -> None:
        assert is_protected.wait(100)
        kill(call)

    manager = CheckpointManager(root, parity_nodes=3, drain_to=f"{tmp}/durable", process_group=group)
    with FaultDisk(f"{tmp}/durable", on={"create:*/__*": die} if rank == len(placing) - 1 else {}):
        report = manager.save(1, state_of("dtensors", group, blank=False))
        while report.protection == "under way":
            time.sleep(0.02)
        assert report.protection == "any 1 of 3 nodes"
        is_protected.set()
        with contextlib.suppress(robust_dcp.RobustCheckpointError):
            robust_dcp.finish_async_saves()


def go_on_draining(tmp: str, placing: str, lost: str, loads: bool) -> list[int]:
    """Lose a node, perhaps load what there was, and save the next step. The steps that have arrived."""
    group, rank = group_of(len(placing)), dist.get_rank()
    if rank == 0:
        shutil.rmtree(Path(tmp, "nodes", lost, "ckpt"))
    dist.barrier()
    if rank >= len(placing):
        return []
    root = become(tmp, placing[rank])
    os.makedirs(root, exist_ok=True)
    manager = CheckpointManager(root, parity_nodes=3, drain_to=f"{tmp}/durable", process_group=group)
    if loads:
        assert manager.load_latest(state_of("dtensors", group, blank=True)) is not None
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):  # as on a node of its own
        manager.save(2, state_of("dtensors", group, blank=False))
    robust_dcp.finish_async_saves()
    dist.barrier(group)
    return [each.step for each in CheckpointManager(f"{tmp}/durable").checkpoints()]


@pytest.mark.parametrize(("lost", "loads"), [("c", True), ("a", False)])
def test_a_drain_goes_on_with_the_files_that_were_made_anew_of_a_node_that_was_lost_before_they_had_arrived(
    tmp_path: Path, lost: str, loads: bool
) -> None:
    tmp = str(tmp_path)
    (tmp_path / "durable").mkdir()
    assert [each.exitcode for each in run_ranks(3, save_and_die, tmp, "abc")] == [0, 0, -9]
    durable = tmp_path / "durable" / "step_1"
    assert not (durable / ".metadata").exists()
    assert {each.name[:4] for each in durable.glob("*.distcp")} == {"__0_", "__1_"}
    assert on_ranks(SIZE, go_on_draining, tmp, "abc", lost, loads)[:3] == [[1, 2]] * 3
    state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in values_of(3).items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(durable), no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in values_of(3).items())


def test_commands_on_a_node_say_what_its_checkpoint_outlives_and_verify_what_it_has(tmp_path: Path) -> None:
    on_ranks(SIZE, save, str(tmp_path), "abc", "dtensors", 3)
    root = tmp_path / "nodes" / "b"
    os.rename(root / "ckpt", root / "step_7")
    assert "protected: any 1 of 3 nodes" in shell("ls", root).out
    assert "protected: any 1 of 3 nodes" in shell("inspect", root / "step_7").err
    verified = shell("verify", root / "step_7", "--json")
    assert verified.code == 0 and "any 1 of 3 nodes (host-a, host-b, host-c)" in str(verified.json["notes"])
    parity = next((root / "step_7").glob(".robust_dcp.parity.*"))
    shutil.copytree(root / "step_7", root / "step_8")
    (root / "step_8" / parity.name).unlink()
    for is_protected, left in ((False, ["step_7", "step_8"]), (True, ["step_8"])):
        if is_protected:
            shutil.copy(parity, root / "step_8")
        assert shell("prune", root, "--keep-last", "1", "--yes").code == 0
        assert sorted(each.name for each in root.glob("*step*")) == left
    os.rename(root / "step_8", root / "step_7")
    flip_bit(parity, 100)
    broken = shell("verify", root / "step_7", "--json")
    assert broken.code == 1 and [each["file"] for each in broken.json["problems"]] == [parity.name]
    flip_bit(parity, parity.stat().st_size - 60)
    assert shell("verify", root / "step_7").code == 1 and "protected" not in shell("ls", root).out
    next((root / "step_7").glob("*.distcp")).unlink()
    assert shell("verify", root / "step_7", "--fast").code == 1


def test_flipped_bits_with_and_without_a_lost_node_are_named_and_never_loaded(tmp_path: Path) -> None:
    tmp, dice = str(tmp_path), random.Random(65)
    on_ranks(SIZE, save, tmp, "abc", "dtensors", 3)
    keep(tmp)
    n_named = 0
    for number in range(12):
        lost = ["", "c", "a"][number % 3]
        kinds = ["*.distcp", ".robust_dcp.parity.*"][number % 2]
        file = dice.choice(sorted(each for each in tmp_path.glob(f"nodes/*/ckpt/{kinds}") if each.parts[-3] != lost))
        flip_bit(file, dice.randrange(file.stat().st_size), dice.randrange(8))
        errors = on_ranks(SIZE, lose_and_load, tmp, "abc", "dtensors", lost, "abc")[:3]
        assert all(each.startswith(("", "CorruptCheckpoint: ")[bool(each)]) for each in errors), errors
        n_named += any(errors)
        restore(tmp)
    assert n_named >= 4


def test_a_kill_while_parity_is_made_or_a_node_is_made_anew_loses_nothing(tmp_path: Path) -> None:
    """A part of the campaign, which kills at each call."""
    from torture import lost_nodes  # which imports this module

    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    lost_nodes.saved(str(tmp_path))
    for way in ("protect", dice.choice(["anew a", "anew c", "anew b on ac"])):
        trial = dice.choice(list(lost_nodes.kills(str(tmp_path), [way], draw=dice)))
        assert trial.run().complaints == [], f"{trial.kind}: {trial.what}, seed {seed}"
