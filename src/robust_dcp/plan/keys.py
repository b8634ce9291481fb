"""Says what does not fit between the keys of a state dict and those of a checkpoint, in words.

Of keys that the checkpoint does not have: what it has instead. Only names are compared, and the cost is bounded even
for hundreds of thousands of them. Of keys that no rank of a load has asked for, and of those that may be missing: one
line each, by groups of keys. For that each rank sends one bit for each key of the checkpoint, compressed, and the first
of its missing keys; nothing if it asks for exactly what is there.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import compress
from typing import Any, Final

import msgspec
import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.names import WRAPPERS, fits, without_wrappers
from robust_dcp.report import listed
from robust_dcp.storage.index.stored_index import index_of

_PARTS_IN_A_PREFIX: Final = 3
_MISSING_COMPARED: Final = 1000
_EXAMPLES: Final = 4
_SHOWN_KEYS: Final = 3
_NEIGHBOURS: Final = 100
_MISSING_SENT: Final = 100
_ALIKE: Final = 0.75


def what_is_saved(asked: Collection[str], saved: Collection[str]) -> str:
    """Say how many keys the checkpoint has, with examples, preferably of keys that the state dict does not ask for."""
    unread = set(saved).difference(asked)
    examples = sorted(unread or saved)
    examples = examples[:: max(1, len(examples) // _EXAMPLES)][:_EXAMPLES]
    text = f"the checkpoint has {len(saved)} key{'' if len(saved) == 1 else 's'}"
    if unread:
        text += f", {len(unread)} of them not asked for"
    return f"{text}: {', '.join(map(repr, examples))}{', …' if len(examples) < len(unread or saved) else ''}"


def renamed_in_words(missing: Sequence[str], asked: Collection[str], saved: Collection[str]) -> str:
    """Describe the one change of names that explains most of the missing keys. The text is empty if there is none.

    Args:
        missing: the keys of ``asked`` that are not in ``saved``.
        asked: the keys of the state dict.
        saved: the keys of the checkpoint.
    """
    unread = set(saved).difference(asked)
    n_found, how = _wrapped(missing, unread) or _renamed(missing, unread) or (0, "")
    how_many = f"all {len(missing)}" if n_found == len(missing) else f"{n_found} of the {len(missing)}"
    return f"{how_many} missing keys are there {how}" if how else ""


def _wrapped(missing: Sequence[str], unread: Collection[str]) -> tuple[int, str] | None:
    """How many missing keys match after the parts that wrappers add are removed, and a text that says so."""
    of_bare = {without_wrappers(name): name for name in unread}
    pairs = [(key, of_bare[bare]) for key in missing if (bare := without_wrappers(key)) in of_bare]
    if not pairs or 2 * len(pairs) < len(missing):
        return None
    key, name = pairs[0]
    here, there = (set(each.split(".")) & WRAPPERS.keys() for each in pairs[0])
    by = " and ".join(WRAPPERS[part] for part in sorted(here ^ there or here))
    how = f"under such names as {name!r} for {key!r}"
    return len(pairs), f"{how} ({by}: save and load the state dict of the same module, wrapped or not)"


def _renamed(missing: Sequence[str], unread: Collection[str]) -> tuple[int, str] | None:
    """How many missing keys exist with another prefix, and a text that says so; ``None`` if they are few."""
    prefixes_of: dict[str, list[str]] = defaultdict(list)
    for name in unread:
        for prefix in _prefixes(name):
            prefixes_of[name[len(prefix) :]].append(prefix)
    votes: Counter[tuple[str, str]] = Counter()  # the prefixes here and in the checkpoint; one may be empty
    for key in missing[:: max(1, len(missing) // _MISSING_COMPARED)]:
        for here in _prefixes(key):
            # The longest common end says most. An end that many names have ("weight") says nothing.
            if found := prefixes_of.get(key[len(here) :], [])[:_EXAMPLES]:
                votes.update((here, each) for each in found)
                break
    for (here, there), _ in votes.most_common(_EXAMPLES):
        n_found = sum(key.startswith(here) and there + key[len(here) :] in unread for key in missing)
        # If the prefix differs on both sides, a single key proves nothing.
        if 2 * n_found >= len(missing) and (n_found > 1 or not (here and there)):
            if here and there:
                return n_found, f"with {there!r} in place of {here!r}"
            if here:
                return n_found, f"without {here!r} (pass what the state dict has under {here[:-1]!r})"
            return n_found, f"with {there!r} before them (pass {{{there[:-1]!r}: state_dict}})"
    return None


def near_names(missing: Sequence[str], asked: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """For missing keys the name among those that are not asked for that looks most like it. Of many names only those
    are compared that have the longest beginning or the longest end in common."""
    unread = set(saved).difference(asked)
    ascending = sorted(unread)
    by_end = sorted(name[::-1] for name in unread)
    near = {}
    for key in missing:
        at, at_end = bisect_left(ascending, key), bisect_left(by_end, key[::-1])
        candidates = ascending[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
        candidates += [name[::-1] for name in by_end[max(0, at_end - _NEIGHBOURS) : at_end + _NEIGHBOURS]]
        if matches := get_close_matches(key, candidates, n=1, cutoff=_ALIKE):
            near[key] = matches[0]
    return near


def _prefixes(name: str) -> Iterator[str]:
    """Possible prefixes of a name, shortest first: nothing, its first part, its first two parts, …"""
    at = 0
    yield ""
    for _ in range(_PARTS_IN_A_PREFIX):
        at = name.find(".", at) + 1
        if not at:
            return
        yield name[:at]


class AskedKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """The keys that a rank has asked for.

    Attributes:
        bits: one bit for each key of the checkpoint, in the order of the sorted keys; compressed by ``zlib``. Empty if
            it has asked for all.
        missing: the first of those that the checkpoint does not have.
        n_missing: how many these are.
    """

    bits: bytes = b""
    missing: tuple[str, ...] = ()
    n_missing: int = 0


def asked_keys(metadata: Metadata, asked: Mapping[str, Any], missing: Sequence[str]) -> AskedKeys | None:
    """Which keys of a checkpoint are in a state dict; ``None`` if all are, and none is missing.

    Args:
        missing: the keys of ``asked`` that the checkpoint does not have.
    """
    saved = metadata.state_dict_metadata
    index = index_of(metadata)
    if index is not None:
        numbers = index.find_all(asked)
        numbers = numbers[numbers >= 0]
    else:
        numbers = np.flatnonzero([key in asked for key in sorted(saved)])
    if len(numbers) == len(saved):
        return AskedKeys(b"", tuple(missing[:_MISSING_SENT]), len(missing)) if missing else None
    bits = np.zeros(len(saved), dtype=np.bool_)
    bits[numbers] = True
    compressed = zlib.compress(np.packbits(bits).tobytes(), 1)
    return AskedKeys(compressed, tuple(missing[:_MISSING_SENT]), len(missing))


def asked_by_any(asked: Sequence[AskedKeys | None]) -> AskedKeys | None:
    """What several ranks have asked for together; ``None`` for all keys."""
    if any(rank is None or not rank.bits for rank in asked):
        return None
    several = {rank.bits for rank in asked if rank is not None}
    columns = [np.frombuffer(zlib.decompress(bits), dtype=np.uint8) for bits in several]
    return AskedKeys(zlib.compress(np.bitwise_or.reduce(columns).tobytes(), 1))


def unread_keys(metadata: Metadata, asked: AskedKeys | None) -> list[str]:
    """The keys of a checkpoint that were not asked for, ascending."""
    if asked is None:
        return []
    n_saved = len(metadata.state_dict_metadata)
    found = np.unpackbits(np.frombuffer(zlib.decompress(asked.bits), dtype=np.uint8), count=n_saved).astype(np.bool_)
    return list(compress(sorted(metadata.state_dict_metadata), ~found)) if not found.all() else []


def unread_in_words(metadata: Metadata, asked: Sequence[AskedKeys | None], ignored: Sequence[str] = ()) -> str:
    """Say which keys no rank has asked for; nothing if there are none.

    Args:
        asked: what each rank has asked for; ``None`` for a rank that has asked for all, or whose planner does not tell.
        ignored: patterns of keys of which nothing is said.
    """
    saved, unread_by_any = metadata.state_dict_metadata, unread_keys(metadata, asked_by_any(asked))
    unread = [key for key in unread_by_any if not fits(key, ignored)]
    if not unread:
        return ""
    groups = _in_groups(unread, Counter(map(_group, saved)))
    return f"nobody has asked for {len(unread)} of its {len(saved)} keys: {groups}"


def missing_in_words(asked: Sequence[AskedKeys | None], allowed: Sequence[str] = ()) -> str:
    """Say which keys that ranks have asked for are missing in the checkpoint; nothing if there are none.

    Args:
        asked: what each rank has asked for.
        allowed: patterns of keys of which nothing is said.
    """
    told = [rank for rank in asked if rank is not None]
    missing = sorted({key for rank in told for key in rank.missing if not fits(key, allowed)})
    if not missing:
        return ""
    at_least = "at least " if any(rank.n_missing > len(rank.missing) for rank in told) else ""
    return f"it does not have {at_least}{len(missing)} of the keys, which keep their values: {_in_groups(missing)}"


def _in_groups(keys: Sequence[str], sizes: Mapping[str, int] | None = None) -> str:
    """Keys by the first part of their names.

    Args:
        sizes: how many keys of each group there are, if that is worth a word.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[_group(key)].append(key)
    words = []
    for group, members in groups.items():
        if members == [group]:
            words.append(group)
        elif sizes is not None and len(members) == sizes[group]:
            words.append(f"{group} (all {len(members)})")
        else:
            of = "" if sizes is None else f" of {sizes[group]}"
            words.append(f"{group} ({len(members)}{of}: {listed(map(repr, members), _SHOWN_KEYS)})")
    return listed(words)


def _group(key: str) -> str:
    return key.partition(".")[0]
