"""The ranks of a job that do not exist: what they hold, and what they send to a coordinator in a save.

Each holds parameters and optimizer states, each cut along its first dimension over all ranks (FSDP2), and two objects.
All cores make the messages before a coordinator is measured, and leave them in files. In a change the last rank has one
more tensor, and only that rank sends something.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import msgspec
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from robust_dcp.comm import Agreement, Channel, ExchangeStats, Offer
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.tree import Tree
from robust_dcp.items import Form, ItemKind, ItemsMessage, ItemStructure, items_of, sorted_places
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.state_dict import StructureSignature, encode_context, write_item_of

__all__ = ["COORDINATOR", "Payloads", "SimulatedOperation", "local_of", "messages_up", "prepare"]

COORDINATOR = 0
_FILES_PER_RANK = 2  # RobustWriter makes so many on each rank without options
_HIDDEN = 4096
_SHAPES = {
    "attention.qkv.weight": (3 * _HIDDEN, _HIDDEN),
    "attention.proj.weight": (_HIDDEN, _HIDDEN),
    "mlp.fc1.weight": (4 * _HIDDEN, _HIDDEN),
    "mlp.fc2.weight": (_HIDDEN, 4 * _HIDDEN),
    "input_norm.weight": (_HIDDEN,),
    "mlp_norm.weight": (_HIDDEN,),
}
_STATES = ("", "exp_avg.", "exp_avg_sq.")

NamedItem = tuple[str, ItemStructure]
M = TypeVar("M", bound=msgspec.Struct)


def _named_items(rank: int, ranks: int, n_items: int, *, added: bool) -> list[NamedItem]:
    """The items of one rank, sorted by name and offsets. ``added``: with a tensor that no other rank has."""
    items: list[NamedItem] = [
        (name, ItemStructure(ItemKind.BYTES, Form.VARIABLE)) for name in ("iteration", f"rng.{rank}")
    ]
    weights = [(f"{state}{name}", shape) for state in _STATES for name, shape in _SHAPES.items()]
    for number in range(n_items - len(items)):
        layer, place = divmod(number, len(weights))
        name, shape = weights[place]
        rows = -(-shape[0] // ranks)
        begin = min(rank * rows, shape[0])
        offsets, sizes = (begin, *(0 for _ in shape[1:])), (min(rows, shape[0] - begin), *shape[1:])
        items.append((f"layers.{layer}.{name}", _tensor(ItemKind.SHARD, shape, offsets, sizes)))
    if added:
        items.append(("added.weight", _tensor(ItemKind.TENSOR, (_HIDDEN,), (0,), (_HIDDEN,))))
    names, structures = [name for name, _ in items], [structure for _, structure in items]
    return [items[place] for place in sorted_places(names, structures)]


def _tensor(kind: ItemKind, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ItemStructure:
    return ItemStructure(kind, Form.FIXED, "float32", "strided", False, shape, offsets, sizes)


def _path_of(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def local_of(rank: int, ranks: int, n_items: int, *, added: bool = False) -> LocalStructure:
    """What a rank brings to the plan."""
    return _local_of(_named_items(rank, ranks, n_items, added=added), ranks)


def _local_of(named: Sequence[NamedItem], ranks: int) -> LocalStructure:
    names = [name for name, _ in named]
    items = items_of(names, [structure for _, structure in named], {name: _path_of(name) for name in names})
    context = encode_context({"ranks": ",".join(map(str, range(ranks))), "files_per_rank": _FILES_PER_RANK})
    signature = StructureSignature.of(items, context)
    return LocalStructure(items=items, context=context, signature=signature, files=_FILES_PER_RANK, lowest_rank=False)


# --- what travels ----------------------------------------------------------------------------------------------------


class _Loop:
    """Takes no steps: nothing here waits."""

    @staticmethod
    def run(result: Any) -> Any:
        return result

    @staticmethod
    def tell(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@dataclass(frozen=True)
class _Link:
    """The ``Link`` of a simulated ``Channel``. It says which ranks take part."""

    rank: int
    ranks: tuple[int, ...]
    loop: ClassVar[type[_Loop]] = _Loop

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tree(self, root: int) -> Tree:
        return Tree(self.rank, self.size, root)


class SimulatedOperation:
    """The ``Operation`` of a ``Channel`` on rank ``rank`` of ``n_ranks``, which sends nothing."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.link = _Link(rank, tuple(range(n_ranks)))
        self.tree = Tree(self.link.rank, self.link.size, COORDINATOR)
        self.name, self.timeout_seconds = "simulated", 300.0
        self.stragglers: list[str] = []
        self.stats = ExchangeStats()

    def stopped(self) -> None:
        """Report nothing: no rank fails here."""

    def stop_if_given_up(self) -> None:
        """Do nothing: no rank gives up."""

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Do nothing: no rank waits here."""


class _OnTheWayUp(SimulatedOperation):
    """One gather on a rank below the coordinator. Afterwards ``payload`` is what the rank sends to its parent."""

    def __init__(self, rank: int, n_ranks: int, below: Sequence[Payload]) -> None:
        super().__init__(rank, n_ranks)
        self.payload: Payload = b""
        self._below = [payload for payload in below if payload]

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Any, Payload]:
        own = work.produce()
        assert work.merge is not None
        self.payload = work.merge(own, self._below)
        return Agreement.of(self.link.rank, Offer()), own, b""


def messages_up(ranks: int, message_of: Callable[[int], M | None], message_type: type[M]) -> dict[int, Payload]:
    """What each child of the coordinator passes on in a gather: its message, merged with those of all ranks below."""

    def payload_of(rank: int) -> Payload:
        below = [payload_of(child) for child in Tree(rank, ranks, COORDINATOR).children]
        operation = _OnTheWayUp(rank, ranks, below)
        Channel(cast(Operation, operation), COORDINATOR).gather("simulated", lambda: message_of(rank), message_type)
        return operation.payload

    return {child: payload_of(child) for child in Tree(COORDINATOR, ranks, COORDINATOR).children}


@dataclass(frozen=True)
class Payloads:
    """The files of one case, in ``directory``. ``n_items`` is about the number of items of each rank."""

    directory: Path
    ranks: int
    n_items: int

    def structures(self, *, changed: bool) -> dict[int, Payload]:
        """What reaches our coordinator when the ranks send their structures."""
        found: dict[int, Payload] = pickle.loads(self._structures(changed).read_bytes())
        return found

    def _structures(self, changed: bool) -> Path:
        return self.directory / f"structures-{changed}"

    def stock_plan(self, rank: int, *, added: bool = False) -> Path:
        """The file of a rank's pickled ``SavePlan``."""
        return self.directory / f"plan-{rank}-{added}"


