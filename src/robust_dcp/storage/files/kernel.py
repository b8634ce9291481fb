"""What Linux knows of files and has no function for in Python: alignment, page cache, exchange of names, mounts.

Nothing here opens a file of a checkpoint or changes one, but for :func:`exchange_names` and :func:`allocate`. Where the
kernel cannot be asked, each function has an answer with which everything works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec


@cache
def _c_function(name: str, result: Any, *arguments: Any) -> Callable[..., int] | None:
    """A function of the C library; ``None`` if it has no function of that name."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


# The alignment for direct I/O.

# From linux/stat.h and linux/fcntl.h. The numbers are the same on all architectures.
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_NBYTES: Final = 256
_DIO_ALIGN_AT: Final = 0x98
_TMPFS: Final = 0x01021994


class Alignment(msgspec.Struct, frozen=True):
    """The alignment that direct I/O on a file needs. Both values are powers of two, in bytes.

    Attributes:
        memory: addresses must be multiples of it.
        offset: offsets in the file, and lengths, must be multiples of it.
    """

    memory: int
    offset: int


BUFFERED: Final = Alignment(memory=1, offset=1)
"""Buffered I/O needs no alignment."""

UNKNOWN: Final = Alignment(memory=4096, offset=4096)
"""For kernels before 6.1, which cannot be asked. It is enough for every device with logical blocks of at most a page.
Where it is not enough, the first write fails with EINVAL, and the file goes on buffered.
"""


def alignment_of(fd: int) -> Alignment | None:
    """The alignment for direct I/O on an open file; ``None`` if its file system has no direct I/O (tmpfs, for
    example).
    """
    statx = _c_function(
        "statx", ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    )
    answer = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return UNKNOWN
    (mask,) = struct.unpack_from("=I", answer)
    if mask & _STATX_DIOALIGN:
        memory, offset = struct.unpack_from("=II", answer, _DIO_ALIGN_AT)
        return Alignment(memory, offset) if memory and offset else None
    # From Linux 6.6 on, tmpfs accepts O_DIRECT, reports no alignment, and copies all the same.
    statfs = _c_function("fstatfs", ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    is_tmpfs = statfs is not None and statfs(fd, answer) == 0 and struct.unpack_from("=l", answer)[0] == _TMPFS
    return None if is_tmpfs else UNKNOWN


# The page cache. Reading a byte to find out what it holds (with RWF_NOWAIT, for example) would change the answer: the
# kernel begins to read ahead, and the next question finds these pages in the cache.

_CACHESTAT: Final = 451
_SAME_NUMBER_ON: Final = ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64", "loongarch64")
"""Machines on which cachestat(2) has this system call number. On other machines it is not called."""


def cached_nbytes(fd: int, offset: int, nbytes: int) -> int:
    """How many of ``nbytes`` bytes at ``offset`` are in the page cache: whole pages, and at most ``nbytes``.

    Linux tells this only to the owner of a file and to those who may write to it. To others, mincore(2) of Linux 5.2
    and newer says that all of the file is in the cache, and so does this function. Then we read through the cache, as
    DCP does.
    """
    if nbytes <= 0:
        return 0
    pages = _by_cachestat(fd, offset, nbytes)
    if pages is None:
        pages = _by_mincore(fd, offset, nbytes)
    return nbytes if pages is None else min(nbytes, pages * mmap.PAGESIZE)


def _by_cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    """How many pages of the range are in the cache; ``None`` if the kernel does not say.

    It does not before Linux 6.5 (ENOSYS), in some sandboxes and for files of others (EPERM), and for file systems
    without the usual page cache (EOPNOTSUPP).
    """
    if platform.system() != "Linux" or platform.machine() not in _SAME_NUMBER_ON:
        return None
    # C libraries have no function for cachestat(2) yet.
    pointer = ctypes.c_void_p
    system_call = _c_function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_int, pointer, pointer, ctypes.c_uint)
    asked = (ctypes.c_uint64 * 2)(offset, nbytes)  # struct cachestat_range of linux/mman.h
    answer = (ctypes.c_uint64 * 5)()  # struct cachestat; nr_cache comes first
    if system_call is None or system_call(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(answer), 0) != 0:
        return None
    return answer[0]


def _by_mincore(fd: int, offset: int, nbytes: int) -> int | None:
    """The same as :func:`_by_cachestat`. The range is mapped but not touched, so nothing is read."""
    import numpy as np  # here, because few need it and `robust-dcp ls` must be quick

    mincore = _c_function("mincore", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    start = offset - offset % mmap.PAGESIZE
    try:
        length = min(offset + nbytes, os.fstat(fd).st_size) - start
        if length <= 0:
            return 0
        if mincore is None:
            return None
        with mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            answer = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
            if mincore(address, length, answer.ctypes.data) != 0:
                return None
    except (OSError, ValueError):  # the file cannot be mapped
        return None
    return int((answer & 1).sum())


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve space for the first ``nbytes`` bytes of a file and set its size, by fallocate(2).

    ``os.posix_fallocate`` is not used: if the file system cannot allocate, the C library writes into every block
    itself. That takes as long as the save, and fails on a file that is open for direct I/O.

    Returns:
        ``False`` if the system or the file system cannot do that.

    Raises:
        OSError: it can, and the call failed.
    """
    fallocate = _c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate is not None and fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return fallocate is not None


# Names.

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def exchange_names(one: str, other: str) -> bool:
    """Swap the names of two files or directories in one step, by ``renameat2(2)`` with ``RENAME_EXCHANGE``.

    Returns:
        ``False`` if the system or the file system cannot do that; then nothing has changed.

    Raises:
        OSError: it can, and the call failed.
    """
    text = ctypes.c_char_p
    rename = _c_function("renameat2", ctypes.c_int, ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), one, None, other)


# Mounts: whether a file system belongs to this machine alone.

_MOUNTS: Final = "/proc/self/mountinfo"
_LOCAL_TYPES: Final = re.compile(
    "bcachefs|btrfs|exfat|ext[234]|f2fs|jfs|nilfs2|ntfs3|overlay|ramfs|reiserfs|tmpfs|vfat|xfs|zfs"
)


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
    mount = mount_of(path)
    return mount is not None and _LOCAL_TYPES.fullmatch(mount.type) is not None


def mount_of(path: str) -> Mount | None:
    """The mount that holds ``path``; ``None`` if the kernel does not tell."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            return mount_in(mounts, os.path.realpath(path))
    except OSError:  # not Linux, or no /proc
        return None


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
