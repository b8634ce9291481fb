"""Megatron's access rule: each shard must have its main replica on exactly one rank. All ranks reach the same verdict.

Each rank describes its sharded state dict as :class:`Items`, and the coordinator checks those of all ranks by the rules
of a global plan: ranks do not contradict each other, and the main replicas cover each tensor once. A structure that was
found valid before is not checked again. This module owns the exchange and the memory of valid structures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from megatron.core.dist_checkpointing.mapping import ShardedObject

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import PlanConflict, entry_point, ranks_in_words
from robust_dcp.items import Form, ItemKind, Items, ItemsDecoder, ItemsMessage, ItemStructure, Replica, items_of, merged
from robust_dcp.megatron.failures import InvalidAccess
from robust_dcp.megatron.shards import ShardFacts, claimed_twice, structure_of
from robust_dcp.plan.conflicts import check_bounds, check_coverage, differs_from_previous, refuse_contradictions
from robust_dcp.plan.global_plan import order_of
from robust_dcp.structure_cache import Cache


class Held(msgspec.Struct, frozen=True, eq=False):
    """The ShardedTensors and ShardedObjects of one rank.

    Attributes:
        message: what they are. A chunk that the rank holds several times is there once, as the main replica if it is.
            A tensor that is cut unevenly counts as of variable size.
        signature: 16 bytes, a digest of all that is checked.
        twice: the number of a shard of which this rank holds two main replicas; ``None`` if there is none.
    """

    message: ItemsMessage
    signature: bytes
    twice: int | None


def described(facts: ShardFacts) -> Held:
    """Describe the shards of one rank."""
    held: dict[tuple[str, tuple[int, ...]], ItemStructure] = {}
    twice: int | None = None
    for number, shard in enumerate(facts.shards):
        structure, key = structure_of(shard), getattr(shard, "unique_key", shard.key)
        if not isinstance(shard, ShardedObject) and shard.axis_fragmentations is None:
            structure = structure._replace(form=Form.VARIABLE)
        before = held.setdefault((key, structure.offsets), structure)
        if structure.replica == Replica.MAIN:
            if before is not structure and before.replica == Replica.MAIN:
                twice = number
            held[key, structure.offsets] = structure
    chunks = sorted(held)
    items = items_of([key for key, _ in chunks], [held[chunk] for chunk in chunks])
    message = ItemsMessage.of(items, context=b"", signature=b"")
    signature = hashlib.blake2b(msgspec.msgpack.encode((message, twice)), digest_size=16).digest()
    return Held(message, signature, twice)


def refuse_wrong_access(items: Items) -> None:
    """Check the shards of all ranks. The rule is that of stock's ``validate_sharding_integrity``.

    For each key all ranks must agree whether it is a tensor or an object, and on dtype and global shape. Each chunk of
    a tensor, and each part of an object, must have exactly one main replica. Tensors that are cut unevenly are checked
    by the plan of a save, as stock leaves them to DCP.

    Raises:
        PlanConflict: that is not so. The error names the first such key, and ranks.
    """
    items = items.take(order_of(items))
    refuse_contradictions(items)
    is_object = items.kind == ItemKind.BYTES
    is_checked = is_object | (items.form == Form.FIXED)
    mains = np.flatnonzero(is_checked & (items.replica == Replica.MAIN))
    twice = items.name[mains[~differs_from_previous(items, mains)]]
    without = np.setdiff1d(items.name[is_checked], items.name[mains])
    wrong = [
        *((name, "has two main replicas of one shard") for name in twice[:1].tolist()),
        *((name, "has no main replica") for name in without[:1].tolist()),
    ]
    tensors = {items.names[name] for name in np.unique(items.name[~is_object]).tolist()}
    parts: dict[str, list[int]] = {}
    for name in np.unique(items.name[is_object]).tolist():
        parts.setdefault(key_of(items.names[name]), []).append(name)
    for key, names in parts.items():
        shape = items.names[names[0]].rpartition("_")[2]
        n_parts = math.prod(int(size) for size in shape.split(".") if size)
        if key in tensors:
            wrong.append((names[0], "is an object, and its key is that of a tensor too"))
        elif len(names) != n_parts:
            wrong.append((names[0], f"is one of {len(names)} parts of an object that has {n_parts}"))
    for name, problem in wrong:
        ranks = sorted(set(items.rank[items.name == name].tolist()))
        raise PlanConflict(
            f"{items.names[name]!r} on {ranks_in_words(ranks)} {problem}: exactly one rank must hold the main replica "
            "of each shard",
            key=items.names[name],
            ranks=ranks,
        )
    check_coverage(items, mains, complete=True)


PART = "/shard_"
"""In the name of an item, this stands between the key of a ShardedObject and the part that the item holds."""


def key_of(name: str) -> str:
    """The key of a ShardedObject, by the name of the item that holds a part of it."""
    return name.rpartition(PART)[0]


_RIGHT: Cache[tuple[tuple[int, ...], bytes], bytes] = Cache(max_nbytes=1 << 20)
"""Structures that were found valid. The key is the group and this rank's signature. The value is the identity, which is
a hash over the signatures of all ranks.

