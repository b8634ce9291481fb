"""A rank that receives from many has several payloads under way at once, in bounded memory."""

from __future__ import annotations

import random

import pytest

from robust_dcp.comm import Channel, deliveries, transport
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.transport import Incoming
from tests.comm.messages import Note
from tests.support.ranks import run_ranks, values

LIMIT_NBYTES = 50_000


class _Watched:
    """``inner``, which leaves ``under_way`` when it has arrived."""

    def __init__(self, inner: Incoming, nbytes: int, under_way: list[int]) -> None:
        self.inner = inner
        self.nbytes = nbytes
        self.under_way = under_way

    def finish(self, deadline: Deadline) -> bytearray:
        payload = self.inner.finish(deadline)
        self.under_way.remove(self.nbytes)
        return payload


def _gather_of(sizes: list[int]) -> tuple[int, int]:
    """The most bytes, and the most payloads, that were under way to this rank at once."""
    transport.CHUNK_NBYTES = 3000
    deliveries.MAX_UNDER_WAY_NBYTES = LIMIT_NBYTES
    channel = Channel.for_group(timeout_seconds=50)
    connected = channel._link.transport(Deadline(50))
    start_receiving = connected.start_receiving
    under_way: list[int] = []
    most = [(0, 0)]

    def start_watched(nbytes: int, sender: int, tag: int) -> Incoming:
        under_way.append(nbytes)
        most.append((sum(under_way), len(under_way)))
        return _Watched(start_receiving(nbytes, sender, tag), nbytes, under_way)

    connected.start_receiving = start_watched  # type: ignore[method-assign]
    contents = [random.Random(rank).randbytes(nbytes) for rank, nbytes in enumerate(sizes)]
    found = channel.gather("large", lambda: Note(channel.rank, contents[channel.rank]), Note)
    assert found is None or [note and note.data for note in found] == contents
    return max(nbytes for nbytes, _ in most), max(count for _, count in most)


@pytest.mark.parametrize(
    ("sizes", "most_nbytes", "most_at_once"),
    [
        ([0, 20_000, 40_000, 1, 20_000, 20_000, 9_000, 45_000], 49_001, 4),
        ([0, 20_000, 100_000, 40_000], 100_000, 1),  # what is larger than the limit comes alone
        ([0, 10, 10, 10, 10, 10], 50, 5),
    ],
)
def test_several_payloads_are_under_way_at_once_but_no_more_than_may_be(
    sizes: list[int], most_nbytes: int, most_at_once: int
) -> None:
    at_coordinator, *others = values(run_ranks(len(sizes), _gather_of, sizes))
    assert at_coordinator[1] == most_at_once
    assert most_nbytes < at_coordinator[0] < most_nbytes + 30 * most_at_once
    assert set(others) == {(0, 0)}
