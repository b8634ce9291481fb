"""A resume that proves itself: what is live is compared with the checkpoint, and what differs is named on all ranks."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import robust_dcp
from robust_dcp import (
    CheckpointManager,
    PlanConflict,
    ProofReport,
    RobustCheckpointError,
    RobustLoadPlanner,
    RobustPlanner,
    RobustReader,
    RobustWriter,
)
from tests.cli.commands import shell
from tests.harness.ranks import errors, on_ranks, run_alone, run_ranks
from tests.harness.verdicts import lines_of_the_log

Job = dict[str, Any]


class RandomNumbers:
    def state_dict(self) -> Job:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: Job) -> None:
        torch.set_rng_state(state["torch"])


class Loader:
    place = 0

    def state_dict(self) -> Job:
        return {"place": self.place}

    def load_state_dict(self, state: Job) -> None:
        self.place = state["place"]


class Counts(nn.Module):
    """Has a buffer, which the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return value


def job(seed: int, steps: int = 0) -> Job:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), Counts(), nn.ReLU(), nn.Linear(16, 4))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    parts = {"scheduler": StepLR(optimizer, 2, 0.5), "random": RandomNumbers(), "loader": Loader()}
    return train({"model": model, "optimizer": optimizer, **parts}, steps)


def train(live: Job, steps: int) -> Job:
    for _ in range(steps):
        live["optimizer"].zero_grad()
        live["model"](torch.randn(6, 8)).square().mean().backward()
        live["optimizer"].step()
        live["scheduler"].step()
        live["loader"].place += 6
    return live


def raw(live: Job) -> Job:
    return {key: value.state_dict() for key, value in live.items()}


# The faults of a resume, each as users have reported it.


class Resume:
    """A program that resumes, in the usual order. Each fault overrides a step of it."""

    saved_parts = loaded_parts = ("model", "optimizer", "scheduler", "random", "loader")

    def state_to_save(self, live: Job) -> Job:
        return {key: each for key, each in raw(live).items() if key in self.saved_parts}

    def state_to_load(self) -> Job:
        self.live = job(2)
        return {key: each for key, each in raw(train(self.live, 1)).items() if key in self.loaded_parts}

    def hand_over(self, state: Job) -> None:
        for key, each in state.items():
            self.live[key].load_state_dict(each)

    def after(self) -> None:
        """What happens between the load and training."""

    def run(self, save: Callable[..., Any], load: Callable[..., Any], path: str) -> Job:
        save(self.state_to_save(job(1, 3)), checkpoint_id=path)
        state = self.state_to_load()
        load(state, checkpoint_id=path)
        self.hand_over(state)
        self.after()
        return self.live


class MomentsDropped(Resume):
    def state_to_load(self) -> Job:
        self.live = job(2)
        return raw(self.live)  # before the first step an optimizer has no state, so nobody asks for one


class SchedulerNotAskedFor(Resume):
    loaded_parts = ("model", "optimizer", "random", "loader")


class OptimizerMadeAnew(Resume):
    def after(self) -> None:
        self.live["optimizer"] = AdamW(self.live["model"].parameters(), lr=1e-2)


class StaleWeightsSaved(Resume):
    def state_to_save(self, live: Job) -> Job:
        before = copy.deepcopy(live["model"].state_dict())
        return {**raw(train(live, 3)), "model": before}


class LoaderChangesMoments(Resume):
    def after(self) -> None:
        for state in self.live["optimizer"].state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].half().float()


class FreshOptimizerAdvanced(Resume):
    saved_parts = loaded_parts = ("model", "random", "loader")


class BadReplica(Resume):
    def after(self) -> None:
        with torch.no_grad():
            self.live["model"][0].weight[3, 5] = float("nan")


class SeededAgain(Resume):
    def after(self) -> None:
        torch.manual_seed(1234)


class LoaderOfAnotherStep(Resume):
    def after(self) -> None:
        self.live["loader"].load_state_dict({"place": 24})


class TornCopy(Resume):
    def state_to_save(self, live: Job) -> Job:
        state = raw(live)
        train(live, 1)  # the step has changed what the copy in the background had not copied
        return state


class WeightsInitializedAfterwards(Resume):
    def after(self) -> None:
        self.live["model"][3].reset_parameters()


