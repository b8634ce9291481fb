"""A save repeats its plan if every rank holds what it says, and says what it did; a change is saved as it is."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.stateful import values_to_save
from tests.harness.fingerprints import blank, differences, wrongly_loaded
from tests.harness.ranks import on_ranks, run_ranks, values
from tests.harness.verdicts import lines_of_the_log, verdict_of
from tests.harness.ways import SAVERS

StateDict = dict[str, Any]


def check_loads(state_dict: StateDict, path: str) -> None:
    assert wrongly_loaded(state_dict, path) == []
    dist.barrier()


def model(step: int, more: int = 0, prefix: str = "") -> StateDict:
    found: StateDict = {f"{prefix}layer{n}": torch.full((4,), float(step + n)) for n in range(5 + more)}
    rank = dist.get_rank()
    return {**found, f"{prefix}own {rank}": torch.full((rank + 1,), float(step)), f"{prefix}args": {"lr": 0.1 * step}}


def loader(step: int) -> StateDict:
    """Another set of keys each time, and nothing on the coordinator; every rank has one key of the model's."""
    rank = dist.get_rank()
    return {**({f"worker {rank}.{n}": step for n in range(step + 1)} if rank else {}), "args": {"lr": step}}


# --- a change is saved as it is ---------------------------------------------------------------------------------------


def save_in_turn(directory: str, saver: str) -> None:
    """Each differs from the one before in a way that a plan could hide. The last plan is found in what was loaded."""
    rank = dist.get_rank()
    own = f"only on rank {rank}"
    steps: list[StateDict] = [
        {"w": torch.full((3,), 1.5)},
        {"w": torch.full((3,), 1.5, dtype=torch.bfloat16)},
        {"w": torch.arange(3, dtype=torch.int16)},
        {"w": torch.arange(6, dtype=torch.int16).reshape(2, 3)},
        {"w": "an object now"},
        {"w": "an object now", own: torch.full((rank + 2,), 7.0)},
        {own: torch.full((rank + 3,), 7.0)},
        {own: "an object"} if rank == 1 else {own: torch.full((3,), 8.0)},
        {own: torch.full((3,), 8.0), "late": torch.ones(1)} if rank == 0 else {own: "an object"},
        {own: torch.full((3,), 8.0), "late": torch.ones(1), "w": 1} if rank == 0 else {own: "an object"},
        {"late": torch.ones(1).requires_grad_()},
        {},
        {own: "an object"} if rank == 1 else {own: torch.full((3,), 8.0)},
    ]
    for number, state_dict in enumerate(steps):
        SAVERS[saver](state_dict, f"{directory}/{number}")
        if state_dict:
            check_loads(state_dict, f"{directory}/{number}")


@pytest.mark.parametrize("saver", ["ours", "stock + both", "stock no_dist + both"])
def test_every_change_of_structure_is_saved_as_it_is(saver: str, tmp_path: Path) -> None:
    on_ranks(2, save_in_turn, str(tmp_path), saver)


def change_one_rank(directory: str, changed_rank: int) -> tuple[str, str, Any, list[str]]:
    state_dict = model(0)
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/0")
    lines = lines_of_the_log()
    if dist.get_rank() == changed_rank:
        state_dict["new"] = torch.ones(3)
    report = robust_dcp.save(state_dict, checkpoint_id=f"{directory}/1")
    check_loads(state_dict, f"{directory}/1")
    told = [line for line in lines if "new" in line]
    quiet = RobustPlanner(on_structure_change="quiet")
    robust_dcp.save({**state_dict, "newer": torch.ones(2)}, checkpoint_id=f"{directory}/2", planner=quiet)
    assert not any("newer" in line for line in lines)
    return report.plan, report.reason, report.changes, told


