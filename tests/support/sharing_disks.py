"""File systems on which files share bytes: real ones in images that are mounted, and one that only behaves like it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.posix_disk import PosixDisk

MAKE = {
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
    "xfs with blocks of 16 KiB": ("mkfs.xfs", "-q", "-m", "reflink=1", "-b", "size=16384"),
    "btrfs": ("mkfs.btrfs", "-q"),
}

BLOCK_NBYTES = 4096


class CopyingDisk(PosixDisk):
    """Shares what another file system would share, by a copy: the whole blocks of the range.

    ``code`` makes it refuse, as file systems do.
    """

    def __init__(self, code: int | None = None) -> None:
        super().__init__()
        self.code = code

    def share_extents(self, source: OpenFile, target: OpenFile, offset: int, nbytes: int) -> tuple[int, int]:
        if self.code is not None:
            raise storage_error("share", target.path, OSError(self.code, os.strerror(self.code)))
        begin, end = -(-offset // BLOCK_NBYTES) * BLOCK_NBYTES, (offset + nbytes) // BLOCK_NBYTES * BLOCK_NBYTES
        with open(source.path, "rb") as old, open(target.path, "r+b") as new:
            old.seek(begin)
            new.seek(begin)
            new.write(old.read(end - begin))
        return begin, end


def why_not_mounted(kind: str) -> str | None:
    """Why a file system cannot be mounted here; ``None`` if it can."""
    if shutil.which(MAKE[kind][0]) is None:
        return f"{MAKE[kind][0]} is not installed (apt-get install xfsprogs btrfs-progs)"
    return None if os.geteuid() == 0 and os.path.exists("/dev/loop-control") else "mounting takes root and loop devices"


@contextmanager
def mounted(kind: str, directory: Path) -> Iterator[Path]:
    """A file system of its own below ``directory``."""
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run([*MAKE[kind], str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True, capture_output=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        image.unlink()


def shared_nbytes(path: Path) -> int:
    """How many bytes of a file it shares with others, as its file system says."""
    told = subprocess.run(["filefrag", "-b1", "-v", str(path)], check=True, capture_output=True, text=True).stdout
    # For example "   1:   8192..8192511:  57294848..  65479167:  8184320:  1610612736: shared". The path may hold ":".
    extents = re.findall(r"^ *\d+: +\d+\.\. *\d+: +\d+\.\. *\d+: +(\d+):.*\bshared\b", told, re.MULTILINE)
    return sum(map(int, extents))