class MastersFromHalf(Resume):
    def after(self) -> None:
        with torch.no_grad():
            for parameter in self.live["model"].parameters():
                parameter.copy_(parameter.bfloat16().float())


class EqualParameterOfItsOwn(Resume):
    def after(self) -> None:
        self.live["model"][3].weight = nn.Parameter(self.live["model"][3].weight.detach().clone())


FAULTS: dict[str, tuple[type[Resume], str]] = {
    "moments of a fresh optimizer are dropped": (MomentsDropped, "unread optimizer.state.0.exp_avg"),
    "the scheduler is not asked for": (SchedulerNotAskedFor, "differing scheduler.last_epoch"),
    "the optimizer is made anew": (OptimizerMadeAnew, "unread optimizer.state.0.exp_avg"),
    "a loader of the optimizer rounds": (LoaderChangesMoments, "differing optimizer.state.0.exp_avg_sq"),
    "a fresh optimizer has stepped": (FreshOptimizerAdvanced, "missing optimizer.state.0.weight.exp_avg"),
    "a replica is bad": (BadReplica, "differing model.0.weight"),
    "random numbers are seeded again": (SeededAgain, "differing random.torch"),
    "the loader is of another step": (LoaderOfAnotherStep, "differing loader.place"),
    "weights are initialized afterwards": (WeightsInitializedAfterwards, "differing model.3.bias"),
    "masters are made from bfloat16": (MastersFromHalf, "differing model.0.bias"),
    # These two are in the checkpoint itself, which holds what the program has passed.
    "stale weights are saved": (StaleWeightsSaved, ""),
    "the copy in the background is torn": (TornCopy, ""),
    # And here nothing is wrong.
    "a parameter of its own has equal values": (EqualParameterOfItsOwn, ""),
    "no fault": (Resume, ""),
}


@pytest.mark.parametrize("library", ["stock", "robust_dcp"])
def test_faults_of_a_resume_that_stock_does_not_tell_are_named(library: str, tmp_path: Path) -> None:
    stock, wrong = library == "stock", list[str]()
    for number, (name, (fault, expected)) in enumerate(FAULTS.items()):
        lines, path = lines_of_the_log("torch" if stock else "tests"), str(tmp_path / str(number))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            save, load = (dcp.save, dcp.load) if stock else (robust_dcp.save, robust_dcp.load)
            live = fault().run(save, load, path)
        told = [each for each in warned if "torch.distributed" not in str(each.message)]
        if stock and (told or lines):
            wrong.append(f"{name}: stock tells {told or lines}")
        proof = robust_dcp.prove(live, checkpoint_id=path)
        kind, _, key = expected.partition(" ")
        if proof.equal != (not expected) or (expected and key not in getattr(proof, kind)):
            wrong.append(f"{name}: {proof}")
    assert wrong == []


def test_a_report_says_in_groups_what_has_probably_happened(tmp_path: Path) -> None:
    robust_dcp.save(job(1, 3), checkpoint_id=tmp_path)
    fresh = job(2)
    robust_dcp.load({"model": fresh["model"]}, checkpoint_id=tmp_path)
    text = str(robust_dcp.prove({key: fresh[key] for key in ("model", "optimizer", "random")}, checkpoint_id=tmp_path))
    for words in (
        "not live: 4 keys of 'optimizer.state.*.exp_avg', such as 'optimizer.state.0.bias.exp_avg'",
        "likely: exp_avg, exp_avg_sq, step of the checkpoint are in no optimizer: it had no state when it was compared",
        "nobody has loaded 'scheduler', or it was not passed to prove",
        "differ: 'random.torch' (",
        "a seed, a data loader or a scheduler was set or moved on after the load",
    ):
        assert words in text, text
    with pytest.raises(RobustCheckpointError, match="the live state is not that of") as caught:
        robust_dcp.prove(fresh, checkpoint_id=tmp_path).raise_if_differs()
    assert "'model" not in str(caught.value)


# Cuts. Whole tensors are made from a seed, and each rank holds its part.

_SHAPES = {"large": (300, 1000), "long": (700_001,), "deep": (8, 50, 70), "small": (5,), "none": (0, 3)}
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.float8_e4m3fn)


