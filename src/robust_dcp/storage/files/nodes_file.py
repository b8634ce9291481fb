"""The file ``.robust_dcp.nodes``: which ranks of a save have written on which node, if its nodes share no directory.

It is advice for error messages: it says where a file that is missing here can be found. The commit writes it,
and loads that miss a file read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import msgspec

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import NODES_NAME, mark_of
from robust_dcp.storage.files.whole_file import read_whole_file

__all__ = ["NodeOfSave", "read_nodes", "write_nodes"]

_MAX_NBYTES: Final = 64 << 20


class NodeOfSave(msgspec.Struct, frozen=True):
    """A node that has written a part of a checkpoint.

    Attributes:
        host: its name.
        ranks: the ranks that have written there.
    """

    host: str
    ranks: tuple[int, ...]


class _Nodes(msgspec.Struct, frozen=True):
    mark: str
    nodes: tuple[NodeOfSave, ...]


def write_nodes(disk: Disk, directory: str, save_id: str, nodes: Sequence[NodeOfSave]) -> None:
    """Write the file, over one of an earlier save.

    Raises:
        StorageError: a call failed.
    """
    path = os.path.join(directory, NODES_NAME)
    temporary = f"{path}.{mark_of(save_id)}.tmp"
    file = disk.open_new(temporary)
    try:
        disk.pwrite(file, msgspec.json.encode(_Nodes(mark_of(save_id), tuple(nodes))), 0)
    finally:
        disk.close(file)
    disk.rename(temporary, path)


def read_nodes(disk: Disk, directory: str, save_id: str) -> tuple[NodeOfSave, ...]:
    """The nodes of a save; empty if the file is not there, is damaged, or is of another save."""
    try:
        data = read_whole_file(disk, os.path.join(directory, NODES_NAME), _MAX_NBYTES)
        found = None if data is None else msgspec.json.decode(data, type=_Nodes)
    except (RobustCheckpointError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    return found.nodes if found is not None and found.mark == mark_of(save_id) else ()
