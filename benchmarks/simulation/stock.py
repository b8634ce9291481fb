"""Stock's coordinator in a save of virtual ranks: what ``torch.distributed.checkpoint.save`` runs on rank 0.

Owns the steps that count. ``_DistWrapper``, ``DefaultSavePlanner`` and ``FileSystemWriter`` are torch's own. They are
called in the order of ``state_dict_saver._save_state_dict``. Only the collectives below ``_DistWrapper`` are replaced.
The replacements do what ``gather_object``, ``scatter_object_list`` and ``broadcast_object_list`` do on rank 0 before
and after the network. The steps in order, with their names in the rows:

* ``gather plans``: one buffer of ranks x the longest pickle is filled, and the local plans of all ranks unpickled.
* ``plan``: ``create_global_plan`` (removes duplicates, makes ``Metadata``, validates) and ``prepare_global_plan``.
* ``scatter plans``: one pickle for each rank, all padded to the longest; its own is unpickled.
* ``own share``: ``finish_plan``.
* ``gather results``: the ``WriteResult`` of every item of all ranks, as above. The writing itself is left out.
* ``finish``: ``FileSystemWriter.finish``: ``.metadata`` pickled, fsynced, renamed.
* ``broadcast``: the ``Metadata`` pickled once more.

A ``first`` save has a planner without options. ``repeated`` and ``change`` have ``enable_plan_caching=True`` and follow
a save that is not measured. In ``repeated`` all ranks send an empty plan. In ``change`` one rank sends its new plan.
Without caching every save costs as much as the first.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from benchmarks.simulation.mailbox import COORDINATOR
from benchmarks.simulation.others import SaveName
from benchmarks.simulation.ours import SimulatedSave
from benchmarks.simulation.payloads import Payloads

__all__ = ["StockCoordinator", "forget_plans"]

_CPU = torch.device("cpu")


class StockCoordinator:
    """Rank 0 of virtual ranks, from its first save on.

    Args:
        payloads: the payloads, with stock's local plans.
        caching: whether to save with ``enable_plan_caching=True``.
    """

    def __init__(self, payloads: Payloads, *, caching: bool) -> None:
        forget_plans()
        self._payloads = payloads
        self._caching = caching

    def save(self, name: SaveName, directory: str) -> SimulatedSave:
        """Make one save into ``directory``, which must exist and be empty."""
        made = SimulatedSave(outcome="cached" if self._caching else "made")
        ranks = _FileRanks(self._payloads, name, made)
        planner = DefaultSavePlanner(enable_plan_caching=self._caching)
        writer = FileSystemWriter(directory)
        writer.set_up_storage_writer(True, rank=COORDINATOR, use_collectives=True)
        metadata = Metadata({})

        def make_global_plan(local_plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(local_plans)
            plans = writer.prepare_global_plan(plans)
            made.watch.lap("plan")
            return plans

        def finish_own_share() -> list[WriteResult]:
            planner.finish_plan(own_plan)
            made.watch.lap("own share")
            return []

        def finish_checkpoint(results: list[list[WriteResult]]) -> Metadata:
            made.n_written = sum(map(len, results))
            writer.finish(metadata, results)
            made.watch.lap("finish")
            return metadata

        made.watch.start()
        own_plan = ranks.reduce_scatter("plan", lambda: SavePlan([]), make_global_plan)
        ranks.all_reduce("write", finish_own_share, finish_checkpoint)
        made.metadata_nbytes = (Path(directory) / ".metadata").stat().st_size
        return made


def forget_plans() -> None:
    """Empty stock's plan caches, which all planners of a process share."""
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(cache, dict):  # torch 2.7 has fewer of them
            cache.clear()


class _FileRanks(_DistWrapper):
    """The object collectives on rank 0, with the pickles of the other ranks in files."""

    def __init__(self, payloads: Payloads, save: SaveName, made: SimulatedSave) -> None:
        super().__init__(None, use_dist=False, coordinator_rank=COORDINATOR)
        self._payloads = payloads
        self._save = save
        self._made = made
        self._gathers = iter((("gather plans", self._plan_file), ("gather results", self._result_file)))

    def get_world_size(self) -> int:
        return self._payloads.ranks

    def gather_object(self, object: Any) -> list[Any]:
        """As ``distributed_c10d.gather_object``: rank 0's own object is among the files too."""
        name, file_of = next(self._gathers)
        with self._made.watch.paused():
            files = [file_of(rank) for rank in range(self.get_world_size())]
            sizes = [file.stat().st_size for file in files]
            self._made.sent_nbytes += sum(sizes)
            self._made.arrived_nbytes += max(sizes) * len(sizes)
        gathered = torch.empty(max(sizes) * len(sizes), dtype=torch.uint8)
        outputs = [gathered[max(sizes) * rank : max(sizes) * (rank + 1)] for rank in range(len(sizes))]
        for file, output in zip(files, outputs, strict=True):
            with file.open("rb") as stream:
                stream.readinto(output.numpy().data)
        objects = [
            distributed_c10d._tensor_to_object(output, size, None) for output, size in zip(outputs, sizes, strict=True)
        ]
        self._made.watch.lap(name)
        return objects

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        """As ``distributed_c10d.scatter_object_list``."""
        tensors = [distributed_c10d._object_to_tensor(plan, _CPU, None)[0] for plan in object_list or []]
        sizes = [tensor.numel() for tensor in tensors]
        for tensor in tensors:
            tensor.resize_(max(sizes))
        own = distributed_c10d._tensor_to_object(tensors[COORDINATOR].clone(), sizes[COORDINATOR], None)
        self._made.watch.lap("scatter plans")
        with self._made.watch.paused():
            self._made.returned_nbytes += max(sizes) * len(sizes)
            for rank, plan in enumerate(object_list or []):
                if plan.usable:
                    self._result_file(rank).write_bytes(pickle.dumps(_results(plan, rank)))
        return own

    def broadcast_object(self, object: Any) -> Any:
        """As ``distributed_c10d.broadcast_object_list``."""
        tensor, _ = distributed_c10d._object_to_tensor(object, _CPU, None)
        self._made.returned_nbytes += tensor.numel()
        self._made.watch.lap("broadcast")
        return object

    def _plan_file(self, rank: int) -> Path:
        if self._save == "first":
            return self._payloads.stock_plan(rank)
        if self._save == "change" and rank == self._payloads.ranks - 1:
            return self._payloads.stock_plan(rank, added=True)
        unchanged = self._payloads.directory / "stock" / "unchanged"
        unchanged.write_bytes(pickle.dumps(SavePlan([], usable=False)))
        return unchanged

    def _result_file(self, rank: int) -> Path:
        return self._payloads.directory / "stock" / f"results-{rank}"


def _results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """A rank's results for the items that it has written. They are in one file, as in stock without options."""
    found, offset = [], 0
    for item in plan.items:
        nbytes = 1000 if item.tensor_data is None else (item.tensor_storage_size() or 0) + 1200
        info = _StorageInfo(relative_path=f"__{rank}_0.distcp", offset=offset, length=nbytes)
        found.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=info))
        offset += nbytes
    return found
