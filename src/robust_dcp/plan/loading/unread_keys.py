"""What of a checkpoint no rank of a load has asked for, in one line by groups of keys.

Each rank sends one bit for each key of the checkpoint, compressed. It sends nothing if it asks for all of them. The
coordinator puts the bits together. ``api.load`` calls this module.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.storage.index import ask_index

__all__ = ["AskedKeys", "asked_keys", "unread_in_words"]

_SHOWN_GROUPS: Final = 8
_SHOWN_KEYS: Final = 3


class AskedKeys(msgspec.Struct, frozen=True):
    """The keys that a rank has asked for.

    Attributes:
        bits: one bit for each key of the checkpoint, in the order of the sorted keys; compressed by ``zlib``.
    """

    bits: bytes


def asked_keys(metadata: Metadata, asked: Mapping[str, Any]) -> AskedKeys | None:
    """Which keys of a checkpoint are in a state dict; ``None`` if all are."""
    saved = metadata.state_dict_metadata
    numbers: Collection[int] | None = ask_index(metadata, lambda index: index.names.find_all(asked).values())
    if numbers is None:
        numbers = [number for number, key in enumerate(sorted(saved)) if key in asked]
    if len(numbers) == len(saved):
        return None
    bits = np.zeros(len(saved), dtype=np.bool_)
    bits[list(numbers)] = True
    return AskedKeys(zlib.compress(np.packbits(bits).tobytes(), 1))


def unread_in_words(metadata: Metadata, asked: Sequence[AskedKeys | None]) -> str:
    """Say which keys no rank has asked for; nothing if there are none.

    Args:
        asked: what each rank has asked for; ``None`` for a rank that has asked for all, or whose planner does not tell.
    """
    if None in asked:
        return ""
    n_saved = len(metadata.state_dict_metadata)
    found = np.zeros(n_saved, dtype=np.bool_)
    for bits in {rank.bits for rank in asked if rank is not None}:
        found |= np.unpackbits(np.frombuffer(zlib.decompress(bits), dtype=np.uint8), count=n_saved).astype(np.bool_)
    if found.all():
        return ""
    saved = sorted(metadata.state_dict_metadata)
    sizes = Counter(map(_group, saved))
    unread: dict[str, list[str]] = defaultdict(list)
    for number in np.flatnonzero(~found).tolist():
        unread[_group(saved[number])].append(saved[number])
    groups = [_group_in_words(group, keys, sizes[group]) for group, keys in list(unread.items())[:_SHOWN_GROUPS]]
    more = f" and {len(unread) - _SHOWN_GROUPS} more groups" if len(unread) > _SHOWN_GROUPS else ""
    return f"nobody has asked for {int((~found).sum())} of its {n_saved} keys: {', '.join(groups)}{more}"


def _group(key: str) -> str:
    return key.partition(".")[0]


def _group_in_words(group: str, keys: Sequence[str], size: int) -> str:
    if len(keys) < size:
        shown = ", ".join(map(repr, keys[:_SHOWN_KEYS])) + (", …" if len(keys) > _SHOWN_KEYS else "")
        return f"{group} ({len(keys)} of {size}: {shown})"
    return group if keys == [group] else f"{group} (all {size})"
