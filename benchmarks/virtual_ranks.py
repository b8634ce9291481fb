"""Makes the structures of virtual ranks. They are what the ranks of real jobs of any size would bring to a plan.

Owns the shapes of the simulated models. ``simulation`` gives them to our planner and to stock's. Each kind gives a rank
about the requested number of items, sharded as in the frameworks:

* ``fsdp2``: parameters and optimizer states, each cut along dimension 0 over all ranks (FSDP2, DTensor ``Shard(0)``).
* ``dense``: tensor x pipeline x data parallel. All ranks of a data parallel group hold the same chunks.
* ``moe``: expert weights ``[experts, rows, columns]`` are cut over expert parallel groups. The rest is as in ``dense``.
* ``distopt``: Megatron's distributed optimizer. Each model parallel shard is flattened, and cut unevenly over the data
  parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from robust_dcp.plan.items import Form, ItemKind, Items, ItemStructure, items_of, sorted_places
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.signature import PlanContext, StructureSignature

__all__ = ["FILES_PER_RANK", "KINDS", "NamedItem", "columns_of", "local_of", "named_items", "path_of"]

FILES_PER_RANK = 2
"""The number of files that ``RobustWriter`` makes on each rank without options."""

NamedItem = tuple[str, ItemStructure]

_HIDDEN = 4096
_STATES = ("", "exp_avg.", "exp_avg_sq.")


@dataclass(frozen=True)
class _Place:
    """The place of a rank in the parallel groups. Tensor parallel ranks are next to each other."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        sizes = (self.tensor_size, self.pipeline_size, self.data_size)
        if math.prod(sizes) != self.ranks or 8 % self.tensor_size:
            found = " x ".join(map(str, sizes))
            raise ValueError(f"{self.ranks} ranks are not {found} (tensor, pipeline, data): take a power of two")

    @property
    def tensor_size(self) -> int:
        return max(1, min(8, self.ranks // 2))

    @property
    def pipeline_size(self) -> int:
        return max(1, min(4, self.ranks // (4 * self.tensor_size)))

    @property
    def data_size(self) -> int:
        return self.ranks // (self.tensor_size * self.pipeline_size)

    @property
    def tensor(self) -> int:
        return self.rank % self.tensor_size

    @property
    def data(self) -> int:
        return self.rank // self.tensor_size % self.data_size

    @property
    def stage(self) -> int:
        return self.rank // (self.tensor_size * self.data_size)


def named_items(kind: str, rank: int, ranks: int, n_items: int, *, added: bool = False) -> list[NamedItem]:
    """The items of one rank, sorted by (name, offsets).

    Args:
        kind: one of ``KINDS``.
        rank: the number of the rank.
        ranks: the number of ranks, a power of two.
        n_items: the approximate number of items.
        added: whether to add a tensor that no other rank has.

    Raises:
        ValueError: the ranks cannot be divided into parallel groups.
    """
    items = [*KINDS[kind](_Place(rank, ranks), n_items - 2), *_objects(rank)]
    if added:
        shape = (_HIDDEN,)
        items.append(("added.weight", _chunk("float32", shape, (0,), shape, kind=ItemKind.TENSOR)))
    names, structures = [name for name, _ in items], [structure for _, structure in items]
    return [items[place] for place in sorted_places(names, structures)]


def columns_of(items: list[NamedItem]) -> Items:
    """The columns of a rank with these items."""
    names = [name for name, _ in items]
    return items_of(names, [structure for _, structure in items], {name: path_of(name) for name in names})


def path_of(name: str) -> tuple[str, ...]:
    """The place of an item in the nested state dict."""
    return tuple(name.split("."))


def local_of(items: Items, ranks: int) -> LocalStructure:
    """What a rank with these items brings to the plan. An object is the same on all ranks that hold it."""
    context = PlanContext(
        ranks=tuple(range(ranks)),
        planner_options={"flatten_state_dict": True, "flatten_sharded_tensors": True, "lowest_rank": False},
        writer_options={"layout": "torch", "files_per_rank": FILES_PER_RANK},
        versions={"torch": "2.13.0", "robust_dcp": "0.1.0"},
    )
    return LocalStructure(
        items=items,
        context=context,
        signature=StructureSignature.of(items, context),
        files=FILES_PER_RANK,
        lowest_rank=False,
    )


def _objects(rank: int) -> Iterator[NamedItem]:
    yield "iteration", ItemStructure(ItemKind.BYTES, Form.VARIABLE)
    yield f"rng_state.{rank}", ItemStructure(ItemKind.BYTES, Form.VARIABLE)


def _chunk(
    dtype: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    kind: ItemKind = ItemKind.SHARD,
) -> ItemStructure:
    return ItemStructure(kind, Form.FIXED, dtype, "strided", False, shape, offsets, sizes)


def _cut(shape: tuple[int, ...], dim: int, part: int, parts: int, dtype: str = "bfloat16") -> ItemStructure:
    """Part number ``part`` of ``parts`` equal parts along ``dim``."""
    size = shape[dim] // parts
    offsets = tuple(part * size if d == dim else 0 for d in range(len(shape)))
    sizes = tuple(size if d == dim else extent for d, extent in enumerate(shape))
    return _chunk(dtype, shape, offsets, sizes)


_LAYER: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("attention.qkv.weight", (3 * _HIDDEN, _HIDDEN), 0),
    ("attention.proj.weight", (_HIDDEN, _HIDDEN), 1),
    ("mlp.fc1.weight", (4 * _HIDDEN, _HIDDEN), 0),
    ("mlp.fc2.weight", (_HIDDEN, 4 * _HIDDEN), 1),
    ("input_norm.weight", (_HIDDEN,), None),
    ("mlp_norm.weight", (_HIDDEN,), None),
)
"""The name, the global size, and the dimension that tensor parallelism cuts."""


def _weights(n_items: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """(prefix of the layer, name within, global size, dimension that is cut), layer after layer."""
    for number in range(n_items):
        layer, place = divmod(number, len(_LAYER) * len(_STATES))
        state, weight = divmod(place, len(_LAYER))
        name, shape, dim = _LAYER[weight]
        yield f"layers.{layer}", f"{_STATES[state]}{name}", shape, dim


def _fsdp2(place: _Place, n_items: int) -> Iterator[NamedItem]:
    for layer, name, shape, _ in _weights(n_items):
        rows = -(-shape[0] // place.ranks)
        begin = min(place.rank * rows, shape[0])
        size = min(rows, shape[0] - begin)
        rest = shape[1:]
        yield f"{layer}.{name}", _chunk("float32", shape, (begin, *(0 for _ in rest)), (size, *rest))


def _dense(place: _Place, n_items: int) -> Iterator[NamedItem]:
    for layer, name, shape, dim in _weights(n_items):
        full_name = f"stages.{place.stage}.{layer}.{name}"
        if dim is None:
            yield full_name, _chunk("bfloat16", shape, (0,), shape)
        else:
            yield full_name, _cut(shape, dim, place.tensor, place.tensor_size)


def _moe(place: _Place, n_items: int) -> Iterator[NamedItem]:
    experts_per_rank, layer_items = 8, 8 * len(_STATES) * 2
    expert_ranks = min(8, place.data_size)
    n_expert_items = (
        n_items * 3 // 4 // layer_items * layer_items
    )  # a multiple of whole layers, so that no expert is missing
    for number in range(n_expert_items):
        layer, rest = divmod(number, layer_items)
        expert, state_weight = divmod(rest, len(_STATES) * 2)
        state, weight = divmod(state_weight, 2)
        shape = (experts_per_rank * expert_ranks, _HIDDEN, _HIDDEN // 4)
        rows = _HIDDEN // place.tensor_size
        offsets = (place.data % expert_ranks * experts_per_rank + expert, place.tensor * rows, 0)
        name = f"stages.{place.stage}.layers.{layer}.{_STATES[state]}experts.fc{weight + 1}.weight"
        yield name, _chunk("bfloat16", shape, offsets, (1, rows, shape[2]))
    yield from _dense(place, n_items - n_expert_items)


def _distopt(place: _Place, n_items: int) -> Iterator[NamedItem]:
    for layer, name, shape, dim in _weights(n_items):
        numel = 1
        for extent in shape:
            numel *= extent
        local = numel if dim is None else numel // place.tensor_size
        # Buckets end at arbitrary places, so the parts of the ranks differ in length.
        cuts = [local * (7 * part + part % 3) // (7 * place.data_size) for part in range(place.data_size)] + [local]
        begin, end = cuts[place.data], cuts[place.data + 1]
        shard = "" if dim is None else f".shard_{place.tensor}_{place.tensor_size}"
        full_name = f"optimizer.stages.{place.stage}.{layer}.{name}{shard}"
        yield full_name, _chunk("float32", (local,), (begin,), (end - begin,))


KINDS: dict[str, Callable[[_Place, int], Iterator[NamedItem]]] = {
    "fsdp2": _fsdp2,
    "dense": _dense,
    "moe": _moe,
    "distopt": _distopt,
}
"""The kinds of virtual models, by name."""
