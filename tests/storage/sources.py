"""Tensors as the engine asks for them, and the files that it must make of them."""

from __future__ import annotations

import io
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.layouts.footer import TAIL_NBYTES, footer_in
from robust_dcp.storage.layouts.places import Placements, place_records
from robust_dcp.storage.records.record import framed_record
from robust_dcp.storage.writing.emit import FilesOfRank
from robust_dcp.storage.writing.engine import WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource
from robust_dcp.storage.writing.write_options import BLOCKS_PER_THREAD, WriteOptions
from tests.storage.test_record import record_of
from tests.support.simulated_disk import SimulatedDisk

DIRECTORY = "/checkpoint"


class ListSource(ItemSource):
    """Items of a list: tensors, or bytes for an object. ``given`` is what :meth:`resolve` gives where that is not what
    the plan expects: another value, or an exception to raise."""

    def __init__(self, values: Sequence[Any], given: dict[int, Any] | None = None) -> None:
        self.values = values
        self.given = given or {}
        self.asked: list[int] = []
        self.resolved: list[tuple[int, bool, int]] = []

    def __len__(self) -> int:
        return len(self.values)

    def name(self, place: int) -> str:
        return f"item {place}"

    def expected(self, place: int) -> tuple[torch.dtype, torch.Size] | None:
        self.asked.append(place)
        value = self.values[place]
        return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        value = self.values[place]
        return (0,) * value.ndim if isinstance(value, torch.Tensor) else ()

    def resolve(self, place: int) -> Any:
        self.resolved.append((place, torch.is_grad_enabled(), threading.get_ident()))
        value = self.given.get(place, self.values[place])
        if isinstance(value, BaseException):
            raise value
        return io.BytesIO(value) if isinstance(value, bytes) else value


def placed(values: Sequence[Any], *, files: int) -> Placements:
    """As the planner places them: tensors get places, bytes do not."""
    record, header, payload = np.array([_lengths(v) for v in values], dtype=np.int64).reshape(-1, 3).T
    return place_records(record, header, payload, files=files)


def _lengths(value: Any) -> tuple[int, int, int]:
    template = framed_record(value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None
    return (-1, 0, 0) if template is None else (template.nbytes, template.data_offset, template.data_nbytes)


def placed_at(values: Sequence[torch.Tensor], gaps: Sequence[int]) -> Placements:
    """All in one file, ``gaps`` bytes between them."""
    lengths = np.array([_lengths(value)[0] for value in values], dtype=np.int64)
    offsets = np.cumsum(np.array(gaps) + np.concatenate(([0], lengths[:-1])))
    return Placements(
        file=np.zeros(len(values), dtype=np.int32),
        offset=offsets,
        nbytes=lengths,
        file_nbytes=(int(offsets[-1] + lengths[-1]),),
        head_nbytes=(0,),
    )


def write(
    source: ItemSource,
    placements: Placements,
    disk: Any = None,
    *,
    directory: str = DIRECTORY,
    check_stop: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None,
    known_places: npt.NDArray[np.int64] | None = None,
    **options: Any,
) -> WrittenFiles:
    """``options`` are those of :class:`WriteOptions`, or ``block_bytes``: buffers for blocks of that size."""
    disk = SimulatedDisk() if disk is None else disk
    if "block_bytes" in options:
        block_nbytes = max(options.pop("block_bytes"), 4096)
        options = {"threads": 2, **options}
        options["buffer_bytes"] = options["threads"] * BLOCKS_PER_THREAD * block_nbytes
    disk.mkdirs(directory)
    files = FilesOfRank(
        disk=disk,
        directory=directory,
        rank=0,
        mark=secrets.token_hex(8),
        placements=placements,
        options=WriteOptions(**options),
        known_places=known_places,
    )
    return write_files(files, source, check_stop, [])


def content_of(disk: Any, name: str, directory: str = DIRECTORY) -> bytes:
    return without_footer(disk.read_file(f"{directory}/{name}"))


def without_footer(content: bytes) -> bytes:
    footer = footer_in(lambda offset, nbytes: content[offset : offset + nbytes], len(content))
    return content if footer is None else content[: -TAIL_NBYTES - 20 * footer.n_items - 4 * footer.n_blocks]


def framed_one_by_one(values: Sequence[torch.Tensor], placements: Placements) -> list[bytes]:
    """The files that hold each record at its place, and zeros between them."""
    files = [bytearray(nbytes) for nbytes in placements.file_nbytes]
    for value, file, offset in zip(values, placements.file.tolist(), placements.offset.tolist(), strict=True):
        record = record_of(value.detach().resolve_conj().resolve_neg().contiguous())
        files[file][offset : offset + len(record)] = record
    return [bytes(file) for file in files]
