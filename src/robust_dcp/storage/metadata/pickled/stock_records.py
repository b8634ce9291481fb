"""How this torch pickles the classes of ``.metadata``: records whose opcodes come from example objects.

Owns the layout of the classes' states, taken from the objects' own ``__reduce_ex__``, so that another torch, with
another attribute, needs no change here. Called by the modules that emit records.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.storage.metadata.metadata_classes import StorageInfo, reduce_tensor_properties
from robust_dcp.storage.metadata.pickled.opcodes import memoized, remembered, spliced, text
from robust_dcp.storage.metadata.pickled.template import Gap, Parts

__all__ = ["StockRecords", "properties_state", "stock_records"]

_NEW_OBJECT: Final = object().__reduce_ex__(4)[0]
"""What creates an object that has no way of its own to be pickled: ``NEWOBJ`` stands for it."""

_NEW: Final = pickle.EMPTY_TUPLE + pickle.NEWOBJ

_NO_SIZE: Final = torch.Size(())


class StockRecords:
    """The records of which ``.metadata`` consists.

    Attributes:
        constants: opcodes that put the classes, and the names of their attributes, into the first places of the memo.
        n_constants: how many.
        size: pushes ``torch.Size`` itself.
        tensor_begin, tensor_end: before and behind the chunks of an entry of ``state_dict_metadata``.
            Gaps: ``name, properties, size``.
        chunk: one chunk. Gaps: ``offset, size``.
        object: an object's entry of ``state_dict_metadata``. Gaps: ``name``.
        tensor_item, object_item: an entry of ``storage_data``. Gaps: ``name, offset`` (tensors only) ``, file`` and the
            numbers ``start, nbytes``.
        metadata: pushes a ``Metadata`` and the beginning of its state, to which the attributes below are added.
    """

    def __init__(self) -> None:
        self._memo: dict[Any, int] = {}
        self.constants = b""
        chunks = Gap("chunks")
        entry = self._object(
            TensorStorageMetadata(TensorProperties(torch.float32), _NO_SIZE, []),
            {"properties": self._properties(), "size": (Gap("size"),), "chunks": (chunks,)},
        )
        tensor = (Gap("name"), *entry, pickle.SETITEM)
        place = tensor.index(chunks)
        self.tensor_begin: Parts = (*tensor[:place], pickle.EMPTY_LIST + pickle.MARK)
        self.tensor_end: Parts = (pickle.APPENDS, *tensor[place + 1 :])
        chunk = ChunkStorageMetadata(_NO_SIZE, _NO_SIZE)
        self.chunk: Parts = self._object(chunk, {"offsets": (Gap("offset"),), "sizes": (Gap("size"),)})
        self.object: Parts = (Gap("name"), *self._object(BytesStorageMetadata(), {}), pickle.SETITEM)
        info = self._object(
            StorageInfo("", 0, 0),
            {
                "relative_path": (Gap("file"),),
                "offset": (Gap("start", is_number=True),),
                "length": (Gap("nbytes", is_number=True),),
            },
        )
        of_tensor = self._object(MetadataIndex("", []), {"fqn": (Gap("name"),), "offset": (Gap("offset"),)})
        of_object = self._object(MetadataIndex(""), {"fqn": (Gap("name"),)})
        self.tensor_item: Parts = (*of_tensor, *info, pickle.SETITEM)
        self.object_item: Parts = (*of_object, *info, pickle.SETITEM)
        self.metadata = self._metadata()
        self.size = self._class(torch.Size)
        if torch.Size((1, 2)).__reduce_ex__(4) != (torch.Size, ((1, 2),)):
            raise _unexpected(_NO_SIZE, repr(torch.Size((1, 2)).__reduce_ex__(4)))
        self.n_constants = len(self._memo)

    def _metadata(self) -> bytes:
        attributes = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta")
        state = _state_of(Metadata({}), attributes)
        # A torch that does not know `version` takes it all the same: stock writers set it on the object.
        others = {key: value for key, value in state.items() if key not in (*attributes, "version")}
        begin = self._class(Metadata) + _NEW + pickle.EMPTY_DICT
        for key, value in others.items():
            begin += self._text(key) + spliced(value) + pickle.SETITEM
        for key in (*attributes, "version"):
            self._text(key)
        return begin

    def attribute(self, name: str) -> bytes:
        """Opcodes that push the name of an attribute of ``Metadata``."""
        return remembered(self._memo[name])

    def _properties(self) -> Parts:
        """A ``TensorProperties`` of its own, since it can be changed; its state can not, and is shared."""
        properties_state(torch.float32, torch.strided, False)  # raises unless it is reduced as expected
        return (self._class(TensorProperties) + _NEW, Gap("properties"), pickle.BUILD)

    def _object(self, example: Any, values: Mapping[str, Parts]) -> Parts:
        """What ``example`` pickles to, with ``values`` in place of those attributes."""
        parts: list[bytes | Gap] = [self._class(type(example)) + _NEW]
        state = _state_of(example, values)
        if not state:
            return parts
        parts.append(pickle.EMPTY_DICT + pickle.MARK)
        for key, value in state.items():
            parts += [self._text(key), *values.get(key, (spliced(value),))]
        parts.append(pickle.SETITEMS + pickle.BUILD)
        return parts

    def _class(self, cls: type) -> bytes:
        return self._constant(cls, text(cls.__module__) + text(cls.__qualname__) + pickle.STACK_GLOBAL)

    def _text(self, value: str) -> bytes:
        return self._constant(value, text(value))

    def _constant(self, key: Any, pushed: bytes) -> bytes:
        if key not in self._memo:
            self._memo[key] = len(self._memo)
            self.constants += memoized(pushed)
        return remembered(self._memo[key])


@cache
def stock_records() -> StockRecords:
    """The records of this torch.

    Raises:
        NotImplementedError: a class of this torch is pickled in a way that cannot be emitted; says which.
    """
    return StockRecords()


def properties_state(dtype: torch.dtype, layout: torch.layout, requires_grad: bool) -> bytes:
    """Opcodes that push the state of a ``TensorProperties``: the five values that every torch can read."""
    properties = TensorProperties(dtype, layout, requires_grad)
    state = _reduced(properties)
    if type(state) is not tuple or len(state) < 5:
        raise _unexpected(properties, f"the state {state!r}")
    return spliced(reduce_tensor_properties(properties)[2])


def _state_of(example: Any, attributes: Collection[str]) -> dict[str, Any]:
    """The state with which ``example`` is pickled, by attribute, in order; has at least ``attributes``."""
    state = _reduced(example)
    state = {} if state is None else state
    if type(state) is not dict or not set(attributes) <= set(state):
        raise _unexpected(example, f"the state {state!r}")
    return state


def _reduced(example: Any) -> Any:
    """The state with which ``example`` is pickled, once it is certain that there is nothing else."""
    function, arguments, state, *others = (*example.__reduce_ex__(4), None)[:6]
    if function is not _NEW_OBJECT or arguments != (type(example),) or any(other is not None for other in others):
        raise _unexpected(example, f"{function!r} of {arguments!r}")
    return state


def _unexpected(example: Any, found: str) -> NotImplementedError:
    cls = type(example)
    return NotImplementedError(
        f"robust_dcp cannot write .metadata with torch {torch.__version__}: expected "
        f"{cls.__module__}.{cls.__qualname__} to be pickled as a new object and its attributes, found {found}; "
        "use another version of torch or of robust_dcp"
    )
