"""What a rank tells of its files is only what the plan does not say, and is never mistaken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.written import WrittenMessage, news_of, word_of, written_by_all
from robust_dcp.storage.writing.engine import WrittenFiles

_PLACES = [[0, 100], [128, 7]]


def _places(rows: list[Any]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _written(rows: list[Any], generation: int = 0) -> WrittenFiles:
    return WrittenFiles(generation, _places(rows), ("file",), 1)


def _told(written: WrittenFiles, known: npt.NDArray[np.int64] | None) -> WrittenFiles:
    """What the coordinator makes of what a rank tells it, if both know the same places."""
    message = news_of(written.variable_places, known)
    (found,) = written_by_all([word_of(written)], [message], None if known is None else [known])
    return found


_ROWS = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))


@settings(max_examples=50)
@given(st.lists(st.tuples(_ROWS, _ROWS, st.booleans()), max_size=12), st.integers(0, 2**24 - 1), st.booleans())
def test_the_coordinator_learns_the_places_and_the_generation(
    rows: list[tuple[Any, Any, bool]], generation: int, first_save: bool
) -> None:
    known = None if first_save else _places([old for old, _, _ in rows])
    now = [new if moved else old for old, new, moved in rows]
    told = _told(_written(now, generation), known)
    assert told.variable_places.tolist() == _places(now).tolist()
    assert told.generation == generation


def test_a_rank_whose_places_are_known_sends_no_message() -> None:
    assert news_of(_places([]), None) is None
    assert news_of(_places(_PLACES), _places(_PLACES)) is None


def test_only_the_places_that_moved_are_sent() -> None:
    known = _places([[64 * n, 60] for n in range(1000)])
    now = known.copy()
    now[7] = [10**6, 61]
    message = news_of(now, known)
    assert message is not None
    assert (len(message.items), len(message.places)) == (8, 16)


@pytest.mark.parametrize("known", [None, [[0, 100], [128, 8]], [[0, 100]], []])
def test_the_coordinator_never_fills_in_places_that_the_rank_did_not_mean(known: list[Any] | None) -> None:
    """The rank believes that the coordinator knows its places; it does not."""
    words = [word_of(_written([])), word_of(_written(_PLACES))]
    with pytest.raises(ExchangeError, match="rank 1 wrote are out of step") as caught:
        written_by_all(words, [None, None], None if known is None else [_places([]), _places(known)])
    assert caught.value.ranks == [1]


@settings(max_examples=60)
@given(st.binary(max_size=40), st.binary(max_size=48))
def test_messages_of_any_bytes_give_the_places_that_were_meant_or_an_exchange_error(
    items: bytes, places: bytes
) -> None:
    try:
        (found,) = written_by_all([word_of(_written(_PLACES))], [WrittenMessage(items, places)], None)
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
        written_by_all([word_of(_written(_PLACES))], [WrittenMessage(items, places)], [_places(_PLACES)])


def test_more_generations_than_the_word_holds_are_refused() -> None:
    assert word_of(_written(_PLACES, 2**24 - 1)) < 2**64
    with pytest.raises(ValueError, match="clean it up"):
        word_of(_written(_PLACES, 2**24))
