"""Small records packed into a block of memory that goes out in one write.

Owns how the bytes of many tensors come together at little cost for each; never touches a file and keeps no buffer.
Which records form a block: ``write_order``. Called by ``engine`` from its threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging import flat_bytes, to_host_together
from robust_dcp.storage.layouts import Frame
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.torch_zip import payload_view
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, planned_tensor

__all__ = ["Block", "pack"]

Int64 = npt.NDArray[np.int64]

_CRC_DTYPE = np.dtype("<u4")

# ctypes.memmove releases the GIL and takes it again, which costs more than it gives while copies are short. Two
# threads that copy at once, microseconds a copy: 1 KiB 0.39 holding the GIL, 0.74 releasing it; 64 KiB 1.8 and 4.8;
# 512 KiB 12.6 and 8.3. (A view of the tensor through NumPy, or torch's own copy, takes 1 to 3 microseconds more.)
_RELEASE_GIL_NBYTES = 256 << 10
_memmove_holding_gil = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


@dataclass(frozen=True, eq=False)
class Block:
    """n consecutive small records of a file, with the gaps between them.

    Attributes:
        offset: of the block in the file, in bytes.
        nbytes: up to the end of the last record.
        gap_before: bytes between what comes before it in the file and ``offset``; 0 if that is more than a page away.
        places: int64 ``[n]``, the items' places in the plan.
        templates: of the n records.
        payload: int64 ``[n]``, where each payload begins, in bytes from the start of the block.
        crc: int64 ``[n, c]``, where its CRC-32 stands: c is 2 for records (header, trailer), 0 where the head of the
            file has it.
    """

    offset: int
    nbytes: int
    gap_before: int
    places: Int64
    templates: tuple[Frame, ...]
    payload: Int64
    crc: Int64

    @classmethod
    def of(cls, places: Int64, offsets: Int64, templates: tuple[Frame, ...], gap_before: int) -> Block:
        """The block of some records.

        Args:
            places: int64 ``[n]``, the items' places in the plan.
            offsets: int64 ``[n]``, of the records in the file, ascending.
            templates: of the n records.
            gap_before: see the attribute.
        """
        starts = offsets - offsets[0]
        header = np.array([template.header_nbytes for template in templates], dtype=np.int64)
        crc_at = np.array([template.crc_at for template in templates], dtype=np.int64)
        return cls(
            offset=int(offsets[0]),
            nbytes=int(starts[-1]) + templates[-1].nbytes,
            gap_before=gap_before,
            places=places,
            templates=templates,
            payload=starts + header,
            crc=starts[:, None] + crc_at,
        )


class _Elsewhere(NamedTuple):
    """A payload that is not in the host's memory, in order: place in the plan, where it goes to, uint8 ``[nbytes]``."""

    place: int
    begin: int
    data: torch.Tensor


def pack(
    block: Block, source: ItemSource, into: npt.NDArray[np.uint8], *, checksums: bool = True
) -> npt.NDArray[np.uint32]:
    """Make the bytes of a block.

    Args:
        into: uint8, contiguous; its first ``block.nbytes`` bytes are overwritten, whatever they hold.
        checksums: whether to compute CRC-32s; 0 stands for them otherwise.

    Returns:
        uint32 ``[n]``, the CRC-32 of each payload; empty without ``checksums``.

    Raises:
        PlanConflict: an item is not what was planned.
        RobustCheckpointError: an item cannot be resolved or read; names it.
    """
    target = into.data
    address = into.ctypes.data
    into[: block.nbytes] = 0  # less than finding the gaps costs
    elsewhere: list[_Elsewhere] = []
    with NamedErrors(source, int(block.places[0])) as current:
        for place, begin, template in zip(block.places.tolist(), block.payload.tolist(), block.templates, strict=True):
            current.place = place
            tensor = planned_tensor(source, place, template)
            nbytes, header, trailer = template.payload_nbytes, template.blank_header, template.blank_trailer
            end = begin + nbytes
            target[begin - len(header) : begin] = header
            target[end : end + len(trailer)] = trailer
            if nbytes == 0:
                continue
            if not _is_readable(tensor, nbytes):
                elsewhere.append(_Elsewhere(place, begin, flat_bytes(tensor)))
            elif nbytes >= _RELEASE_GIL_NBYTES:
                ctypes.memmove(address + begin, tensor.data_ptr(), nbytes)
            else:
                _memmove_holding_gil(address + begin, tensor.data_ptr(), nbytes)
        if elsewhere:
            current.place = elsewhere[0].place
            copies = to_host_together([item.data for item in elsewhere])
            for item, copy in zip(elsewhere, copies, strict=True):
                target[item.begin : item.begin + copy.numel()] = payload_view(copy)
    return _fill_in_checksums(block, into, target) if checksums else np.zeros(0, dtype=np.uint32)


def _is_readable(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether the ``nbytes`` bytes from ``tensor.data_ptr()`` on are its data, in order."""
    return (
        # A subclass may keep its data anywhere; lazy conjugation and negation live in a bit of the tensor.
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        # A storage that was freed (FSDP resizes it to 0) leaves the tensor its shape, and an address of nothing.
        and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + nbytes
    )


def _fill_in_checksums(block: Block, into: npt.NDArray[np.uint8], target: memoryview) -> npt.NDArray[np.uint32]:
    checksums = [
        crc32(target[begin : begin + template.payload_nbytes])
        for begin, template in zip(block.payload.tolist(), block.templates, strict=True)
    ]
    values = np.array(checksums, dtype=_CRC_DTYPE)
    digits = values.view(np.uint8).reshape(-1, 1, _CRC_DTYPE.itemsize)
    into[block.crc[:, :, None] + np.arange(_CRC_DTYPE.itemsize)] = digits
    return values
