"""The plan of one save, as its coordinator makes it from the items of all ranks, and the share of it that a rank holds.

A plan follows from the structures alone: every coordinator makes the same plan of the same structures, also after a
restart. So each change makes a whole new plan. The places of items follow from the plan too: the coordinator and each
rank compute the same, so places need not be sent.

A plan is stored in the index of each checkpoint that is saved by it, so that a resumed job need not plan again. What of
``.metadata`` and its index follows from the plan is encoded once, and kept with it. File names and the places of items
of variable size are filled in at each commit.
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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

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
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.index.form import Column, Fragment, IndexFile, IndexTemplate, Section
from robust_dcp.storage.layouts.places import TORCH, Layout, Placements
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, decode_metadata
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle

Rows = npt.NDArray[np.intp]
Int64 = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_ITEM_NBYTES: Final = 512  # an upper bound for one item in a stored structure; real items take much less
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


class Share(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What one rank writes by a plan: in memory, in the coordinator's reply, and in an index.

    Attributes:
        plan_id: the identity of the plan, 16 bytes. It is a hash of what the plan was made for and of all that was
            decided. So ranks that have the same identity have made the same decisions, whichever coordinator or version
            made them.
        n_items: how many items the rank has.
        bits: one bit for each of them, whether the rank writes it; little-endian.
        total_nbytes: bytes of the files of all ranks, without items of variable size.
    """

    plan_id: bytes
    n_items: int
    bits: bytes
    total_nbytes: int

    @cached_property
    def kept(self) -> Rows:
        """The places of the items that the rank writes, ascending."""
        if len(self.bits) != (self.n_items + 7) // 8:
            raise ExchangeError(f"a plan for {len(self.bits)} x 8 items came for a state dict of {self.n_items}")
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=self.n_items, bitorder="little"))


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
    metadata: MetadataTemplate
    is_contested: bool

    @classmethod
    def of(cls, decided: GlobalPlan, group: Sequence[int], signatures: Sequence[bytes], local: LocalStructure) -> Plan:
        """The plan of these decisions, with the places of all items.

        Args:
            decided: which rank writes what.
            signatures: the signature of each rank's structure.
            local: the coordinator's own structure, for the options that all ranks share.
        """
        placements = _placements_of_all(decided, local)
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
        return cls(
            group=tuple(group),
            items=decided.ranks,
            signatures=tuple(signatures),
            shares=tuple(
                Share(plan_id, len(items), each, total_nbytes) for items, each in zip(decided.ranks, bits, strict=True)
            ),
            nbytes=int(decided.items.nbytes[decided.written].sum()),
            context=local.context,
            metadata=MetadataTemplate(decided, placements, local.layout),
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
    if end - begin > n_items + 1_000:  # it has a bit for each item; do not read what cannot be that
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


def _placements_of_all(plan: GlobalPlan, local: LocalStructure) -> tuple[Placements, ...]:
    """The places of the items that each rank writes. Each rank computes its own by :meth:`LocalStructure.place`."""
    layout = local.layout
    rows = np.empty_like(plan.written)
    rows[plan.place] = plan.written  # so they are rank after rank
    measures = layout.measure(plan.items, rows)
    # Ranks that write shards of the same sizes have the same places, so compute them once.
    placed: dict[bytes, Placements] = {}
    placements = []
    for begin, end in pairwise(np.cumsum([0, *map(np.count_nonzero, plan.kept)]).tolist()):
        key = measures[begin:end].tobytes()
        if key not in placed:
            placed[key] = layout.place(measures[begin:end], local.files)
        placements.append(placed[key])
    return tuple(placements)


# What a plan writes into ``.metadata`` and its index.

_NO_INDEX: Final = "the checkpoint gets no index, so a load takes longer: %s"


class MetadataTemplate:
    """The metadata of all checkpoints that one plan writes.

    It is compiled at its first use. So the other ranks get the first plan sooner, and write in the meantime.

    Args:
        plan: the global plan. It is dropped after it has been compiled.
        placements: for each rank the places of its kept items.
        layout: the layout that made them.
    """

    def __init__(self, plan: GlobalPlan, placements: Sequence[Placements], layout: Layout = TORCH) -> None:
        self._head_nbytes = [placement.head_nbytes for placement in placements]
        self._n_variable = [len(placement.variable) for placement in placements]
        self._layout = layout
        self._uncompiled: tuple[GlobalPlan, Sequence[Placements]] | None = (plan, placements)
        self._variable_places: Int64 = np.empty((0, 2), dtype=np.int64)

    def _compile(self, plan: GlobalPlan, placements: Sequence[Placements]) -> None:
        self._columns = columns = _metadata_columns(plan, placements)
        # Ranks report items of variable size rank after rank, in plan order. Within a file that is the order of the
        # columns, too. So `order` has, for each such item in the columns, its place in the list of all ranks.
        rank_of_file = np.repeat(np.arange(len(placements)), [placement.n_files for placement in placements])
        files = columns.file[columns.start < 0]
        order = np.empty(len(files), dtype=np.intp)
        order[np.argsort(rank_of_file[files], kind="stable")] = np.arange(len(files))
        self._order = order
        self._pickled = MetadataPickle(columns)
        self._index: IndexTemplate | None = None
        try:
            self._index = IndexTemplate(columns)
        except (ValueError, TypeError) as error:  # for example, a name is too long
            logger.warning(_NO_INDEX, error)
        self._uncompiled = None

    @property
    def nbytes(self) -> int:
        """How many bytes are kept for later saves."""
        if self._uncompiled is not None:
            return 0
        columns = self._columns
        own = columns.name.nbytes + columns.offset.nbytes + columns.size.nbytes  # the index holds the other columns
        return self._pickled.nbytes + own + (0 if self._index is None else self._index.nbytes)

    def encode(
        self,
        places_of_ranks: Sequence[Int64],
        storage_meta: StorageMeta,
        kept_plan: Mapping[str, Section] | None = None,
    ) -> MetadataToPublish:
        """The bytes of ``.metadata`` and of the index, and the data files of all ranks.

        Args:
            places_of_ranks: for each rank the places of its items of variable size.
            storage_meta: goes into the file unchanged.
            kept_plan: the sections of the index that hold the plan.

        Raises:
            ValueError: there is not one place for each item of variable size.
        """
        for rank, (places, n_variable) in enumerate(zip(places_of_ranks, self._n_variable, strict=True)):
            if len(places) != n_variable:
                raise ValueError(f"rank {rank} gave {len(places)} places for {n_variable} items of variable size")
        if self._uncompiled is not None:
            self._compile(*self._uncompiled)
        places = self._variable_places = np.concatenate(places_of_ranks)[self._order]
        mark = mark_of(storage_meta.save_id or "")
        names = list[str]()
        for rank, heads in enumerate(self._head_nbytes):
            names += self._layout.file_names(rank, heads, mark)
        fragments = self._pickled.encode(names, places, storage_meta)
        index: Sequence[Fragment] = ()
        if self._index is not None:
            try:
                index = self._index.encode(fragments, names, places, storage_meta, FORMAT_VERSION, kept_plan or {})
            except (ValueError, TypeError) as error:  # for example, another torch has more in its StorageMeta
                logger.warning(_NO_INDEX, error)
        return MetadataToPublish(fragments, frozenset(names), index)

    def for_stock(self) -> Metadata:
        """DCP's own object, for storage writers other than ours. The writer fills in ``storage_data``."""
        nowhere = [np.zeros((n_variable, 2), dtype=np.int64) for n_variable in self._n_variable]
        encoded = self.encode(nowhere, StorageMeta(checkpoint_id="", save_id=""))
        metadata = decode_metadata(b"".join(encoded.fragments), ".metadata")
        metadata.storage_data = metadata.storage_meta = None
        return metadata

    @cached_property
    def module_sizes(self) -> Modules:
        """The bytes of each module in the checkpoint that was encoded last.

        Like all else that takes time for each item, it is computed once for each plan. So in later checkpoints the
        sizes of objects are those of the first.
        """
        columns = self._columns
        nbytes = columns.nbytes.copy()
        nbytes[columns.start < 0] = self._variable_places[:, 1]
        of_names = np.zeros(len(columns.names), dtype=np.int64)
        np.add.at(of_names, columns.name, nbytes)
        return module_sizes(columns.names, of_names)


def _metadata_columns(plan: GlobalPlan, placements: Sequence[Placements]) -> MetadataColumns:
    """The columns for everything that ``plan`` writes.

    Args:
        plan: the plan.
        placements: for each rank the places of the items that it writes. Files are numbered rank after rank.
    """
    items, written, place = plan.items, plan.written, plan.place
    ends = np.cumsum([p.n_files for p in placements])
    file = [p.file + np.int32(end - p.n_files) for p, end in zip(placements, ends.tolist(), strict=True)]
    is_object = items.kind[written] == ItemKind.BYTES
    name = items.name[written]
    first_of_name = np.flatnonzero(np.diff(name, prepend=-1))  # this works because every name is written
    # A rank may hold replicas with other properties than the one that is written.
    heads = written[first_of_name]
    used, which_properties = np.unique(items.properties_of[heads], return_inverse=True)
    has_objects = int(bool(len(used)) and not items.properties[used[0]].dtype)  # their properties are the first
    properties = [items.properties[each] for each in used[has_objects:].tolist()]
    # Some sizes of the plan may be only those of copies that are not written.
    sizes, which = distinct(
        np.concatenate([items.shape[heads], items.offset[written], items.size[written]]), len(items.sizes)
    )
    whole, offset, size = np.split(which, np.cumsum([len(heads), len(written)]))
    return MetadataColumns(
        names=items.names,
        paths=items.paths,
        properties=[(getattr(torch, dtype), getattr(torch, layout), grad) for dtype, layout, grad in properties],
        name_properties=(which_properties - has_objects).astype(np.int32),
        name_size=np.where(is_object[first_of_name], -1, whole).astype(np.int32),
        sizes=[items.sizes[each] for each in sizes.tolist()],
        name=name,
        offset=np.where(is_object, -1, offset).astype(np.int32),
        size=np.where(is_object, -1, size).astype(np.int32),
        file=np.concatenate(file)[place],
        start=np.concatenate([p.offset for p in placements])[place],
        nbytes=np.concatenate([p.nbytes for p in placements])[place],
        n_files=int(ends[-1]),
    )
