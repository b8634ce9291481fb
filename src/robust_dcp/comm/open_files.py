"""Raises the number of files that this process may open, before connections need them.

gloo ends the process if it cannot open a file. The link calls this before it connects.
"""

from __future__ import annotations

import os
import resource

from robust_dcp.errors import RobustCheckpointError

__all__ = ["ensure_open_files"]

_SPARE = 64
"""Room for files that others open meanwhile: data files, the listening socket, libraries."""


def ensure_open_files(n_more: int) -> None:
    """Make sure that this process may open ``n_more`` files. Raise its soft limit if necessary.

    Raises:
        RobustCheckpointError: the hard limit is too low.
    """
    if n_more == 0:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    needed = n_open + n_more + _SPARE
    if needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RobustCheckpointError(
            f"connecting to {n_more} ranks needs {needed} open files, of which {n_open} are open already, and this "
            f"process may open {hard}; raise the hard limit (ulimit -Hn {2 * needed}) before the job starts"
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(hard, 2 * needed), hard)
    )
