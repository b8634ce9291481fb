"""Verifies a checkpoint on a disk: its structure, and then its files, on several threads."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from robust_dcp.contents.checks.archives import archive_spans
from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.checks.index_file import check_index
from robust_dcp.contents.checks.record_file import Placed, check_footer, check_items, spans_of_others, spans_of_ours
from robust_dcp.contents.checks.shard_file import check_head, spans_of_shard
from robust_dcp.contents.checks.spans import Span, Task, run_tasks, tasks_of
from robust_dcp.contents.items import Chunk, Contents, Item, StoredFile
from robust_dcp.errors import CorruptCheckpoint, StorageError, UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, holds_raw_bytes, locate, mark_of
from robust_dcp.storage.reading.data_file import DataFile

__all__ = ["verify_files"]

_ARCHIVES: Final = ("common.pt",)
"""Files that Megatron writes beside ``.metadata`` with ``torch.save``."""


def verify_files(
    disk: Disk,
    contents: Contents,
    findings: Findings,
    *,
    jobs: int,
    with_data: bool,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Add what is wrong with the files of a checkpoint.

    Args:
        jobs: how many threads read.
        with_data: whether data is read and compared with checksums; otherwise only sizes, marks and heads are.
        on_progress: is called several times a second.

    Raises:
        StorageError: a call to the file system failed in a way that says nothing about one file.
    """
    if contents.written_by == "robust_dcp":
        check_index(disk, contents.path, findings)
    run_tasks(_all_tasks(disk, contents, findings, with_data=with_data), jobs, on_progress)


def _all_tasks(disk: Disk, contents: Contents, findings: Findings, *, with_data: bool) -> Iterator[Task]:
    held: dict[str, list[tuple[Item, Chunk]]] = defaultdict(list)
    for item in contents:
        for chunk in item.chunks:
            if chunk.file is not None:
                held[chunk.file].append((item, chunk))
    for stored in contents.files:
        if stored.nbytes is not None:  # a missing file was found by its size
            yield from _tasks_of_file(disk, contents, stored, held[stored.name], findings, with_data=with_data)
    for name in _ARCHIVES:
        path = os.path.join(contents.path, name)
        if contents.written_by != "safetensors" and disk.exists(path):
            with _noting(name, findings):
                file = DataFile(disk, path, None)
                spans = archive_spans(file, name, None, 0, file.nbytes, findings) if with_data else iter(())
                yield from tasks_of(file, name, spans, findings)


def _tasks_of_file(
    disk: Disk,
    contents: Contents,
    stored: StoredFile,
    held: list[tuple[Item, Chunk]],
    findings: Findings,
    *,
    with_data: bool,
) -> Iterator[Task]:
    with _noting(stored.name, findings):
        path = locate(disk, contents.path, stored.name, file=os.path.join(contents.path, METADATA_NAME))
        file = DataFile(disk, path, None)
        try:
            spans = _spans(file, contents, stored, held, findings, with_data=with_data)
        except BaseException:
            file.close()
            raise
        yield from tasks_of(file, stored.name, spans, findings)


def _spans(
    file: DataFile,
    contents: Contents,
    stored: StoredFile,
    held: list[tuple[Item, Chunk]],
    findings: Findings,
    *,
    with_data: bool,
) -> Iterator[Span]:
    is_ours = contents.written_by == "robust_dcp" and contents.save_id is not None
    mark = mark_of(contents.save_id) if is_ours and contents.save_id is not None else None
    if holds_raw_bytes(stored.name):
        head = check_head(file, stored.name, mark, held, findings)
        return iter(()) if head is None or not with_data else spans_of_shard(head, findings)
    records = [
        Placed(chunk.start, chunk.start + chunk.stored_nbytes, item, chunk)
        for item, chunk in held
        if chunk.start is not None and chunk.stored_nbytes is not None
    ]
    records.sort(key=lambda each: (each.begin, each.end))
    whole = [each for each in records if each.end <= file.nbytes]
    check_items(file, stored.name, whole, findings)
    if mark is None:
        return spans_of_others(file, stored.name, whole, findings) if with_data else iter(())
    footer = check_footer(file, stored.name, mark, findings)
    if footer is None or not with_data:
        return iter(())
    return spans_of_ours(file, stored.name, footer, records, findings)


@contextlib.contextmanager
def _noting(name: str, findings: Findings) -> Iterator[None]:
    """An error while a file is looked at is a problem of that file."""
    try:
        yield
    except (CorruptCheckpoint, StorageError, UnsafeCheckpoint) as error:
        findings.broken(name, None, "a file that can be read", error.message)