Each rank offers the identity that it remembers. Validation is skipped only if all ranks offer the same identity and it
is equal to the one computed from the signatures of this exchange. So no rank relies on its memory alone.
"""


class AccessCheck(msgspec.Struct, frozen=True, eq=False):
    """One validation on one rank, after the exchange in which all ranks have offered the signatures of their shards.

    Attributes:
        facts: the shards of this rank.
        agreement: what all ranks have offered.
    """

    channel: Channel
    facts: ShardFacts
    agreement: Agreement

    @property
    def is_known(self) -> bool:
        """Whether the structures of all ranks were validated before. All ranks get the same answer."""
        return self.agreement.is_same and self.agreement.same == self.agreement.signature

    @entry_point
    def run(self, phase: str, *, refuses: bool = True) -> tuple[str, ...]:
        """Gather the shards of all ranks on the coordinator, which checks them.

        Args:
            refuses: whether to check them. Otherwise only their keys are wanted.

        Returns:
            On the coordinator the keys of all ranks, on other ranks nothing.

        Raises:
            InvalidAccess: a shard is not accessed exactly once. All ranks raise it.
        """
        held = self.facts.once(described)
        keys: tuple[str, ...] = ()

        def message() -> ItemsMessage:
            if refuses and held.twice is not None:
                raise claimed_twice(self.facts.shards[held.twice])
            return held.message

        def judge(messages: Sequence[ItemsMessage | None]) -> None:
            nonlocal keys
            decoder = ItemsDecoder()
            ranks = [decoder.decode(each) for each in messages if each is not None]
            items = merged(ranks)
            objects = set(items.name[items.kind == ItemKind.BYTES].tolist())
            keys = tuple({key_of(name) if place in objects else name for place, name in enumerate(items.names)})
            if refuses:
                check_bounds(ranks)
                global_ranks = np.array(self.channel.ranks, dtype=items.rank.dtype)  # a load may be of a smaller group
                refuse_wrong_access(msgspec.structs.replace(items, rank=global_ranks[items.rank]))

        try:
            self.channel.gather(f"{phase}: shards", message, ItemsMessage, then=judge)
        except PlanConflict as error:
            raise InvalidAccess(f"Invalid access pattern: {error.message}", key=error.key, ranks=error.ranks) from None
        if refuses:
            nbytes = 200 + 8 * self.channel.size
            _RIGHT.put((self.channel.ranks, held.signature), self.agreement.signature, nbytes)
        return keys


def agree_on_access(
    channel: Channel, phase: str, shards: Callable[[], ShardFacts], *, value: Callable[[], int] = lambda: 0
) -> AccessCheck:
    """Run the first exchange of a save or load. Every rank prepares its shards and offers their signature.

    Args:
        shards: prepares the ShardedTensors and ShardedObjects of this rank. If it raises, all ranks raise.
        value: called after ``shards``. It returns 64 bits that all ranks compare.
    """

    def offer(facts: ShardFacts) -> Offer:
        signature = facts.once(described).signature
        identity = _RIGHT.get((channel.ranks, signature)) or bytes(16)
        return Offer(signature=signature, same=identity, value=value())

    facts, agreement = channel.agree(phase, shards, offer)
    return AccessCheck(channel, facts, agreement)
