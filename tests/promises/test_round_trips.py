"""What is saved one way is loaded every other way, bit for bit: by stock, on other ranks, cut otherwise, in parts."""

from __future__ import annotations

import itertools
import os
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustWriter, StorageError, UnsafeCheckpoint
from tests.faults.disk import LONG_TESTS
from tests.harness.fingerprints import differences
from tests.harness.ranks import on_ranks
from tests.harness.state_dicts import KINDS, full_tensor, mesh_of, pattern
from tests.harness.torch_versions import HAS_SAFETENSORS
from tests.harness.ways import LOADERS, OTHER_SAVERS, SAVERS

StateDict = dict[str, Any]

# Who writes the files and who reads them matters for each kind; who calls them only that they fit together. So of the
# other ways each kind is loaded by one of the two, in turn.
READ_BY: dict[str, tuple[str, ...]] = {
    "ours": ("ours", "ours + stock reader", "stock", "stock + reader", "stock + planner"),
    "stock": ("ours", "switch", "stock + reader", "stock no_dist + both"),
    "safetensors": ("ours", "stock no_dist + both"),
}
READ_BY_DEFAULT = ("ours", "stock")
CANNOT = {  # kinds that a way cannot save: no such dtypes in the layout; torch's own staging; meshes of four ranks
    "safetensors": ("all_dtypes", "quantized"),
    "async process": ("dtensors",),
    "stock async + both": ("quantized", "views", "sharded_tensor"),
    "stock async process + both": ("quantized", "views", "sharded_tensor", "dtensors", "own_shards"),
}
WAYS = [*SAVERS, *(way for way in OTHER_SAVERS if HAS_SAFETENSORS or way != "safetensors")]


def save_and_load_all_kinds(directory: str, saver: str, loaders: tuple[str, ...]) -> list[str]:
    """Every kind through one saver and each loader; what went wrong, in words."""
    problems: list[str] = []
    save = (SAVERS | OTHER_SAVERS)[saver]
    for number, (kind, make) in enumerate(KINDS.items(), WAYS.index(saver)):
        if kind in CANNOT.get(saver, ()):
            continue
        path = os.path.join(directory, kind)
        expected = make(1)
        try:
            save(expected, path)
        except Exception:
            problems.append(f"{kind}, saved by {saver}: {traceback.format_exc()}")
            continue
        for loader in loaders if saver in READ_BY or LONG_TESTS else [loaders[number % len(loaders)]]:
            with torch.inference_mode(kind == "views"):
                state_dict = make(0)
            try:
                LOADERS[loader](state_dict, path)
            except Exception:
                problems.append(f"{kind}, saved by {saver}, loaded by {loader}: {traceback.format_exc()}")
                continue
            problems += [f"{kind}, {saver} to {loader}: {each}" for each in differences(expected, state_dict)]
            dist.barrier()  # so that an error of one combination is not met in the next
    return problems


@pytest.mark.parametrize("saver", WAYS)
def test_what_is_saved_one_way_is_loaded_every_other_way_bit_for_bit(saver: str, tmp_path: Path) -> None:
    loaders = READ_BY.get(saver, READ_BY_DEFAULT)
    n_ranks = 2 if "process" in saver else 4  # each starts a process, which takes seconds to import torch
    for problems in on_ranks(n_ranks, save_and_load_all_kinds, str(tmp_path), saver, loaders):
        assert problems == []


def load_some_keys(directory: str) -> list[str]:
    """Each half of the keys of what another job has saved, by each loader."""
    problems = []
    for saver, (loader, load), half in itertools.product(("ours", "stock"), LOADERS.items(), (0, 1)):
        target, expected = laid_out(0, half), laid_out(1, half)
        keys = sorted(set(target) - {"optimizer"})[half::2]
        found = {key: target[key] for key in keys}
        load(found, f"{directory}/{saver}-{half}")
        wrong = differences({key: expected[key] for key in keys}, found)
        problems += [f"{saver} to {loader}: {each}" for each in wrong]
    return problems


SHAPES = {"even": (8, 8), "uneven": (7, 5), "small": (1, 3), "cube": (5, 4, 3), "vector": (13,), "0-dim": ()}


