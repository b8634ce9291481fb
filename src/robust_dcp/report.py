"""What a save or load did: phases with times and messages, bytes, and why the plan was reused or made anew.

Owns the report types and how they read as text; made by ``api`` at the end of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.plan.agreement import PlanOutcome
from robust_dcp.plan.phases import PhaseRecord
from robust_dcp.plan.structure import StructureDiff

__all__ = ["LoadReport", "PhaseReport", "SaveReport", "phase_reports", "sizes_in_words"]


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a save or load, as this rank saw it.

    Attributes:
        name: ``plan``, ``stage`` (of an async save), ``write``, ``commit``; or ``plan``, ``read``, ``share`` and
            ``apply``.
        seconds: wall time, waiting for other ranks included.
        exchanges: exchanges between ranks.
        messages: that this rank sent to its neighbours in the tree of ranks: frames, and payloads where there are any.
        header_nbytes, payload_nbytes: bytes that this rank sent, in frames and in payloads.
    """

    name: str
    seconds: float
    exchanges: int = 0
    messages: int = 0
    header_nbytes: int = 0
    payload_nbytes: int = 0


@dataclass(frozen=True)
class _Report:
    """What saves and loads have in common.

    Attributes:
        checkpoint_id: the checkpoint's directory.
        rank, world_size: within the group.
        items: items that this rank wrote or read.
        nbytes: bytes that this rank wrote or read.
        phases: in order.
    """

    checkpoint_id: str
    rank: int
    world_size: int
    items: int
    nbytes: int
    phases: tuple[PhaseReport, ...]

    @property
    def seconds(self) -> float:
        """Wall time of the whole call, in seconds."""
        return sum(phase.seconds for phase in self.phases)

    def _lines(self, headline: str, stragglers: Sequence[str]) -> str:
        rows = [headline, f"  {'phase':<8}{'seconds':>9}{'exchanges':>11}{'messages':>10}{'bytes sent':>12}"]
        rows += [
            f"  {p.name:<8}{p.seconds:>9.3f}{p.exchanges:>11}{p.messages:>10}{p.header_nbytes + p.payload_nbytes:>12}"
            for p in self.phases
        ]
        return "\n".join([*rows, *(f"  waited: {each}" for each in stragglers)])


@dataclass(frozen=True)
class SaveReport(_Report):
    """What a save did. Printed, it is a table.

    Attributes:
        blocked_seconds: how long the caller was kept from its own work: all of a synchronous save; of an async one the
            agreement on a plan, and the copies.
        plan: ``built`` (no plan of this kind was cached), ``reused``, ``patched`` (some ranks changed) or ``rebuilt``
            (all did).
        reason: why, in words.
        changes: the keys that differ from the plan before, over all ranks; ``None`` if there was none to compare.
        differing_objects: objects of one name whose contents differ between ranks, with the ranks that hold them.
            Only the copy of the lowest of them is in the checkpoint.
        unloadable_objects: objects that are saved and that a load would refuse, with the reason, of all ranks; on the
            coordinator, and empty on the others.
        total_nbytes: bytes of tensor data that all ranks wrote together; ``None`` on ranks that do not know.
        digest: over the checksums of all data of all ranks, in hexadecimal digits: the same on all ranks, and in two
            saves of the same data by the same ranks. ``None`` with ``checksums=False``.
        files: the files of this rank.
        how: how this rank's files were written: ``direct``, or ``buffered`` and why. Of an async save also what was
            written while training waited, and why.
        peak_buffer_nbytes: the most memory that data of this rank passed through at any time.
        stragglers: on the coordinator, whom all ranks have waited for, and how far those had come: as it was logged.
    """

    blocked_seconds: float = 0.0
    plan: PlanOutcome = "built"
    reason: str = ""
    changes: StructureDiff | None = None
    differing_objects: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unloadable_objects: dict[str, str] = field(default_factory=dict)
    total_nbytes: int | None = None
    digest: str | None = None
    files: tuple[str, ...] = ()
    how: tuple[str, ...] = ()
    peak_buffer_nbytes: int = 0
    stragglers: tuple[str, ...] = ()
    _read_metadata: Callable[[], Metadata] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's ``Metadata`` of the checkpoint, read from its ``.metadata`` when first asked for."""
        if self._read_metadata is None:
            raise ValueError("this report was made without access to the checkpoint's metadata")
        return self._read_metadata()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_metadata": None}

    def __str__(self) -> str:
        return self._lines(
            f"saved {self.checkpoint_id} (rank {self.rank} of {self.world_size}): {self.items} items, "
            f"{sizes_in_words(self.nbytes)} in {self.seconds:.3f} s"
            f"{''.join(f', {how}' for how in self.how)}; plan {self.plan}: {self.reason}",
            self.stragglers,
        )


@dataclass(frozen=True)
class LoadReport(_Report):
    """What a load did. Printed, it is a table.

    Attributes:
        missing_keys: keys of the state dict that the checkpoint does not have (only with ``allow_partial_load``).
        shared_nbytes: of ``nbytes``, what another rank has read for this one.
        peak_buffer_nbytes: the most memory that data of this rank passed through on its way from the files.
        unverified_nbytes: of what this rank has read, bytes that were not compared with a checksum.
        stragglers: as in :class:`SaveReport`.
    """

    missing_keys: tuple[str, ...] = ()
    shared_nbytes: int = 0
    peak_buffer_nbytes: int = 0
    unverified_nbytes: int = 0
    stragglers: tuple[str, ...] = ()
    _find_unread_keys: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def unread_keys(self) -> tuple[str, ...]:
        """Keys of the checkpoint that the state dict did not ask for: looked up now, as there may be many."""
        return self._find_unread_keys()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "unread_keys": self.unread_keys, "_find_unread_keys": tuple}

    def __str__(self) -> str:
        return self._lines(
            f"loaded {self.checkpoint_id} (rank {self.rank} of {self.world_size}): {self.items} items, "
            f"{sizes_in_words(self.nbytes)} in {self.seconds:.3f} s"
            f"{f', {sizes_in_words(self.shared_nbytes)} of it by way of other ranks' if self.shared_nbytes else ''}"
            f"{f', {sizes_in_words(self.unverified_nbytes)} not verified' if self.unverified_nbytes else ''}",
            self.stragglers,
        )


def sizes_in_words(nbytes: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def phase_reports(records: Sequence[PhaseRecord]) -> tuple[PhaseReport, ...]:
    """The phases of a call, as its report tells them."""
    return tuple(
        PhaseReport(
            name=record.name,
            seconds=record.seconds,
            exchanges=record.stats.exchanges,
            messages=record.stats.messages_sent,
            header_nbytes=record.stats.header_nbytes_sent,
            payload_nbytes=record.stats.payload_nbytes_sent,
        )
        for record in records
    )
