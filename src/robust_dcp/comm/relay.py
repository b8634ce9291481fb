"""Passes bytes from the rank that read them to all other ranks that need them, in buckets, round after round.

This module owns the way along which a bucket travels, and the order in which ranks send and receive. It never decides
who sends what (``plan.shared_reads`` does), nor what the bytes mean.

Within a round a bucket reaches all its ranks in ``log2(ranks)`` steps. In step ``t`` each of the first ``2**t`` ranks
passes the bucket on to the rank that is ``2**t`` places further. All ranks take rounds and steps in the same order, so
no two ranks wait for each other. A rank holds at most the buckets of one round at a time. Before each bucket goes a
frame with the number of the operation and the CRC-32 of the bytes.

A relay is the own work of the ranks in an exchange, over the connections of their group. If these break meanwhile, or a
bucket arrives damaged, all ranks stop. They tell each other which round is the first that is not done everywhere, and
go on there in the next exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from isal import isal_zlib

from robust_dcp.comm.combine import Offer
from robust_dcp.comm.connections import CONNECTING_FAILED, Broken, Connections, Moving
from robust_dcp.comm.endings import Problem, Stopped
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.waits import Call, Finish, Steps
from robust_dcp.errors import ExchangeError

logger = logging.getLogger(__name__)

ALL_ROUNDS = (1 << 63) - 1
"""The number of a round that never comes."""

_FRAMES, _BUCKETS = 1 << 28, 1 << 29
"""What sets the gloo tags of a relay apart from that of the frames of its exchange."""


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
    """One try of one rank to move its buckets.

    Args:
        relay: what this rank contributes.
        operation: what the relay belongs to. It is in an exchange in which this is the rank's own work.
        first_round: the round to begin with; those before it are done on all ranks.
        is_last: whether nothing is tried again after this.
    """

    def __init__(self, relay: Relay, operation: Operation, first_round: int, is_last: bool) -> None:
        self._relay = relay
        self._operation = operation
        self._rank = operation.link.rank
        self._first_round = first_round
        self._is_last = is_last
        self._generation: int | None = None  # of the connections over which something is on its way
        self._moving: list[tuple[int, Moving]] = []  # what that is, and the other rank
        self._problem: Problem | None = None  # the rank that was lost

    def run(self) -> Steps[Offer]:
        """Move buckets until all rounds are done, or this rank has to stop.

        Returns:
            As ``value`` the first round that this rank has not done, counted from 1.

        Raises:
            ExchangeError: in the last try, what a rank sent arrived damaged.
        """
        operation, reached = self._operation, self._first_round
        left = [pair for pair in enumerate(self._relay.buckets) if pair[1].round >= reached]
        try:
            for in_round in [list(pairs) for _, pairs in groupby(left, key=lambda pair: pair[1].round)]:
                reached = in_round[0][1].round
                yield from self._move_round(in_round)
            reached = ALL_ROUNDS
        except GeneratorExit:
            raise
        except Stopped:
            yield from self.break_off()
        except Broken as error:
            logger.info("%r: rank %d stops in round %d: %s", operation.phase, self._rank, reached, error)
            operation.announce(f"rank {self._rank} stops: {error}")
            yield from self.break_off()
        except BaseException:
            yield from self.break_off()
            raise
        self._moving = []  # not before, or gloo would end the process
        return Offer(value=1 + reached)

    def _move_round(self, in_round: Sequence[tuple[int, Bucket]]) -> Steps[None]:
        relay, rank = self._relay, self._rank

        def tensors() -> list[tuple[int, Bucket, torch.Tensor]]:
            return [
                (number, bucket, relay.outgoing(number) if bucket.ranks[0] == rank else relay.incoming(number))
                for number, bucket in in_round
            ]

        moving: list[tuple[int, Bucket, torch.Tensor]] = (yield Call(tensors)).get()
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
                yield from self._move(outgoing, incoming)
        for number, bucket, tensor in moving:
            if bucket.ranks[0] != rank:
                (yield Call(partial(relay.arrived, number, tensor))).get()

    def _move(
        self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]
    ) -> Steps[None]:
        """Move tensors to and from other ranks at once."""
        operation = self._operation
        operation.stop_if_announced()
        operation.note_waiting(True)
        connected: dict[int, Connections] = {}
        for peer in sorted({peer for peer, _ in (*outgoing, *incoming)}):
            connected[peer] = yield from self._connect(peer)
        frames = [torch.empty(FRAME_NBYTES, dtype=torch.uint8) for _ in incoming]
        self._moving = moving = []
        tag = operation.tag(operation.n_exchanges)
        for (peer, tensor), frame in zip(incoming, frames, strict=True):
            moving.append((peer, connected[peer].start("recv", peer, tag ^ _FRAMES, frame)))
            moving.append((peer, connected[peer].start("recv", peer, tag ^ _BUCKETS, tensor)))
        for peer, tensor in outgoing:
            before = (yield Call(partial(self._frame_before, tensor))).get()
            moving.append((peer, connected[peer].start("send", peer, tag ^ _FRAMES, before)))
            moving.append((peer, connected[peer].start("send", peer, tag ^ _BUCKETS, tensor)))
            operation.count_sent(tensor.numel())
        peer = -1
        try:
            for peer, each in moving:
                yield Finish(connected[peer], each, None, partial(operation.note_piece, peer))
        except Broken as error:
            self._problem = operation.problem_of_lost(peer, connected[peer], str(error))
            raise
        operation.note_waiting(False)
        self._generation = None
        for (sender, tensor), frame in zip(incoming, frames, strict=True):
            if bytes(frame.numpy()) != (yield Call(partial(self._frame_before, tensor))).get():
                damage = ExchangeError(
                    f"what rank {sender} sent in {operation.phase!r} arrived damaged at rank {self._rank}: load again, "
                    "and suspect the network between them if that repeats",
                    phase=operation.phase,
                    ranks=[sender],
                )
                raise damage if self._is_last else Broken(damage.message)

    def _frame_before(self, tensor: torch.Tensor) -> bytes:
        crc32 = isal_zlib.crc32(tensor.numpy())
        return self._operation.stamped(Frame(Kind.RELAY, payload_nbytes=tensor.numel(), payload_crc32=crc32)).encode()

    def _connect(self, peer: int) -> Steps[Connections]:
        operation = self._operation

        def is_over() -> bool:
            operation.stop_if_announced()
            return operation.waits_in_vain()

        generation = operation.link.generation
        try:
            self._generation, connections = yield from operation.link.connect(peer, is_over)
        except Broken as error:
            if str(error).startswith(CONNECTING_FAILED):  # this rank has dropped all connections, and has to say why
                self._generation, self._problem = generation, operation.problem_of_lost(peer, None, str(error))
            raise
        return connections

    def break_off(self) -> Steps[None]:
        """End all waits, here and on the other ranks: nothing else ends what gloo has begun."""
        if self._generation is not None:
            problem = self._problem or Problem.of_lost({}, may_return=True)
            generation, self._generation = self._generation, None
            yield from self._operation.link.break_up(generation, problem, self._operation)
