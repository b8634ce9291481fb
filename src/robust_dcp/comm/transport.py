"""How bytes get from rank to rank: a protocol of six methods, on gloo and for a single process.

It moves bytes whose lengths both sides know already; it never looks into them, retries, or names a culprit beyond
the peer that it waited for. Only the exchange calls it.

Everything is made of gloo's send and receive: their ``wait`` takes a timeout in every version of torch, a failure
names its peer, and an all-gather needs ``log2(size)`` steps where gloo's own ring needs ``size - 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.frames import FRAME_NBYTES

__all__ = ["CHUNK_NBYTES", "Ends", "GlooTransport", "Incoming", "LocalTransport", "Transport", "TransportFailure"]

CHUNK_NBYTES = 64 << 20
"""Payloads travel in pieces of at most this: it bounds what a sender needs above its payload."""

Payload = bytes | bytearray | memoryview

Ends = Sequence[tuple[torch.Tensor, int]]
"""Tensors, each with the rank of the group that it goes to or comes from."""


class TransportFailure(Exception):
    """The connection to ``peer`` (a group rank; ``None``: to some rank) broke, or nothing came from it in time.

    Internal to :mod:`robust_dcp.comm`. After it the transport is useless on every rank: gloo closes all connections
    of a rank whose wait ran out.
    """

    def __init__(self, peer: int | None, detail: str) -> None:
        super().__init__(detail)
        self.peer = peer
        self.detail = detail


class Incoming(Protocol):
    """A payload on its way to this rank."""

    def finish(self, deadline: Deadline) -> bytearray:
        """All its bytes; to be called once. Raises :class:`TransportFailure`."""


class Transport(Protocol):
    """What an exchange needs. Every rank makes the same calls with the same ``tag`` in the same order.

    A tag is used for one call only, so that messages of two calls never meet: gloo aborts the process if a message is
    larger than the buffer that waits for it. All methods but ``close`` raise :class:`TransportFailure`.
    """

    @property
    def messages_sent(self) -> int:
        """By this rank, of any size."""

    @property
    def messages_received(self) -> int:
        """By this rank, of any size."""

    def all_gather_frames(self, frame: bytes, tag: int, deadline: Deadline) -> list[bytes]:
        """Every rank's 64 bytes, in rank order."""

    def send(self, payload: Payload, receiver: int, tag: int, deadline: Deadline) -> None:
        """Send ``payload`` to ``receiver``, which calls :meth:`start_receiving` with its length."""

    def start_receiving(self, nbytes: int, sender: int, tag: int) -> Incoming:
        """Make ready for the ``nbytes`` bytes that ``sender`` sends; several may be under way at once."""

    def broadcast(self, payload: Payload | None, nbytes: int, sender: int, tag: int, deadline: Deadline) -> Payload:
        """The ``nbytes`` bytes of ``sender``, on every rank; ``payload`` is theirs there and ``None`` elsewhere."""

    def move_tensors(self, outgoing: Ends, incoming: Ends, tag: int, deadline: Deadline) -> None:
        """Send some contiguous CPU tensors and receive into others, all at once. Those for one rank arrive in order."""

    def close(self) -> None:
        """Close all connections, so that whoever waits for this rank stops waiting."""


class LocalTransport:
    """The group of one."""

    messages_sent = 0
    messages_received = 0

    def all_gather_frames(self, frame: bytes, tag: int, deadline: Deadline) -> list[bytes]:
        return [frame]

    def send(self, payload: Payload, receiver: int, tag: int, deadline: Deadline) -> None:
        raise TransportFailure(receiver, "there is no other rank")

    def start_receiving(self, nbytes: int, sender: int, tag: int) -> Incoming:
        raise TransportFailure(sender, "there is no other rank")

    def broadcast(self, payload: Payload | None, nbytes: int, sender: int, tag: int, deadline: Deadline) -> Payload:
        if payload is None:
            raise TransportFailure(sender, "there is no other rank")
        return payload

    def move_tensors(self, outgoing: Ends, incoming: Ends, tag: int, deadline: Deadline) -> None:
        for _, peer in (*outgoing, *incoming):
            raise TransportFailure(peer, "there is no other rank")

    def close(self) -> None:
        pass


