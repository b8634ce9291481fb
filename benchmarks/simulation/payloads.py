"""The messages that virtual ranks send before there is a plan. All cores make them before a coordinator is measured.

Owns the folder of one case. ``first`` and ``change`` are gathers of structures for our coordinator. ``stock`` has the
pickled local plans for stock's. In ``change`` only the last rank sends something, because it has one more tensor.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from benchmarks.simulation.mailbox import COORDINATOR, Mailbox
from benchmarks.virtual_ranks import NamedItem, columns_of, local_of, named_items, path_of
from robust_dcp.plan.items import ItemsMessage, ItemStructure
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.signature import SIGNATURE_NBYTES
from robust_dcp.plan.state_dict import write_item_of

__all__ = ["Payloads", "coordinators_local", "prepare"]


@dataclass(frozen=True)
class Payloads:
    """The messages of the ranks of one case. ``n_items`` counts the items of all ranks, without the added one."""

    directory: Path
    kind: str
    ranks: int
    items: int
    n_items: int

    def mailbox(self, name: str) -> Mailbox:
        """One gather. ``first`` and ``change`` are the gathers of structures."""
        return Mailbox(self.directory / name, self.ranks)

    def signatures(self, *, changed: bool) -> list[bytes]:
        """The signature of each rank. If ``changed``, the last rank has the added tensor."""
        data = (self.directory / "signatures").read_bytes()
        found = [data[at : at + SIGNATURE_NBYTES] for at in range(0, len(data), SIGNATURE_NBYTES)]
        return [*found[:-2], found[-1]] if changed else found[:-1]

    def stock_plan(self, rank: int, *, added: bool = False) -> Path:
        """The file of a rank's pickled ``SavePlan``."""
        return self.directory / "stock" / f"{rank}{'-added' if added else ''}"


def prepare(
    directory: Path, kind: str, ranks: int, items: int, *, stock: bool = True, processes: int | None = None
) -> Payloads:
    """Make the payloads of one case.

    Args:
        directory: a directory for this case alone. It is made.
        kind: one of ``KINDS``.
        ranks: the number of ranks.
        items: the approximate number of items of each rank.
        stock: whether to make the plans for stock's coordinator too.
        processes: the number of processes that make the payloads. The default is one for each core. With 1 this
            process makes them.
    """
    payloads = Payloads(directory, kind, ranks, items, n_items=0)
    (directory / "stock").mkdir(parents=True)
    for name in ("first", "change"):
        payloads.mailbox(name)
    tasks = [(payloads, rank, False, stock) for rank in range(ranks)]
    tasks.append((payloads, ranks - 1, True, stock))
    processes = processes or os.cpu_count() or 1
    if processes == 1:
        made = list(starmap(_make, tasks))
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            made = pool.starmap(_make, tasks, chunksize=max(1, min(8, len(tasks) // 4)))
    (directory / "signatures").write_bytes(b"".join(signature for signature, _ in made))
    for name in ("first", "change"):
        payloads.mailbox(name).merge(ItemsMessage)
    return Payloads(directory, kind, ranks, items, n_items=sum(n_items for _, n_items in made[:-1]))


def coordinators_local(payloads: Payloads) -> LocalStructure:
    """What rank 0 itself holds."""
    items = named_items(payloads.kind, COORDINATOR, payloads.ranks, payloads.items)
    return local_of(columns_of(items), payloads.ranks)


def _make(payloads: Payloads, rank: int, added: bool, stock: bool) -> tuple[bytes, int]:
    """The payloads of one rank; its signature, and the number of its items."""
    items = named_items(payloads.kind, rank, payloads.ranks, payloads.items, added=added)
    local = local_of(columns_of(items), payloads.ranks)
    if rank != COORDINATOR:
        payloads.mailbox("change" if added else "first").post(rank, local.to_message())
    if stock:
        payloads.stock_plan(rank, added=added).write_bytes(pickle.dumps(_stock_plan(items)))
    return local.signature.value, len(items)


def _stock_plan(items: list[NamedItem]) -> SavePlan:
    """As ``DefaultSavePlanner.create_local_plan`` makes it."""
    return SavePlan(
        items=[_stock_item(name, structure) for name, structure in items],
        planner_data={name: path_of(name) for name, _ in items},
    )


def _stock_item(name: str, structure: ItemStructure) -> WriteItem:
    item = write_item_of(MetadataIndex(name), structure)
    if item.tensor_data is None:
        return item
    # Stock's index and chunk share the offsets, which makes its messages smaller.
    return replace(item, index=MetadataIndex(name, item.tensor_data.chunk.offsets))
