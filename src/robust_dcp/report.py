"""What a save or load did, and the report that a save leaves beside its checkpoint: ``.robust_dcp.report.json``.

``SaveReport`` and ``LoadReport`` are what one rank has seen, and are returned to its caller. ``SavedReport`` is what
the coordinator knows of all ranks. This module owns how they print, and the name, form and limits of the file. It needs
no torch, so that a report can be shown where no torch is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from robust_dcp.decoding import Undecodable, from_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

REPORT_NAME: Final = ".robust_dcp.report.json"
"""No reader of checkpoints looks for a file of this name."""

VERSION: Final = 1
"""Of the form of the file, and of the JSON of a report."""

MAX_NBYTES: Final = 64 << 20
"""A report of 100,000 ranks has about 9 MB. A file that is larger than this is no report."""

MAX_RANKS: Final = 1_000_000

_LENGTH: Final = 300
"""How long a text in the file may be, where nothing else is said. Keys are whole."""

_Count = Annotated[int, Meta(ge=0, le=10**18)]
_Seconds = Annotated[float, Meta(ge=0, le=1e18)]


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
    seconds: _Seconds
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
            parts.append(f"added {listed(self.added)}")
        if self.removed:
            parts.append(f"removed {listed(self.removed)}")
        if self.changed:
            parts.append(f"changed {listed(f'{key} ({how})' for key, how in self.changed.items())}")
        return "; ".join(parts) or "no change"


@dataclass(frozen=True)
class _Report:
    """What the reports of saves and loads have in common: they print as tables.

    Attributes:
        checkpoint_id: the checkpoint's directory.
        rank, world_size: this rank in the group, and the size of the group.
        items: how many items this rank wrote or read.
        nbytes: how many bytes this rank wrote or read.
        phases: the phases in the order in which they ran.
        peak_buffer_nbytes: the most memory that this rank's data took in buffers at any time.
        stragglers: on the coordinator, the log lines that say which ranks all others waited for, and how far those
            ranks were.
    """

    kind: ClassVar[str]

    checkpoint_id: str
    rank: int
    world_size: int
    items: int
    nbytes: int
    phases: tuple[PhaseReport, ...]
    peak_buffer_nbytes: int = 0
    stragglers: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of the whole call, in seconds."""
        return sum(phase.seconds for phase in self.phases)

    def to_json(self) -> str:
        """The report as one line of JSON. Times end in ``seconds``, sizes in ``nbytes``.

        ``plan`` has the outcome, the reason, and the changes. The other names are those of the attributes. Metadata and
        unread keys, which would have to be looked up first, are not there.
        """
        shown = {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}
        shown["checkpoint"] = shown.pop("checkpoint_id")
        if "plan" in shown:
            shown["plan"] = {"outcome": shown["plan"], "reason": shown.pop("reason"), "changes": shown.pop("changes")}
        report = {"version": VERSION, "kind": self.kind, "seconds": self.seconds, **shown}
        return json.dumps(report, default=asdict)

    def _repr_html_(self) -> str:
        """The table, in a notebook."""
        import html  # its table of entities takes 2 ms, and only notebooks need it

        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self, headline: str) -> str:
        rows = [headline, f"  {'phase':<8}{'seconds':>9}{'exchanges':>11}{'messages':>10}{'bytes sent':>12}"]
        rows += [
            f"  {p.name:<8}{p.seconds:>9.3f}{p.exchanges:>11}{p.messages:>10}{p.header_nbytes + p.payload_nbytes:>12}"
            for p in self.phases
        ]
        return "\n".join([*rows, *(f"  waited: {each}" for each in self.stragglers)])


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
        leads_directory: whether this rank has committed in a directory of its own node, because the nodes do not share
            the checkpoint's directory. One rank on each node does; ``False`` for the coordinator.
        identical_to: the last checkpoint by the same plan, if the parameters of all ranks are bit for bit those in it.
            Tensors of floating point count as parameters, unless their names are those of states of an optimizer.
        protection: where ``parity_nodes`` were asked for: ``under way``; what the checkpoint outlives by now, such as
            ``any 1 of 8 nodes``; or ``not protected`` and why. Empty where nothing is to be done.
    """

    kind = "save"

    blocked_seconds: float = 0.0
    plan: str = "built"
    reason: str = ""
    changes: StructureDiff | None = None
    differing_replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unloadable_objects: dict[str, str] = field(default_factory=dict)
    total_nbytes: int | None = None
    files: tuple[str, ...] = ()
    how: tuple[str, ...] = ()
    leads_directory: bool = False
    identical_to: str = ""
    _read_metadata: Callable[[], Metadata] | None = field(default=None, repr=False, compare=False)
    _protection: Future[str] | None = field(default=None, repr=False, compare=False)

    @property
    def protection(self) -> str:
        if self._protection is None:
            return ""
        return self._protection.result() if self._protection.done() else "under way"

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's ``Metadata`` of the checkpoint. It is read from ``.metadata`` at the first access."""
        if self._read_metadata is None:
            raise ValueError("this report was made without access to the checkpoint's metadata")
        return self._read_metadata()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_metadata": None, "_protection": None}

    def __str__(self) -> str:
        return self._lines(
            f"saved {self.checkpoint_id} (rank {self.rank} of {self.world_size}): {self.items} items, "
            f"{sizes_in_words(self.nbytes)} in {self.seconds:.3f} s"
            f"{''.join(f', {how}' for how in self.how)}; plan {self.plan}: {self.reason}"
            f"{f'; all parameters are identical to those in {self.identical_to}' if self.identical_to else ''}"
        )


