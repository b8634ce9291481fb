"""How bytes get from one rank to another: a protocol of four methods, and what makes it of gloo.

It moves bytes whose lengths both sides know already. It never looks into them, retries, or waits with a limit: who
uses it does so from a thread of its own, and closes it to end a wait.

Each pair of ranks that talk has a gloo group of its own, of two. So the cost of connecting does not depend on how many
ranks there are, what happens to one connection cannot harm another, and every version of torch can do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import re
from collections import deque
from typing import Any, Protocol, cast

import numpy as np
import torch

from robust_dcp.comm.frames import FRAME_NBYTES

__all__ = ["CHUNK_NBYTES", "GlooPipe", "Payload", "Pipe", "PipeBroken", "short"]

CHUNK_NBYTES = 64 << 20
"""Payloads travel in pieces of at most this."""

Payload = bytes | bytearray | memoryview

_FRAMES_AHEAD = 4
"""Frames that gloo may write into our memory before we look: what a rank said last is not lost when it ends."""

_FRAME_TAG = 0
_NO_TAG = 0x7FFFFFFF
_FOR_EVER = datetime.timedelta(days=3650)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class PipeBroken(Exception):
    """The other rank is gone, or the pipe was closed. Internal to :mod:`robust_dcp.comm`."""


class Pipe(Protocol):
    """A connection to one other rank. Receiving is for one thread, all else for any."""

    def send(self, data: Payload, tag: int) -> object:
        """Start to send; what is returned has to be kept until the other side has received it.

        Raises:
            PipeBroken: see there.
        """

    def next_frame(self) -> bytes:
        """Wait for the next message of tag 0, of ``FRAME_NBYTES`` bytes.

        Raises:
            PipeBroken: see there.
        """

    def receive(self, nbytes: int, tag: int) -> bytearray:
        """Wait for the ``nbytes`` bytes that the other side sends under ``tag``.

        Raises:
            PipeBroken: see there.
        """

    def close(self) -> None:
        """End all waits on both sides."""


class GlooPipe:
    """A ``ProcessGroupGloo`` of two that nobody else uses.

    Args:
        group: the backend; this object is its only owner.
        peer: the other's rank in it, 0 or 1.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group: Any = group
        self._peer = peer
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()
        for _ in range(_FRAMES_AHEAD):
            self._post_frame()

    def send(self, data: Payload, tag: int) -> object:
        view = _bytes_of(data)
        works = [
            _call(self._group.send, [torch.from_numpy(view[start : start + CHUNK_NBYTES])], self._peer, tag)
            for start in range(0, len(view), CHUNK_NBYTES)
        ]
        return data, view, works

    def next_frame(self) -> bytes:
        frame, work = self._posted.popleft()
        _call(work.wait, _FOR_EVER)
        self._post_frame()
        return frame.numpy().tobytes()

    def receive(self, nbytes: int, tag: int) -> bytearray:
        payload = bytearray(nbytes)
        for start in range(0, nbytes, CHUNK_NBYTES):
            count = min(CHUNK_NBYTES, nbytes - start)
            self.receive_into(torch.frombuffer(payload, dtype=torch.uint8, count=count, offset=start), tag, _FOR_EVER)
        return payload

    def receive_into(self, tensor: torch.Tensor, tag: int, timeout: datetime.timedelta) -> None:
        """Fill a contiguous CPU tensor with what the other side sends under ``tag``.

        Raises:
            PipeBroken: it did not come within ``timeout``, and the pipe is closed now; or see there.
        """
        _call(_call(self._group.recv, [tensor], self._peer, tag).wait, timeout)

    def await_sent(self, sending: object, timeout: datetime.timedelta) -> None:
        """Wait until what :meth:`send` returned has gone out.

        Raises:
            PipeBroken: it did not within ``timeout``, and the pipe is closed now; or see there.
        """
        *_, works = cast("tuple[Any, Any, list[Any]]", sending)
        for work in works:
            _call(work.wait, timeout)

    def close(self) -> None:
        # gloo closes a group's connections when a wait on it runs out, in all versions, and wakes who waits on them.
        with contextlib.suppress(PipeBroken):
            self.receive_into(torch.empty(1, dtype=torch.uint8), _NO_TAG, _AT_ONCE)

    def _post_frame(self) -> None:
        frame = torch.empty(FRAME_NBYTES, dtype=torch.uint8)
        self._posted.append((frame, _call(self._group.recv, [frame], self._peer, _FRAME_TAG)))


def _call(function: Any, *args: Any) -> Any:
    """``function(*args)``; gloo's exceptions become ours."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise PipeBroken(short(str(error))) from None


def short(text: str) -> str:
    """The part of gloo's message that says something: without the place in its source and the advice."""
    line = text.partition("\n")[0]
    line = re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". This is typically")[0]
    return line[:300]


def _bytes_of(data: Payload) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``data`` as an array, without a copy. torch warns of read-only memory, though sending only reads."""
    if isinstance(data, bytes) and len(data) <= FRAME_NBYTES:
        return np.frombuffer(bytearray(data), dtype=np.uint8)  # a copy is cheaper here
    if isinstance(data, bytes):
        pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, shape=(len(data),))
    return np.frombuffer(data, dtype=np.uint8)
