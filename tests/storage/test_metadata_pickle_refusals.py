"""What cannot become a true ``.metadata`` is refused, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.storage.metadata.metadata_classes import StorageInfo
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle
from robust_dcp.storage.metadata.pickled.stock_records import StockRecords


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def columns() -> MetadataColumns:
    """A tensor ``w`` of two chunks and an object ``o`` of variable size, in two files."""
    return MetadataColumns(
        names=("w", "o"),
        paths=None,
        properties=[(torch.float32, torch.strided, False)],
        name_properties=int32(0, -1),
        name_size=int32(0, -1),
        sizes=int64(4, 0, 2).reshape(3, 1),
        size_ndims=np.ones(3, dtype=np.uint8),
        name=int32(0, 0, 1),
        offset=int32(1, 2, -1),
        size=int32(2, 2, -1),
        file=int32(0, 1, 1),
        start=int64(0, 0, -1),
        nbytes=int64(64, 64, -1),
        n_files=2,
    )


@pytest.mark.parametrize("file_names", [[], ["a"], ["a", "b", "c"]])
def test_another_number_of_file_names(file_names: list[str]) -> None:
    with pytest.raises(ValueError, match=f"2 data files was given {len(file_names)} file names"):
        MetadataPickle(columns()).encode(file_names, int64(0, 1).reshape(1, 2), None)


@pytest.mark.parametrize("shape", [(0, 2), (2, 2), (2,), (1, 3)])
def test_another_number_of_places(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 items of variable size was given places of shape"):
        MetadataPickle(columns()).encode(["a", "b"], np.zeros(shape, dtype=np.int64), None)


@pytest.mark.parametrize("place", [(-1, 1), (0, -1)])
def test_a_place_that_was_never_told(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="found -1"):
        MetadataPickle(columns()).encode(["a", "b"], int64(*place).reshape(1, 2), None)


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        ("paths", [("w",)]),
        ("name_properties", {"name_properties": int32(1, -1)}),
        ("name_properties", {"name_properties": int32(0)}),
        ("name_size", {"name_size": int32(3, -1)}),
        ("name_size", {"name_size": int32(0, 0)}),
        ("size_ndims", {"size_ndims": np.array([1, 1, 2], dtype=np.uint8)}),
        ("size_ndims", {"size_ndims": np.ones(2, dtype=np.uint8)}),
        ("name", {"name": int32(0, 1, 0)}),
        ("name", {"name": int32(0, 0, 0)}),
        ("name", {"name": int32(1, 1, 1)}),
        ("name", {"name": int32(0, 0, 2)}),
        ("name", {"name": int32(0, 1, 1)}),
        ("offset", {"offset": int32(1, 3, -1)}),
        ("offset", {"offset": int32(1, 2, 2)}),
        ("size", {"size": int32(-1, 2, -1)}),
        ("size", {"size": int32(2, 2)}),
        ("file", {"file": int32(0, 2, 1)}),
        ("file", {"file": int32(0, -1, 1)}),
        ("start", {"start": int64(0, 0)}),
        ("nbytes", {"nbytes": int64(64, -1, -1)}),
    ],
)
def test_columns_that_do_not_fit_together(column: str, changed: Any) -> None:
    changes: dict[str, Any] = changed if isinstance(changed, dict) else {column: changed}
    with pytest.raises(ValueError, match=rf"columns of a \.metadata: {column}\b"):
        MetadataPickle(replace(columns(), **changes))


def test_columns_without_names_are_an_empty_checkpoint() -> None:
    nothing = {name: getattr(columns(), name)[:0] for name in ("name", "offset", "size", "file", "start", "nbytes")}
    nothing |= {name: getattr(columns(), name)[:0] for name in ("name_properties", "name_size", "sizes", "size_ndims")}
    empty = replace(columns(), names=(), properties=(), n_files=0, **nothing)
    assert MetadataPickle(empty).encode([], np.zeros((0, 2), dtype=np.int64), None).nbytes > 0


TENSOR_CLASSES = [ChunkStorageMetadata, TensorProperties, TensorStorageMetadata]


@pytest.mark.parametrize("cls", [BytesStorageMetadata, Metadata, MetadataIndex, StorageInfo, *TENSOR_CLASSES])
@pytest.mark.parametrize("form", ["called", "other state", "with items"])
def test_a_torch_that_pickles_a_class_otherwise(monkeypatch: pytest.MonkeyPatch, cls: type, form: str) -> None:
    def otherwise(self: Any, protocol: int) -> tuple[Any, ...]:
        function, arguments, state = object.__reduce_ex__(self, protocol)[:3]
        if form == "called":
            return cls, ()
        return (function, arguments, [1]) if form == "other state" else (function, arguments, state, iter([1]))

    monkeypatch.setattr(cls, "__reduce_ex__", otherwise)
    with pytest.raises(NotImplementedError) as error:
        StockRecords()
    assert cls.__qualname__ in str(error.value)
    assert torch.__version__ in str(error.value)
