"""Rank 0 in a save of virtual ranks: ours and stock's. Files take the place of the other ranks.

Ours is the real save, stage by stage, over a channel that reads what arrives from files: it combines the offers of its
children in the tree, decodes and plans structures, encodes the replies, handles its own share, and commits
``.metadata`` and the index with the plan into a directory. It writes no data, and the pieces of the other ranks stay
holes in its files.

Stock's is what ``torch.distributed.checkpoint.save`` runs on rank 0: ``_DistWrapper``, ``DefaultSavePlanner`` and
``FileSystemWriter``, in the order of ``state_dict_saver._save_state_dict``. Only the collectives below ``_DistWrapper``
are replaced, by what they do on rank 0 before and after the network.

Both make a ``first`` save, ``repeated`` ones, and one after a ``change``. Stock's have ``enable_plan_caching=True`` but
for the first, in which that is not the default: ranks that did not change send an empty plan.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from benchmarks.measuring import Stopwatch
from benchmarks.virtual_ranks import COORDINATOR, Payloads, SimulatedOperation, local_of, messages_up
from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.comm.frames import Frame, Kind, operation_id, phase_id
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.drain.delivery import Delivery
from robust_dcp.items import Form, Items
from robust_dcp.phases import PhaseClock
from robust_dcp.plan.cache import PLANS, plans_of
from robust_dcp.plan.plan import Plan, PlanReply, Rows
from robust_dcp.plan.save_report import Written, with_row
from robust_dcp.plan.session import MATCHES, Planning, SaveOptions, SaveSession
from robust_dcp.plan.unloadable import UnloadableObjects
from robust_dcp.report import PhaseReport
from robust_dcp.save_queue import queues_of
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import WriteItemSource

__all__ = ["SAVES", "OurCoordinator", "SaveName", "StockCoordinator"]

SaveName = Literal["first", "repeated", "change"]
SAVES: tuple[SaveName, ...] = ("first", "repeated", "change")
_CPU = torch.device("cpu")
M = TypeVar("M", bound=msgspec.Struct)


class OurCoordinator:
    """Our rank 0, from its first save on, and what the other ranks keep from save to save."""

    def __init__(self, payloads: Payloads) -> None:
        PLANS.clear()
        self.payloads = payloads
        self.ranks = payloads.ranks
        self.plan_id = Offer().same
        self.kept: list[Rows] = [np.empty(0, dtype=np.intp)] * self.ranks
        self.plan: Plan | None = None
        self.written_nbytes = 0
        self._local = local_of(COORDINATOR, self.ranks, payloads.n_items)

    def piece_of_another(self) -> Stopwatch:
        """What a rank does for ``.metadata`` and the index in each save, without the calls to the disk."""
        rank = self.ranks // 2
        local, share = local_of(rank, self.ranks, self.payloads.n_items), cast(Plan, self.plan).shares[rank]
        placements = local.place(share)
        names = local.layout.file_names(rank, placements.head_nbytes, "0" * 16)
        places = _written_files(local.items, share.kept, rank).variable_places
        watch = Stopwatch()
        watch.start()
        for piece in local.pieces(share, placements, names, places):
            crc32(piece)
        watch.stop()
        return watch

    def save(self, name: SaveName, directory: str) -> Stopwatch:
        """Make one save into ``directory``, which must exist and be empty."""
        watch = Stopwatch()
        channel = _SimulatedChannel(self, name, watch)
        writer = _Writer(directory, self._local.items, watch)
        planning = Planning(channel, directory, SaveOptions(on_structure_change="quiet"), leads=True)
        delivery = Delivery(
            checkpoint=directory,
            writer=writer,
            target=None,
            is_staged=False,
            on_commit=None,
            queue=queues_of(channel.ranks)[1],
            open_channel=Channel.for_group,
        )
        session = SaveSession(planning, writer, PhaseClock(channel), UnloadableObjects(), "", delivery)
        writer.directory.announce()
        watch.start()
        agreed = session.agree(lambda: self._local)
        writer.kept = agreed.plan.kept.share.kept
        self.plan = agreed.plan.kept.plan
        agreed.write(lambda: WriteItemSource([], lambda item: torch.empty(0))).commit()
        watch.stop()
        self.plan_id, self.written_nbytes = plans_of(channel.ranks)[0].share.plan_id, writer.disk.nbytes
        return watch


class _CountingDisk(Disk):
    """Counts the bytes that are written."""

    def __init__(self) -> None:
        self.nbytes = 0

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        self.nbytes += sum(map(len, data)) if isinstance(data, (list, tuple)) else len(data)
        super().pwrite(file, data, offset)


class _Writer(RobustWriter):
    """Writes no data. Its commits are real, into a directory that nobody else uses."""

    disk: _CountingDisk

    def __init__(self, directory: str, items: Items, watch: Stopwatch) -> None:
        super().__init__(directory, disk=_CountingDisk())
        self._items, self._watch = items, watch
        self.kept: Rows = np.empty(0, dtype=np.intp)

    def write(self, rank: int, source: Any, placements: Placements, *args: Any) -> WrittenFiles:
        with self._watch.paused():
            self.directory.check_written = lambda names=None: None  # type: ignore[method-assign]  # nothing is written
            names = self.layout.file_names(rank, placements.head_nbytes, mark_of(self.save_id))
            return msgspec.structs.replace(_written_files(self._items, self.kept, rank), names=tuple(names))


class _SimulatedChannel(Channel):
    """``Channel`` on the coordinator, for one save."""

    def __init__(self, coordinator: OurCoordinator, save: SaveName, watch: Stopwatch) -> None:
        self._of = coordinator
        self._watch = watch
        super().__init__(cast(Operation, _OnTheCoordinator(coordinator, save, watch)), COORDINATOR)

    def scatter(self, phase: str, produce: Callable[[], Any], message_type: type[M], **more: Any) -> Any:
        made, reply = super().scatter(phase, produce, message_type, **more)
        with self._watch.paused():
            for rank, each in enumerate(() if made is None else more["messages"](made)):
                if isinstance(each, PlanReply):
                    self._of.kept[rank] = each.share.kept
        return made, reply


class _OnTheCoordinator(SimulatedOperation):
    """Every exchange of one save. What the other ranks do is not measured."""

    def __init__(self, coordinator: OurCoordinator, save: SaveName, watch: Stopwatch) -> None:
        super().__init__(COORDINATOR, coordinator.ranks)
        self._of, self._save, self._watch = coordinator, save, watch

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Any, Payload]:
        own = work.produce()
        offer = own if work.offer is None else work.offer(own)
        with self._watch.paused():
            offers, payloads = self._said_by_others(phase.rpartition(": ")[2])
            frames = [
                Frame(Kind.UP, operation_id(self.name), phase=phase_id(phase), body=_agreement(child, offers).encode())
                for child in self.tree.children
            ]
            arrived = [
                (frame.encode(), payloads.get(child, b""))
                for frame, child in zip(frames, self.tree.children, strict=True)
            ]
        children = [Agreement.decode(Frame.decode(frame).body) for frame, _ in arrived]
        total = Agreement.of(COORDINATOR, offer if isinstance(offer, Offer) else Offer(), children)
        for _, received in arrived:
            zlib.crc32(received)
        payload = None if work.reply is None else work.reply(own, [received for _, received in arrived if received])
        for child in reversed(self.tree.children):
            zlib.crc32(work.share(payload, child) if payload and work.share is not None else payload or b"")
        return total, own, payload or b""

    def _said_by_others(self, exchange: str) -> tuple[list[Offer], dict[int, Payload]]:
        """What each rank offers, and the payload of each child."""
        of, ranks = self._of, self._of.ranks
        changed = ranks - 1 if self._save == "change" else None
        if exchange == "agree":  # after the first save the ranks know a plan, which does not fit a change
            flags = [0 if self._save == "first" or rank == changed else MATCHES for rank in range(ranks)]
            return [Offer(same=of.plan_id, flags=flag) for flag in flags], {}
        none = [Offer()] * ranks
        if exchange == "structures":
            return none, of.payloads.structures(changed=changed is not None)
        if exchange == "write" and of.plan is not None:
            items, shares = of.plan.items, of.plan.shares
            known = self._save == "repeated"

            def message_of(rank: int) -> Written | None:
                places = _written_files(items[rank], of.kept[rank], rank).variable_places
                message = Written(
                    piece=(shares[rank].piece_nbytes, zlib.crc32(b"%d" % rank)),
                    block_nbytes=shares[rank].block_nbytes,
                    places=b"" if known else places.astype("<i8").tobytes(),
                )
                return with_row(message, rank, _clock(rank), WrittenFiles(places, (), 0))

            return none, messages_up(ranks, message_of, Written)
        return none, {}


def _agreement(rank: int, offers: Sequence[Offer]) -> Agreement:
    """What ``rank`` and all ranks below it offer."""
    children = SimulatedOperation(rank, len(offers)).tree.children
    return Agreement.of(rank, offers[rank], [_agreement(child, offers) for child in children])


def _written_files(items: Items, kept: Rows, rank: int) -> WrittenFiles:
    """A rank's description of its files. The lengths of objects differ from rank to rank."""
    n_objects = int((items.form[kept] == Form.VARIABLE).sum())
    digests = [hashlib.blake2b(f"{rank} {number}".encode(), digest_size=1).digest() for number in range(n_objects)]
    lengths = np.array([500 + digest[0] for digest in digests], dtype=np.int64)
    places = np.column_stack([np.cumsum(lengths) - lengths, lengths]).reshape(n_objects, 2)
    return WrittenFiles(variable_places=places, names=(), nbytes=0)