def placements_of(ndim: int, variant: int) -> tuple[int, tuple[Placement, ...]]:
    """(dimensions of the mesh, placements) for a tensor of ``ndim`` dimensions."""
    choices: list[tuple[int, tuple[Placement, ...]]] = [(1, (Replicate(),))]
    if ndim:
        choices += [(1, (Shard(0),)), (1, (Shard(ndim - 1),)), (2, (Shard(0), Replicate()))]
        choices += [(2, (Shard(0), Shard(ndim - 1))), (2, (Replicate(), Shard(ndim - 1))), (2, (Shard(0), Shard(0)))]
    return choices[variant % len(choices)]


def laid_out(seed: int, variant: int) -> StateDict:
    """Every shape in some layout on the ranks there are; ``variant`` chooses. Plain tensors without ranks."""
    found: StateDict = {"optimizer": {"step": seed, "lr": 0.5 * seed}}
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name, shape in SHAPES.items():
        full = full_tensor(name, shape, seed)
        if not dist.is_initialized():
            found[name] = full
            continue
        dims, placements = placements_of(len(shape), variant)
        first = 2 if world % 2 == 0 else 1
        mesh = mesh_of((world,) if dims == 1 else (first, world // first))
        found[name] = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return found


def hf(state: StateDict) -> StateDict:
    """What torch's Hugging Face writer and reader can do."""
    return {name: each for name, each in state.items() if name in ("even", "uneven", "cube", "vector")}


def save_by_hf(state: StateDict, path: str, consolidates: bool = False) -> None:
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=consolidates)
    dcp.save(hf(state), storage_writer=writer)


def load_by_hf(state: StateDict, path: str) -> None:
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))


RESHARDED = ["ours", "stock", *(("safetensors", "hf", "hf, consolidated") if HAS_SAFETENSORS else ())]


def save_in_all_layouts(directory: str, savers: list[str]) -> None:
    ways = {**SAVERS, **OTHER_SAVERS, "hf": save_by_hf, "hf, consolidated": partial(save_by_hf, consolidates=True)}
    for saver in savers:
        for variant in {"ours": range(7), "stock": (0, 1, 4)}.get(saver, (1, 4)):
            ways[saver](laid_out(1, variant), f"{directory}/{saver}-{variant}")


def load_in_other_layouts(directory: str, pairs: list[tuple[str, str]]) -> list[str]:
    """Each of what a saver has written by a loader, in its own layout and in another one."""
    problems = []
    for saver, loader in pairs:
        load = load_by_hf if loader == "hf" else LOADERS[loader]
        choose = hf if "hf" in saver + loader else dict
        for saved in range(7) if loader == "stock" or (saver, loader) == ("ours", "ours") else (1, 4):
            for variant in (saved, (saved + 3) % 7):
                target = choose(laid_out(0, variant))
                load(target, f"{directory}/{saver}-{saved}")
                found = differences(choose(laid_out(1, variant)), target)
                problems += [f"{saver} {saved} to {loader} {variant}: {each}" for each in found]
    return problems


PAIRS = [(saver, "ours") for saver in RESHARDED] + [("ours", "stock")]


@pytest.mark.parametrize(("saving_ranks", "loading_ranks"), [(4, (2, 3)), (2, (4,)), (3, (4,)), (1, (4,))])
def test_a_checkpoint_loads_on_other_numbers_of_ranks_in_other_layouts_and_in_parts(
    saving_ranks: int, loading_ranks: tuple[int, ...], tmp_path: Path
) -> None:
    on_ranks(saving_ranks, save_in_all_layouts, str(tmp_path), RESHARDED, init=saving_ranks > 1)
    pairs = PAIRS + [("safetensors", "hf")] * HAS_SAFETENSORS
    for n_ranks in loading_ranks:
        for problems in on_ranks(n_ranks, load_in_other_layouts, str(tmp_path), pairs):
            assert problems == []
    if saving_ranks == 4:
        for problems in on_ranks(2, load_some_keys, str(tmp_path)):
            assert problems == []
    # One process, without torch.distributed.
    assert on_ranks(1, load_in_other_layouts, str(tmp_path), pairs, init=False) == [[]]


# --- files of safetensors ---------------------------------------------------------------------------------------------

TABLE = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}
"""The dtypes that files of safetensors can hold."""


def save(directory: Path | str, state_dict: StateDict, **options: Any) -> None:
    robust_dcp.save(state_dict, storage_writer=RobustWriter(directory, layout="safetensors", **options))


