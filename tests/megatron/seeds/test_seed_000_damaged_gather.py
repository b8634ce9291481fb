"""Seed 000 (ms-swift #9402): a payload of ``all_gather_object`` arrives damaged while Megatron validates a save.

Stock unpickles what came, in ``determine_global_metadata``, and names neither rank nor phase. Ours asks again, and says
who sent it if it is damaged twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import determine_global_metadata

from demo import megatron_cpu
from robust_dcp.errors import ExchangeError
from tests.comm.faults import Damage, one_bit_flipped, second_half_missing, zeros
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen, cut, failures_of, save

_DAMAGES = (zeros, one_bit_flipped, second_half_missing)


@contextmanager
def _slot_of_rank_1_damaged(change: Callable[[bytearray], bytearray]) -> Iterator[None]:
    """What ``all_gather_object`` receives from rank 1 on rank 0 is damaged; sizes are exchanged right."""
    original = distributed_c10d.all_gather

    def all_gather(received: list[torch.Tensor], sent: torch.Tensor, **options: Any) -> Any:
        result = original(received, sent, **options)
        if dist.get_rank() == 0 and sent.dtype == torch.uint8:
            damaged = change(bytearray(received[1].numpy().tobytes()))
            received[1].copy_(torch.frombuffer(damaged, dtype=torch.uint8))
        return result

    distributed_c10d.all_gather = all_gather
    try:
        yield
    finally:
        distributed_c10d.all_gather = original


def _stock(change: Callable[[bytearray], bytearray]) -> str:
    """What stock's validation of a save makes of it on this rank."""
    with _slot_of_rank_1_damaged(change):
        try:
            determine_global_metadata({"weight": cut("weight", torch.ones(2))})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def _run(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    found: dict[str, Any] = {"stock": [_stock(change) for change in _DAMAGES], "once": [], "twice": []}
    damage = Damage(1 if dist.get_rank() == 0 else -1, range(0), frames=False)

    def save_damaged(name: str, change: Callable[[bytearray], bytearray], times: int) -> None:
        damage.which, damage.change, damage.arrivals = range(times), change, 0
        save({name: cut(name, torch.full((2,), 5.0))}, directory / name)

    with chosen():
        for change in _DAMAGES:
            name = f"{change.__name__}_once"
            save_damaged(name, change, 1)
            loaded = dist_checkpointing.load({name: cut(name, torch.zeros(2))}, str(directory / name))
            found["once"].append(loaded[name].tolist())
            name = f"{change.__name__}_twice"
            error, _ = failures_of(lambda name=name, change=change: save_damaged(name, change, 1000))
            found["twice"].append(
                (isinstance(error, ExchangeError), getattr(error, "ranks", None), name in str(error), str(error))
            )
            found["left"] = [path.name for path in (directory / name).iterdir()]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(2, _run, tmp_path_factory.mktemp("seed_000"), timeout_seconds=100))


def test_stock_unpickles_zeros_on_the_rank_that_got_them_and_the_others_go_on(found: list[dict[str, Any]]) -> None:
    assert found[0]["stock"][0] == r"UnpicklingError: invalid load key, '\x00'."
    assert found[1]["stock"] == ["no error"] * 3


def test_ours_asks_again_for_a_payload_that_came_damaged(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["once"] == [[5.0, 5.0]] * 3


def test_ours_names_sender_and_phase_on_all_ranks_if_it_came_damaged_twice(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for is_exchange_error, ranks, names_checkpoint, message in rank["twice"]:
            assert is_exchange_error
            assert ranks == [1]
            assert names_checkpoint
            assert "validate: shards" in message
            assert "CRC-32" in message
        assert rank["left"] == []
