"""``convert``: a checkpoint, or a file of ``torch.save``, in another form. It appears as a whole or not at all.

The target is made under another name beside it, with a note of what is being made. If the process is killed, the next
one with the same arguments goes on with the finished files of safetensors, and makes other forms anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import msgspec

from robust_dcp.conversion.plan import ConversionPlan, plan_conversion
from robust_dcp.conversion.rules import Rules
from robust_dcp.conversion.sources import open_source
from robust_dcp.conversion.to_dcp import write_dcp
from robust_dcp.conversion.to_safetensors import write_safetensors
from robust_dcp.conversion.to_torch import write_torch_file
from robust_dcp.errors import StorageError, entry_point
from robust_dcp.storage.consolidation import check_dtypes
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.exchange import exchange_names
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["ConversionReport", "Form", "convert"]

Form = Literal["dcp", "safetensors", "torch"]

_NOTE_NAME: Final = ".robust_dcp.conversion.json"
_MAX_NOTE_NBYTES: Final = 64 << 20


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion has made.

    Attributes:
        target: where.
        tensors, objects: how many of each.
        nbytes: bytes of tensors.
        left_out: objects that the form cannot hold.
        files_there: how many files an earlier call had finished.
    """

    target: str
    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...] = ()
    files_there: int = 0


@entry_point
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    form: Form,
    rules: Rules | None = None,
    flat: bool = False,
    files: int = 1,
    max_shard_nbytes: int = 5 << 30,
    overwrite: bool = False,
    buffer_nbytes: int = 128 << 20,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ConversionReport:
    """Convert a checkpoint or a file of ``torch.save``.

    Args:
        source: a checkpoint of any kind, or a file of ``torch.save`` with a state dict.
        target: a directory, or for ``form="torch"`` a file.
        form: ``dcp``: a checkpoint that ``load`` reads; ``safetensors``: the files of a Hugging Face model;
            ``torch``: one file that ``torch.load`` reads.
        rules: which items, under which names, with which dtypes; ``None`` for all as they are.
        flat: for ``torch``: whether the names are the keys of one dict. Otherwise it is nested as the source was.
        files: for ``dcp``: how many data files.
        max_shard_nbytes: for ``safetensors``: most bytes of tensors in one file.
        overwrite: whether to replace a target that exists. It stays until the new one is whole.
        buffer_nbytes: about how much data is in memory at a time.
        progress: called with the bytes of tensors that were written, and of all.

    Raises:
        ValueError: the rules do not fit the source, or the form cannot hold an item.
        StorageError: the target exists, there is no room, or a call failed.
        CorruptCheckpoint, UnsafeCheckpoint: the source is damaged, or no data.
    """
    disk: Disk = PosixDisk()
    path = directory_path(target)
    rules = rules or Rules()
    _check_target(path, form, overwrite=overwrite)
    plan = plan_conversion(open_source(os.fspath(source), buffer_nbytes // 2), rules)
    if form == "safetensors":
        check_dtypes(plan.tensors, "leave it out with --exclude")
    note = {
        "source": _identity(os.path.abspath(source)),
        "form": form,
        "rules": asdict(rules),
        "shard": max_shard_nbytes,
    }
    n_there = 0
    piece_nbytes = max(buffer_nbytes // 8, 1)  # a piece is read, cast and written, and the next one is there by then

    def show(done: int) -> None:
        progress(done, plan.nbytes)

    with _alone(path):
        if form == "torch":
            _check_room(path, plan.nbytes)
            _write_file(path, plan, flat=flat, buffer_nbytes=piece_nbytes, show=show)
        else:
            work = _work_directory(disk, path, note, can_go_on=form == "safetensors")
            _check_room(path, plan.nbytes - sum(each.stat().st_size for each in os.scandir(work)))
            if form == "safetensors":
                n_there = write_safetensors(
                    plan, work, disk, max_shard_nbytes=max_shard_nbytes, buffer_nbytes=piece_nbytes, progress=show
                )
            else:
                write_dcp(plan, work, files=files, buffer_nbytes=buffer_nbytes, progress=show)
            disk.fsync_directory(work)
            _take_place(disk, work, path)
    return ConversionReport(
        target=path,
        tensors=len(plan.tensors),
        objects=0 if form == "safetensors" else len(plan.objects),
        nbytes=plan.nbytes,
        left_out=plan.objects if form == "safetensors" else (),
        files_there=n_there,
    )


def _check_target(path: str, form: Form, *, overwrite: bool) -> None:
    """Find out before anything is made whether the target can be there.

    Raises:
        StorageError: it is there, and may not or cannot be replaced.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StorageError(f"{path} is there already; pass overwrite=True (--force) to replace it", path=path)
    if (form == "torch") == os.path.isdir(path):
        there, made = ("directory", "file") if form == "torch" else ("file", "directory")
        raise StorageError(
            f"{path} is there, and is not replaced, because it is a {there}, and a {made} is to be made; remove it, or "
            "take another name",
            path=path,
        )


def _check_room(path: str, nbytes: int) -> None:
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise StorageError(f"{parent} has {free} bytes free, and {path} needs about {nbytes}", path=path)


def _identity(path: str) -> list[Any]:
    """What tells whether a source is still the one that an earlier call has read: its files, sizes and times."""
    if os.path.isfile(path):
        return [path, _stamp(path)]
    files = sorted(os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names)
    return [path, *((os.path.relpath(file, path), *_stamp(file)) for file in files)]


def _stamp(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _work_directory(disk: Disk, path: str, note: Mapping[str, Any], *, can_go_on: bool) -> str:
    """The directory in which the target is made. What a call with other arguments has left there is removed.

    The caller holds the lock of the target, so no other call is at work there.
    """
    text = msgspec.json.encode(note, order="deterministic")
    work = f"{path}.converting"
    if disk.exists(work) and not (can_go_on and _read(os.path.join(work, _NOTE_NAME)) == text):
        shutil.rmtree(work)
    if not disk.exists(work):
        disk.mkdirs(work)
        with open(os.path.join(work, _NOTE_NAME), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return work


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_NOTE_NBYTES)
    except FileNotFoundError:
        return None


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Hold the lock of a target, so that two calls do not make it at once.

    Raises:
        StorageError: another call makes it.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    lock_path = f"{path}.converting.lock"
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another call makes {path} now (it holds {lock_path}); wait for it", path=path
            ) from None
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                os.unlink(lock_path)


def _take_place(disk: Disk, work: str, path: str) -> None:
    """Give the target its name. One that was there stays under it until that moment.

    Where the system can swap two names in one step (``renameat2`` of Linux), there is always something whole under the
    name of the target. Elsewhere a process that is killed between two renames leaves the old one as ``….old``.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path):
        if exchange_names(work, path):
            shutil.rmtree(work)
        else:
            old = f"{work}.old"
            disk.rename(path, old)
            disk.rename(work, path)
            shutil.rmtree(old)
    else:
        disk.rename(work, path)
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(path, _NOTE_NAME))
    disk.fsync_directory(path)
    disk.fsync_directory(parent)


def _write_file(
    path: str, plan: ConversionPlan, *, flat: bool, buffer_nbytes: int, show: Callable[[int], object]
) -> None:
    work = f"{path}.converting"
    try:
        with open(work, "wb") as file:
            write_torch_file(plan, file, flat=flat, buffer_nbytes=buffer_nbytes, progress=show)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error("write", path, error) from error
    finally:
        if os.path.exists(work):
            os.unlink(work)
    PosixDisk().fsync_directory(os.path.dirname(os.path.abspath(path)))
