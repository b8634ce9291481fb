"""Megatron-Core's save strategy over :func:`robust_dcp.save`.

Owns what Megatron expects of a strategy; starts no process, keeps no plan and no queue. Passed by the user as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.save``, alone or in ``FullyParallelSaveStrategyWrapper``;
with robust_dcp as the planner, ``saving`` and ``save_patches`` write Megatron's own strategy's shards through it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from robust_dcp import api
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import MegatronOptions, current_options
from robust_dcp.megatron.saving.planner import MegatronPlanner
from robust_dcp.megatron.writing import log_report, say_saves_at_once, writer_for
from robust_dcp.plan.agreed_plan import OnStructureChange
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.records.objects import Refusal

__all__ = ["RobustSaveStrategy", "write_sharded"]

CheckpointDir = str | os.PathLike[str]


@entry_point
def write_sharded(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: CheckpointDir,
    options: MegatronOptions,
    process_group: dist.ProcessGroup | None = None,
    writer: RobustWriter | None = None,
    *,
    parallelization_group: dist.ProcessGroup | None = None,
    facts: ShardFacts | None = None,
    refused: Mapping[str, Refusal] | None = None,
) -> SaveReport:
    """Write and commit the shards of a sharded state dict; all ranks of the group call it.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, factories applied.
        checkpoint_dir: a directory of a mounted file system.
        options: of writer and planner.
        process_group: ``None`` for all ranks.
        parallelization_group: that of ``FullyParallelSaveStrategyWrapper``: this rank's part of the job, in which any
            rank may write what is the main replica of another. ``None`` without it: the main replica is written.
        facts: of the shards of ``sharded_state_dict``, if they are known.
        writer: of ``writer_for``, for a caller that has to take the commit back if what follows fails.
        refused: what else of this checkpoint a load would refuse, by key.

    Raises:
        RobustCheckpointError: on every rank, whichever of them failed.
        ValueError: ``checkpoint_dir`` is a URL.
    """
    writer = writer_for(checkpoint_dir, options) if writer is None else writer
    meet_before_saving()
    with as_megatron_raises():
        report = api.save(
            sharded_state_dict,
            storage_writer=writer,
            planner=MegatronPlanner(
                peers=() if parallelization_group is None else dist.get_process_group_ranks(parallelization_group),
                facts=facts,
                refused=refused,
                on_structure_change=options.on_structure_change,
                verify_replicas=options.verify_replicas,
                on_unloadable_object=options.on_unloadable_object,
            ),
            process_group=process_group,
            timeout_seconds=options.exchange_timeout_seconds,
        )
    log_report(report)
    return report


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
        """What the last save of this strategy did; ``None`` before the first."""

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
        self.last_report = write_sharded(sharded_state_dict, checkpoint_dir, self.options, self.process_group)

    @entry_point
    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: CheckpointDir,
        async_strategy: str | None = None,
    ) -> Any:
        """Save now and return a request that only has Megatron's finalizers to run.

        Args:
            sharded_state_dict, checkpoint_dir: as in :meth:`save`.
            async_strategy: whose queue the request goes into (Megatron-Core 0.17 and newer).
        """
        say_saves_at_once()
        request = versions.finished_request(async_strategy)  # first: it raises if that queue is not installed
        self.save(sharded_state_dict, checkpoint_dir)
        return request
