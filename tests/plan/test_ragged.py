"""Rows are told apart exactly, hash collisions included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.plan.structure import ragged
from robust_dcp.plan.structure.ragged import padded, unique_rows

_ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.one_of(st.integers(-1, 2), st.integers(-(2**63), 2**63 - 1)), min_size=width, max_size=width),
        max_size=12,
    ).map(lambda rows: np.array(rows, dtype=np.int64).reshape(len(rows), width))
)


def _check(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
    first, which = unique_rows(*rows.T)
    assert len(first) == len({tuple(row) for row in rows.tolist()})
    assert np.array_equal(rows[first][which], rows)


@given(_ROWS)
def test_distinct_rows_make_all_rows_again(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
    _check(rows)


@given(_ROWS)
def test_rows_of_one_hash_are_told_apart(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_mixed", lambda values: values * np.uint64(0))
        _check(rows)


def test_more_distinct_rows_than_a_small_table_has_slots() -> None:
    numbers = np.arange(300_000) % 200_000
    _check(np.column_stack([numbers // 7, numbers % 7]))


@given(st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=6))
def test_padded_rows_hold_the_ragged_ones(rows: list[list[int]]) -> None:
    flat = np.array([value for row in rows for value in row], dtype=np.int64)
    counts = np.array([len(row) for row in rows], dtype=np.uint8)
    width = max(map(len, rows), default=0)
    expected = [row + [7] * (width - len(row)) for row in rows]
    assert padded(flat, counts, width, fill=7).tolist() == expected
