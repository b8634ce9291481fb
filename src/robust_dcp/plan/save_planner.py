"""``RobustPlanner``: DCP's ``SavePlanner``, implemented with ``plan``.

This module translates between DCP's hooks and the stages of a save (``plan.session``). It decides nothing about plans
itself.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from robust_dcp import __version__
from robust_dcp.comm import Channel
from robust_dcp.drain.delivery import Delivery
from robust_dcp.errors import RobustCheckpointError, entry_point
from robust_dcp.phases import PhaseClock
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.session import (
    AgreedPlan,
    AgreedSave,
    OnReplicaMismatch,
    OnStructureChange,
    Planning,
    SaveOptions,
    SaveSession,
)
from robust_dcp.plan.state_dict import (
    DescribedItems,
    KnownStructure,
    OptionValue,
    StateDictSource,
    describe_items,
    digest_of,
    encode_context,
    flattened,
    holds_shards,
    overridden,
    structure_of,
)
from robust_dcp.plan.unloadable import OnUnloadableObject, UnloadableObjects
from robust_dcp.staging.blocks import flat_bytes, host_address, is_plain, to_host_together
from robust_dcp.storage.files.paths import checkpoint_name
from robust_dcp.storage.layouts.places import TORCH
from robust_dcp.storage.metadata.pickled import digest_of_form
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.storage.writer import RobustWriter, WriterMeta
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource, raise_named


class RobustPlanner(DefaultSavePlanner):
    """A save planner that checks and balances plans, and reuses a plan only if every rank proves that it still holds.

    It needs no arguments. The package caches plans, not this object, so you may make a new planner for every save.

    A planner that derives from it may override ``set_up_planner``, to save other keys or tensors than it was given, and
    ``resolve_data``, to hand over other contents of the same dtype and shape. The items of the plan are in no hook: it
    is made of columns. Only stock's ``save`` calls ``create_local_plan``, ``create_global_plan`` and ``finish_plan``;
    ``robust_dcp.save`` refuses a planner that overrides them.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank: as in ``DefaultSavePlanner``.
        dedup_replicated_tensors, enable_plan_caching: accepted so that this class can replace
            ``DefaultSavePlanner``. Replicas are always deduplicated and plans always cached.
        process_group: the ranks that save together; ``None`` for all.
        timeout_seconds: how long a rank may show no sign of progress.
        on_structure_change: what to do if the structure differs from the last committed save. ``"rebuild"`` makes a new
            plan and logs which keys changed, ``"quiet"`` does not log, ``"error"`` raises ``StructureChanged``.
        kind: a word for what is saved, for example ``"model"`` or ``"loader"``, if a job saves several state dicts in
            turn. A changed structure is compared with the last save of the same kind. Without it the names decide: two
            state dicts are of one kind if they share half of the names of the larger, or nearly all of the smaller.
        on_replica_mismatch: what to do if a value that several ranks hold under one name differs between them. Objects
            and whole tensors of at most 64 KiB are compared, between the ranks whose structure is new to a plan.
            ``"warn"``: one warning with the keys and ranks; ``"error"``: raise ``PlanConflict`` on all ranks and save
            nothing; ``"ignore"``. The copy of the lowest rank is saved.
        on_unloadable_object: what to do with an object that a load would refuse because it is not known to be plain
            data. ``"warn"``: one warning for the whole save, with key, class and what to do; ``"error"``: raise
            ``UnsafeCheckpoint`` on all ranks and save nothing; ``"ignore"``. Only with ``RobustWriter``.
        no_dist: plan for this process alone, even if ``torch.distributed`` is initialised.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     report = robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=path, planner=RobustPlanner())
        >>> report.plan
        'built'
    """

    needs_one_directory = ""
    """What kind of save this is, if it cannot be made on nodes that do not share the checkpoint's directory."""

    peers: tuple[int, ...] = ()
    """The ranks that may write each other's main replicas, if items say which replica counts."""

    stands_for: DefaultSavePlanner | None = None
    """The planner of stock's that the caller has passed."""

    refused: Mapping[str, NotData] = MappingProxyType({})
    """Objects of this checkpoint that are saved outside the plan, and that a load would refuse, by key."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 300.0,
        on_structure_change: OnStructureChange = "rebuild",
        on_replica_mismatch: OnReplicaMismatch = "warn",
        on_unloadable_object: OnUnloadableObject = "warn",
        no_dist: bool = False,
        kind: str | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        for option, value, allowed in (
            ("on_structure_change", on_structure_change, OnStructureChange),
            ("on_replica_mismatch", on_replica_mismatch, OnReplicaMismatch),
            ("on_unloadable_object", on_unloadable_object, OnUnloadableObject),
        ):
            words = get_args(allowed)
            if value not in words:
                *first, last = (f'"{word}"' for word in words)
                raise ValueError(f"{option} is {', '.join(first)} or {last}, not {value!r}")
        self.options = SaveOptions(
            process_group=process_group,
            no_dist=no_dist,
            timeout_seconds=timeout_seconds,
            on_structure_change=on_structure_change,
            on_replica_mismatch=on_replica_mismatch,
            on_unloadable_object=on_unloadable_object,
            kind=kind,
        )
        self._items: DescribedItems
        self._structure: KnownStructure
        self._writer: RobustWriter | None = None
        self._checkpoint_id: str | os.PathLike[str] | None = None
        self._set_up_error: Exception | None = None
        self._agreed: AgreedSave | AgreedPlan | None = None

    def open_planning(self, checkpoint: str, *, leads: bool | None = None, **given: Any) -> Planning:
        """Begin to plan a save. Nothing is exchanged yet.

        Args:
            leads: whether stock has made this rank the coordinator; ``None`` for the channel's.
            given: options in the place of this planner's, as in :class:`SaveOptions`. ``None`` and ``False`` are none.
        """
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        options = msgspec.structs.replace(self.options, **given)
        channel = Channel.for_group(
            options.process_group,
            operation=f"save {checkpoint}",
            timeout_seconds=options.timeout_seconds,
            deadline_seconds=options.deadline_seconds,
            no_dist=options.no_dist,
        )
        return Planning(channel, checkpoint, options, channel.is_coordinator if leads is None else leads)

    def open_session(self, planning: Planning, writer: RobustWriter, delivery: Delivery | None = None) -> SaveSession:
        """Begin a save by ``RobustWriter``. Nothing is exchanged yet.

        Args:
            delivery: what follows the commit; ``None`` inside stock's ``save``, of which listeners do not hear.
        """
        return SaveSession(
            planning,
            writer,
            PhaseClock(planning.channel, tells=delivery is not None),
            UnloadableObjects(planning.options.on_unloadable_object, self.refused),
            self.needs_one_directory,
            delivery,
        )

    def describe(self, channel: Channel) -> LocalStructure:
        """Describe the structure of the state dict that :meth:`set_up_planner` was given.

        This is called inside an exchange, so all ranks hear of any problem with it.

        Raises:
            PlanConflict: a name belongs to two items, or a DTensor is a pending reduction (``Partial``).
        """
        if self._set_up_error is not None:
            raise self._set_up_error
        writer = self._writer
        items = self.items_of_state_dict(is_coordinator=channel.is_coordinator)
        layout = TORCH if writer is None else writer.layout
        mappings = self.mappings if self.flatten_state_dict else None
        structure = structure_of(items, mappings, self.peers)
        self._items, self._structure = items, structure
        if self.stands_for is not None:
            self._tell_planner(self.stands_for, items)
        options: dict[str, OptionValue] = {
            "ranks": ",".join(map(str, channel.ranks)),
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "flatten_state_dict": self.flatten_state_dict,
            "flatten_sharded_tensors": self.flatten_sharded_tensors,
            "dedup_save_to_lowest_rank": self.dedup_save_to_lowest_rank,
            "on_replica_mismatch": self.options.on_replica_mismatch,
            "torch": str(torch.__version__),
            "robust_dcp": __version__,
            "version of the layout": layout.version,
            "form of .metadata": digest_of_form(),
        }
        if writer is not None:
            options |= {"layout": layout.name, "files_per_rank": writer.options.n_files}
        context = encode_context(options)
        return LocalStructure(
            items=structure.items,
            context=context,
            signature=structure.signature(context),
            files=1 if writer is None else writer.options.n_files,
            lowest_rank=self.dedup_save_to_lowest_rank,
            layout=layout,
            digests_of=None if channel.size == 1 or self.options.on_replica_mismatch == "ignore" else self._digests_of,
        )

    def items_of_state_dict(self, *, is_coordinator: bool) -> DescribedItems:
        """The items of the state dict. A planner that knows more about its items overrides this."""
        return describe_items(
            self.state_dict,
            self.lookup_object,
            is_coordinator=is_coordinator,
            by_lookup=bool(overridden(self, RobustPlanner, ("lookup_object",))),
        )

    def source(self, agreed: AgreedSave) -> ItemSource:
        """The data of this rank's share of the plan, in plan order. The writer takes it from here.

        If a subclass overrides ``lookup_object``, ``resolve_data`` or ``transform_object``, these are called for every
        item.
        """
        unloadable = agreed.session.unloadable
        resolve = partial(unloadable.resolve, self.resolve_data)
        if overridden(self, RobustPlanner, ("lookup_object", "resolve_data", "transform_object")):
            return WriteItemSource(self.kept_items(agreed.plan), resolve)

        def lookup(index: MetadataIndex) -> Any:
            return unloadable.take(index.fqn, self.lookup_object(index))

        return StateDictSource(self._items, self._structure, agreed.plan.kept.share.kept, lookup, resolve)

    def forget_state_dict(self) -> None:
        """Drop the state dict after everything to write has been copied, because its memory may be needed."""
        self.state_dict = {}
        if self.stands_for is not None:
            items = self._items
            indices: list[Any] = [data if isinstance(data, MetadataIndex) else None for data in items.data]
            self._tell_planner(self.stands_for, DescribedItems(items.names, items.structures, indices))
        self._items = DescribedItems([], [], [])

    def _tell_planner(self, planner: DefaultSavePlanner, items: DescribedItems) -> None:
        """Let the planner that the caller has passed hold what it would hold in a save by stock, but for other ranks'
        plans."""
        planner.state_dict, planner.mappings = self.state_dict, self.mappings
        planner.is_coordinator = self.is_coordinator
        write_items: Any = _WriteItems(items)
        planner.plan = SavePlan(write_items, planner_data=self.mappings if self.flatten_state_dict else None)
        if self.is_coordinator and self._writer is not None:
            planner.metadata = CommittedMetadata(self._writer.place)

    def kept_items(self, plan: AgreedPlan) -> list[WriteItem]:
        """The write items of this rank's share of the plan, in plan order."""
        return [self._items.write_item(place) for place in self._structure.order[plan.kept.share.kept].tolist()]

    def _digests_of(self, places: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Digests of what would be written for some items. 0 means that it cannot be read."""
        source = StateDictSource(self._items, self._structure, places, self.lookup_object, self.resolve_data)
        digests = np.zeros(len(places), dtype=np.uint64)
        on_device: list[tuple[int, torch.Tensor]] = []
        place = 0
        try:
            with torch.no_grad():
                for place in range(len(places)):
                    data = source.resolve(place)
                    if isinstance(data, torch.Tensor):
                        host_address(data)  # raises if its memory was freed
                        if data.is_cuda and is_plain(data):
                            on_device.append((place, flat_bytes(data)))
                            continue
                    digests[place] = digest_of(data)
                # All at once: each copy from a device waits for it, however small the copy is.
                copies = to_host_together([data for _, data in on_device])
                for (place, _), copy in zip(on_device, copies, strict=True):
                    digests[place] = digest_of(copy)
        except Exception as error:
            raise_named(error, source, place)
        return digests

    @property
    def hooks_of_stock(self) -> list[str]:
        """The hooks that a subclass overrides, and that only stock ``torch.distributed.checkpoint.save`` calls."""
        return overridden(self, RobustPlanner, ("create_local_plan", "create_global_plan", "finish_plan"))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written for a value: for a tensor the tensor itself, for an object its bytes."""
        return self.object_data(write_item, object) if write_item.type == WriteItemType.BYTE_IO else object

    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        """The bytes of an object. Override this to serialize objects in another way.

        Do not override ``transform_object`` for that: then the writer would have to ask for each tensor too."""
        data: io.BytesIO = super().transform_object(write_item, value)
        return data

    # The hooks of stock `torch.distributed.checkpoint.save`, in the order in which it calls them.

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict of one save. If something is wrong with it, the first exchange raises that on all
        ranks."""
        self._writer = storage_meta.writer if isinstance(storage_meta, WriterMeta) else None
        self._checkpoint_id = None if storage_meta is None else storage_meta.checkpoint_id
        self.is_coordinator = is_coordinator
        self._agreed = None
        self._set_up_error = None
        try:
            # What DefaultSavePlanner.set_up_planner sets. It is called only if flattening has to handle ShardedTensor:
            # it makes dicts within of other classes, and text of their keys.
            kinds = set[type[Any]]()
            flat, mappings = flattened(state_dict, is_nested=self.flatten_state_dict)
            if self.flatten_state_dict:
                kinds.update(map(type, flat.values()))
            else:
                traverse_state_dict(state_dict, lambda _, value: kinds.add(type(value)))
            if self.flatten_sharded_tensors and any(map(holds_shards, kinds)):
                super().set_up_planner(state_dict, storage_meta, is_coordinator)
            else:
                self.state_dict, self.mappings = flat, mappings
        except Exception as error:  # describe raises it inside the exchange, so that no rank waits for this one
            self._set_up_error = error

    @entry_point
    def create_local_plan(self) -> SavePlan:
        """Agree with all ranks on the plan. The plan returned here, which stock gathers, is empty."""
        planning = self.open_planning(checkpoint_name(self._checkpoint_id), leads=self.is_coordinator)
        describe = partial(self.describe, planning.channel)
        if self._writer is not None:
            self._agreed = self.open_session(planning, self._writer).agree(describe)
            return SavePlan([])
        self._agreed = plan = planning.agree(describe)
        if plan.n_leaders > 1:
            raise RobustCheckpointError(
                f"no_dist=True in a job of {plan.channel.size} ranks needs RobustWriter: with another storage "
                "writer each rank would write its own .metadata over those of the others; pass "
                "storage_writer=RobustWriter(path), or RobustPlanner(no_dist=True) to save on one rank alone"
            )
        return SavePlan([])

    @entry_point
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return an empty plan for each rank, and the metadata to commit. The real plan is made already."""
        agreed = self._begun()
        if isinstance(agreed, AgreedSave):
            return list(all_plans), CommittedMetadata(agreed.session.planning.checkpoint)
        plan = agreed.kept.plan
        if plan is None:
            raise RobustCheckpointError(
                "RobustPlanner plans for all ranks together, and with use_collectives=False each would commit by "
                "itself: leave use_collectives at True, or save with DCP's DefaultSavePlanner"
            )
        return list(all_plans), plan.metadata.for_stock(plan.items, plan.shares)

    @entry_point
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's share. RobustWriter finds the save in ``planner_data``."""
        agreed = self._begun()
        plan, save = (agreed.plan, agreed) if isinstance(agreed, AgreedSave) else (agreed, None)
        self.plan = replace(new_plan, items=self.kept_items(plan), planner_data=save)
        return self.plan

    def _begun(self) -> AgreedSave | AgreedPlan:
        if self._agreed is None:
            raise RobustCheckpointError("create_local_plan() must be called before the later hooks of a save")
        return self._agreed


@dataclass(eq=False)
class _WriteItems(Sequence[WriteItem]):
    """The write items of a rank as stock's planner makes them, made when somebody looks at one."""

    _items: DescribedItems

    def __len__(self) -> int:
        return len(self._items.names)

    def __getitem__(self, place: Any) -> Any:
        places = range(len(self))[place]
        return self._items.write_item(places) if isinstance(places, int) else list(map(self._items.write_item, places))


def _read_on_use(name: str) -> Any:
    return property(lambda metadata: getattr(metadata.stored, name, None))


class CommittedMetadata(Metadata):
    """The metadata of a committed checkpoint. Pickled it is only a path; its content is read on first use.

    After the commit, stock broadcasts the result of ``create_global_plan`` to every rank. So that message is small.
    """

    def __init__(self, checkpoint: str) -> None:
        # Do not call the dataclass's __init__: it would set fields that are properties here.
        self._checkpoint = checkpoint

    @cached_property
    def stored(self) -> Metadata:
        """The content of the checkpoint's ``.metadata``."""
        return RobustReader(self._checkpoint).read_metadata()

    state_dict_metadata = _read_on_use("state_dict_metadata")
    planner_data = _read_on_use("planner_data")
    storage_data = _read_on_use("storage_data")
    storage_meta = _read_on_use("storage_meta")
    version = _read_on_use("version")

    def __reduce__(self) -> tuple[Any, ...]:
        return CommittedMetadata, (self._checkpoint,)