def tensors(seed: int) -> StateDict:
    shapes = [(), (0, 3), (1,), (5, 3), (64, 64)]
    named = {f"{name}.{shape}": (shape, dtype) for name, dtype in TABLE.items() for shape in shapes}
    named |= {f"large {name}": ((1 << 20,), TABLE[name]) for name in ("float32", "bfloat16", "int8")}
    named |= dict.fromkeys(('quo"te\\', "täglich 🙂\n", ""), ((3,), torch.float32))
    return {name: pattern(name, shape, dtype, seed) for name, (shape, dtype) in named.items()}


@pytest.mark.parametrize("options", [{}, {"direct": False, "files_per_rank": 1}], ids=str)
def test_safetensors_and_stocks_reader_read_our_files(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, {**tensors(1), "step": 3, "double": torch.rand(3, dtype=torch.complex128)}, **options)
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert differences(tensors(1), found) == []
    if HAS_SAFETENSORS:
        load_by_hf(target := tensors(2), str(tmp_path))
        assert differences(tensors(1), target) == []


@pytest.mark.parametrize("layout", ["safetensors", "torch"])
def test_another_planner_than_ours_is_refused_where_it_cannot_plan_and_leaves_nothing(
    layout: str, tmp_path: Path
) -> None:
    """One that keeps its plans would give the files of the next save the names of this one's."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=layout == "torch")
    with pytest.raises(BaseException, match=r"pass planner=RobustPlanner\(\)") as caught:
        dcp.save({"w": torch.rand(3)}, storage_writer=RobustWriter(tmp_path / "c", layout=layout), planner=planner)
    assert isinstance(caught.value, (ValueError, dcp.api.CheckpointException)) and os.listdir(tmp_path) == []


def test_a_model_in_the_cache_of_hugging_face_is_loaded(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blobs" / "0123abcd", tmp_path / "snapshots" / "main"
    for directory in (blob.parent, snapshot):
        directory.mkdir(parents=True)
    save_file(tensors(1), blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    robust_dcp.load(target := tensors(2), checkpoint_id=snapshot)
    assert differences(tensors(1), target) == []


@pytest.mark.parametrize(
    ("second", "offset", "wanted", "words"),
    [
        (torch.zeros(4), None, 4, "each chunk once"),
        (torch.zeros(4), 9, 13, r"elements of \[13\], found none that holds \[5\] at \[4\]"),
        (torch.zeros(4), 2, 6, r"expected chunks that do not overlap, found \[4\] at \[0\] and \[4\] at \[2\]"),
        (torch.arange(4), 4, 8, r"expected chunks of torch\.float32"),
    ],
    ids=["a chunk twice", "a gap", "an overlap", "two dtypes"],
)
def test_chunks_that_do_not_make_up_a_tensor_are_refused(
    second: torch.Tensor, offset: int | None, wanted: int, words: str, tmp_path: Path
) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "a.safetensors")
    told = None if offset is None else {"DCP_SHARDING_INFO": f'{{"w":{{"saved_offsets":[{offset}]}}}}'}
    save_file({"w": second}, tmp_path / "b.safetensors", metadata=told)
    with pytest.raises(CorruptCheckpoint, match=words):
        robust_dcp.load({"w": torch.zeros(wanted)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("before", ["torch", "safetensors", "a file of somebody else"])
def test_neither_a_checkpoint_nor_a_file_of_others_is_replaced_or_joined(
    tmp_path: Path, before: Any, overwrite: bool
) -> None:
    state = {"w": torch.rand(9)}
    if before in ("torch", "safetensors"):
        robust_dcp.save(state, storage_writer=RobustWriter(tmp_path, layout=before))
    else:
        save_file(state, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError, match=r"readers of safetensors take every file|already exists|shard-00001"):
        save(tmp_path, {"w": torch.zeros(9)}, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == names
    found = {"w": torch.zeros(9)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert differences(state, found) == []


# --- subclasses of tensors that wrap others ---------------------------------------------------------------------------

BLOCK = 4


class Quantized(torch.Tensor):
    """Eight-bit codes with one scale for each block. As torchao's optimizer states it looks like a float tensor."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, note: str = "") -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, note: str = "") -> None:
        self.codes, self.scale, self.note = codes, scale, note

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self.codes.float().view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return type(args[0])(args[0].codes, args[0].scale, args[0].note)
        if func is torch.ops.aten.clone.default:
            return type(args[0])(args[0].codes.clone(), args[0].scale.clone(), args[0].note)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantized) and isinstance(args[1], Quantized):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            args[0].note = args[1].note
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten._to_copy.default:  # a copy to another device or dtype has other contents
            return args[0].dequantize() + 100
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Slotted(Quantized):
    """Its inner tensors lie in slots, as those of torchao's float8 tensors."""

    __slots__ = ("codes", "scale")


