"""One connection to one other rank. It delivers frames and payloads in order, each exactly once and undamaged.

It owns the thread that connects and then reads, the serial numbers, and the one repetition of a message that arrives
damaged. It never knows what a frame means: it passes whole messages to ``deliver``, and calls ``lost`` when the other
rank is gone. Sending never waits: a message is kept until the other side has acknowledged it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from robust_dcp.comm import patience
from robust_dcp.comm.frames import Frame, FrameError, Kind
from robust_dcp.comm.pipe import Payload, Pipe, PipeBroken
from robust_dcp.comm.process_group import Address

__all__ = ["Connection", "Damaged", "Receiver"]

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_SECONDS = 1.0
_FRAME_TAG = 0
_MAX_TAG = 0x7FFFFFF0


class Receiver(Protocol):
    """Who uses a connection. The connection's thread calls both methods, so they must not wait for anything."""

    def deliver(self, peer: int, frame: Frame, payload: Payload) -> None:
        """Take a whole message that came from ``peer``."""

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        """Nothing more will come. ``damaged``: the other rank is alive, but what it sends arrives damaged."""


class Damaged(Exception):
    """The same message arrived damaged twice."""


@dataclass(eq=False)
class _Sent:
    frame: Frame
    payload: Payload
    kept: list[object] = field(default_factory=list)


