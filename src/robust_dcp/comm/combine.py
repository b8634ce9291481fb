"""What each rank says about itself in a few bytes, and how these offers are combined on the way up the tree.

Example: each rank offers the signature of what it holds, and the combination is a hash over all signatures in rank
order. Other results are equality, counts, and extremes with their ranks. A rank combines its own offer with what its
children have combined, so no rank ever sees all offers.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

SIGNATURE_NBYTES = 16
N_FLAGS = 4

_NOTHING = bytes(SIGNATURE_NBYTES)
_LAYOUT = struct.Struct(f"<I{SIGNATURE_NBYTES}s{SIGNATURE_NBYTES}s?QIQI{N_FLAGS}I{N_FLAGS}IQ")


class Offer(msgspec.Struct, frozen=True):
    """What a rank says about itself, without any payload.

    Attributes:
        signature: 16 bytes that identify what the rank holds.
        same: 16 bytes that all ranks compare; zeros say nothing.
        value: 64 bits that the phase may use as it likes; 0 says nothing.
        flags: ``N_FLAGS`` bits that the phase may use as it likes.
        notice: 64 bits of one rank for all others; 0 says nothing.
    """

    signature: bytes = _NOTHING
    same: bytes = _NOTHING
    value: int = 0
    flags: int = 0
    notice: int = 0

    def __post_init__(self) -> None:
        if len(self.signature) != SIGNATURE_NBYTES or len(self.same) != SIGNATURE_NBYTES:
            raise ValueError(
                f"signature and same have {len(self.signature)} and {len(self.same)} bytes, not {SIGNATURE_NBYTES} each"
            )
        for field, n_bits in (("value", 64), ("flags", N_FLAGS), ("notice", 64)):
            if not 0 <= getattr(self, field) < 1 << n_bits:
                raise ValueError(f"{field} is {getattr(self, field)}, which does not fit {n_bits} bits")


class Agreement(NamedTuple):
    """The combined offers of a range of ranks. At the end it covers all ranks and is the same on each of them.

    Attributes:
        n_ranks: how many ranks it covers.
        signature: for a rank without children its own, else BLAKE2b over its own and the hashes of its children.
        same: the 16 bytes that the first rank of the range offered. is_same: whether all ranks offered these.
        lowest, highest: the extremes of the values that are not 0; 0 if there are none.
        lowest_rank, highest_rank: the first rank that offered each.
        counts: for each flag, how many ranks have it.
        first_ranks: for each flag, the first rank that has it; any rank if none does.
        notice: that of the first rank that has one.
    """

    n_ranks: int
    signature: bytes
    same: bytes
    is_same: bool
    lowest: int
    lowest_rank: int
    highest: int
    highest_rank: int
    counts: tuple[int, ...]
    first_ranks: tuple[int, ...]
    notice: int = 0

    @classmethod
    def of(cls, rank: int, offer: Offer, children: Sequence[Agreement] = ()) -> Agreement:
        """What a rank and its children, which are in the order of their places, have offered."""
        counts = tuple(offer.flags >> bit & 1 for bit in range(N_FLAGS))
        extremes = offer.value, rank, offer.value, rank
        total = cls(1, offer.signature, offer.same, True, *extremes, counts, (rank,) * N_FLAGS, offer.notice)
        signatures = [offer.signature]
        for child in children:
            signatures.append(child.signature)
            lowest = child if child.lowest and not 0 < total.lowest <= child.lowest else total
            highest = child if child.highest > total.highest else total
            firsts = zip(total.counts, total.first_ranks, child.first_ranks, strict=True)
            total = total._replace(
                n_ranks=total.n_ranks + child.n_ranks,
                is_same=total.is_same and child.is_same and total.same == child.same,
                lowest=lowest.lowest,
                lowest_rank=lowest.lowest_rank,
                highest=highest.highest,
                highest_rank=highest.highest_rank,
                counts=tuple(map(operator.add, total.counts, child.counts)),
                first_ranks=tuple([first if count else of_child for count, first, of_child in firsts]),
                notice=total.notice or child.notice,
            )
        if children:
            digest = hashlib.blake2b(b"".join(signatures), digest_size=SIGNATURE_NBYTES, person=b"rdcp-plan").digest()
            total = total._replace(signature=digest)
        return total

    def count(self, flag: int) -> int:
        """How many ranks have ``flag`` (a number with one bit set)."""
        return self.counts[flag.bit_length() - 1]

    def first_rank(self, flag: int) -> int | None:
        """The first rank that has ``flag`` (a number with one bit set)."""
        return self.first_ranks[flag.bit_length() - 1] if self.count(flag) else None

    @property
    def same_value(self) -> bool:
        """Whether all values that are not 0 are equal."""
        return self.lowest == self.highest

    def encode(self) -> bytes:
        """Encode for the body of a frame."""
        return _LAYOUT.pack(*self[:8], *self.counts, *self.first_ranks, self.notice)

    @classmethod
    def decode(cls, body: bytes) -> Agreement:
        """Decode what :meth:`encode` made, from the body of a frame."""
        fields = _LAYOUT.unpack_from(body)
        counts, first_ranks = fields[8 : 8 + N_FLAGS], fields[8 + N_FLAGS : 8 + 2 * N_FLAGS]
        return cls._make((*fields[:8], counts, first_ranks, fields[-1]))
