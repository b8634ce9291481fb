"""Which machine this is, and whether a file system belongs to it alone, according to the kernel.

``disk`` and ``writing`` ask this to find out what a lock proves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["Mount", "boot_id", "is_of_this_machine", "mount_in", "mount_of", "type_in_mounts"]

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"

_LOCAL_TYPES: Final = frozenset(
    [
        "bcachefs",
        "btrfs",
        "exfat",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "nilfs2",
        "ntfs3",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "vfat",
        "xfs",
        "zfs",
    ]
)

_MOUNTS: Final = "/proc/self/mountinfo"


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        place: the directory where it is mounted.
        type: for example ``ext4`` or ``nfs4``.
        source: the device or the server.
        options: of the file system, not of this mount of it.
    """

    place: str
    type: str
    source: str
    options: tuple[str, ...]


def is_of_this_machine(path: str) -> bool:
    """Whether no other machine can open files of the file system of ``path``; ``False`` if that is not known."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            return type_in_mounts(mounts, os.path.realpath(path)) in _LOCAL_TYPES
    except OSError:  # not Linux, or no /proc
        return False


def mount_of(path: str) -> Mount | None:
    """The mount that holds ``path``; ``None`` if the kernel does not tell."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            return mount_in(mounts, os.path.realpath(path))
    except OSError:
        return None


def type_in_mounts(mounts: Iterable[str], path: str) -> str:
    """The type of the file system that holds ``path``, from the lines of ``mountinfo``; empty if no line fits."""
    found = mount_in(mounts, path)
    return "" if found is None else found.type


def mount_in(mounts: Iterable[str], path: str) -> Mount | None:
    """The mount that holds ``path``, from the lines of ``mountinfo``; ``None`` if no line fits.

    A line looks like ``36 35 98:0 / /mnt/data rw,noatime master:1 - ext4 /dev/root rw``. Names have octal escapes.
    """
    longest, found = "", None
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        is_above = place == "/" or path == place or path.startswith(f"{place}/")
        if is_above and len(place) >= len(longest):  # if two mounts have one place, the later one hides the other
            kind, source, options = (*rest.strip().split(" "), "", "", "")[:3]
            longest, found = place, Mount(place, kind, source, tuple(options.split(",")))
    return found


def boot_id() -> str:
    """An id of this boot of this machine; empty if the system does not have one."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # only Linux has it
        return ""
