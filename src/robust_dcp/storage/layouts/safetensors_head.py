"""The head of a safetensors file: its length, from columns and before there is data, and its bytes, when all is known.

Owns what stands in the header and the bound of its length; both must speak of the same text. The format: 8 bytes with
the length of the header, little-endian; the header, a JSON object, padded with spaces; then the tensors' bytes without
a gap. Called by the layout ``safetensors`` and by ``consolidate``; read by ``shard_head``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from robust_dcp.storage.layouts.places import PAGE_NBYTES, RECORD_ALIGNMENT
from robust_dcp.storage.layouts.protocol import ItemColumns, PlacedTensor

__all__ = [
    "CRC32_KEY",
    "DTYPES",
    "LENGTH_NBYTES",
    "MARK_KEY",
    "MAX_HEADER_NBYTES",
    "METADATA_KEY",
    "OFFSETS_KEY",
    "SHARDING_KEY",
    "ShardHead",
    "entry_nbytes",
    "head_nbytes_for",
]

Int64 = npt.NDArray[np.int64]

DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""What safetensors calls a dtype, for those that it and torch's ``HuggingFaceStorageReader`` give back as they were.
A table of our own: whether a tensor goes into such a file must not depend on what is installed on a rank."""

LENGTH_NBYTES: Final = 8
MAX_HEADER_NBYTES: Final = 100_000_000
"""Readers refuse more."""

METADATA_KEY: Final = "__metadata__"
SHARDING_KEY: Final = "DCP_SHARDING_INFO"
OFFSETS_KEY: Final = "saved_offsets"
CRC32_KEY: Final = "robust_dcp.crc32"
MARK_KEY: Final = "robust_dcp.shard"
"""Stands in files that count only together with a ``.metadata``: without it, their save was not committed."""

# The header: _BEFORE; of chunks _MARK and _SHARDING; _CRCS if there are any; _BEHIND[0], tensors, _BEHIND[1]. Version
# and format are those of torch's writer.
_BEFORE: Final = f'{{"{METADATA_KEY}":{{"DCP_VERSION":"1.0","format":"pt"'
_MARK: Final = f',"{MARK_KEY}":"1"'
_SHARDING: Final = (f',"{SHARDING_KEY}":"{{', '}"')
_CRCS: Final = (f',"{CRC32_KEY}":"{{', '}"')
_BEHIND: Final = ("}", "}")
_CONSTANT_NBYTES: Final = len("".join((_BEFORE, _MARK, *_SHARDING, *_CRCS, *_BEHIND)))

_CRC_DIGITS: Final = 8
_POWERS_OF_TEN: Final = 10 ** np.arange(1, 19, dtype=np.int64)
_escape = json.JSONEncoder().encode  # ASCII only; of a str it is a call into C


def entry_nbytes(items: ItemColumns) -> Int64:
    """int64 ``[n]``: an upper bound of the bytes that each item adds to the header, but for the two numbers that say
    where its data begins and ends. For items of no dtype in :data:`DTYPES` it means nothing."""
    once, twice = _escaped_lengths(items.names)
    texts = _tensor_text("", "", (), 0, 0), _offsets_text("", ()), _crc_text("")
    constant = sum(len(text) + len(",") for text in texts) - len("00")
    kinds = [len(DTYPES.get(dtype, "")) + sum(len(f"{size},") for size in shape) for dtype, shape in items.kinds]
    numbers = _digits(items.offsets) + len(",")
    numbers[np.arange(items.offsets.shape[1]) >= items.ndims[:, None]] = 0
    nbytes: Int64 = once[items.name_ids] + 2 * twice[items.name_ids]
    nbytes += constant + np.array([*kinds, 0], dtype=np.int64)[items.kind_ids] + numbers.sum(axis=1)
    return nbytes


