"""Passes bytes from the rank that read them to all other ranks that need them, in buckets, round after round.

This module owns the way along which a bucket travels, and the order in which ranks send and receive. It never decides
who sends what (``plan.shared_reads`` does), nor what the bytes mean.

Within a round a bucket reaches all its ranks in ``log2(ranks)`` steps. In step ``t`` each of the first ``2**t`` ranks
passes the bucket on to the rank that is ``2**t`` places further. All ranks take rounds and steps in the same order, so
no two ranks wait for each other. A rank holds at most the buckets of one round at a time. Before each bucket goes a
frame with the number of the operation and the CRC-32 of the bytes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from isal import isal_zlib

from robust_dcp.comm import patience
from robust_dcp.comm.connections import Broken, Connections, Moving
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, FrameError, Kind
from robust_dcp.comm.operation import Operation
from robust_dcp.errors import ExchangeError, ExchangeTimeout

_POLL_SECONDS = 0.0005
_FRAMES_TAG, _BUCKETS_TAG = 1, 2


class Bucket(NamedTuple):
    """``nbytes`` bytes that go from the first of ``ranks`` to the others, in round ``round``.

    Attributes:
        round: the number of the round. Rounds run in ascending order.
        ranks: ranks of the group, in the same order on all of them.
        nbytes: at least 1.
        on_device: if true, the bytes go from device to device over the process group that trains. Otherwise they go
            over connections of the channel. Bytes that stay on devices are not checked, as training does not check
            what it moves there either.
    """

    round: int
    ranks: tuple[int, ...]
    nbytes: int
    on_device: bool = False


class _Move(NamedTuple):
    """A bucket on its way to or from ``peer``."""

    bucket: Bucket
    tensor: torch.Tensor
    peer: int


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

    def connect(self, timeout_seconds: float) -> None:
        """Make the group's connections. All ranks call this before any of them moves something.

        NCCL connects in the first operation and waits there for all ranks of the group. In the middle of a relay that
        wait could last for ever: another rank may have nothing on its device, or may itself wait for bytes from the
        host of this one.
        """
        token = torch.zeros(1, device=self._device_type)
        self._finish([dist.all_reduce(token, group=self._group, async_op=True)], token.device, timeout_seconds)

    def move(self, outgoing: Sequence[_Move], incoming: Sequence[_Move], timeout_seconds: float) -> None:
        """Move everything at once."""
        operations = [dist.P2POp(dist.irecv, each.tensor, self._ranks[each.peer], self._group) for each in incoming]
        operations += [dist.P2POp(dist.isend, each.tensor, self._ranks[each.peer], self._group) for each in outgoing]
        first = (*incoming, *outgoing)[0]
        try:
            self._finish(dist.batch_isend_irecv(operations), first.tensor.device, timeout_seconds)
        except Broken as error:
            raise Broken(f"rank {first.peer}: {error}") from None

    def _finish(self, works: Sequence[Any], device: torch.device, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        try:
            for work in works:
                work.wait(datetime.timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError as error:
            raise Broken(f"the group that moves between devices: {error}") from None
        if device.type != "cpu":  # there ``wait`` only makes the current stream wait, so we wait for the stream
            done = torch.Event(device.type)
            done.record()
            while not done.query():
                if time.monotonic() > until:
                    raise Broken(f"what moves between devices did not come within the timeout ({device})")
                time.sleep(_POLL_SECONDS)


class Relay(NamedTuple):
    """What one rank contributes to a relay.

    Attributes:
        buckets: the buckets in which this rank takes part, in ascending rounds. Ranks that share several buckets have
            them in the same order. The functions get the index of a bucket in this list, and one thread calls them.
        outgoing: returns what this rank sends as the first: uint8 ``[nbytes]``, contiguous, on the CPU or on the
            bucket's device.
        incoming: returns the tensor to receive into, of the same kind.
        arrived: is called when the tensor that ``incoming`` returned is filled, and has been passed on.
        move_on_device: moves bytes between devices. Either all ranks of the group give it, or none does.
    """

    buckets: Sequence[Bucket]
    outgoing: Callable[[int], torch.Tensor]
    incoming: Callable[[int], torch.Tensor]
    arrived: Callable[[int, torch.Tensor], None]
    move_on_device: GroupMover | None = None


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
            if self._relay.move_on_device is not None:
                self._relay.move_on_device.connect(self._operation.timeout_seconds)
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
        for step in range((most - 1).bit_length()):
            outgoing: dict[bool, list[_Move]] = {False: [], True: []}
            incoming: dict[bool, list[_Move]] = {False: [], True: []}
            for _, bucket, tensor in moving:
                place = bucket.ranks.index(rank)
                if place < 1 << step and place + (1 << step) < len(bucket.ranks):
                    outgoing[bucket.on_device].append(_Move(bucket, tensor, bucket.ranks[place + (1 << step)]))
                    self._operation.cost.payload_nbytes_sent += bucket.nbytes
                elif 1 << step <= place < 2 << step:
                    incoming[bucket.on_device].append(_Move(bucket, tensor, bucket.ranks[place - (1 << step)]))
            self._move_on_host(outgoing[False], incoming[False])
            if self._relay.move_on_device is not None and (outgoing[True] or incoming[True]):
                self._relay.move_on_device.move(outgoing[True], incoming[True], self._operation.timeout_seconds)
        for number, bucket, tensor in moving:
            if bucket.ranks[0] != rank:
                relay.arrived(number, tensor)

    def _move_on_host(self, outgoing: Sequence[_Move], incoming: Sequence[_Move]) -> None:
        """Move everything at once. No piece of it may take longer than the timeout."""
        if not outgoing and not incoming:
            return
        operation, seconds = self._operation, self._operation.timeout_seconds
        connections = self._connected(sorted({each.peer for each in (*outgoing, *incoming)}))
        frames = [torch.empty(FRAME_NBYTES, dtype=torch.uint8) for _ in incoming]
        expected = [
            (
                connections.start_receiving(each.peer, _FRAMES_TAG, frame),
                connections.start_receiving(each.peer, _BUCKETS_TAG, each.tensor),
            )
            for each, frame in zip(incoming, frames, strict=True)
        ]
        sent: list[Moving] = []
        for bucket, tensor, peer in outgoing:
            frame = Frame(Kind.RELAY, payload_nbytes=bucket.nbytes, payload_crc32=_crc32(tensor))
            sent.append(connections.send(peer, _FRAMES_TAG, operation.stamped(frame).encode()))
            sent.append(connections.send(peer, _BUCKETS_TAG, tensor))
        for each, frame_bytes, works in zip(incoming, frames, expected, strict=True):
            for moving in works:
                connections.finish(moving, seconds, operation.note_progress)
            self._check(each, bytes(frame_bytes.numpy()))
        for moving in sent:
            connections.finish(moving, seconds, operation.note_progress)

    def _check(self, arrived: _Move, frame_bytes: bytes) -> None:
        phase, sender = self._operation.phase, arrived.peer
        try:
            frame = Frame.decode(frame_bytes, self._operation.link.secret)
            announced = frame._replace(payload_nbytes=arrived.bucket.nbytes, payload_crc32=_crc32(arrived.tensor))
            if frame == self._operation.stamped(announced):
                return
            what = "with another checksum"
        except FrameError as error:
            what = f"with a damaged frame: {error}"
        raise ExchangeError(
            f"what rank {sender} sent in {phase!r} arrived at rank {self._rank} {what}: load again, and suspect the "
            "network between them if that repeats",
            phase=phase,
            ranks=[sender],
        )

    def _connected(self, peers: Sequence[int]) -> Connections:
        operation = self._operation
        if self._connections is None:
            self._connections = operation.link.connections_for(f"relay {operation.key} {operation.n_exchanges}")
        until = time.monotonic() + operation.timeout_seconds
        for peer in peers:

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


def _crc32(tensor: torch.Tensor) -> int:
    return int(isal_zlib.crc32(tensor.numpy()))
