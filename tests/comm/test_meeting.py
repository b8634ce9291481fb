"""Where ranks meet: a store that is gone, damaged, or never answers ends in an error that says so."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

from robust_dcp.comm import patience, process_group
from robust_dcp.comm.meeting import STORE_IS_LOST, Meeting, StoreLost
from robust_dcp.comm.pipe import GlooPipe, PipeBroken


def meet(*meetings: Meeting, **options: Any) -> list[GlooPipe]:
    """Connect two meetings to each other."""
    pipes: list[Future[GlooPipe]] = [Future(), Future()]

    def connect(rank: int) -> None:
        try:
            pipes[rank].set_result(meetings[rank].connect(1 - rank, 0, **options))
        except BaseException as error:
            pipes[rank].set_exception(error)

    for rank in (0, 1):
        threading.Thread(target=connect, args=(rank,), daemon=True).start()
    return [pipe.result(60) for pipe in pipes]


def test_a_store_that_cannot_be_opened_is_the_reason_that_is_told() -> None:
    def open_store() -> Any:
        raise RuntimeError("connection refused\nand more that nobody wants to read")

    meeting = Meeting(open_store, "group", 0)
    with pytest.raises(PipeBroken) as caught:
        meeting.connect(1, 0)
    assert str(caught.value).startswith(f"{STORE_IS_LOST} (connection refused")
    with pytest.raises(StoreLost, match="connection refused"):
        meeting.end_message_of("save")


def test_a_meeting_that_is_closed_stops_looking_for_the_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MEETING_SECONDS", 0.0)
    store = dist.HashStore()
    meeting = Meeting(lambda: store, "group", 0)
    told: list[str] = []

    def close() -> None:
        told.append("waiting")
        meeting.closed = True

    with pytest.raises(PipeBroken, match="closed while connecting"):
        meeting.connect(1, 0, waiting=close)
    assert told == ["waiting"]


def test_ranks_connect_though_where_they_listen_is_written_in_a_way_that_we_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then only the early notice of a rank that has died is lost."""
    monkeypatch.setattr(process_group, "_listening_addresses", lambda pid: [])
    store, found = dist.HashStore(), []
    pipes = meet(*(Meeting(lambda: store, "group", rank) for rank in (0, 1)), met=found.append)
    sending = pipes[0].send(b"\x01" * 64, 5)
    assert bytes(pipes[1].receive(64, 5)) == b"\x01" * 64
    pipes[0].await_sent(sending, datetime.timedelta(seconds=20))
    assert found == []
    for pipe in pipes:
        pipe.close()


def test_what_another_rank_wrote_is_an_address_only_if_it_looks_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = b"\x02\x00\x1f\x90" + bytes([127, 0, 0, 1]) + bytes(120)
    monkeypatch.setattr(process_group, "_listening_addresses", lambda pid: [own[:8]])
    others = bytearray(own)
    others[4:8] = bytes([10, 1, 2, 3])
    assert process_group.address_of_other(b"head" + own, b"head" + bytes(others)) == ("10.1.2.3", 0x1F90)
    assert process_group.address_of_other(b"head" + own, b"head" + bytes(others[:20])) is None, "too short"
    others[0] = 0x7F
    assert process_group.address_of_other(b"head" + own, b"head" + bytes(others)) is None, "no such family"
    assert process_group.address_of_other(b"another", b"head" + bytes(others)) is None, "not our own"


def test_an_end_message_is_settled_once_and_both_ranks_read_the_first() -> None:
    store = dist.HashStore()
    first, second = (Meeting(lambda: store, "group", rank) for rank in (0, 1))
    assert first.end_message_of("save") is None
    assert first.settle(["save", "load"], b"rank 3 has died") == b"rank 3 has died"
    assert second.settle(["save"], b"rank 4 has died") == b"rank 3 has died"
    assert second.end_message_of("load") == b"rank 3 has died"
