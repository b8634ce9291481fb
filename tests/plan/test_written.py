"""What a rank tells of its files is only what the plan does not say, and is never mistaken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.comm import Offer, combined_signature
from robust_dcp.errors import ExchangeError
from robust_dcp.plan.written import WrittenMessage, written_by_all, written_message, written_offer
from robust_dcp.storage.writing.engine import WrittenFiles
from tests.plan.structures import agreement_of

_PLACES = [[0, 100], [128, 7]]


def _places(rows: list[Any]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _written(rows: list[Any], are_plain: bool = True) -> WrittenFiles:
    return WrittenFiles(are_plain, _places(rows), ("file",), 1)


def _told(
    ranks: list[WrittenFiles], messages: list[WrittenMessage | None], known: list[npt.NDArray[np.int64]] | None
) -> tuple[WrittenFiles, ...]:
    """What the coordinator makes of what all ranks offer and send."""
    digest = agreement_of([written_offer(written) for written in ranks]).signature
    return written_by_all([written.are_plain for written in ranks], messages, known, digest, combined_signature)


_ROWS = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))


_MOVES = st.lists(st.tuples(_ROWS, _ROWS, st.booleans()), max_size=12)


@settings(max_examples=50)
@given(st.lists(st.tuples(_MOVES, st.booleans()), min_size=1, max_size=5), st.booleans())
def test_the_coordinator_learns_the_places_and_the_file_names_of_every_rank(
    ranks: list[tuple[list[tuple[Any, Any, bool]], bool]], first_save: bool
) -> None:
    known = None if first_save else [_places([old for old, _, _ in rows]) for rows, _ in ranks]
    now = [_written([new if moved else old for old, new, moved in rows], plain) for rows, plain in ranks]
    messages = [written_message(each.variable_places, known and known[rank]) for rank, each in enumerate(now)]
    for found, written in zip(_told(now, messages, known), now, strict=True):
        assert found.variable_places.tolist() == written.variable_places.tolist()
        assert found.are_plain == written.are_plain


@given(st.lists(st.sampled_from([None, False, True]), min_size=1, max_size=9))
def test_ranks_see_in_the_agreement_whether_all_file_names_are_plain_or_marked(plain_or_not: list[bool | None]) -> None:
    ranks = [None if each is None else _written(_PLACES, each) for each in plain_or_not]
    agreement = agreement_of([written_offer(written) for written in ranks])
    found = {each for each in plain_or_not if each is not None}
    assert agreement.same_value == (len(found) < 2)
    if found:
        assert (agreement.lowest, agreement.highest) == (1 + min(found), 1 + max(found))


def test_a_rank_that_has_written_nothing_offers_nothing() -> None:
    assert written_offer(None) == Offer()


def test_a_rank_whose_places_are_known_sends_no_message() -> None:
    assert written_message(_places([]), None) is None
    assert written_message(_places(_PLACES), _places(_PLACES)) is None


def test_only_the_places_that_moved_are_sent() -> None:
    known = _places([[64 * n, 60] for n in range(1000)])
    now = known.copy()
    now[7] = [10**6, 61]
    message = written_message(now, known)
    assert message is not None
    assert (len(message.items), len(message.places)) == (8, 16)


@pytest.mark.parametrize("known", [None, [[0, 100], [128, 8]], [[0, 100]], []])
def test_the_coordinator_never_fills_in_places_that_the_rank_did_not_mean(known: list[Any] | None) -> None:
    """Rank 1 believes that the coordinator knows its places; it does not."""
    ranks = [_written([]), _written(_PLACES), _written([[5, 6]])]
    with pytest.raises(ExchangeError, match="not those that the coordinator has"):
        _told(ranks, [None] * 3, None if known is None else [_places([]), _places(known), _places([[5, 6]])])


def test_the_places_of_one_rank_are_never_taken_for_those_of_another() -> None:
    ranks = [_written([[5, 6]]), _written(_PLACES)]
    messages = [written_message(each.variable_places, None) for each in ranks]
    with pytest.raises(ExchangeError):
        _told(ranks, messages[::-1], None)


@settings(max_examples=60)
@given(st.binary(max_size=40), st.binary(max_size=48))
def test_messages_of_any_bytes_give_the_places_that_were_meant_or_an_exchange_error(
    items: bytes, places: bytes
) -> None:
    try:
        (found,) = _told([_written(_PLACES)], [WrittenMessage(items, places)], None)
    except ExchangeError:
        return
    assert found.variable_places.tolist() == _PLACES


@pytest.mark.parametrize(
    ("items", "places"),
    [
        (b"\0" * 7, b"\0" * 16),
        (b"\0" * 8, b"\0" * 15),
        (b"\0" * 8, b"\0" * 8),
        (b"\xff" * 8, b"\0" * 16),
        (b"", b"\0" * 16),
    ],
)
def test_places_that_do_not_fit_their_items_are_an_exchange_error(items: bytes, places: bytes) -> None:
    with pytest.raises(ExchangeError):
        _told([_written(_PLACES)], [WrittenMessage(items, places)], [_places(_PLACES)])
