"""Reads each byte once for all replicas: one rank reads what several ranks need, and passes it on to the others.

This module decides whether to do that, and runs the exchange in which ranks agree on readers. ``readers`` decides who
reads what, and ``shared_reads`` handles the bytes. ``api.load`` calls it.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from robust_dcp.comm import Agreement, Channel, GroupMover, Offer, node_of
from robust_dcp.errors import PlanConflict
from robust_dcp.plan.loading.readers import ReadColumns, ReadShare, assign_readers
from robust_dcp.plan.loading.shared_reads import SharedReads
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.sharable_reads import SharableReads

__all__ = ["all_have_plans", "choose_readers", "node_reads_the_same", "ranks_share", "sharing_offer"]

_NOTHING: Final = Offer().plan_id

_CAN: Final = 1
_WISHES: Final = {True: 2, False: 4, None: 8}
"""Flags of an offer. A rank without any of them reads by itself."""


def sharing_offer(share_reads: bool | None, rank: int, items: Sequence[ReadItem], *, can_share: bool) -> Offer:
    """The offer of a rank with a ``RobustReader(share_reads=…)``.

    Args:
        rank: this process's rank in the group.
        items: everything that it reads. Equal items in the same order give the same offer.
        can_share: whether its planner lets other ranks fill its tensors.

    Raises:
        ValueError: the environment variable for nodes has a value without meaning.
    """
    flags = _WISHES[share_reads] | (_CAN if can_share else 0)
    return Offer(plan_id=_digest(items), value=node_of(rank), flags=flags)


def all_have_plans(agreement: Agreement) -> bool:
    """Whether all ranks have made a :func:`sharing_offer`. A rank that offers nothing has no index to plan by."""
    return sum(agreement.count(wish) for wish in _WISHES.values()) == agreement.n_ranks


def node_reads_the_same(agreement: Agreement) -> bool:
    """Whether the ranks of a node read exactly the same, as in data parallel training.

    This is known if all ranks of the load read the same, and several of them are on this node.
    """
    if agreement.n_ranks == 1 or not agreement.same_plan_id or agreement.plan_id == _NOTHING:
        return False
    return agreement.same_value or int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1) > 1


def _digest(items: Sequence[ReadItem]) -> bytes:
    if not items:
        return _NOTHING
    indices = [item.storage_index for item in items]
    names = "\n".join([index.fqn for index in indices]).encode()
    boxes = [box for item in items for box in (item.storage_index.offset or (), item.storage_offsets, item.lengths)]
    numbers = array("q", chain.from_iterable(boxes)).tobytes()
    lengths = array("q", map(len, (names, *boxes))).tobytes()
    return hashlib.blake2b(lengths + names + numbers, digest_size=len(_NOTHING)).digest()


def ranks_share(agreement: Agreement) -> bool:
    """Whether this load reads once for all replicas. The answer is the same on all ranks.

    With ``share_reads=None`` it does so if the ranks are on several nodes. Ranks on one node read through one page
    cache or from one drive, which is faster than passing bytes on (docs/performance.md).

    Args:
        agreement: the combined offers of all ranks.

    Raises:
        PlanConflict: the ranks have different values of ``share_reads``. The error names the first rank of each.
    """
    wishes = {wish: agreement.first_rank(flag) for wish, flag in _WISHES.items() if agreement.count(flag)}
    if len(wishes) > 1:
        found = ", ".join(
            f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items(), key=lambda each: each[1] or 0)
        )
        raise PlanConflict(
            f"share_reads is {found}; pass the same to RobustReader on all ranks of a load",
            key="share_reads",
            ranks=sorted(rank for rank in wishes.values() if rank is not None),
        )
    if agreement.n_ranks == 1 or not agreement.all_have(_CAN):
        return False
    return True in wishes or (None in wishes and not agreement.same_value)


def choose_readers(
    channel: Channel,
    checkpoint: str,
    reader: RobustReader,
    plan: LoadPlan,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
) -> SharedReads:
    """Tell the coordinator what this rank needs, and receive what it should read.

    Args:
        checkpoint: the name in the names of phases.
        plan: this rank's plan, made with the metadata that ``reader`` has.
        process_group: the ranks that load together. This group moves bytes between devices.

    Raises:
        RobustCheckpointError: the same on all ranks.
    """
    device_type = _type_of_devices(process_group) if channel.size > 1 else None
    needed: list[SharableReads] = []

    def tell() -> ReadColumns | None:
        needed.append(reader.sharable_reads(plan, planner, lambda device: device.type == device_type))
        return _columns_of(needed[0], node_of(channel.rank)) if len(needed[0].places) else None

    def assign() -> list[ReadShare | None]:
        return assign_readers(told or [], reader.places_in_files(), across_nodes=reader.options.share_reads is None)

    told = channel.gather(f"load {checkpoint}: reads", tell, ReadColumns)
    share = channel.scatter(f"load {checkpoint}: readers", assign, ReadShare)
    mover = None
    if device_type is not None and share is not None and share.any_on_device:
        mover = GroupMover(dist.group.WORLD if process_group is None else process_group, device_type)
    return SharedReads(channel.rank, plan.items, needed[0], share, mover)


def _type_of_devices(process_group: dist.ProcessGroup | None) -> str | None:
    """The type of device between which the training group moves bytes directly: ``"cuda"`` for NCCL; ``None`` for
    gloo."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    # gloo also copies through the host, but its errors do not name ranks. The channel's own connections do that.
    direct = (device for device, backend in backends.items() if device != "cpu" and backend != "gloo")
    return next(direct, None)


def _columns_of(needed: SharableReads, node: int) -> ReadColumns:
    return ReadColumns(
        node=node,
        items=needed.items.astype("<i4").tobytes(),
        boxes=needed.boxes.astype("<u8").tobytes() if needed.boxes.any() else b"",
        nbytes=needed.nbytes.astype("<i8").tobytes(),
    )
