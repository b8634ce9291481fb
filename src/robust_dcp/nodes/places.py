"""Which processes see the same directory."""

from __future__ import annotations

import os
import socket

from robust_dcp.environment import boot_id
from robust_dcp.storage.files.disk import Disk


def where(disk: Disk, path: str) -> str:
    """A text that all processes have in common which see this very directory, or would make it in the same one."""
    while not disk.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    inode = (disk.fingerprint(path) or (0,))[0]
    return f"{boot_id() or socket.gethostname()} {disk.room(path)[0]} {inode}"