def tensors(placement: Placement) -> Job:
    generator, mesh = torch.Generator().manual_seed(7), init_device_mesh("cpu", (dist.get_world_size(),))
    made: Job = {}
    for number, (name, shape) in enumerate(_SHAPES.items()):
        whole = torch.randn(shape, generator=generator).mul(50).to(_DTYPES[number])
        at = placement if not isinstance(placement, Shard) or placement.dim < len(shape) else Shard(0)
        made[name] = distribute_tensor(whole, mesh, [at]) if name != "none" else whole
        if name == "deep":  # in memory in another order
            local = made[name].to_local().transpose(0, 2).contiguous().transpose(0, 2)
            made[name] = DTensor.from_local(
                local, mesh, [at], shape=whole.shape, stride=whole.stride(), run_check=False
            )
    return made


def save_cut(path: str, placement: Placement) -> None:
    robust_dcp.save(tensors(placement), checkpoint_id=path)


def prove_cut(path: str, placement: Placement) -> list[str]:
    """What is wrong with the proof: of equal values, and of values of which the last rank has changed three."""
    state = tensors(placement)
    proof = robust_dcp.prove(state, checkpoint_id=path)
    wrong = [] if proof.equal else [str(proof)]
    local = state["large"].to_local()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        local[-1, -1] += 1
        local[-1, 0] += 1
        state["deep"].to_local()[0, 3, 1] += 1
    proof = robust_dcp.prove(state, checkpoint_id=path)
    first = [state["large"].shape[0] - 1, 0]
    if isinstance(placement, Shard) and placement.dim == 1:
        first[1] = 1000 - local.shape[1]
    found = {key: each[:2] for key, each in proof.differing.items()}
    at = [0, 3, 1]
    if isinstance(placement, Shard):
        at[placement.dim] += state["deep"].shape[placement.dim] - state["deep"].to_local().shape[placement.dim]
    expected = {"large": (2, tuple(first)), "deep": (1, tuple(at))}
    is_of_last = all(each.ranks == (last,) for each in proof.differing.values())
    if dist.get_rank() == last and found != expected:
        wrong.append(f"{found} instead of {expected}")
    return wrong if is_of_last and not (proof.missing or proof.unread) else [*wrong, str(proof)]


def test_the_same_values_are_equal_in_any_cut_and_what_differs_has_its_place_in_the_whole(tmp_path: Path) -> None:
    cuts = [(4, Shard(0)), (2, Shard(1)), (3, Shard(0)), (2, Replicate())]
    for n_ranks, placement in cuts[:2]:
        path = str(tmp_path / f"{n_ranks} {placement}")
        on_ranks(n_ranks, save_cut, path, placement)
        for n_others, others in cuts:
            assert on_ranks(n_others, prove_cut, path, others) == [[]] * n_others, (
                n_ranks,
                placement,
                n_others,
                others,
            )


