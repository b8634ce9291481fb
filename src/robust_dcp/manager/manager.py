"""``CheckpointManager``: the checkpoints of a run below one directory."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import inspect
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import torch.distributed as dist

from robust_dcp.api import load, save
from robust_dcp.asynchronous import AsyncSave, async_save
from robust_dcp.comm import Channel
from robust_dcp.drain.delivery import Delivery
from robust_dcp.drain.record import digest_at, is_awaited
from robust_dcp.errors import CorruptCheckpoint, StorageError, UnsafeCheckpoint, entry_point
from robust_dcp.manager.jobs import JobInSeries
from robust_dcp.manager.preemption import Preemption
from robust_dcp.manager.series import Checkpoint, KeepPolicy, Series, end_removals, policies_of, prune, series_in
from robust_dcp.proof import ProofReport, before_first_step, compare
from robust_dcp.report import LoadReport, SaveReport, listed
from robust_dcp.save_queue import queues_of
from robust_dcp.storage.files.paths import METADATA_NAME, RECORD_NAME, absolute, local_path_of, place_of, real_place
from robust_dcp.storage.metadata.stored_pickle import not_being_loaded
from robust_dcp.storage.options import WriteOptions
from robust_dcp.storage.remote import CopyOptions, disk_at
from robust_dcp.storage.writer import RobustWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = Mapping[str, float] | None

_WAIT_SECONDS: Final = (0.5, 2.0)
"""What the file system refuses is tried again after these times."""

_MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
"""What a file system says where a file is not there, or is no regular file. A flipped bit in a name looks like that."""


class Skipped(NamedTuple):
    """A checkpoint that could not be loaded: its directory, and what is wrong with it."""

    path: str
    reason: str


class LoadedCheckpoint(NamedTuple):
    """What :meth:`CheckpointManager.load_latest` has loaded.

    Attributes:
        checkpoint: which one.
        report: of the load.
        skipped: those that it tried before, newest first, and why they were not taken.
        proof: that the live state is that of the checkpoint, with ``prove=True``.
    """

    checkpoint: Checkpoint
    report: LoadReport
    skipped: tuple[Skipped, ...] = ()
    proof: ProofReport | None = None


class _Candidates(msgspec.Struct, frozen=True):
    """The checkpoints in the order in which they are tried."""

    checkpoints: tuple[Checkpoint, ...]


class _CutOff(msgspec.Struct, frozen=True):
    """The names of checkpoints whose copies were promised, or cut off: their job was killed, or the store failed."""

    names: frozenset[str] = frozenset()

    @staticmethod
    def merge(parts: Sequence[_CutOff]) -> _CutOff:
        return _CutOff(frozenset().union(*(each.names for each in parts)))


class CheckpointManager:
    """Saves the steps of a run below one directory, keeps those that are wanted, and finds the one to go on from.

    All methods that save, load or remove are called on all ranks. What is there is decided on the coordinator.

    Its checkpoints are a *series*: the directories below ``root`` whose names begin as ``name`` does and end in a step.
    It sees no others. So several managers with other names can share a root, and each has its own latest checkpoint and
    its own retention. Of its series it removes only what robust_dcp has saved.

    Args:
        root: the directory, or a URL of fsspec such as ``"s3://bucket/run"``, to which each save is copied from a local
            directory. Checkpoints that stock or Megatron have put there are found as well if ``name`` fits them.
        keep: policies, see :mod:`robust_dcp.manager.series`. What one of them keeps stays.
        keep_last: short for :class:`KeepLast`.
        keep_every: short for :class:`KeepEvery`.
        keep_best: short for :class:`KeepBest`: the name of a metric of which the smallest value is best.
        name: of the directory of a step, as a format: ``"iter_{step:07d}"`` is Megatron's.
        drain_to: a URL of fsspec or a directory on durable storage. Each checkpoint is copied below it in the
            background. One that has not arrived there is not removed, whatever the policies say, and goes on with the
            next save.
        drain_options: how to copy, see :class:`CopyOptions`.
        drain_keep_last: how many checkpoints stay below ``drain_to``, those with the highest steps. ``None`` for all.
        parity_nodes: as for :class:`WriteOptions`, for drives of each node. The latest checkpoint that outlives the
            loss of a node stays until a newer one does.
        process_group: the ranks that save together; ``None`` for all.

    Without any policy nothing is ever removed.

    Raises:
        ValueError: an argument makes no sense, such as a ``name`` that does not end in the step.
        StorageError: the package for the store of a URL is not installed.
        TypeError: a policy has no method ``kept``.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     manager = robust_dcp.CheckpointManager(root, keep_last=2)
        ...     for step in (10, 20, 30):
        ...         _ = manager.save(step, {"weight": torch.full((2,), float(step))})
        ...     state_dict = {"weight": torch.zeros(2)}
        ...     loaded = manager.load_latest(state_dict)
        ...     [each.step for each in manager.checkpoints()], loaded.checkpoint.step, state_dict["weight"].tolist()
        ([20, 30], 30, [30.0, 30.0])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Sequence[KeepPolicy] = (),
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        name: str = "step_{step}",
        drain_to: str | os.PathLike[str] | None = None,
        drain_options: CopyOptions | None = None,
        drain_keep_last: int | None = None,
        parity_nodes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        place = place_of(root)
        place = absolute(local_path_of(place) or place)
        self._disk = disk_at(place)
        self._series = Series(self._disk, place, name)
        self.root = self._series.root
        self.policies = policies_of(keep_last, keep_every, keep_best, keep)
        self._drain_to = None if drain_to is None else absolute(place_of(drain_to))
        if self._drain_to is not None:
            if real_place(self._drain_to) == real_place(self.root):
                raise ValueError(
                    f"drain_to is {self.root}, the manager's own root: checkpoints are copied to another place"
                )
            with suppress(StorageError):  # a package may be missing on one node only: then a save fails, on all ranks
                disk_at(self._drain_to)
        for name, value in (("drain_to", drain_to), ("parity_nodes", parity_nodes)):
            if self._series.is_in_store and value is not None:
                raise ValueError(f"{name} is for a root that is a directory, and {self.root} is in a store already")
        if drain_keep_last is not None and drain_to is None:
            raise ValueError("drain_keep_last is about the copies below drain_to: pass that, or keep_last")
        self._drain_policies = policies_of(drain_keep_last, None, None)
        self._drain_options = drain_options or CopyOptions()
        self._parity_nodes = WriteOptions(parity_nodes=parity_nodes).parity_nodes
        self._group = process_group
        self._pruning = threading.Lock()
        self._leads = self._has_saved = False
        self._preemption = Preemption(process_group)
        self._job = JobInSeries(self._series)

    def path_of(self, step: int) -> str:
        """The directory of a step.

        Raises:
            ValueError: it is no whole number from 0 on, or the ``name`` of the manager does not say it.
        """
        return self._series.path_of(step)

    def checkpoints(self) -> list[Checkpoint]:
        """The committed checkpoints of the series, by step. May be called on one rank alone.

        Raises:
            StorageError: the root, or the directory of a step, cannot be looked at.
        """
        return self._series.look(skips_unknown=False)

    def latest(self) -> Checkpoint | None:
        """The checkpoint of the series that was committed last; ``None`` if there is none. May be called on one rank
        alone.

        Raises:
            StorageError: as :meth:`checkpoints`.
        """
        return self._series.latest_of(self.checkpoints())

    @entry_point
    def should_save(self, step: int, *, every: int | None = None) -> bool:
        """Whether the job is about to be ended: true on all ranks at one step, once any has had SIGTERM or SIGUSR1.

        Call it on all ranks, once a step, with the same steps. From the first call on the two signals only ask for a
        save. After the next save of this manager, also an async one, a process that has had one ends as it would have.
        That costs a rank less than 1 ms of CPU a call if steps take less than a second. Else it is up to 5 ms, of which
        0.6 ms in the calling thread.

        Args:
            step: of training.
            every: look at steps that are multiples of this. ``None``: in every call if steps take a second or more,
                else in every eighth.

        Raises:
            ValueError: an argument is out of range.
            ExchangeError: ranks call it for different steps, or a rank is missing.
            RuntimeError: the first call is not made by the main thread.

        Example:
            >>> for step in range(first_step, last_step):  # doctest: +SKIP
            ...     train(step)
            ...     if step % 1000 == 0 or manager.should_save(step):
            ...         manager.save(step, state_dict)
        """
        self.path_of(step)  # refuses what is no step
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if every is not None and step % every:
            return False
        return self._preemption.is_asked_for(operator.index(step), asks_always=every is not None)

    @entry_point
    def save(self, step: int, state_dict: dict[str, Any], *, metrics: Metrics = None, **options: Any) -> SaveReport:
        """Save a step. ``latest`` moves once it is committed; then what no policy keeps is removed.

        Args:
            step: of training.
            state_dict: as for :func:`robust_dcp.save`.
            metrics: numbers that are noted in the checkpoint, for :class:`KeepBest` and for people. NaN and infinity
                are left out.
            options: more arguments of :func:`robust_dcp.save`.

        Raises:
            StorageError: a newer job saves this series too: this process was replaced, and lives on.
            RobustCheckpointError: as :func:`robust_dcp.save` does.
        """
        options, record = self._options_of(step, metrics, options)
        with self._preemption.saving() as ended:
            report = save(state_dict, **options)
            self._tidy_up(report, record)
        ended(True)  # a handler that raises says nothing of the save
        return report

    @entry_point
    def async_save(
        self, step: int, state_dict: dict[str, Any], *, metrics: Metrics = None, **options: Any
    ) -> AsyncSave:
        """Save a step while training goes on. The arguments are those of :meth:`save`, and the options and results
        those of :func:`robust_dcp.async_save`."""
        options, record = self._options_of(step, metrics, options)
        with self._preemption.saving() as ended:
            saving = async_save(state_dict, **options)

            def tidy_up(done: Future[Any]) -> None:
                # By the methods of the base class: nobody is told of an error by this.
                is_saved = Future.exception(done) is None
                if is_saved:
                    self._tidy_up(Future.result(done), record)
                ended(is_saved)

            self._preemption.follow(saving, ended)
            saving.add_done_callback(tidy_up)
        return saving

    @entry_point
    def load_latest(
        self, state_dict: dict[str, Any], *, prove: bool | Literal["first step"] = False, **options: Any
    ) -> LoadedCheckpoint | None:
        """Load the latest checkpoint. If it is damaged, unsafe or gone, load the newest whole one of the series.

        If the file system refuses (a timeout, an I/O error, a permission), that is tried again, and then raised: an
        older checkpoint is no answer to that.

        Args:
            state_dict: as for :func:`robust_dcp.load`. If no checkpoint can be loaded, tensors in it may have changed.
            prove: ``True``: compare what is live after the load with the checkpoint, see :func:`robust_dcp.prove`.
                ``"first step"``: do that right before the first step of an optimizer in ``state_dict``, because most
                faults happen after the load. By then the forward pass has changed buffers and random numbers; so
                parameters, optimizers (except for learning rates) and their schedulers are compared. If something
                differs, all ranks raise.
            options: more arguments of :func:`robust_dcp.load`.

        Returns:
            Which one was loaded, and which ones were skipped and why; ``None`` if there is no checkpoint.

        Raises:
            CorruptCheckpoint: there are checkpoints, and all are damaged; names each and what is wrong with it.
            StorageError: a checkpoint cannot be read now, and may be whole.
            RobustCheckpointError: a checkpoint is whole and does not fit the state dict, or ranks have failed; or the
                proof has failed.
            ValueError: ``prove`` is none of these values, or there is no optimizer that could step.
        """
        if prove not in (True, False, "first step"):
            raise ValueError(f'prove is True, False or "first step", not {prove!r}')
        # A mistyped option is told by the first start, too, when there is nothing to load yet.
        inspect.signature(load).bind(state_dict, checkpoint_id=self.root, process_group=self._group, **options)
        prove_before_step = before_first_step(state_dict, options.get("planner")) if prove == "first step" else None
        skipped: list[Skipped] = []
        for checkpoint in _persistently(f"look for checkpoints in {self.root}", self._candidates):
            path = checkpoint.path
            load_it = functools.partial(load, state_dict, checkpoint_id=path, process_group=self._group, **options)
            try:
                report = _persistently(f"load {path}", load_it)
            except (CorruptCheckpoint, StorageError, UnsafeCheckpoint) as error:
                if isinstance(error, StorageError) and error.errno not in _MISSING:
                    raise  # it may be whole
                logger.warning("%s is skipped: %s", path, error.message)
                skipped.append(Skipped(path, error.message))
                continue
            self._job.has_loaded(checkpoint)
            options = {**options, "checkpoint_id": path, "process_group": self._group}
            proof = None
            if prove_before_step is not None:
                prove_before_step(**options)
            elif prove:
                proof = compare(state_dict, **options)
                proof.raise_if_differs()
            return LoadedCheckpoint(checkpoint, report, tuple(skipped), proof)
        if not skipped:
            return None
        each = "\n".join(f"  {one.path}: {one.reason}" for one in skipped)
        raise CorruptCheckpoint(
            f"none of the {len(skipped)} checkpoints in {self.root} can be loaded; tensors of the state dict may have "
            f"changed:\n{each}"
        )

    @entry_point
    def prune(self) -> list[str]:
        """Remove what no policy keeps, and what crashed saves and removals have left. Called after each save.

        Returns:
            On the coordinator the directories that are gone; on other ranks nothing, except on the rank that does this
            on a node with a root of its own. One that is being loaded stays.
        """
        is_coordinator = not dist.is_initialized() or dist.get_rank(self._group) == 0
        return self._prune() if self._leads or is_coordinator else []

    def _prune(self, *, right_after_save: bool = False) -> list[str]:
        with self._pruning:  # an async save prunes on a thread of its own
            pruned = prune(self._series, self.policies, right_after_save=right_after_save)
        return [*pruned["swept"], *pruned["removed"]]

    def _options_of(self, step: int, metrics: Metrics, options: dict[str, Any]) -> tuple[dict[str, Any], Checkpoint]:
        """The options of the save of a step: it is noted and named as the latest when it is committed, and copied.

        Earlier copies that were cut off go on.

        Returns:
            The options, and what the record of the step says so far.

        Raises:
            StorageError: a newer job saves this series.
        """
        path, on_commit = self.path_of(step), options.pop("on_commit", None)
        record = Checkpoint(operator.index(step), metrics=_noted(metrics or {}), series=self._series.prefix)

        def after_commit() -> None:
            self._note(record)
            if on_commit is not None:
                on_commit()

        channel = Channel.for_group(
            self._group,
            operation=f"save step {step} of {self.root}",
            timeout_seconds=options.get("timeout_seconds") or 300.0,
            no_dist=options.get("no_dist", False),
        )
        writer, is_in_store = options.pop("storage_writer", None), self._series.is_in_store
        overwrite = not isinstance(writer, RobustWriter) or writer.options.overwrite

        def begin() -> None:
            if not channel.is_coordinator:
                return
            self._job.check_alone()
            if is_in_store:
                end_removals(self._series)
                # It is staged in a new directory, so the save itself finds nothing there.
                if not overwrite and self._disk.exists(os.path.join(path, METADATA_NAME)):
                    raise StorageError.of_committed(path)

        def begin_and_look() -> _CutOff:
            begin()
            # At first one rank of each node looks: the coordinator's node may be a new one that has nothing yet.
            looks = channel.is_coordinator or (not self._has_saved and os.environ.get("LOCAL_RANK", "0") == "0")
            return self._cut_off_copies() if looks else _CutOff()

        phase, cut_off = "does another job save here", _CutOff()
        if self._drain_to is None:
            channel.barrier(phase, begin)
        else:
            cut_off = channel.reduce(phase, begin_and_look, _CutOff, _CutOff.merge)
        if self._drain_to is not None or self._parity_nodes is not None or is_in_store:
            # A copy: another manager may use it, too. What goes to a store is staged in a directory of its own.
            writer = copy.copy(writer or RobustWriter(os.curdir if is_in_store else path))
        if self._parity_nodes is not None:
            writer.options = dataclasses.replace(writer.options, parity_nodes=self._parity_nodes)
        if is_in_store:
            writer.drain_options = self._drain_options
            writer.replaces = functools.partial(self._series.note_before_commit, record, overwrite=overwrite)
        if self._drain_to is not None:
            writer.drain_to = os.path.join(self._drain_to, os.path.basename(path))
            writer.drain_options, writer.on_arrival = self._drain_options, self._has_arrived
            for name in sorted(cut_off.names):
                self._go_on_with(os.path.join(self.root, name), os.path.join(self._drain_to, name), writer, channel)
            self._has_saved = True
        given = {"checkpoint_id": path, "storage_writer": writer, "process_group": self._group}
        return dict(**given, on_commit=after_commit, **options), record

    def _note(self, record: Checkpoint) -> None:
        """Write the record of a step that is committed, and name it as the latest.

        Raises:
            StorageError: a newer job saves this series, or a call failed.
        """
        path, disk = self.path_of(record.step), self._disk
        try:
            record = msgspec.structs.replace(
                record,
                digest=digest_at(disk, path),
                job=self._job.for_record(path),
                saved_seconds=disk.modified_seconds(os.path.join(path, METADATA_NAME)),
            )
            write_record = functools.partial(
                disk.replace_file, os.path.join(path, RECORD_NAME), msgspec.json.encode(record)
            )
            try:
                self._job.check_alone()  # once more: a save takes a while
            except StorageError:
                write_record()  # or it would count as the latest one, of a save that was cut off
                raise
            self._series.move_latest(path, record.digest)  # first: what has a record counts as named
            write_record()
        except StorageError as error:
            if error.errno != errno.ENOENT or disk.exists(path):
                raise
            logger.warning("%s was removed right after its commit, by another manager of %s", path, self.root)

    def _has_arrived(self, path: str) -> None:
        """A copy has arrived below ``drain_to``: name it as the latest there unless a later save is, and remove what is
        not to stay. What goes wrong costs space, or an older ``latest``."""
        try:
            root = os.path.dirname(path)
            series = Series(disk_at(root), root, self._series.name)
            record, latest = series.record_at(path), series.noted_latest()
            is_latest = record is not None and (latest is None or latest.saved_seconds <= record.saved_seconds)
            if record is not None and is_latest:
                series.move_latest(path, record.digest)
            if self._drain_policies:
                prune(series, self._drain_policies, right_after_save=is_latest)
        except Exception as error:
            logger.warning("%s has arrived; latest and old checkpoints there stay as they are: %s", path, error)

    def _cut_off_copies(self) -> _CutOff:
        """What this node has of them."""

        def is_cut_off(checkpoint: Checkpoint) -> bool:
            if not self._has_saved and checkpoint == latest and self._series.was_cut_off(checkpoint.path):
                return True  # killed before it could promise the copy
            with suppress(StorageError), not_being_loaded(self._disk, checkpoint.path) as is_free:
                return is_free and is_awaited(self._disk, checkpoint.path)  # a drain holds it as a load does
            return False

        with suppress(StorageError):  # the save fails by it too, on all ranks, or it has passed by then
            checkpoints = self._series.look()
            latest = self._series.latest_of(checkpoints)
            return _CutOff(frozenset(each.name for each in checkpoints if is_cut_off(each)))
        return _CutOff()

    def _go_on_with(self, path: str, target: str, writer: RobustWriter, channel: Channel) -> None:
        """Go on in the background with a copy that was cut off, on all ranks. Its note says only that it was."""
        writer = copy.copy(writer)
        writer.reset(path)
        Delivery(
            checkpoint=path,
            writer=writer,
            target=target,
            is_staged=False,
            on_commit=None,
            queue=queues_of(channel.ranks)[1],
            open_channel=functools.partial(Channel.for_group, self._group, no_dist=channel.size == 1),
        ).go_on(target, channel.timeout_seconds)

    def _candidates(self) -> Sequence[Checkpoint]:
        """The checkpoints in the order in which they are tried, the same on all ranks."""

        def look() -> _Candidates:
            checkpoints = self.checkpoints()
            self._job.look(checkpoints)
            latest = self._series.latest_of(checkpoints)
            if latest is None:
                return _Candidates(())
            rest = [each for each in reversed(checkpoints) if each != latest]
            # A job that has gone back to an earlier step has left those behind that have a higher one; they come last.
            rest.sort(key=lambda each: each.step > latest.step and each.saved_seconds < latest.saved_seconds)
            # Names only: the path may be no UTF-8.
            return _Candidates(tuple(msgspec.structs.replace(each, path=each.name) for each in (latest, *rest)))

        channel = Channel.for_group(self._group, operation=f"look for checkpoints in {self.root}")
        candidates = channel.broadcast("candidates", look, _Candidates).checkpoints
        if not candidates and channel.size > 1:  # the coordinator's node may be a new one that has nothing yet
            of_all = channel.all_gather("candidates of other nodes", look, _Candidates)
            candidates = next((each.checkpoints for each in of_all if each.checkpoints), ())
        if not candidates and channel.is_coordinator:
            self._tell_what_else_is_there()
        return [msgspec.structs.replace(each, path=os.path.join(self.root, each.path)) for each in candidates]

    def _tell_what_else_is_there(self) -> None:
        """There is no checkpoint of this series. That is how a run begins, and how a mistyped name looks."""
        with suppress(StorageError):
            there = series_in(self._disk, self.root) if self._series.is_there() else []
            others = [each.name for each in there if each.prefix != self._series.prefix and each.look()]
            if self._disk.exists(os.path.join(self.root, METADATA_NAME)):
                others = ["a checkpoint itself"]
            if others:
                name = self._series.name
                logger.warning("%s holds no checkpoint called %s, but %s", self.root, name, listed(others))

    def _tidy_up(self, report: SaveReport, record: Checkpoint) -> None:
        """A save is committed: what goes wrong from here on costs space, and is no failure of it.

        If the nodes do not share the root, one rank on each does there what the coordinator does in its own.
        """
        self._leads = report.leads_directory and not self._series.is_in_store
        if report.rank != 0 and not self._leads:
            return
        try:
            if self._leads:
                self._note(record)
            if self.policies:
                self._prune(right_after_save=True)
        except Exception as error:  # also of a policy: the other ranks go on, and so does this one
            logger.warning("%s: old checkpoints are not removed: %s", self.root, error, exc_info=error)


def _persistently(what: str, call: Callable[[], T]) -> T:
    """Call again if the file system refuses, on all ranks alike: they all get the same error.

    Raises:
        StorageError: it still refuses, or what is asked for is missing.
    """
    for seconds in _WAIT_SECONDS:
        try:
            return call()
        except StorageError as error:
            if error.errno in _MISSING:
                raise
            logger.warning("%s: tried again in %g seconds: %s", what, seconds, error.message)
        time.sleep(seconds)
    return call()


def _noted(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as JSON can hold them. NaN and infinity would make the whole record unreadable.

    Raises:
        ValueError: a value is no number, or a name is no text.
    """
    try:
        numbers = {str.encode(name).decode(): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # a lone surrogate is a ValueError
        raise ValueError(f"a metric must be a number with a name, got {dict(metrics)!r}: {error}") from error
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