@pytest.mark.parametrize("changed_rank", [0, 2])
def test_a_change_on_one_rank_is_named_in_the_report_and_in_one_line_of_the_log(
    changed_rank: int, tmp_path: Path
) -> None:
    outcomes = values(run_ranks(3, change_one_rank, str(tmp_path), changed_rank))
    for plan, reason, changes, _ in outcomes:
        assert plan == "rebuilt" and "new" in reason and f"rank {changed_rank}" in reason
        assert changes.added == ("new",) and not changes.removed and not changes.changed
    assert [len(told) for *_, told in outcomes] == [1, 0, 0]


def refuse_changes(directory: str) -> tuple[Any, str]:
    robust_dcp.save(model(0), checkpoint_id=directory, planner=RobustPlanner(on_structure_change="error"))
    dist.barrier()  # the coordinator has tidied up
    files = sorted(os.listdir(directory))
    changed = model(1)
    if dist.get_rank() == 1:
        changed["added"] = torch.ones(2)
        del changed["own 1"]
        changed["layer0"] = torch.full((4,), 1.0).requires_grad_()
    dist.barrier()
    planner = RobustPlanner(on_structure_change="error")
    refused = verdict_of(robust_dcp.save, changed, checkpoint_id=directory, planner=planner)
    assert sorted(os.listdir(directory)) == files
    check_loads(model(0), directory)
    return refused, robust_dcp.save(model(2), checkpoint_id=f"{directory}-2", planner=planner).plan


def test_a_refused_change_is_the_same_error_everywhere_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    outcomes = values(run_ranks(2, refuse_changes, str(tmp_path / "checkpoint")))
    for refused, again in outcomes:
        assert refused.type_name == "StructureChanged" and refused == outcomes[0][0]
        assert refused.fields == {"added": ["added"], "removed": ["own 1"], "changed": ["layer0"]}
        assert again == "reused"


# --- what is the same is reused ---------------------------------------------------------------------------------------


def save_kinds_in_turn(directory: str, way: str, named: bool) -> tuple[list[str], list[str]]:
    """A model, its EMA and a loader in turn; another order of the same keys is the same structure."""
    lines, outcomes = lines_of_the_log(), []
    for step in range(4):
        for kind, state in (("model", model(step)), ("ema", model(step, prefix="ema.")), ("loader", loader(step))):
            state = dict(reversed(state.items())) if step == 2 else state
            path, name = f"{directory}/{kind}{step}", kind if named else None
            # The loader's keys change each time, which is for it to say; those of the others never do.
            mode: Any = "quiet" if kind == "loader" and step else "error"
            planner = RobustPlanner(on_structure_change=mode, kind=name)
            if way == "ours":
                outcomes.append(robust_dcp.save(state, checkpoint_id=path, planner=planner).plan)
            else:
                with robust_dcp.on_event(lambda event: event.report and outcomes.append(event.report.plan)):
                    dcp.save(state, storage_writer=RobustWriter(path), planner=planner, no_dist="no_dist" in way)
            dist.barrier()
            check_loads(state, path)
    return outcomes, lines


@pytest.mark.parametrize(("way", "named"), [("ours", True), ("ours", False), ("stock", False), ("stock no_dist", True)])
def test_kinds_that_are_saved_in_turn_never_look_like_changes_of_each_other(
    way: str, named: bool, tmp_path: Path
) -> None:
    for outcomes, lines in values(run_ranks(3, save_kinds_in_turn, str(tmp_path), way, named)):
        if outcomes:  # stock tells of no report
            assert outcomes[0::3] == outcomes[1::3] == ["built", "reused", "reused", "reused"]
            assert outcomes[2] == "built" and "reused" not in outcomes[2::3]
        assert lines == []


def same_names(directory: str, alike: int) -> list[str]:
    """Kinds that have the same names, and kinds of which one rank holds nothing."""
    rank, outcomes = dist.get_rank(), []
    for step in range(3):
        for kind, more in (("model", 0), ("ema", 1)):
            state = model(step, more)
            outcomes.append(robust_dcp.save(state, checkpoint_id=f"{directory}/{kind}{step}", kind=kind).plan)
    for step in range(3):
        for kind in ("a", "b"):
            state = {f"{kind} {rank} {n}": torch.full((2,), step) for n in range(0 if rank == alike else 3)}
            outcomes.append(robust_dcp.save(state, checkpoint_id=f"{directory}/{kind}{step}").plan)
    return outcomes


