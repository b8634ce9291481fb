"""``RobustLoadPlanner``: DCP's ``LoadPlanner``, with checks before the first byte is read.

It checks keys, shapes and dtypes against ``.metadata``, and that the saved chunks fill what is asked for, in a load of
ours and in one of stock's.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict
from torch.distributed.tensor import DTensor

from robust_dcp.collector import without_garbage_collection
from robust_dcp.coverage import Box, Coverage, columns_of
from robust_dcp.errors import CorruptCheckpoint, PlanConflict, entry_point
from robust_dcp.items import global_size
from robust_dcp.names import bare_name, fits, without_wrappers
from robust_dcp.plan.keys import near_names, renamed_in_words, what_is_saved
from robust_dcp.plan.load_items import (
    chunks_held,
    local_tensors,
    names_of_one_memory,
    plan_reads,
    unusable_targets,
    whole_tensors,
)
from robust_dcp.plan.state_dict import flattened, holds_shards, overridden
from robust_dcp.storage.index.stored_index import StoredIndex, index_of
from robust_dcp.storage.reading.comparing import Comparison
from robust_dcp.storage.reading.reads import PlannedItems
from robust_dcp.storage.records.objects import ObjectBytes, check_object, not_an_object

_SHOWN = 10
_MISSING = "Missing key in checkpoint: "
_PROTOCOL = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "lookup_tensor",
    "transform_tensor",
    "resolve_tensor",
    "commit_tensor",
)
"""If a subclass overrides none of these, a plan may be carried out without asking it about each tensor."""


class RobustLoadPlanner(DefaultLoadPlanner):
    """A load planner that finds everything that does not fit before it reads, and names all of it.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in ``DefaultLoadPlanner``.
        allow_partial_load: as in ``DefaultLoadPlanner``: keys of the state dict that the checkpoint does not have, of
            whatever kind, keep their values. The log names them at WARNING.
        allow_missing: patterns of the keys that the checkpoint may lack, such as ``["rng.*", "loader.*"]``. They keep
            their values. Any other missing key is an error.
        ignore: patterns of keys of the checkpoint that are meant to be left alone: the log does not say of them that
            no rank has asked for them.
        on_dtype_mismatch: ``"error"`` if a tensor has another dtype than the saved one, or ``"cast"`` as stock does.
        trusted: unpickle objects of any class. Use it only for checkpoints from a source that may run code here. A
            :class:`RobustReader` that is passed as well decides by its own ``trusted``.

    Raises:
        PlanConflict: (from ``create_local_plan``) keys are missing, shapes or dtypes differ, or one side has a tensor
            and the other an object, which may only take the place of a tensor without dimensions.
        CorruptCheckpoint: the saved chunks do not fill a tensor that is asked for.
    """

    missing_keys: tuple[str, ...] = ()
    """Keys of the state dict that the checkpoint does not have. ``create_local_plan`` finds them."""

    stands_for: DefaultLoadPlanner | None = None
    """The planner of stock's that the caller has passed."""

    checkpoint: str = ""
    """Where it is, for messages. ``robust_dcp.load`` sets it."""

    read_objects: Callable[[list[str]], dict[str, Any] | None] | None = None
    """Reads objects of the checkpoint by name before the plan is made. ``robust_dcp.load`` sets it."""

    comparison: Comparison | None = None
    """What ``robust_dcp.prove`` sets, so that targets are compared with the checkpoint and stay as they are."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        on_dtype_mismatch: Literal["error", "cast"] = "error",
        trusted: bool = False,
        allow_missing: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        if on_dtype_mismatch not in ("error", "cast"):
            raise ValueError(f'on_dtype_mismatch is "error" or "cast", not {on_dtype_mismatch!r}')
        self.on_dtype_mismatch = on_dtype_mismatch
        self.trusted = trusted
        self.allow_missing = _patterns("allow_missing", allow_missing)
        self.ignore = _patterns("ignore", ignore)
        self._spelt: dict[int, dict[str, Any]] = {}

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Keys of the checkpoint that the state dict does not ask for."""
        return tuple(sorted(self._saved.keys() - self.state_dict.keys()))

    @property
    def _saved(self) -> Mapping[str, Any]:
        return {} if self.metadata is None else self.metadata.state_dict_metadata

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.missing_keys, self._spelt = (), {}
        if self.comparison is not None:
            self.comparison = Comparison()
        self.original_state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        # Stock's set_up_planner puts None in the place of objects that it does not know. It does so before it finds
        # that something does not fit, and for keys that the checkpoint does not have.
        with without_garbage_collection():
            self.state_dict, mappings = flattened(state_dict, is_nested=self.flatten_state_dict)
            if self.flatten_state_dict:
                self.mappings = mappings
            if self.flatten_sharded_tensors and any(map(holds_shards, {*map(type, self.state_dict.values())})):
                # By name, as in a save: in a list, torch puts None in the place of a tensor of which this rank has no
                # shard. In a dict it leaves that out, and would take the checkpoint for one with old names.
                self.state_dict = {**self.state_dict, **_flatten_sharded_tensors(self.state_dict)}
            on_meta = {
                name: value for name, value in self.state_dict.items() if self.comparison is None and _is_on_meta(value)
            }
            if dist.is_initialized():
                _init_state_dict(on_meta)  # allocates them
            else:  # it would ask the default group for its device
                on_meta = {name: torch.empty_like(value, device="cpu") for name, value in on_meta.items()}
            for name, value in on_meta.items():
                self._put(name, value)
        if self.stands_for is not None:  # programs look there for the keys that are missing
            held = ("original_state_dict", "state_dict", "mappings", "metadata", "is_coordinator")
            vars(self.stands_for).update({name: vars(self)[name] for name in held})

    @entry_point
    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise ValueError("set_up_planner was not given the checkpoint's metadata")
        with torch.no_grad(), without_garbage_collection():  # with gradients, `to_local` makes a tensor each time
            whole, index = PlannedItems(), index_of(self.metadata)
            saved = self.metadata.state_dict_metadata
            answers_as_stock = not overridden(self, RobustLoadPlanner, _PROTOCOL)
            if self.flatten_state_dict:
                self._take_old_names(index)
            on_meta = set[str]()
            if self.comparison is not None:
                self._take_wrapped_names()
                on_meta = {key for key, value in self.state_dict.items() if _is_on_meta(value)}
            if answers_as_stock and (index is not None or self.state_dict.keys() <= saved.keys()):
                here = {key: value for key, value in self.state_dict.items() if key not in on_meta}
                whole = whole_tensors(here if on_meta else self.state_dict, self.metadata)
            # The values that are not known to be saved as exactly one chunk, in the order of the state dict.
            whole_keys = set(whole.names)
            others = [key for key in self.state_dict if key not in whole_keys]
            if index is not None:
                index.find_all(others)
            asked, tensors = dict[str, Any](), dict[str, Any]()
            missing, problems = list[str](), list[str]()
            nones = self._stored_as_none(others)
            for key in others:
                value, entry = self.state_dict[key], saved.get(key)
                if entry is None:
                    missing.append(key)
                else:
                    mismatch = [] if key in nones else self._mismatch(key, value, entry)
                    if mismatch and self.comparison is not None:
                        numel, dimensions = (value.numel(), value.dim()) if isinstance(value, torch.Tensor) else (1, 0)
                        self.comparison.add_unlike(key, numel, dimensions, "; ".join(mismatch))
                        continue
                    asked[key] = value
                    problems += mismatch
                    if isinstance(entry, TensorStorageMetadata):
                        tensors[key] = value
            self.missing_keys = tuple(sorted(missing))
            problems = [*(f"{_MISSING}{key!r}" for key in (self._unexpected_keys() if missing else ())), *problems]
            if problems:
                raise PlanConflict(self._in_words(problems))
            targets = [*zip(whole.names, whole.targets, strict=True), *local_tensors(asked)]
            problems = unusable_targets(targets, are_filled=self.comparison is None)
            if problems:
                raise PlanConflict(self._in_words(problems))
            if answers_as_stock and self.comparison is None and (tied := names_of_one_memory(targets)):
                whole = whole.without(tied)
                asked = {key: value for key, value in asked.items() if key not in tied}
                tensors = {key: value for key, value in tensors.items() if key not in tied}
            planned = plan_reads(asked, self.metadata, whole)
            if tensors:
                check_filled(planned, tensors, self.checkpoint or "the checkpoint")
        planned.planner = self
        # A planner with hooks of its own may change the list.
        is_list = not planned.names or not answers_as_stock
        return LoadPlan(list(planned) if is_list else planned)  # type: ignore[arg-type]  # no list, but as good

    def _take_old_names(self, index: StoredIndex | None) -> None:
        """Ask for a dict or list of plain values under its own name if the checkpoint has it as one object: up to torch
        2.3 all of them were, and ``None`` in its place is. Flattening leaves nothing of an empty dict.
        """
        saved = self._saved
        if index is None:
            missing = [key for key in self.state_dict if key not in saved]
        else:  # without an entry for each
            missing = [
                key for key, number in zip(self.state_dict, index.find_all(self.state_dict), strict=True) if number < 0
            ]
        if len(saved) > len(self.state_dict):
            for empty in _empty_dicts(self.original_state_dict):
                if (name := ".".join(empty)) in saved and name not in self.state_dict:
                    self.state_dict[name], self.mappings[name] = {}, empty
        old_names: dict[str, tuple[str | int, ...]] = {}
        for key in missing:
            path = self.mappings.get(key, ())
            for length in range(len(path) - 1, 0, -1):
                name = ".".join(map(str, path[:length]))
                if isinstance(saved.get(name), BytesStorageMetadata):
                    old_names[name] = path[:length]
                    break
        for name, path in old_names.items():
            below = [key for key, each in self.mappings.items() if each[: len(path)] == path]
            if not any(isinstance(self.state_dict[key], torch.Tensor) for key in below):
                for key in below:
                    del self.state_dict[key], self.mappings[key]
                self.state_dict[name], self.mappings[name] = None, path

    def _take_wrapped_names(self) -> None:
        """Compare values under the names that they had under other wrappers, such as ``torch.compile``, when they were
        saved."""
        missing = self.state_dict.keys() - self._saved.keys()
        wrapped = defaultdict[str, list[str]](list)
        for name in self._saved.keys() - self.state_dict.keys() if missing else ():
            wrapped[without_wrappers(name)].append(name)
        for key in missing:
            if len(names := wrapped.get(without_wrappers(key), [])) == 1:
                self.state_dict[names[0]] = self.state_dict.pop(key)
                if self.flatten_state_dict:
                    self.mappings[names[0]] = self.mappings.pop(key)

    def _stored_as_none(self, keys: list[str]) -> set[str]:
        """The keys of tensors whose saved value is ``None``, which takes their place. No other object may do that."""
        if self.read_objects is None:
            return set()
        saved = self._saved
        unlike = [
            key
            for key in keys
            if isinstance(self.state_dict[key], torch.Tensor) and isinstance(saved.get(key), BytesStorageMetadata)
        ]
        values = self.read_objects(unlike) if unlike else None
        return {key for key, value in (values or {}).items() if value is None}

    def _in_words(self, problems: list[str]) -> str:
        """The error message: one line for each problem, and what the checkpoint has instead of missing keys."""
        where = f" {self.checkpoint}" if self.checkpoint else ""
        lines = [f"the state dict does not fit the checkpoint{where}, {len(problems)} problem(s):"]
        missing = self._unexpected_keys()
        asked, saved = self.state_dict.keys(), self._saved.keys()
        renamed = renamed_in_words(missing, asked, saved)
        if renamed:
            lines.append(renamed)
        near = {} if renamed else near_names(missing[:_SHOWN], asked, saved)
        hints = {f"{_MISSING}{key!r}": f" (it has {name!r})" for key, name in near.items()}
        lines += [problem + hints.get(problem, "") for problem in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"and {len(problems) - _SHOWN} more")
        if missing:
            lines.append(what_is_saved(asked, saved))
            lines.append(f"if the checkpoint may lack some keys, name them: load(…, allow_missing=[{missing[0]!r}, …])")
        return "\n  ".join(lines)

    def _unexpected_keys(self) -> list[str]:
        """The missing keys for which nobody has asked that they may be missing."""
        return [] if self.allow_partial_load else [k for k in self.missing_keys if not fits(k, self.allow_missing)]

    def _mismatch(self, key: str, value: Any, saved: Any) -> list[str]:
        if not isinstance(saved, TensorStorageMetadata):
            # A learning rate may be a tensor or a number. As in stock, what was saved takes the place of the tensor.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                return [f"{key!r} is a tensor here and an object in the checkpoint"]
            return []
        if not isinstance(value, torch.Tensor) and not hasattr(value, "__create_chunk_list__"):
            return [f"{key!r} is an object ({type(value).__name__}) here and a tensor in the checkpoint"]
        found = []
        if _is_on_meta(value):  # only a comparison comes here with one
            found.append(f"{key!r} is on the meta device")
        size = global_size(value)
        if size is not None and size != saved.size:
            found.append(f"Size mismatch between saved {list(saved.size)} and current {list(size)} for {key!r}")
        dtype = getattr(value, "dtype", None)
        if self.on_dtype_mismatch == "error" and dtype is not None and dtype != saved.properties.dtype:
            found.append(
                f'{key!r} is {dtype} here and {saved.properties.dtype} in the checkpoint (on_dtype_mismatch="cast" '
                "converts)"
            )
        return found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict. Refuse classes that are not known to be data.

        Raises:
            UnsafeCheckpoint: unpickling would run code.
            CorruptCheckpoint: the bytes are not what ``torch.save`` wrote.
        """
        name = read_item.dest_index.fqn
        file = getattr(value, "file", "the checkpoint")
        if not (self.trusted or isinstance(value, ObjectBytes)):
            check_object(value, file=file, item=name)
            value.seek(0)
        try:
            loaded = torch.load(value, weights_only=False)
        except Exception as error:  # torch raises almost anything for bytes that torch.save did not write
            raise not_an_object(error, file=file, item=name) from error
        if self.comparison is None:
            self._put(name, loaded)
            return
        container, key = self._place(name)
        here = container[key]
        if isinstance(here, torch.Tensor) and not isinstance(loaded, torch.Tensor):
            here = here.item()  # a learning rate, for example, may be a tensor or a number
        if name.endswith(".params"):  # the names of the parameters of a group
            here, loaded = (list(map(bare_name, each)) if isinstance(each, list) else each for each in (here, loaded))
        self.comparison.add_object(name, here, loaded, value.getbuffer().nbytes)

    def _put(self, name: str, value: Any) -> None:
        """Put a value into the state dict that was passed, and into the flattened one."""
        self.state_dict[name] = value
        container, key = self._place(name)
        container[key] = value

    def _place(self, name: str) -> tuple[Any, Any]:
        """The dict or list within the state dict that was passed which holds a value, and its key there."""
        # DefaultLoadPlanner does not find keys that are no text.
        container: Any = self.original_state_dict
        *parts, last = self.mappings[name] if self.flatten_state_dict else (name,)
        for part in parts:
            container = container[self._key(container, part)]
        return container, self._key(container, last)

    def _key(self, container: Any, part: str | int) -> Any:
        """The key of a dict, or the index into a list, that is spelt ``part`` in the path of a flattened name."""
        if not isinstance(container, Mapping) or part in container:
            return part
        spelt = self._spelt.get(id(container))
        if spelt is None:
            spelt = self._spelt[id(container)] = {str(key): key for key in container}
        return spelt[str(part)]


def _patterns(option: str, given: Any) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(each, str) for each in patterns):
        raise TypeError(f'{option} is a list of patterns such as ["rng.*"], each of them a text, and not {given!r}')
    return patterns


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"  # a ShardedTensor has no `is_meta`


def _empty_dicts(values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the empty dicts within dicts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            if value:
                yield from _empty_dicts(value, (*path, str(key)))
            else:
                yield (*path, str(key))


def robust_load_planner(planner: LoadPlanner) -> LoadPlanner:
    """``planner`` itself, or ours with the options of stock's own planner, which loses objects if it does not flatten.

    As in stock, tensors of another dtype are converted, and ``planner`` holds afterwards what was asked for.
    """
    if type(planner) is not DefaultLoadPlanner:
        return planner
    options = (planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.allow_partial_load)
    robust = RobustLoadPlanner(*options, on_dtype_mismatch="cast")
    robust.stands_for = planner
    return robust


def check_filled(planned: PlannedItems, tensors: Mapping[str, Any], checkpoint: str = "the checkpoint") -> None:
    """Check that every wanted element is in some chunk. Stock silently leaves the others unchanged.

    Args:
        planned: what is read.
        tensors: what this rank asks for, by key.
        checkpoint: the name of the checkpoint in the message.

    Raises:
        CorruptCheckpoint: the chunks that are read lack some of these elements.
    """
    keys, shapes = list[str](), list[tuple[int, ...]]()  # of each tensor in the memory of this rank
    numbers: dict[tuple[str, Any], int] = {}  # of that of a key, or of its shard at a place or at some offsets
    for key, value in tensors.items():
        shards = _local_shapes(value)
        for place, (offsets, shape) in enumerate(shards):
            numbers[key, place if len(shards) > 1 else None] = len(keys)
            numbers.setdefault((key, offsets), len(keys))
            keys.append(key)
            shapes.append(shape)
    n_whole = len(planned.targets)
    kinds, tensor = list[int](), list[int]()  # a key that is not in `tensors` may be filled in part
    for name, kind in zip(planned.names[n_whole:], planned.kind_of[n_whole:].tolist(), strict=True):
        number = numbers.get((name, None))
        if number is None:
            part = planned.kinds[kind].part
            number = numbers.get((name, planned.kinds[kind].offsets if part is None else part.box))
        if number is not None:
            kinds.append(kind)
            tensor.append(number)
    parts: list[tuple[Any, Any]] = [
        (kind.part.in_box, kind.part.lengths) if kind.part else ((0,) * len(kind.lengths), kind.lengths)
        for kind in planned.kinds
    ]
    for item in planned.others:
        if item.type == LoadItemType.TENSOR:
            at = item.dest_index
            number = numbers.get((at.fqn, None))
            if number is None:
                number = numbers.get((at.fqn, at.index), numbers.get((at.fqn, at.offset)))
            if number is not None:
                kinds.append(len(parts))
                tensor.append(number)
                parts.append((item.dest_offsets, item.lengths))
    offsets, sizes = [offset for offset, _ in parts], [size for _, size in parts]
    ndim = max({*map(len, shapes), *map(len, sizes)}, default=0)
    offset, size = columns_of(offsets, 0, ndim)[kinds], columns_of(sizes, 1, ndim)[kinds]
    coverage = Coverage(np.array(tensor, dtype=np.intp), offset, size, columns_of(shapes, 1, ndim))
    short = coverage.with_gaps.tolist()
    if not short:
        return
    first, key = short[0], keys[short[0]]
    gap = coverage.gap(first, len(shapes[first])) or Box((), ())
    chunk = (chunks_held(tensors[key]) or ())[first - keys.index(key)]
    box = Box(tuple(map(add, chunk.offsets, gap.offsets)), gap.sizes)
    more = f" ({len(short)} tensors have such parts)" if len(short) > 1 else ""
    raise CorruptCheckpoint(
        f"no chunk of {key!r} in {checkpoint} holds its part {box}, which this rank asks for{more}; the save that "
        "wrote it was incomplete",
        file=".metadata",
        item=key,
        expected=f"a chunk that holds {box}",
        found="none",
    )


def _local_shapes(value: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Offsets and shape of each tensor that this rank holds of ``value``. A DTensor's offsets are left out: torch finds
    them by an index for each row of the whole tensor."""
    if isinstance(value, DTensor):
        return [] if value.device_mesh.get_coordinate() is None else [(None, tuple(value.to_local().shape))]
    return [(chunk.offsets, tuple(chunk.sizes)) for chunk in chunks_held(value) or ()]
