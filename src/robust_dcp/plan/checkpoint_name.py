"""What a checkpoint is called in the names of exchanges and in messages, on all ranks alike."""

from __future__ import annotations

import os

from robust_dcp.storage.files.paths import is_url
from robust_dcp.storage.remote import place_of


def checkpoint_name(checkpoint_id: str | os.PathLike[str] | None) -> str:
    """The name of a checkpoint in exchanges and messages. Ranks with another name are in another operation."""
    if checkpoint_id is None:
        return ""
    return place_of(checkpoint_id) if is_url(checkpoint_id) else os.path.normpath(os.fspath(checkpoint_id))
