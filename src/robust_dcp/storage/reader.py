"""DCP's ``StorageReader`` over a directory.

This module owns DCP's interface. ``metadata_source`` gets the metadata of a checkpoint, and ``reading.load`` reads the
items. It never writes, and never runs code that it reads. It serves DCP's ``load``, Megatron-Core and our own ``load``.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError, entry_point
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import check_relative_path, is_url, local_path_of, mark_of, place_of
from robust_dcp.storage.options import ReadKeywords, ReadOptions, given_options
from robust_dcp.storage.reading.load import ItemReader
from robust_dcp.storage.reading.metadata_source import MetadataSource, overwritten
from robust_dcp.storage.remote import RemoteDisk, filesystem_of
from robust_dcp.threads import submit

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_THREADS: Final = 8


class UnreadMetadata(Metadata):
    """Stands for metadata that could not be read. Code that uses its contents gets the error that says why."""

    def __init__(self, error: RobustCheckpointError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        # Python calls this for attributes that neither the instance nor its class has. `state_dict_metadata` is one of
        # these, because it has no default.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error


def _never_stops(done_nbytes: int, total_nbytes: int) -> None:
    """The default of ``check_stop``: never stop."""


class RobustReader(StorageReader):
    """Reads checkpoints and Hugging Face models. The checkpoints may be from ``RobustWriter``, from DCP's
    ``FileSystemWriter`` and ``HuggingFaceStorageWriter``, or from Megatron-Core. A Hugging Face model is a directory of
    ``.safetensors`` files without a ``.metadata``.

    >>> dcp.load(state_dict, storage_reader=RobustReader(path))  # doctest: +SKIP

    Args:
        path: the checkpoint's directory, or a URL of fsspec (``s3://…``). Of a URL only the bytes that a load needs are
            read.
        options: how to read, see :class:`ReadOptions`. They can be given as keywords instead.
        disk: the file system.
        keywords: the options, one by one.

    ``read_data`` calls the planner's ``resolve_tensor``, ``commit_tensor`` and ``load_bytes`` only from the thread that
    called ``read_data``. If a planner has its own ``commit_tensor``, it is called right after the ``resolve_tensor`` of
    the same item, as Megatron-Core's planner requires.

    Raises:
        ValueError: ``path`` is a URL that fsspec does not know; an option is out of range, or options are
            given in both ways.
        StorageError: fsspec, or its package for that store, is not installed.

    Attributes:
        options: all options.
        peak_buffer_nbytes: the most memory that data passed through at any time in the last ``read_data``.
        unverified_nbytes: bytes of data that were not compared with a checksum in the last ``read_data``.
        source: where the metadata of the checkpoint comes from.
        node_reads_the_same: whether another rank on this node reads the same as this one. Then ``direct=None`` reads
            through the page cache, so that the device is read once. ``robust_dcp.load`` sets this.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: ReadOptions | None = None,
        disk: Disk | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        super().__init__()
        self._given_disk = disk
        self._begin(path)
        self.options = given_options(ReadOptions, options, keywords)
        self.peak_buffer_nbytes = 0
        self.unverified_nbytes = 0
        self._check_stop: Callable[[int, int], None] = _never_stops

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._begin(checkpoint_id or self.path)

    def _begin(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Begin another load."""
        place = place_of(checkpoint_id)
        self.checkpoint_id = self.path = local_path_of(place) or place
        self._disk: Disk = self._given_disk or (RemoteDisk(self.path) if is_url(self.path) else Disk())
        self.load_id = str(uuid.uuid4())
        self.source = MetadataSource(self._disk, self.path)
        self.node_reads_the_same = False
        self._metadata: Metadata | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path, or a URL of a store that fsspec knows and that can be used here."""
        try:
            place = place_of(checkpoint_id)
            return local_path_of(place) is not None or filesystem_of(place) is not None
        except (StorageError, ValueError):
            return False

    @entry_point
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint, from its index if it has one. With ``rank=`` it is read from the
        ``__{rank}.metadata`` of a DCP save without collectives.

        DCP's ``load`` asks with ``rank`` if it could not read the common file. It turns an error of that second call
        into an ``AssertionError``, which hides the reason. So if that rank has no file either, this returns an object
        that raises the error of the common file when it is used.

        Raises:
            StorageError, CorruptCheckpoint, UnsafeCheckpoint: as :class:`MetadataSource` raises them.
        """
        rank = kwargs.get("rank")
        if rank is None:
            found = self.source.open(self.source.find())
            return found or self.source.decode_metadata(self.source.metadata_bytes())
        if self.source.is_there(rank):
            return self.source.decode_metadata(self.source.metadata_bytes(rank), rank)
        try:
            return self.source.decode_metadata(self.source.metadata_bytes())
        except RobustCheckpointError as error:
            return UnreadMetadata(error)

    @entry_point
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, UnreadMetadata):
            raise metadata.error
        if not isinstance(metadata.storage_data, Mapping):
            raise CorruptCheckpoint(
                f"the metadata of {self.path} does not say where its items lie: no save was finished there",
                file=self.source.path_of_metadata(kwargs.get("rank")),
                expected="storage_data",
                found=type(metadata.storage_data).__name__,
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @entry_point
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``. All is read when this returns.

        Raises:
            CorruptCheckpoint: an item is damaged or missing; the error names it, and its file.
            UnsafeCheckpoint: an item would run code (see ``trusted``).
            StorageError: a read failed.
            ValueError: the planner gives a tensor of another size than it asked for.
        """
        options = self.options
        if self.node_reads_the_same and options.direct is None:
            options = replace(options, direct=False)
        metadata, mark = self.metadata, None
        if self.source.files_are_marked():
            save_id = getattr(metadata.storage_meta, "save_id", None)
            mark = mark_of(save_id) if isinstance(save_id, str) else None
        reads = ItemReader(plan.items, planner, metadata, self.path, self._disk, options, self._check_stop, mark)
        try:
            reads.run()
        except CorruptCheckpoint as error:
            # Our own load does not check it here: there all ranks notice it together, and start over.
            if self._check_stop is _never_stops and self.source.is_overwritten():
                raise overwritten(self.path, error.message) from error
            raise
        self.peak_buffer_nbytes, self.unverified_nbytes = reads.peak_nbytes, reads.verification.unverified_nbytes
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def checking(self, check_stop: Callable[[int, int], None]) -> Iterator[None]:
        """Within the block, ``read_data`` calls ``check_stop`` between reads, from several threads.

        Args:
            check_stop: receives the bytes read so far, and the bytes of all items. What it raises ends the load.
        """
        self._check_stop = check_stop
        try:
            yield
        finally:
            self._check_stop = _never_stops

    def missing_files(self, files: Iterable[str]) -> list[str]:
        """Those of the checkpoint's ``files`` that this rank cannot read: they are not there.

        A reader that can read some of them from elsewhere overrides this, and reads these in ``read_data``.
        """

        def is_here(name: str) -> bool:
            path = os.path.join(self.path, check_relative_path(name, file=self.path))
            try:
                return self._disk.exists(path)
            except StorageError:
                return False

        names = sorted(files)
        with ThreadPoolExecutor(_LOOK_THREADS, thread_name_prefix="robust_dcp-look") as pool:
            found = [submit(pool, is_here, name) for name in names]
            return [name for name, is_found in zip(names, found, strict=True) if not is_found.result()]

    def keys_in(self, files: Collection[str]) -> list[str]:
        """The keys that have a part in one of ``files``."""
        stored: Mapping[Any, Any] = self.metadata.storage_data or {}
        wanted = set(files)
        return sorted({index.fqn for index, info in stored.items() if info.relative_path in wanted})

    @property
    def metadata(self) -> Metadata:
        """The metadata of the checkpoint that is loaded."""
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader has to be called before items are read")
        return self._metadata

    @property
    def metadata_if_set_up(self) -> Metadata | None:
        """The same; ``None`` if the load did not come so far."""
        return self._metadata
