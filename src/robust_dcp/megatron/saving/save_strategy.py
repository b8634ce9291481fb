"""Megatron-Core's save strategy over :func:`robust_dcp.save` and :func:`robust_dcp.async_save`.

Owns what Megatron expects of a strategy; starts no process, keeps no plan and no queue. Passed by the user as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.save``, alone or in ``FullyParallelSaveStrategyWrapper``;
with robust_dcp as the planner, ``saving`` and ``save_patches`` write Megatron's own strategy's shards through it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from robust_dcp import api
from robust_dcp.async_save import async_save
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import BackgroundSave, request_for
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import MegatronOptions, current_options
from robust_dcp.megatron.saving.planner import MegatronPlanner
from robust_dcp.megatron.writing import log_report, writer_for
from robust_dcp.plan.agreed_plan import OnStructureChange
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.records.objects import Refusal

__all__ = ["RobustSaveStrategy", "ShardedSave", "request_for_shards"]

CheckpointDir = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class ShardedSave:
    """A save of the shards of a sharded state dict, to be made now or beside training; all ranks of the group make it.

    Attributes:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, factories applied.
        checkpoint_dir: a directory of a mounted file system.
        options: of writer and planner.
        process_group: ``None`` for all ranks.
        writer: of ``writer_for``, for a caller that has to take the commit back if what follows fails.
        parallelization_group: that of ``FullyParallelSaveStrategyWrapper``: this rank's part of the job, in which any
            rank may write what is the main replica of another. ``None`` without it: the main replica is written.
        facts: of the shards of ``sharded_state_dict``, if they are known.
        refused: what else of this checkpoint a load would refuse, by key.
    """

    sharded_state_dict: dict[str, Any]
    checkpoint_dir: CheckpointDir
    options: MegatronOptions
    process_group: dist.ProcessGroup | None = None
    writer: RobustWriter | None = None
    parallelization_group: dist.ProcessGroup | None = None
    facts: ShardFacts | None = None
    refused: Mapping[str, Refusal] | None = None

    @entry_point
    def write(self) -> SaveReport:
        """Write and commit.

        Raises:
            RobustCheckpointError: on every rank, whichever of them failed.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        report: SaveReport = self._call(api.save)
        log_report(report)
        return report

    @entry_point
    def start(self) -> BackgroundSave:
        """Agree and copy what this rank writes. It is written and committed while training goes on.

        Raises: as :meth:`write`.
        """
        return BackgroundSave(self._call(async_save))

    def _call(self, save: Callable[..., Any]) -> Any:
        group, options = self.parallelization_group, self.options
        writer = writer_for(self.checkpoint_dir, options) if self.writer is None else self.writer
        meet_before_saving()
        with as_megatron_raises():
            return save(
                self.sharded_state_dict,
                storage_writer=writer,
                planner=MegatronPlanner(
                    peers=() if group is None else dist.get_process_group_ranks(group),
                    facts=self.facts,
                    refused=self.refused,
                    on_structure_change=options.on_structure_change,
                    verify_replicas=options.verify_replicas,
                    on_unloadable_object=options.on_unloadable_object,
                ),
                process_group=self.process_group,
                timeout_seconds=options.exchange_timeout_seconds,
            )


def request_for_shards(save: ShardedSave, strategy: Any, async_strategy: str | None) -> Any:
    """Start ``save``, for Megatron's queue. ``last_report`` of ``strategy`` is set when the request is finalized.

    Args:
        async_strategy: whose queue the request goes into (Megatron-Core 0.17 and newer).

    Raises: as :meth:`ShardedSave.write`.
    """
    request_class = versions.async_request_class(async_strategy)  # first: it raises if that queue is not installed

    def finish(report: SaveReport) -> None:
        strategy.last_report = report

    return request_for(request_class, save.start(), finish)


class RobustSaveStrategy(versions.TorchDistSaveShardedStrategy):
    """Saves Megatron sharded state dicts with robust_dcp; stock Megatron loads them.

    It derives from the stock strategy because Megatron asks for one: up to 0.16 it refuses another class, from 0.17
    on it silently takes the stock strategy in its place. Nothing is inherited but attributes: ``cached_metadata`` and
    ``thread_count`` of the stock strategy have no meaning here, and a changed structure is noticed on every save.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustSaveStrategy

        strategy = RobustSaveStrategy()
        dist_checkpointing.save(sharded_state_dict, checkpoint_dir, strategy)
        print(strategy.last_report)

    Args:
        backend, version: what Megatron writes into ``metadata.json``; the format on disk is ``torch_dist``.
        process_group: the ranks that call ``dist_checkpointing.save`` together; all ranks by default.
        timeout_seconds: for each exchange between ranks.
        on_structure_change: ``"rebuild"`` (log the keys and plan anew), ``"error"`` or ``"quiet"``.
        threads: writer threads, and files, of each rank.
        buffer_bytes: limit for the memory of the writer.

    What is not given is as Megatron's arguments or the environment say (:func:`~.options.current_options`).
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
        on_structure_change: OnStructureChange | None = None,
        threads: int | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        super().__init__(backend, version)
        self.process_group = process_group
        self._given: dict[str, Any] = {
            "exchange_timeout_seconds": timeout_seconds,
            "on_structure_change": on_structure_change,
            "writer_threads": threads,
            "writer_buffer_bytes": buffer_bytes,
        }
        self.last_report: SaveReport | None = None
        """What the last save of this strategy did; ``None`` before the first. Of an asynchronous one once Megatron has
        finalized it."""

    @property
    def options(self) -> MegatronOptions:
        """The options of the next save."""
        given = {name: value for name, value in self._given.items() if value is not None}
        return replace(current_options(), **given)

    @entry_point
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> None:
        """Save and commit; ``last_report`` says what was done.

        Raises:
            RobustCheckpointError: on every rank, whichever of them failed.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        self.last_report = self._of(sharded_state_dict, checkpoint_dir).write()

    @entry_point
    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: CheckpointDir,
        async_strategy: str | None = None,
    ) -> Any:
        """Start a save, and return the request whose finalizer waits for it.

        Args:
            sharded_state_dict, checkpoint_dir: as in :meth:`save`.
            async_strategy: whose queue the request goes into (Megatron-Core 0.17 and newer).
        """
        return request_for_shards(self._of(sharded_state_dict, checkpoint_dir), self, async_strategy)

    def _of(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> ShardedSave:
        return ShardedSave(sharded_state_dict, checkpoint_dir, self.options, self.process_group)