@pytest.mark.parametrize("alike", [0, 2])
def test_kinds_are_told_apart_by_the_callers_word_and_a_rank_that_holds_nothing_goes_with_the_others(
    alike: int, tmp_path: Path
) -> None:
    for outcomes in values(run_ranks(3, same_names, str(tmp_path), alike)):
        assert outcomes == ["built", "built", *["reused"] * 4] * 2


def save_in_other_groups(directory: str) -> list[str]:
    rank = dist.get_rank()
    low, high, outer = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3])
    half = low if rank < 2 else high
    turns = [dist.group.WORLD, half, dist.group.WORLD, outer if rank in (0, 3) else None, half]
    outcomes: list[str] = []
    for number, group in enumerate([*turns, *turns]):
        if group is None:
            with pytest.raises(ValueError, match="not a member"):
                robust_dcp.Channel.for_group(outer)
            continue
        members = dist.get_process_group_ranks(group)
        assert robust_dcp.Channel.for_group(group).ranks == tuple(members)
        path = f"{directory}/{number}-{members}"
        state_dict: StateDict = {"w": torch.arange(5.0), f"own {rank}": torch.full((rank + 1,), float(number))}
        report = robust_dcp.save(state_dict, checkpoint_id=path, process_group=group)
        outcomes.append(report.plan)
        target = blank(state_dict)
        robust_dcp.load(target, checkpoint_id=path, process_group=group)
        assert differences(state_dict, target) == []
        assert {index.fqn for index in report.metadata.storage_data} == {"w", *(f"own {each}" for each in members)}
    return outcomes


def test_plans_of_one_group_are_never_used_in_another(tmp_path: Path) -> None:
    outcomes = values(run_ranks(4, save_in_other_groups, str(tmp_path)))
    # The world, a half, the world, [0, 3] (ranks 0 and 3 only), the half again; and all of it once more.
    inner = ["built", "built", "reused", "reused"] + ["reused"] * 4
    outer = ["built", "built", "reused", "built", "reused"] + ["reused"] * 5
    assert outcomes == [outer, inner, inner, outer]


class OtherPlanner(RobustPlanner):
    pass


def save_with_other_options(directory: str) -> list[str]:
    state_dict: StateDict = {
        "nested": {f"w{n}": torch.full((5,), float(n)) for n in range(6)},
        f"o{dist.get_rank()}": "x",
    }
    outcomes: list[str] = []
    options: list[tuple[dict[str, Any], dict[str, Any], type[RobustPlanner]]] = [
        ({}, {}, RobustPlanner),
        ({"threads": 1}, {}, RobustPlanner),
        ({}, {}, RobustPlanner),  # two structures of a kind may alternate
        ({"threads": 3}, {"dedup_save_to_lowest_rank": True}, RobustPlanner),
        ({}, {}, OtherPlanner),
    ]
    for number, (writer_options, planner_options, planner) in enumerate(options):
        path = f"{directory}/{number}"
        writer = RobustWriter(path, **writer_options)
        report = robust_dcp.save(state_dict, storage_writer=writer, planner=planner(**planner_options))
        outcomes.append(report.plan)
        check_loads(state_dict, path)
    return outcomes


def test_a_plan_is_not_used_with_other_options_of_planner_or_writer(tmp_path: Path) -> None:
    for outcomes in values(run_ranks(2, save_with_other_options, str(tmp_path))):
        assert outcomes == ["built", "rebuilt", "reused", "rebuilt", "rebuilt"]