def _clock(rank: int) -> PhaseClock:
    """Times that differ from rank to rank, so that their rows cannot be merged."""
    draw = random.Random(rank)
    channel = Channel.for_group(None, operation="save", timeout_seconds=300.0, no_dist=True)
    return PhaseClock(channel, records=[PhaseReport("plan", draw.random())], own_write_seconds=10 + draw.random())


# --- stock's ---------------------------------------------------------------------------------------------------------


class StockCoordinator:
    """Stock's rank 0 of virtual ranks, from its first save on. ``caching``: with ``enable_plan_caching=True``."""

    def __init__(self, payloads: Payloads, *, caching: bool) -> None:
        for name, cache in vars(SavePlanner).items():  # all planners of a process share these
            if name.startswith("_cached") and isinstance(cache, dict):  # torch 2.7 has fewer of them
                cache.clear()
        self._payloads = payloads
        self._caching = caching

    def save(self, name: SaveName, directory: str) -> Stopwatch:
        """Make one save into ``directory``, which must exist and be empty."""
        watch = Stopwatch()
        ranks = _FileRanks(self._payloads, name, watch)
        planner = DefaultSavePlanner(enable_plan_caching=self._caching)
        writer = FileSystemWriter(directory)
        writer.set_up_storage_writer(True, rank=COORDINATOR, use_collectives=True)
        metadata = Metadata({})

        def make_global_plan(local_plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(local_plans)
            return writer.prepare_global_plan(plans)

        def finish_own_share() -> list[WriteResult]:
            planner.finish_plan(own_plan)
            return []

        def finish_checkpoint(results: list[list[WriteResult]]) -> Metadata:
            writer.finish(metadata, results)
            return metadata

        watch.start()
        own_plan = ranks.reduce_scatter("plan", lambda: SavePlan([]), make_global_plan)
        ranks.all_reduce("write", finish_own_share, finish_checkpoint)
        watch.stop()
        return watch


class _FileRanks(_DistWrapper):
    """The object collectives on rank 0, with the pickles of the other ranks in files."""

    def __init__(self, payloads: Payloads, save: SaveName, watch: Stopwatch) -> None:
        super().__init__(None, use_dist=False, coordinator_rank=COORDINATOR)
        self._payloads, self._save, self._watch = payloads, save, watch
        self._gathers = iter((self._plan_file, self._result_file))

    def get_world_size(self) -> int:
        return self._payloads.ranks

    def gather_object(self, object: Any) -> list[Any]:
        """As ``distributed_c10d.gather_object``: rank 0's own object is among the files too."""
        file_of = next(self._gathers)
        with self._watch.paused():
            files = [file_of(rank) for rank in range(self.get_world_size())]
            sizes = [file.stat().st_size for file in files]
        gathered = torch.empty(max(sizes) * len(sizes), dtype=torch.uint8)
        outputs = [gathered[max(sizes) * rank : max(sizes) * (rank + 1)] for rank in range(len(sizes))]
        for file, output in zip(files, outputs, strict=True):
            with file.open("rb") as stream:
                stream.readinto(output.numpy().data)
        return [
            distributed_c10d._tensor_to_object(output, size, None) for output, size in zip(outputs, sizes, strict=True)
        ]

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        """As ``distributed_c10d.scatter_object_list``."""
        tensors = [distributed_c10d._object_to_tensor(plan, _CPU, None)[0] for plan in object_list or []]
        sizes = [tensor.numel() for tensor in tensors]
        for tensor in tensors:
            tensor.resize_(max(sizes))
        own = distributed_c10d._tensor_to_object(tensors[COORDINATOR].clone(), sizes[COORDINATOR], None)
        with self._watch.paused():
            for rank, plan in enumerate(object_list or []):
                if plan.usable:
                    self._result_file(rank).write_bytes(pickle.dumps(_results(plan, rank)))
        return own

    def broadcast_object(self, object: Any) -> Any:
        """As ``distributed_c10d.broadcast_object_list``."""
        distributed_c10d._object_to_tensor(object, _CPU, None)
        return object

    def _plan_file(self, rank: int) -> Path:
        if self._save == "first":
            return self._payloads.stock_plan(rank)
        if self._save == "change" and rank == self._payloads.ranks - 1:
            return self._payloads.stock_plan(rank, added=True)
        unchanged = self._payloads.directory / "unchanged"
        unchanged.write_bytes(pickle.dumps(SavePlan([], usable=False)))
        return unchanged

    def _result_file(self, rank: int) -> Path:
        return self._payloads.directory / f"results-{rank}"


def _results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """A rank's results for the items that it has written. They are in one file, as in stock without options."""
    found, offset = [], 0
    for item in plan.items:
        nbytes = 1000 if item.tensor_data is None else (item.tensor_storage_size() or 0) + 1200
        info = _StorageInfo(relative_path=f"__{rank}_0.distcp", offset=offset, length=nbytes)
        found.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=info))
        offset += nbytes
    return found