@dataclass(frozen=True)
class LoadReport(_Report):
    """What a load did. It prints as a table.

    Attributes:
        missing_keys: keys of the state dict that the checkpoint does not have, and that were allowed to be missing.
        remarks: on the coordinator, which keys of all ranks were missing, and which keys of the checkpoint no rank has
            asked for, in words.
        shared_nbytes: the part of ``nbytes`` that other ranks read and sent to this one.
        unverified_nbytes: bytes that this rank read without comparing them with a checksum.
    """

    kind = "load"

    missing_keys: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    shared_nbytes: int = 0
    unverified_nbytes: int = 0
    _find_unread_keys: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def unread_keys(self) -> tuple[str, ...]:
        """Keys of the checkpoint that the state dict did not ask for. They are looked up at the first access, because
        there may be many."""
        return self._find_unread_keys()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "unread_keys": self.unread_keys, "_find_unread_keys": tuple}

    def __str__(self) -> str:
        remarks = self.remarks
        if self.missing_keys and not remarks:  # what this rank knows without the others
            remarks = (f"it does not have {len(self.missing_keys)} of the keys: {listed(self.missing_keys)}",)
        return self._lines(
            f"loaded {self.checkpoint_id} (rank {self.rank} of {self.world_size}): {self.items} items, "
            f"{sizes_in_words(self.nbytes)} in {self.seconds:.3f} s"
            f"{f', {sizes_in_words(self.shared_nbytes)} of it by way of other ranks' if self.shared_nbytes else ''}"
            f"{f', {sizes_in_words(self.unverified_nbytes)} not verified' if self.unverified_nbytes else ''}"
        ) + "".join(f"\n  keys: {each}" for each in remarks)


