"""How bytes get from one rank to another: a protocol of four methods, and its implementation over gloo.

Both sides know how many bytes they move. A pipe never looks into them, never retries, and waits without a limit. So its
user calls it from a thread of its own, and closes the pipe to end a wait.

Each pair of ranks that talk has a gloo group of two. So the cost to connect does not depend on the number of ranks, a
broken connection cannot harm another one, and every version of torch supports it.
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
"""Payloads are sent in pieces of at most this size."""

Payload = bytes | bytearray | memoryview

_FRAMES_AHEAD = 4
"""How many frames gloo may receive before we look. So the last words of a rank are not lost when it ends."""

_FRAME_TAG = 0
_NO_TAG = 0x7FFFFFFF
_FOR_EVER = datetime.timedelta(days=3650)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class PipeBroken(Exception):
    """The other rank is gone, or the pipe was closed. This is internal to :mod:`robust_dcp.comm`."""


class Pipe(Protocol):
    """A connection to one other rank. One thread receives; any thread may call the other methods."""

    def send(self, data: Payload, tag: int) -> object:
        """Start to send. Keep what is returned until the other side has received the data.

        Raises:
            PipeBroken: the other rank is gone, or the pipe was closed.
        """

    def next_frame(self) -> bytes:
        """Wait for the next message with tag 0, which has ``FRAME_NBYTES`` bytes.

        Raises:
            PipeBroken: the other rank is gone, or the pipe was closed.
        """

    def receive(self, nbytes: int, tag: int) -> bytearray:
        """Wait for the ``nbytes`` bytes that the other side sends under ``tag``.

        Raises:
            PipeBroken: the other rank is gone, or the pipe was closed.
        """

    def close(self) -> None:
        """Close the pipe. This ends all waits on both sides."""


class GlooPipe:
    """A ``ProcessGroupGloo`` of two that nothing else uses.

    Args:
        group: the backend. This object is its only owner.
        peer: the rank of the other process in it, 0 or 1.
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
            PipeBroken: it did not come within ``timeout``, and gloo has closed the pipe; or the other rank is gone.
        """
        _call(_call(self._group.recv, [tensor], self._peer, tag).wait, timeout)

    def await_sent(self, sending: object, timeout: datetime.timedelta) -> None:
        """Wait until the data of a :meth:`send` has gone out. ``sending`` is what it returned.

        Raises:
            PipeBroken: it did not go out within ``timeout``, and gloo has closed the pipe; or the other rank is gone.
        """
        *_, works = cast("tuple[Any, Any, list[Any]]", sending)
        for work in works:
            _call(work.wait, timeout)

    def close(self) -> None:
        # When a wait times out, every version of gloo closes the group's connections and wakes all who wait on them.
        with contextlib.suppress(PipeBroken):
            self.receive_into(torch.empty(1, dtype=torch.uint8), _NO_TAG, _AT_ONCE)

    def _post_frame(self) -> None:
        frame = torch.empty(FRAME_NBYTES, dtype=torch.uint8)
        self._posted.append((frame, _call(self._group.recv, [frame], self._peer, _FRAME_TAG)))


def _call(function: Any, *args: Any) -> Any:
    """Call ``function(*args)``, and turn gloo's exceptions into ours."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise PipeBroken(short(str(error))) from None


def short(text: str) -> str:
    """The useful part of gloo's message, without the place in its source code and without its advice."""
    line = text.partition("\n")[0]
    line = re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". This is typically")[0]
    return line[:300]


def _bytes_of(data: Payload) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``data`` as an array without a copy. This way torch does not warn of read-only memory; sending only reads."""
    if isinstance(data, bytes) and len(data) <= FRAME_NBYTES:
        return np.frombuffer(bytearray(data), dtype=np.uint8)  # a copy is cheaper here
    if isinstance(data, bytes):
        pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, shape=(len(data),))
    return np.frombuffer(data, dtype=np.uint8)
