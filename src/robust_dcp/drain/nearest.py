"""Which of several copies of a checkpoint a load takes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.drain.places import open_place
from robust_dcp.drain.record import is_awaited
from robust_dcp.errors import RobustCheckpointError, StorageError, entry_point
from robust_dcp.storage.files.paths import METADATA_NAME, is_url, locate
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.remote import Calls, place_of


class _Copy(msgspec.Struct, frozen=True):
    """What one place holds, as seen by some ranks.

    Attributes:
        save_id: of the checkpoint; empty if its writer gave none.
        problem: why it cannot be taken; empty if it is whole.
        is_awaited: whether it is local, and its copy elsewhere is not complete yet.
    """

    save_id: str = ""
    problem: str = ""
    is_awaited: bool = False


class _Copies(msgspec.Struct, frozen=True):
    copies: tuple[_Copy | None, ...]


@entry_point
def nearest_copy(
    places: Sequence[str | os.PathLike[str]],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = 300.0,
) -> str:
    """The first of ``places`` that holds a whole copy of the checkpoint, for ``load``.

    A copy is whole if ``.metadata`` is there, and so are all data files that it names, as long as they must be and of
    the same save. A directory of a machine's own is taken only if it is whole for all ranks; into what all machines
    share the coordinator alone looks. Data is not read.

    The last whole place says which save is meant: a directory that still holds another save is not taken. The exception
    is a local one that is newer, because its copy has not arrived yet (``drain_to``).

    Args:
        places: paths and URLs, the nearest first, the durable one last. The same on all ranks.
        process_group, no_dist, timeout_seconds: as for :func:`robust_dcp.load`.

    Raises:
        StorageError: none of them is whole. The error says what each lacks.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{root}/durable/step_1")
        ...     place = robust_dcp.nearest_copy([f"{root}/nvme/step_1", f"{root}/durable/step_1"])
        ...     place == f"{root}/durable/step_1"
        True
    """
    asked = [place_of(place) for place in places]
    if not asked:
        raise ValueError("nearest_copy needs at least one place")
    channel = Channel.for_group(
        process_group, operation=f"look for {asked[-1]}", timeout_seconds=timeout_seconds, no_dist=no_dist
    )

    def look() -> _Copies:
        return _Copies(tuple(_look_at(place, is_coordinator=channel.is_coordinator) for place in asked))

    of_ranks = [each.copies for each in channel.all_gather("copies", look, _Copies)]
    found = [_seen_by_all([each for each in copies if each is not None]) for copies in zip(*of_ranks, strict=True)]
    whole = [(place, copy) for place, copy in zip(asked, found, strict=True) if not copy.problem]
    if not whole:
        each = "\n".join(f"  {place}: {copy.problem}" for place, copy in zip(asked, found, strict=True))
        raise StorageError(
            f"none of {len(asked)} places holds a whole copy of the checkpoint:\n{each}", operation="look"
        )
    meant = whole[-1][1].save_id
    return next(place for place, copy in whole if copy.save_id == meant or copy.is_awaited)


def _seen_by_all(copies: Sequence[_Copy]) -> _Copy:
    save_ids = sorted({each.save_id for each in copies})
    problems = [each.problem for each in copies if each.problem]
    if len(save_ids) > 1:
        problems.append(f"some ranks see save {save_ids[0]} there, and others {save_ids[1]}")
    return _Copy(save_ids[0], next(iter(problems), ""), any(each.is_awaited for each in copies))


def _look_at(place: str, *, is_coordinator: bool) -> _Copy | None:
    """What a place holds: whether all files that ``.metadata`` names are there, long enough and of its save.

    ``None`` if the coordinator looks: thousands of ranks that each open all files would keep a file system busy.
    """
    try:
        end = open_place(place, Calls())
        if not is_coordinator and not end.disk.is_of_this_machine(end.url):
            return None
        data, metadata_path = end.read(METADATA_NAME), end.path_of(METADATA_NAME)
        if data is None:
            return _Copy(problem=f"no {METADATA_NAME} is there")
        metadata = decode_metadata(data, metadata_path)
        save_id = getattr(metadata.storage_meta, "save_id", None) or ""
        ends: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, named_nbytes in ends.items():
            path = locate(end.disk, end.url, name, file=metadata_path)
            file = end.disk.fingerprint(path)
            if file is None or file[1] < named_nbytes:
                is_it = "is not there" if file is None else f"has {file[1]} bytes"
                return _Copy(problem=f"{path} {is_it}, and {METADATA_NAME} names {named_nbytes} bytes in it")
        return _Copy(save_id, is_awaited=not is_url(end.url) and is_awaited(end.disk, end.url))
    except (RobustCheckpointError, ValueError) as error:
        return _Copy(problem=error.message if isinstance(error, RobustCheckpointError) else str(error))