def test_a_flipped_bit_of_a_live_tensor_is_found_at_a_thousand_places(tmp_path: Path) -> None:
    chance = random.Random(3)
    state = {
        "several blocks": torch.randn(333, 1001),
        "one block": torch.randn(70, 90).bfloat16(),
        "columns": torch.randn(400, 500).t(),
        "bytes": torch.randint(0, 256, (300_000,), dtype=torch.uint8),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flags": torch.rand(50) > 0.5,
        "complex": torch.randn(33, 5, dtype=torch.complex128),
    }
    robust_dcp.save(state, checkpoint_id=tmp_path / "torch")
    robust_dcp.save(state, storage_writer=RobustWriter(tmp_path / "safetensors", layout="safetensors"))
    dcp.save({key: each.contiguous() for key, each in state.items()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    n_flipped = 0
    for number in range(34):
        changed = {key: each.clone() for key, each in state.items()}
        expected: dict[str, set[int]] = {}
        for _ in range(30):
            key = chance.choice(list(changed)) if number else list(changed)[_ % len(changed)]
            numel, itemsize = changed[key].numel(), changed[key].itemsize
            element, bit = chance.randrange(numel), chance.randrange(8)
            if element in expected.setdefault(key, set()):
                continue
            if key == "flags":  # only 0 and 1 are truth values
                bit = 0
            flat = changed[key].contiguous().view(-1).clone()
            flat.view(torch.uint8)[element * itemsize + (0 if key == "flags" else chance.randrange(itemsize))] ^= (
                1 << bit
            )
            changed[key] = flat.view(changed[key].shape)
            if key == "columns":
                changed[key] = changed[key].t().contiguous().t()
            expected[key].add(element)
            n_flipped += 1
        for layout in ("torch", "safetensors", "stock") if number < 4 else ("torch",):
            proof = robust_dcp.prove(changed, checkpoint_id=tmp_path / layout)
            found = {key: (each.elements, each.first) for key, each in proof.differing.items()}
            assert found == {
                key: (len(places), tuple(map(int, np.unravel_index(min(places), state[key].shape))))
                for key, places in expected.items()
            }, layout
    assert n_flipped > 800
    assert robust_dcp.prove(state, checkpoint_id=tmp_path / "torch").equal


def test_no_data_is_read_where_shards_are_cut_alike(tmp_path: Path) -> None:
    """Not even if it is damaged: the checksums are those that were written with it."""
    state = {"large": torch.randn(3 << 20), "small": torch.randn(100)}
    robust_dcp.save(state, storage_writer=RobustWriter(tmp_path, files_per_rank=1))
    [file] = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[4 << 20 : 5 << 20] = bytes(1 << 20)
    file.write_bytes(data)
    assert robust_dcp.prove(state, checkpoint_id=tmp_path).equal
    state["large"][(4 << 18) + 70_000] += 1  # here the block is read
    with pytest.raises(robust_dcp.CorruptCheckpoint, match="item 'large at"):
        robust_dcp.prove(state, checkpoint_id=tmp_path)
    reader = RobustReader(tmp_path, verify_checksums=False)
    assert set(robust_dcp.prove(state, storage_reader=reader).differing) == {"large"}


# Values that are no plain tensors, and keys.


@dataclasses.dataclass
class Settings:
    rate: float
    table: Any


@dataclasses.dataclass
class Word:
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())


exec(inspect.getsource(Word).replace("Word", "WordOfString"))  # as in `python -c`
WordOfString: Any = locals()["WordOfString"]


@dataclasses.dataclass(eq=False)
class Counter:
    step: int

    def at(self, place: int) -> Counter:
        self.place = place  # no field
        return self


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


def objects(changed: str = "") -> Job:
    def of(name: str, value: Any, other: Any) -> Any:
        return other if name == changed else value

    return {
        "nan": of("nan", float("nan"), 0.0),
        "set of nan": of("set of nan", frozenset({float("nan"), 1}), frozenset({float("nan"), 2})),
        "nans": of("nans", frozenset({float("nan"), float("nan")}), frozenset({float("nan"), 2})),
        "complex": of("complex", complex(0, float("nan")), complex(1, float("nan"))),
        "nested": {"deep": [1, {"x": of("nested", "a", "b")}, (2, None)]},
        "array": of("array", np.array([1.0, float("nan")]), np.array([1.0, 2.0])),
        "long array": of("long array", np.arange(5000), np.arange(5000) // 4999),
        "tensor inside": {"of": (of("tensor inside", torch.tensor([float("nan"), 1.0]), torch.ones(2)), {1, 2})},
        "own": of("own", Settings(0.1, np.zeros(3)), Settings(0.1, np.ones(3))),
        "plain": of("plain", Plain([1, torch.zeros(2)]), Plain([1, torch.ones(2)])),
        "sparse": of("sparse", torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), of("quantized", 0.1, 0.2), 0, torch.qint8),
        "negated": torch.arange(3.0) + 1j if changed != "negated" else torch.arange(3.0) - 1j,
        "text": of("text", "a", "b"),
        "truth": of("truth", True, 1),
    }


def test_objects_are_compared_as_values(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Settings, Plain])
    robust_dcp.save({"x": objects()}, checkpoint_id=tmp_path)
    for changed in ["", *objects()]:
        proof = robust_dcp.prove({"x": objects(changed)}, checkpoint_id=tmp_path)
        groups = {key.split(".")[1] for key in (*proof.differing, *proof.missing, *proof.unread)}
        assert groups == ({changed} if changed else set()), str(proof)
    assert "'b' here, 'a' in the checkpoint" in str(robust_dcp.prove({"x": objects("text")}, checkpoint_id=tmp_path))


