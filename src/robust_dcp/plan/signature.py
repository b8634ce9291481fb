"""The signature: 128 bits that identify a structure and everything else that a plan depends on.

This module owns the encoding that is hashed. If every rank shows the signature that a cached plan was made for, the
plan still holds. Every rank computes its signature in every save, and all compare them when they agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from robust_dcp.errors import PlanConflict
from robust_dcp.items import Items

SIGNATURE_NBYTES = 16

OptionValue = str | int | float | bool | None


def encode_context(options: Mapping[str, OptionValue]) -> bytes:
    """Encode what a plan depends on besides the structure: the ranks of the group, options and versions, by name.

    The order in which they are given does not change the bytes.
    """
    return msgspec.json.encode(dict(sorted(options.items())))


def difference_of_contexts(here: bytes, there: bytes) -> str:
    """Say in words what differs between two encoded contexts."""
    try:
        own, other = (msgspec.json.decode(each, type=dict[str, OptionValue]) for each in (here, there))
    except (msgspec.ValidationError, msgspec.DecodeError):
        return "it cannot be read"
    found = [
        f"{name} is {other.get(name)!r} there and {own.get(name)!r} here"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
    return ", ".join(found) or "it is of another form"


@dataclass(frozen=True)
class StructureSignature:
    """128 bits over the structure of one rank's state dict and its context (BLAKE2b, RFC 7693).

    Two saves that have the same signature on every rank need the same plan. The order of a dict does not change the
    signature; neither do the contents and addresses of tensors.

    >>> StructureSignature(bytes(16)).hex
    '00000000000000000000000000000000'
    """

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != SIGNATURE_NBYTES:
            raise ValueError(f"a structure signature has {SIGNATURE_NBYTES} bytes, got {len(self.value)}")

    @property
    def hex(self) -> str:
        return self.value.hex()

    def __str__(self) -> str:
        return self.hex

    @classmethod
    def of(cls, items: Items, context: bytes) -> StructureSignature:
        """The signature of items in an encoded context."""
        digest = hashlib.blake2b(digest_size=SIGNATURE_NBYTES, person=b"rdcp-structure")
        for part in (
            context,
            _encoded(items.names),
            msgspec.msgpack.encode(items.properties),
            msgspec.msgpack.encode(items.sizes),
            # The path tells the key "a.b" from "b" within "a", and the key "0" from the index 0.
            msgspec.msgpack.encode(items.paths),
            *(column.tobytes() for column in items.columns),
            msgspec.msgpack.encode(items.peers),
        ):
            # Each part comes after its length. So bytes that move from one part to the next change the hash.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return cls(digest.digest())


def _encoded(strings: Sequence[str]) -> bytes:
    try:
        return msgspec.msgpack.encode(strings)
    except UnicodeEncodeError:
        name = next(each for each in strings if each.encode(errors="ignore").decode() != each)
        raise PlanConflict(f"the name {name!r} cannot be encoded in UTF-8; give this value another name") from None
