"""Commits a save on several nodes that do not share its directory: each has its own files under the same path.

This module owns the exchanges of such a commit. One rank leads in each directory: in the coordinator's it is the
coordinator, in each other one the rank that has announced the save there.

Take two nodes. Both make the index and ``.metadata`` durable under other names; that is the first exchange. Only then
both rename them; that is the second one. Only then both remove the files of the checkpoint that was there before. So if
the job is killed between the two renames, one node has the new checkpoint and the other one the old one, but the data
files of both are still whole on all nodes. A load may take either.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.report import listed
from robust_dcp.storage.committing.save import MetadataToPublish, NodeOfSave, Save

logger = logging.getLogger(__name__)

_LAST: dict[str, str] = {}
"""Below which directory the last such save of this process was. The next one there is no news for people."""


class _Place(msgspec.Struct, frozen=True):
    """Where a rank has written.

    Attributes:
        host: the name of its machine.
        leads: whether it leads in its directory.
        piece, block: its piece of ``.metadata``, and its block of the index.
    """

    host: str
    leads: bool
    piece: bytes
    block: bytes


class _ForDirectory(msgspec.Struct, frozen=True):
    """What the coordinator sends to the rank that leads in a directory.

    Attributes:
        metadata, index: the bytes of the files.
        files: the data files that ``metadata`` names.
        beside: the files beside the data; ``None`` for one that the checkpoint does not have.
        nodes: all nodes of the save.
    """

    metadata: bytes
    index: bytes
    files: tuple[str, ...]
    beside: dict[str, bytes | None]
    nodes: tuple[NodeOfSave, ...]


def commit_on_nodes(
    channel: Channel,
    phase: Callable[[str], str],
    directory: Save,
    *,
    leads_directory: bool,
    pieces: tuple[bytes, bytes],
    make_metadata: Callable[[], MetadataToPublish],
) -> None:
    """Commit on all nodes. Afterwards the ranks that lead call ``Save.tidy_up``.

    Args:
        phase: makes the name of an exchange.
        directory: this rank's directory.
        leads_directory: whether this rank leads in another directory than the coordinator's.
        pieces: this rank's piece of ``.metadata``, and its block of the index. The directory of each node needs all.
        make_metadata: makes the metadata; called on the coordinator.

    Raises:
        RobustCheckpointError: the same on all ranks. If ``directory.may_be_committed``, some node may have committed.
    """
    leads = leads_directory or channel.is_coordinator
    _, places = channel.gather(phase("places"), lambda: _Place(socket.gethostname(), leads, *pieces), _Place)

    def for_directories() -> list[_ForDirectory | None]:
        made, ranks = make_metadata(), defaultdict[str, list[int]](list)
        for rank, place in enumerate(places or ()):
            if place is not None:
                ranks[place.host].append(rank)
        nodes = tuple(NodeOfSave(host, tuple(each)) for host, each in ranks.items())
        of_ranks = [place for place in places or () if place is not None]
        metadata = _whole(made.parts, [place.piece for place in of_ranks])
        index = _whole(made.index, [place.block for place in of_ranks]) if made.index else b""
        message = _ForDirectory(metadata, index, tuple(sorted(made.files)), directory.make_beside(metadata), nodes)
        return [message if place is not None and place.leads else None for place in places or ()]

    _, part = channel.scatter(phase("metadata of nodes"), for_directories, _ForDirectory)
    nodes = () if part is None else part.nodes
    to_publish = None
    if part is not None:
        directory.files_beside = part.beside
        to_publish = MetadataToPublish(
            ((0, part.metadata),), part.files, index=((0, part.index),) if part.index else ()
        )

    def prepare() -> None:
        directory.check_written()
        if to_publish is not None:
            directory.prepare(to_publish, directory.among(to_publish.files))

    channel.barrier(phase("prepare"), prepare)
    if channel.is_coordinator:
        parent = os.path.dirname(os.path.abspath(directory.path))
        logger.log(
            logging.INFO if parent == _LAST.get("parent") else logging.WARNING,
            "%s is another directory on different nodes: the checkpoint lies in %d directories, on %s, and each has "
            "only the files of its own ranks. robust_dcp.load with ranks on these nodes finds all of them; other "
            "readers need them in one directory. If this was not intended, a mount is missing on some nodes",
            directory.path,
            sum(place is not None and place.leads for place in places or ()),
            listed(node.host for node in nodes),
        )
        _LAST["parent"] = parent
    directory.is_one_of_several(nodes)

    def finish() -> None:
        if to_publish is not None:
            directory.finish(to_publish, stop_if_given_up=channel.stop_if_given_up)

    channel.barrier(phase("commit"), finish)


def _whole(parts: Sequence[tuple[int, bytes]], pieces: Sequence[bytes]) -> bytes:
    """A file of a head, pieces of all ranks, and the rest."""
    (_, head), (_, rest) = parts
    return b"".join([head, *pieces, rest])
