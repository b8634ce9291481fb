"""The common state of a Megatron checkpoint: all that is not sharded. It is the same on all ranks, and rank 0 saves it.

Owns the digest with which ranks compare their common states without sending them, the log message that says what
differs, and the file ``common.pt``. Megatron up to 0.18 has this file. From 0.19 on the common state is saved as a
ShardedObject.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from robust_dcp.comm import Channel
from robust_dcp.staging.blocks import on_cpu
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.storage.records.objects import refusal_of

logger = logging.getLogger(__name__)

COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"

_SHOWN = 20
MAX_NBYTES = 16 << 30
"""A file beside the shards that is longer is damaged."""


class LeafDigests(msgspec.Struct, frozen=True):
    """The digests of all leaves of a nested state dict, by path."""

    digests: dict[str, int]

    def whole(self) -> int:
        """One digest of 64 bits over all leaves. The order of the dicts does not matter."""
        data = msgspec.msgpack.encode(sorted(self.digests.items()))
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def leaf_digests(common: Any) -> LeafDigests:
    """Digest every leaf: tensors as ``torch.save`` writes them, other values by their pickle.

    A value that cannot be pickled counts by its class only. In rare cases equal values pickle differently. Therefore a
    difference is only logged and is never an error, as in stock.
    """
    return LeafDigests({path: _digest(value) for path, value in _leaves(common, "")})


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    is_instance_of_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, Mapping):
        children = value
    elif isinstance(value, (list, tuple)):
        children = dict(enumerate(value))
    elif isinstance(value, argparse.Namespace) or (is_instance_of_dataclass and hasattr(value, "__dict__")):
        children = vars(value)
    else:
        yield path, value
        return
    yield f"{path}#", f"{type(value).__name__} of {len(children)}"
    for name, child in children.items():
        yield from _leaves(child, f"{path}.{name}" if path else str(name))


def _digest(value: Any) -> int:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach()  # a clone has only its own memory, and torch.save writes all of it
            data = encode_common(value if value.is_meta else on_cpu(value).clone())
        else:
            data = pickle.dumps(value, protocol=4)
    except Exception:  # a user's __reduce__ may raise anything; the save raises it again if it saves this
        data = b""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return int.from_bytes(hashlib.blake2b(kind.encode() + data, digest_size=8).digest(), "little")


def report_differences(channel: Channel, phase: str, own: LeafDigests) -> None:
    """Log on each rank which leaves differ from those of rank 0. All ranks call it after their digests differed."""
    first = channel.broadcast(phase, lambda: own, LeafDigests).digests
    mine = own.digests
    only_there = sorted(path for path in first.keys() - mine.keys() if not path.endswith("#"))
    only_here = sorted(path for path in mine.keys() - first.keys() if not path.endswith("#"))
    differing = sorted(path for path in mine.keys() & first.keys() if mine[path] != first[path])
    if only_there or only_here or differing:
        logger.warning(
            # Stock's line, which scripts look for. Then ours.
            "Rank %d common state dict differs from rank %d common state dict. Keys only on rank %d: %s, "
            "Keys only on %d: %s, Mismatched keys: %s. That of rank %d is saved",
            channel.ranks[channel.rank],
            channel.ranks[channel.coordinator_rank],
            channel.ranks[channel.coordinator_rank],
            only_there[:_SHOWN],
            channel.ranks[channel.rank],
            only_here[:_SHOWN],
            differing[:_SHOWN],
            channel.ranks[channel.coordinator_rank],
        )


def encode_common(common: Any) -> bytes:
    """Make the bytes of ``common.pt``. Stock Megatron loads them with ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


def refused_in(common: dict[str, Any], encoded: bytes) -> dict[str, NotData]:
    """Find what a load would refuse in the common state, by path.

    The whole is checked first. Single leaves are checked only if the whole holds something that would be refused.

    Args:
        encoded: what :func:`encode_common` returned for this common state.
    """
    whole = refusal_of(encoded)
    if whole is None:
        return {}
    refused = {}
    for path, value in _leaves(common, ""):
        if not path.endswith("#"):
            refusal = refusal_of(encode_common(value))
            if refusal is not None:
                refused[f"{COMMON_FILE}: {path}"] = refusal
    return refused or {COMMON_FILE: whole}
