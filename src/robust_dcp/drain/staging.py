"""The local directory in which a save to a URL is made, before it is copied there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from typing import Final

from robust_dcp.environment import value_of

__all__ = ["KEEP_VARIABLE", "STAGING_VARIABLE", "remove_staging", "staging_directory"]

STAGING_VARIABLE: Final = "ROBUST_DCP_STAGING"
"""The environment variable that names the directory below which saves to URLs are made."""

KEEP_VARIABLE: Final = "ROBUST_DCP_KEEP_STAGING"
"""The environment variable that makes them stay there (``1``)."""

_PREFIX: Final = "robust_dcp-"


def staging_directory(url: str) -> str:
    """Where a save to ``url`` is made. It depends on the URL only, so all ranks find the same."""
    root = os.environ.get(STAGING_VARIABLE) or os.path.join(tempfile.gettempdir(), f"{_PREFIX}staging-{os.getuid()}")
    name = url.rstrip("/").rpartition("/")[2]
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return os.path.join(os.path.abspath(root), f"{_PREFIX}{name}-{digest}")


def remove_staging(path: str) -> None:
    """Remove a staging directory whose checkpoint has arrived, unless it shall stay."""
    if value_of(KEEP_VARIABLE) or not os.path.basename(path).startswith(_PREFIX):
        return
    shutil.rmtree(path, ignore_errors=True)  # other ranks do the same
