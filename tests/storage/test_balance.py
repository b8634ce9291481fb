"""Sizes dealt out to bins leave the bins about equally full, however they were filled before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.storage.layouts.balance import deal

_SIZES = st.lists(st.one_of(st.integers(0, 10), st.integers(0, 1 << 40)), max_size=400)
_LOADS = st.lists(st.one_of(st.just(0), st.integers(0, 1 << 40)), min_size=1, max_size=5)


@given(_SIZES, _LOADS)
def test_no_bin_ends_above_the_rest_by_more_than_the_largest_size(sizes: list[int], loads: list[int]) -> None:
    bins, after = deal(np.array(sizes, dtype=np.int64), np.array(loads, dtype=np.int64))
    assert len(bins) == len(sizes)
    expected = [
        load + sum(size for size, bin_of in zip(sizes, bins.tolist(), strict=True) if bin_of == number)
        for number, load in enumerate(loads)
    ]
    assert after.tolist() == expected
    for number in range(len(loads)):
        if after[number] > loads[number]:  # a bin that was full before may stay above
            assert after[number] - min(expected) <= 2 * max(sizes)


@given(st.integers(1, 8), st.integers(1, 2000))
def test_equal_sizes_are_dealt_equally(n_bins: int, n_sizes: int) -> None:
    bins, _ = deal(np.full(n_sizes, 1000, dtype=np.int64), np.zeros(n_bins, dtype=np.int64))
    counts = np.bincount(bins, minlength=n_bins)
    assert counts.max() - counts.min() <= 1


def test_the_loads_that_are_passed_in_are_not_changed() -> None:
    load = np.array([5, 0], dtype=np.int64)
    deal(np.array([1, 2, 3], dtype=np.int64), load)
    assert load.tolist() == [5, 0]
