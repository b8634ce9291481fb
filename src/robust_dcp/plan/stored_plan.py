"""A plan as a file of the checkpoint that was saved by it, so that a job that resumes need not plan again.

Owns the format (docs/formats.md) and which checkpoints this process has loaded. The file is advice and nothing more: it
is not part of the checkpoint, stock readers do not know it, and what it says counts only if in the next save every
rank shows the signature that stands in it. One that is damaged, or of another group, is passed over.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import OrderedDict

import msgspec
import numpy as np

from robust_dcp.comm import combined_signature, decode, encode
from robust_dcp.comm.bundle import Bundler, open_bundle
from robust_dcp.comm.wire import body_of
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, GroupKey, StoredSections
from robust_dcp.plan.global_plan import plan_of_kept
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import coordinator_plan_of
from robust_dcp.plan.rank_plan import RankPlan, checks_of, pack_places, pack_some, place_items, unpack_places
from robust_dcp.plan.structure import ItemKind, StructureMessage, TableDecoder
from robust_dcp.plan.structure.signature import SIGNATURE_NBYTES
from robust_dcp.storage.files.disk import Disk, PosixDisk
from robust_dcp.storage.files.paths import PLAN_NAME
from robust_dcp.storage.records.checksum import crc32

__all__ = ["LOADED", "LoadedCheckpoints", "encode_plan", "read_plan"]

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sII")
"""Magic, length of the index, its CRC-32."""

_MAGIC = b"RDCPPLN2"
_MAX_INDEX_NBYTES = 64 << 20
_ITEM_NBYTES = 512  # in a structure, much more than any takes
_FACTOR = 64  # by which zstandard makes structures smaller, and more


class _Index(msgspec.Struct, frozen=True):
    """What follows the head; sections follow it: the share of each rank, then the structures of all, in a bundle or
    several; what a later bundle says of a rank replaces what an earlier one says.

    Attributes:
        group: the global ranks of the group.
        signatures: 16 bytes for each rank.
        nbytes, crc32: of each section.
    """

    group: tuple[int, ...]
    signatures: bytes
    nbytes: tuple[int, ...]
    crc32: tuple[int, ...]


class _Share(msgspec.Struct, frozen=True):
    """What one rank writes and compares: bits over its items, as in ``RankPlanMessage``."""

    kept: bytes
    common_objects: bytes
    replicated: bytes = b""
    n_classes: int = 1


def encode_plan(group: GroupKey, plan: CoordinatorPlan) -> bytes:
    """The bytes of the file; on the coordinator. Costs little for a plan that was encoded before, or patched."""
    shares, structures = plan.stored.get(lambda: _sections(plan))
    sections = (*shares, *structures)
    index = encode(
        _Index(
            group=group,
            signatures=b"".join(plan.signatures),
            nbytes=tuple(map(len, sections)),
            crc32=tuple(map(crc32, sections)),
        )
    )
    return b"".join((_HEAD.pack(_MAGIC, len(index), crc32(index)), index, *sections))


def _sections(plan: CoordinatorPlan) -> StoredSections:
    before = None if plan.stored_before is None else plan.stored_before.value
    ranks = range(len(plan.tables)) if before is None else plan.changed_ranks
    shares = [b""] * len(plan.tables) if before is None else list(before.shares)
    bundler = Bundler(StructureMessage)
    for rank in ranks:
        table = plan.tables[rank]
        unknown = np.zeros(int((table.kinds == ItemKind.BYTES).sum()), dtype=np.uint64)
        bundler.add(rank, StructureMessage.of(table, unknown, plan.context))
        shares[rank] = encode(
            _Share(
                kept=pack_places(plan.kept[rank], len(table)),
                common_objects=pack_places(plan.common_objects[rank], len(table)),
                replicated=pack_some(plan.replicated[rank], len(table)) if plan.replicated else b"",
                n_classes=plan.n_classes,
            )
        )
    return StoredSections(tuple(shares), (*(() if before is None else before.structures), bundler.encode()))


def read_plan(
    directory: str, group: GroupKey, rank: int, local: LocalStructure, *, leads: bool, disk: Disk | None = None
) -> CachedPlan | None:
    """The plan that lies in a checkpoint, if it is for this group and this rank's structure.

    Args:
        directory: of the checkpoint.
        rank: within ``group``.
        local: this rank's structure.
        leads: whether this rank is the coordinator, and needs all structures.

    Returns:
        ``None`` if there is none, or it is for others.

    Raises:
        RobustCheckpointError: the file cannot be read, or is damaged.
    """
    disk = PosixDisk() if disk is None else disk
    path = os.path.join(directory, PLAN_NAME)
    if local.files is None or not disk.exists(path):
        return None
    file = _PlanFile(disk, path)
    try:
        index = file.index
        mine = index.signatures[rank * SIGNATURE_NBYTES : (rank + 1) * SIGNATURE_NBYTES]
        if index.group != group or mine != local.signature.value:
            return None
        signatures = tuple(
            index.signatures[at : at + SIGNATURE_NBYTES] for at in range(0, len(index.signatures), SIGNATURE_NBYTES)
        )
        coordinator = _coordinator_plan(file, local, signatures) if leads else None
        share = decode(file.section(rank), _Share, max_nbytes=_share_nbytes(len(local.table)))
    finally:
        file.close()
    kept = unpack_places(share.kept, len(local.table))
    return CachedPlan(
        plan_id=combined_signature(signatures),
        signature=local.signature.value,
        table=local.table,
        rank_plan=RankPlan(
            kept=kept,
            common_objects=unpack_places(share.common_objects, len(local.table)),
            placements=place_items(local.table, kept, files=local.files, layout=local.layout),
            checks=checks_of(share.replicated, share.n_classes, b"", len(local.table)),
        ),
        variable_places=None,
        coordinator=coordinator,
        loaded_from=directory,
    )


def _coordinator_plan(file: _PlanFile, local: LocalStructure, signatures: tuple[bytes, ...]) -> CoordinatorPlan:
    n_ranks = len(signatures)
    messages: dict[int, StructureMessage] = {}
    for number in range(n_ranks, len(file.index.nbytes)):
        bundle = file.section(number)
        # What is compressed may be a bomb: first of all it must not announce more than so many ranks can have to say.
        body_of(bundle, max_nbytes=max(_FACTOR * len(bundle), n_ranks * _ITEM_NBYTES * (len(local.table) + 1_000)))
        messages |= open_bundle(bundle, StructureMessage)
    if sorted(messages) != list(range(n_ranks)):
        raise ExchangeError(f"it has the structures of ranks {sorted(messages)[:16]}, not of {n_ranks} ranks")
    decoder = TableDecoder()
    tables = [decoder.decode(messages[rank]) for rank in range(n_ranks)]
    shares = [
        decode(file.section(rank), _Share, max_nbytes=_share_nbytes(len(table))) for rank, table in enumerate(tables)
    ]
    kept = [unpack_places(share.kept, len(table)) for share, table in zip(shares, tables, strict=True)]
    return coordinator_plan_of(
        plan_of_kept(tables, kept),
        signatures,
        local.context.encode(),
        files=local.files,
        layout=local.layout,
        verify_replicas=local.verify_replicas,
    )


def _share_nbytes(n_items: int) -> int:
    """The most that a rank's share of ``n_items`` items takes: two bits for each."""
    return n_items // 4 + 1_000


