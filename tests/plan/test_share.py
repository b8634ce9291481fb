"""A rank's share survives its journey as bits, and both ends place the same records at the same places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.share import pack_places, place_items, unpack_places
from robust_dcp.plan.structure import Form
from robust_dcp.storage.records.torch_zip import record_template
from tests.plan.structures import Item, chunk, obj, table, tensor


@given(st.lists(st.booleans(), max_size=200))
def test_places_come_back_from_their_bits(chosen: list[bool]) -> None:
    places = np.flatnonzero(np.array(chosen, dtype=np.bool_))
    bits = pack_places(places, len(chosen))
    assert len(bits) == (len(chosen) + 7) // 8
    assert unpack_places(bits, len(chosen)).tolist() == places.tolist()


@given(st.binary(max_size=20), st.integers(0, 170))
def test_bits_for_another_number_of_items_are_an_exchange_error(bits: bytes, n_items: int) -> None:
    if len(bits) != (n_items + 7) // 8:
        with pytest.raises(ExchangeError, match=f"a state dict of {n_items}"):
            unpack_places(bits, n_items)
        return
    places = unpack_places(bits, n_items)
    assert (places < n_items).all()


def test_records_get_the_lengths_that_the_writer_frames() -> None:
    items: list[Item] = [
        tensor("a", [3, 5], torch.bfloat16),
        chunk("b", [1000], [100], [17], torch.int64),
        tensor("c", ()),
        tensor("d", [0]),
        obj("e"),
        Item("f", tensor("f").kind, (4,), (0,), (4,), form=Form.VARIABLE),
    ]
    placements = place_items(table(*items), np.arange(6), files=2)
    for place, item in enumerate(items[:4]):
        template = record_template(item.dtype, item.size)
        assert template is not None
        assert placements.nbytes[place] == template.nbytes
    assert placements.variable.tolist() == [4, 5]
    assert set(placements.file[4:].tolist()) == {placements.variable_file}


def test_only_the_kept_items_are_placed() -> None:
    structure = table(*(tensor(f"t{n}") for n in range(10)))
    assert len(place_items(structure, np.array([1, 7]), files=3).nbytes) == 2
    empty = place_items(structure, np.array([], dtype=np.intp), files=3)
    assert empty.n_files == 0
    assert empty.variable_file is None


def test_rank_and_coordinator_place_alike() -> None:
    structure = table(*(tensor(f"t{n:02}", [n * 50_000]) for n in range(12)), obj("o"))
    kept = np.arange(0, 13, 2)
    here, there = (place_items(structure, kept, files=3) for _ in range(2))
    for column in ("file", "offset", "nbytes"):
        assert np.array_equal(getattr(here, column), getattr(there, column))
    assert here.file_nbytes == there.file_nbytes
