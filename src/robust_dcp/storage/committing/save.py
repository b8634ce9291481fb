"""One save in its directory: what was there, what is its own, the commit, and what is removed afterwards.

The order is that of the promise:

1. The directory is claimed (``saving_file``), and ranks write their files, fsync them, and then the directory.
2. ``prepare``: ``.metadata``, the index and the files beside the data (Megatron's ``common.pt``) are written under
   names of this save, and fsynced. Data files get their names, where the layout asks for that; then the directory is
   fsynced once more.
3. ``finish``: it is made sure that nobody else has written here, and that the other ranks have not given up the save.
   The index is renamed, then ``.metadata``, each over the old one. The directory is fsynced: the new checkpoint is
   durable. Only now the files beside the data get their names: until here the old ``.metadata`` needed the old ones.
   ``.metadata`` holds their digests, so a load of ours knows them under both names.
4. ``tidy_up``: only now the files of the earlier checkpoint are removed, and last the claim.

The process may be killed, or the power may fail, between any two calls. Before the rename of ``.metadata`` the
directory loads as the old checkpoint, after the last fsync as the new one, and in between as one of the two. During the
renames the new index may lie beside the old ``.metadata``. It does not fit that, so nobody uses it. If the index cannot
be written, the checkpoint is committed without it: readers do not need it. If the save fails, what it has made is
removed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import msgspec

from robust_dcp.decoding import from_json
from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.report import REPORT_NAME, SavedReport, encode_report, listed
from robust_dcp.storage.committing.saving_file import (
    LeftOvers,
    SavingFile,
    find_left_overs,
    is_announced,
    is_gone,
    name_left_over,
    others_in,
    remove_data_files,
)
from robust_dcp.storage.files.disk import Disk, Fingerprint
from robust_dcp.storage.files.paths import (
    INDEX_NAME,
    METADATA_NAME,
    NODES_NAME,
    PARITY_PREFIX,
    SAFETENSORS_SUFFIX,
    STAGING_PREFIX,
    committed_name,
    is_data_file,
    mark_of,
    name_before_commit,
    uncommitted_name,
)
from robust_dcp.storage.files.small_files import read_hint
from robust_dcp.storage.layouts.places import Layout
from robust_dcp.storage.metadata.metadata_file import decode_metadata, digest_beside, referenced_files
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.structure_cache import Cache
from robust_dcp.threads import submit

logger = logging.getLogger(__name__)

_NO_INDEX: Final = "the checkpoint has no index, as it could not be written; a load takes longer"

_FEW_FILES: Final = 64
_MAX_NODES_NBYTES: Final = 64 << 20
_CHECK_AGAIN_SECONDS: Final = 1.0
_CHECK_THREADS: Final = 8
"""Files are looked at by this many threads: a call to a network file system takes about 1 ms, and there may be
thousands.
"""
_NOT_OURS_TO_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT})


class MetadataToPublish(msgspec.Struct, frozen=True):
    """What a commit makes visible.

    Attributes:
        parts: parts of ``.metadata``, each with where it begins; the last one ends the file. Ranks have written what
            lies between them (:meth:`Save.write_pieces`).
        files: the data files that it names.
        index: the same for the index; empty if the checkpoint gets none.
    """

    parts: Sequence[tuple[int, bytes]]
    files: Collection[str]
    index: Sequence[tuple[int, bytes]] = ()


class _Committed(NamedTuple):
    """What a ``.metadata`` says.

    Attributes:
        fingerprint: see ``Disk.fingerprint``. If it differs later, somebody has written the file.
        files: the data files that it names and that lie in its own directory, without others; ``None`` if it could not
            be decoded: nobody knows which files it needs.
        save_id: the id of the save that wrote it.
    """

    fingerprint: Fingerprint
    files: frozenset[str] | None
    save_id: str | None


# By path: what this process has committed. So a save that replaces that does not have to decode it.
_COMMITTED: Cache[str, _Committed] = Cache(max_nbytes=64 << 20)


def _committed_in(disk: Disk, path: str) -> _Committed | None:
    """Read what the ``.metadata`` at ``path`` names; ``None`` if there is none.

    Raises:
        StorageError: it cannot be read.
    """
    fingerprint = disk.fingerprint(path)
    committed = _COMMITTED.get(os.path.realpath(path))
    if fingerprint is None or (committed is not None and committed.fingerprint == fingerprint):
        return None if fingerprint is None else committed
    data = disk.read_file(path)
    if data is None:
        return None
    try:
        metadata = decode_metadata(data, path)
    except RobustCheckpointError as error:
        logger.warning("%s cannot be read, so no file that it may name is removed: %s", path, error.message)
        return _Committed(fingerprint, None, None)
    save_id = getattr(metadata.storage_meta, "save_id", None)
    files = frozenset(filter(is_data_file, referenced_files(metadata)))
    return _Committed(fingerprint, files, save_id if isinstance(save_id, str) else None)


class OnEachNode(NamedTuple):
    """A file that only a checkpoint on nodes has which do not share its directory: a copy of what one rank has written,
    and every rank reads by itself."""

    data: bytes


FileBeside = bytes | Callable[[Mapping[str, str]], bytes] | OnEachNode | None
"""A file that a checkpoint has beside its data, such as Megatron's ``common.pt``: its bytes; or what makes them from
the SHA-256 of the other files of the checkpoint, by name; or ``None`` if the checkpoint has no such file, although an
earlier one in the directory may have it."""


class NodeOfSave(msgspec.Struct, frozen=True):
    """A node that has written a part of a checkpoint, if the nodes of the save share no directory.

    Attributes:
        host: its name.
        ranks: the ranks that have written there.
    """

    host: str
    ranks: tuple[int, ...]


def read_nodes(disk: Disk, directory: str, save_id: str) -> tuple[NodeOfSave, ...]:
    """The nodes of a save, by its mark in the file ``.robust_dcp.nodes``; empty if that is not there, is damaged, or is
    of another save. It is advice for errors: where a file that is missing here can be found.
    """
    path, decode = os.path.join(directory, NODES_NAME), partial(from_json, kind=dict[str, tuple[NodeOfSave, ...]])
    try:
        nodes = read_hint(disk, path, decode, what="the nodes of a save", at_most=_MAX_NODES_NBYTES)
    except StorageError:
        return ()
    return (nodes or {}).get(mark_of(save_id), ())


def not_one_directory(path: str, who: str, what: str) -> StorageError:
    """The error for a save that cannot be made in several directories.

    Args:
        who: a rank that does not see the coordinator's directory.
        what: the kind of save.
    """
    return StorageError(
        f"{path} is not one directory for all ranks: {who} does not see what the coordinator has written there, so "
        f"each node has its own, or one of them lacks a mount. {what} commits on one node only, where the files of the "
        "others are missing; save to a directory that all ranks see, or with robust_dcp.save and layout='torch', which "
        "commit on every node",
        path=path,
        operation="begin",
    )


class Save:
    """One save on one rank, in the directory that this rank sees.

    Args:
        disk: the file system.
        path: the checkpoint's directory.
        layout: the layout of the data files.
        save_id: the id of the save, which ``.metadata`` will hold.
        beside: the files that the checkpoint has beside its data. Given on the rank that commits.
        overwrite: whether a committed checkpoint in the directory may be replaced.
        is_staged: whether the checkpoint belongs to a URL. Then the directory is this user's alone.

    Attributes:
        names: the names in the directory before this save wrote anything.
        earlier: the checkpoint that was there; ``None`` if there was none, or this rank has not announced the save.
        left_overs: what other saves have left there.
        written: the names of the files that this rank has written, before the commit.
        files: the names of the files that this rank has made, or that it commits.
        hashes: the SHA-256 of data files by name, if a file beside the data is made from them: of those that this rank
            has written, and on the rank that commits of those that it has been told.
        not_removed: paths of files that this rank made and could not remove. Whoever fails to remove one adds it here.
        files_beside: as ``beside``. On nodes of their own, the rank that leads there gets those of the coordinator.
        may_be_committed: whether ``.metadata`` may have been replaced. From then on nothing is removed.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        layout: Layout,
        save_id: str,
        *,
        beside: Mapping[str, FileBeside],
        overwrite: bool,
        is_staged: bool,
    ) -> None:
        self.path = path
        self.save_id = save_id
        self.names: tuple[str, ...] = ()
        self.earlier: _Committed | None = None
        self.left_overs = LeftOvers()
        self.written: tuple[str, ...] = ()
        self.files: set[str] = set()
        self.hashes: dict[str, str] = {}
        self.not_removed: list[str] = []
        self.may_be_committed = False
        self._disk = disk
        self._layout = layout
        self.files_beside: Mapping[str, bytes | Callable[[Mapping[str, str]], bytes] | None] = {
            name: None if isinstance(data, OnEachNode) else data for name, data in beside.items()
        }
        self._on_each_node = {name: data.data for name, data in beside.items() if isinstance(data, OnEachNode)}
        self._overwrite = overwrite
        self._may_share = layout.may_share_directory
        self._is_staged = is_staged
        self._made: list[str] = []
        self._piece: tuple[int, int, int] | None = None  # of the new .metadata: where, its length, its CRC-32
        self._saving: SavingFile | None = None
        self._beside: set[str] = set()  # the index and the like, as far as the new checkpoint has them
        self._lacks_index = False
        self._fingerprint: Fingerprint = (0, 0, 0)  # of the new .metadata
        self._nodes: Sequence[NodeOfSave] = ()
        self._checked_at_seconds = -math.inf

    # Before any rank writes.

    def announce(self) -> None:
        """Make the checkpoint's directory and claim it, unless that is done, and find out what earlier saves have left.
        The directory is removed if the save fails.

        Raises:
            StorageError: there is a checkpoint that must not be replaced; another save is running into the directory;
                it holds files that may not lie beside those of the layout; the errno is EEXIST if another rank has
                announced this save; or a call to the file system failed.
        """
        n_tries_left = 3
        while self._saving is None:
            try:
                self._announce()
            except StorageError as error:  # noqa: PERF203 a try takes longer than that
                n_tries_left -= 1
                if error.errno != errno.ENOENT or not n_tries_left:  # else a manager has just removed the directory
                    raise

    def _announce(self) -> None:
        if self._is_staged:
            above = os.path.dirname(self.path)
            if os.path.basename(above).startswith(STAGING_PREFIX):  # it is ours too, and not one that the user has set
                self._made += self._disk.private_directory(above)
            self._made += self._disk.private_directory(self.path)
        else:
            self._made += self._disk.mkdirs(self.path)
        self.names = tuple(self._disk.list_directory(self.path))
        if METADATA_NAME in self.names:
            if not self._overwrite:
                raise StorageError.of_committed(self.path)
            if not self._may_share:
                raise self._cannot_share("a committed checkpoint")
            self.earlier = _committed_in(self._disk, self._path_of(METADATA_NAME))
        needed = frozenset() if self.earlier is None else self.earlier.files
        replaces = (needed or frozenset()) & set(self.names)
        saving = SavingFile.create(self._disk, self.path, save_id=self.save_id, replaces=replaces)
        try:
            saves = others_in(self._disk, self.path, mark=mark_of(self.save_id))
            if saves:
                committed_by = None if self.earlier is None else self.earlier.save_id
                self.left_overs = find_left_overs(self.names, needed, saves, committed_by)
            if not self._may_share:
                for name in self.names:
                    if name.endswith(SAFETENSORS_SUFFIX) and name not in self.left_overs.files:
                        raise self._cannot_share(name)
        except BaseException:
            saving.remove()
            raise
        self._saving = saving

    def join(self) -> bool:
        """Find the announcement of this save in the directory. Called on each rank before it writes.

        If it is not there, this rank and the coordinator have different directories under the same path. Then this rank
        announces the save in its own. The file is created with ``O_EXCL``: the server of a network file system decides
        whether it was there already, whatever this machine has in its caches. So a shared directory is never taken for
        another one, and of several ranks on a node exactly one announces.

        Returns:
            whether this rank has announced the save now. It then leads the commit in this directory.

        Raises:
            StorageError: as :meth:`announce`.
        """
        if self._saving is not None or is_announced(self._disk, self.path, self.save_id):
            return False
        try:
            self.announce()
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            return not is_announced(self._disk, self.path, self.save_id, was_created=True)
        return True

    def _cannot_share(self, present: str) -> StorageError:
        """The error for a directory that holds ``present``.

        Readers of safetensors take every file of a directory. So all such files in it must belong to this save.
        """
        return StorageError(
            f"{self.path} holds {present}: readers of safetensors take every file of a directory, so a checkpoint "
            f"with layout={self._layout.name!r} cannot replace another or lie beside other files of theirs, whatever "
            "overwrite says; save to another directory",
            path=self.path,
            operation="begin",
        )

    def write_pieces(self, piece: bytes, offset: int, block: bytes, block_offset: int) -> bool:
        """Write this rank's pieces of the new ``.metadata`` and index to their places, durably. Readers do not see them
        yet.

        Returns:
            whether the index has this piece: a checkpoint can do without one.

        Raises:
            StorageError: a call failed.
        """
        self.files.update(os.path.basename(self._unfinished(name)) for name in (METADATA_NAME, INDEX_NAME))
        self._disk.write_parts(self._unfinished(METADATA_NAME), ((offset, piece),))
        self._piece = offset, len(piece), crc32(piece)
        try:
            self._disk.write_parts(self._unfinished(INDEX_NAME), ((block_offset, block),))
        except StorageError as error:
            self._go_without_index(error)
        return not self._lacks_index

    # The commit.

    def _write_rest(self, name: str, parts: Sequence[tuple[int, bytes]]) -> Fingerprint:
        """Write the parts of the new ``.metadata`` or index that no rank has written, durably."""
        path, nbytes = self._unfinished(name), parts[-1][0] + len(parts[-1][1])
        if nbytes > sum(len(part) for _, part in parts) and not self._disk.exists(path):
            raise self._interfered(f"{path}, into which the ranks have written, is gone")
        fingerprint = self._disk.write_parts(path, parts)
        if fingerprint[1] != nbytes:
            raise self._interfered(f"{path} has {fingerprint[1]} bytes instead of {nbytes}")
        return fingerprint

    def check_written(self, names: Collection[str] | None = None) -> None:
        """Make sure, right before the commit, that data files of this save are still there: those that this rank has
        written, or ``names``. And that the new ``.metadata`` holds what this rank has written.

        Raises:
            StorageError: one is gone.
        """
        self._checked_at_seconds = time.monotonic()
        paths = [self._path_of(name) for name in sorted(self.written if names is None else names)]
        if len(paths) <= _CHECK_THREADS:  # most ranks have two or three, for which no threads are worth it
            are_there = list(map(self._disk.exists, paths))
        else:
            with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="robust_dcp-check") as pool:
                are_there = [each.result() for each in [submit(pool, self._disk.exists, path) for path in paths]]
        for path, is_there in zip(paths, are_there, strict=True):
            if not is_there and not self._disk.exists(self.path):
                raise StorageError(
                    f"{self.path} is gone, into which this save has written: somebody has removed the directory "
                    "meanwhile, such as a clean-up of old checkpoints; nothing is committed. Let it leave the newest "
                    "checkpoints alone, and save again",
                    path=self.path,
                    operation="commit",
                )
            if not is_there:
                raise self._interfered(f"{path}, which this save has written, is gone")
        if names is None and self._piece is not None:
            path, (offset, nbytes, checksum) = self._unfinished(METADATA_NAME), self._piece
            try:
                with self._disk.reading(path) as file:
                    is_there = crc32(self._disk.read(file, offset, nbytes)) == checksum
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                is_there = False
            if not is_there:
                raise self._interfered(
                    f"{path} does not hold what this rank has written. If this is a mount of an object store, it "
                    "cannot take what several machines write into one file: save to its URL. Otherwise"
                )

    def _interfered(self, what: str) -> StorageError:
        return StorageError(
            f"{what}: another save has written into {self.path} meanwhile; nothing is committed, and nothing of the "
            "other save is touched. Save again, each job into a directory of its own",
            path=self.path,
            operation="commit",
        )

    def among(self, files: Collection[str]) -> frozenset[str]:
        """Those of the data files of this save that lie in this directory."""
        return frozenset(self._disk.list_directory(self.path)) & frozenset(files)

    def prepare(self, metadata: MetadataToPublish, files: Collection[str]) -> None:
        """Make everything durable that the commit needs. Readers still see the earlier checkpoint.

        Args:
            files: those data files of the checkpoint that lie in this directory.

        Raises:
            StorageError: a call failed. Nothing is committed.
        """
        if self._saving is None:
            raise ValueError("a save is announced before it is committed")
        if not self._disk.exists(self._saving.path):
            raise StorageError(
                f"{self._saving.path} is gone: another save took this one for one that is over, and may have removed "
                "files of it; nothing is committed, save again",
                path=self._saving.path,
                operation="commit",
            )
        uncommitted = {uncommitted_name(name): name for name in sorted(files)}
        self.files.update(files, uncommitted)
        if not self._layout.may_share_directory:
            # Readers would take files of a killed save as part of the new checkpoint.
            remove_data_files(self._disk, self.path, self.left_overs.files)
        self._fingerprint = self._write_rest(METADATA_NAME, metadata.parts)
        if metadata.index:
            try:
                self._write_rest(INDEX_NAME, metadata.index)
                self._beside.add(INDEX_NAME)
            except StorageError as error:
                self._go_without_index(error)
        else:  # a rank could not write its piece of it, or the coordinator could not make its own
            self._lacks_index |= len(metadata.parts) > 1
            is_gone(self._disk.unlink, self._unfinished(INDEX_NAME), tells=True)
        names_beside = self._names_beside()
        self.files.update(names_beside)
        of_files = self._hashes_of_all(set(files)) if self.needs_hashes else {}
        for before, name in names_beside.items():
            content = self.files_beside[name] or b""
            data = content(of_files) if callable(content) else content
            self._disk.write_file(self._path_of(before), data)
        for before, name in uncommitted.items():
            if before != name:
                self._disk.rename(self._path_of(before), self._path_of(name))
        if names_beside or uncommitted.keys() != set(files):
            # All other names were made durable by the ranks that gave them.
            self._disk.fsync_directory(self.path)

    def finish(
        self,
        metadata: MetadataToPublish,
        *,
        are_checked: bool = False,
        stop_if_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit what :meth:`prepare` has prepared, durably and in one step. Call :meth:`tidy_up` afterwards.

        Args:
            are_checked: whether all ranks have called :meth:`check_written`.
            stop_if_given_up: raises if other ranks may have given up the save. Called right before each rename.

        Raises:
            StorageError: a call failed. :attr:`may_be_committed` says whether the commit may have happened.
        """
        disk, path = self._disk, self._path_of(METADATA_NAME)
        if disk.fingerprint(path) != (None if self.earlier is None else self.earlier.fingerprint):
            raise self._interfered(f"{path} is not the one that was there at the beginning")
        files = self.among(metadata.files) if self._nodes else metadata.files
        is_recent = time.monotonic() - self._checked_at_seconds < _CHECK_AGAIN_SECONDS
        # This process may have been paused since the last look. If there are few files, another one costs nothing.
        if not are_checked or not is_recent or len(self.written) < len(files) <= _FEW_FILES:
            self.check_written(files)
        stop_if_given_up()
        if INDEX_NAME in self._beside:
            try:
                disk.rename(self._unfinished(INDEX_NAME), self._path_of(INDEX_NAME))
            except StorageError as error:
                self._go_without_index(error)
        stop_if_given_up()
        self.may_be_committed = True  # from here on, whatever fails
        disk.rename(self._unfinished(METADATA_NAME), path)
        disk.fsync_directory(self.path)
        new = _Committed(self._fingerprint, frozenset(metadata.files), self.save_id)
        nbytes = sum(map(len, metadata.files)) + 100 * len(metadata.files)
        _COMMITTED.put(os.path.realpath(path), new, nbytes)
        names_beside = self._names_beside()
        try:
            for before, name in names_beside.items():
                disk.rename(self._path_of(before), self._path_of(name))
            if names_beside:
                disk.fsync_directory(self.path)
        except StorageError as error:
            error.message = (
                f"{self.path} is committed, and robust_dcp loads it, but other readers take {listed(names_beside)} for "
                f"no part of it: give each its name without the mark, or save again ({error.message})"
            )
            raise

    def _names_beside(self) -> dict[str, str]:
        """The names of the files beside the data after the commit, by those before it."""
        mark = mark_of(self.save_id)
        return {name_before_commit(name, mark): name for name, data in self.files_beside.items() if data is not None}

    @property
    def needs_hashes(self) -> bool:
        """Whether a file beside the data is made from the hashes of the others."""
        return any(map(callable, self.files_beside.values()))

    def make_beside(self, metadata: bytes) -> dict[str, bytes | None]:
        """The files beside the data as bytes, for a commit in several directories. Called before :meth:`prepare`."""
        hashes = dict(self.hashes)
        hashes |= {name: digest_beside(data) for name, data in self.files_beside.items() if isinstance(data, bytes)}
        hashes[METADATA_NAME] = digest_beside(metadata)
        made = {name: data(hashes) if callable(data) else data for name, data in self.files_beside.items()}
        return made | self._on_each_node

    def hash_written(self, check_stop: Callable[[int, int], None]) -> None:
        """Hash the data files that this rank has written, into :attr:`hashes`.

        Raises:
            StorageError: one cannot be read.
        """
        paths = {committed_name(name): self._path_of(name) for name in self.written}
        self.hashes.update(self._disk.hashes_of(paths, check_stop))

    def _hashes_of_all(self, names: set[str]) -> dict[str, str]:
        """The SHA-256 of the files of the new checkpoint by name, of its data files as the ranks have hashed them. The
        index is not among them: it gets its name before the commit, and has checksums of its own."""
        hashes = dict(self.hashes)
        hashes |= self._disk.hashes_of({name: self._path_of(uncommitted_name(name)) for name in names - hashes.keys()})
        hashes |= {name: digest_beside(data) for name, data in self.files_beside.items() if isinstance(data, bytes)}
        return hashes | self._disk.hashes_of({METADATA_NAME: self._unfinished(METADATA_NAME)})

    def _go_without_index(self, error: StorageError) -> None:
        """A step of writing the index has failed: nothing of it stays, and the checkpoint has none."""
        logger.warning("the checkpoint gets no index, so a load takes longer: %s", error.message)
        is_gone(self._disk.unlink, self._unfinished(INDEX_NAME), tells=True)
        self._beside.discard(INDEX_NAME)
        self._lacks_index = True

    def is_one_of_several(self, nodes: Sequence[NodeOfSave]) -> None:
        """Note that nodes commit this save together, each in a directory of its own. Called before the first commits.

        From then on no node alone can tell whether the save is committed: another one may have committed it.
        """
        self.may_be_committed = True
        self._nodes = nodes

    # After the commit: what goes wrong costs space, and the save has succeeded all the same.

    def leave_report(self, make: Callable[[str, tuple[str, ...]], SavedReport]) -> bool:
        """Put a report beside the checkpoint, wholly or not at all, in the place of an older one. Nothing waits for the
        device: after a power cut the file may be empty or missing. If that fails, it is logged.

        Args:
            make: makes the report, from the id of the save and what its commit went without.

        Returns:
            Whether it is there.
        """
        try:
            report = encode_report(make(self.save_id, (_NO_INDEX,) if self._lacks_index else ()))
            self._disk.replace_file(self._path_of(REPORT_NAME), report, mark=mark_of(self.save_id), durable=False)
            self._beside.add(REPORT_NAME)
        except Exception as error:
            logger.warning("%s is committed, but has no report of its save: %s", self.path, error)
            return False
        return True

    def tidy_up(self) -> None:
        """Remove the files that the commit replaces, and the announcement. A file that cannot be removed stays, and is
        logged.
        """
        try:
            if self._nodes:
                mark, path = mark_of(self.save_id), self._path_of(NODES_NAME)
                self._disk.replace_file(path, msgspec.json.encode({mark: self._nodes}), mark=mark, durable=False)
                self._beside.add(NODES_NAME)
            # The index, the report and the like of the earlier checkpoint, and what killed saves have left of them.
            beside = {INDEX_NAME, REPORT_NAME, NODES_NAME} - self._beside
            beside = {name for name in self.names if name in beside or name.startswith(f"{NODES_NAME}.")}
            beside |= {name for name in self.names if name.startswith(PARITY_PREFIX)}  # of what was there before
            earlier = frozenset[str]() if self.earlier is None else self.earlier.files or frozenset()
            beside |= {name for name, data in self.files_beside.items() if data is None and name in self.names}
            superseded = ((earlier | self.left_overs.files) - self.files) | beside
            left = remove_data_files(self._disk, self.path, superseded, keep=self.files)
            self.left_overs.tell_what_stays(self.path, set(self.names) - self.files - superseded)
            if self._saving is None:
                return
            # The announcement stays while a file that it accounts for could not be removed. The next save tries again.
            for name, files_left in self.left_overs.by_save.items():
                if files_left.isdisjoint(left):
                    is_gone(self._disk.unlink, self._path_of(name))
            if not left:
                self._saving.remove()
            self._saving.release()
            if self.names:  # else a power cut brings back nothing but the announcement, which the next save removes
                self._disk.fsync_directory(self.path)
        except Exception as error:
            logger.warning("%s is committed, but not tidied up: %s", self.path, error)
            self.release()

    # After a failure.

    def release(self) -> None:
        """End the save. If it has left files, its announcement stays, and the next save removes them."""
        if self._saving is not None:
            self._saving.release()

    def remove_files(self) -> list[str]:
        """After a save that has failed, remove the files that this rank has made. Returns the paths of those that are
        still there.
        """
        names = set(self.files)
        if self._saving is not None:
            names |= {os.path.basename(self._unfinished(name)) for name in (METADATA_NAME, INDEX_NAME)}
        left = [self._path_of(name) for name in remove_data_files(self._disk, self.path, names)]
        left += [path for path in self.not_removed if not is_gone(self._disk.unlink, path)]
        self.not_removed = []
        return left

    def give_up(self) -> list[str]:
        """After a save that has failed, remove the announcement and the directories that this rank has made, once no
        rank has files there.

        A directory in which others have put something stays. Returns the paths of what is still there.
        """
        left = []
        if self._saving is not None and not self._saving.remove():
            left.append(self._saving.path)
        self._saving = None
        left += [
            path for path in reversed(self._made) if not is_gone(self._disk.rmdir, path, harmless=_NOT_OURS_TO_EMPTY)
        ]
        self._made = []
        return left

    def roll_back(self, error: BaseException) -> None:
        """Remove what all ranks have made. For a coordinator whose commit has failed and that cannot ask the other
        ranks.

        Args:
            error: the error that is about to be raised. Files that stay are named in it.
        """
        left = [] if self.may_be_committed else self.remove_files()
        if left or self.may_be_committed:
            self.release()
        else:
            left = self.give_up()
        name_left_over(error, left)

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _unfinished(self, name: str) -> str:
        """The path of a file before it gets its name."""
        return self._path_of(f"{name}.{mark_of(self.save_id)}.tmp")
