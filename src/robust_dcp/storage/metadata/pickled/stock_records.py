"""How this torch pickles the classes of ``.metadata``: records of fixed width, made from pickled example objects.

This module knows which opcodes a record consists of and where its gaps are. Both come from the objects' own
``__reduce_ex__``. So if another version of torch adds an attribute, nothing has to change here. Only ``emit`` calls it,
and fills the gaps.
"""

from __future__ import annotations

import io
import pickle
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
from robust_dcp.storage.metadata.pickled.opcodes import REMEMBER, Gap, Parts, spliced, text

__all__ = ["StockRecords", "properties_state", "stock_records"]


_NEW_OBJECT: Final = object().__reduce_ex__(4)[0]
"""The function that creates an object without a pickling method of its own."""

_NO_SIZE: Final = torch.Size(())
_HERE: Final = "\0here\0"
_GAP: Final = b"\0gap\0"
_MARK: Final = text(_HERE) + pickle.BINPERSID


class _ExamplePickler(pickle.Pickler):
    """Pickles an object and leaves a mark in place of each gap, class and string.

    It uses protocol 3: its opcodes are valid in protocol 4, and it has no frames that would have to be removed.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=3)
        self.fast = True
        self.dispatch_table = {TensorProperties: lambda value: (*_reduced(value)[:2], Gap("properties"))}
        self.marked: list[Any] = []

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, (Gap, str, type)):
            return None
        self.marked.append(value)
        return _HERE


class StockRecords:
    """The records that make up a ``.metadata``.

    Attributes:
        constants: opcodes that put the classes, and the names of their attributes, into the first places of the memo.
        n_constants: how many these are.
        size: opcodes that push ``torch.Size`` itself.
        begin, chunk, end: a tensor's entry of ``state_dict_metadata``: the part before its chunks, one chunk, and the
            part after its chunks. Gaps: ``name, properties, whole``; ``offset, size``; none.
        object: an object's entry. Gaps: ``name``.
        tensor_item, object_item: an entry of ``storage_data``. Gaps: ``name, offset`` (tensors only), ``file`` and the
            numbers ``start, nbytes``.
        metadata: the ``Metadata``: the opcodes before each of its values ``state_dict_metadata, planner_data,
            storage_data, storage_meta, version``, in this order, and those after the last.
    """

    def __init__(self) -> None:
        self._memo: dict[Any, int] = {}
        self.constants = b""
        chunks = Gap("chunks")
        entry: Any = TensorStorageMetadata(TensorProperties(torch.float32), Gap("whole"), chunks)  # type: ignore[arg-type]
        tensor = [Gap("name"), *self._parts(entry, 3), pickle.SETITEM]
        at = tensor.index(chunks)
        self.begin: Parts = (*tensor[:at], pickle.EMPTY_LIST + pickle.MARK)
        self.chunk: Parts = self._parts(ChunkStorageMetadata(Gap("offset"), Gap("size")), 2)  # type: ignore[arg-type]
        self.end: Parts = (pickle.APPENDS, *tensor[at + 1 :])
        self.object: Parts = (Gap("name"), *self._parts(BytesStorageMetadata(), 0), pickle.SETITEM)
        info = self._parts(StorageInfo(Gap("file"), Gap("start", is_number=True), Gap("nbytes", is_number=True)), 3)
        of_tensor = MetadataIndex("", _NO_SIZE)
        vars(of_tensor).update(fqn=Gap("name"), offset=Gap("offset"))
        of_object = MetadataIndex(Gap("name"))  # type: ignore[arg-type]
        self.tensor_item: Parts = (*self._parts(of_tensor, 2), *info, pickle.SETITEM)
        self.object_item: Parts = (*self._parts(of_object, 1), *info, pickle.SETITEM)
        metadata = Metadata({})
        # A torch that does not know `version` accepts it: DCP's writers set it on the object.
        for attribute in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
            vars(metadata).pop(attribute, None)
            vars(metadata)[attribute] = Gap(attribute)
        pieces = b"".join(_GAP if isinstance(part, Gap) else part for part in self._parts(metadata, 5))
        self.metadata = pieces.split(_GAP)
        self.size = self._remembered(torch.Size)
        if torch.Size((1, 2)).__reduce_ex__(4) != (torch.Size, ((1, 2),)):
            raise _unexpected(_NO_SIZE, repr(torch.Size((1, 2)).__reduce_ex__(4)))
        self.n_constants = len(self._memo)

    def _parts(self, example: Any, n_gaps: int) -> list[bytes | Gap]:
        """The pickle of ``example`` in parts. It must have that many gaps."""
        state = _reduced(example)[2]
        gaps = [value for value in (state or {}).values() if isinstance(value, (Gap, TensorProperties))]
        if len(gaps) != n_gaps:
            raise _unexpected(example, f"the state {state!r}")
        file = io.BytesIO()
        pickler = _ExamplePickler(file)
        pickler.dump(example)
        pieces = file.getvalue().removeprefix(pickle.PROTO + b"\x03").removesuffix(pickle.STOP).split(_MARK)
        parts: list[bytes | Gap] = [pieces[0]]
        for value, piece in zip(pickler.marked, pieces[1:], strict=True):
            parts += [value if isinstance(value, Gap) else self._remembered(value), piece]
        return parts

    def _remembered(self, value: str | type) -> bytes:
        """Opcodes that push a constant. It is put into the memo once."""
        if value not in self._memo:
            self._memo[value] = len(self._memo)
            self.constants += spliced(value) + REMEMBER
        return pickle.BINGET + bytes([self._memo[value]])


@cache
def stock_records() -> StockRecords:
    """The records of this torch.

    Raises:
        NotImplementedError: this torch pickles a class in a way that we cannot write. The message names the class.
    """
    return StockRecords()


def properties_state(dtype: torch.dtype, layout: torch.layout, requires_grad: bool) -> bytes:
    """Opcodes that push the state of a ``TensorProperties``: the five values that every torch can read."""
    return spliced(_reduced(TensorProperties(dtype, layout, requires_grad))[2])


def _reduced(example: Any) -> tuple[Any, Any, Any]:
    """How ``example`` is pickled. It must be pickled as a new object and its state, and nothing else."""
    function, arguments, state, *others = (*example.__reduce_ex__(4), None)[:6]
    if function is not _NEW_OBJECT or arguments != (type(example),) or any(other is not None for other in others):
        raise _unexpected(example, f"{function!r} of {arguments!r}")
    if isinstance(example, TensorProperties):
        if type(state) is not tuple or len(state) < 5:
            raise _unexpected(example, f"the state {state!r}")
        return reduce_tensor_properties(example)
    if state is not None and type(state) is not dict:
        raise _unexpected(example, f"the state {state!r}")
    return function, arguments, state


def _unexpected(example: Any, found: str) -> NotImplementedError:
    cls = type(example)
    return NotImplementedError(
        f"robust_dcp cannot write .metadata with torch {torch.__version__}: expected "
        f"{cls.__module__}.{cls.__qualname__} to be pickled as a new object and its attributes, found {found}; "
        "use another version of torch or of robust_dcp"
    )
