"""The payloads of one gather as files: what each rank sends, and what its node leader makes of that.

Owns the files, and stands in for the exchange that moves payloads: which way they take, what is checked and how they
are decoded is the package's own code (``comm.routes``, ``comm.gathering``, ``comm.bundle``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from robust_dcp.comm.bundle import Bundler
from robust_dcp.comm.deliveries import Delivery
from robust_dcp.comm.exchange import Accept, Exchange
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind, operation_id
from robust_dcp.comm.gathering import deliver_to_coordinator
from robust_dcp.comm.nodes import NodeMap
from robust_dcp.comm.routes import Route, route_of
from robust_dcp.comm.transport import Payload

__all__ = ["COORDINATOR", "RANKS_PER_NODE", "Mailbox", "header_of"]

M = TypeVar("M", bound=msgspec.Struct)

COORDINATOR = 0
RANKS_PER_NODE = 8


def header_of(
    payload: bytes = b"", *, signature: bytes = bytes(16), plan_id: bytes = bytes(8), flags: int = 0, value: int = 0
) -> bytes:
    """The 64 bytes with which a rank enters an exchange."""
    return Frame(
        kind=Kind.HEADER,
        operation=operation_id("simulated"),
        sequence=0,
        flags=flags,
        payload_nbytes=len(payload),
        payload_crc32=zlib.crc32(payload),
        signature=signature,
        plan_id=plan_id,
        value=value,
    ).encode()


class Mailbox:
    """One gather of ``ranks`` ranks, 8 on each node, in ``directory``."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory = directory
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)

    def post(self, rank: int, payload: bytes) -> None:
        """``rank`` sends ``payload``."""
        self._sent(rank).write_bytes(payload)

    def seal(self, message_type: type[M], values: Mapping[int, int] | None = None) -> None:
        """All ranks have posted what they have to say: make the bundles of the leaders, and the headers of all ranks.

        Args:
            message_type: of the messages.
            values: what stands in the header of each rank.
        """
        values = values or {}
        headers = b"".join(header_of(self._payload(rank), value=values.get(rank, 0)) for rank in range(self._ranks))
        verdicts = [header_of()] * self._ranks
        for leader, ranks in self._route(_frames(headers)).bundled.items():
            bundler = Bundler(message_type)
            for rank in ranks:
                bundler.add(rank, self._payload(rank))
            bundle = bundler.encode()
            self._bundle(leader).write_bytes(bundle)
            verdicts[leader] = header_of(bundle)
        self._headers.write_bytes(headers)
        self._verdicts.write_bytes(b"".join(verdicts))

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the payloads of all ranks but the coordinator."""
        return sum(file.stat().st_size for file in self._directory.glob("rank-*"))

    @property
    def arriving_nbytes(self) -> int:
        """Bytes that reach the coordinator, by way of node leaders if the group is large enough."""
        route = self._route(_frames(self.headers()))
        singles = sum(each.nbytes for each in route.first if each.receiver == COORDINATOR)
        return singles + sum(self._bundle(leader).stat().st_size for leader in route.bundled)

    def headers(self) -> bytes:
        """What arrives in the first round: 64 bytes from each rank."""
        return self._headers.read_bytes()

    def collect(self, headers: bytes, message_type: type[M]) -> tuple[list[M | None], list[int]]:
        """The coordinator's work: the message of every rank but its own, and the value in the header of each."""
        frames = _frames(headers)
        running = cast(Exchange, _FileExchange(self._sent, self._bundle, self._verdicts))
        messages = deliver_to_coordinator(running, self._route(frames), COORDINATOR, b"", "simulated", message_type)
        return [messages.get(rank) for rank in range(self._ranks)], [frame.value for frame in frames]

    def _route(self, frames: Sequence[Frame]) -> Route:
        nodes = NodeMap(tuple(rank // RANKS_PER_NODE for rank in range(self._ranks)), "auto")
        return route_of(frames, nodes, COORDINATOR)

    def _payload(self, rank: int) -> bytes:
        file = self._sent(rank)
        return file.read_bytes() if file.exists() else b""

    @property
    def _headers(self) -> Path:
        return self._directory / "headers"

    @property
    def _verdicts(self) -> Path:
        return self._directory / "verdicts"

    def _sent(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"

    def _bundle(self, leader: int) -> Path:
        return self._directory / f"bundle-{leader}"


class _FileExchange:
    """``Exchange.deliver`` on the coordinator: payloads come out of files, and are checked as those that arrive are."""

    def __init__(self, sent: Callable[[int], Path], bundle: Callable[[int], Path], verdicts: Path) -> None:
        self._levels = iter((sent, bundle))
        self._verdicts = verdicts

    def deliver(
        self,
        deliveries: Sequence[Delivery],
        outgoing: Callable[[Delivery], Payload],
        accept: Accept,
        *,
        announce: Callable[[], Payload] = bytes,
    ) -> list[Frame]:
        if not deliveries:
            return []
        file_of = next(self._levels)
        for delivery in deliveries:
            if delivery.receiver != COORDINATOR:
                continue
            payload = file_of(delivery.sender).read_bytes()
            if zlib.crc32(payload) != delivery.crc32:
                raise ValueError(f"{file_of(delivery.sender)} has changed since it was posted")
            accept(delivery.sender, payload)
        announce()
        return _frames(self._verdicts.read_bytes())


def _frames(data: bytes) -> list[Frame]:
    return [Frame.decode(data[at : at + FRAME_NBYTES]) for at in range(0, len(data), FRAME_NBYTES)]
