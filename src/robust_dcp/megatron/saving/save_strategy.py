"""Megatron-Core's save strategy over :func:`robust_dcp.save` and :func:`robust_dcp.async_save`.

Owns what Megatron expects of a strategy. It starts no process, and keeps no plan and no queue. Users pass it as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.save``, alone or in ``FullyParallelSaveStrategyWrapper``.
With robust_dcp as the planner, ``saving`` and ``save_patches`` also write through it when the strategy is Megatron's
own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from robust_dcp import api
from robust_dcp.asynchronous import async_save
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import BackgroundSave, request_for
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import MegatronOptions, current_options
from robust_dcp.megatron.saving.planner import MegatronPlanner
from robust_dcp.megatron.writing import log_report, writer_for
from robust_dcp.plan.session import OnStructureChange
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.records.objects import Refusal

__all__ = ["RobustSaveStrategy", "ShardedSave", "request_for_shards"]

CheckpointDir = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class ShardedSave:
    """One save of the shards of a sharded state dict, now or beside training. All ranks of the group make it together.

    Attributes:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, after factories were applied.
        checkpoint_dir: a directory on a mounted file system.
        options: the options of the writer and the planner.
        process_group: the ranks that save together; ``None`` for all ranks.
        writer: what ``writer_for`` returned. It is for a caller that must undo the commit if a later step fails.
        parallelization_group: the group of ``FullyParallelSaveStrategyWrapper``. Any rank of this group may write a
            shard whose main replica is on another of its ranks. ``None`` without the wrapper: the main replica is
            written.
        facts: the facts of the shards, if they are known.
        refused: what else a load would refuse in this checkpoint, by key.
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
            RobustCheckpointError: any rank failed. Every rank raises it.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        report: SaveReport = self._call(api.save)
        log_report(report)
        return report

    @entry_point
    def start(self) -> BackgroundSave:
        """Agree with the other ranks, and copy the data that this rank writes. Training then goes on while it is
        written and committed.

        Raises what :meth:`write` raises.
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
                    on_unloadable_object=options.on_unloadable_object,
                ),
                process_group=self.process_group,
                timeout_seconds=options.exchange_timeout_seconds,
            )


def request_for_shards(save: ShardedSave, strategy: Any, async_strategy: str | None) -> Any:
    """Start ``save`` and return a request for Megatron's queue. When the request is finalized, ``strategy`` gets its
    ``last_report``.

    Args:
        async_strategy: the package that owns the queue (Megatron-Core 0.17 and newer).

    Raises what :meth:`ShardedSave.write` raises.
    """
    request_class = versions.async_request_class(async_strategy)  # comes first: it raises if the queue is not installed

    def finish(report: SaveReport) -> None:
        strategy.last_report = report

    return request_for(request_class, save.start(), finish)


class RobustSaveStrategy(versions.TorchDistSaveShardedStrategy):
    """Saves Megatron sharded state dicts with robust_dcp; stock Megatron loads them.

    It derives from the stock strategy because Megatron requires that. Up to 0.16 Megatron refuses another class, and
    from 0.17 on it silently uses the stock strategy in its place. Only attributes are inherited. ``cached_metadata``
    and ``thread_count`` of the stock strategy have no effect here. Every save notices if the structure has changed.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustSaveStrategy

        strategy = RobustSaveStrategy()
        dist_checkpointing.save(sharded_state_dict, checkpoint_dir, strategy)
        print(strategy.last_report)

    Args:
        backend, version: what Megatron writes into ``metadata.json``. The format on disk is ``torch_dist``.
        process_group: the ranks that call ``dist_checkpointing.save`` together; all ranks by default.
        timeout_seconds: the timeout of each exchange between ranks.
        on_structure_change: ``"rebuild"`` (log the keys and plan anew), ``"error"`` or ``"quiet"`` (plan anew).
        threads: the number of writer threads of each rank. Each writes a file.
        buffer_bytes: limit for the memory of the writer.

    The defaults come from Megatron's arguments or the environment (:func:`~.options.current_options`).
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
        """The report of this strategy's last save; ``None`` before the first. An asynchronous save sets it when
        Megatron finalizes the save."""

    @property
    def options(self) -> MegatronOptions:
        """The options of the next save."""
        given = {name: value for name, value in self._given.items() if value is not None}
        return replace(current_options(), **given)

    @entry_point
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> None:
        """Save and commit. ``last_report`` then has the report.

        Raises:
            RobustCheckpointError: any rank failed. Every rank raises it.
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
            async_strategy: the package that owns the queue (Megatron-Core 0.17 and newer).
        """
        return request_for_shards(self._of(sharded_state_dict, checkpoint_dir), self, async_strategy)

    def _of(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> ShardedSave:
        return ShardedSave(sharded_state_dict, checkpoint_dir, self.options, self.process_group)