def listed(names: Iterable[object], most: int = 8, between: str = ", ") -> str:
    """``"a, b and 3 more"``: the first of some names, for messages."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + rest


def sizes_in_words(nbytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    power = 0
    while nbytes >= 1024 and power < 4:
        nbytes /= 1024
        power += 1
    return f"{nbytes:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# The report beside the checkpoint.


class PlanReport(msgspec.Struct, frozen=True):
    """How the save came by its plan.

    Attributes:
        outcome: ``built``, ``reused`` or ``rebuilt``.
        reason: why, in words.
        changes: ``None`` if there was nothing to compare with.
    """

    outcome: str = "built"
    reason: str = ""
    changes: StructureDiff | None = None


class Ranks(msgspec.Struct, frozen=True):
    """One column for each thing that is known of each rank. Row ``i`` of all columns is about rank ``rank[i]``.

    Attributes:
        rank: in the group that saved.
        node: place in ``nodes`` of the report.
        plan_seconds: from the call until all ranks had agreed. The rank that came last has the least.
        stage_seconds: how long it copied its data, in an async save.
        write_seconds: how long it wrote, without the wait for others.
        nbytes, files: what it wrote.
        how: place in ``ways`` of the report.
    """

    rank: tuple[_Count, ...] = ()
    node: tuple[_Count, ...] = ()
    plan_seconds: tuple[_Seconds, ...] = ()
    stage_seconds: tuple[_Seconds, ...] = ()
    write_seconds: tuple[_Seconds, ...] = ()
    nbytes: tuple[_Count, ...] = ()
    files: tuple[_Count, ...] = ()
    how: tuple[_Count, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)


class Modules(msgspec.Struct, frozen=True):
    """The bytes of the checkpoint by module, as a tree. Row 0 is the whole.

    Attributes:
        name: a part of FQNs, such as ``layers`` or ``attention.wq.weight``.
        parent: place of the module around it, always an earlier row; -1 for row 0.
        nbytes: bytes in the files. If those of a module are more than those of its parts, the rest are parts that are
            too small to be listed.
    """

    name: tuple[str, ...] = ("",)
    parent: tuple[int, ...] = (-1,)
    nbytes: tuple[_Count, ...] = (0,)


class Straggler(msgspec.Struct, frozen=True):
    """A rank that others waited for.

    Attributes:
        phase: ``plan`` (it came late), ``stage`` or ``write``.
        seconds: how long it took; in ``plan`` how much later than the median rank it came.
        median_seconds: how long the median rank took; 0 in ``plan``.
    """

    rank: int
    node: str
    phase: str
    seconds: float
    median_seconds: float


class LoadBefore(msgspec.Struct, frozen=True):
    """A load that the coordinator has made since its last report of a save: the job has gone on from there.

    Attributes:
        checkpoint: what was loaded.
        loaded_at_seconds: when that was over, in seconds since 1970, by the clock of the coordinator.
        seconds: wall time on the coordinator.
        nbytes: what the coordinator has read.
        phases: as the coordinator saw them.
        waits: what the log said about ranks that all others waited for.
    """

    checkpoint: str = ""
    loaded_at_seconds: _Seconds = 0.0
    seconds: _Seconds = 0.0
    nbytes: _Count = 0
    phases: tuple[PhaseReport, ...] = ()
    waits: tuple[str, ...] = ()


class SavedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        version: of this form.
        checkpoint: the directory that was saved to.
        save_id: the id in ``.metadata``. A file with another id is the report of another save.
        saved_at_seconds: when it was committed, in seconds since 1970, by the clock of the coordinator.
        seconds: wall time on the coordinator, from the call until the commit.
        blocked_seconds: of them, how long training stood still on the coordinator; ``None`` in reports of earlier
            versions.
        world_size, coordinator_rank: of the group that saved.
        is_async: whether it was written while training went on.
        total_nbytes: what all ranks wrote together.
        versions: of robust_dcp, torch and Python.
        phases: as the coordinator saw them.
        plan: how the save came by its plan.
        nodes: host names.
        ways: how ranks wrote, such as ``["direct"]`` or ``["buffered: the file system has no direct I/O"]``.
        ranks: what is known of each rank. A rank that sent nothing has no row.
        stragglers: the slowest first.
        waits: what the log said about ranks that all others waited for.
        fallbacks: what the save went without, such as the index.
        identical_to: as in :class:`SaveReport`.
        loads: the last loads before it, the oldest first. A load leaves no file: its checkpoint may be somebody else's.
        modules: the bytes of the checkpoint by module; ``None`` if they are not known.
    """

    save_id: Annotated[str, Meta(pattern="^[0-9a-f-]{16,64}$")]
    version: Literal[1] = VERSION
    checkpoint: str = ""
    saved_at_seconds: _Seconds = 0.0
    seconds: _Seconds = 0.0
    blocked_seconds: _Seconds | None = None
    world_size: _Count = 1
    coordinator_rank: int = 0
    is_async: bool = False
    total_nbytes: _Count = 0
    versions: dict[str, str] = {}
    phases: tuple[PhaseReport, ...] = ()
    plan: PlanReport = PlanReport()
    nodes: tuple[str, ...] = ()
    ways: tuple[tuple[str, ...], ...] = ()
    ranks: Ranks = Ranks()
    stragglers: tuple[Straggler, ...] = ()
    waits: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    identical_to: str = ""
    loads: tuple[LoadBefore, ...] = ()
    modules: Modules | None = None


def encode_report(report: SavedReport) -> bytes:
    """The bytes of the file: JSON in one line."""
    return msgspec.json.encode(report) + b"\n"


def decode_report(data: bytes) -> SavedReport:
    """Read what :func:`encode_report` made.

    Raises:
        ValueError: ``data`` is no report, or one whose parts do not fit together. The message says what is wrong.
    """
    try:
        report = from_json(data, SavedReport)
    except Undecodable as error:
        raise ValueError(f"it is no report of a save that this robust_dcp knows: {error}") from None
    _check(report)
    return report


def _check(report: SavedReport) -> None:
    """Make sure that columns are even and places exist."""
    ranks, modules = report.ranks, report.modules
    for name in ranks.__struct_fields__:
        n_rows = len(getattr(ranks, name))
        _expect(n_rows == len(ranks), f"ranks.{name} has {n_rows} rows, and ranks.rank {len(ranks)}")
    _expect(len(ranks) <= MAX_RANKS, f"it has {len(ranks)} ranks")
    _expect(len(set(ranks.rank)) == len(ranks), "a rank has two rows")
    _expect(max(ranks.node, default=-1) < len(report.nodes), "a rank is on a node without a name")
    _expect(max(ranks.how, default=-1) < len(report.ways), "a rank wrote in a way that is not listed")
    if modules is not None:
        n_modules = len(modules.name)
        _expect(n_modules > 0 and n_modules == len(modules.parent) == len(modules.nbytes), "modules has uneven columns")
        _expect(modules.parent[0] == -1, "the first module is not the whole")
        for row, parent in enumerate(modules.parent[1:], 1):
            _expect(0 <= parent < row, f"module {row} is in module {parent}, which does not come before it")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(f"it is no report of a save: {otherwise}")


def shortened(text: str, length: int = _LENGTH) -> str:
    """``text``, with ``…`` for what is longer than ``length`` characters, and as UTF-8 can hold it."""
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= length else f"{whole[: length - 1]}…"
