"""``on_commit`` on some ranks only is refused before anything is written, and the next save works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from tests.harness.ranks import in_ranks, values


def _give_it_on(rank: int, directory: str, call: str) -> tuple[str, list[int] | None, list[str]]:
    state = {f"w{dist.get_rank()}": torch.ones(5)}
    names: list[str] = []
    given = (lambda: names.append("committed")) if dist.get_rank() == rank else None
    save: Callable[..., Any] = getattr(robust_dcp, call)
    with pytest.raises(robust_dcp.ExchangeError) as caught:
        save(state, checkpoint_id=f"{directory}/1", on_commit=given)
    robust_dcp.save(state, checkpoint_id=f"{directory}/2", on_commit=lambda: names.append("committed"))
    return caught.value.message, caught.value.ranks, names


@pytest.mark.parametrize(("call", "rank"), [("save", 0), ("save", 2), ("async_save", 0)])
def test_on_commit_on_one_rank_only_is_refused_with_the_ranks(tmp_path: Path, call: str, rank: int) -> None:
    other = 1 if rank == 0 else 0
    outcomes = values(in_ranks(3, _give_it_on, rank, str(tmp_path), call))
    for message, ranks, _ in outcomes:
        assert f"on_commit was given on rank {rank}, and not on rank {other}: give it on all ranks" in message
        assert ranks == sorted((rank, other))
    assert [names for _, _, names in outcomes] == [["committed"], [], []]
    assert not (tmp_path / "1" / ".metadata").exists()