def save_from_each_coordinator(path: str) -> None:
    """Stock lets another rank than 0 plan and commit."""
    rank = dist.get_rank()
    for step, coordinator_rank in enumerate((1, 1, 2, 0)):
        state = {"w": torch.full((3,), float(step)), f"own.{rank}": torch.tensor([float(rank)])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that save_state_dict is deprecated: it alone lets one choose
            writer = RobustWriter(f"{path}/{step}")
            save_state_dict(state, writer, coordinator_rank=coordinator_rank, planner=RobustPlanner())
        check_loads(state, f"{path}/{step}")


def test_a_save_whose_coordinator_is_not_rank_0_is_committed_and_so_is_the_next_with_another(tmp_path: Path) -> None:
    on_ranks(3, save_from_each_coordinator, str(tmp_path))


def messages_of_repeated_saves(directory: str, n_items: int) -> tuple[int, int]:
    """Messages and bytes that this rank sends in the third of three saves."""
    for step in range(3):
        state = {f"layer.{n}.weight": torch.full((3,), float(n)) for n in range(n_items)} | {"object": step}
        report = robust_dcp.save(state, checkpoint_id=f"{directory}/{n_items}-{step}")
    assert report.plan == "reused"
    return sum(phase.messages for phase in report.phases), sum(phase.payload_nbytes for phase in report.phases)


def test_a_repeated_save_sends_the_same_few_bytes_for_10_and_1000_items(tmp_path: Path) -> None:
    few = values(run_ranks(4, messages_of_repeated_saves, str(tmp_path), 10))
    many = values(run_ranks(4, messages_of_repeated_saves, str(tmp_path), 1000))
    for (n_few, few_nbytes), (n_many, many_nbytes) in zip(few, many, strict=True):
        assert n_few == n_many < 20
        assert abs(few_nbytes - many_nbytes) <= 96 and many_nbytes < 1500  # a larger number has more digits


def test_the_files_of_objects_that_grow_in_turn_hold_nothing_else(tmp_path: Path) -> None:
    for step in range(10):
        grown = {name: bytes(20_000 + 100 * step) for name in ("a", "b")}
        robust_dcp.save(grown, checkpoint_id=str(tmp_path), no_dist=True)
    assert 40_000 < sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 50_000


# --- parameters that stay as they are ---------------------------------------------------------------------------------


def trained(form: str) -> tuple[StateDict, torch.Tensor, list[torch.Tensor]]:
    """A state dict, a parameter of it that the last rank writes, and what else a step of training changes."""
    weight, rest = torch.randn(300, 300), [torch.zeros(300, 300), torch.zeros(())]
    if form == "modules":
        module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
        module(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()] + list(module[1].buffers())
        return {"model": module, "optimizer": optimizer}, module[0].weight.detach(), buffers
    if form == "shards":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight, rest[0] = (distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, rest[0]))
        names = {
            "layers.0.weight": weight,
            "state.layers.0.weight.exp_avg": rest[0],
            "state.layers.0.weight.step": rest[1],
        }
        return names, weight.to_local(), [rest[0].to_local(), rest[1]]
    own = f"decoder.of rank {dist.get_rank()}"
    moments = {f"optimizer.state.exp_avg.{own}": rest[0], "optimizer.distributed.step": rest[1]}
    return {own: weight, "decoder.shared": torch.ones(3), **moments}, weight, rest


