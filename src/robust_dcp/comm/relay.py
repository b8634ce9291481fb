"""Passes bytes from the rank that read them to all other ranks that need them, in buckets, round after round.

This module owns the tree along which a bucket travels, the order in which ranks send and receive, and the checksums of
what arrives. It never decides who sends what (``plan.shared_reads`` does), nor what the bytes mean. Only
``Channel.relay`` calls it.

Within a round a bucket reaches all its ranks in ``log2(ranks)`` steps. In step ``t`` each of the first ``2**t`` ranks
passes the bucket on to the rank that is ``2**t`` places further. All ranks take rounds and steps in the same order, so
no two ranks wait for each other. A rank holds at most the buckets of one round at a time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from robust_dcp.comm.connections import Broken, Connections
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.errors import ExchangeError, ExchangeTimeout

__all__ = [
    "Bucket",
    "GroupMover",
    "HostMover",
    "Move",
    "Relay",
    "RelayContents",
    "lost_on_the_way",
    "move_buckets",
    "refuse_damage",
]

_POLL_SECONDS = 0.0005
_TAG = 1


class Deadline:
    """The time ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.seconds_left == 0.0

    def as_timeout(self) -> datetime.timedelta:
        """The time left as torch takes it. torch counts milliseconds and reads 0 as "for ever", so this is at least
        1."""
        return datetime.timedelta(milliseconds=max(1, round(self.seconds_left * 1000)))


Ends = Sequence[tuple[torch.Tensor, int]]
"""Tensors, each with the rank of the group that it is sent to or received from."""

Move = Callable[[Ends, Ends, Deadline], None]
"""Sends the tensors of its first argument and receives those of its second, all at once. Raises :class:`Broken`."""

Checksum = Callable[[torch.Tensor], int]


class Bucket(NamedTuple):
    """``nbytes`` bytes that go from the first of ``ranks`` to the others, in round ``round``.

    Attributes:
        round: the number of the round. Rounds run in ascending order.
        ranks: ranks of the group, in the same order on all of them.
        nbytes: at least 1.
        on_device: if true, the bytes go from device to device over the process group that trains. Otherwise they go
            over the channel's connections.
    """

    round: int
    ranks: tuple[int, ...]
    nbytes: int
    on_device: bool = False


class RelayContents(Protocol):
    """Where the bytes of each bucket are. ``number`` is the bucket's index in the list. One thread calls this."""

    def outgoing(self, number: int) -> torch.Tensor:
        """What this rank sends as the first: uint8 ``[nbytes]``, contiguous, on the CPU or on the bucket's device."""

    def incoming(self, number: int) -> torch.Tensor:
        """The tensor to receive into, of the same kind as in ``outgoing``."""

    def arrived(self, number: int, received: torch.Tensor) -> None:
        """The tensor that ``incoming`` returned is now filled, and has been passed on."""


class GroupMover:
    """Moves tensors over a process group of any backend, for example NCCL from device to device.

    Args:
        group: the process group. The ranks of buckets are ranks of this group.
        device_type: where its tensors are.
    """

    def __init__(self, group: Any, device_type: str) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device_type = device_type

    def connect(self, deadline: Deadline) -> None:
        """Make the group's connections. All ranks call this before any of them moves something.

        NCCL connects in the first operation and waits there for all ranks of the group. In the middle of a relay that
        wait could last for ever: another rank may have nothing on its device, or may itself wait for bytes from the
        host of this one.
        """
        token = torch.zeros(1, device=self._device_type)
        try:
            dist.all_reduce(token, group=self._group, async_op=True).wait(deadline.as_timeout())
        except RuntimeError as error:
            raise Broken(f"the group that moves between devices: {error}") from None
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
            raise Broken(f"rank {peer}: {error}") from None
        # On a device, ``wait`` only makes the current stream wait. So also wait for the stream.
        _await_stream((*outgoing, *incoming)[0][0].device, deadline)


