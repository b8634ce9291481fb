"""Each verb of a channel, on real connections: what arrives where, and what it costs."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from operator import sub
from typing import Any

import pytest
from msgspec.structs import astuple

from robust_dcp.comm import Channel, ExchangeStats, Offer, connections
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError
from tests.comm.messages import Note, combined_signature
from tests.harness.network import GlooNetwork, SimulatedNetwork, run_channels


def _all_verbs(channel: Channel, nbytes: int) -> dict[str, Any]:
    rank, size = channel.rank, channel.size
    own = Note(rank, random.Random(rank).randbytes(nbytes))
    _, agreement = channel.agree(
        "agree", lambda: Offer(bytes([rank]) * 16, bytes([rank]) * 16, (rank + 1) << 40, rank % 2)
    )
    made, gathered = channel.gather("gather", lambda: own, Note)
    _, sparse = channel.gather(
        "sparse", lambda: own if rank % 2 else None, Note, offer=lambda m: Offer(value=m.rank if m else 99)
    )
    sparse_values = channel.last_agreement.lowest, channel.last_agreement.highest
    seven, silent = channel.gather("silent", lambda: 7, Note, message=lambda number: None)
    told = channel.led_by(size // 3).broadcast("broadcast", lambda: own, Note)
    everybody, part = channel.scatter(
        "scatter",
        lambda: range(size),
        Note,
        messages=lambda ranks: [Note(r, random.Random(r).randbytes(nbytes)) if r != 1 else None for r in ranks],
    )
    _, nothing = channel.scatter("nothing", lambda: [None] * size, Note)
    everything = channel.all_gather("all_gather", lambda: own, Note)
    channel.barrier("barrier")
    return {
        "made": (made == own, seven, everybody),
        "agreement": agreement,
        "gathered": gathered,
        "sparse": sparse,
        "sparse_values": sparse_values,
        "silent": silent,
        "told": told,
        "part": part,
        "nothing": nothing,
        "everything": everything,
    }


@pytest.mark.parametrize(
    ("world_size", "nbytes", "piece_nbytes"), [(1, 10, 256), (2, 0, 256), (5, 100_000, 4096), (100, 50, 4096)]
)
def test_every_verb_delivers_what_was_sent_and_to_whom(
    world_size: int, nbytes: int, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PIECE_NBYTES", piece_nbytes)
    network = GlooNetwork(world_size)
    seen_by_ranks = run_channels(network, lambda channel: _all_verbs(channel, nbytes), timeout_seconds=120)
    notes = [Note(rank, random.Random(rank).randbytes(nbytes)) for rank in range(world_size)]
    for rank, seen in enumerate(seen_by_ranks):
        agreement = seen["agreement"]
        assert agreement.signature == combined_signature([bytes([r]) * 16 for r in range(world_size)])
        assert (agreement.n_ranks, agreement.is_same) == (world_size, world_size == 1)
        assert (agreement.lowest >> 40, agreement.highest >> 40) == (1, world_size)
        assert agreement.count(1) == world_size // 2
        assert seen["made"] == (True, 7, range(world_size) if rank == 0 else None)
        assert seen["gathered"] == (notes if rank == 0 else None)
        assert seen["sparse"] == ([note if note.rank % 2 else None for note in notes] if rank == 0 else None)
        assert seen["sparse_values"] == (99 if world_size == 1 else 1, 99)
        assert seen["silent"] == ([None] * world_size if rank == 0 else None)
        assert seen["told"] == notes[world_size // 3]
        assert seen["part"] == (notes[rank] if rank != 1 else None)
        assert seen["nothing"] is None
        assert seen["everything"] == notes


def _cost_of_verbs(channel: Channel) -> dict[tuple[str, int], ExchangeStats]:
    channel.barrier("connect")
    costs = {}
    for nbytes in (10, 100_000):
        note = partial(Note, 0, random.Random(0).randbytes(nbytes))
        verbs: dict[str, Callable[[], object]] = {
            "agree": lambda: channel.agree("agree", partial(Offer, value=nbytes)),  # noqa: B023
            "gather": lambda: channel.gather("gather", note, Note),  # noqa: B023
            "silent": lambda: channel.gather("silent", lambda: None, Note),
            "broadcast": lambda: channel.broadcast("broadcast", note, Note),  # noqa: B023
        }
        for name, verb in verbs.items():
            before = astuple(channel.stats)
            verb()
            costs[name, nbytes] = ExchangeStats(*map(sub, astuple(channel.stats), before))
    assert channel.stats.exchanges == 9
    return costs


def test_an_exchange_costs_one_frame_up_and_one_down_and_its_own_bytes_and_equal_columns_go_once() -> None:
    for rank, costs in enumerate(run_channels(SimulatedNetwork(4), _cost_of_verbs)):
        neighbours = len(Tree(rank, 4).neighbours)
        for (name, _), cost in costs.items():
            assert (cost.exchanges, cost.header_nbytes_sent) == (1, neighbours * FRAME_NBYTES)
            if name in ("agree", "silent"):
                assert (cost.payload_nbytes_sent, cost.messages_sent) == (0, neighbours)
        # Ranks 1 and 2 send to 0, 3 to 2: what 2 and 3 hold is equal, so 2 sends it once.
        sent = costs["gather", 100_000].payload_nbytes_sent
        assert sent == 0 if rank == 0 else 100_000 < sent < 100_100
        assert costs["broadcast", 100_000].payload_nbytes_sent // 100_000 == {0: 2, 1: 0, 2: 1, 3: 0}[rank]


def test_what_was_sent_and_has_arrived_is_not_held_after_the_exchange() -> None:
    held: list[int] = []

    def look() -> None:
        until = time.monotonic() + 60  # a thread may be about to let go of what it has sent
        while not held or (held[-1] > 1 << 20 and time.monotonic() < until):
            time.sleep(0.05)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    all_have_ended = threading.Barrier(4, action=look)

    def pass_on(channel: Channel) -> None:
        def note() -> Note:
            return Note(channel.rank, random.Random(channel.rank).randbytes(2 << 20))

        channel.gather("gather", note, Note)
        channel.scatter("scatter", lambda: [note()] * channel.size, Note)
        all_have_ended.wait(120)

    tracemalloc.start()
    try:
        run_channels(GlooNetwork(4), pass_on, timeout_seconds=120)
    finally:
        tracemalloc.stop()
    assert held[-1] <= 1 << 20


def test_an_exchange_within_the_work_of_another_is_refused_instead_of_blocking() -> None:
    channel = Channel.for_group(no_dist=True)
    with pytest.raises(RobustCheckpointError, match="within the work of another exchange"):
        channel.barrier("outer", lambda: channel.barrier("inner"))
    channel.barrier("next")


@pytest.mark.parametrize(
    "arguments", [{"timeout_seconds": 0}, {"timeout_seconds": float("inf")}, {"coordinator_rank": 1}]
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Channel.for_group(no_dist=True, **arguments)