def head_nbytes_for(entries_nbytes: int, n_items: int, payload_nbytes: int) -> int:
    """Bytes before the first tensor of a file: such that its data lies at 64 modulo 4096.

    Args:
        entries_nbytes: sum of :func:`entry_nbytes`.
        payload_nbytes: of all tensors.
    """
    least = LENGTH_NBYTES + _CONSTANT_NBYTES + entries_nbytes + 2 * n_items * len(str(payload_nbytes))
    return -(-(least - RECORD_ALIGNMENT) // PAGE_NBYTES) * PAGE_NBYTES + RECORD_ALIGNMENT


class ShardHead:
    """:class:`~robust_dcp.storage.layouts.protocol.Head` of a safetensors file.

    Args:
        tensors: in any order.
        nbytes: of the head: at least what :func:`head_nbytes_for` gives.
        is_of_checkpoint: whether the file holds chunks that count only together with a ``.metadata``.

    Raises:
        ValueError: the head is longer than was planned.
    """

    def __init__(self, tensors: Sequence[PlacedTensor], nbytes: int, *, is_of_checkpoint: bool = True) -> None:
        self.places = np.array([tensor.place for tensor in tensors], dtype=np.intp)
        self._nbytes = nbytes
        names = [_escape(tensor.name) for tensor in tensors]
        twice = [_escape(name)[1:-1] for name in names]
        before, behind = _BEFORE, _BEHIND
        if is_of_checkpoint:
            offsets = map(_offsets_text, twice, (tensor.chunk_offset for tensor in tensors))
            before += _MARK + _SHARDING[0] + ",".join(offsets) + _SHARDING[1]
        crcs = [_crc_text(name) for name in twice]
        ends = len(_CRCS[0]) - len(",") + np.cumsum([len(text) + len(",") for text in crcs], dtype=np.int64)
        self._crc_at = ends - len('\\"') - _CRC_DIGITS
        entries = [_tensor_text(name, *_described(t, nbytes)) for name, t in zip(names, tensors, strict=True)]
        self._before = before.encode("ascii")
        self._crcs = (_CRCS[0] + ",".join(crcs) + _CRCS[1]).encode("ascii")
        self._behind = (behind[0] + "".join(f",{entry}" for entry in entries) + behind[1]).encode("ascii")
        found = LENGTH_NBYTES + len(self._before) + len(self._crcs) + len(self._behind)
        if found > nbytes:
            raise ValueError(f"the head of a safetensors file was planned with {nbytes} bytes and needs {found}")

    def encode(self, checksums: npt.NDArray[np.uint32] | None) -> bytes:
        """See :class:`~robust_dcp.storage.layouts.protocol.Head`."""
        crcs = b"" if checksums is None else self._filled_in(checksums)
        text = self._before + crcs + self._behind
        header = text.ljust(self._nbytes - LENGTH_NBYTES)
        return len(header).to_bytes(LENGTH_NBYTES, "little") + header

    def _filled_in(self, checksums: npt.NDArray[np.uint32]) -> bytes:
        text = np.frombuffer(self._crcs, dtype=np.uint8).copy()
        digits = np.frombuffer(checksums.astype(">u4").tobytes().hex().encode("ascii"), dtype=np.uint8)
        text[self._crc_at[:, None] + np.arange(_CRC_DIGITS)] = digits.reshape(-1, _CRC_DIGITS)
        return text.tobytes()


def _offsets_text(name: str, offset: Sequence[int]) -> str:
    return f'{name}:{{\\"{OFFSETS_KEY}\\":[{",".join(map(str, offset))}]}}'


def _crc_text(name: str) -> str:
    return f'{name}:\\"{"0" * _CRC_DIGITS}\\"'


def _tensor_text(name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
    sizes = ",".join(map(str, shape))
    return f'{name}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'


def _described(tensor: PlacedTensor, head_nbytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) as the header says it."""
    begin = tensor.offset - head_nbytes
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return dtype, tensor.shape, begin, begin + prod(tensor.shape) * tensor.dtype.itemsize


def _escaped_lengths(names: Sequence[str]) -> tuple[Int64, Int64]:
    """int64 ``[len(names)]`` each: bytes of a name as a JSON string, and of that as part of another, quotes counted."""
    if len(_escape("".join(names))) == 2 + sum(map(len, names)):  # the usual: nothing to escape
        once = np.fromiter(map(len, names), dtype=np.int64, count=len(names)) + 2
        return once, once + 2
    escaped = list(map(_escape, names))
    once = np.fromiter(map(len, escaped), dtype=np.int64, count=len(names))
    return once, np.fromiter((len(_escape(name)) - 2 for name in escaped), dtype=np.int64, count=len(names))


def _digits(values: Int64) -> Int64:
    """How many decimal digits each of ``values``, which are not negative, has."""
    return np.searchsorted(_POWERS_OF_TEN, values, side="right").astype(np.int64) + 1