class _PlanFile:
    """The file, opened: its index, and its sections as they are asked for."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file = disk.open_read(path)
        try:
            self.index, self._starts = self._read_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._disk.close(self._file)

    def section(self, number: int) -> bytes:
        data = self._read(self._starts[number], self.index.nbytes[number])
        if crc32(data) != self.index.crc32[number]:
            raise self._damaged(f"section {number} does not have its CRC-32")
        return data

    def _read_index(self) -> tuple[_Index, list[int]]:
        head = self._read(0, _HEAD.size)
        magic, nbytes, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or nbytes > min(_MAX_INDEX_NBYTES, self._disk.size(self._path)):
            raise self._damaged(f"it begins with {head!r}")
        data = self._read(_HEAD.size, nbytes)
        if crc32(data) != checksum:
            raise self._damaged("the index does not have its CRC-32")
        index = decode(data, _Index, max_nbytes=_MAX_INDEX_NBYTES)
        ranks = len(index.group)
        n_sections = len(index.nbytes)
        if len(index.signatures) != ranks * SIGNATURE_NBYTES or not ranks < n_sections == len(index.crc32):
            raise self._damaged(f"the index is not for {ranks} ranks")
        starts = np.cumsum([_HEAD.size + nbytes, *index.nbytes]).tolist()
        if starts[-1] != self._disk.size(self._path):
            raise self._damaged(f"it has {self._disk.size(self._path)} bytes, not {starts[-1]}")
        return index, starts

    def _read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        found = self._disk.pread_into(self._file, buffer, offset)
        if found != nbytes:
            raise self._damaged(f"it ends after {offset + found} bytes")
        return bytes(buffer)

    def _damaged(self, what: str) -> RobustCheckpointError:
        return RobustCheckpointError(f"{self._path} is not used: {what}; the checkpoint itself is not concerned")


class LoadedCheckpoints:
    """The checkpoints that this process has loaded last: where plans may lie for what it will save.

    Args:
        max_entries: how many of them are looked at.
    """

    def __init__(self, max_entries: int = 4) -> None:
        self._max_entries = max_entries
        self._directories: OrderedDict[str, None] = OrderedDict()

    def add(self, directory: str) -> None:
        """A checkpoint has been loaded from ``directory``."""
        self._directories[directory] = None
        self._directories.move_to_end(directory)
        while len(self._directories) > self._max_entries:
            self._directories.popitem(last=False)

    def clear(self) -> None:
        self._directories.clear()

    def find_plan(self, group: GroupKey, rank: int, local: LocalStructure, *, leads: bool) -> CachedPlan | None:
        """The plan for this rank's structure that lies in the latest of these checkpoints; each serves once."""
        for directory in reversed(tuple(self._directories)):
            try:
                plan = read_plan(directory, group, rank, local, leads=leads)
            except Exception as error:  # the file is advice: whatever is wrong with it costs a plan, and never a save
                logger.warning("planning anew, not by %s: %s", os.path.join(directory, PLAN_NAME), error)
                self._directories.pop(directory, None)
                continue
            if plan is not None:
                self._directories.pop(directory, None)
                return plan
        return None


LOADED = LoadedCheckpoints()
"""What this process has loaded."""
