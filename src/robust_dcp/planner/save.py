"""``RobustPlanner``: DCP's ``SavePlanner`` over ``plan``.

Owns the translation between DCP's hooks and a :class:`~robust_dcp.plan.session.SaveSession`; decides nothing about
plans itself. Called by ``api.save``, and by stock ``torch.distributed.checkpoint.save`` through the hooks.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.comm import Channel
from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.plan.global_plan import object_digest
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.session import OnObjectMismatch, OnStructureChange, SaveSession
from robust_dcp.plan.structure import Form, PlanContext, StructureSignature, reorder, table_of
from robust_dcp.planner.committed_metadata import PlannedMetadata
from robust_dcp.storage.layout import LAYOUT_VERSION
from robust_dcp.storage.torch_zip import is_fixed_size, record_template
from robust_dcp.storage.writer import RobustWriter, WriterMeta
from robust_dcp.version import __version__

__all__ = ["RobustPlanner"]


class RobustPlanner(DefaultSavePlanner):
    """A save planner whose plans are checked, balanced, and reused only when every rank proves that they still hold.

    Complete without arguments: plans are cached by the package, not by this object, so a new planner for every save
    is as good as one that is kept.

    Args:
        flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank: as ``DefaultSavePlanner``.
        dedup_replicated_tensors, enable_plan_caching: accepted so that this class can take the place of
            ``DefaultSavePlanner``; replicas are always deduplicated and plans always cached.
        process_group: the ranks that save together; ``None`` for all.
        timeout_seconds: for every exchange of a save.
        on_structure_change: when the structure is not that of the last committed save: ``"rebuild"`` the plan and
            log which keys changed, ``"quiet"`` without the log, ``"error"``: raise ``StructureChanged``.
        on_object_mismatch: when an object that several ranks hold differs between them: ``"warn"``, ``"error"``
            (raise ``PlanConflict``), ``"ignore"``.
        no_dist: plan for this process alone although ``torch.distributed`` is initialised.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     report = robust_dcp.save({"w": torch.ones(4)}, checkpoint_id=path, planner=RobustPlanner())
        >>> report.plan
        'built'
    """

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
        on_object_mismatch: OnObjectMismatch = "warn",
        no_dist: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        if on_structure_change not in ("rebuild", "error", "quiet"):
            raise ValueError(f'on_structure_change is "rebuild", "error" or "quiet", not {on_structure_change!r}')
        if on_object_mismatch not in ("warn", "error", "ignore"):
            raise ValueError(f'on_object_mismatch is "warn", "error" or "ignore", not {on_object_mismatch!r}')
        self.process_group = process_group
        self.timeout_seconds = timeout_seconds
        self.on_structure_change: OnStructureChange = on_structure_change
        self.on_object_mismatch: OnObjectMismatch = on_object_mismatch
        self.no_dist = no_dist
        self._items: list[WriteItem] = []
        self._writer: RobustWriter | None = None
        self._checkpoint = ""
        self._told_coordinator = False
        self._set_up_error: Exception | None = None
        self._session: SaveSession | None = None

    def open_session(
        self,
        checkpoint: str,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
        no_dist: bool = False,
    ) -> SaveSession:
        """The start of a save: nothing has been exchanged yet. What is not given here is as this planner says."""
        channel = Channel.for_group(
            self.process_group if process_group is None else process_group,
            purpose="save",
            timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds,
            no_dist=self.no_dist or no_dist,
        )
        return SaveSession(channel, checkpoint, self.on_structure_change, self.on_object_mismatch)

    def describe(self, channel: Channel, writer: RobustWriter | None) -> LocalStructure:
        """The structure of the state dict that :meth:`set_up_planner` was given.

        Args:
            writer: where it will be written; ``None`` for a writer that is not ours and places items itself.

        Raises:
            PlanConflict: a name stands for two items, or a DTensor is a pending reduction (``Partial``).
        """
        self._items = reorder(create_default_local_save_plan(self.state_dict, channel.is_coordinator).items)
        table = table_of(
            self._items,
            [self._form_of(item) for item in self._items],
            self.mappings if self.flatten_state_dict else None,
        )
        context = PlanContext(
            ranks=channel.ranks,
            planner_options={
                "class": f"{type(self).__module__}.{type(self).__qualname__}",
                "flatten_state_dict": self.flatten_state_dict,
                "flatten_sharded_tensors": self.flatten_sharded_tensors,
                "dedup_save_to_lowest_rank": self.dedup_save_to_lowest_rank,
                "on_object_mismatch": self.on_object_mismatch,
            },
            writer_options={} if writer is None else writer.plan_options,
            versions={"torch": str(torch.__version__), "robust_dcp": __version__, "layout": LAYOUT_VERSION},
        )
        return LocalStructure(
            table=table,
            context=context,
            signature=StructureSignature.of(table, context),
            object_digests=self._object_digests(alone=channel.size == 1),
            files=None if writer is None else writer.files_per_rank,
            lowest_rank=self.dedup_save_to_lowest_rank,
        )

    def kept_items(self, session: SaveSession) -> list[WriteItem]:
        """The write items of this rank's share of the plan, in plan order."""
        return [self._items[place] for place in session.rank_plan.kept.tolist()]

    def _form_of(self, item: WriteItem) -> Form:
        if item.tensor_data is None:
            return Form.VARIABLE
        data = self.lookup_object(item.index)
        template = record_template(item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
        fixed = isinstance(data, torch.Tensor) and is_fixed_size(data) and template is not None
        return Form.FIXED if fixed else Form.VARIABLE

    def _object_digests(self, *, alone: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
        objects = [item for item in self._items if item.type == WriteItemType.BYTE_IO]
        if alone or self.on_object_mismatch == "ignore":
            return np.zeros(len(objects), dtype=np.uint64)
        return np.array([object_digest(self.lookup_object(item.index)) for item in objects], dtype=np.uint64)

    # The hooks of stock `torch.distributed.checkpoint.save`, in the order in which it calls them.

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict of one save. What is wrong with it is raised on all ranks by the first exchange."""
        self._writer = storage_meta.writer if isinstance(storage_meta, WriterMeta) else None
        self._checkpoint = checkpoint_name(None if storage_meta is None else storage_meta.checkpoint_id)
        self._told_coordinator = is_coordinator
        self._session = None
        self._set_up_error = None
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            _refuse_partial(self.state_dict)
        except Exception as error:  # raised in create_local_plan, inside the exchange, so that no rank waits for us
            self._set_up_error = _named_conflict(error)

    def raise_set_up_error(self) -> None:
        """Raise what :meth:`set_up_planner` found; called inside an exchange, so that all ranks learn of it."""
        if self._set_up_error is not None:
            raise self._set_up_error

    def create_local_plan(self) -> SavePlan:
        """Agree with all ranks on the plan. What stock gathers from here on is an empty stub."""
        session = self.open_session(self._checkpoint)

        def describe() -> LocalStructure:
            self.raise_set_up_error()
            if self._writer is not None:
                self._writer.begin(is_coordinator=self._told_coordinator)
            return self.describe(session.channel, self._writer)

        session.agree(describe, leads=self._told_coordinator)
        if self._writer is None and session.n_leaders > 1:
            raise RobustCheckpointError(
                f"no_dist=True in a job of {session.channel.size} ranks needs RobustWriter: with another storage "
                "writer each rank would write its own .metadata over those of the others; pass "
                "storage_writer=RobustWriter(path), or RobustPlanner(no_dist=True) to save on one rank alone"
            )
        self._session = session
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan is made already: hand stock a stub for each rank, and the metadata to commit."""
        session = self._begun()
        if self._writer is not None:
            session.commits_together = len(all_plans) < session.channel.size
            return list(all_plans), PlannedMetadata(session, self._checkpoint)
        if session.coordinator is None:
            raise RobustCheckpointError(
                "use_collectives=False needs storage_writer=RobustWriter(path): this planner's plan is global, and a "
                "storage writer that commits each rank by itself would lose it"
            )
        return list(all_plans), session.coordinator.metadata.without_storage()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's share; RobustWriter finds the places of its items, and the session, in ``planner_data``."""
        session = self._begun()
        self.plan = replace(
            new_plan,
            items=self.kept_items(session),
            planner_data=None if self._writer is None else session,
        )
        return self.plan

    def _begun(self) -> SaveSession:
        if self._session is None:
            raise RobustCheckpointError("create_local_plan must come before the later hooks of a save")
        return self._session


def checkpoint_name(checkpoint_id: str | os.PathLike[str] | None) -> str:
    """How a checkpoint is called in exchanges and messages: ranks that name another one are in another operation."""
    return "" if checkpoint_id is None else os.path.normpath(os.fspath(checkpoint_id))


def _named_conflict(error: Exception) -> Exception:
    """Stock's word for two paths that flatten to one name, as ours; any other error as it is."""
    found = re.fullmatch(r"duplicated flatten key (.*)", str(error), re.DOTALL)
    if not isinstance(error, ValueError) or found is None:
        return error
    key = found[1]
    return PlanConflict(
        f"the state dict has two values that flatten to the name {key!r} (a key with dots, and a nested dict); "
        "rename one of them",
        key=key,
    )


def _refuse_partial(state_dict: dict[str, Any]) -> None:
    for key, value in state_dict.items():
        if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            raise PlanConflict(
                f"the DTensor {key!r} has a Partial placement ({value.placements}): its value is a reduction that has "
                "not been done. Call .redistribute() to Replicate or Shard before saving",
                key=key,
            )
