"""Channel: how the ranks of a group exchange messages during a save or load. It has one method for each pattern.

Example: ``gather`` sends every rank's message to the coordinator. This module owns these methods; the operation keeps
the ranks in step. ``api``, the planner, the writer and the Megatron integration call it. Each operation has a channel
of its own, and one thread uses it at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.loop import link_for
from robust_dcp.comm.messages import Bundle, Payload, decode, encode
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.relay import ALL_ROUNDS, Passing, Relay
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import ExchangeError, ExchangeTimeout
from robust_dcp.events import LISTENERS, Event, tell

M = TypeVar("M", bound=msgspec.Struct)
T = TypeVar("T")

_MAX_TRIES = 4
"""How often ranks try to pass on tensors."""


class Channel:
    """Exchanges among the ranks of a process group, over connections that nothing else uses.

    Every rank calls the same methods with the same ``phase`` in the same order. ``produce`` does the rank's own work
    and runs first. If it raises on any rank, all ranks raise the same exception and stay in step. A rank is named in an
    ``ExchangeTimeout`` or ``ExchangeError`` on all ranks if it gives no sign of progress for ``timeout_seconds``, if
    its process has ended, or if it is in another phase. The next exchange then starts afresh.

        channel = Channel.for_group(operation="save 3", timeout_seconds=60)
        sizes_here, sizes = channel.gather("sizes", measure, Sizes)

    Attributes:
        rank: this process's rank in the group.
        size: how many ranks the group has.
        ranks: the global rank of each rank of the group.
        coordinator_rank: the rank of the group that gathers and decides.
        is_coordinator: whether that is this rank.
        operation: what the operation does, for example ``"save step_1000"``.
        timeout_seconds: how long a rank may be silent.
        stragglers: on the coordinator, the log lines that say which ranks the others waited for, and how far those
            were.
        stats: what the exchanges of the operation have cost this rank so far.
        last_agreement: the combined offers of all ranks from the last exchange of this object.
    """

    last_agreement: Agreement

    def __init__(self, operation: Operation, coordinator_rank: int) -> None:
        self._operation = operation
        self.rank, self.size, self.ranks = operation.link.rank, operation.link.size, operation.link.ranks
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = self.rank == coordinator_rank
        self.operation = operation.name
        self.timeout_seconds = operation.timeout_seconds
        self.stragglers, self.stats = operation.stragglers, operation.stats

    @classmethod
    def for_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        operation: str = "checkpoint",
        timeout_seconds: float = 300.0,
        deadline_seconds: float | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
    ) -> Channel:
        """The channel among the members of ``process_group``. This is no collective: it connects at its first use.

        Args:
            process_group: ``None`` for the default group. Its backend does not matter.
            operation: what the ranks are about to do, the same text on all ranks. Several operations may run at the
                same time, each in its own thread. Ranks may start operations of different names in any order.
            timeout_seconds: how long a rank may show no sign of progress. A rank that works is waited for.
            deadline_seconds: how long the whole operation may take; ``None`` for as long as there is progress.
            coordinator_rank: a rank of the group, not a global rank.
            no_dist: talk to nobody. This is also what happens without ``torch.distributed`` and in a group of one.

        Raises:
            ValueError: an argument is out of range, or this process is not a member of the group.
        """
        limits: dict[str, Any] = {"timeout_seconds": timeout_seconds}
        if deadline_seconds is not None:
            limits["deadline_seconds"] = deadline_seconds
        for name, seconds in limits.items():
            if not hasattr(seconds, "__float__") or not 0 < seconds < math.inf:
                raise ValueError(f"{name} is {seconds!r}: it has to be a number, positive and finite")
        if no_dist or not (dist.is_available() and dist.is_initialized()):
            link = link_for(None)
        else:
            link = link_for(dist.group.WORLD if process_group is None else process_group)
        if not 0 <= coordinator_rank < link.size:
            raise ValueError(f"coordinator_rank is {coordinator_rank} in a group of {link.size} ranks")
        return cls(Operation(link, operation, timeout_seconds, deadline_seconds), coordinator_rank)

    def led_by(self, coordinator_rank: int) -> Channel:
        """This channel with another coordinator. It belongs to the same operation and reuses the connections."""
        return self if coordinator_rank == self.coordinator_rank else Channel(self._operation, coordinator_rank)

    def agree(
        self, phase: str, produce: Callable[[], T], offer: Callable[[T], Offer] | None = None
    ) -> tuple[T, Agreement]:
        """Combine the offers of all ranks.

        Args:
            offer: makes this rank's offer from what ``produce`` has made; ``None`` if that is the offer.

        Returns:
            What this rank has made, and on every rank the same agreement.

        Raises:
            RobustCheckpointError: see the class.
        """
        self.last_agreement, made, _ = self._run("agree", phase, Work(produce, offer=offer))
        return made, self.last_agreement

    def barrier(
        self,
        phase: str,
        produce: Callable[[], None] = lambda: None,
        *,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Wait until the work of all ranks has succeeded.

        Args:
            then: is called on the coordinator after that. If it raises, all ranks raise.

        Raises:
            RobustCheckpointError: see the class.
        """
        work = Work(produce, reply=None if then is None else lambda own, below: then())
        self.last_agreement, _, _ = self._run("barrier", phase, work)

    def gather(
        self,
        phase: str,
        produce: Callable[[], T],
        message_type: type[M],
        *,
        message: Callable[[T], M | None] | None = None,
        then: Callable[[list[M | None]], None] | None = None,
        offer: Callable[[T], Offer] | None = None,
    ) -> tuple[T, list[M | None] | None]:
        """Bring every rank's message to the coordinator.

        Args:
            phase: the name of the exchange, the same on all ranks.
            produce: does this rank's work.
            message_type: the type that messages are decoded as and checked against.
            message: makes this rank's message from what ``produce`` has made; ``None`` if that is the message. A
                message that is ``None`` means that there is nothing to say, and costs nothing.
            then: is called on the coordinator with all messages. If it raises, all ranks raise.
            offer: makes this rank's part of ``last_agreement`` from what ``produce`` has made.

        Returns:
            What this rank has made, and on the coordinator all messages, in rank order; ``None`` on the other ranks.
            Messages with equal fields may share the same objects, so do not modify them.

        Raises:
            RobustCheckpointError: see the class.
        """
        gathered: list[M | None] = []

        def merge(made: Any, below: list[Payload]) -> Payload:
            own = made if message is None else message(made)
            return b"" if own is None and not below else self._merged(phase, own, below, message_type).encode()

        def open_all(made: Any, below: list[Payload]) -> None:
            messages = self._merged(phase, None, below, message_type).open(message_type) if below else {}
            gathered.extend(map(messages.get, range(self.size)))
            gathered[self.rank] = made if message is None else message(made)
            if then is not None:
                then(gathered)

        work = Work(produce, merge, open_all, offer)
        self.last_agreement, made, _ = self._run("gather", phase, work)
        return made, gathered if self.is_coordinator else None

    def broadcast(self, phase: str, produce: Callable[[], M], message_type: type[M]) -> M:
        """Return the coordinator's message on every rank. ``produce`` runs on the coordinator only.

        Raises:
            RobustCheckpointError: see the class.
        """

        def reply(own: M, below: list[Payload]) -> Payload | None:
            return encode(own) if self.size > 1 else None

        work = Work(produce if self.is_coordinator else lambda: None, reply=reply)
        self.last_agreement, own, payload = self._run("broadcast", phase, work)
        return own if self.is_coordinator else self._decoded(phase, lambda: decode(payload, message_type))

    def scatter(
        self,
        phase: str,
        produce: Callable[[], T],
        message_type: type[M],
        *,
        messages: Callable[[T], Sequence[M | None]] | None = None,
    ) -> tuple[T | None, M | None]:
        """Send a message of the coordinator to each rank. ``produce`` runs on the coordinator only.

        Args:
            phase: the name of the exchange, the same on all ranks.
            produce: does the coordinator's work.
            message_type: the type that messages are decoded as and checked against.
            messages: makes one message for each rank from what ``produce`` has made, in rank order; ``None`` if those
                are the messages. A message that is ``None`` is not sent. An object that several ranks get is sent once
                on each connection.

        Returns:
            What the coordinator has made, ``None`` on the other ranks; and this rank's message.

        Raises:
            RobustCheckpointError: see the class.
        """
        tree = Tree(self.rank, self.size, self.coordinator_rank)

        def reply(made: Any, below: list[Payload]) -> Payload:
            parts = made if messages is None else messages(made)
            if len(parts) != self.size:
                raise ValueError(f"{phase!r} has {len(parts)} messages for {self.size} ranks")
            others = {rank: message for rank, message in enumerate(parts) if rank != self.rank}
            return Bundle.of(message_type, others).encode()

        def share(payload: Payload, child: int) -> Payload:
            return Bundle.decode(payload).of_ranks({*tree.ranks_below(child)}).encode()

        def take(payload: Payload) -> M | None:
            return Bundle.decode(payload, message_type).of_ranks([self.rank]).open(message_type).get(self.rank)

        work = Work(produce if self.is_coordinator else lambda: None, reply=reply, share=share)
        self.last_agreement, made, payload = self._run("scatter", phase, work)
        if self.is_coordinator:
            return made, (made if messages is None else messages(made))[self.rank]
        return None, self._decoded(phase, lambda: take(payload)) if payload else None

    def all_gather(self, phase: str, produce: Callable[[], M], message_type: type[M]) -> list[M]:
        """Return every rank's message, in rank order, on every rank. Use it for small messages: each rank gets all.

        Raises:
            RobustCheckpointError: see the class.
        """

        def merge(own: M, below: list[Payload]) -> Payload:
            return self._merged(phase, own, below, message_type).encode() if self.size > 1 else b""

        work = Work(produce, merge, reply=merge)
        self.last_agreement, own, payload = self._run("all_gather", phase, work)
        if self.size == 1:
            return [own]
        found = self._decoded(phase, lambda: Bundle.decode(payload, message_type).open(message_type))
        return [found[rank] for rank in range(self.size)]

    def reduce(self, phase: str, produce: Callable[[], M], message_type: type[M], merge: Callable[[list[M]], M]) -> M:
        """Merge the messages of all ranks on their way up the tree, and return the result on every rank.

        Args:
            merge: makes one message of several. In which order they come does not matter to it.

        Raises:
            RobustCheckpointError: see the class.
        """

        def merged(own: M, below: list[Payload]) -> Payload:
            return encode(merge([own, *(decode(payload, message_type) for payload in below)]))

        work = Work(produce, merged, reply=merged)
        self.last_agreement, _, payload = self._run("reduce", phase, work)
        return self._decoded(phase, lambda: decode(payload, message_type))

    def relay(self, phase: str, relayed: Relay) -> None:
        """Pass tensors from the ranks that have them to the ranks that need them. If connections break, or bytes
        arrive damaged, the ranks go on where the slowest one was.

        Raises:
            RobustCheckpointError: see the class; or that happened several times.
        """
        first_round = 0
        for n_left in reversed(range(_MAX_TRIES)):
            passing = Passing(relayed, self._operation, first_round, is_last=n_left == 0)
            work = Work(passing.run, interrupt=passing.break_off)
            self.last_agreement, _, _ = self._run("relay", phase, work)
            first_round = self.last_agreement.lowest - 1
            if first_round == ALL_ROUNDS:
                return
        raise ExchangeTimeout(
            f"{phase!r}: ranks lost each other {_MAX_TRIES} times while they passed on tensors, the last time in round "
            f"{first_round}: the logs of the ranks say more",
            phase=phase,
            timeout_seconds=self.timeout_seconds,
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Put this around all exchanges of an operation. If this rank raises between two of them, the other ranks raise
        an ``ExchangeError`` that says so, instead of waiting for it."""
        try:
            yield
        except BaseException as error:
            self._operation.link.loop.run(self._operation.leave(error))
            raise

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far. Others wait for a rank that does. Any thread may call
        this."""
        self._operation.link.loop.tell(self._operation.note_progress, done_nbytes, total_nbytes)
        if LISTENERS:
            slowest = self._operation.link.loop.tell(self._operation.slowest) if self.rank == 0 else None
            progress = Event(
                "progress",
                self.operation,
                self.rank,
                self.size,
                done_nbytes=done_nbytes,
                total_nbytes=total_nbytes,
                slowest=slowest,
            )
            tell(progress)

    def stop_if_announced(self) -> None:
        """Leave this rank's work if another rank has announced a failure, or the deadline has passed. It is cheap
        enough for a loop over items, and any thread may call it.

        Raises:
            Stopped: let it leave ``produce``. The exchange then raises the failure that was announced.
            ExchangeTimeout: the deadline has passed. Let it leave ``produce`` as well.
        """
        self._operation.link.loop.tell(self._operation.stop_if_announced)

    def stop_if_given_up(self) -> None:
        """Right before what cannot be undone: leave this rank's work as :meth:`stop_if_announced` does, and also if
        this process stood still, and others have given up on it.

        Raises:
            Stopped: let it leave ``produce``.
            ExchangeTimeout: the deadline has passed, or this process stood still. Let it leave ``produce`` as well.
        """
        self._operation.link.loop.run(self._operation.stop_if_given_up())

    def check_stop(self, done_nbytes: int, total_nbytes: int) -> None:
        """Between blocks of data, report how far this rank is, and leave its work as :meth:`stop_if_announced` does."""
        self.note_progress(done_nbytes, total_nbytes)
        self._operation.link.loop.tell(self._operation.stop_if_announced)

    def _run(self, verb: str, phase: str, work: Work) -> tuple[Agreement, Any, Payload]:
        return self._operation.link.loop.run(self._operation.run(verb, phase, self.coordinator_rank, work))

    def _merged(self, phase: str, own: M | None, below: list[Payload], message_type: type[M]) -> Bundle:
        """This rank's message, if there is one, and the bundles of its children."""
        try:
            children = [Bundle.decode(payload, message_type) for payload in below]
            return Bundle.merged([Bundle.of(message_type, {self.rank: own}), *children])
        except ExchangeError as error:
            raise ExchangeError(f"{phase!r}: {error.message}", phase=phase, ranks=error.ranks) from None

    def _decoded(self, phase: str, decode_all: Callable[[], T]) -> T:
        """Decode a reply from the coordinator. If this rank cannot decode it, the operation ends on all ranks."""
        try:
            return decode_all()
        except ExchangeError as error:
            sender = self.coordinator_rank
            message = f"rank {self.rank} cannot use what rank {sender} sent in {phase!r}: {error.message}"
            useless = ExchangeError(message, phase=phase, ranks=[sender])
            self._operation.link.loop.run(self._operation.leave(useless))
            raise useless from None
