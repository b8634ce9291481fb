"""What a save or load did: its phases with times and messages, its bytes, and why it reused or rebuilt the plan.

This module owns the report types and how they print. ``api`` makes a report at the end of each call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.report_file import Changes

__all__ = ["LoadReport", "PhaseReport", "PlanOutcome", "SaveReport", "StructureDiff", "sizes_in_words"]

_JSON_VERSION: Final = 1

_SHOWN: Final = 8
"""How many keys of each kind the one-line summary names."""

PlanOutcome = Literal["built", "reused", "rebuilt"]


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a save or load, as this rank saw it.

    Attributes:
        name: in a save ``plan``, ``stage`` (async saves only), ``write`` or ``commit``; in a load ``plan``, ``read``,
            ``share`` or ``apply``.
        seconds: wall time, including the wait for other ranks.
        exchanges: how many exchanges between ranks took place.
        messages: how many messages this rank sent to its neighbours in the tree of ranks. A frame counts as one
            message, and so does a payload.
        header_nbytes, payload_nbytes: bytes that this rank sent, in frames and in payloads.
    """

    name: str
    seconds: float
    exchanges: int = 0
    messages: int = 0
    header_nbytes: int = 0
    payload_nbytes: int = 0


@dataclass(frozen=True)
class StructureDiff:
    """The keys that only one of two structures has, and the keys that differ between them.

    ``changed`` maps a key to a text that says what it was and what it is now.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        parts = []
        if self.added:
            parts.append(f"added {_listed(self.added)}")
        if self.removed:
            parts.append(f"removed {_listed(self.removed)}")
        if self.changed:
            parts.append(f"changed {_listed(f'{key} ({how})' for key, how in self.changed.items())}")
        return "; ".join(parts) or "no change"


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + rest


@dataclass(frozen=True)
class _Report:
    """What the reports of saves and loads have in common.

    Attributes:
        checkpoint_id: the checkpoint's directory.
        rank, world_size: this rank in the group, and the size of the group.
        items: how many items this rank wrote or read.
        nbytes: how many bytes this rank wrote or read.
        phases: the phases in the order in which they ran.
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

    def _json(self, kind: str, without: Sequence[str] = (), **replaced: Any) -> str:
        names = [each.name for each in fields(self) if not each.name.startswith("_") and each.name not in without]
        shown = {name: getattr(self, name) for name in names}
        shown["checkpoint"] = shown.pop("checkpoint_id")
        shown["phases"] = [asdict(phase) for phase in self.phases]
        return json.dumps({"version": _JSON_VERSION, "kind": kind, "seconds": self.seconds, **shown, **replaced})

    def _lines(self, headline: str, stragglers: Sequence[str]) -> str:
        rows = [headline, f"  {'phase':<8}{'seconds':>9}{'exchanges':>11}{'messages':>10}{'bytes sent':>12}"]
        rows += [
            f"  {p.name:<8}{p.seconds:>9.3f}{p.exchanges:>11}{p.messages:>10}{p.header_nbytes + p.payload_nbytes:>12}"
            for p in self.phases
        ]
        return "\n".join([*rows, *(f"  waited: {each}" for each in stragglers)])


@dataclass(frozen=True)
class SaveReport(_Report):
    """What a save did. It prints as a table.

    Attributes:
        blocked_seconds: how long the caller could not do its own work. For a synchronous save this is the whole save;
            for an async save it is the time to agree on a plan and to copy.
        plan: ``built`` (there was no plan of this kind), ``reused`` or ``rebuilt`` (the plan did not fit any more).
        reason: why, in words.
        changes: the keys of all ranks that differ from the previous plan; ``None`` if there was no previous plan.
        differing_replicas: objects and small tensors that have one name and different contents on several ranks, with
            the ranks that hold them. Only the copy of the lowest of these ranks is in the checkpoint. They are compared
            when a plan is made, and the dict is empty in a save that reuses one.
        unloadable_objects: the objects of all ranks that were saved, but that a load would refuse, with the reason.
            Only the coordinator has them; the dict is empty on other ranks.
        total_nbytes: bytes of tensor data that all ranks wrote together; ``None`` on ranks that do not know.
        files: the files that this rank wrote.
        how: how this rank wrote its files: ``direct``, or ``buffered`` and why. For an async save it also says what
            was written while training waited, and why.
        peak_buffer_nbytes: the most memory that this rank's data took in buffers at any time.
        stragglers: on the coordinator, the log lines that say which ranks all others waited for, and how far those
            ranks were.
        leads_directory: whether this rank has committed in a directory of its own node, because the nodes do not share
            the checkpoint's directory. One rank on each node does; ``False`` for the coordinator.
    """

    blocked_seconds: float = 0.0
    plan: PlanOutcome = "built"
    reason: str = ""
    changes: StructureDiff | None = None
    differing_replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unloadable_objects: dict[str, str] = field(default_factory=dict)
    total_nbytes: int | None = None
    files: tuple[str, ...] = ()
    how: tuple[str, ...] = ()
    peak_buffer_nbytes: int = 0
    stragglers: tuple[str, ...] = ()
    leads_directory: bool = False
    _read_metadata: Callable[[], Metadata] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's ``Metadata`` of the checkpoint. It is read from ``.metadata`` at the first access."""
        if self._read_metadata is None:
            raise ValueError("this report was made without access to the checkpoint's metadata")
        return self._read_metadata()

    def to_json(self) -> str:
        """The report as one line of JSON. Times end in ``seconds``, sizes in ``nbytes``.

        ``plan`` has the outcome, the reason, and the changes: how many keys, and the first 100 of each kind. The other
        names are those of the attributes.
        """
        changes = None if self.changes is None else msgspec.to_builtins(Changes.of(self.changes))
        plan = {"outcome": self.plan, "reason": self.reason, "changes": changes}
        return self._json("save", without=("reason", "changes"), plan=plan)

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
    """What a load did. It prints as a table.

    Attributes:
        missing_keys: keys of the state dict that the checkpoint does not have (only with ``allow_partial_load``).
        shared_nbytes: the part of ``nbytes`` that other ranks read and sent to this one.
        peak_buffer_nbytes: the most memory that this rank's data took in buffers on its way from the files.
        unverified_nbytes: bytes that this rank read without comparing them with a checksum.
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
        """Keys of the checkpoint that the state dict did not ask for. They are looked up at the first access, because
        there may be many."""
        return self._find_unread_keys()

    def to_json(self) -> str:
        """The report as one line of JSON. Times end in ``seconds``, sizes in ``nbytes``.

        It does not have the unread keys, which would have to be looked up first.
        """
        return self._json("load")

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