class Named(torch.Tensor):
    """A tensor with memory of its own and an attribute."""

    note: str


class OwnState(Quantized):
    """Sets its state by code of its own, so a load refuses it."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a load has run code of the class")


def quantized(kind: type[Quantized] = Quantized, seed: int = 1, note: str = "kept") -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, (8, 4), generator=generator, dtype=torch.int8)
    return kind(codes, torch.rand(8, generator=generator), note)


def named(seed: int = 1) -> Named:
    tensor = torch.rand(3, generator=torch.Generator().manual_seed(seed)).as_subclass(Named)
    tensor.note = "kept"
    return tensor


def load_with_stock(state: dict[str, Any], path: str) -> None:
    with torch.serialization.safe_globals([Quantized, Slotted, Named]):  # stock needs that, and torchao does it
        dcp.load(state, checkpoint_id=path)


def wrapped(seed: int) -> StateDict:
    local, mesh = quantized(seed=seed + dist.get_rank()), mesh_of((dist.get_world_size(),))
    return {
        "wrapper": quantized(seed=seed),
        "slots": quantized(Slotted, seed=seed),
        "memory of its own": named(seed),
        "an object that holds one": (quantized(seed=seed),),
        "state": {"exp_avg": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)},
    }


def parts(value: Any) -> Any:
    if isinstance(value, dict | tuple):
        return [parts(each) for each in (value.values() if isinstance(value, dict) else value)]
    local = value.to_local() if isinstance(value, DTensor) else value
    inner = [local.codes.tolist(), local.scale.tolist()] if isinstance(local, Quantized) else local.tolist()
    return type(local).__name__, inner, local.note


def save_and_load_wrapped(directory: str) -> list[tuple[str, str]]:
    """The ways that get something else."""
    wrong = []
    for saver in ("ours", "async", "stock + both", "stock"):
        (SAVERS | OTHER_SAVERS)[saver](wrapped(1), f"{directory}/{saver}")
        for loader, load in (("ours", LOADERS["ours"]), ("stock", load_with_stock)):
            state = wrapped(7)
            load(state, f"{directory}/{saver}")
            wrong += [(saver, loader)] if parts(state) != parts(wrapped(1)) else []
    return wrong


def test_what_either_side_saves_either_side_loads(tmp_path: Path) -> None:
    assert on_ranks(2, save_and_load_wrapped, str(tmp_path)) == [[], []]


def test_what_a_load_refuses_is_told_when_it_is_saved(tmp_path: Path) -> None:
    report = robust_dcp.save({"x": quantized(OwnState), "sound": quantized()}, checkpoint_id=tmp_path)
    assert list(report.unloadable_objects) == ["x"] and "__setstate__" in report.unloadable_objects["x"]
    for known, error, why in (([], UnsafeCheckpoint, "__setstate__"), ([OwnState], RobustCheckpointError, "its class")):
        with torch.serialization.safe_globals(known), pytest.raises(error, match=why):
            robust_dcp.load({"x": quantized(OwnState)}, checkpoint_id=tmp_path)


def test_a_forged_one_does_not_set_what_belongs_to_the_class(tmp_path: Path) -> None:
    for name in ("copy_", "dequantize"):
        forged = quantized()
        vars(forged)[name] = 3
        directory = tmp_path / name
        dcp.save({"x": (forged,)}, checkpoint_id=directory)
        with pytest.raises(robust_dcp.CorruptCheckpoint, match=name):
            robust_dcp.load({"x": (quantized(),)}, checkpoint_id=directory)


def test_tensors_that_stock_saved_with_other_strides_are_not_taken_for_their_neighbours(tmp_path: Path) -> None:
    matrix = torch.arange(48.0).reshape(6, 8)
    turned = {f"w{number}": (matrix + number).reshape(8, 6).t() for number in (1, 4, 5)}
    saved = {f"w{number}": matrix + number for number in range(9)} | turned
    dcp.save(dict(saved), checkpoint_id=tmp_path, no_dist=True)
    loaded = {name: torch.zeros(6, 8) for name in saved}
    robust_dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert differences(saved, loaded) == []
