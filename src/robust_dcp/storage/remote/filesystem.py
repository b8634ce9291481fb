"""Which file system of fsspec a URL means.

This module owns what a URL looks like, and the import of fsspec. It makes no call to a store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.paths import is_url

__all__ = ["filesystem_of", "local_path_of", "place_of"]


def place_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """``checkpoint_id`` as a path, or as a URL without a slash at its end. ``Path("s3://bucket")`` is a URL again.

    Raises:
        ValueError: it is a ``file://`` URL of another machine.
    """
    place = os.fsdecode(checkpoint_id)
    if not is_url(checkpoint_id):
        return place
    scheme, slashes, rest = re.split(r":(/+)", place.strip(), maxsplit=1)
    scheme, rest = scheme.lower(), rest.rstrip("/")
    if scheme != "file":
        return f"{scheme}://{rest}"  # memory:///a has an empty host
    if slashes == "//":
        host, _, rest = rest.partition("/")
        if host.lower() != "localhost":
            raise ValueError(
                f"{place!r} names a file of the host {host!r}, and file:// reaches the file systems of this machine "
                f"only: write file:///{host}/{rest} if {host!r} is the name of a directory, or mount the file system "
                "of that host and pass the path"
            )
    return f"file:///{rest}"


def local_path_of(place: str) -> str | None:
    """The path that a place means if it is on a mounted file system, such as ``file:///data``; else ``None``."""
    if not is_url(place):
        return place
    return place[len("file://") :] if place.startswith("file://") else None


def filesystem_of(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it.

    Args:
        storage_options: what fsspec passes to the store, such as ``{"endpoint_url": …}``.

    Raises:
        StorageError: fsspec, or the package for this kind of store, is not installed.
        ValueError: fsspec knows no such store.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _not_installed(url, "fsspec") from error
    try:
        # What is there may change while we look at it, so listings are never remembered.
        filesystem, path = url_to_fs(url, **{"use_listings_cache": False, **(storage_options or {})})
    except ImportError as error:
        raise _not_installed(url, str(error)) from error
    except ValueError as error:
        raise ValueError(f"{url!r} is a URL that cannot be used: {error}") from error
    if "local" in filesystem.protocol:  # fsspec takes a scheme of one letter for a drive
        raise ValueError(f"{url!r} is a URL that cannot be used: Protocol not known: {url.partition(':')[0]}")
    return filesystem, path


def _not_installed(url: str, what: str) -> StorageError:
    return StorageError(
        f"{url} is in a store that needs another package ({what}): pip install 'robust_dcp[remote]', and the package "
        "of fsspec for that store (s3fs, gcsfs, adlfs)",
        path=url,
        operation="open",
    )
