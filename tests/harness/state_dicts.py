"""State dicts of every kind that people save. Their contents depend only on name, shape and ``seed``.

``KINDS[name](seed)`` makes the same structure for every seed. A test saves seed 1 and loads it into seed 0, which must
then equal a fresh seed 1. There must be four ranks, and every rank of the default group calls them.
"""

from __future__ import annotations

import datetime
import functools
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["DTYPES", "KINDS", "LAYOUTS", "dtensors", "full_tensor", "mesh_of", "pattern"]

StateDict = dict[str, Any]

_DTYPE_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name))


def pattern(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits that depend only on the arguments. NaN and infinities are among them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def full_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A float32 tensor that is the same on every rank."""
    return pattern(name, shape, torch.float32, seed)


def plain(seed: int) -> StateDict:
    return {
        "weight": pattern("weight", (17, 5), torch.float32, seed),
        "bias": pattern("bias", (17,), torch.bfloat16, seed),
        "a name.with dots/and slashes, ünïcode": pattern("odd", (3,), torch.float64, seed),
        f"only on rank {dist.get_rank()}": pattern(f"own {dist.get_rank()}", (4, 4), torch.int64, seed),
    }


def all_dtypes(seed: int) -> StateDict:
    found: StateDict = {str(dtype): pattern(str(dtype), (3, 5), dtype, seed) for dtype in DTYPES}
    found |= {f"0-dim {dtype}": pattern(f"0 {dtype}", (), dtype, seed) for dtype in DTYPES}
    return found


def quantized(seed: int) -> StateDict:
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6) * (seed + 0.5)
    scales, zeros = torch.tensor([0.1, 0.25, 0.5, 1.0]), torch.tensor([0, 1, 2, 3])
    return {
        "per tensor": torch.quantize_per_tensor(values, 0.5, 3, torch.quint8),
        "per channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
    }


def shapes(seed: int) -> StateDict:
    return {
        "0-dim": pattern("0-dim", (), torch.float32, seed),
        "empty": torch.empty(0),
        "empty in the middle": torch.empty(3, 0, 2, dtype=torch.int32),
        "one": pattern("one", (1,), torch.int8, seed),
        "many dimensions": pattern("many", (1, 2, 1, 3, 1, 2, 1), torch.float16, seed),
        "over a page": pattern("page", (1025,), torch.float32, seed),
        "over a block": pattern("block", (300_000,), torch.float32, seed),
    }


def views(seed: int) -> StateDict:
    base = pattern("base", (12, 8), torch.float32, seed)
    shared = pattern("shared", (64,), torch.float32, seed)
    found: StateDict = {
        "one of a column": base[::12, 5],
        "transposed": base.t(),
        "every second": base[:, ::2],
        "channels last": pattern("nchw", (2, 3, 4, 4), torch.float32, seed).to(memory_format=torch.channels_last),
        "shared, first": shared,
        "shared, second": shared[32:],
        "parameter": nn.Parameter(pattern("parameter", (6,), torch.float32, seed)),
        "requires_grad": pattern("leaf", (6,), torch.float32, seed).requires_grad_(),
    }
    if seed == 1:  # these cannot be written to, so they are loaded into ordinary tensors
        found["expanded"] = base[:1].expand(5, 8)
        found["not a leaf"] = found["requires_grad"] * 2
        found["conjugate"] = pattern("conjugate", (6,), torch.complex64, seed).conj()
        found["negative"] = pattern("negative", (6,), torch.complex64, seed).conj().imag
    else:
        found["expanded"] = torch.zeros(5, 8)
        found["not a leaf"] = torch.zeros(6)
        found["conjugate"] = torch.zeros(6, dtype=torch.complex64)
        found["negative"] = torch.zeros(6)
        # Two targets that share memory would overwrite each other in a load.
        found["shared, second"] = torch.zeros(32)
        found["one of a column"] = base.clone()[::12, 5]
        found["every second"] = base.clone()[:, ::2]
    return found


def nested(seed: int) -> StateDict:
    return {
        "model": {"layers": [{"w": pattern(f"layer {n}", (4,), torch.float32, seed), "n": n} for n in range(3)]},
        "optimizer": {
            "state": {
                number: {"exp_avg": pattern(f"avg {number}", (4,), torch.float32, seed), "step": torch.tensor(seed)}
                for number in range(2)
            },
            "param_groups": [{"lr": 0.1 * seed, "params": [0, 1], "betas": (0.9, 0.99)}],
        },
        "mixed": [pattern("mixed", (2,), torch.float32, seed), f"text {seed}", (1, seed)],
        "empty dict": {},
        "empty list": [],
    }


def objects(seed: int) -> StateDict:
    return {
        "int": seed,
        "none": None if seed else "something",
        "text": "ünï" * seed,
        "bytes": b"\x00\xff" * seed,
        "large": deque(range(5_000 * seed)),
        "set": {seed},
        "ordered": OrderedDict(a=seed, b=[seed, {"c": seed}]),
        "when": datetime.datetime(2024, 1, 1 + seed, tzinfo=datetime.timezone.utc),
        "size": torch.Size([seed, 2]),
        "dtype": torch.bfloat16 if seed else torch.float32,
        f"rng of rank {dist.get_rank()}": {"seed": seed, "rank": dist.get_rank()},
    }


class Counter:
    """A simple ``Stateful``."""

    def __init__(self, seed: int) -> None:
        self.value = pattern("counter", (5,), torch.float32, seed)
        self.step = seed
        self.loaded = 0

    def state_dict(self) -> StateDict:
        return {"value": self.value, "step": self.step, "deep": {"list": [self.value * 2, self.step]}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.value, self.step = state_dict["value"], state_dict["step"]
        self.loaded += 1


def stateful(seed: int) -> StateDict:
    return {"counter": Counter(seed), "module": _filled(nn.Linear(3, 4), seed), "beside": torch.tensor(seed)}


def sharded_tensor(seed: int) -> StateDict:
    """A ShardedTensor with its rows divided unevenly between ranks. Rank 0 has two shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cuts = [0, 1, *(3 + 2 * n for n in range(world))]
    full = full_tensor("sharded", (cuts[-1], 3), seed)
    spans = list(pairwise(cuts))
    owned = spans[:2] if rank == 0 else [spans[rank + 1]]
    shards = [LocalShard.from_tensor_and_offsets(full[a:b].clone(), [a, 0], rank) for a, b in owned]
    return {"sharded": init_from_local_shards(shards, cuts[-1], 3), "beside": torch.tensor(seed)}


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = {
    # shape of the tensor, shape of the mesh of 4 ranks, placements
    "rows": ((8, 6), (4,), (Shard(0),)),
    "columns": ((8, 6), (4,), (Shard(1),)),
    "uneven": ((7, 5), (4,), (Shard(0),)),
    "fewer rows than ranks": ((2, 3), (4,), (Shard(0),)),
    "empty": ((0, 3), (4,), (Shard(0),)),
    "replicated": ((5,), (4,), (Replicate(),)),
    "0-dim": ((), (4,), (Replicate(),)),
    "grid": ((6, 10), (2, 2), (Shard(0), Shard(1))),
    "uneven grid": ((5, 7), (2, 2), (Shard(0), Shard(1))),
    "grid, turned": ((5, 7), (2, 2), (Shard(1), Shard(0))),
    "twice the same dimension": ((9, 2), (2, 2), (Shard(0), Shard(0))),
    "replicas of shards": ((7, 2), (2, 2), (Replicate(), Shard(0))),
    "shards of replicas": ((7, 2), (2, 2), (Shard(0), Replicate())),
    "replicated everywhere": ((3, 3), (2, 2), (Replicate(), Replicate())),
}


def own_shards(seed: int) -> StateDict:
    """A plain tensor that says which shards it holds, as of torch 2.15: rows of two places, with padding between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full = full_tensor("own shards", (4 * world, 3), seed)
    begin, later = 2 * rank, 2 * (world + rank)
    tensor: Any = torch.cat([full[begin : begin + 2], torch.zeros(1, 3), full[later : later + 2]])
    tensor.global_shape = (4 * world, 3)
    tensor.global_offsets = ((begin, 0), (later, 0))
    tensor.local_offsets = ((0, 0), (3, 0))
    tensor.local_sizes = ((2, 3), (2, 3))
    return {"w": tensor, "whole": torch.tensor(seed)}


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks. It is made once: each makes groups, and the next takes longer the more a process has."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dtensors(seed: int) -> StateDict:
    """A DTensor of each of :data:`LAYOUTS`."""
    found: StateDict = {}
    for name, (shape, mesh_shape, placements) in LAYOUTS.items():
        full = full_tensor(name, shape, seed)
        # With src_data_rank=None every rank cuts its part out of its own copy, without communication.
        found[name] = distribute_tensor(full, mesh_of(mesh_shape), placements, src_data_rank=None)
    return found


class _Net(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 3)


def _filled(module: nn.Module, seed: int) -> nn.Module:
    """Fill each parameter by its name and its place in the mesh. So replicas are equal, and shards differ."""
    for name, parameter in module.named_parameters():
        _fill(name, parameter, seed)
    return module


def _fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    local = tensor
    if isinstance(tensor, DTensor):
        coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or [])
        shard = [at for at, place in zip(coordinate, tensor.placements, strict=True) if not place.is_replicate()]
        name, local = f"{name} {shard}", tensor.to_local()
    with torch.no_grad():
        local.copy_(pattern(name, local.shape, local.dtype, seed))


class _Training:
    """A model and its optimizer, saved as in PyTorch's recipes, by ``get_state_dict`` and ``set_state_dict``."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
        _filled(model, seed)
        # As after a step, the moments are not zero.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _filled(model, seed)
        for name, parameter in model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if key != "step":
                    _fill(f"{name} {key}", value, seed)

    def state_dict(self) -> StateDict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: StateDict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def fsdp2(seed: int) -> StateDict:
    model = _Net()
    mesh = mesh_of((dist.get_world_size(),))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return {"training": _Training(model, seed)}


def fsdp2_and_tensor_parallel(seed: int) -> StateDict:
    """FSDP2 and tensor parallelism cut dimension 0 of the same weight. This makes strided shards."""
    try:
        return {"training": _Training(_in_two_dimensions(_Net()), seed)}
    except NotImplementedError:  # torch 2.7 requires even shards
        return {"training": _Training(_in_two_dimensions(_Net(width=12)), seed)}


def _in_two_dimensions(model: nn.Module) -> nn.Module:
    mesh = mesh_of((2, dist.get_world_size() // 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def tied(seed: int) -> StateDict:
    """One parameter under two names, and a model that holds one twice, as embeddings do."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    _filled(model, seed)
    return {"model": model.state_dict(), "again": model[0].weight}


def data_parallel(seed: int) -> StateDict:
    return {"training": _Training(nn.parallel.DistributedDataParallel(_Net()), seed)}


KINDS: dict[str, Callable[[int], StateDict]] = {
    function.__name__: function
    for function in (
        plain,
        all_dtypes,
        quantized,
        shapes,
        views,
        nested,
        objects,
        stateful,
        sharded_tensor,
        tied,
        data_parallel,
        dtensors,
        fsdp2,
        fsdp2_and_tensor_parallel,
        *((own_shards,) if hasattr(dcp, "CheckpointableTensor") else ()),
    )
}