def _await_stream(device: torch.device, deadline: Deadline) -> None:
    if device.type == "cpu":
        return
    done = torch.Event(device.type)
    done.record()
    while not done.query():
        if deadline.has_passed:
            raise Broken(f"what moves between devices did not come within the timeout ({device})")
        time.sleep(_POLL_SECONDS)


class Relay(NamedTuple):
    """What one rank contributes to a relay.

    Attributes:
        buckets: the buckets in which this rank takes part, in ascending rounds. Ranks that share several buckets have
            them in the same order.
        contents: where the bytes of the buckets are.
        checksum: computes the checksum of a tensor.
        move_on_device: moves bytes between devices. Either all ranks of the group give it, or none does.
    """

    buckets: Sequence[Bucket]
    contents: RelayContents
    checksum: Checksum
    move_on_device: GroupMover | None = None


class HostMover:
    """Moves tensors on the CPU over connections that nothing else uses. They can be dropped to end a wait.

    Args:
        connect: makes the connections.
        stop_if_announced: raises if another rank has announced a failure.
    """

    def __init__(self, connect: Callable[[], Connections], stop_if_announced: Callable[[], None]) -> None:
        self._connect = connect
        self._stop_if_announced = stop_if_announced
        self._connections: Connections | None = None
        self._is_dropped = False

    def __call__(self, outgoing: Ends, incoming: Ends, deadline: Deadline) -> None:
        """See :data:`Move`."""
        if self._connections is None:
            self._connections = self._connect()
        connections = self._connections
        for peer in sorted({peer for _, peer in (*outgoing, *incoming)}):
            connections.connect(peer, lambda peer=peer: self._look(peer, deadline))  # type: ignore[misc]
        received = [connections.receive_tensor(peer, _TAG, tensor) for tensor, peer in incoming]
        sent = [connections.send_tensor(peer, _TAG, tensor) for tensor, peer in outgoing]
        for work in (*received, *sent):
            connections.await_work(work, deadline.seconds_left)

    def _look(self, peer: int, deadline: Deadline) -> None:
        self._stop_if_announced()
        if self._is_dropped or deadline.has_passed:
            raise Broken(f"rank {peer} did not come to connect")

    def drop(self) -> None:
        """End all waits, on this side and on the others."""
        self._is_dropped = True
        if self._connections is not None:
            self._connections.drop()


def move_buckets(
    rank: int, relay: Relay, on_host: Move, timeout_seconds: float, cost: PhaseStats, progress: Callable[[], None]
) -> list[int]:
    """Move all buckets of this rank.

    Args:
        rank: this process's rank in the group.
        relay: what this rank contributes.
        on_host: moves the bytes of buckets that are not on a device.
        timeout_seconds: how long one step may take. If it takes longer, a rank is taken to be lost.
        cost: the statistics to add to.
        progress: is called after each round.

    Returns:
        The ranks that sent bytes which arrived here with another checksum, usually none. Bytes that stay on devices are
        not checked, as training does not check what it moves there either.

    Raises:
        Broken: a rank is gone or too slow.
    """
    checksums: dict[tuple[int, ...], list[int]] = {}
    if relay.move_on_device is not None:
        relay.move_on_device.connect(Deadline(timeout_seconds))
    movers: dict[bool, Move] = {False: on_host, True: relay.move_on_device or on_host}
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
    """Raise if bytes from any ``senders`` arrived damaged at ``rank``.

    Raises:
        ExchangeError: names the senders.
    """
    if senders:
        raise ExchangeError(
            f"what rank {senders[0]} sent in {phase!r} arrived at rank {rank} with another checksum: load again, and "
            "suspect the network between them if that repeats",
            phase=phase,
            ranks=senders,
        )


def lost_on_the_way(rank: int, phase: str, timeout_seconds: float, error: Broken) -> ExchangeTimeout:
    """The error of a rank whose connection to another one broke while tensors went over it."""
    return ExchangeTimeout(
        f"{phase!r}: rank {rank} lost a rank that it passes tensors to or gets them from ({error})",
        phase=phase,
        timeout_seconds=timeout_seconds,
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
    """Pass each bucket from its first rank to all its other ranks, step by step."""
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
