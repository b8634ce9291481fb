"""``.metadata`` against itself: chunks cover each tensor exactly once, and items do not share bytes of a file."""

from __future__ import annotations

import pytest

from robust_dcp.contents.read import Chunk, Contents, Item, StoredFile
from robust_dcp.contents.verify import Findings, _check_structure


def problems_of(*items: Item, nbytes: int = 10_000) -> list[tuple[str | None, str]]:
    findings = Findings()
    files = (StoredFile("__0_0.distcp", nbytes, 0, 1),)
    held = {"__0_0.distcp": [(item, chunk) for item in items for chunk in item.chunks if chunk.file]}
    _check_structure(Contents("/c", "torch", 0.0, None, items, held, files), findings)
    return [(each.item, each.found) for each in findings.problems]


def tensor(*chunks: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (4, 4)) -> Item:
    places = [Chunk(o, s, "__0_0.distcp", 1000 * n, 900) for n, (o, s) in enumerate(chunks)]
    return Item("w", None, "float32", 4, shape, tuple(places))


@pytest.mark.parametrize(
    "chunks",
    [
        [((0, 0), (4, 4))],
        [((0, 0), (2, 4)), ((2, 0), (2, 4))],
        [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))],
        [((0, 0), (4, 4)), ((4, 0), (0, 4))],
    ],
)
def test_chunks_that_cover_a_tensor_once_are_right(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    assert problems_of(tensor(*chunks)) == []


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([((0, 0), (2, 4))], "chunks with 8"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "[3, 4] at [0, 0] and [2, 4] at [2, 0]"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "a chunk [2, 4] at [3, 0]"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "[2, 4] at [0, 0] and [2, 4] at [0, 0]"),
    ],
)
def test_gaps_overlaps_and_chunks_outside_of_the_tensor_are_named(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], found: str
) -> None:
    assert problems_of(tensor(*chunks)) == [("w", found)]


def test_two_items_in_the_same_bytes_of_a_file_are_named() -> None:
    first = tensor(((0, 0), (4, 4)))
    second = Item("x", None, "float32", 4, (4, 4), (Chunk((0, 0), (4, 4), "__0_0.distcp", 500, 900),))
    assert problems_of(first, second) == [("x", "bytes up to 900 are of 'w'")]


def test_an_item_without_a_place_and_one_with_too_few_bytes_are_named() -> None:
    nowhere = Item("a", None, None, 1, (), (Chunk((), ()),))
    short = Item("b", None, "float32", 4, (100,), (Chunk((0,), (100,), "__0_0.distcp", 0, 399),))
    assert problems_of(nowhere, short) == [("a", "none"), ("b", "399 bytes in __0_0.distcp")]
