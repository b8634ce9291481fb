"""Passes bytes from the rank that read them to all other ranks that need them, in buckets, round after round.

This module owns the way along which a bucket travels, and the order in which ranks send and receive. It never decides
who sends what (``plan.shared_reads`` does), nor what the bytes mean.

Within a round a bucket reaches all its ranks in ``log2(ranks)`` steps. In step ``t`` each of the first ``2**t`` ranks
passes the bucket on to the rank that is ``2**t`` places further. All ranks take rounds and steps in the same order, so
no two ranks wait for each other. A rank holds at most the buckets of one round at a time. Before each bucket goes a
frame with the number of the operation and the CRC-32 of the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from isal import isal_zlib

from robust_dcp.comm import patience
from robust_dcp.comm.connections import Broken, Connections
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeError, ExchangeTimeout

_FRAMES_TAG, _BUCKETS_TAG = 1, 2


class Bucket(NamedTuple):
    """``nbytes`` bytes, at least 1, that go from the first of ``ranks`` to the others, in round ``round``.

    Rounds run in ascending order. ``ranks`` are ranks of the group, in the same order on all of them.
    """

    round: int
    ranks: tuple[int, ...]
    nbytes: int


class Relay(NamedTuple):
    """What one rank contributes to a relay.

    Attributes:
        buckets: the buckets in which this rank takes part, in ascending rounds. Ranks that share several buckets have
            them in the same order. The functions get the index of a bucket in this list, and one thread calls them.
        outgoing: returns what this rank sends as the first: uint8 ``[nbytes]``, contiguous, on the CPU.
        incoming: returns the tensor to receive into, of the same kind.
        arrived: is called when the tensor that ``incoming`` returned is filled, and has been passed on.
    """

    buckets: Sequence[Bucket]
    outgoing: Callable[[int], torch.Tensor]
    incoming: Callable[[int], torch.Tensor]
    arrived: Callable[[int, torch.Tensor], None]


class Passing:
    """One relay on one rank. Its connections serve nothing else, so that they can be dropped to end a wait.

    Args:
        relay: what this rank contributes.
        operation: what the relay belongs to. It is in an exchange in which this is the rank's own work.
    """

    def __init__(self, relay: Relay, operation: Operation) -> None:
        self._relay = relay
        self._operation = operation
        self._rank = operation.link.rank
        self._connections: Connections | None = None
        self._is_dropped = False

    def run(self) -> None:
        """Move all buckets of this rank.

        Raises:
            ExchangeTimeout: a rank is gone or too slow.
            ExchangeError: what a rank sent arrived damaged.
        """
        try:
            for _, in_round in groupby(enumerate(self._relay.buckets), key=lambda pair: pair[1].round):
                self._move_round(list(in_round))
                self._operation.note_progress()
        except Broken as error:
            # Whoever dropped the connections has said why over those of the channel, where it may arrive later. The
            # wait is no progress: it ends long before the others could take this rank for the one that is missing.
            until = time.monotonic() + min(patience.RECONNECT_SECONDS, self._operation.timeout_seconds / 2)
            while time.monotonic() < until:
                self._operation.stop_if_announced()
                time.sleep(patience.TICK_SECONDS)
            phase = self._operation.phase
            raise ExchangeTimeout(
                f"{phase!r}: rank {self._rank} lost a rank that it passes tensors to or gets them from ({error})",
                phase=phase,
                timeout_seconds=self._operation.timeout_seconds,
            ) from None

    def _move_round(self, in_round: Sequence[tuple[int, Bucket]]) -> None:
        relay, rank = self._relay, self._rank
        moving = [
            (number, bucket, relay.outgoing(number) if bucket.ranks[0] == rank else relay.incoming(number))
            for number, bucket in in_round
        ]
        most = max(len(bucket.ranks) for _, bucket in in_round)
        for reach in (1 << step for step in range((most - 1).bit_length())):
            outgoing, incoming = [], []
            for _, bucket, tensor in moving:
                place = bucket.ranks.index(rank)
                if place < reach and place + reach < len(bucket.ranks):
                    outgoing.append((bucket.ranks[place + reach], tensor))
                elif reach <= place < 2 * reach:
                    incoming.append((bucket.ranks[place - reach], tensor))
            if outgoing or incoming:
                self._move(outgoing, incoming)
        for number, bucket, tensor in moving:
            if bucket.ranks[0] != rank:
                relay.arrived(number, tensor)

    def _move(self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Move tensors to and from other ranks at once. No piece of them may take longer than the timeout."""
        operation = self._operation
        connections = self._connected({peer for peer, _ in (*outgoing, *incoming)})
        frames = [torch.empty(FRAME_NBYTES, dtype=torch.uint8) for _ in incoming]
        moving = []
        for (peer, tensor), frame in zip(incoming, frames, strict=True):
            moving.append(connections.start("recv", peer, _FRAMES_TAG, frame))
            moving.append(connections.start("recv", peer, _BUCKETS_TAG, tensor))
        for peer, tensor in outgoing:
            moving.append(connections.start("send", peer, _FRAMES_TAG, self._frame_before(tensor)))
            moving.append(connections.start("send", peer, _BUCKETS_TAG, tensor))
            operation.cost.payload_nbytes_sent += tensor.numel()
        for each in moving:
            connections.finish(each, operation.timeout_seconds, operation.note_progress)
        for (sender, tensor), frame in zip(incoming, frames, strict=True):
            if bytes(frame.numpy()) != self._frame_before(tensor):
                raise ExchangeError(
                    f"what rank {sender} sent in {operation.phase!r} arrived damaged at rank {self._rank}: load again, "
                    "and suspect the network between them if that repeats",
                    phase=operation.phase,
                    ranks=[sender],
                )

    def _frame_before(self, tensor: torch.Tensor) -> bytes:
        crc32 = isal_zlib.crc32(tensor.numpy())
        return self._operation.stamped(Frame(Kind.RELAY, payload_nbytes=tensor.numel(), payload_crc32=crc32)).encode()

    def _connected(self, peers: set[int]) -> Connections:
        operation = self._operation
        if self._connections is None:
            self._connections = operation.link.connections_for(f"relay {operation.key} {operation.n_exchanges}")
        until = time.monotonic() + operation.timeout_seconds
        for peer in sorted(peers):

            def look(peer: int = peer) -> None:
                operation.stop_if_announced()
                if self._is_dropped or time.monotonic() > until:
                    raise Broken(f"rank {peer} did not come to connect")

            self._connections.connect(peer, look)
        return self._connections

    def drop(self) -> None:
        """End all waits, on this side and on the others."""
        self._is_dropped = True
        if self._connections is not None:
            self._connections.drop()
