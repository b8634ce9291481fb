"""The local directory in which a save to a URL is made, before it is copied there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from typing import Final

from robust_dcp.errors import StorageError

__all__ = ["KEEP_VARIABLE", "STAGING_VARIABLE", "check_space", "remove_staging", "staging_directory"]

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


def check_space(path: str, nbytes: int) -> None:
    """Make sure that a staging directory has room.

    Raises:
        StorageError: it has not.
    """
    parent = path
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    free_nbytes = shutil.disk_usage(parent).free
    if free_nbytes < nbytes:
        raise StorageError(
            f"{path}, where a save to a URL is made before it is copied, has no room: expected {nbytes} bytes for this "
            f"rank, found {free_nbytes}; set {STAGING_VARIABLE} to a directory on a larger disk",
            path=path,
            operation="stage",
        )


def remove_staging(path: str) -> None:
    """Remove a staging directory whose checkpoint has arrived, unless it shall stay."""
    if os.environ.get(KEEP_VARIABLE) == "1" or not os.path.basename(path).startswith(_PREFIX):
        return
    shutil.rmtree(path, ignore_errors=True)  # other ranks do the same
