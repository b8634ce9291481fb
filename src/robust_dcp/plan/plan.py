"""The plan of one save, as its coordinator makes it from the items of all ranks, and the share of it that a rank holds.

A plan follows from the structures alone: every coordinator makes the same plan of the same structures, also after a
restart. So each change makes a whole new plan. The places of items follow from the plan too: the coordinator and each
rank compute the same, so places need not be sent.

A plan is stored in the index of each checkpoint that is saved by it, so that a resumed job need not plan again. Each
rank makes its piece of ``.metadata`` from its share in each save. The head, and what of the index follows from the
plan, is encoded once, and kept with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from robust_dcp.comm.messages import Bundle
from robust_dcp.decoding import from_msgpack
from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words
from robust_dcp.items import ItemKind, Items, ItemsDecoder, ItemsMessage, distinct
from robust_dcp.plan.conflicts import is_compared
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from robust_dcp.plan.save_report import module_sizes
from robust_dcp.plan.state_dict import SIGNATURE_NBYTES, StructureSignature, difference_of_contexts
from robust_dcp.report import Modules, PlanReport
from robust_dcp.storage.committing.save import MetadataToPublish
from robust_dcp.storage.files.paths import METADATA_NAME, mark_of
from robust_dcp.storage.index.form import (
    BLOCKS_AT,
    Column,
    IndexFile,
    IndexTemplate,
    Section,
    block_nbytes,
    encode_block,
    fit_of,
)
from robust_dcp.storage.layouts.places import TORCH, Layout, Placements
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.metadata.pickled import MetadataHead, Names, StoredRows, encode_piece, piece_nbytes, used_sizes

Rows = npt.NDArray[np.intp]
Int64 = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_ITEM_NBYTES: Final = 512  # an upper bound for one item in a stored structure; real items take much less
_SOME_MARK: Final = "0" * 16  # all are as long
_FACTOR: Final = 64  # structures usually compress less than this


class LocalStructure(msgspec.Struct, frozen=True, eq=False):
    """What one rank contributes to the plan: the structure of its state dict, as the planner describes it.

    Attributes:
        items: what it holds.
        context: what else the plan depends on, encoded.
        signature: the signature of both.
        files: how many files hold items of fixed size.
        lowest_rank: whether replicas go to the lowest rank that holds them.
        layout: the layout of the files.
        digests_of: gives uint64 digests of the contents of some items, from their places; 0 for one that cannot be
            read. ``None`` if nothing is compared.
    """

    items: Items
    context: bytes
    signature: StructureSignature
    files: int
    lowest_rank: bool
    layout: Layout = TORCH
    digests_of: Callable[[Rows], npt.NDArray[np.uint64]] | None = None

    def to_message(self) -> ItemsMessage:
        """The message to the coordinator with the structure, and digests of what is compared."""
        digests = b""
        if self.digests_of is not None:
            digests = self.digests_of(np.flatnonzero(is_compared(self.items))).astype("<u8").tobytes()
        return ItemsMessage.of(self.items, self.context, self.signature.value, digests)

    def place(self, share: Share) -> Placements:
        """The places of the items that this rank writes.

        Raises:
            ExchangeError: ``share`` is for another number of items.
        """
        if share.n_items != len(self.items):
            raise ExchangeError(f"a plan for {share.n_items} items came for a state dict of {len(self.items)}")
        return self.layout.place(self.layout.measure(self.items, share.kept), self.files)

    def pieces(
        self, share: Share, placements: Placements, files: Sequence[str], variable_places: Int64
    ) -> tuple[bytes, bytes]:
        """This rank's pieces of ``.metadata`` and of the index.

        Args:
            files: the names of its files.
            variable_places: int64 ``[v, 2]``, offset and length of its items of variable size.

        Raises:
            ExchangeError: they do not fit where the plan has put them.
        """
        rows = _stored_rows(self.items, share.kept, share.name_numbers, placements)
        piece = encode_piece(rows, share.n_names, files, variable_places)
        block = encode_block(rows, share.jumps, variable_places)
        if (len(piece), len(block)) != (share.piece_nbytes, share.block_nbytes):
            raise ExchangeError(
                f"this rank's pieces of .metadata and of the index have {len(piece)} and {len(block)} bytes, and the "
                f"plan has {share.piece_nbytes} and {share.block_nbytes} for them"
            )
        return piece, block


class Share(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What one rank writes by a plan: in memory, in the coordinator's reply, and in an index.

    Attributes:
        plan_id: the identity of the plan, 16 bytes. It is a hash of what the plan was made for and of all that was
            decided. So ranks that have the same identity have made the same decisions, whichever coordinator or version
            made them.
        n_items: how many items the rank has.
        bits: one bit for each of them, whether the rank writes it; little-endian.
        total_nbytes: bytes of the files of all ranks, without items of variable size.
        n_names: how many names the checkpoint has.
        names: int32 ``[r, 2]``, little-endian: the places of written items whose name does not follow that of the one
            before, and the numbers of these names among all.
        piece_at, piece_nbytes: where in ``.metadata`` the rank's piece lies.
        block_at, block_nbytes: where in the index its block lies.
    """

    plan_id: bytes
    n_items: int
    bits: bytes
    total_nbytes: int
    n_names: int
    names: bytes
    piece_at: int
    piece_nbytes: int
    block_at: int
    block_nbytes: int

    @cached_property
    def kept(self) -> Rows:
        """The places of the items that the rank writes, ascending."""
        if len(self.bits) != (self.n_items + 7) // 8:
            raise ExchangeError(f"a plan for {len(self.bits)} x 8 items came for a state dict of {self.n_items}")
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=self.n_items, bitorder="little"))

    @property
    def jumps(self) -> npt.NDArray[np.int32]:
        """``names`` as numbers."""
        return np.frombuffer(self.names, dtype="<i4").reshape(-1, 2)

    @property
    def name_numbers(self) -> npt.NDArray[np.int32]:
        """For each of the items that the rank writes, the number of its name among all names."""
        places, numbers = self.jumps.T
        lengths = np.diff(places, append=len(self.kept))
        ahead: npt.NDArray[np.int32] = np.repeat(numbers - places, lengths)
        return (ahead + np.arange(len(self.kept))).astype(np.int32)


