"""Preemption: a scheduler signals some processes of a job, and all ranks save at the same step before these end.

A signal is only noted when it comes. ``should_save`` asks all ranks whether one has noted any, by one frame up and down
the tree, in every call or every eighth. After the save the signal is delivered once more, and does what it would have
done without us.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError
from robust_dcp.save_queue import LISTENER, end_by_sigterm, end_well_on_sigterm, on_sigterm

logger = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_SLOW_SECONDS: Final = 1.0
_MOMENT_SECONDS: Final = 1.0
"""Launchers say SIGTERM more than once, to a rank and to its group."""

_FEWER: Final = 8


class _Signals:
    """The signals that this process has got since somebody watches.

    Attributes:
        noted: the numbers of those that no save has been agreed for.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._delivered: list[int] = []
        self._former: dict[int, Any] = {}
        self._pid = 0
        self._heard_seconds = math.inf  # of one that is not noted
        self._noted_seconds = -math.inf

    def watch(self) -> None:
        """Note signals from now on, instead of what they would do.

        Raises:
            RuntimeError: this is not the main thread, and Python lets no other set handlers.
        """
        if self._former:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("should_save has to be called from the main thread, which alone can note signals")
        end_well_on_sigterm()  # before: what is delivered later then waits for running saves and drains
        self._pid = os.getpid()
        for number in _SIGNALS:
            # A handler that is not Python's own is given as None, and cannot be put back.
            self._former[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)
        LISTENER.react(self._note, self._hear)

    def _hear(self) -> None:
        """SIGTERM has come. If it is the second, and the main thread has noted neither, that waits in C, where nobody
        can ask it to save. So the process ends as without us."""
        now_seconds, first_seconds = time.monotonic(), self._heard_seconds
        if first_seconds == math.inf:
            if now_seconds - self._noted_seconds > _MOMENT_SECONDS:  # else it was noted before it was heard
                self._heard_seconds = now_seconds
        elif now_seconds - first_seconds > _MOMENT_SECONDS and self._former.get(signal.SIGTERM) is on_sigterm:
            time.sleep(_MOMENT_SECONDS)
            if self._heard_seconds == first_seconds:
                end_by_sigterm()

    def deliver(self, number: int) -> None:
        """Let a signal do what it would have done. Any thread may call this; handlers run in the main thread."""
        self._delivered.append(number)
        os.kill(os.getpid(), number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted_seconds, self._heard_seconds = time.monotonic(), math.inf
        # A forked child may have this handler for a moment, before `forget` has run there. It is ended as ever.
        if number not in self._delivered and self._pid == os.getpid():
            self.noted.append(number)
            return
        self._delivered.clear()
        self.forget()
        os.kill(os.getpid(), number)

    def forget(self) -> None:
        """Signals do what they do without us; also in a forked child, such as a worker of a DataLoader. There, with a
        handler of Python's, one that comes right before a call that waits would have no effect until that is over."""
        is_child = self._pid != os.getpid()
        for each, former in self._former.items():
            if signal.getsignal(each) == self._note:  # else somebody has put another one there since
                signal.signal(each, signal.SIG_DFL if is_child and former is on_sigterm else former)
        self._former.clear()


_signals = _Signals()
os.register_at_fork(after_in_child=_signals.forget)


class Preemption:
    """The saves of one manager that signals have asked for.

    Args:
        group: the ranks that save together; ``None`` for all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._due: list[int] = []
        self._async: WeakKeyDictionary[Future[Any], Callable[[bool], None]] = WeakKeyDictionary()
        self._n_unasked = 0
        self._called_seconds = -math.inf
        self._lock = threading.Lock()

    def is_asked_for(self, step: int, *, asks_always: bool) -> bool:
        """Whether a rank has got a signal: the same answer on all ranks.

        Args:
            asks_always: otherwise ranks whose steps all take less than a second ask each other in every eighth call.
                An exchange takes 1 to 5 ms of CPU (4 ranks on 2 busy cores), which makes 0.2 to 0.7 ms a call.

        Raises:
            ExchangeError: ranks ask for different steps, or a rank is missing.
            RuntimeError: the first call is not made by the main thread.
        """
        _signals.watch()
        for saving, ended in list(self._async.items()):
            if saving.done() and Future.exception(saving) is not None:
                ended(False)  # whoever has its error may ask before its callbacks have run
        now_seconds = time.monotonic()
        is_slow = now_seconds - self._called_seconds >= _SLOW_SECONDS
        self._called_seconds = now_seconds
        if self._n_unasked and not asks_always:
            self._n_unasked -= 1
            return False
        channel = Channel.for_group(self._group, operation="should_save")
        noted, step_id = next(iter(_signals.noted), 0), step.to_bytes(16, "little")
        _, agreed = channel.agree("signals", lambda: Offer(same=step_id, value=int(noted), flags=int(is_slow)))
        self._n_unasked = 0 if agreed.counts[0] or agreed.highest else _FEWER - 1
        if not agreed.is_same:
            raise ExchangeError(
                f"should_save was called for step {step} on rank {channel.rank}, and for another step on another rank: "
                "call it for the same steps on all ranks",
                phase="signals",
            )
        if agreed.highest:
            self._due += _signals.noted
            _signals.noted.clear()
            if channel.is_coordinator:
                name = signal.Signals(agreed.highest).name
                logger.warning("rank %d has got %s: all ranks save at step %d", agreed.highest_rank, name, step)
        return agreed.highest != 0

    @contextmanager
    def saving(self) -> Iterator[Callable[[bool], None]]:
        """A save of the manager begins within the block. Yields a function that is told whether it has succeeded, then
        or later; if the block raises, it has not.

        The save is made for the signals that are due now: an earlier async save that ends meanwhile is made for none of
        them. If it fails, another one is needed; else what it was made for is delivered.
        """
        due, self._due = self._due, []

        def ended(has_succeeded: bool) -> None:
            with self._lock:  # it may be told twice
                made_for = due.copy()
                due.clear()
            if not has_succeeded:
                _signals.noted += made_for
            elif made_for:
                _signals.deliver(made_for[0])

        try:
            yield ended
        except BaseException:
            ended(False)
            raise

    def follow(self, saving: Future[Any], ended: Callable[[bool], None]) -> None:
        """An async save goes on after the block of :meth:`saving`, which has yielded ``ended``.

        It is held weakly: its queue holds it until its callbacks have run.
        """
        self._async[saving] = ended
