"""The plan of one save, as its coordinator makes it from the items of all ranks, and the share of it that a rank holds.

A plan follows from the structures alone: every coordinator makes the same plan of the same structures, also after a
restart. So each change makes a whole new plan. The places of items follow from the plan too: the coordinator and each
rank compute the same, so places need not be sent.

A plan is stored in the index of each checkpoint that is saved by it, so that a resumed job need not plan again.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.comm.messages import Bundler
from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words
from robust_dcp.items import Items, ItemsDecoder, ItemsMessage
from robust_dcp.plan.conflicts import is_compared
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from robust_dcp.plan.metadata import MetadataTemplate
from robust_dcp.plan.signature import SIGNATURE_NBYTES, StructureSignature, difference_of_contexts
from robust_dcp.report import PlanReport
from robust_dcp.storage.index.form import Column, IndexFile, Section
from robust_dcp.storage.layouts.places import TORCH, Layout, Placements

Rows = npt.NDArray[np.intp]

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


class Share(msgspec.Struct, frozen=True, dict=True):
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


_SHARES: Final = msgspec.msgpack.Decoder(Share)  # made here: msgspec crashes if two threads meet a type at once


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
        bundler = Bundler(ItemsMessage)
        for rank, items in enumerate(self.items):
            bundler.add(rank, ItemsMessage.of(items, self.context, signature=b""))
        shares = [msgspec.msgpack.encode(share) for share in self.shares]
        values: dict[str, Any] = {
            "ranks": np.array(self.group, dtype=np.int64),
            "signatures": b"".join(self.signatures),
            "shares": b"".join(shares),
            "share_ends": np.cumsum(list(map(len, shares)), dtype=np.int64),
            "structures": bundler.encode(),
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
        share: Share = _SHARES.decode(Column(file, "shares").rows(begin, end).tobytes())
    except (msgspec.MsgspecError, ValueError) as error:
        raise ExchangeError(f"the share of rank {rank} cannot be decoded: {error}") from None
    if share.n_items != n_items or len(share.plan_id) != SIGNATURE_NBYTES:
        raise ExchangeError(f"the share of rank {rank} is for {share.n_items} items, not {n_items}")
    if not leads:
        return share, None
    bundle = Column(file, "structures").rows().tobytes()
    # Compressed data may be a bomb. So it may announce no more than this many ranks can need.
    max_nbytes = max(_FACTOR * len(bundle), n_ranks * _ITEM_NBYTES * (n_items + 1_000))
    bundler = Bundler(ItemsMessage)
    bundler.add_bundle(bundle, max_nbytes=max_nbytes)
    messages = bundler.open()
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
