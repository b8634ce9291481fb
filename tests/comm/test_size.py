"""Many ranks on real gloo: threads of one process."""

from __future__ import annotations

import random

import pytest

from robust_dcp.comm import Channel, Offer
from tests.comm.messages import Note
from tests.comm.threads import Group, n_sockets


def _save(channel: Channel) -> None:
    """The exchanges of a save with a known plan, in which no rank has anything to send."""
    channel.agree("save: plan", lambda: Offer(bytes(16), bytes(16), 1, 1))
    channel.gather("save: write", lambda: None, Note)
    channel.barrier("save: commit")


@pytest.mark.parametrize("size", [8, 64])
def test_sockets_bytes_and_the_store_do_not_grow_with_the_group(size: int) -> None:
    before = n_sockets()
    with Group(size) as group:
        group.run(_save)
        store_nbytes = group.store.nbytes
        for nbytes in group.nbytes:
            nbytes.clear()
        group.run(_save)
        connections = group.n_connections()
        # Each rank has a socket that listens, and both ends of each connection are sockets of this process.
        assert n_sockets() - before == sum(connections) + size
        assert sum(connections) / size + 1 <= 4
        assert max(connections) + 1 <= 2 * (size - 1).bit_length() + 2
        assert max(max(nbytes.values()) for nbytes in group.nbytes) <= 2048
        assert store_nbytes / size <= 2048
        assert group.store.nbytes == store_nbytes, "ranks that are connected asked the store"


def _scatter_to_half(channel: Channel) -> tuple[int, int]:
    """One message for the ranks of even number. Returns its size, and the bytes that this rank has sent."""
    note = Note(7, random.Random(7).randbytes(100_000))
    with channel.recording() as stats:
        got = channel.scatter("scatter", lambda: [None if rank % 2 else note for rank in range(channel.size)], Note)
    assert got == (None if channel.rank % 2 else note)
    return len(note.data), stats.payload_nbytes_sent


def test_a_message_for_many_ranks_is_scattered_as_one() -> None:
    with Group(16) as group:
        nbytes, sent = group.run(_scatter_to_half)[0]
    assert nbytes < sent < 4 * nbytes + 1000  # once to each of at most four ranks below, not once for each rank
