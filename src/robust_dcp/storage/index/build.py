"""Builds an index from the columns that ``.metadata`` is made of.

This module owns the contents of each section. Whatever depends on the plan alone is made once and kept with the plan.
Each save only fills in the digest of ``.metadata``, names and ids of files, and the places of items of variable size,
without work for each item. ``plan.metadata`` calls it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.storage.index.form import (
    MAX_NAME_NBYTES,
    Fragment,
    Section,
    encode_sections,
    fit_of,
)
from robust_dcp.storage.metadata.pickled import MetadataColumns

Int64 = npt.NDArray[np.int64]


class IndexTemplate:
    """The common part of the indices of all checkpoints that one plan writes. Several threads may use it at once.

    Args:
        columns: what the plan determines. They are not kept.

    Attributes:
        nbytes: bytes of memory that this object keeps.

    Raises:
        ValueError: a name is too long.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        self._has_paths = columns.paths is not None
        values: dict[str, Any] = {
            **_names(columns),
            **_paths(columns),
            "size_counts": np.bincount(list(map(len, columns.sizes)), minlength=1),
            "sizes": np.fromiter(chain.from_iterable(columns.sizes), dtype=np.int64),
            "chunk_offset": columns.offset,
            "chunk_size": columns.size,
            "chunk_file": columns.file,
            "chunk_start": columns.start,
            "chunk_nbytes": columns.nbytes,
            "variable_rows": np.flatnonzero(columns.start < 0),
            "properties": msgspec.json.encode([_in_words(*each) for each in columns.properties]),
        }
        self._constant = {name: Section.of(name, each) for name, each in values.items()}
        self.nbytes = sum(len(section.data) for section in self._constant.values())

    def encode(
        self,
        metadata: Sequence[Fragment],
        file_names: Sequence[str],
        places: Int64,
        storage_meta: StorageMeta | None,
        version: str | None,
        plan: Mapping[str, Section],
    ) -> tuple[Fragment, ...]:
        """The index of one checkpoint, in parts that follow each other.

        Args:
            metadata: the ``.metadata`` that it belongs to.
            file_names: the data files, relative to the checkpoint.
            places: int64 ``[V, 2]``, start and length of each item of variable size, in bytes.
            storage_meta: written into the file as it is.
            version: the version of DCP's format.
            plan: the sections that ``plan.plan`` makes; empty if the plan is not stored.
        """
        names, ends = _joined(file_names)
        try:
            save_id = uuid.UUID((None if storage_meta is None else storage_meta.save_id) or "").bytes
        except ValueError:  # it is not a UUID
            save_id = bytes(16)
        meta = {"version": version, "has_paths": self._has_paths, "storage_meta": storage_meta}
        values: dict[str, Any] = {
            "variable_places": places,
            "files": names,
            "file_ends": ends,
            "file_ids": save_id * len(file_names),
            "meta": msgspec.json.encode(meta, enc_hook=os.fsdecode),  # the checkpoint's path may be a Path
        }
        own = {name: Section.of(name, each) for name, each in values.items()}
        return encode_sections({**self._constant, **own, **plan}, fit_of(metadata))


def _in_words(dtype: Any, layout: Any, requires_grad: bool) -> tuple[str, str, bool]:
    return str(dtype).removeprefix("torch."), str(layout).removeprefix("torch."), requires_grad


def _joined(texts: Sequence[str]) -> tuple[bytes, Int64]:
    """All texts in UTF-8, one after the other, and where each of them ends."""
    text = "".join(texts)
    if text.isascii():
        return text.encode(), np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    encoded = [each.encode("utf-8", "surrogatepass") for each in texts]
    return b"".join(encoded), np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))


def _names(columns: MetadataColumns) -> dict[str, Any]:
    names, ends = _joined(columns.names)
    if int(np.diff(ends, prepend=0).max(initial=0)) > MAX_NAME_NBYTES:
        raise ValueError(f"names of an index have at most {MAX_NAME_NBYTES} bytes, and one of these has more")
    first_rows = np.searchsorted(columns.name, np.arange(len(columns.names)))
    extent = np.array([*(size[0] if size else 0 for size in columns.sizes), 0], dtype=np.int64)
    return {
        "names": names,
        "name_ends": ends,
        "name_chunks": np.append(first_rows[1:], len(columns.name)) if len(first_rows) else first_rows,
        "name_properties": columns.name_properties,
        "name_size": columns.name_size,
        "name_reach": np.maximum.reduceat(extent[columns.size], first_rows) if len(first_rows) else first_rows,
    }


def _paths(columns: MetadataColumns) -> dict[str, Any]:
    paths = columns.paths
    if paths is None:
        return {}
    # One pass over all parts, without a list for each name. A path spells its name, so the lengths suffice.
    lengths = [-len(str(part)) if isinstance(part, int) else len(part) for part in chain.from_iterable(paths)]
    ends = np.cumsum(np.fromiter(map(len, paths), dtype=np.int64, count=len(paths)))
    return {"path_parts": np.array(lengths, dtype=np.int32), "path_ends": ends}
