"""Many ranks on real gloo: threads of one process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading

import pytest

from robust_dcp.comm import Channel, Offer, patience
from tests.comm.messages import Note
from tests.harness.network import GlooNetwork, run_channels
from tests.harness.torch_versions import needs_lazy_connections


def sockets() -> set[str]:
    """The TCP sockets of this process. Some of an earlier test may be closed at any time."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6):
                        found.add(name)
    return found


@needs_lazy_connections
@pytest.mark.parametrize("size", [8, 64])
def test_sockets_bytes_and_the_store_do_not_grow_with_the_group(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that a busy machine holds up would tell the store where it waits.
    monkeypatch.setattr(patience, "ELSEWHERE_SECONDS", 120.0)
    before, network, after_saves = sockets(), GlooNetwork(size), list[tuple[int, int]]()
    all_have_saved = threading.Barrier(
        size, action=lambda: after_saves.append((len(sockets() - before), network.store_nbytes))
    )

    def save_twice(channel: Channel) -> tuple[int, int]:
        """The exchanges of a save with a known plan, in which no rank has anything to send. What the second costs."""
        for _ in range(2):
            before = channel.stats.header_nbytes_sent + channel.stats.payload_nbytes_sent
            channel.agree("save: plan", lambda: Offer(bytes(16), bytes(16), 1, 1))
            channel.gather("save: write", lambda: None, Note)
            channel.barrier("save: commit")
            all_have_saved.wait()
        nbytes = channel.stats.header_nbytes_sent + channel.stats.payload_nbytes_sent - before
        return len(channel._operation.link.connections.peers), nbytes

    connections, sent = zip(*run_channels(network, save_twice, timeout_seconds=120), strict=True)
    (_, store_nbytes), (more_sockets, store_nbytes_again) = after_saves
    # Each rank has a socket that listens, and both ends of each connection are sockets of this process.
    assert more_sockets == sum(connections) + size
    assert sum(connections) / size + 1 <= 4
    assert max(connections) + 1 <= 2 * (size - 1).bit_length() + 2
    assert all(nbytes <= 1024 * n_peers for n_peers, nbytes in zip(connections, sent, strict=True))
    assert store_nbytes / size <= 2048
    assert store_nbytes_again == store_nbytes, "ranks that are connected asked the store"


def test_a_message_for_many_ranks_is_scattered_as_one() -> None:
    note = Note(7, random.Random(7).randbytes(100_000))

    def scatter_to_half(channel: Channel) -> int:  # to the ranks of even number; the bytes that this rank has sent
        _, got = channel.scatter("scatter", lambda: [None if rank % 2 else note for rank in range(16)], Note)
        assert got == (None if channel.rank % 2 else note)
        return channel.stats.payload_nbytes_sent

    sent = run_channels(GlooNetwork(16), scatter_to_half)[0]
    assert 100_000 < sent < 401_000  # once to each of at most four ranks below, not once for each rank
