"""Bytes on their way from the rank that has read them to all others that need them: in buckets, round after round.

Owns the tree that a bucket is passed down, the order in which ranks send and receive, and the checksums of what
arrives. Never decides who sends what (``plan.loading.readers``), nor what bytes mean. Called by ``Channel.relay`` only.

Within a round each bucket goes from its first rank to the others in ``log2(ranks)`` steps: in step ``t`` the ranks at
the first ``2**t`` places each pass it to the one ``2**t`` places behind. All ranks take rounds and steps in one order,
so nobody waits for a rank that waits for another; and no rank has more under way than the buckets of a round.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.pipe import GlooPipe, PipeBroken
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.errors import ExchangeError

__all__ = ["Bucket", "GroupMover", "Move", "Relay", "RelayContents", "RelayPipes", "move_buckets", "refuse_damage"]

_POLL_SECONDS = 0.0005
_TAG = 1

Ends = Sequence[tuple[torch.Tensor, int]]
"""Tensors, each with the rank of the group that it goes to or comes from."""

Move = Callable[[Ends, Ends, Deadline], None]
"""Sends the first, receives the second, all at once. Raises :class:`PipeBroken`."""

Checksum = Callable[[torch.Tensor], int]


class Bucket(NamedTuple):
    """``nbytes`` bytes that go from the first of ``ranks`` to the others, in round ``round``.

    Attributes:
        round: rounds are made in ascending order.
        ranks: of the group; the same sequence on all of them.
        nbytes: at least 1.
        on_device: by way of the group that trains, from device to device; or else over the channel's connections.
    """

    round: int
    ranks: tuple[int, ...]
    nbytes: int
    on_device: bool = False


class RelayContents(Protocol):
    """Where the bytes of buckets are, by their number in the list. Called by one thread."""

    def outgoing(self, number: int) -> torch.Tensor:
        """What this rank sends first: uint8 ``[nbytes]``, contiguous, on the CPU unless the bucket is on a device."""

    def incoming(self, number: int) -> torch.Tensor:
        """Where to receive: as for ``outgoing``."""

    def arrived(self, number: int, received: torch.Tensor) -> None:
        """``received``, which is what ``incoming`` gave, has been filled, and passed on."""


class GroupMover:
    """Moves tensors over a process group, whatever its backend: NCCL from device to device.

    Args:
        group: the one whose ranks buckets count.
        device_type: where its tensors are.
    """

    def __init__(self, group: Any, device_type: str) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device_type = device_type

    def connect(self, deadline: Deadline) -> None:
        """Make the group's connections. All ranks call it before any of them moves something.

        NCCL makes them in the first operation, and waits there for all ranks of the group. Within the relay it would
        wait for ever for a rank that has nothing on its device, or waits itself for bytes of this one's host.
        """
        token = torch.zeros(1, device=self._device_type)
        try:
            dist.all_reduce(token, group=self._group, async_op=True).wait(deadline.as_timeout())
        except RuntimeError as error:
            raise PipeBroken(f"the group that moves between devices: {error}") from None
        _await_stream(token.device, deadline)

    def __call__(self, outgoing: Ends, incoming: Ends, deadline: Deadline) -> None:
        """See :data:`Move`."""
        operations = [dist.P2POp(dist.irecv, t, self._ranks[peer], self._group) for t, peer in incoming]
        operations += [dist.P2POp(dist.isend, t, self._ranks[peer], self._group) for t, peer in outgoing]
        peer = (*incoming, *outgoing)[0][1]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait(deadline.as_timeout())
        except RuntimeError as error:
            raise PipeBroken(f"rank {peer}: {error}") from None
        # For a device "waited" means that its current stream waits.
        _await_stream((*outgoing, *incoming)[0][0].device, deadline)


def _await_stream(device: torch.device, deadline: Deadline) -> None:
    if device.type == "cpu":
        return
    done = torch.Event(device.type)
    done.record()
    while not done.query():
        if deadline.has_passed:
            raise PipeBroken(f"what moves between devices did not come within the timeout ({device})")
        time.sleep(_POLL_SECONDS)


class Relay(NamedTuple):
    """What a rank contributes: the buckets in which it takes part, ascending by round, in an order that is the same on
    all ranks for those that they share; where their bytes are; and what moves bytes between devices. All ranks of the
    group give the latter, or none does."""

    buckets: Sequence[Bucket]
    contents: RelayContents
    checksum: Checksum
    move_on_device: GroupMover | None = None


class RelayPipes:
    """Connections between ranks that pass tensors to each other, made when they are needed and kept for the next time.

    They carry nothing else, so that they can be closed to end a wait without harm to the exchanges.

    Args:
        connect: to a rank, for the n-th time; waits for it, and calls its last argument now and then meanwhile.
    """

    def __init__(self, connect: Callable[[int, int, Callable[[], None]], GlooPipe]) -> None:
        self._connect = connect
        self._generation = 0
        self._pipes: dict[int, Future[GlooPipe]] = {}
        self._lock = threading.Lock()

    def move(self, outgoing: Ends, incoming: Ends, deadline: Deadline) -> None:
        """See :data:`Move`."""
        pipes = {peer: self._pipe(peer) for _, peer in (*outgoing, *incoming)}
        opened = {peer: _result(peer, pipe, deadline) for peer, pipe in pipes.items()}
        sent = [(opened[peer].send(memoryview(tensor.numpy().data), _TAG), peer) for tensor, peer in outgoing]
        for tensor, peer in incoming:
            opened[peer].receive_into(tensor, _TAG, deadline.as_timeout())
        for sending, peer in sent:
            opened[peer].await_sent(sending, deadline.as_timeout())

    def _pipe(self, peer: int) -> Future[GlooPipe]:
        with self._lock:
            if peer not in self._pipes:
                self._pipes[peer] = found = Future[GlooPipe]()
                arguments = (found, peer, self._generation)
                threading.Thread(target=self._open, args=arguments, name="robust_dcp: relay", daemon=True).start()
            return self._pipes[peer]

    def _open(self, future: Future[GlooPipe], peer: int, generation: int) -> None:
        def refuse_to_wait() -> None:
            if future.done():
                raise RuntimeError("interrupted while connecting")

        try:
            pipe = self._connect(peer, generation, refuse_to_wait)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
        else:
            try:
                future.set_result(pipe)
            except InvalidStateError:  # it was interrupted
                pipe.close()

    def interrupt(self) -> None:
        """End all waits, here and on the other sides; what was under way is lost."""
        with self._lock:
            pipes = list(self._pipes.items())
        for peer, pipe in pipes:
            with contextlib.suppress(InvalidStateError):
                pipe.set_exception(PipeBroken(f"rank {peer} had not come to connect"))
            if pipe.exception() is None:
                pipe.result().close()

    def reset(self) -> None:
        """After a relay that failed on all ranks: each closes what it has, and the next one connects anew."""
        self.interrupt()
        with self._lock:
            self._pipes = {}
            self._generation += 1


def _result(peer: int, pipe: Future[GlooPipe], deadline: Deadline) -> GlooPipe:
    try:
        return pipe.result(deadline.seconds_left)
    except FutureTimeout:
        raise PipeBroken(f"rank {peer} did not come to connect") from None


def move_buckets(
    rank: int, relay: Relay, pipes: RelayPipes, timeout_seconds: float, cost: PhaseStats, progress: Callable[[], None]
) -> list[int]:
    """Move all buckets of this rank.

    Args:
        rank: of this process in the group.
        relay: what this rank contributes.
        pipes: to the other ranks.
        timeout_seconds: for each step; a step that takes longer has lost a rank.
        cost: to be added to.
        progress: called after each round.

    Returns:
        The ranks whose bytes arrived here with another checksum than they were sent with: 0 of them, usually. Bytes
        that stay on devices are not checked, as nothing is that training moves there.

    Raises:
        PipeBroken: a rank is gone, or too slow.
    """
    checksums: dict[tuple[int, ...], list[int]] = {}
    if relay.move_on_device is not None:
        relay.move_on_device.connect(Deadline(timeout_seconds))
    movers: dict[bool, Move] = {False: pipes.move, True: relay.move_on_device or pipes.move}
    numbered = list(enumerate(relay.buckets))
    for _, in_round in groupby(numbered, key=lambda pair: pair[1].round):
        _move_round(rank, relay, list(in_round), movers, timeout_seconds, cost, checksums)
        progress()
    sent = {ranks: torch.tensor(found, dtype=torch.int64) for ranks, found in checksums.items()}
    received = {ranks: found.clone() for ranks, found in sent.items()}
    tables = [(Bucket(0, ranks, found.nbytes), found.view(torch.uint8)) for ranks, found in received.items()]
    _pass_down(rank, tables, movers, timeout_seconds, cost)
    return sorted({ranks[0] for ranks, found in sent.items() if not torch.equal(found, received[ranks])})


def refuse_damage(senders: Sequence[int], rank: int, phase: str) -> None:
    """Raise if what some ``senders`` sent was not what arrived at ``rank``.

    Raises:
        ExchangeError: names them.
    """
    if senders:
        raise ExchangeError(
            f"what rank {senders[0]} sent in {phase!r} arrived at rank {rank} with another checksum: load again, and "
            "suspect the network between them if that repeats",
            phase=phase,
            ranks=senders,
        )


def _move_round(
    rank: int,
    relay: Relay,
    buckets: Sequence[tuple[int, Bucket]],
    movers: dict[bool, Move],
    timeout_seconds: float,
    cost: PhaseStats,
    checksums: dict[tuple[int, ...], list[int]],
) -> None:
    tensors = [
        relay.contents.outgoing(number) if bucket.ranks[0] == rank else relay.contents.incoming(number)
        for number, bucket in buckets
    ]
    pairs = [(bucket, tensor) for (_, bucket), tensor in zip(buckets, tensors, strict=True)]
    _pass_down(rank, pairs, movers, timeout_seconds, cost)
    for (number, bucket), tensor in zip(buckets, tensors, strict=True):
        if not bucket.on_device:
            checksums.setdefault(bucket.ranks, []).append(relay.checksum(tensor))
        if bucket.ranks[0] != rank:
            cost.payload_nbytes_received += bucket.nbytes
            cost.payloads_received += 1
            relay.contents.arrived(number, tensor)


def _pass_down(
    rank: int,
    buckets: Sequence[tuple[Bucket, torch.Tensor]],
    movers: dict[bool, Move],
    timeout_seconds: float,
    cost: PhaseStats,
) -> None:
    """Each bucket from its first rank to all others, step by step."""
    most = max((len(bucket.ranks) for bucket, _ in buckets), default=1)
    for step in range((most - 1).bit_length()):
        for on_device, move in movers.items():
            outgoing: list[tuple[torch.Tensor, int]] = []
            incoming: list[tuple[torch.Tensor, int]] = []
            for bucket, tensor in buckets:
                if bucket.on_device != on_device:
                    continue
                place = bucket.ranks.index(rank)
                if place < 1 << step and place + (1 << step) < len(bucket.ranks):
                    outgoing.append((tensor, bucket.ranks[place + (1 << step)]))
                elif 1 << step <= place < 2 << step:
                    incoming.append((tensor, bucket.ranks[place - (1 << step)]))
            if outgoing or incoming:
                cost.payload_nbytes_sent += sum(tensor.nbytes for tensor, _ in outgoing)
                move(outgoing, incoming, Deadline(timeout_seconds))