def save_frozen(directory: str) -> list[str]:
    """What is wrong with what reports and the log say."""
    wrong, lines, last = list[str](), lines_of_the_log(), dist.get_rank() == dist.get_world_size() - 1
    for form in ("modules", "shards", "names"):
        for way in ("sync", "async", "safetensors", "stock") if form == "names" else ("sync",):
            state, parameter, rest = trained(form)
            said = list[tuple[str, int]]()
            changed = ["", "rest", "rest", "parameter", "", "rest", "all"] if way == "sync" else ["", "rest", "all"]
            for number, changes in enumerate(changed):
                if changes in ("rest", "all"):
                    for each in rest:
                        each.add_(1)
                if changes in ("parameter", "all") and last:
                    parameter.view(-1)[7] += 1
                path, writer = f"{directory}/{form} {way}/step_{number}", None
                if way == "safetensors":
                    writer = RobustWriter(path, layout="safetensors")
                if way == "stock":
                    dcp.save(values_to_save(state), storage_writer=RobustWriter(path), planner=RobustPlanner())
                elif way == "async":
                    report = robust_dcp.async_save(state, checkpoint_id=path).result()
                else:
                    report = robust_dcp.save(state, checkpoint_id=None if writer else path, storage_writer=writer)
                dist.barrier()
                warned = sum("identical to those in" in line for line in lines)
                said.append(("" if way == "stock" else os.path.basename(report.identical_to), warned))
                if way != "stock" and ("identical to those in" in str(report)) != bool(report.identical_to):
                    wrong.append(str(report))
                left = json.loads(Path(path, ".robust_dcp.report.json").read_bytes())["identical_to"]
                is_identical = number > 0 and changes not in ("parameter", "all")
                if os.path.basename(left) != (f"step_{number - 1}" if is_identical else ""):
                    wrong.append(f"{path}: the report beside it says {left!r}")
                lines.clear()
            once = int(dist.get_rank() == 0)
            expected = [("", 0), ("step_0", once), ("step_1", 0), ("", 0), ("step_3", 0), ("step_4", once), ("", 0)]
            expected = expected if way == "sync" else [*expected[:2], expected[-1]]
            if said != [("" if way == "stock" else name, count) for name, count in expected]:
                wrong.append(f"{form} {way}: {said}")
    return wrong


def test_a_report_says_that_all_parameters_are_those_of_the_checkpoint_before(tmp_path: Path) -> None:
    """The log says it once, if anything else has changed: it may be one state that is saved again."""
    assert on_ranks(2, save_frozen, str(tmp_path)) == [[], []]


# --- a job that begins anew -------------------------------------------------------------------------------------------


def replicas(value: float, *, n_more: int = 0) -> StateDict:
    """Replicated tensors, whose writers a plan chooses, and what only rank 0 has."""
    state: StateDict = {f"t{n:02}": torch.full((30_000 + n,), value + n) for n in range(40)}
    return state | ({f"more{n}": torch.full((75_000,), value) for n in range(n_more)} if dist.get_rank() == 0 else {})


def save_first(directory: str) -> None:
    robust_dcp.save(replicas(1.0), checkpoint_id=f"{directory}/1")


def save_after_a_change(directory: str) -> None:
    """Rank 1 knows the plan of the change when rank 0 goes back to the plan before."""
    for name, n_more in (("again", 0), ("changed", 1), ("as before", 0)):
        state = replicas(2.0, n_more=n_more)
        robust_dcp.save(state, checkpoint_id=f"{directory}/{name}")
        check_loads(state, f"{directory}/{name}")


def resume(directory: str, how: str) -> tuple[str, str]:
    rank, state = dist.get_rank(), replicas(0.0)
    if how != f"rank {rank} has loaded nothing":
        mine = "again" if how == f"rank {rank} has loaded another" else "1"
        robust_dcp.load(state, checkpoint_id=f"{directory}/{mine}", no_dist=True)
    dist.barrier()
    state = replicas(4.0) | ({"new": torch.ones(3)} if how == "rank 1 holds more" and rank == 1 else {})
    report = robust_dcp.save(state, checkpoint_id=f"{directory}/2")
    check_loads(state, f"{directory}/2")
    return report.plan, report.reason


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("earlier")
    for job in (save_first, save_after_a_change):
        values(run_ranks(2, job, str(root)))
    return root


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("all have loaded it", "reused"),
        ("rank 1 holds more", "rebuilt"),
        ("rank 1 has loaded nothing", "reused"),
        ("rank 0 has loaded nothing", "built"),
        ("rank 0 has loaded another", "reused"),
        ("its plan is damaged", "built"),
    ],
)
def test_a_job_that_loads_a_checkpoint_saves_by_the_plan_that_lies_in_it(
    how: str, outcome: str, earlier: Path, tmp_path: Path
) -> None:
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    if how == "its plan is damaged":
        (tmp_path / "1" / ".robust_dcp.index").unlink()
    for plan, reason in values(run_ranks(2, resume, str(tmp_path), how)):
        assert plan == outcome
        assert plan != "reused" or f"since {tmp_path}/1" in reason or how != "all have loaded it"
