"""The signature: 128 bits that identify a structure and everything else that a plan depends on.

This module owns the encoding that is hashed. If every rank shows the signature that a cached plan was made for, the
plan still holds. Every rank computes its signature in every save, and all compare them when they agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from robust_dcp.errors import PlanConflict
from robust_dcp.items import Items

__all__ = ["SIGNATURE_NBYTES", "PlanContext", "StructureSignature"]

SIGNATURE_NBYTES = 16

OptionValue = str | int | float | bool | None


@dataclass(frozen=True)
class PlanContext:
    """What a plan depends on besides the structure.

    Attributes:
        ranks: the global ranks of the group, in group order.
        planner_options, writer_options: options by name. A changed option needs another plan.
        versions: the versions of torch, of robust_dcp and of the layout.
    """

    ranks: tuple[int, ...]
    planner_options: Mapping[str, OptionValue]
    writer_options: Mapping[str, OptionValue]
    versions: Mapping[str, str]

    def encode(self) -> bytes:
        """Encode. The order in which options were given does not change the bytes."""
        return msgspec.json.encode(self._sections())

    def difference(self, encoded: bytes) -> str:
        """Say in words what differs in a context that another rank encoded. The text is empty if nothing does."""
        if encoded == self.encode():
            return ""
        try:
            others = msgspec.json.decode(encoded, type=dict[str, dict[str, OptionValue]])
        except (msgspec.ValidationError, msgspec.DecodeError):
            return "it cannot be read"
        found = [
            f"{name} is {other.get(name)!r} there and {own.get(name)!r} here"
            for section, own in self._sections().items()
            for other in [others.get(section, {})]
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
        return ", ".join(found) or "it is of another form"

    def _sections(self) -> dict[str, dict[str, OptionValue]]:
        return {
            "group": {"ranks": ",".join(map(str, self.ranks))},
            "planner": dict(sorted(self.planner_options.items())),
            "writer": dict(sorted(self.writer_options.items())),
            "versions": dict(sorted(self.versions.items())),
        }


@dataclass(frozen=True)
class StructureSignature:
    """128 bits over the structure of one rank's state dict and its :class:`PlanContext` (BLAKE2b, RFC 7693).

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
    def of(cls, items: Items, context: PlanContext) -> StructureSignature:
        digest = hashlib.blake2b(digest_size=SIGNATURE_NBYTES, person=b"rdcp-structure")
        _feed(digest, [context.encode()])
        for strings in (items.names, items.dtypes, items.layouts):
            _feed(digest, [_encoded(strings)])
        # The path tells the key "a.b" from "b" within "a", and the key "0" from the index 0.
        _feed(digest, [msgspec.msgpack.encode(items.paths)])
        for column in items.columns:
            _feed(digest, [column.tobytes()])
        _feed(digest, [msgspec.msgpack.encode(items.peers)])
        return cls(digest.digest())


def _encoded(strings: Sequence[str]) -> bytes:
    try:
        return msgspec.msgpack.encode(strings)
    except UnicodeEncodeError:
        name = next(each for each in strings if not _is_text(each))
        raise PlanConflict(f"the name {name!r} cannot be encoded in UTF-8; give this value another name") from None


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _feed(digest: hashlib.blake2b, parts: Iterable[bytes]) -> None:
    """Hash each part after its length. So bytes that move from one part to the next change the hash."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
