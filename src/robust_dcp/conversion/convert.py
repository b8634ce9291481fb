"""``convert``: a checkpoint, or a file of ``torch.save``, in another form. It appears as a whole or not at all.

The target is made in a directory beside it (``workplace``), with a note of what is being made. If the process is
killed, the next one with the same arguments goes on with the finished files of safetensors, and makes other forms anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from robust_dcp.conversion.plan import ConversionPlan, plan_conversion
from robust_dcp.conversion.rules import Rules
from robust_dcp.conversion.sources import open_source
from robust_dcp.conversion.to_dcp import write_dcp
from robust_dcp.conversion.to_safetensors import write_safetensors
from robust_dcp.conversion.to_torch import write_torch_file
from robust_dcp.conversion.workplace import workplace_of
from robust_dcp.errors import StorageError, entry_point
from robust_dcp.storage.consolidation import check_dtypes
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts import layout_named

__all__ = ["ConversionReport", "Form", "convert"]

Form = Literal["dcp", "safetensors", "torch"]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion has made.

    Attributes:
        target: where.
        tensors, objects: how many of each.
        nbytes: bytes of tensors.
        left_out: objects that the form cannot hold.
        files_there: how many files an earlier call had finished.
        unused: patterns of the rules that no item has fitted. They may be mistyped.
    """

    target: str
    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...] = ()
    files_there: int = 0
    unused: tuple[str, ...] = ()


@entry_point
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    form: Form,
    rules: Rules | None = None,
    flat: bool = False,
    layout: str = "torch",
    files: int = 1,
    max_shard_nbytes: int = 5 << 30,
    overwrite: bool = False,
    buffer_nbytes: int = 128 << 20,
    progress: Callable[[int, int], object] = lambda done, total: None,
    disk: Disk | None = None,
) -> ConversionReport:
    """Convert a checkpoint or a file of ``torch.save``.

    Args:
        source: a checkpoint of any kind, or a file of ``torch.save`` with a state dict.
        target: a directory, or for ``form="torch"`` a file.
        form: ``dcp``: a checkpoint that ``load`` reads; ``safetensors``: the files of a Hugging Face model;
            ``torch``: one file that ``torch.load`` reads.
        rules: which items, under which names, with which dtypes; ``None`` for all as they are.
        flat: for ``torch``: whether the names are the keys of one dict. Otherwise it is nested as the source was.
        layout: for ``dcp``: the layout of the data files, as for ``RobustWriter``.
        files: for ``dcp``: how many data files.
        max_shard_nbytes: for ``safetensors``: most bytes of tensors in one file.
        overwrite: whether to replace a target that exists. It stays until the new one is whole.
        buffer_nbytes: about how much data is in memory at a time.
        progress: called with the bytes of tensors that were written, and of all.
        disk: the file system of the target.

    Raises:
        ValueError: the rules do not fit the source, the form cannot hold an item, or there is no such layout.
        StorageError: the target exists, there is no room, or a call failed.
        CorruptCheckpoint, UnsafeCheckpoint: the source is damaged, or no data.
    """
    layout_named(layout)
    disk = PosixDisk() if disk is None else disk
    path = os.path.abspath(directory_path(target))
    rules = rules or Rules()
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

    with workplace_of(disk, path) as place:
        _check_target(path, form, overwrite=overwrite)
        if form == "safetensors":
            place.begin(json.dumps(note, sort_keys=True).encode())
            disk.mkdirs(place.made)
            _check_room(path, plan.nbytes - sum(each.stat().st_size for each in os.scandir(place.made)))
            n_there = write_safetensors(
                plan, place.made, disk, max_shard_nbytes=max_shard_nbytes, buffer_nbytes=piece_nbytes, progress=show
            )
        else:
            place.clear()
            _check_room(path, plan.nbytes)
            if form == "dcp":
                write_dcp(
                    plan,
                    place.made,
                    disk,
                    target=path,
                    layout=layout,
                    files=files,
                    buffer_nbytes=buffer_nbytes,
                    progress=show,
                )
            else:
                _write_file(disk, place.made, plan, flat=flat, buffer_nbytes=piece_nbytes, show=show)
        place.publish()
    return ConversionReport(
        target=os.fspath(target),
        tensors=len(plan.tensors),
        objects=0 if form == "safetensors" else len(plan.objects),
        nbytes=plan.nbytes,
        left_out=plan.objects if form == "safetensors" else (),
        files_there=n_there,
        unused=plan.unused,
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


def _write_file(
    disk: Disk, path: str, plan: ConversionPlan, *, flat: bool, buffer_nbytes: int, show: Callable[[int], object]
) -> None:
    file = disk.open_new(path)
    try:
        write_torch_file(plan, disk, file, flat=flat, buffer_nbytes=buffer_nbytes, progress=show)
        disk.fsync(file)
    finally:
        disk.close(file)
