"""What a copy says at its target: that it has begun, which names its data files get, and what it is going to remove.

All that is in a small file there, the marker. A copy that was cut off finds the marker when it is started again, and
goes on with the same names. Other copies see it, and leave the names of their data files to each other. ``copy`` calls
this module, in the process that commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

import msgspec

from robust_dcp.drain.inventory import COPYING_PREFIX, Inventory, named_by, own_name, read_metadata, read_whole, renamed
from robust_dcp.drain.plan import CopyPlan, Marker
from robust_dcp.drain.stores import Store
from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.storage.files.paths import INDEX_NAME, is_data_file

__all__ = ["Announcement"]

logger = logging.getLogger(__name__)


class Announcement:
    """The announcement of one copy at its target.

    Args:
        target: where the checkpoint is copied to.
        inventory: what is copied.
        source_url: from where, for people who find the marker.
    """

    def __init__(self, target: Store, inventory: Inventory, source_url: str) -> None:
        self._target = target
        self._inventory = inventory
        self._source_url = source_url
        self._marker: Marker | None = None

    def begin(self, *, overwrite: bool) -> CopyPlan:
        """Announce the copy, and choose the names of its data files.

        Args:
            overwrite: whether a checkpoint that is there may be replaced.

        Raises:
            StorageError: there is another checkpoint that may not be replaced, or cannot be; or a call failed.
        """
        inventory = self._inventory
        marker_name = COPYING_PREFIX + inventory.mark
        source_url = self._source_url.encode(errors="backslashreplace").decode()  # a path may be no UTF-8
        marker = self._marker_there(marker_name) or self._put(Marker(source_url, {}, time.time()))
        self._marker = marker
        there = self._target.files()
        replaced = read_metadata(self._target, there)
        names = marker.renamed if marker.is_decided else self._names_of_same(replaced, there)
        is_same = replaced == self.metadata_with(names)
        if replaced and not is_same and not overwrite:
            self._target.remove(marker_name)
            raise StorageError(
                f"there is another checkpoint at {self._target.url}, and overwrite=False: copy to another place",
                path=self._target.url,
                operation="copy",
            )
        if not marker.is_decided:
            # No file is sent before this is known at the target: a copy that goes on must not take other names.
            names = names if is_same else self._names_for(there)
            marker = self._put(msgspec.structs.replace(marker, renamed=names, is_decided=True))
        sent = {marker.renamed.get(name, name) for name in inventory.data}
        return CopyPlan(
            inventory.mark, marker.renamed, {name: nbytes for name, nbytes in there.items() if name in sent}
        )

    def end(self) -> None:
        """Remove the marker: the copy is over, or nobody can go on with it."""
        self._target.remove(COPYING_PREFIX + self._inventory.mark)

    def metadata_with(self, names: Mapping[str, str]) -> dict[str, bytes]:
        """The metadata files as they will be at the target, if data files get these names."""
        metadata = dict(self._inventory.metadata)
        return renamed(metadata, names, self._source_url) if names else metadata

    def note_replaced(self, replaced: Mapping[str, bytes], *, keeps_index: bool, there: Collection[str]) -> None:
        """Say in the marker what will be removed, so that a copy that goes on after the commit removes it too."""
        try:
            doomed = {name for name in named_by(replaced, self._target.url) if is_data_file(name)}
        except RobustCheckpointError as error:
            logger.warning("%s: files of the checkpoint that is replaced stay: %s", self._target.url, error.message)
            doomed = set()
        doomed |= replaced.keys()  # those of a save without collectives have names of their own
        if not keeps_index and INDEX_NAME in there:
            doomed.add(INDEX_NAME)
        if replaced and self._marker is not None:
            self._put(msgspec.structs.replace(self._marker, replaces=tuple(sorted(doomed))))

    def remove_replaced(self, needed: Collection[str], there: Collection[str]) -> tuple[str, ...]:
        """Remove what the marker names. The new checkpoint is committed, so an error costs space only."""
        removed: list[str] = []
        doomed = () if self._marker is None else self._marker.replaces
        try:
            markers = {name for name in self._target.files() if name.startswith(COPYING_PREFIX)}
            if len(markers) > 1:  # a copy that runs may count on files that it has found here
                return ()
            for name in sorted(set(doomed) & set(there) - set(needed)):
                self._target.remove(name)
                removed.append(name)
        except RobustCheckpointError as error:
            logger.warning("%s is committed, but files of the one before stay: %s", self._target.url, error.message)
        return tuple(removed)

    def _put(self, marker: Marker) -> Marker:
        self._marker = marker
        self._target.put(COPYING_PREFIX + self._inventory.mark, msgspec.json.encode(marker))
        return marker

    def _marker_there(self, name: str) -> Marker | None:
        data = read_whole(self._target, name)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Marker)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _names_of_same(self, replaced: Mapping[str, bytes], there: Collection[str]) -> dict[str, str]:
        """The names that an earlier copy of this save has given to its files, if it is what the target holds."""
        names = {name: own_name(name, self._inventory.mark) for name in self._inventory.data}
        given = {name: own for name, own in names.items() if own is not None and own in there}
        return given if given and replaced == self.metadata_with(given) else {}

    def _names_for(self, there: Mapping[str, int]) -> dict[str, str]:
        """New names for data files whose names are taken at the target, or may be taken by another copy that runs."""
        inventory = self._inventory
        others = sorted(
            name for name in there if name.startswith(COPYING_PREFIX) and name != COPYING_PREFIX + inventory.mark
        )
        for name in others:
            logger.warning(
                "%s: a copy of another save has begun here and is not over. Both get data files of names of their own, "
                "and the last that ends is what a load finds. If that copy will never go on, remove %s",
                self._target.url,
                name,
            )
        taken = set(inventory.data) if others else set(inventory.data) & set(there)
        names: dict[str, str] = {}
        for name in sorted(taken):
            other = own_name(name, inventory.mark)
            if other is None:
                raise StorageError(
                    f"{self._target.url} holds {name} of another checkpoint, and readers find such a file only by that "
                    "name; copy to an empty place",
                    path=self._target.path_of(name),
                    operation="copy",
                )
            names[name] = other
        if names:
            renamed(inventory.metadata, names, self._source_url)  # now, and not after all data was sent
        return names
