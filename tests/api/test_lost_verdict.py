"""A rank that never hears that all have written leaves its part as it is, and the coordinator commits nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import Channel, ExchangeTimeout
from robust_dcp.comm.operation import Operation
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, values


def _state(value: float) -> dict[str, Any]:
    return {f"w{rank}": torch.full((5,), value) for rank in range(2) if rank == dist.get_rank()}


def _lose_the_verdict(directory: str) -> tuple[Verdict, str]:
    robust_dcp.save(_state(1.0), checkpoint_id=directory)
    gather = Channel.gather

    def gather_and_lose(self: Channel, phase: str, *args: Any, **kwargs: Any) -> Any:
        gathered = gather(self, phase, *args, **kwargs)
        if phase.endswith("write") and dist.get_rank() == 1:
            raise ExchangeTimeout("connection lost", phase=phase, missing_ranks=[0])
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "gather", gather_and_lose)
        patch.setattr(Operation, "leave", lambda self, error: None)  # nobody is told: the connection is lost
        verdict = verdict_of(robust_dcp.save, _state(2.0), checkpoint_id=directory, timeout_seconds=3)
    dist.barrier()
    loaded = {"w0": torch.zeros(5), "w1": torch.zeros(5)}
    dcp.load(loaded, checkpoint_id=directory)
    again = robust_dcp.save(_state(3.0), checkpoint_id=directory).plan
    assert loaded["w0"].tolist() == loaded["w1"].tolist() == [1.0] * 5
    return verdict, again


def test_when_a_rank_loses_the_others_nothing_is_committed_and_the_old_checkpoint_is_whole(tmp_path: Path) -> None:
    for verdict, again in values(in_ranks(2, _lose_the_verdict, str(tmp_path))):
        assert verdict.type_name == "ExchangeTimeout"
        assert again in {"built", "rebuilt"}
