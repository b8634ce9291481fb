"""A large item is cut without gaps, and its pieces reach the target whichever way they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging import BlockPool, CopiesToDevice
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.item_bytes import ItemInFile
from robust_dcp.storage.reading.large_tensor import PiecewiseRead, cut, shares_of
from robust_dcp.storage.reading.stored_tensor import find_box
from robust_dcp.storage.reading.verification import Verification
from tests.storage.test_data_file import forget

PIECE_NBYTES = 1 << 20


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 1 << 18))
def test_pieces_follow_each_other(offset: int, nbytes: int, piece_nbytes: int) -> None:
    at = 0
    for start, length in cut(offset, nbytes, piece_nbytes):
        assert start == at and 0 < length <= piece_nbytes
        at += length
        assert at == nbytes or (offset + at) % piece_nbytes == 0
    assert at == nbytes


@given(st.lists(st.integers(1, 100), max_size=20))
def test_short_pieces_are_read_with_their_neighbours(nbytes: list[int]) -> None:
    shares = shares_of(nbytes, 100)
    assert [number for share in shares for number in share] == list(range(len(nbytes)))
    sums = [sum(nbytes[number] for number in share) for share in shares]
    assert all(each <= 100 for each in sums)
    assert all(
        first + second > 100 for first, second in zip(sums, [nbytes[share[0]] for share in shares[1:]], strict=False)
    )


def read_through_blocks(path: Path, target: torch.Tensor) -> list[torch.Tensor | None]:
    done: list[torch.Tensor | None] = []
    opened = DataFile(PosixDisk(), str(path), None)
    stored = ItemInFile(opened, "w", 0, path.stat().st_size, lambda: None)
    box = find_box(stored, [0] * target.dim(), list(target.shape))
    assert box is not None
    verification = Verification()
    with BlockPool().lease(PIECE_NBYTES + 8192, 1) as blocks:
        reading = PiecewiseRead(
            stored,
            box,
            verification.range_for(stored, box.sums, box.offset, box.offset + box.nbytes),
            target,
            blocks,
            PIECE_NBYTES,
            copies=CopiesToDevice(),
            done=done.append,
        )
        for share in reading.shares:
            reading.read(share)
    opened.close()
    return done


@pytest.mark.parametrize("cached", [True, False])
def test_what_goes_to_a_device_passes_through_blocks(tmp_path: Path, cached: bool) -> None:
    value = torch.rand(1001, 1001, generator=torch.Generator().manual_seed(2))
    torch.save(value, tmp_path / "w")
    if not cached:
        forget(tmp_path / "w")
    target = torch.zeros_like(value)
    assert read_through_blocks(tmp_path / "w", target) == [None]
    assert torch.equal(target, value)


def test_damage_is_found_on_the_way_through_blocks(tmp_path: Path) -> None:
    value = torch.rand(1001, 1001, generator=torch.Generator().manual_seed(2))
    torch.save(value, tmp_path / "w")
    data = bytearray((tmp_path / "w").read_bytes())
    data[data.index(value.numpy().tobytes()[-4000:]) + 3] ^= 8
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        read_through_blocks(tmp_path / "w", torch.zeros_like(value))