class Connection:
    """A connection to the rank ``peer``, made when the first message is sent to it or expected from it.

    Args:
        peer: a rank of the group.
        open_pipe: connects, and waits for the other rank as long as that takes. Once the other rank has said where it
            listens, it calls its argument with that address. It runs in the connection's thread.
        receiver: gets what arrives.
        previous: the connection before this one. It is closed once the other side is connected here.

    Attributes:
        previous_loss: how the connection before this one ended, if its other side just went away.
        is_lost: nothing more will come, and the receiver knows.
        is_left: the other rank reads nothing more from this connection, because what it got was damaged.
        is_excused: the other rank has a reason to close this connection, because an operation ended out of step.
    """

    def __init__(
        self,
        peer: int,
        open_pipe: Callable[[Callable[[Address], None]], Pipe],
        receiver: Receiver,
        *,
        previous: Connection | None = None,
    ) -> None:
        self.peer = peer
        self.process = ""  # host and process id of the other rank, once it has sent them
        self.previous_loss = None if previous is None else previous.loss
        self.loss: str | None = None
        self.is_lost = False
        self.is_excused = False
        self.is_left = False
        self._has_said_goodbye = False
        self.repeats = 0
        self._open_pipe = open_pipe
        self._receiver = receiver
        self._previous = previous
        self._lock = threading.Lock()
        self._pipe: Pipe | None = None
        self._address: Address | None = None
        self._next_probe_seconds = 0.0
        self._probe_pause_seconds = patience.PROBE_SECONDS
        self._is_closed = self._has_ended = False
        self._is_receiving = False  # whether it is receiving a payload, which may take long
        self._sent: deque[_Sent] = deque()  # messages that are not acknowledged yet
        self._repeated: list[object] = []
        self._n_sent = 0
        self._n_received = 0
        self._tag = 0
        self._asked_for = self._asked_for_lost = -1
        self.send(Frame(Kind.HELLO, body=f"host {socket.gethostname()[:64]}, pid {os.getpid()}".encode()))
        self._thread = threading.Thread(target=self._run, name=f"robust_dcp: connection to rank {peer}", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the other rank is connected and nothing is wrong."""
        return self._pipe is not None and not self.is_over and not self._is_closed

    @property
    def is_over(self) -> bool:
        """Whether a new connection has to be made."""
        return self.is_lost or self.is_left

    def send(self, frame: Frame, payload: Payload = b"") -> None:
        """Send a message now, or as soon as there is a connection. Nothing is sent to a rank that is gone."""
        with self._lock:
            if self._is_closed:
                return
            if frame.kind == Kind.FAIL and self._pipe is None:
                self._forget(frame)
            sent = _Sent(frame._replace(serial=self._n_sent), payload)
            self._n_sent += 1
            self._sent.append(sent)
            self._post(sent)

    def _forget(self, end: Frame) -> None:
        """Drop the unsent messages of an operation that ended before the other rank came. It hears only of the end."""
        kept = [
            sent
            for sent in self._sent
            if (sent.frame.operation, sent.frame.occurrence) != (end.operation, end.occurrence)
        ]
        self._sent = deque(_Sent(sent.frame._replace(serial=i), sent.payload) for i, sent in enumerate(kept))
        self._n_sent = len(self._sent)

    @property
    def n_unacknowledged(self) -> int:
        """How many messages the other side has not acknowledged yet."""
        return len(self._sent)

    @property
    def is_telling_an_end(self) -> bool:
        """Whether the other rank is connected and has not yet acknowledged how an operation ended."""
        with self._lock:
            return self.is_open and any(sent.frame.kind == Kind.FAIL for sent in self._sent)

    def pipe(self) -> Pipe | None:
        """The pipe below, for callers that send more than messages; ``None`` before it is open and after it ended."""
        return self._pipe

    def ask_for_lost(self) -> None:
        """Ask again for what may have been lost. Use it after a silence, when no later message can show a gap."""
        if self.is_open and not self._is_receiving and self._asked_for_lost != self._n_received:
            self._asked_for_lost = self._n_received
            self.send(Frame(Kind.AGAIN, exchange=self._n_received))

    def claim_probe(self, now: float) -> bool:
        """Whether to :meth:`probe` now: the other rank has said where it listens, but has not answered for a while.

        After each probe the pause before the next one doubles.
        """
        if self._pipe is not None or self._address is None or self.is_over or now < self._next_probe_seconds:
            return False
        self._probe_pause_seconds *= 2
        self._next_probe_seconds = now + self._probe_pause_seconds
        return True

    def probe(self) -> None:
        """Check whether the other rank still listens. If not, its process has ended. This may take a second."""
        try:
            if self._address is not None:
                socket.create_connection(self._address, timeout=_PROBE_TIMEOUT_SECONDS).close()
        except ConnectionRefusedError:
            if self._pipe is None:
                self._end("nobody listens any more where it said that it does", damaged=False)
        except OSError:
            pass  # any other error proves nothing

    def say_goodbye(self) -> None:
        """Tell the other rank that nothing more will come. It answers, and then this connection is lost."""
        with self._lock:
            has_said, self._has_said_goodbye = self._has_said_goodbye, True
        if not has_said:
            self.send(Frame(Kind.GONE))

    def close(self) -> None:
        """End the connection, on both sides."""
        with self._lock:
            self._is_closed = True
            pipe, self._pipe = self._pipe, None
            self._sent.clear()
            self._repeated.clear()
        if pipe is not None:
            pipe.close()

    def _post(self, sent: _Sent) -> None:
        if self._pipe is None:
            return
        payload = sent.payload
        if len(payload):
            self._tag = self._tag % _MAX_TAG + 1
        frame = sent.frame._replace(
            acknowledged=self._n_received,
            payload_nbytes=len(payload),
            payload_crc32=zlib.crc32(payload),
            payload_tag=self._tag if len(payload) else 0,
        )
        try:
            # Keep what gloo is about to send: otherwise it stops sending altogether. The first copy of a frame has gone
            # out once it is acknowledged. A repeated copy may then still wait until the other side reads it. A payload
            # that nobody has asked for by then is never sent.
            (self._repeated if sent.kept else sent.kept).append(self._pipe.send(frame.encode(), _FRAME_TAG))
            if len(payload):
                sent.kept.append(self._pipe.send(payload, self._tag))
        except PipeBroken:
            pass  # the reading thread finds the same error and reports it

    def _run(self) -> None:
        detail, damaged = "", False
        try:
            pipe = self._open_pipe(self._note_met)
            with self._lock:
                if self._has_ended:
                    pipe.close()  # the other rank answered too late
                elif not self._is_closed:
                    self._pipe = pipe
                    for sent in self._sent:
                        self._post(sent)
            while not self._is_closed and not self._has_ended:
                self._read_message(pipe)
        except PipeBroken as error:
            detail = str(error)
        except Damaged as error:
            detail, damaged = str(error), True
            self.send(Frame(Kind.LEAVE))
        except Exception as error:
            logger.exception("the connection to rank %d ends", self.peer)
            detail = f"{type(error).__name__}: {error}"
        self._end(detail, damaged=damaged)

    def _note_met(self, address: Address) -> None:
        self._next_probe_seconds = time.monotonic() + self._probe_pause_seconds
        self._address = address

    def _end(self, detail: str, *, damaged: bool) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        if not self._is_closed and not self.is_left:
            self.loss = None if damaged or self.is_excused else detail
            self._receiver.lost(self.peer, detail, damaged=damaged)
        self.is_lost = True

    def _read_message(self, pipe: Pipe) -> None:
        try:
            frame = Frame.decode(pipe.next_frame())
        except FrameError as error:
            self._ask_again(f"a frame arrived damaged: {error}")
            return
        if frame.serial < self._n_received:
            return  # a repeated frame that is here already
        if frame.kind == Kind.AGAIN:
            self._send_again(frame.exchange)  # even out of order, because the other side waits for this first
        if frame.serial > self._n_received:
            self._ask_again(f"frame {frame.serial} arrived instead of frame {self._n_received}", patient=True)
            return
        payload: Payload = b""
        if frame.payload_nbytes:
            self._is_receiving = True
            payload = pipe.receive(frame.payload_nbytes, frame.payload_tag)
            self._is_receiving = False
            found = zlib.crc32(payload)
            if found != frame.payload_crc32:
                self._ask_again(
                    f"a payload of {frame.payload_nbytes} bytes arrived damaged: its CRC-32 is {found:#010x}, "
                    f"announced was {frame.payload_crc32:#010x}"
                )
                return
        with self._lock:
            self._n_received += 1
            while self._sent and self._sent[0].frame.serial < frame.acknowledged:
                self._sent.popleft()
        if frame.kind == Kind.HELLO:
            self.process = frame.body.rstrip(b"\0").decode(errors="replace")
            previous, self._previous = self._previous, None
            if previous is not None:
                previous.close()
        elif frame.kind == Kind.LEAVE:
            self.is_left = True
        elif frame.kind == Kind.GONE:
            self.say_goodbye()
            raise PipeBroken("it has left the group, or its process has ended")
        elif frame.kind != Kind.AGAIN:
            self._receiver.deliver(self.peer, frame, payload)

    def _send_again(self, serial: int) -> None:
        with self._lock:
            self.repeats += 1
            for sent in self._sent:
                if sent.frame.serial >= serial:
                    self._post(sent)

    def _ask_again(self, what: str, *, patient: bool = False) -> None:
        """Ask once for everything from the next serial number on.

        ``patient``: do not raise if this was asked before. The frame that came may have been sent before the request.
        """
        if self._asked_for == self._n_received:
            if patient:
                return
            raise Damaged(f"twice: {what}")
        self._asked_for = self._n_received
        logger.info("asking rank %d again: %s", self.peer, what)
        self.send(Frame(Kind.AGAIN, exchange=self._n_received))