def prepare(payloads: Payloads, *, stock: bool) -> None:
    """Make the files. ``stock``: also the plans for stock's coordinator."""
    ranks = payloads.ranks
    tasks = [(payloads, rank, False, stock) for rank in range(ranks)] + [(payloads, ranks - 1, True, stock)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        messages = pool.starmap(_make, tasks, chunksize=max(1, min(8, len(tasks) // 4)))
    last = messages.pop()
    for changed, message_of in (
        (False, lambda rank: messages[rank]),
        (True, lambda rank: last if rank == ranks - 1 else None),
    ):
        payloads._structures(changed).write_bytes(pickle.dumps(messages_up(ranks, message_of, ItemsMessage)))


def _make(payloads: Payloads, rank: int, added: bool, stock: bool) -> ItemsMessage:
    named = _named_items(rank, payloads.ranks, payloads.n_items, added=added)
    if stock:
        # As DefaultSavePlanner.create_local_plan makes it.
        plan = SavePlan(
            [_stock_item(*each) for each in named], planner_data={name: _path_of(name) for name, _ in named}
        )
        payloads.stock_plan(rank, added=added).write_bytes(pickle.dumps(plan))
    return _local_of(named, payloads.ranks).to_message()


def _stock_item(name: str, structure: ItemStructure) -> WriteItem:
    item = write_item_of(MetadataIndex(name), structure)
    if item.tensor_data is None:
        return item
    # Stock's index and chunk share the offsets, which makes its messages smaller.
    return replace(item, index=MetadataIndex(name, item.tensor_data.chunk.offsets))
