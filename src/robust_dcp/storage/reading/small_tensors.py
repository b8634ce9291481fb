"""Takes small tensors that lie next to each other out of a block, with a few calls for all of one kind.

This module compares the frames of whole records, verifies their data, and copies it into the targets. It leaves every
record that is not exactly as expected to ``block_items``, which finds out what it is or what is wrong with it.
``plan_reader`` calls it on the thread of the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging import copy_each
from robust_dcp.storage.index import ChunkKind
from robust_dcp.storage.layouts.read_head import FileHead
from robust_dcp.storage.reading.block_items import Stretch
from robust_dcp.storage.reading.planned_items import WholeTensors
from robust_dcp.storage.reading.record_forms import RecordForms
from robust_dcp.storage.reading.verification import Verification
from robust_dcp.storage.records.checksum import crc32_of_each

__all__ = ["SmallTensors"]

Int64 = npt.NDArray[np.int64]

_FEW: Final = 4
"""Up to this many tensors of one kind are handled one by one."""


class SmallTensors:
    """Takes whole tensors out of what was read of a file.

    Args:
        whole: all such tensors of the load.
        forms, verification: those of the load.
    """

    def __init__(self, whole: WholeTensors, forms: RecordForms, verification: Verification) -> None:
        self._whole = whole
        self._forms = forms
        self._verification = verification

    def copy(self, stretch: Stretch, numbers: Int64) -> npt.NDArray[np.bool_]:
        """Fill targets from a block.

        Args:
            numbers: the numbers of the items of a group. Items that are not whole tensors (they have higher numbers)
                are left alone.

        Returns:
            For each of ``numbers`` whether its target has been filled.
        """
        done = np.zeros(len(numbers), dtype=np.bool_)
        places = np.flatnonzero(numbers < len(self._whole))
        if len(places) < _FEW:
            return done
        kinds = self._whole.kind_of[numbers[places]]
        order = np.argsort(kinds, kind="stable")
        for alike in np.split(places[order], np.flatnonzero(np.diff(kinds[order])) + 1):
            if len(alike) >= _FEW:
                done[alike] = self._copy_alike(stretch, numbers[alike])
        return done

    def _copy_alike(self, stretch: Stretch, numbers: Int64) -> Sequence[bool]:
        """:meth:`copy` for tensors of one dtype and size."""
        whole = self._whole
        kind = whole.kinds[int(whole.kind_of[numbers[0]])]
        first, nbytes = whole.start[numbers] - stretch.offset, whole.nbytes[numbers]
        if (nbytes != nbytes[0]).any() or int(first.max() + nbytes[0]) > stretch.nbytes:
            return [False] * len(numbers)
        at = (first + stretch.start).tolist()
        targets = [whole.targets[number] for number in numbers.tolist()]
        if stretch.head is None:
            data, expected = self._find_in_records(stretch, at, int(nbytes[0]), kind)
            if stretch.footer is not None and stretch.footer.tail.n_items:
                # A sound record of another item has a right CRC-32 of its own.
                there = stretch.footer.crc32s_at(whole.start[numbers])
                expected = [crc if crc == of_it else None for crc, of_it in zip(expected, there, strict=True)]
        else:
            data, expected = at, self._find_in_head(stretch.head, numbers, kind)
        sound = _take_bytes(targets)
        if self._verification.verify is not False:
            found = crc32_of_each(stretch.block.view, data, kind.nbytes)
            # Tensors without a checksum (0) are counted, or refused, one by one.
            sound = [ok and crc == of_it != 0 for ok, crc, of_it in zip(sound, found, expected, strict=True)]
        else:
            sound = [ok and of_it is not None for ok, of_it in zip(sound, expected, strict=True)]
            self._verification.skip(sound.count(True) * kind.nbytes, "", stretch.file)
        into = [target.data_ptr() for target in compress(targets, sound)]
        copy_each(into, [stretch.block.address + start for start in compress(data, sound)], repeat(kind.nbytes))
        return sound

    def _find_in_records(
        self, stretch: Stretch, at: list[int], nbytes: int, kind: ChunkKind
    ) -> tuple[list[int], list[int | None]]:
        """For each record at ``at``: where its data begins in the block, and its CRC-32.

        The CRC-32 is 0 if the record has none, and ``None`` if the record does not have the usual form.
        """
        memory = stretch.block.memory
        found = self._forms.find(memory, at[0], nbytes, kind.dtype, kind.lengths)
        if found is None or found[0].data_nbytes != kind.nbytes:
            return at, [None] * len(at)
        form = found[0]
        return [start + form.data_offset for start in at], form.crc32s_of(memory, at)

    def _find_in_head(self, head: FileHead, numbers: Int64, kind: ChunkKind) -> list[int | None]:
        """The CRC-32 of tensors that the head of their file describes, with 0 and ``None`` as for records."""
        whole, tensors = self._whole, head.tensors
        found = [tensors.get(whole.names[number]) for number in numbers.tolist()]
        places = zip(found, whole.start[numbers].tolist(), whole.nbytes[numbers].tolist(), strict=True)
        wanted = (kind.dtype, kind.lengths, kind.nbytes, tuple(kind.offsets))
        return [
            raw.crc32 or 0
            if raw is not None
            and (raw.dtype, raw.shape, raw.nbytes, raw.chunk_offset) == wanted
            and (raw.offset, raw.nbytes) == (start, nbytes)
            else None
            for raw, start, nbytes in places
        ]


def _take_bytes(targets: list[torch.Tensor]) -> list[bool]:
    """For each target, whether ``targets.takes_bytes`` holds. All are neither complex nor quantized."""
    if targets and (targets[0].is_complex() or targets[0].is_quantized):
        return [False] * len(targets)
    strided = torch.strided
    return [
        target.is_cpu and target.layout is strided and not target.is_neg() and target.is_contiguous()
        for target in targets
    ]
