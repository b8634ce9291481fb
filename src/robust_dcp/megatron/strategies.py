"""Megatron-Core's save strategy over :func:`robust_dcp.save`.

Owns what Megatron expects of a strategy; starts no process, keeps no plan and no queue. Passed by the user as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.save``, alone or in ``FullyParallelSaveStrategyWrapper``.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import torch.distributed as dist

from robust_dcp import api
from robust_dcp.megatron import versions
from robust_dcp.megatron.planner import MegatronPlanner
from robust_dcp.report import SaveReport
from robust_dcp.storage.writer import RobustWriter

__all__ = ["RobustSaveStrategy"]

logger = logging.getLogger(__name__)


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
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 300.0,
        on_structure_change: Literal["rebuild", "error", "quiet"] = "rebuild",
        threads: int = 2,
    ) -> None:
        super().__init__(backend, version)
        self._process_group = process_group
        self._timeout_seconds = timeout_seconds
        self._on_structure_change = on_structure_change
        self._threads = threads
        self.last_report: SaveReport | None = None
        """What the last save of this strategy did; ``None`` before the first."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save and commit; ``last_report`` says what was done.

        Raises:
            RobustCheckpointError: on every rank, whichever of them failed.
            ValueError: for a ``checkpoint_dir`` of NVIDIA's Multi-Storage Client.
        """
        if str(checkpoint_dir).startswith("msc://"):
            raise ValueError(f"robust_dcp writes to file systems that are mounted, not to {checkpoint_dir}")
        self.last_report = api.save(
            sharded_state_dict,
            storage_writer=RobustWriter(checkpoint_dir, threads=self._threads),
            planner=MegatronPlanner(on_structure_change=self._on_structure_change),
            process_group=self._process_group,
            timeout_seconds=self._timeout_seconds,
        )

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str | None = None,
    ) -> Any:
        """Save now and return a request that only has Megatron's finalizers to run.

        Args:
            sharded_state_dict, checkpoint_dir: as in :meth:`save`.
            async_strategy: whose queue the request goes into (Megatron-Core 0.17 and newer).
        """
        logger.info("robust_dcp saves %s synchronously, though an asynchronous save was asked for", checkpoint_dir)
        request = versions.finished_request(async_strategy)  # first: it raises if that queue is not installed
        self.save(sharded_state_dict, checkpoint_dir)
        return request
