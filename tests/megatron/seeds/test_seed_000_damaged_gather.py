"""Seed 000 (ms-swift #9402): a payload of ``all_gather_object`` arrives damaged while Megatron validates a save.

Stock unpickles what came, in ``determine_global_metadata``, and names neither rank nor phase. Ours asks again, and says
who sent it if it is damaged twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import determine_global_metadata

from robust_dcp.comm.connections import Connections, Moving
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.errors import ExchangeError
from tests.megatron.torch_dist import Scenarios, chosen, cut, failures_of, save

SCENARIOS = Scenarios()


def zeros(data: bytearray) -> bytearray:
    return bytearray(len(data))


def one_bit_flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 0x10
    return data


def second_half_missing(data: bytearray) -> bytearray:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    return data


_DAMAGES = (zeros, one_bit_flipped, second_half_missing)


@SCENARIOS.add
def stock_unpickles_zeros_on_the_rank_that_got_them_and_the_others_go_on(_: Path) -> None:
    """What ``all_gather_object`` receives from rank 1 on rank 0 is damaged; sizes are exchanged right."""
    original, rank = distributed_c10d.all_gather, dist.get_rank()

    def all_gather(received: list[torch.Tensor], sent: torch.Tensor, **options: Any) -> Any:
        result = original(received, sent, **options)
        if rank == 0 and sent.dtype == torch.uint8:
            received[1].zero_()
        return result

    told = pytest.raises(pickle.UnpicklingError, match=r"^invalid load key, '\\x00'\.$")
    with mock.patch.object(distributed_c10d, "all_gather", all_gather), told if rank == 0 else nullcontext():
        determine_global_metadata({"weight": cut("weight", torch.ones(2))})


@contextmanager
def _payloads_damaged(change: Callable[[bytearray], bytearray], times: int) -> Iterator[None]:
    """So many payloads that rank 0 receives from rank 1 arrive damaged."""
    start, finish, left, payloads = Connections.start, Connections.finish, list(range(times)), list[Moving]()

    def start_and_note(self: Connections, verb: Any, peer: int, tag: int, data: Any) -> Moving:
        moving = start(self, verb, peer, tag, data)
        if (
            dist.get_rank() == 0
            and verb == "recv"
            and peer == 1
            and len(data) not in (FRAME_NBYTES, len(self.greeting))
        ):
            payloads.append(moving)
        return moving

    def finish_damaged(self: Connections, moving: Moving, *args: Any) -> None:
        finish(self, moving, *args)
        if left and any(each is moving for each in payloads):
            left.pop()
            moving.tensor.copy_(torch.frombuffer(change(bytearray(moving.data)), dtype=torch.uint8))

    with mock.patch.multiple(Connections, start=start_and_note, finish=finish_damaged):
        yield


def _save_damaged(directory: Path, change: Callable[[bytearray], bytearray], times: int) -> None:
    """The key is new, so all shards are validated."""
    with _payloads_damaged(change, times):
        save({"weight": cut(f"{change.__name__} {times}", torch.full((2,), 5.0))}, directory)


@SCENARIOS.add
def ours_asks_again_for_a_payload_that_came_damaged(directory: Path) -> None:
    with chosen():
        for change in _DAMAGES:
            _save_damaged(directory / change.__name__, change, 1)
            template = {"weight": cut(f"{change.__name__} 1", torch.zeros(2))}
            loaded = dist_checkpointing.load(template, str(directory / change.__name__))
            assert loaded["weight"].tolist() == [5.0, 5.0]


@SCENARIOS.add
def ours_names_sender_and_phase_on_all_ranks_if_it_came_damaged_twice(directory: Path) -> None:
    with chosen():
        for change in _DAMAGES:
            path = directory / change.__name__
            error, _ = failures_of(lambda path=path, change=change: _save_damaged(path, change, 1000))
            assert isinstance(error, ExchangeError) and error.ranks == [1]
            assert all(words in str(error) for words in (change.__name__, "validate: shards", "CRC-32"))
            assert list(path.iterdir()) == []


test_on_two_ranks = SCENARIOS.test()
