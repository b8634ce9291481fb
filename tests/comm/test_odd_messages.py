"""What a rank of another version, or a damaged one, sends is refused by name, or ignored where nobody waits for it."""

from __future__ import annotations

import secrets
import struct
from typing import Any

import msgspec
import pytest
from isal import isal_zlib

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm import messages as wire
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Beat, Operation
from robust_dcp.comm.stats import MAX_PHASES, ExchangeStats, PhaseStats
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from tests.comm.messages import Note
from tests.support.rank_threads import quick, run_threads
from tests.support.simulated_network import SimulatedNetwork


class NoteOfAnotherVersion(msgspec.Struct, frozen=True):
    """As :class:`Note`, but its ``rank`` is a text."""

    rank: str
    data: bytes = b""


class Even(msgspec.Struct, frozen=True):
    """A message that checks itself."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")


class AnyNumber(msgspec.Struct, frozen=True):
    number: int


def gather(link: Link, message: Any, kind: Any) -> tuple[str, list[int] | None]:
    channel = Channel(Operation(link, "save", 30.0), 0)
    with pytest.raises(RobustCheckpointError) as caught:
        channel.gather("plan", lambda: message, kind)
    assert channel.agree("next", Offer).n_ranks == link.size, "the ranks are still in step"
    return caught.value.message, caught.value.to_fields().get("ranks")


def test_a_field_of_another_type_names_the_rank_that_sent_it_on_all_ranks() -> None:
    def be_rank(link: Link) -> Any:
        return gather(link, NoteOfAnotherVersion("two") if link.rank == 2 else Note(link.rank), Note)

    with quick():
        found = run_threads(SimulatedNetwork(4), be_rank)
    assert len(set(map(str, found))) == 1
    assert "what rank 2 sent is no Note: 'rank': Expected `int`, got `str`" in found[0][0]


def test_a_message_whose_own_check_fails_names_the_rank_that_sent_it_on_all_ranks() -> None:
    def be_rank(link: Link) -> Any:
        return gather(link, AnyNumber(2 * link.rank + (link.rank == 1)), Even)

    with quick():
        found = run_threads(SimulatedNetwork(3), be_rank)
    assert len(set(map(str, found))) == 1
    assert "what rank 1 sent is no Even: 3 is odd" in found[0][0]


def test_a_message_that_no_receiver_accepts_is_an_error_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_NBYTES", 1000)
    assert wire.decode(wire.encode(Note(1, bytes(900))), Note) == Note(1, bytes(900))
    with pytest.raises(ExchangeError, match=r"a Note of [0-9]+ bytes is larger than 1000"):
        wire.encode(Note(1, bytes(1000)))


def test_compressed_data_that_is_damaged_inside_is_refused() -> None:
    body = msgspec.msgpack.encode(Note(1, secrets.token_bytes(3000) + bytes(3000)))
    compressed = bytearray(isal_zlib.compress(body, 1))
    for place in range(len(compressed) // 2, len(compressed), 97):
        damaged = bytearray(compressed)
        damaged[place] ^= 0x55
        with pytest.raises(ExchangeError, match="deflate"):
            wire.decode(struct.pack("<BQ", 3, len(body)) + damaged, Note)
    assert wire.decode(struct.pack("<BQ", 3, len(body)) + compressed, Note).rank == 1


@pytest.mark.parametrize("field", ["signature", "plan_id"])
def test_an_offer_with_an_identity_of_another_length_is_refused_before_it_is_sent(field: str) -> None:
    with pytest.raises(ValueError, match="bytes, not 16 each"):
        Offer(**{field: b"short"})


def test_ranks_that_do_not_say_how_much_they_have_to_do_are_described_by_their_time() -> None:
    beat = Beat.slowest([Beat(silent_rank=3, silent_seconds=12.4, n_at_work=2), Beat(silent_rank=1, n_at_work=1)])
    assert str(beat) == "3 ranks are at work; rank 3 for 12 seconds"


def test_only_so_many_phases_are_kept_and_the_sums_are_of_all() -> None:
    stats = ExchangeStats()
    for number in range(MAX_PHASES + 5):
        stats.count(f"phase {number}", PhaseStats(exchanges=1))
    stats.count(f"phase {MAX_PHASES}", PhaseStats(exchanges=1))
    assert len(stats.phases) == MAX_PHASES and "phase 4" not in stats.phases and "phase 5" in stats.phases
    assert stats.phases[f"phase {MAX_PHASES}"].exchanges == 2
    assert stats.exchanges == MAX_PHASES + 6