_NAN, _OTHER_NAN = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
_EQUAL: dict[str, tuple[Any, Any, bool]] = {
    "zeros of tensors": (torch.tensor([0.0]), torch.tensor([-0.0]), False),
    "NaN of tensors": (_NAN, _NAN.clone(), True),
    "other NaN of tensors": (_NAN, _OTHER_NAN, False),
    "complex zeros": (torch.tensor([complex(0.0, 0.0)]), torch.tensor([complex(0.0, -0.0)]), False),
    "whole numbers": (torch.tensor([2**53]), torch.tensor([2**53 + 1]), False),
    "strides": (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t().contiguous().t(), True),
    "zeros": (0.0, -0.0, False),
    "NaN": (float("nan"), float("nan"), True),
    "NumPy's zeros": (np.float32(0.0), np.float32(-0.0), False),
    "zeros of arrays": (np.array([0.0, 1.0]), np.array([-0.0, 1.0]), False),
    "NaN of arrays": (np.array([np.nan]), np.array([np.nan]), True),
    "zeros of sets": ({0.0, 1}, {-0.0, 1}, False),
    "zeros of tuples in a set": ({("lr", 0.0)}, {("lr", -0.0)}, False),
    "sets": ({float("nan"), 0.0, 1}, {1, 0.0, float("nan")}, True),
    "numbers of other types in sets": ({1, 2}, {1.0, 2}, False),
    "long doubles": (np.array([1, 2], np.longdouble) / 3, np.array([1, 2], np.longdouble) / 3, True),
    "zeros of long doubles": (np.zeros(1, np.longdouble), -np.zeros(1, np.longdouble), False),
    "zeros of tensors in a tuple": ((torch.tensor([0.0]), {1}), (torch.tensor([-0.0]), {1}), False),
    "zeros of fields": (Settings(0.0, 1), Settings(-0.0, 1), False),
    "words by an `==` of their own": (Word("A"), Word("a"), True),
    "other words": (Word("A"), Word("b"), False),
    "words of a class from a string": (*map(WordOfString, "Aa"), sys.version_info >= (3, 11)),
    "what is no field": (Counter(1).at(2), Counter(1).at(3), False),
    "an object without `==`": (Counter(1).at(2), Counter(1).at(2), True),
    "NaN of fields": (Settings(0.1, [float("nan")]), Settings(0.1, [float("nan")]), True),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    "order of a dict in a tuple": (({"a": 1, "b": 2}, 3), ({"b": 2, "a": 1}, 3), True),
    "order of an OrderedDict": ((OrderedDict(a=1, b=2),), (OrderedDict(b=2, a=1),), True),
    "order of a list": ([1, 2], [2, 1], False),
    "a set": ({1, 2}, {2, 1}, True),
    "one and true": (1, True, False),
    "one and one": (1, 1.0, False),
    "a list and a tuple": (([1],), ((1,),), False),
}


def test_a_proof_and_diff_call_the_same_equal(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Settings, Word, WordOfString, Counter])
    for side in (0, 1):
        robust_dcp.save({name: each[side] for name, each in _EQUAL.items()}, checkpoint_id=tmp_path / str(side))
    proof = robust_dcp.prove({name: each[1] for name, each in _EQUAL.items()}, checkpoint_id=tmp_path / "0")
    of_diff = shell("diff", tmp_path / "0", tmp_path / "1", "--values", "--json").json
    differing = {name for name, (_, _, equal) in _EQUAL.items() if not equal}
    for keys in (proof.differing, [each["name"] for each in (*of_diff["tensors"], *of_diff["objects"])]):
        assert {key.partition(".")[0] for key in keys} == differing