class PlanReply(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank about a new plan.

    Attributes:
        share: what the rank writes.
        how: ``built`` (the coordinator had no plan of this kind), ``rebuilt`` (it no longer fits), or ``reused`` (the
            coordinator has a plan for these structures, though not all ranks have offered it), and why. The keys that
            differ from the last plan are bounded.
        differing: the values that differ between ranks, by key (bounded), with all ranks that hold them.
    """

    share: Share
    how: PlanReport
    differing: dict[str, tuple[int, ...]] = {}


class Plan(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The plan of all ranks, which only the coordinator has.

    Attributes:
        group: the global ranks of the group.
        items, signatures: the items of each rank, and the signature of its structure.
        shares: what each rank writes.
        nbytes: bytes of tensor data that all ranks write together.
        context: what else the plan depends on, encoded; the same on all ranks.
        metadata: makes ``.metadata`` and the index.
        is_contested: whether several ranks claim the main replica of some chunk.
    """

    group: tuple[int, ...]
    items: tuple[Items, ...]
    signatures: tuple[bytes, ...]
    shares: tuple[Share, ...]
    nbytes: int
    context: bytes
    metadata: PlannedMetadata
    is_contested: bool

    @classmethod
    def of(cls, decided: GlobalPlan, group: Sequence[int], signatures: Sequence[bytes], local: LocalStructure) -> Plan:
        """The plan of these decisions, with the places of all items.

        Args:
            decided: which rank writes what.
            signatures: the signature of each rank's structure.
            local: the coordinator's own structure, for the options that all ranks share.
        """
        rows = np.empty_like(decided.written)
        rows[decided.place] = decided.written  # so they are rank after rank
        of_ranks = list(pairwise(np.cumsum([0, *map(np.count_nonzero, decided.kept)]).tolist()))
        placements = _placements_of_all(decided, rows, of_ranks, local)
        bits = [np.packbits(kept, bitorder="little").tobytes() for kept in decided.kept]
        placed: dict[int, bytes] = {}  # many ranks share one object
        digest = hashlib.blake2b(digest_size=SIGNATURE_NBYTES, person=b"rdcp-plan")
        for signature, of_rank, places in zip(signatures, bits, placements, strict=True):
            digest.update(signature + len(of_rank).to_bytes(8, "little") + of_rank)
            if id(places) not in placed:
                columns = hashlib.blake2b(digest_size=SIGNATURE_NBYTES)
                for column in (places.file, places.offset, places.nbytes, np.array(places.head_nbytes, dtype=np.int64)):
                    columns.update(len(column).to_bytes(8, "little") + column.tobytes())
                placed[id(places)] = columns.digest()
            digest.update(placed[id(places)])
        plan_id = digest.digest()
        total_nbytes = sum(sum(each.file_nbytes) for each in placements)
        names = _names_of(decided)
        head = MetadataHead(names)
        piece_at, block_at, shares = len(head.data), BLOCKS_AT, list[Share]()
        nbytes_of_size = dict[tuple[int, ...], int]()
        for rank, (begin, end) in enumerate(of_ranks):
            numbers = decided.items.name[rows[begin:end]]
            stored = _stored_rows(decided.items, rows[begin:end], numbers, placements[rank])
            files = local.layout.file_names(rank, placements[rank].head_nbytes, _SOME_MARK)
            sizes = [stored.sizes[each] for each in used_sizes(stored).tolist()]
            jumps = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
            share = Share(
                plan_id,
                n_items=len(decided.ranks[rank]),
                bits=bits[rank],
                total_nbytes=total_nbytes,
                n_names=len(decided.items.names),
                names=np.column_stack([jumps, numbers[jumps]]).astype("<i4").tobytes(),
                piece_at=piece_at,
                piece_nbytes=piece_nbytes(stored, files, nbytes_of_size),
                block_at=block_at,
                block_nbytes=block_nbytes(end - begin, len(jumps), len(sizes), sum(map(len, sizes))),
            )
            piece_at, block_at = piece_at + share.piece_nbytes, block_at + share.block_nbytes
            shares.append(share)
        return cls(
            group=tuple(group),
            items=decided.ranks,
            signatures=tuple(signatures),
            shares=tuple(shares),
            nbytes=int(decided.items.nbytes[decided.written].sum()),
            context=local.context,
            metadata=PlannedMetadata(decided, names, head, placements, shares, local.layout),
            is_contested=bool(len(decided.contested)),
        )

    @cached_property
    def sections(self) -> Mapping[str, Section]:
        """The sections that hold this plan in the index of each checkpoint that is saved by it."""
        messages = [ItemsMessage.of(items, self.context, signature=b"") for items in self.items]
        shares = [msgspec.msgpack.encode(share) for share in self.shares]
        values: dict[str, Any] = {
            "ranks": np.array(self.group, dtype=np.int64),
            "signatures": b"".join(self.signatures),
            "shares": b"".join(shares),
            "share_ends": np.cumsum(list(map(len, shares)), dtype=np.int64),
            "structures": Bundle.of(ItemsMessage, dict(enumerate(messages))).encode(),
        }
        return {name: Section.of(name, each) for name, each in values.items()}

    @property
    def memory_nbytes(self) -> int:
        """Roughly how much memory this takes."""
        stored = sum(len(section.data) for section in vars(self).get("sections", {}).values())
        return self._columns_nbytes + self.metadata.nbytes + stored

    @cached_property
    def _columns_nbytes(self) -> int:
        # Columns that ranks share count once.
        columns = {id(column): column.nbytes for items in self.items for column in items.columns}
        return sum(columns.values()) + sum(len(share.bits) for share in self.shares)


def structures_of_all(
    messages: Sequence[ItemsMessage | None], offered: Plan | None, local: LocalStructure
) -> tuple[list[Items], list[bytes]]:
    """The items of each rank, and the signatures of their structures, from what ranks have sent to the coordinator.

    Args:
        messages: what each rank sent; ``None`` from ranks that have the structure in ``offered``.
        offered: the plan that the coordinator has offered.
        local: the coordinator's own structure.

    Raises:
        ExchangeError: a message is malformed, or missing.
        PlanConflict: ranks have other options or versions.
    """
    silent = [rank for rank, message in enumerate(messages) if message is None]
    if silent and offered is None:
        raise ExchangeError(
            f"{ranks_in_words(silent)} did not send the structure, and the coordinator has no plan that holds it; "
            "save again",
            phase="structures",
            ranks=silent,
        )
    differences: dict[str, list[int]] = defaultdict(list)  # the coordinator plans with its own options and versions
    for rank, message in enumerate(messages):
        theirs = message.context if message is not None else local.context if offered is None else offered.context
        if theirs != local.context:
            differences[difference_of_contexts(local.context, theirs)].append(rank)
    if differences:
        words = "; ".join(f"on {ranks_in_words(ranks)}: {what}" for what, ranks in differences.items())
        raise PlanConflict(
            f"ranks save with other options or versions than the coordinator, {words}. Pass the same to all ranks",
            ranks=sorted(rank for ranks in differences.values() for rank in ranks),
        )
    known_items, known_signatures = ((), ()) if offered is None else (offered.items, offered.signatures)
    decoder = ItemsDecoder()
    return (
        [known_items[rank] if each is None else decoder.decode(each) for rank, each in enumerate(messages)],
        [known_signatures[rank] if each is None else each.signature for rank, each in enumerate(messages)],
    )


def stored_plan(
    file: IndexFile, group: Sequence[int], rank: int, local: LocalStructure, *, leads: bool
) -> tuple[Share, Plan | None] | None:
    """This rank's share of the plan in the index of a checkpoint, and for the coordinator the plan of all ranks.

    Args:
        rank: this process's rank in ``group``.
        local: this rank's structure.
        leads: whether this rank is the coordinator.

    Returns:
        ``None`` if there is no plan, or it is for another group or structure.

    Raises:
        RobustCheckpointError: the index is damaged.
    """
    n_ranks = file.places["signatures"][1] // SIGNATURE_NBYTES
    if n_ranks != len(group) or Column(file, "ranks").rows(0, n_ranks).tolist() != list(group):
        return None
    signatures = Column(file, "signatures")
    if signatures.rows(rank * SIGNATURE_NBYTES, (rank + 1) * SIGNATURE_NBYTES).tobytes() != local.signature.value:
        return None
    n_items, ends = len(local.items), Column(file, "share_ends")
    begin, end = ends[rank - 1] if rank else 0, ends[rank]
    if end - begin > 9 * n_items + 1_000:  # it has a bit and a name for each item; do not read what cannot be that
        raise ExchangeError(f"it has {end - begin} bytes for the share of rank {rank}, which has {n_items} items")
    try:
        share = from_msgpack(Column(file, "shares").rows(begin, end).tobytes(), Share)
    except ValueError as error:
        raise ExchangeError(f"the share of rank {rank} cannot be decoded: {error}") from None
    if share.n_items != n_items or len(share.plan_id) != SIGNATURE_NBYTES:
        raise ExchangeError(f"the share of rank {rank} is for {share.n_items} items, not {n_items}")
    if not leads:
        return share, None
    bundle = Column(file, "structures").rows().tobytes()
    # Compressed data may be a bomb. So it may announce no more than this many ranks can need.
    max_nbytes = max(_FACTOR * len(bundle), n_ranks * _ITEM_NBYTES * (n_items + 1_000))
    messages = Bundle.decode(bundle, ItemsMessage).open(ItemsMessage, max_nbytes=max_nbytes)
    if sorted(messages) != list(range(n_ranks)):
        raise ExchangeError(f"it has the structures of ranks {sorted(messages)[:16]}, not of {n_ranks} ranks")
    decoder = ItemsDecoder()
    items = [decoder.decode(messages[each]) for each in range(n_ranks)]
    of_all = signatures.rows().tobytes()
    of_ranks = [of_all[at : at + SIGNATURE_NBYTES] for at in range(0, len(of_all), SIGNATURE_NBYTES)]
    # The plan follows from the structures, so it is made again. Its identity shows that all decisions are the same.
    plan = Plan.of(make_global_plan(items, lowest_rank=local.lowest_rank), group, of_ranks, local)
    if plan.shares[rank] != share:
        raise ExchangeError("what it says of the ranks is not what was decided")
    return share, plan


def _placements_of_all(
    plan: GlobalPlan, rows: Rows, of_ranks: Sequence[tuple[int, int]], local: LocalStructure
) -> tuple[Placements, ...]:
    """The places of the items that each rank writes. Each rank computes its own by :meth:`LocalStructure.place`.

    Args:
        rows: the rows of the plan's items that are written, rank after rank.
        of_ranks: where among these the rows of each rank begin and end.
    """
    layout = local.layout
    measures = layout.measure(plan.items, rows)
    # Ranks that write shards of the same sizes have the same places, so compute them once.
    placed: dict[bytes, Placements] = {}
    placements = []
    for begin, end in of_ranks:
        key = measures[begin:end].tobytes()
        if key not in placed:
            placed[key] = layout.place(measures[begin:end], local.files)
        placements.append(placed[key])
    return tuple(placements)


# What a plan writes into ``.metadata`` and its index.

_NO_INDEX: Final = "the checkpoint gets no index, so a load takes longer: %s"


class PlannedMetadata:
    """The metadata of all checkpoints that one plan writes, without the pieces that each rank makes.

    What the index has for the whole job is compiled at its first use. So the other ranks get the first plan sooner, and
    write in the meantime.

    Args:
        plan: the global plan. It is dropped after it has been compiled.
        names, head: all names, and the head of ``.metadata``.
        placements: for each rank the places of its kept items.
        shares: what each rank writes.
        layout: the layout that made the placements.
    """

    def __init__(
        self,
        plan: GlobalPlan,
        names: Names,
        head: MetadataHead,
        placements: Sequence[Placements],
        shares: Sequence[Share],
        layout: Layout,
    ) -> None:
        self._head = head
        self._head_nbytes = [placement.head_nbytes for placement in placements]
        self._tail_at = len(head.data) + sum(share.piece_nbytes for share in shares)
        self._layout = layout
        self._index: IndexTemplate | None = None
        self._uncompiled: tuple[GlobalPlan, Names, Sequence[Share]] | None = (plan, names, shares)
        self._names, of_written = names.names, plan.items.name[plan.written]
        of_rows = np.empty_like(of_written)
        of_rows[plan.place] = of_written  # rank after rank
        nbytes = np.concatenate([placement.nbytes for placement in placements])
        self._variable = of_rows[nbytes < 0]  # the names of items of variable size
        self._nbytes_of_names = np.zeros(len(self._names), dtype=np.int64)  # without these
        np.add.at(self._nbytes_of_names, of_rows, np.maximum(nbytes, 0))
        self._modules: Modules | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes are kept for later saves."""
        return len(self._head.data) + (0 if self._index is None else self._index.nbytes)

    def encode(
        self, pieces: Sequence[tuple[int, int]], storage_meta: StorageMeta, kept_plan: Mapping[str, Section] | None
    ) -> MetadataToPublish:
        """What the ranks have not written of ``.metadata`` and the index, and the data files of all ranks.

        Args:
            pieces: for each rank the length of its piece in bytes, and its CRC-32.
            storage_meta: goes into the file unchanged.
            kept_plan: the sections of the index that hold the plan; ``None`` if there is to be no index.
        """
        mark = mark_of(storage_meta.save_id or "")
        names = list[str]()
        for rank, heads in enumerate(self._head_nbytes):
            names += self._layout.file_names(rank, heads, mark)
        tail = self._head.tail(pieces, storage_meta)
        index: Sequence[tuple[int, bytes]] = ()
        if kept_plan is not None:
            try:
                if self._uncompiled is not None:
                    uncompiled, self._uncompiled = self._uncompiled, None
                    self._index = _index_of(*uncompiled, list(map(len, self._head_nbytes)))
                if self._index is not None:
                    fit = fit_of(self._tail_at + len(tail), tail)
                    index = self._index.encode(fit, names, storage_meta, kept_plan)
            except (ValueError, TypeError) as error:  # a name is too long, or another torch has more in its StorageMeta
                logger.warning(_NO_INDEX, error)
        return MetadataToPublish(((0, self._head.data), (self._tail_at, tail)), frozenset(names), index)

    def for_stock(self, items: Sequence[Items], shares: Sequence[Share]) -> Metadata:
        """DCP's own object, for storage writers other than ours. The writer fills in ``storage_data``.

        Args:
            items, shares: of all ranks.
        """
        metadata = decode_metadata(self._head.data + self._head.tail((), None), METADATA_NAME)
        for of_rank, share in zip(items, shares, strict=True):
            columns = (of_rank.name[share.kept], of_rank.offset[share.kept], of_rank.size[share.kept])
            for name, offset, size in zip(*(column.tolist() for column in columns), strict=True):
                entry = metadata.state_dict_metadata[of_rank.names[name]]
                if isinstance(entry, TensorStorageMetadata):
                    chunk = torch.Size(of_rank.sizes[offset]), torch.Size(of_rank.sizes[size])
                    entry.chunks.append(ChunkStorageMetadata(*chunk))
        metadata.storage_data = None
        return metadata

    def module_sizes(self, places: Sequence[bytes]) -> Modules:
        """The bytes of each module.

        Like all else that takes time for each item, it is computed once for each plan. So in later checkpoints the
        sizes of objects are those of the first.

        Args:
            places: what each rank has said of its items of variable size, as in ``Written``.
        """
        if self._modules is None:
            nbytes = self._nbytes_of_names.copy()
            variable = np.frombuffer(b"".join(places), dtype="<i8").reshape(-1, 2)
            if len(variable) == len(self._variable):
                np.add.at(nbytes, self._variable, variable[:, 1])
            self._modules = module_sizes(self._names, nbytes)
        return self._modules


def _names_of(plan: GlobalPlan) -> Names:
    """All names that ``plan`` writes."""
    items = plan.items
    heads = plan.written[np.flatnonzero(np.diff(items.name[plan.written], prepend=-1))]  # every name is written
    is_object = items.kind[heads] == ItemKind.BYTES
    # A rank may hold replicas with other properties than the one that is written.
    used, which_properties = np.unique(items.properties_of[heads], return_inverse=True)
    has_objects = int(bool(len(used)) and not items.properties[used[0]].dtype)  # their properties are the first
    properties = [items.properties[each] for each in used[has_objects:].tolist()]
    sizes, which_size = distinct(items.shape[heads], len(items.sizes))
    return Names(
        names=items.names,
        paths=items.paths,
        properties=[(getattr(torch, dtype), getattr(torch, layout), grad) for dtype, layout, grad in properties],
        name_properties=(which_properties - has_objects).astype(np.int32),
        name_size=np.where(is_object, -1, which_size).astype(np.int32),
        sizes=[items.sizes[each] for each in sizes.tolist()],
    )


def _stored_rows(items: Items, rows: Rows, name_numbers: npt.NDArray[np.int32], placements: Placements) -> StoredRows:
    """What one rank writes.

    Args:
        rows: those of ``items`` that it writes.
        name_numbers: for each of these the number of its name among all names.
    """
    is_object = items.kind[rows] == ItemKind.BYTES
    return StoredRows(
        sizes=items.sizes,
        name=name_numbers,
        offset=np.where(is_object, -1, items.offset[rows]).astype(np.int32),
        size=np.where(is_object, -1, items.size[rows]).astype(np.int32),
        file=placements.file,
        start=placements.offset,
        nbytes=placements.nbytes,
    )


def _index_of(plan: GlobalPlan, names: Names, shares: Sequence[Share], rank_files: Sequence[int]) -> IndexTemplate:
    """What the index has for the whole job.

    Raises:
        ValueError: a name is too long.
    """
    items, written = plan.items, plan.written
    none = np.full(len(written), -1)
    size = np.where(items.kind[written] == ItemKind.BYTES, -1, items.size[written])
    rows = StoredRows(items.sizes, items.name[written], none, size, none, none, none)
    blocks = [share.block_nbytes for share in shares]
    return IndexTemplate(names, rows, items.rank[written], rank_files, blocks)
