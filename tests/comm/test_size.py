"""Many ranks on real gloo: threads of one process, and forked processes."""

from __future__ import annotations

import random

import pytest

from benchmarks.bench_exchanges import Group, measure
from robust_dcp.comm import Channel
from tests.comm.messages import Note


def test_sockets_bytes_and_the_store_do_not_grow_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for size in (8, 64):
        row = measure(size)
        log2 = (size - 1).bit_length()
        assert row.sockets_mean + 1 <= 4
        assert row.sockets_max + 1 <= 2 * log2 + 2
        assert row.save_nbytes_a_neighbour <= 2048
        assert row.store_nbytes <= 2048


def _scatter_to_half(channel: Channel) -> tuple[int, int]:
    """One message for the ranks of even number. Returns its size, and the bytes that this rank has sent."""
    note = Note(7, random.Random(7).randbytes(100_000))
    with channel.recording() as stats:
        got = channel.scatter("scatter", lambda: [None if rank % 2 else note for rank in range(channel.size)], Note)
    assert got == (None if channel.rank % 2 else note)
    return len(note.data), stats.payload_nbytes_sent


def test_a_message_for_many_ranks_is_scattered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = Group(16)
    try:
        nbytes, sent = group.run(_scatter_to_half)[0]
    finally:
        group.close()
    assert nbytes < sent < 4 * nbytes + 1000  # once to each of at most four ranks below, not once for each rank
