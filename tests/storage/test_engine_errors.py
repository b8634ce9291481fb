"""What goes wrong with an item names the item, and a save that fails leaves no files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.storage.layouts.places import LARGE_NBYTES
from tests.storage.sources import DIRECTORY, ListSource, placed, write
from tests.support.simulated_disk import SimulatedDisk

VALUES: list[Any] = [
    torch.arange(3.0),
    torch.zeros(LARGE_NBYTES, dtype=torch.uint8),
    torch.arange(300.0),
    b"an object",
    torch.tensor(1),
]


@pytest.fixture
def disk() -> Iterator[SimulatedDisk]:
    """Empty again when the test ends."""
    disk = SimulatedDisk()
    yield disk
    assert disk.list_directory(DIRECTORY) == []


@pytest.mark.parametrize("place", range(len(VALUES)))
def test_an_item_that_cannot_be_resolved_is_named(place: int, disk: SimulatedDisk) -> None:
    source = ListSource(VALUES, {place: KeyError("gone")})
    with pytest.raises(RobustCheckpointError, match=f"cannot save 'item {place}': KeyError: 'gone'") as caught:
        write(source, placed(VALUES, files=2), disk)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("place", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (b"bytes", "gave BytesIO for the tensor"),
        (torch.zeros(1, 1, dtype=torch.int16), r"gave torch.int16 \[1, 1\] for"),
    ],
)
def test_data_that_is_not_what_was_planned_is_refused(place: int, given: Any, found: str, disk: SimulatedDisk) -> None:
    with pytest.raises(PlanConflict, match=f"the planner's resolve_data {found} .*item {place}'") as caught:
        write(ListSource(VALUES, {place: given}), placed(VALUES, files=2), disk)
    assert caught.value.key == f"item {place}"


def test_a_tensor_whose_memory_was_freed_is_named(disk: SimulatedDisk) -> None:
    freed = torch.arange(10.0)[3:]
    freed.untyped_storage().resize_(0)
    values = [torch.zeros(2), freed, torch.zeros(7)]
    with pytest.raises(RobustCheckpointError, match="cannot save 'item 1': RuntimeError"):
        write(ListSource(values), placed(values, files=1), disk)


def test_the_error_of_one_thread_stops_the_others_and_is_the_one_raised(disk: SimulatedDisk) -> None:
    values = [torch.zeros(256)] * 4000
    placements = placed(values, files=2)
    last = int((placements.file == 0).nonzero()[0][-1])
    source = ListSource(values, {last: ValueError("broken")})
    with pytest.raises(RobustCheckpointError, match=f"cannot save 'item {last}': ValueError: broken"):
        write(source, placements, disk, block_bytes=8192)
