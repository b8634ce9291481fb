"""Swaps the names of two files or directories in one step."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from typing import Final

__all__ = ["exchange_names"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def exchange_names(one: str, other: str) -> bool:
    """Swap two names, by ``renameat2(2)`` with ``RENAME_EXCHANGE``.

    Returns:
        ``False`` if the system or the file system cannot do that; then nothing has changed.

    Raises:
        OSError: it can, and the call failed.
    """
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), one, None, other)


@cache
def _renameat2() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
