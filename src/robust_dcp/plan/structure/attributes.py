"""What a planner adds to DCP's ``Metadata`` itself, besides the items: attributes that map names to small facts.

Some readers look for attributes that DCP does not know: Megatron-Core 0.14 for ``mcore_data``, the shapes that tensors
had before they were saved in pieces. Each rank knows what concerns its own names; the facts are part of its structure,
so they travel only when that changes. Owns their encoding, which is hashed and sent; ``global_plan.attributes`` puts
those of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.comm.wire import with_tuples

__all__ = ["NO_ATTRIBUTES", "Attributes", "attributes_of", "encode_attributes"]

Attributes = Mapping[str, Mapping[str, Any]]
"""Attribute of ``Metadata`` -> name -> fact: of numbers (of 64 bits), strings, ``None``, tuples and dicts of these."""

NO_ATTRIBUTES: Final = b""

_DCP_ATTRIBUTES: Final = {*(field.name for field in fields(Metadata)), "version"}


def encode_attributes(attributes: Attributes) -> bytes:
    """Canonical bytes: the order in which names were given does not matter.

    Raises:
        TypeError, OverflowError: a fact is none of what :data:`Attributes` says.
        ValueError: an attribute is one of DCP's own.
    """
    own = _DCP_ATTRIBUTES & attributes.keys()
    if own:
        raise ValueError(f"a planner cannot add {sorted(own)} to Metadata: DCP has attributes of that name")
    told = {attribute: facts for attribute, facts in attributes.items() if facts}
    return msgspec.msgpack.encode(told, order="deterministic") if told else NO_ATTRIBUTES


def attributes_of(data: bytes) -> dict[str, dict[str, Any]]:
    """What :func:`encode_attributes` encoded.

    Raises:
        ValueError: it did not encode this.
    """
    if data == NO_ATTRIBUTES:
        return {}
    try:
        found = msgspec.msgpack.decode(data, type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes of the metadata cannot be decoded: {error}") from None
    return {attribute: {name: with_tuples(fact) for name, fact in facts.items()} for attribute, facts in found.items()}
