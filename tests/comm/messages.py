"""Messages that the tests of this folder send, and what their signatures add up to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from robust_dcp.comm.tree import Tree


class Note(msgspec.Struct, frozen=True):
    rank: int
    data: bytes = b""


class OtherNote(msgspec.Struct, frozen=True):
    text: str


def combined_signature(signatures: Sequence[bytes], root: int = 0) -> bytes:
    """The Merkle hash over the signatures of all ranks, in rank order, along the tree under ``root``."""

    def of(rank: int) -> bytes:
        hashes = [signatures[rank], *map(of, Tree(rank, len(signatures), root).children)]
        return (
            hashes[0]
            if len(hashes) == 1
            else hashlib.blake2b(b"".join(hashes), digest_size=16, person=b"rdcp-plan").digest()
        )

    return of(root)
