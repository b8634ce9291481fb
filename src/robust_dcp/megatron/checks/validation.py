"""Megatron's access-integrity validation over a Channel: one verdict on all ranks, and no work for a known structure.

Owns the exchange and what is remembered of structures that were found right; the rule itself is in ``access``. Called
by ``saving`` and ``loading``, and by the replacements of Megatron's own functions in ``save_patches``.
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
    """What the coordinator found. ``message`` is empty where all is right."""

    keys: tuple[str, ...]
    key: str = ""
    ranks: tuple[int, ...] = ()
    message: str = ""


_RIGHT: Table[tuple[tuple[int, ...], bytes], Identity] = CACHE.table(
    "right accesses", lambda key, identity: 200 + 8 * len(key[0]), max_nbytes=1 << 20
)
"""Structures that were validated with success: by group and own signature, the identity of all ranks' signatures.

A rank offers the identity that it knows; only if all ranks offer the same one, and it is that of the signatures
that go with it, is nothing validated anew. What is remembered here is never believed by itself.
"""


@dataclass(frozen=True, eq=False)
class AccessCheck:
    """One validation on one rank: offered in an exchange, and finished after it if need be.

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
        """What to tell all ranks: the own signature, and the identity under which it was found right."""
        return Offer(signature=self.signature, plan_id=_RIGHT.get((group, self.signature)) or bytes(16), value=value)

    def is_known(self, agreement: Agreement) -> bool:
        """Whether what all ranks hold has been validated before; the same answer on all ranks."""
        return agreement.same_plan_id and agreement.plan_id == agreement.signature

    def finish(self, channel: Channel, phase: str, agreement: Agreement) -> None:
        """Gather the columns, let the coordinator check them, and hear its verdict.

        Raises:
            InvalidAccess: some shard is not accessed exactly once; on all ranks.
        """
        _raise_if_wrong(self._verdict(channel, phase, with_keys=False))
        self.remember(channel, agreement)

    def keys_of_all(self, channel: Channel, phase: str) -> GlobalMetadata:
        """The keys that any rank holds, and the verdict, which is for the caller to raise."""
        return GlobalMetadata(self._verdict(channel, phase, with_keys=True))

    def remember(self, channel: Channel, agreement: Agreement) -> None:
        """Note that what the ranks hold, by ``agreement``, was found right."""
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
    """What ``determine_global_metadata`` returns to Megatron in place of every rank's metadata: the keys, as of one
    rank. Whether the accesses are right has been decided already: :meth:`raise_if_wrong`."""

    def __init__(self, verdict: _Verdict) -> None:
        super().__init__([[KeyOnly(key) for key in verdict.keys]])
        self._verdict = verdict

    @entry_point
    def raise_if_wrong(self) -> None:
        """Raises InvalidAccess, on all ranks alike."""
        _raise_if_wrong(self._verdict)


def agree_on_access(
    channel: Channel,
    phase: str,
    shards: Callable[[], Sequence[Any] | ShardFacts],
    *,
    value: Callable[[], int] = lambda: 0,
) -> tuple[AccessCheck, Agreement]:
    """The first exchange of a save or load: every rank prepares, and shows the signature of what it holds.

    Args:
        shards: prepares and returns what this rank holds; what it raises is raised on all ranks.
        value: called afterwards; 64 bits that all ranks see.
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
    """In place of Megatron's ``determine_global_metadata``: all ranks of the group call it.

    Returns:
        The metadata of this rank's shards, and what is known here of all ranks'.

    Raises:
        RobustCheckpointError: on every rank, whichever of them failed.
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
    """In place of Megatron's ``_validate_common_state_dict``: digests are compared, keys that differ logged."""
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
