"""How much room a save needs on each file system, and whether there is so much. Found out before the first byte.

Each rank says what it needs where, and the coordinator adds that up. What the save replaces does not count: it stays
until the new checkpoint is committed.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import StorageError, ranks_in_words
from robust_dcp.storage.committing.cleaning import stripe_of
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Placements

__all__ = ["RoomOfRank", "refuse_without_room", "room_of_rank"]


class RoomOfRank(msgspec.Struct, frozen=True):
    """What one rank needs on each file system. What all ranks have in common is sent once.

    Attributes:
        file_systems: texts that tell the file systems from the others that the ranks of the save see.
        paths: a directory of the save on each.
        nbytes, free_nbytes: needed and free, in bytes.
    """

    file_systems: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    free_nbytes: tuple[int, ...] = ()


def room_of_rank(
    disk: Disk,
    directory: str,
    rank: int,
    placements: Placements,
    known_places: npt.NDArray[np.int64] | None,
    *,
    stripes: Sequence[str],
    shared_as: str,
    node: str,
) -> RoomOfRank:
    """What this rank needs, as far as it is known: items of variable size count as much as in the save before.

    Args:
        stripes: the directories that take the files in turn.
        shared_as: the same text on all ranks that see this very directory.
        node: the name of this rank's node. Other directories count for each node.
    """
    nbytes_of: dict[str, int] = defaultdict(int)
    for number, nbytes in enumerate(placements.file_nbytes):
        if number == placements.variable_file and known_places is not None:
            nbytes += int(known_places[:, 1].sum())
        place = stripe_of(rank, number, stripes) if stripes else directory
        nbytes_of[place] += -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    room_of = {place: disk.room(place) for place in {directory, *nbytes_of}}
    main, _ = room_of[directory]
    rooms = [room_of[place] for place in nbytes_of]
    return RoomOfRank(
        tuple(shared_as if number == main else f"{node}: {number}" for number, _ in rooms),
        tuple(nbytes_of),
        tuple(nbytes_of.values()),
        tuple(free_nbytes for _, free_nbytes in rooms),
    )


def refuse_without_room(checkpoint: str, ranks: Sequence[RoomOfRank | None]) -> None:
    """Make sure that all ranks together have room.

    Args:
        ranks: what each rank has said.

    Raises:
        StorageError: they have not. It says what is needed and free on each file system that is too small.
    """
    rooms: dict[str, list[tuple[int, str, int, int]]] = defaultdict(list)
    for rank, said in enumerate(ranks):
        if said is not None:
            for number, name in enumerate(said.file_systems):
                room = (rank, said.paths[number], said.nbytes[number], said.free_nbytes[number])
                rooms[name].append(room)
    too_small = []
    for of_ranks in rooms.values():
        who, paths, nbytes, free_nbytes = zip(*of_ranks, strict=True)
        if sum(nbytes) > min(free_nbytes):
            needs = f"{sum(nbytes)} bytes are needed there for {ranks_in_words(who)}, {min(free_nbytes)} are free"
            too_small.append((paths[0], needs))
    if too_small:
        places = "; ".join(f"{path}: {why}" for path, why in too_small)
        raise StorageError(
            f"{checkpoint} has no room, and nothing was written: {places}. What a save replaces is freed only after "
            "its commit. Free space, or save to another directory",
            path=too_small[0][0],
            errno=errno.ENOSPC,
            operation="begin",
        )