def test_a_value_of_another_kind_is_a_difference_and_a_key_of_one_side_is_named(tmp_path: Path) -> None:
    saved = {"dtype": torch.ones(4), "size": torch.ones(4), "kind": torch.ones(4), "meta": torch.ones(4), "gone": 1}
    robust_dcp.save({**saved, "rate": 0.5, "model._orig_mod.w": torch.ones(2)}, checkpoint_id=tmp_path)
    live = {
        "dtype": torch.ones(4).half(),
        "size": torch.ones(5),
        "kind": "text",
        "meta": torch.ones(4, device="meta"),
        "rate": torch.tensor(0.5),
        "new": 2,
        "model.w": torch.ones(2),
    }
    before = copy.copy(live)
    proof = robust_dcp.prove(live, checkpoint_id=tmp_path)
    assert (set(proof.differing), proof.missing, proof.unread) == (
        {"dtype", "size", "kind", "meta"},
        ("new",),
        ("gone",),
    )
    assert "'dtype' is torch.float16 here and torch.float32 in the checkpoint" in str(proof)
    assert all(live[key] is before[key] for key in before), "nothing is changed"
    zeros = {"size": torch.zeros(4)}
    with pytest.raises(TypeError, match="FileSystemReader would fill what is live"):
        robust_dcp.prove(zeros, storage_reader=dcp.FileSystemReader(tmp_path))  # type: ignore[arg-type]
    assert zeros["size"].sum() == 0


def test_two_keys_of_one_name_are_named_in_saves_loads_and_proofs(tmp_path: Path) -> None:
    robust_dcp.save({"2": 1}, checkpoint_id=tmp_path / "one")
    state = {2: torch.ones(2), "2": torch.zeros(2)}
    path, flat = tmp_path / "two", {"flatten_state_dict": False}
    for call in (
        lambda: robust_dcp.prove(state, checkpoint_id=tmp_path / "one"),
        lambda: robust_dcp.load(state, checkpoint_id=tmp_path / "one"),
        lambda: robust_dcp.load({"m": state}, checkpoint_id=tmp_path / "one"),
        lambda: robust_dcp.load(state, checkpoint_id=tmp_path / "one", planner=RobustLoadPlanner(**flat)),
        lambda: robust_dcp.save(state, checkpoint_id=path, planner=RobustPlanner(**flat)),
    ):
        with pytest.raises(PlanConflict, match=r"two values that flatten to the name '(m\.)?2'"):
            call()
    for wrong in ([3], 3, "rng.*", [None]):
        with pytest.raises(TypeError, match=r'ignore is a list of patterns such as \["rng'):
            robust_dcp.load({"2": 1}, checkpoint_id=tmp_path / "one", ignore=wrong)  # type: ignore[arg-type]


# Ranks.


def replicas(path: str) -> ProofReport:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    robust_dcp.save({"model": model}, checkpoint_id=path)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.module.weight[7, 9] += 1
    return robust_dcp.prove({"model": model}, checkpoint_id=path)


def test_a_replica_that_differs_is_named_on_all_ranks(tmp_path: Path) -> None:
    reports = on_ranks(4, replicas, str(tmp_path))
    assert reports == [reports[0]] * 4
    assert dict(reports[0].differing) == {"model.weight": (1, (7, 9), (3,))}
    assert "only rank 3 differs" in str(reports[0])


class Refuses:
    def state_dict(self) -> Job:
        if dist.get_rank() == 1:
            raise ValueError("this rank has lost its state")
        return {"a": 1}

    def load_state_dict(self, state: Job) -> None: ...


def refuse(path: str) -> None:
    robust_dcp.prove({"it": Refuses()}, checkpoint_id=path)


def test_a_rank_that_cannot_compare_fails_on_all_ranks(tmp_path: Path) -> None:
    robust_dcp.save({"it": {"a": 1}}, checkpoint_id=tmp_path)
    outcomes = run_ranks(2, refuse, str(tmp_path))
    assert all("this rank has lost its state" in str(each) for each in errors(outcomes))


# Where it is called.


