"""The items of a state dict as columns: which there are, without their contents.

:class:`Items` is what a rank describes, hashes and sends, and what the coordinator merges, plans and indexes. It never
looks at tensor data, other ranks or files. ``state_dict`` hashes it, ``diff`` compares it, ``global_plan`` plans on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain, pairwise
from operator import lt
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace

from robust_dcp.coverage import columns_of
from robust_dcp.decoding import from_msgpack
from robust_dcp.errors import ExchangeError, PlanConflict

T = TypeVar("T")

_PROTOCOL: Any = getattr(dcp, "CheckpointableTensor", None)

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.integer[Any]]
Rows = npt.NDArray[np.intp]

Size = tuple[int, ...]
_Size = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

Path = tuple[str | int, ...]
"""Where a value is in a nested state dict. Its name is the path joined by dots, as in DCP."""


class Properties(NamedTuple):
    """What DCP's ``TensorProperties`` say of a tensor, for example ``("float32", "strided", False)``.

    Items that are not tensors have ``("", "", False)``.
    """

    dtype: str
    layout: str
    requires_grad: bool


class ItemKind(IntEnum):
    """The kinds of ``torch.distributed.checkpoint.planner.WriteItemType``."""

    TENSOR = 1
    SHARD = 2
    BYTES = 3


class Form(IntEnum):
    """How an item is stored: in a record of a length that follows from the structure, or in bytes of any length."""

    FIXED = 0
    VARIABLE = 1


class Replica(IntEnum):
    """Which of the ranks that hold a chunk may write it.

    In plain DCP replicas are equal by contract, so any rank may write. Megatron's callers say which replica counts
    (``replica_id`` 0), because the others may have drifted from it.
    """

    ANY = 0
    MAIN = 1
    COPY = 2


class ItemStructure(NamedTuple):
    """What an item is, without its name. Many items of a state dict share one structure.

    Attributes:
        kind, form: see :class:`ItemKind` and :class:`Form`.
        dtype, layout: for example ``"float32"`` and ``"strided"``; ``""`` for items that are not tensors.
        requires_grad: the flag of the tensor.
        shape, offsets, sizes: the global size, and the offsets and sizes of the chunk; ``()`` for objects.
        replica: whether this rank may write the item.
    """

    kind: ItemKind
    form: Form
    dtype: str = ""
    layout: str = ""
    requires_grad: bool = False
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    replica: Replica = Replica.ANY


_BLOCK: Final = 64
"""About so many names are in one block of a message."""

_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "name": np.int32,
    "properties_of": np.int32,
    "kind": np.uint8,
    "form": np.uint8,
    "replica": np.uint8,
    "shape": np.int32,
    "offset": np.int32,
    "size": np.int32,
}
"""The columns that are hashed and sent, and their types."""


class Items(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Columns over N items, of one rank or of all. The items of a rank are sorted by (name, offsets).

    Strings and sizes are in sorted tables of their own, and the columns hold places in these tables. So two state dicts
    that differ only in the order of their keys have equal columns. And what a model has once for each tensor, and a job
    once for each shard, is there once: few sizes and offsets are distinct.

    Attributes:
        names: the distinct FQNs, sorted.
        paths: for each name its path in the nested state dict, for example ``("model", "layers", 0)``; ``None`` if the
            planner does not flatten.
        properties: the distinct :class:`Properties`, sorted.
        sizes: the distinct global sizes, offsets and sizes of chunks, those of fewer dimensions first; ``()`` for an
            object.
        rank: int32 ``[N]``, the rank that holds the item; 0 for the items of one rank. It is not sent.
        name, properties_of: int32 ``[N]``, places in ``names`` and ``properties``.
        kind: uint8 ``[N]``, :class:`ItemKind`.
        form: uint8 ``[N]``, :class:`Form`.
        replica: uint8 ``[N]``, :class:`Replica`.
        shape, offset, size: int32 ``[N]``, places in ``sizes`` of the global size, and of the offset and size of the
            chunk. All three have the same number of dimensions.
        peers: the global ranks that may write copies of each other's main replicas. ``()`` means only this rank.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...] | None
    properties: tuple[Properties, ...]
    sizes: tuple[Size, ...]
    rank: Int32
    name: Int32
    properties_of: Int32
    kind: UInt8
    form: UInt8
    replica: UInt8
    shape: Int32
    offset: Int32
    size: Int32
    peers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """The columns that are hashed and sent."""
        return tuple(getattr(self, column) for column in _COLUMNS)

    @cached_property
    def extents(self) -> Int64:
        """int64 ``[S, D]``: ``sizes``, filled up with 1. D is the largest number of dimensions."""
        return columns_of(self.sizes, 1)

    @cached_property
    def begins(self) -> Int64:
        """int64 ``[S, D]``: ``sizes`` as offsets, filled up with 0."""
        return columns_of(self.sizes, 0)

    @cached_property
    def numel(self) -> Int64:
        """int64 ``[N]``: elements in the chunk; 0 for objects."""
        return np.where(self.kind == ItemKind.BYTES, 0, self.extents.prod(axis=1)[self.size])

    @cached_property
    def nbytes(self) -> Int64:
        """int64 ``[N]``: bytes in the chunk; 0 for objects."""
        itemsizes = [int(getattr(torch, each.dtype).itemsize) if each.dtype else 0 for each in self.properties]
        return self.numel * np.array(itemsizes or [0], dtype=np.int64)[self.properties_of]

    @cached_property
    def outside(self) -> Rows:
        """The rows of chunks that do not lie within their tensor."""
        is_outside = np.zeros(len(self), dtype=np.bool_)
        for begins, extents in zip(self.begins.T, self.extents.T, strict=True):
            whole, begin, length = extents[self.shape], begins[self.offset], extents[self.size]
            is_outside |= (begin < 0) | (length < 0) | (length > whole - begin)
        return np.flatnonzero(is_outside)

    def take(self, rows: Rows) -> Items:
        """The items in these rows, in their order."""
        columns = {name: getattr(self, name).take(rows, axis=0) for name in ("rank", *_COLUMNS)}
        return replace(self, **columns)

    def numbered(self, name: str) -> Int32:
        """int32 ``[N]``: numbers that are equal where the property ``name`` is, such as ``"dtype"``."""
        values = [getattr(each, name) for each in self.properties]
        return np.array([values.index(each) for each in values], dtype=np.int32)[self.properties_of]

    @cached_property
    def name_blocks(self) -> tuple[bytes, ...]:
        """The names, or their paths, in encoded blocks that end where a name says so. So ranks that differ in one name
        have all blocks but one in common, and the coordinator decodes and holds these once."""
        ends = [place for place, name in enumerate(self.names, 1) if zlib.crc32(name.encode()) % _BLOCK == 0]
        given = self.names if self.paths is None else self.paths
        return tuple(msgspec.msgpack.encode(given[first:end]) for first, end in pairwise([0, *ends, len(given)]))

    def describe_whole(self, row: int) -> str:
        """Describe in words the tensor that an item belongs to. This text must be the same on all ranks."""
        if self.kind[row] == ItemKind.BYTES:
            return "object"
        dtype, layout, requires_grad = self.properties[self.properties_of[row]]
        text = f"{dtype}{list(self.sizes[self.shape[row]])}"
        if layout != "strided":
            text += f" {layout}"
        return f"{text} requires_grad" if requires_grad else text

    def describe(self, row: int) -> str:
        """Describe one item in words, for errors and differences."""
        text = self.describe_whole(row)
        if self.kind[row] == ItemKind.SHARD:
            offset, size = self.sizes[self.offset[row]], self.sizes[self.size[row]]
            is_whole = size == self.sizes[self.shape[row]] and not any(offset)
            text += " as one shard" if is_whole else f" chunk at {list(offset)} of size {list(size)}"
        if self.replica[row] != Replica.ANY:
            text += " (main replica)" if self.replica[row] == Replica.MAIN else " (other replica)"
        return text


def sorted_places(names: Sequence[str], structures: Sequence[ItemStructure]) -> list[int]:
    """The order of :class:`Items`: the places of the items, sorted by (name, offsets)."""
    return sorted(range(len(names)), key=lambda place: (names[place], structures[place].offsets))


def items_of(
    names: Sequence[str],
    structures: Sequence[ItemStructure],
    paths: Mapping[str, Path] | None = None,
    peers: tuple[int, ...] = (),
) -> Items:
    """The columns of one rank's items.

    Args:
        names: the FQN of each item, in the order of :func:`sorted_places`.
        structures: the structure of each item.
        paths: for each FQN its path in the nested state dict; ``None`` if the planner does not flatten.
        peers: as in :class:`Items`.

    Raises:
        PlanConflict: two items have the same name and offsets, or a name belongs to a tensor and to an object, or a
            path does not spell its name.
    """
    for place, (left, right) in enumerate(pairwise(names)):
        one, other_item = structures[place], structures[place + 1]
        if left == right and (one.offsets == other_item.offsets or one.kind != other_item.kind):
            are_objects = ItemKind.BYTES in (one.kind, other_item.kind)
            at = "" if are_objects else f" at offset {list(one.offsets)}"
            raise PlanConflict(
                f"the local plan names {left!r}{at} twice (as {one.kind.name} and as {other_item.kind.name}); "
                "each item of a state dict needs a name of its own: rename one of them",
                key=left,
            )
    distinct_names = tuple(dict.fromkeys(names))
    other = next((name for name in distinct_names if paths is not None and _name_of(paths[name]) != name), None)
    if paths is not None and other is not None:
        raise PlanConflict(
            f"the planner's mappings have the path {paths[other] or None!r} for {other!r}: its parts, joined by dots, "
            "must be the name. A planner that adds items to the flattened state dict must add their paths too, or be "
            "made with flatten_state_dict=False",
            key=other,
        )
    place_of = {name: place for place, name in enumerate(distinct_names)}
    # Tensors of a model have few different structures, so columns are made of these, and then spread over the items.
    place_of_structure = {structure: place for place, structure in enumerate(dict.fromkeys(structures))}
    which = np.fromiter(map(place_of_structure.__getitem__, structures), dtype=np.intp, count=len(structures))
    properties_of = [Properties(each.dtype, each.layout, each.requires_grad) for each in place_of_structure]
    properties = tuple(sorted(set(properties_of)))
    sizes = _sorted_sizes(chain.from_iterable((each.shape, each.offsets, each.sizes) for each in place_of_structure))
    place_of_size = {size: place for place, size in enumerate(sizes)}

    def column(name: str, values: Iterable[Any]) -> npt.NDArray[Any]:
        return np.array(list(values), dtype=_COLUMNS[name])[which]

    return Items(
        names=distinct_names,
        paths=None if paths is None else tuple(paths[name] for name in distinct_names),
        properties=properties,
        sizes=sizes,
        rank=_of_one_rank(len(names)),
        name=np.fromiter(map(place_of.__getitem__, names), dtype=np.int32, count=len(names)),
        properties_of=column("properties_of", map(properties.index, properties_of)),
        kind=column("kind", (each.kind for each in place_of_structure)),
        form=column("form", (each.form for each in place_of_structure)),
        replica=column("replica", (each.replica for each in place_of_structure)),
        shape=column("shape", (place_of_size[each.shape] for each in place_of_structure)),
        offset=column("offset", (place_of_size[each.offsets] for each in place_of_structure)),
        size=column("size", (place_of_size[each.sizes] for each in place_of_structure)),
        peers=peers,
    )


def _sorted_sizes(sizes: Iterable[Size]) -> tuple[Size, ...]:
    """The distinct ones, those of fewer dimensions first. A ``torch.Size`` becomes a tuple, as messages need it."""
    return tuple(sorted(map(tuple, set(sizes)), key=lambda size: (len(size), size)))


def _name_of(path: Path) -> str:
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:  # an index of a list
        return ".".join(map(str, path))


def _of_one_rank(n_items: int) -> Int32:
    return np.broadcast_to(np.int32(0), (n_items,))  # takes no memory


def merged(ranks: Sequence[Items]) -> Items:
    """The items of all ranks, in rank order. Only the coordinator calls this.

    Raises:
        PlanConflict: two ranks have different paths for one name (``{"a": {"b": …}}`` and ``{"a.b": …}``).
    """
    # Ranks have most of their blocks of names in common. Each block is looked at once.
    path_of: dict[str, Path | None] = {}
    names_of: dict[bytes, list[str]] = {}
    for rank, items in enumerate(ranks):
        for block in items.name_blocks:
            if block in names_of:
                continue
            names_of[block], paths = _named(block)
            for key, path in zip(names_of[block], paths, strict=True):
                if path_of.setdefault(key, path) != path:
                    first = next(rank for rank, each in enumerate(ranks) if key in each.names)
                    raise PlanConflict(
                        f"key {key!r} lies at {path_of[key]!r} in the state dict of rank {first} and at {path!r} in "
                        f"that of rank {rank}; flattened by dots both have one name: rename one of them",
                        key=key,
                        ranks=[first, rank],
                    )
    names = tuple(sorted(path_of))
    place_of = {name: place for place, name in enumerate(names)}
    places_of = {
        block: np.fromiter(map(place_of.__getitem__, each), dtype=np.int32, count=len(each))
        for block, each in names_of.items()
    }
    properties = tuple(sorted(set().union(*(each.properties for each in ranks))))
    sizes = _sorted_sizes(chain.from_iterable({each.sizes: each.sizes for each in ranks}))
    place_of_size = {size: place for place, size in enumerate(sizes)}
    places_of_sizes = {
        each.sizes: np.fromiter(map(place_of_size.__getitem__, each.sizes), dtype=np.int32, count=len(each.sizes))
        for each in ranks
    }

    def column(name: str, items: Items) -> Any:
        values = getattr(items, name)
        if name == "name":
            return np.concatenate([places_of[block] for block in items.name_blocks])[values]
        if name == "properties_of":
            return np.array([properties.index(each) for each in items.properties], dtype=np.int32)[values]
        return places_of_sizes[items.sizes][values] if name in ("shape", "offset", "size") else values

    columns: dict[str, Any] = {
        name: np.concatenate([column(name, each) for each in ranks]).astype(dtype, copy=False)
        for name, dtype in _COLUMNS.items()
    }
    return Items(
        names=names,
        paths=None if not any(path_of.values()) else tuple(path_of[name] or (name,) for name in names),
        properties=properties,
        sizes=sizes,
        rank=np.repeat(np.arange(len(ranks), dtype=np.int32), [len(each) for each in ranks]),
        **columns,
    )


class ItemsMessage(msgspec.Struct, frozen=True):
    """The :class:`Items` of one rank on their way to the coordinator, and in an index. Columns are little-endian.

    ``names``: blocks, each a msgpack array: for each name its path, as an array of its parts, or the name itself if the
    planner does not flatten.

    ``context``: what else a plan depends on, encoded. The coordinator compares it with its own.

    ``signature``: 16 bytes, the :class:`StructureSignature` of the items and the context.

    ``digests``: a uint64 for each value that ranks compare, in the order of the items; empty if none is compared.
    """

    names: tuple[bytes, ...]
    properties: tuple[Properties, ...]
    sizes: tuple[tuple[_Size, ...], ...]
    name: bytes
    properties_of: bytes
    kind: bytes
    form: bytes
    replica: bytes
    shape: bytes
    offset: bytes
    size: bytes
    context: bytes
    signature: bytes = b""
    peers: tuple[int, ...] = ()
    digests: bytes = b""

    @classmethod
    def of(cls, items: Items, context: bytes, signature: bytes, digests: bytes = b"") -> ItemsMessage:
        """The message for ``items``. The other arguments are the fields of these names."""
        return cls(
            names=items.name_blocks,
            properties=items.properties,
            sizes=items.sizes,
            context=context,
            signature=signature,
            peers=items.peers,
            digests=digests,
            **{
                column: getattr(items, column).astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
                for column, dtype in _COLUMNS.items()
            },
        )


class ItemsDecoder:
    """Decodes the items of many ranks. Replicas send the same columns: these become one object, decoded once."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[object, ...], Any] = {}

    def decode(self, message: ItemsMessage) -> Items:
        """The items in ``message``.

        Raises:
            ExchangeError: the columns do not fit each other.
        """
        names, paths = self._once(("names", message.names), lambda: self._names(message.names))
        columns = {column: self._column(getattr(message, column), dtype) for column, dtype in _COLUMNS.items()}
        items = Items(
            names=names,
            paths=paths,
            properties=self._once(("properties", message.properties), lambda: message.properties),
            sizes=self._once(("sizes", message.sizes), lambda: message.sizes),
            rank=_of_one_rank(len(columns["name"])),
            peers=self._once(("peers", message.peers), lambda: message.peers),
            **columns,
        )
        _check(items)
        # The index has these blocks too. To make them anew for all ranks takes as long as half a plan.
        vars(items)["name_blocks"] = tuple(
            self._once(("bytes", block), partial(bytes, block)) for block in message.names
        )
        return items

    def _once(self, key: tuple[object, ...], decode: Callable[[], T]) -> T:
        found: T | None = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = decode()
        return found

    def _column(self, data: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
        if len(data) % np.dtype(dtype).itemsize:
            raise _malformed(f"a column of {np.dtype(dtype).name} has {len(data)} bytes")
        return self._once((dtype, data), lambda: np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")))

    def _names(self, blocks: tuple[bytes, ...]) -> tuple[tuple[str, ...], tuple[Path, ...] | None]:
        """The names, and their paths if the planner flattens."""
        named = [self._once(("block", block), partial(_named, block)) for block in blocks]
        named = [(names, paths) for names, paths in named if names]
        if not all(names[-1] < following[0] for (names, _), (following, _) in pairwise(named)):
            raise _malformed("the names are not sorted")
        flattens = {paths[0] is not None for _, paths in named}
        if len(flattens) > 1:
            raise _malformed("half of the paths")
        names = tuple(chain.from_iterable(names for names, _ in named))
        paths: tuple[Any, ...] = tuple(chain.from_iterable(paths for _, paths in named))
        return names, paths if True in flattens else None


def _named(block: bytes) -> tuple[list[str], list[Path | None]]:
    """The names in a block, and their paths."""
    try:
        given = from_msgpack(block, tuple[str | Path, ...])
    except ValueError as error:
        raise _malformed(f"the names are no list of strings or paths ({error})") from None
    if len(set(map(type, given))) > 1 or () in given:
        raise _malformed("half of the paths, or a path without parts")
    names = [each if isinstance(each, str) else _name_of(each) for each in given]
    if not all(map(lt, names, names[1:])):
        raise _malformed("the names are not sorted")
    return names, [None if isinstance(each, str) else each for each in given]


def _check(items: Items) -> None:
    n_items = len(items.name)
    if any(len(column) != n_items for column in items.columns):
        raise _malformed("columns of different lengths")
    of_sizes = ((places, items.sizes) for places in (items.shape, items.offset, items.size))
    for places, table in ((items.name, items.names), (items.properties_of, items.properties), *of_sizes):
        if n_items and (int(places.min()) < 0 or int(places.max()) >= len(table)):
            raise _malformed("a place outside its table")
    steps = np.diff(items.name, prepend=-1, append=len(items.names))
    if (steps < 0).any():
        raise _malformed("the items are not sorted by name")
    if (steps > 1).any() or steps[-1] != 1:
        raise _malformed("a name without items")
    for dtype, layout, _ in items.properties:
        for text, kind in ((dtype, torch.dtype), (layout, torch.layout)):
            if text and not isinstance(vars(torch).get(text), kind):
                raise _malformed(f"this torch has no {kind.__name__} called {text!r}")
    is_bytes = items.kind == ItemKind.BYTES
    n_texts = np.array([bool(dtype) + bool(layout) for dtype, layout, _ in items.properties], dtype=np.intp)
    if (n_texts[items.properties_of] != np.where(is_bytes, 0, 2)).any():
        raise _malformed("a tensor without dtype or layout, or an object with one")
    ndims = np.array(list(map(len, items.sizes)), dtype=np.intp)
    ndim = np.where(is_bytes, 0, ndims[items.shape])
    if any((ndims[places] != ndim).any() for places in (items.shape, items.offset, items.size)):
        raise _malformed("an object with dimensions, or a chunk with others than its tensor")
    known = ((items.kind, ItemKind), (items.form, Form), (items.replica, Replica))
    if any(n_items and not min(values) <= column.min() <= column.max() <= max(values) for column, values in known):
        raise _malformed("an unknown kind or form of item, or an unknown kind of replica")


def _malformed(what: str) -> ExchangeError:
    return ExchangeError(f"a structure message is malformed: {what}; are all ranks on the same robust_dcp version?")


_LARGEST_TABLE: Final = 1 << 25


def distinct(numbers: Ints, n: int) -> tuple[Rows, Rows]:
    """The distinct ones of N numbers from 0 to ``n`` - 1, ascending, and for each of the N the place of its equal."""
    if n > _LARGEST_TABLE:
        found, which = np.unique(numbers, return_inverse=True)
        return found.astype(np.intp), which
    is_there = np.zeros(n, dtype=np.bool_)
    is_there[numbers] = True
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[numbers]


def global_size(value: Any) -> torch.Size | None:
    """The size of the whole tensor of which ``value`` is a part; ``None`` if ``value`` has no size."""
    if is_checkpointable(value):
        return torch.Size(value.global_shape)
    size = getattr(value, "size", None)
    return torch.Size(size()) if callable(size) else None


def is_checkpointable(value: Any) -> bool:
    """Whether a tensor says itself of which whole it is a part (``CheckpointableTensor`` of torch)."""
    # The first test alone rules out almost every tensor. The other one looks at all attributes of the protocol.
    return (
        _PROTOCOL is not None
        and hasattr(value, "global_offsets")
        and isinstance(value, torch.Tensor)
        and isinstance(value, _PROTOCOL)
    )
