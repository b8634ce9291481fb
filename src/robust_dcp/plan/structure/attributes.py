"""Attributes that a planner adds to DCP's ``Metadata`` itself, besides the items.

Example: Megatron-Core 0.14 looks for ``mcore_data``, the shapes that tensors had before they were saved in pieces. An
attribute maps names to small facts. Each rank knows the facts about its own names. They are part of its structure, so
they are sent only when they change. This module owns their encoding, which is hashed and sent.
``global_plan.attributes`` merges those of all ranks.
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
"""Attribute of ``Metadata`` -> name -> fact. A fact is made of 64-bit numbers, strings, ``None``, tuples and dicts."""

NO_ATTRIBUTES: Final = b""

_DCP_ATTRIBUTES: Final = {*(field.name for field in fields(Metadata)), "version"}


def encode_attributes(attributes: Attributes) -> bytes:
    """Encode attributes. The order in which names were given does not change the bytes.

    Raises:
        TypeError, OverflowError: a fact is not what :data:`Attributes` allows.
        ValueError: an attribute has the name of one of DCP's own.
    """
    own = _DCP_ATTRIBUTES & attributes.keys()
    if own:
        raise ValueError(f"a planner cannot add {sorted(own)} to Metadata: DCP has attributes of that name")
    told = {attribute: facts for attribute, facts in attributes.items() if facts}
    return msgspec.msgpack.encode(told, order="deterministic") if told else NO_ATTRIBUTES


def attributes_of(data: bytes) -> dict[str, dict[str, Any]]:
    """Decode what :func:`encode_attributes` encoded.

    Raises:
        ValueError: ``data`` is not such an encoding.
    """
    if data == NO_ATTRIBUTES:
        return {}
    try:
        found = msgspec.msgpack.decode(data, type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes of the metadata cannot be decoded: {error}") from None
    return {attribute: {name: with_tuples(fact) for name, fact in facts.items()} for attribute, facts in found.items()}