def test_a_manager_proves_what_it_has_loaded_at_once_or_before_the_first_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(3, job(1, 3))
    live = job(2)
    loaded = manager.load_latest(live, prove=True)
    assert loaded is not None and loaded.proof is not None and loaded.proof.equal

    class Forgets(Loader):
        def load_state_dict(self, state: Job) -> None:
            pass

    with pytest.raises(RobustCheckpointError, match=r"loader\.place"):
        manager.load_latest({**job(2), "loader": Forgets()}, prove=True)

    # The forward pass changes buffers, random numbers and the loader, and the loop sets the rate: that is no fault.
    live = job(2)
    loaded = manager.load_latest(live, prove="first step")
    assert loaded is not None and loaded.proof is None
    live["optimizer"].param_groups[0]["lr"] = 0.3
    train(live, 2)

    for fault in (
        lambda live: live["model"][0].reset_parameters(),
        lambda live: live["optimizer"].state.clear(),
        lambda live: setattr(live["scheduler"], "last_epoch", 9),
    ):
        live = job(2)
        manager.load_latest(live, prove="first step")
        fault(live)
        with pytest.raises(RobustCheckpointError, match="the live state is not that of"):
            train(live, 1)
        train(live, 1)  # it has taken itself out

    with pytest.raises(ValueError, match="needs the optimizer itself"):
        manager.load_latest(raw(live), prove="first step")
    with pytest.raises(ValueError, match="flatten_state_dict=False"):
        manager.load_latest(live, prove="first step", planner=RobustLoadPlanner(flatten_state_dict=False))
    with pytest.raises(ValueError, match="prove is True, False"):
        manager.load_latest(live, prove="twice")  # type: ignore[arg-type]


class Untrusted:
    """Not registered, so that only a trusted load takes it."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]


class OwnPlanner(dcp.DefaultLoadPlanner):
    """What its attributes mean is its own business."""

    allow_missing = True
    on_dtype_mismatch = None

    def ignore(self) -> None: ...


@pytest.mark.parametrize("prove", [True, "first step"])
def test_a_manager_proves_what_the_load_was_asked_for(prove: Any, tmp_path: Path) -> None:
    """What a load may leave out or convert is no difference. What may be missing may not differ."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {**job(1, 3), "old": 1, "w": torch.ones(3), "own": Untrusted()})
    more = {"w": torch.zeros(3), "own": None}
    trusted: Job = {"storage_reader": RobustReader(tmp_path, trusted=True)}
    casts = RobustLoadPlanner(on_dtype_mismatch="cast", trusted=True, allow_missing=["new*"], ignore=["old"])
    for added, options in (
        ({"new.x": 1}, {"allow_missing": ["new*"], "ignore": ["old"], **trusted}),
        ({"new.x": 1, "w": torch.zeros(3).half()}, {"planner": casts}),
        ({"new.x": 1}, {"planner": RobustLoadPlanner(allow_partial_load=True, ignore=["old"]), **trusted}),
        ({"new.x": 1, "old": 0}, {"planner": OwnPlanner(allow_partial_load=True), **trusted}),
    ):
        live = {**job(2), **more, **added}
        loaded = manager.load_latest(live, prove=prove, **options)
        assert loaded is not None and (loaded.proof is None or loaded.proof.equal)
        train(live, 1)
    live = {**job(2), **more}
    if prove is True:
        with pytest.raises(RobustCheckpointError, match="not live: 'old'"):
            manager.load_latest(live, prove=prove, allow_missing=["model*"], **trusted)
        return
    manager.load_latest(live, prove=prove, allow_missing=["model*"], **trusted)
    live["model"][0].reset_parameters()
    with pytest.raises(RobustCheckpointError, match="differ: 2 keys of 'model'"):
        train(live, 1)


_SWITCHED = """
    import torch
    import torch.distributed.checkpoint as dcp

    class Rounds:
        def __init__(self):
            self.w = torch.randn(5)
        def state_dict(self):
            return {"w": self.w}
        def load_state_dict(self, state):
            self.w = state["w"].half().float()

    path = __import__("sys").argv[1]
    dcp.save({"w": torch.randn(5), "part": torch.ones(3)}, checkpoint_id=path)
    dcp.load({"w": torch.zeros(5).double()}, checkpoint_id=path)  # a part, converted: that is no fault
    dcp.save({"it": Rounds()}, checkpoint_id=path)
    dcp.load({"it": Rounds()}, checkpoint_id=path)
"""


def test_under_the_switch_each_load_is_proved_if_the_environment_says_so(tmp_path: Path) -> None:
    outcome = run_alone(_SWITCHED, tmp_path, ROBUST_DCP="1", ROBUST_DCP_PROVE="1")
    assert "'it.w' (5 elements, the first at [0]" in outcome.output
    assert run_alone(_SWITCHED, tmp_path, ROBUST_DCP="1").exitcode == 0