class GlooTransport:
    """A ``ProcessGroupGloo`` that nobody else uses.

    Args:
        group: the backend; this object is its only owner, and closes its connections by letting go of it.
        rank: of this process within ``group``.
        size: how many ranks ``group`` has.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group: Any = group
        self._rank = rank
        self._size = size
        self.messages_sent = 0
        self.messages_received = 0

    def all_gather_frames(self, frame: bytes, tag: int, deadline: Deadline) -> list[bytes]:
        # Bruck's algorithm: with the frames of ranks r .. r + have - 1 in hand, rank r gets those of the next `have`
        # ranks in one message, and hands its own to the rank `have` before it.
        frames = torch.empty(self._size * FRAME_NBYTES, dtype=torch.uint8)
        frames[:FRAME_NBYTES] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        have = 1
        while have < self._size:
            count = min(have, self._size - have)
            receiver = (self._rank - have) % self._size
            sender = (self._rank + have) % self._size
            sending = self._post_send(frames[: count * FRAME_NBYTES], receiver, tag)
            receiving = self._post_receive(frames[have * FRAME_NBYTES : (have + count) * FRAME_NBYTES], sender, tag)
            _wait(receiving, sender, deadline)
            _wait(sending, receiver, deadline)
            have += count
        gathered = frames.numpy().tobytes()
        from_own = [gathered[at : at + FRAME_NBYTES] for at in range(0, len(gathered), FRAME_NBYTES)]
        return [from_own[(rank - self._rank) % self._size] for rank in range(self._size)]

    def send(self, payload: Payload, receiver: int, tag: int, deadline: Deadline) -> None:
        for start, nbytes in _chunks(len(payload)):
            _wait(self._post_send(_copy(payload, start, nbytes), receiver, tag), receiver, deadline)

    def start_receiving(self, nbytes: int, sender: int, tag: int) -> Incoming:
        return _GlooIncoming(nbytes, sender, partial(self._post_receive, sender=sender, tag=tag))

    def broadcast(self, payload: Payload | None, nbytes: int, sender: int, tag: int, deadline: Deadline) -> Payload:
        parent, children = _tree(self._rank, sender, self._size)
        received = bytearray(0 if parent is None else nbytes)
        for start, chunk_nbytes in _chunks(nbytes):
            if parent is None:
                chunk = _copy(payload or b"", start, chunk_nbytes)
            else:
                chunk = torch.frombuffer(received, dtype=torch.uint8, count=chunk_nbytes, offset=start)
                _wait(self._post_receive(chunk, parent, tag), parent, deadline)
            sending = [(self._post_send(chunk, child, tag), child) for child in children]
            for work, child in sending:
                _wait(work, child, deadline)
        return received if payload is None else payload

    def move_tensors(self, outgoing: Ends, incoming: Ends, tag: int, deadline: Deadline) -> None:
        under_way = [(self._post_receive(tensor, peer, tag), peer) for tensor, peer in incoming]
        under_way += [(self._post_send(tensor, peer, tag), peer) for tensor, peer in outgoing]
        for work, peer in under_way:
            _wait(work, peer, deadline)

    def close(self) -> None:
        self._group = None

    def _post_send(self, tensor: torch.Tensor, receiver: int, tag: int) -> Any:
        self.messages_sent += 1
        return _call(receiver, self._group.send, [tensor], receiver, tag)

    def _post_receive(self, tensor: torch.Tensor, sender: int, tag: int) -> Any:
        self.messages_received += 1
        return _call(sender, self._group.recv, [tensor], sender, tag)


class _GlooIncoming:
    """A payload whose first chunk gloo may write at once, and each other when the one before it is there."""

    def __init__(self, nbytes: int, sender: int, post: Callable[[torch.Tensor], Any]) -> None:
        self._payload = bytearray(nbytes)
        self._sender = sender
        self._post = post
        self._chunks = _chunks(nbytes)
        self._under_way = self._post_next() if self._chunks else None

    def finish(self, deadline: Deadline) -> bytearray:
        while self._under_way is not None:
            _wait(self._under_way, self._sender, deadline)
            self._under_way = self._post_next() if self._chunks else None
        return self._payload

    def _post_next(self) -> Any:
        start, nbytes = self._chunks.pop(0)
        return self._post(torch.frombuffer(self._payload, dtype=torch.uint8, count=nbytes, offset=start))


def _wait(work: Any, peer: int, deadline: Deadline) -> None:
    _call(peer, work.wait, deadline.as_timeout())


def _call(peer: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; gloo's exceptions become ours.

    gloo keeps a connection open as long as anything refers to what was under way on it. So the exception is raised out
    of the handler, without gloo's as its context, and nothing here is a closure: both would keep their variables when
    the exchange clears the frames of the traceback.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        detail = str(error)
    raise TransportFailure(peer, detail)


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(CHUNK_NBYTES, nbytes - start)) for start in range(0, nbytes, CHUNK_NBYTES)]


def _copy(payload: Payload, start: int, nbytes: int) -> torch.Tensor:
    """A chunk of ``payload`` that torch may see: it takes no read-only memory without a warning."""
    return torch.frombuffer(bytearray(memoryview(payload)[start : start + nbytes]), dtype=torch.uint8)


def _tree(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of ``rank`` in the binomial tree under ``root``, the child with most descendants first."""
    place = (rank - root) % size
    reach = 1
    while reach < size and not place & reach:
        reach <<= 1
    parent = None if place == 0 else (place - reach + root) % size
    children = []
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            children.append((place + reach + root) % size)
    return parent, children
