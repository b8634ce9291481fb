"""Writes one file that ``torch.load`` reads, without ever holding its tensors in memory.

The file is the zip archive of ``torch.save`` (``torch/serialization.py``, ``_save``): ``data.pkl`` with the nested
state dict, in which tensors name their storages, and one stored member for each storage, with its CRC-32. The data of
each begins at a multiple of 64 bytes, so that ``torch.load(mmap=True)`` can map it.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Final

import torch

from robust_dcp.conversion.outline import filled
from robust_dcp.conversion.plan import ConversionPlan
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.pieces import NamedTensor, batches_of, read_ahead

__all__ = ["write_torch_file"]

_ALIGNMENT: Final = 64
_ROOT: Final = "archive"
_LOCAL_HEADER_NBYTES: Final = 30
_ZIP64_EXTRA_NBYTES: Final = 20
_PADDING_ID: Final = b"FB"  # as torch's own writer pads


def write_torch_file(
    plan: ConversionPlan,
    disk: Disk,
    file: OpenFile,
    *,
    flat: bool,
    buffer_nbytes: int,
    progress: Callable[[int], object],
) -> None:
    """Write the file.

    Args:
        plan: what to write.
        file: an empty file of ``disk``.
        flat: whether the state dict has the names as keys; nested otherwise.
        buffer_nbytes: how many bytes of tensors may be in memory.
        progress: called with the number of bytes of tensors that were written.

    Raises:
        StorageError, CorruptCheckpoint: something cannot be read or written.
        ValueError: two items are in each other's way in a nested state dict.
    """
    stored = {tensor.name: _Stored(str(number), tensor) for number, tensor in enumerate(plan.tensors)}
    outline = {name: name for name in [*stored, *plan.objects]} if flat else plan.outline()
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, len(stored))
    pickler.dump(filled(outline, lambda name: stored[name] if name in stored else plan.load(name)))
    with zipfile.ZipFile(_Stream(disk, file), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _member(archive, "data.pkl", pickled.getvalue())
        _member(archive, "byteorder", sys.byteorder.encode())
        for done in _write_storages(plan, archive, stored, buffer_nbytes):
            progress(done)
        for number, storage in enumerate(pickler.storages, start=len(stored)):
            _member(archive, f"data/{number}", _bytes(torch.empty(0, dtype=torch.uint8).set_(storage)))
        _member(archive, "version", b"3\n")


def _write_storages(
    plan: ConversionPlan, archive: zipfile.ZipFile, stored: Mapping[str, _Stored], buffer_nbytes: int
) -> Iterator[int]:
    """Write the data of tensors. Gives the number of bytes that are written by now."""
    done = 0
    member = None
    try:
        for batch, values in read_ahead(batches_of(plan.tensors, buffer_nbytes), plan.read):
            for piece, value in zip(batch, values, strict=True):
                member = member or _opened(archive, f"data/{stored[piece.tensor.name].key}")
                member.write(_bytes(value))
                done += piece.nbytes
                if piece.is_last:
                    member.close()
                    member = None
            yield done
    finally:
        if member is not None:
            member.close()  # an archive cannot be closed before its members


class _Stream(io.RawIOBase):
    """An open file, for ``zipfile``."""

    def __init__(self, disk: Disk, file: OpenFile) -> None:
        self._disk = disk
        self._file = file
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only places counted from the beginning")
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self._disk.pwrite(self._file, data, self._at)
        self._at += nbytes
        return nbytes


class _Stored:
    """Stands for a tensor whose data is written later, under ``key``."""

    def __init__(self, key: str, tensor: NamedTensor) -> None:
        self.key = key
        self.tensor = tensor


class _Storage:
    """Stands for the storage of a tensor."""

    def __init__(self, key: str, kind: Any, numel: int) -> None:
        self.id = ("storage", kind, key, "cpu", numel)


class _Pickler(pickle.Pickler):
    """Writes ``data.pkl``.

    Attributes:
        storages: those of tensors within objects. Their keys follow those of the state dict's tensors.
    """

    def __init__(self, file: io.BytesIO, first_key: int) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[torch.UntypedStorage] = []
        self._first_key = first_key

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return value.id
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            untyped = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
            kind = torch.UntypedStorage if untyped is value else _kind_of(value.dtype)  # type: ignore[union-attr]
            self.storages.append(untyped)
            itemsize = 1 if untyped is value else value.dtype.itemsize  # type: ignore[union-attr]
            return ("storage", kind, str(self._first_key + len(self.storages) - 1), "cpu", untyped.nbytes() // itemsize)
        return None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Stored):
            return NotImplemented
        tensor = value.tensor
        kind = _kind_of(tensor.dtype)
        strides = torch.empty(tensor.shape, device="meta").stride()
        place: tuple[Any, ...] = (0, tensor.shape, strides, False, OrderedDict())
        if kind is not None:
            return torch._utils._rebuild_tensor_v2, (
                _Storage(value.key, kind, tensor.nbytes // tensor.dtype.itemsize),
                *place,
            )
        storage = _Storage(value.key, torch.UntypedStorage, tensor.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, *place, tensor.dtype)


def _kind_of(dtype: torch.dtype) -> Any:
    """The class of typed storages that a pickle names; ``None`` for newer dtypes, which have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None else getattr(torch, name)


def _opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """A new member whose data begins at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    at = archive.fp.tell() + _LOCAL_HEADER_NBYTES + len(info.filename.encode()) + _ZIP64_EXTRA_NBYTES  # type: ignore[union-attr]
    padding = -(at + 4) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=True)


def _member(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    with _opened(archive, name) as member:
        member.write(data)


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
