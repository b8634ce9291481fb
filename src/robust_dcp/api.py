"""``save`` and ``load``: DCP's protocol, phase by phase, over a :class:`~robust_dcp.comm.Channel`.

Owns the order of the phases and the report. Each phase is one call into a lower layer. A rank does its own work inside
an exchange. So if one rank fails, every rank raises the same exception.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.drain.delivery import Delivery, writer_of_save
from robust_dcp.errors import CorruptCheckpoint, PlanConflict, RobustCheckpointError, StorageError, entry_point
from robust_dcp.hooks import watch
from robust_dcp.names import StoredNames
from robust_dcp.nodes.files import ranks_with_metadata
from robust_dcp.phases import PhaseClock
from robust_dcp.plan.cache import LOADED
from robust_dcp.plan.keys import AskedKeys, asked_keys, missing_in_words, unread_in_words
from robust_dcp.plan.load_planner import RobustLoadPlanner, robust_load_planner
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.plan.save_report import note_load
from robust_dcp.plan.session import SaveSession
from robust_dcp.plan.shared_reads import (
    WISHES,
    SharedReads,
    find_elsewhere,
    node_reads_the_same,
    ranks_share,
    share_reads,
    sharing_offer,
)
from robust_dcp.report import LoadReport, SaveReport
from robust_dcp.save_queue import queues_of, telling_of_earlier
from robust_dcp.stateful import StandIn, stand_ins_for, values_to_compare, values_to_save
from robust_dcp.storage.files.paths import checkpoint_name, is_url, local_path_of
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.metadata_source import StoredMetadata, overwritten
from robust_dcp.storage.reading.reads import PlannedItems, may_ask_early
from robust_dcp.storage.remote import filesystem_of

CheckpointId = str | os.PathLike[str]

logger = logging.getLogger(__name__)


@entry_point
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float | None = None,
    deadline_seconds: float | None = None,
    kind: str | None = None,
    on_commit: Callable[[], object] | None = None,
) -> SaveReport:
    """Save a state dict from all ranks of a group into one checkpoint.

    The arguments are those of ``torch.distributed.checkpoint.save``. When this returns on any rank, the checkpoint is
    committed and durable. If it raises, every rank raises the same exception. The directory's earlier content is then
    untouched, unless the message says that the checkpoint is committed: ``on_commit`` has failed, and the new one is
    there. If the ranks lost each other at the commit, the message says that it may be committed, and how to see that;
    then some ranks may have returned. If a copy to a URL fails, what is at the URL is as it was, and the message says
    where the checkpoint is. Files that a failed save has made are removed, or the exception names them. After an
    :class:`ExchangeTimeout` they stay until the next save into the directory, because a rank may still be writing.

    Args:
        state_dict: names to tensors (plain, ``DTensor``, ``ShardedTensor``), nested dicts and lists, modules,
            optimizers, ``Stateful`` objects, and any other objects that can be pickled. Parameters of modules and
            states of optimizers get the names that ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives
            them. A list of modules stands for the pipeline stages that this rank holds.
        checkpoint_id: the checkpoint's directory.
        storage_writer: a :class:`RobustWriter`, to set its options.
        planner: a :class:`RobustPlanner`, to set its options.
        process_group: the ranks that save together; ``None`` for all.
        no_dist: save from this process alone although ``torch.distributed`` is initialised.
        timeout_seconds: how long a rank may be silent before the others give up. They wait for a rank that writes
            slowly but makes progress. ``None`` takes the planner's, which is 300 by default.
        deadline_seconds: how long the whole save may take. With ``None`` it may take as long as there is progress.
        kind: a name for the state dict, for a job that saves several state dicts in turn. ``None`` takes the planner's.
        on_commit: called on the coordinator once the checkpoint is committed, for example to name it as the latest.
            Pass it on all ranks. If it raises, all ranks raise, and the checkpoint stays committed.

    Returns:
        The report of the save. Its ``metadata`` is the DCP ``Metadata``.

    Raises:
        RobustCheckpointError: or one of its subclasses.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     first = robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{path}/1")
        ...     again = robust_dcp.save({"weight": torch.zeros(4)}, checkpoint_id=f"{path}/2")
        >>> first.items, again.plan
        (1, 'reused')
    """
    planner, session = open_save(
        checkpoint_id,
        storage_writer,
        planner,
        on_commit,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
        kind=kind,
    )
    clock, channel = session.clock, session.planning.channel
    queues = queues_of(channel.ranks)
    with clock.telling_failures():
        clock.tell("started")
        queues[0].wait()  # for the earlier async saves of this group
        with channel.together():
            with telling_of_earlier(queues):
                agreed = session.agree(partial(describe, planner, session, state_dict))
            written = agreed.write(partial(planner.source, agreed))
            committed = written.commit()
            committed.deliver()
    return committed.report(blocked_seconds=clock.seconds)


def open_save(
    checkpoint_id: CheckpointId | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    on_commit: Callable[[], object] | None,
    **options: Any,
) -> tuple[RobustPlanner, SaveSession]:
    """A save that has not exchanged anything yet, and its planner. The arguments are those of :func:`save`."""
    watch()
    writer = writer_of_save(checkpoint_id, storage_writer)
    if planner is None:
        planner = RobustPlanner()
    elif type(planner) is DefaultSavePlanner:
        given, planner = (
            planner,
            RobustPlanner(
                flatten_state_dict=planner.flatten_state_dict,
                flatten_sharded_tensors=planner.flatten_sharded_tensors,
                dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
            ),
        )
        planner.stands_for = given
    elif not isinstance(planner, RobustPlanner):
        raise TypeError(
            f"robust_dcp.save plans with RobustPlanner, not with {type(planner).__name__}; derive your planner from "
            "RobustPlanner, or call torch.distributed.checkpoint.save(…, storage_writer=RobustWriter(path))"
        )
    elif planner.hooks_of_stock:
        raise TypeError(
            f"{type(planner).__name__} overrides {', '.join(planner.hooks_of_stock)}, which only "
            "torch.distributed.checkpoint.save calls: call that, or override set_up_planner or resolve_data instead"
        )
    planning = planner.open_planning(checkpoint_name(writer.checkpoint_id), **options)
    is_staged = is_url(writer.checkpoint_id)
    delivery = Delivery(
        checkpoint=planning.checkpoint,
        writer=writer,
        target=planning.checkpoint if is_staged else writer.drain_to,
        is_staged=is_staged,
        on_commit=on_commit,
        queue=queues_of(planning.channel.ranks)[1],
        open_channel=partial(Channel.for_group, planning.options.process_group, no_dist=planning.options.no_dist),
    )
    return planner, planner.open_session(planning, writer, delivery)


def describe(planner: RobustPlanner, session: SaveSession, state_dict: dict[str, Any]) -> LocalStructure:
    """The structure of what this rank saves, unless an earlier async save or drain has failed and nobody knows."""
    channel, writer = session.planning.channel, session.writer
    for queue in queues_of(channel.ranks):
        queue.raise_unreported()
    for place in (session.planning.checkpoint, writer.drain_to):
        if place is not None and local_path_of(place) is None:
            filesystem_of(place)
    planner.set_up_planner(values_to_save(state_dict), writer.storage_meta(), channel.is_coordinator)
    return planner.describe(channel)


@entry_point
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = 300.0,
    deadline_seconds: float | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> LoadReport:
    """Load a checkpoint into a state dict, in place, on all ranks of a group.

    The arguments are those of ``torch.distributed.checkpoint.load``. If the checkpoint has an index, each rank looks up
    its items there. If not, the coordinator reads ``.metadata`` once for all ranks. Before any rank reads data, all
    ranks check that the checkpoint has what they ask for. For example, if a key is missing on one rank, every rank
    raises the same exception, and no state dict has changed.

    Args:
        state_dict: allocated tensors are read into. Objects are replaced. Modules, optimizers and ``Stateful`` values
            get their saved state when every rank has read everything. An optimizer that has not stepped gets its state
            too. Parameters that have no state in the checkpoint, because they never had a gradient, have none
            afterwards. States of parameters that the saved optimizer did not have are missing keys.
        checkpoint_id: the checkpoint's directory.
        storage_reader: a :class:`RobustReader`, to set its options, or another ``StorageReader``.
        planner: a :class:`RobustLoadPlanner`, to set its options, or another ``LoadPlanner``. Its
            ``create_global_plan`` gets the plan of this rank only. A ``DefaultLoadPlanner`` stands for a
            ``RobustLoadPlanner`` with its options that converts dtypes.
        process_group: the ranks that load together; ``None`` for all.
        no_dist: load into this process alone although ``torch.distributed`` is initialised.
        timeout_seconds: how long a rank may be silent before the others give up.
        deadline_seconds: how long the whole load may take. With ``None`` it may take as long as there is progress.
        allow_missing, ignore: patterns of keys that the checkpoint may lack, and of keys in it that nobody needs, as
            for :class:`RobustLoadPlanner`. Where you pass a planner, give them to it.

    The log says in one line which keys of the checkpoint no rank has asked for. If keys do not fit, the coordinator's
    error lists them; that of the other ranks is one line long, and its ``rank_failures`` has all.

    Raises:
        RobustCheckpointError: or one of its subclasses.
    """
    watch()
    if planner is None:
        planner = RobustLoadPlanner(allow_missing=allow_missing, ignore=ignore)
    elif allow_missing or ignore:
        raise ValueError(
            "give allow_missing and ignore to the planner that you pass: RobustLoadPlanner(allow_missing=…)"
        )
    else:
        planner = robust_load_planner(planner)
    loading = open_load(
        "load",
        state_dict,
        checkpoint_id,
        storage_reader,
        planner,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
    )
    clock, channel, robust = loading.clock, loading.channel, loading.robust
    with clock.telling_failures():
        clock.tell("started")
        with channel.together(), loading.keeping():
            loading.plan_and_read()
            with clock.phase("apply"):
                _, asked = channel.gather(f"{channel.operation}: apply", loading.apply, AskedKeys)
    if robust is not None and not is_url(robust.path):
        LOADED.put(robust.path, None, len(robust.path))
    remarks: tuple[str, ...] = ()
    if asked is not None and asked.count(None) == len(asked):
        asked = None  # no key is missing, and none is left
    if asked is not None and isinstance(planner, RobustLoadPlanner) and planner.metadata is not None:
        unread = unread_in_words(planner.metadata, asked, planner.ignore)
        for words in filter(None, (missing_in_words(asked, planner.allow_missing), unread)):
            logger.warning("%s: %s", loading.checkpoint, words)
        remarks = tuple(filter(None, (missing_in_words(asked), unread)))
    report = loading.report(remarks)
    if channel.is_coordinator:
        note_load(report)
    clock.tell("ended", report=report, seconds=clock.seconds)
    return report


def open_load(
    operation: str,
    state_dict: dict[str, Any],
    checkpoint_id: CheckpointId | None,
    storage_reader: StorageReader | None,
    planner: LoadPlanner,
    **options: Any,
) -> Loading:
    """A load that has not exchanged anything yet. The arguments are those of :func:`load`.

    Args:
        operation: what is done, for people: ``"load"``, for example.
    """
    if storage_reader is None and checkpoint_id is None:
        raise ValueError("pass checkpoint_id, the directory to load from, or storage_reader=RobustReader(path)")
    if storage_reader is None:
        reader: StorageReader = RobustReader(checkpoint_id or "", trusted=getattr(planner, "trusted", False))
    else:
        reader = storage_reader
        # As in stock: a reader of torch.save files that is reset to no id forgets the path that it was made with.
        if checkpoint_id is not None or isinstance(reader, RobustReader):
            reader.reset(checkpoint_id)
    checkpoint = checkpoint_name(getattr(reader, "checkpoint_id", None))
    channel = Channel.for_group(options.pop("process_group"), operation=f"{operation} {checkpoint}", **options)
    robust = reader if isinstance(reader, RobustReader) else None
    return Loading(state_dict, reader, robust, planner, checkpoint, channel, PhaseClock(channel), LoadPlan([]))


def _read_objects(reader: StorageReader, metadata: Metadata, names: list[str]) -> dict[str, Any] | None:
    """Read objects on which the plan depends. ``None`` if this node does not have their files."""
    values = dict[str, Any].fromkeys(names)
    if isinstance(reader, RobustReader):
        places = (metadata.storage_data[MetadataIndex(name)] for name in names)
        if reader.missing_files({place.relative_path for place in places}):
            return None
    planner = RobustLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(values, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return values


class Loading(msgspec.Struct, eq=False):
    """One load on one rank: what its phases hand on. If its planner compares, no target is filled.

    Attributes:
        robust: the reader, if it is ours.
        plan: the items that this rank reads. ``shared``: what of that it gets from other ranks, and reads for them.
        values: what is read into, by key. ``stand_ins``: those of them that stand for modules, optimizers and others.
    """

    state_dict: dict[str, Any]
    reader: StorageReader
    robust: RobustReader | None
    planner: LoadPlanner
    checkpoint: str
    channel: Channel
    clock: PhaseClock
    plan: LoadPlan
    shared: SharedReads | None = None
    values: dict[str, Any] = {}
    stand_ins: dict[str, StandIn] = {}

    def keeping(self) -> AbstractContextManager[object]:
        """Within it, the checkpoint is not removed: the coordinator keeps it."""
        if self.robust is None or not self.channel.is_coordinator:
            return nullcontext()
        return needed_for_a_load(self.robust.source.disk, self.robust.path)

    @property
    def compares(self) -> bool:
        """Whether targets are compared, and stay as they are."""
        return getattr(self.planner, "comparison", None) is not None

    def plan_and_read(self) -> None:
        """Plan on all ranks and read, once more if the checkpoint was overwritten meanwhile."""
        channel, robust = self.channel, self.robust
        for is_last_try in (False, True):
            try:
                with self.clock.phase("plan"):
                    agreement = self.agree_on_reads(channel, by_index=True)
                    if robust is not None and ranks_share(agreement) and not self.compares:
                        self.shared = share_reads(channel, self.checkpoint, robust, self.plan, self.planner)
                    elif robust is not None:
                        robust.node_reads_the_same = node_reads_the_same(agreement)
                self.read()
                break
            except PlanConflict as error:
                if channel.is_coordinator:
                    raise
                raise error.in_brief() from error  # 1,000 ranks need not print what does not fit
            except (CorruptCheckpoint, StorageError) as error:
                # All ranks have raised the same error.
                if robust is None:
                    raise
                if not self.is_overwritten(robust):
                    self.read_from_nodes(robust, error)
                    break
                if is_last_try:
                    raise overwritten(self.checkpoint, error.message) from error
                again = "was overwritten while it was loaded: it is loaded once more"
                logger.warning("%s %s (%s)", self.checkpoint, again, error)

    def agree_on_reads(self, leader: Channel, *, by_index: bool) -> Agreement:
        """Let the coordinator of ``leader`` find the index or ``.metadata`` for all, and make this rank's plan. Other
        readers than ours look for themselves."""
        self.shared, stored = None, StoredMetadata()
        if self.robust is not None:
            find = partial(self.robust.source.find, by_index=by_index)
            stored = leader.broadcast(f"{leader.operation}: metadata", find, StoredMetadata)
        phase = "plan" if by_index else "plan by .metadata"
        _, agreement = self.channel.agree(f"{leader.operation}: {phase}", partial(self._plan_own, stored))
        n_plans = sum(map(agreement.count, WISHES.values()))
        if stored.index and n_plans < agreement.n_ranks:
            return self.agree_on_reads(leader, by_index=False)  # some ranks see another directory, say on a local disk
        return agreement

    def _plan_own(self, stored: StoredMetadata) -> Offer:
        """Make this rank's plan, and say what it reads."""
        reader, channel = self.robust, self.channel
        metadata = self.reader.read_metadata() if reader is None else reader.source.open(stored)
        if metadata is None:
            return Offer()  # this rank does not see the coordinator's index
        # Stock checks this too: readers written before torch 2.9 do not take these arguments.
        takes_more = "kwargs" in inspect.signature(self.reader.set_up_storage_reader).parameters
        more = {"rank": channel.rank, "use_collectives": True} if takes_more else {}
        self.reader.set_up_storage_reader(metadata, channel.is_coordinator, **more)
        names = StoredNames(metadata, partial(_read_objects, self.reader, metadata))
        if self.compares:
            values = values_to_compare(self.state_dict, names)
        else:
            self.stand_ins, values = stand_ins_for(self.state_dict, names)
        self.values = {key: values[key] for key in sorted(values, key=str)}  # keys need not be text
        # DCP's load plans are local, so no rank needs the plan of another.
        planner = self.planner
        planner.set_up_planner(self.values, metadata, channel.is_coordinator)
        if isinstance(planner, RobustLoadPlanner):
            planner.read_objects, planner.checkpoint = names.read_objects, self.checkpoint
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self.reader.prepare_global_plan(planner.create_global_plan([plan]))
        self.plan = planner.finish_plan(plan)
        if reader is None:
            return Offer()
        items = self.plan.items if channel.size > 1 else ()  # only other ranks need to know the items
        return sharing_offer(reader.options.share_reads, channel.rank, items, can_share=may_ask_early(planner))

    def read(self) -> None:
        """Read what this rank has planned, and get from others what they read for it."""
        with self.clock.phase("read"):
            self.channel.barrier(f"{self.channel.operation}: read", self._read_own)
        if self.shared is not None:
            with self.clock.phase("share"):
                self.shared.share(self.channel, f"{self.channel.operation}: share", self.channel.check_stop)

    def _read_own(self) -> None:
        with nullcontext() if self.robust is None else self.robust.checking(self.channel.check_stop):
            if self.shared is not None:
                self.shared.read(self.planner)
            else:
                self.reader.read_data(self.plan, self.planner).wait()

    def is_overwritten(self, reader: RobustReader) -> bool:
        """Let the coordinator look whether ``.metadata`` was replaced."""
        _, agreement = self.channel.agree(
            f"{self.channel.operation}: has it been overwritten",
            lambda: Offer(flags=int(self.channel.is_coordinator and reader.source.is_overwritten())),
        )
        return agreement.count(1) > 0

    def read_from_nodes(self, reader: RobustReader, error: RobustCheckpointError) -> None:
        """After ``error``: perhaps the nodes do not share the directory, and what is missing here is on another one."""
        channel, errors = self.channel, list[RobustCheckpointError]()
        for source in ranks_with_metadata(channel, self.checkpoint, reader):
            try:
                with self.clock.phase("plan"):
                    self.agree_on_reads(channel.led_by(source), by_index=False)
                    self.shared = find_elsewhere(channel, self.checkpoint, reader, self.plan, self.planner, source)
                if self.shared is None and source == channel.coordinator_rank:
                    continue  # no file is missing, so the error had another reason
                self.read()
            except (CorruptCheckpoint, StorageError) as another:
                errors.append(another)
            else:
                return
        raise errors[0] if errors else error

    def apply(self) -> AskedKeys | None:
        """Put what was read into the state dict. Returns the keys that this rank has asked for."""
        if self.shared is not None:
            self.shared.load_objects(self.planner, self.checkpoint)
        for key, value in self.values.items():
            if key in self.stand_ins:
                self.stand_ins[key].put_back(value)
            elif key in self.state_dict:  # as in stock, what a planner has added stays its own
                self.state_dict[key] = value
        if not isinstance(self.planner, RobustLoadPlanner) or self.planner.metadata is None:
            return None
        return asked_keys(self.planner.metadata, self.planner.state_dict, self.planner.missing_keys)

    def report(self, remarks: tuple[str, ...]) -> LoadReport:
        """The report of the load, which is over."""
        channel, planner, items = self.channel, self.planner, self.plan.items
        metadata = getattr(planner, "metadata", None)
        find_unread_keys: Callable[[], tuple[str, ...]] = tuple
        if isinstance(planner, RobustLoadPlanner) and metadata is not None:
            saved, asked = metadata.state_dict_metadata, frozenset(planner.state_dict)
            find_unread_keys = lambda: tuple(sorted(saved.keys() - asked))  # noqa: E731 (only if somebody asks)
        return LoadReport(
            checkpoint_id=self.checkpoint,
            rank=channel.rank,
            world_size=channel.size,
            items=len(items),
            nbytes=PlannedItems.of(items).data_nbytes(metadata),
            phases=tuple(self.clock.records),
            missing_keys=getattr(planner, "missing_keys", ()),
            remarks=remarks,
            _find_unread_keys=find_unread_keys,
            shared_nbytes=0 if self.shared is None else PlannedItems.of(self.shared.received).data_nbytes(metadata),
            peak_buffer_nbytes=getattr(self.reader, "peak_buffer_nbytes", 0),
            unverified_nbytes=getattr(self.reader, "unverified_nbytes", 0),
            stragglers=tuple(channel.stragglers),
        )
