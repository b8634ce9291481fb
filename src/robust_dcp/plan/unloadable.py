"""Finds what is saved but a load would refuse. It uses the load's rule, and reports it once per save.

This module holds what one rank has found in one save, and words it. ``RobustPlanner`` passes it the data of each item
that is pickled: objects, and tensors that are more than their bytes. The session brings together what all ranks have
found.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.errors import UnsafeCheckpoint, ranks_in_words
from robust_dcp.report import listed
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.storage.records.objects import pickle_of, refusal_of
from robust_dcp.storage.records.record import is_fixed_size
from robust_dcp.storage.records.trust import registered_by_user
from robust_dcp.storage.writing.item_source import Resolve, saved_by_torch
from robust_dcp.structure_cache import Cache

OnUnloadableObject = Literal["warn", "error", "ignore"]

logger = logging.getLogger(__name__)

_VERDICTS: Final[Cache[tuple[frozenset[str], bytes], tuple[NotData | None]]] = Cache(
    max_nbytes=5_000_000, max_entries=10_000
)
"""The result for each pickle, because most objects are saved again unchanged. Classes that are registered to be loaded
change it. The values of tensors within an object decide nothing, so they are not looked at again."""


class UnloadableObjects:
    """What one rank has found in one save. The writer's threads add to it.

    Args:
        mode: what to do about unloadable objects.
        refused: what was found before the save began, by key.

    Attributes:
        refused: why a load would refuse an object, by key.
    """

    def __init__(self, mode: OnUnloadableObject = "warn", refused: Mapping[str, NotData] | None = None) -> None:
        self.mode: OnUnloadableObject = mode
        self._registered = frozenset(registered_by_user())
        self.refused: dict[str, str] = {key: str(refusal) for key, refusal in (refused or {}).items()}

    def take(self, key: str, data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
        """Take the data of an item on its way to the writer: check what is pickled.

        A tensor that dtype, shape and bytes do not describe fully, for example a quantized one, is pickled here. So a
        background save, which takes its data before training goes on, saves the same bytes as a save that waits.

        Returns:
            The data to write.
        """
        if isinstance(data, torch.Tensor):
            if is_fixed_size(data):
                return data
            data = saved_by_torch(data)
        if self.mode != "ignore":
            pickled = data.getvalue()
            digest = self._registered, hashlib.blake2b(pickle_of(pickled), digest_size=16).digest()
            verdict = _VERDICTS.get(digest)
            if verdict is None:
                verdict = (refusal_of(pickled),)
                _VERDICTS.put(digest, verdict, 500)
            if verdict[0] is not None:
                self.refused[key] = str(verdict[0])
        return data

    def resolve(self, resolve_data: Resolve, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item, as a planner's ``resolve_data`` gives it and :meth:`take` takes it."""
        return self.take(write_item.index.fqn, resolve_data(write_item))

    def raise_if_forbidden(self, checkpoint: str) -> None:
        """Raise :class:`UnsafeCheckpoint` if the mode is ``"error"`` and anything was found."""
        if self.mode == "error" and self.refused:
            words = _in_words({key: (why, ()) for key, why in self.refused.items()})
            raise UnsafeCheckpoint(
                f'{checkpoint} is not saved (on_unloadable_object="error"): {words}', what=next(iter(self.refused))
            )


def report_unloadable(checkpoint: str, refused: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """On the coordinator, warn once of what all ranks have found.

    Args:
        refused: for each rank that has found something a dict from key to reason.

    Returns:
        The reason for each key.
    """
    together: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, keys in refused.items():
        for key, why in keys.items():
            first, ranks = together.get(key, (why, ()))
            together[key] = (first, (*ranks, rank))
    logger.warning("%s is saved, but cannot be loaded as it is: %s", checkpoint, _in_words(together))
    return {key: why for key, (why, _) in together.items()}


def _in_words(refused: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    shown = [
        f"{key!r} needs {why}" + (f" ({ranks_in_words(list(ranks))})" if ranks else "")
        for key, (why, ranks) in sorted(refused.items())
    ]
    return (
        f"a load refuses {len(refused)} object(s) of it: {listed(shown, between='; ')}. Give what has a state_dict "
        "(modules, optimizers, schedulers) a key of its own at the top of the state dict. Save plain values (numbers, "
        "text, lists, dicts, tensors) in place of other objects, register their classes with "
        "torch.serialization.add_safe_globals([...]) in the program that saves and in the one that loads, or load with "
        "trusted=True, which runs whatever code a checkpoint names"
    )
