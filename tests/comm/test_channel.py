"""Each verb of a channel, on real ranks: what arrives where, and what it costs."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from robust_dcp.comm import Channel, ExchangeStats, Offer, combined_signature, connections
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.link import make_link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError
from tests.comm.messages import Note
from tests.harness.ranks import run_ranks, values


def _random_bytes(rank: int, nbytes: int) -> bytes:
    return random.Random(rank).randbytes(nbytes)


def _all_verbs(nbytes: int, chunk_nbytes: int) -> dict[str, Any]:
    connections.PIECE_NBYTES = chunk_nbytes
    channel = Channel.for_group(timeout_seconds=50)
    rank, size = channel.rank, channel.size
    own = Note(rank, _random_bytes(rank, nbytes))
    agreement = channel.agree(
        "agree", lambda: Offer(bytes([rank]) * 16, bytes([rank]) * 16, (rank + 1) << 40, rank % 2)
    )
    gathered = channel.gather("gather", lambda: own, Note)
    sparse = channel.gather(
        "sparse", lambda: own if rank % 2 else None, Note, offer=lambda m: Offer(value=m.rank if m else 99)
    )
    sparse_values = channel.last_agreement.lowest, channel.last_agreement.highest
    silent = channel.gather("silent", lambda: None, Note)
    told = channel.broadcast("broadcast", lambda: own, Note)
    part = channel.scatter(
        "scatter", lambda: [Note(r, _random_bytes(r, nbytes)) if r != 1 else None for r in range(size)], Note
    )
    nothing = channel.scatter("nothing", lambda: [None] * size, Note)
    everything = channel.all_gather("all_gather", lambda: own, Note)
    combined = channel.combine("combine", lambda: Note(rank + 1), _sum, Note)
    channel.barrier("barrier")
    return {
        "agreement": agreement,
        "gathered": gathered,
        "sparse": sparse,
        "sparse_values": sparse_values,
        "silent": silent,
        "told": told,
        "part": part,
        "nothing": nothing,
        "everything": everything,
        "combined": combined.rank,
    }


def _sum(one: Note, other: Note) -> Note:
    return Note(one.rank + other.rank)


@pytest.mark.parametrize(
    ("world_size", "nbytes", "chunk_nbytes"), [(1, 10, 256), (2, 0, 256), (3, 3000, 1000), (5, 100_000, 4096)]
)
def test_every_verb_delivers_what_was_sent_and_to_whom(world_size: int, nbytes: int, chunk_nbytes: int) -> None:
    notes = [Note(rank, _random_bytes(rank, nbytes)) for rank in range(world_size)]
    for rank, seen in enumerate(values(run_ranks(world_size, _all_verbs, nbytes, chunk_nbytes))):
        agreement = seen["agreement"]
        assert agreement.signature == combined_signature([bytes([r]) * 16 for r in range(world_size)])
        assert (agreement.n_ranks, agreement.same_plan_id) == (world_size, world_size == 1)
        assert (agreement.lowest >> 40, agreement.highest >> 40) == (1, world_size)
        assert agreement.count(1) == world_size // 2
        assert seen["gathered"] == (notes if rank == 0 else None)
        assert seen["sparse"] == ([note if note.rank % 2 else None for note in notes] if rank == 0 else None)
        assert seen["sparse_values"] == (99 if world_size == 1 else 1, 99)
        assert seen["silent"] == ([None] * world_size if rank == 0 else None)
        assert seen["told"] == notes[0]
        assert seen["part"] == (notes[rank] if rank != 1 else None)
        assert seen["nothing"] is None
        assert seen["everything"] == notes
        assert seen["combined"] == world_size * (world_size + 1) // 2


def _verbs_to_a_coordinator(coordinator_rank: int) -> tuple[bool, Any, int, int]:
    channel = Channel.for_group(timeout_seconds=50, coordinator_rank=coordinator_rank)
    gathered = channel.gather("gather", lambda: Note(channel.rank), Note)
    told = channel.broadcast("broadcast", lambda: Note(channel.rank), Note)
    part = channel.scatter("scatter", lambda: [Note(r) for r in range(channel.size)], Note)
    assert part is not None
    return channel.is_coordinator, gathered and [note and note.rank for note in gathered], told.rank, part.rank


def test_any_rank_can_be_the_coordinator() -> None:
    assert values(run_ranks(8, _verbs_to_a_coordinator, 5)) == [
        (rank == 5, list(range(8)) if rank == 5 else None, 5, rank) for rank in range(8)
    ]


def _cost_of_verbs() -> list[ExchangeStats]:
    channel = Channel.for_group(timeout_seconds=50)
    channel.barrier("connect")
    costs = []
    for nbytes in (10, 100_000):
        with channel.recording() as stats:
            note = partial(Note, 0, _random_bytes(0, nbytes))
            channel.agree("agree", partial(Offer, value=nbytes))
            channel.gather("gather", note, Note)
            channel.gather("silent", lambda: None, Note)
            channel.broadcast("broadcast", note, Note)
        costs.append(stats)
    assert channel.stats.exchanges == 9
    return costs


def test_an_exchange_without_payload_is_one_frame_up_and_one_down() -> None:
    for rank, (small, large) in enumerate(values(run_ranks(4, _cost_of_verbs))):
        neighbours = len(Tree(rank, 4).neighbours)
        for phase in ("agree", "silent"):
            for stats in (small, large):
                cost = stats.phases[phase]
                assert (cost.exchanges, cost.repeats) == (1, 0)
                assert cost.header_nbytes_sent == neighbours * FRAME_NBYTES
                assert cost.payload_nbytes_sent == cost.payload_nbytes_received == 0
                assert cost.messages_sent == cost.messages_received == neighbours


def test_a_payload_adds_its_own_bytes_and_equal_columns_go_once() -> None:
    costs = values(run_ranks(4, _cost_of_verbs))
    for rank, (small, large) in enumerate(costs):
        for phase in ("gather", "broadcast"):
            assert small.phases[phase].header_nbytes_sent == large.phases[phase].header_nbytes_sent
            assert small.phases[phase].messages_sent == large.phases[phase].messages_sent
        sent = large.phases["gather"].payload_nbytes_sent
        received = large.phases["gather"].payload_nbytes_received
        # Ranks 1 and 2 send to 0, 3 to 2: what 2 and 3 hold is equal, so 2 sends it once.
        assert (sent == 0) == (rank == 0)
        assert rank == 0 or 100_000 < sent < 100_100
        assert received // 100_000 == {0: 2, 1: 0, 2: 1, 3: 0}[rank]
        assert (large.phases["broadcast"].payload_nbytes_received > 100_000) == (rank != 0)
        assert large.exchanges == 4  # each verb is one


def _repeated_views() -> bool:
    first = Channel.for_group(timeout_seconds=50)
    second = Channel.for_group(timeout_seconds=5, coordinator_rank=1, operation="another")
    first.barrier("a")
    before = first._link._connections
    second.barrier("b")
    first.barrier("c")
    assert (first.timeout_seconds, second.timeout_seconds) == (50, 5)
    return first._link is second._link and first._link._connections is before


def test_all_operations_of_a_group_share_its_connections() -> None:
    assert values(run_ranks(2, _repeated_views)) == [True, True]


def _in_sub_groups() -> tuple[Any, ...]:
    world_rank = dist.get_rank()
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    if world_rank in (0, 2):
        # The other two never know about this group's exchanges, and are in a collective of their own meanwhile.
        channel = Channel.for_group(groups[1], timeout_seconds=50)
        total = [channel.agree(f"sub {i}", lambda: Offer(value=world_rank + 1)) for i in range(3)]
        seen = [total[-1].lowest, total[-1].highest]
    else:
        channel = Channel.for_group(groups[0], timeout_seconds=50)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=groups[0])
        told = channel.broadcast("from group rank 0", lambda: Note(world_rank), Note)
        seen = [told.rank, int(tensor)]
        with pytest.raises(ValueError, match="not a member"):
            Channel.for_group(groups[1])
    dist.barrier()
    return channel.rank, channel.size, channel.ranks, seen


def test_a_sub_group_exchanges_while_other_ranks_do_something_else() -> None:
    ranks_of_13 = values(run_ranks(2, _group_order_of_new_group))[0]
    outcomes = values(run_ranks(4, _in_sub_groups))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome[1:] == (2, (0, 2), [1, 3])
    for outcome in (outcomes[1], outcomes[3]):
        assert outcome[2] == ((1, 3) if ranks_of_13 == [0, 1] else (3, 1))
        assert outcome[3] == [outcome[2][0], 2]


def _group_order_of_new_group() -> list[int]:
    return dist.get_process_group_ranks(dist.new_group([1, 0]))


def _from_two_threads() -> list[list[int]]:
    results: dict[str, list[int]] = {}

    def work(purpose: str) -> None:
        channel = Channel.for_group(operation=purpose, timeout_seconds=50)
        notes: list[Note] = []
        for i in range(20):
            notes = channel.all_gather(f"{purpose} {i}", lambda: Note(channel.rank, purpose.encode()), Note)
            assert [note.data for note in notes] == [purpose.encode()] * channel.size
        results[purpose] = [note.rank for note in notes]

    threads = [threading.Thread(target=work, args=(purpose,)) for purpose in ("save", "load")]
    for thread in threads:
        thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    for thread in threads:
        thread.join()
    return [results["save"], results["load"]]


def test_two_threads_exchange_on_channels_of_their_own_while_training_goes_on() -> None:
    assert values(run_ranks(3, _from_two_threads)) == [[[0, 1, 2], [0, 1, 2]]] * 3


def _exchange_after_reinitialising() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = [Channel.for_group(timeout_seconds=50).agree("first", Offer).n_ranks]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    seen.append(Channel.for_group().size)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    seen.append(Channel.for_group(timeout_seconds=50).agree("second", Offer).n_ranks)
    return seen


def test_a_channel_works_again_after_the_group_was_destroyed_and_made_again() -> None:
    assert values(run_ranks(2, _exchange_after_reinitialising)) == [[2, 1, 2], [2, 1, 2]]


def _exchange_in_two_lives() -> list[int]:
    # As if the group had been made again under its name in a store that remembers the first one.
    store, group = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(dist.group.WORLD)
    links = [make_link(store, "a name", dist.get_rank(), tuple(group)) for _ in range(2)]
    lives = [Channel(Operation(link, "x", 50), 0) for link in links]
    return [channel.agree("plan", Offer).n_ranks for channel in lives]


def test_a_store_that_remembers_an_earlier_group_of_that_name_does_not_confuse() -> None:
    assert values(run_ranks(2, _exchange_in_two_lives)) == [[2, 2], [2, 2]]


def _without_dist() -> tuple[bool, int, Any, Any]:
    channel = Channel.for_group()
    return (
        dist.is_initialized(),
        channel.size,
        channel.gather("gather", lambda: Note(1), Note),
        channel.scatter("scatter", lambda: [Note(2)], Note),
    )


def test_without_torch_distributed_a_channel_is_alone() -> None:
    assert values(run_ranks(2, _without_dist, init=False)) == [(False, 1, [Note(1)], Note(2))] * 2


def _no_dist() -> list[int]:
    channel = Channel.for_group(no_dist=True)
    return [channel.size if dist.get_rank() == 0 else 1]


def test_no_dist_talks_to_nobody() -> None:
    assert values(run_ranks(2, _no_dist)) == [[1], [1]]


def test_alone_every_verb_hands_back_its_own_message_without_copying_it() -> None:
    channel = Channel.for_group(no_dist=True)
    note = Note(7, b"own")
    gathered = channel.gather("gather", lambda: note, Note)
    assert gathered is not None
    assert gathered[0] is note
    assert channel.broadcast("broadcast", lambda: note, Note) is note
    assert channel.scatter("scatter", lambda: [note], Note) is note
    assert channel.all_gather("all_gather", lambda: note, Note)[0] is note
    assert channel.agree("agree", lambda: Offer(value=3)).highest == 3


def test_alone_a_failure_has_the_form_that_it_has_among_others() -> None:
    channel = Channel.for_group(no_dist=True)

    def fail() -> None:
        raise KeyError("weight")

    with pytest.raises(RobustCheckpointError, match="'write' failed on rank 0: KeyError") as caught:
        channel.barrier("write", fail)
    assert isinstance(caught.value.__cause__, KeyError)
    channel.barrier("next")


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
