"""Megatron's access-integrity validation over a Channel. All ranks reach the same verdict.

A structure that was found valid before is not validated again. This module owns the exchange and the memory of valid
structures. The rule itself is in ``access``. Called by ``saving`` and ``loading``, and by the replacements of
Megatron's own functions in ``save_patches``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import entry_point
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.checks.access import AccessColumns, columns_of, find_violation, keys_of
from robust_dcp.megatron.checks.common_state import LeafDigests, leaf_digests, report_differences
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.failures import InvalidAccess
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.megatron.versions import KeyOnly, nested_values
from robust_dcp.structure_cache import CACHE, Table

__all__ = [
    "AccessCheck",
    "GlobalMetadata",
    "agree_on_access",
    "compare_common_state",
    "exchange_metadata",
]

Identity = bytes


class _Verdict(msgspec.Struct, frozen=True):
    """What the coordinator found. ``message`` is empty if the accesses are valid."""

    keys: tuple[str, ...]
    key: str = ""
    ranks: tuple[int, ...] = ()
    message: str = ""


_RIGHT: Table[tuple[tuple[int, ...], bytes], Identity] = CACHE.table(
    "right accesses", lambda key, identity: 200 + 8 * len(key[0]), max_nbytes=1 << 20
)
"""Structures that were found valid. The key is the group and this rank's signature. The value is the identity, which is
a hash over the signatures of all ranks.

Each rank offers the identity that it remembers. Validation is skipped only if all ranks offer the same identity and it
is equal to the one computed from the signatures of this exchange. So no rank relies on its memory alone.
"""


@dataclass(frozen=True, eq=False)
class AccessCheck:
    """One validation on one rank. It makes an offer for an exchange, and finishes after that exchange if needed.

    Args:
        shards: the ShardedTensors and ShardedObjects of this rank.
    """

    columns: AccessColumns
    signature: bytes

    @classmethod
    def of(cls, shards: Sequence[Any] | ShardFacts) -> AccessCheck:
        if isinstance(shards, ShardFacts):
            return shards.once(_check_of_facts)
        columns = columns_of(shards)
        return cls(columns, columns.signature())

    def offer(self, group: tuple[int, ...], value: int = 0) -> Offer:
        """What this rank tells the others: its signature, and the identity with which it was found valid before."""
        return Offer(signature=self.signature, plan_id=_RIGHT.get((group, self.signature)) or bytes(16), value=value)

    def is_known(self, agreement: Agreement) -> bool:
        """Whether the structures of all ranks were validated before. All ranks get the same answer."""
        return agreement.same_plan_id and agreement.plan_id == agreement.signature

    def finish(self, channel: Channel, phase: str, agreement: Agreement) -> None:
        """Gather the columns on the coordinator, which checks them and sends its verdict to all ranks.

        Raises:
            InvalidAccess: some shard is not accessed exactly once. All ranks raise it.
        """
        _raise_if_wrong(self._verdict(channel, phase, with_keys=False))
        self.remember(channel, agreement)

    def keys_of_all(self, channel: Channel, phase: str) -> GlobalMetadata:
        """The keys that any rank holds, and the verdict. The caller decides whether to raise it."""
        return GlobalMetadata(self._verdict(channel, phase, with_keys=True))

    def remember(self, channel: Channel, agreement: Agreement) -> None:
        """Remember that the structures in ``agreement`` were found valid."""
        _RIGHT.put((channel.ranks, self.signature), agreement.signature)

    def _verdict(self, channel: Channel, phase: str, *, with_keys: bool) -> _Verdict:
        gathered = channel.gather(f"{phase}: shards", lambda: self.columns, AccessColumns)

        def judge() -> _Verdict:
            held = [columns for columns in gathered or [] if columns is not None]
            keys = tuple(keys_of(held)) if with_keys else ()
            found = find_violation(held)
            return _Verdict(keys) if found is None else _Verdict(keys, found.key, found.ranks, found.message)

        return channel.broadcast(f"{phase}: verdict", judge, _Verdict)


def _check_of_facts(facts: ShardFacts) -> AccessCheck:
    return AccessCheck.of(facts.shards)


class GlobalMetadata(list[list[KeyOnly]]):
    """What ``determine_global_metadata`` returns to Megatron in place of the metadata of every rank.

    It holds the keys of all ranks as if one rank held them all. The accesses were checked already:
    :meth:`raise_if_wrong` raises the verdict.
    """

    def __init__(self, verdict: _Verdict) -> None:
        super().__init__([[KeyOnly(key) for key in verdict.keys]])
        self._verdict = verdict

    @entry_point
    def raise_if_wrong(self) -> None:
        """Raise InvalidAccess if the accesses are not valid. All ranks raise it alike."""
        _raise_if_wrong(self._verdict)


def agree_on_access(
    channel: Channel,
    phase: str,
    shards: Callable[[], Sequence[Any] | ShardFacts],
    *,
    value: Callable[[], int] = lambda: 0,
) -> tuple[AccessCheck, Agreement]:
    """Run the first exchange of a save or load. Every rank prepares its shards and offers their signature.

    Args:
        shards: prepares the shards of this rank and returns them. If it raises, all ranks raise.
        value: called after ``shards``. It returns 64 bits that all ranks compare.
    """
    checks: list[AccessCheck] = []

    def prepare() -> Offer:
        checks.append(AccessCheck.of(shards()))
        return checks[0].offer(channel.ranks, value())

    agreement = channel.agree(phase, prepare)
    return checks[0], agreement


def _raise_if_wrong(verdict: _Verdict) -> None:
    if verdict.message:
        raise InvalidAccess(verdict.message, key=verdict.key, ranks=list(verdict.ranks))


@entry_point
def exchange_metadata(
    sharded_state_dict: dict[str, Any], process_group: dist.ProcessGroup | None = None
) -> tuple[list[Any], GlobalMetadata]:
    """Replaces Megatron's ``determine_global_metadata``. All ranks of the group call it.

    Returns:
        The metadata of this rank's shards, and the keys and the verdict for all ranks.

    Raises:
        RobustCheckpointError: any rank failed. Every rank raises it.
    """
    channel = Channel.for_group(
        process_group, operation="determine_global_metadata", timeout_seconds=current_options().exchange_timeout_seconds
    )
    local: list[Any] = []
    meet_before_saving(is_last=False)

    def shards() -> list[Any]:
        local.extend(shard.without_data() for shard in nested_values(sharded_state_dict))
        return local

    phase = "determine_global_metadata"
    check, _ = agree_on_access(channel, phase, shards)
    return local, check.keys_of_all(channel, phase)


def compare_common_state(common: dict[str, Any]) -> None:
    """Replaces Megatron's ``_validate_common_state_dict``: ranks compare digests and log the keys that differ."""
    channel = Channel.for_group(
        None, operation="compare common state", timeout_seconds=current_options().exchange_timeout_seconds
    )
    digests: list[LeafDigests] = []

    def digest() -> Offer:
        digests.append(leaf_digests(common))
        return Offer(value=digests[0].whole())

    agreement = channel.agree("compare common state", digest)
    if not agreement.same_value:
        report_differences(channel, "common state of rank 0", digests[0])
