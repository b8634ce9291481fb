"""Megatron: what a load would refuse is told by the save, in ``common.pt`` and in ShardedObjects, in one warning."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from demo import megatron_cpu
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen, replicated, save


class Own:
    """Not data: it could have any code."""


def state_dict() -> dict[str, Any]:
    return {
        "weight": replicated("weight", torch.ones(4)),
        "extra": ShardedObject("extra", Own(), (1,), (0,), replica_id=dist.get_rank()),
        "args": {"deep": {"own": Own()}, "lr": 0.1},
    }


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "refuses" in record.getMessage():
            self.messages.append(record.getMessage())


def save_with_warnings(directory: str, mode: str) -> tuple[Verdict, list[str], list[str]]:
    megatron_cpu.install()
    handler = Warnings()
    logging.getLogger("robust_dcp").addHandler(handler)
    with chosen(on_unloadable_object=mode):
        verdict = verdict_of(save, state_dict(), Path(directory))
    dist.barrier()
    return verdict, handler.messages, sorted(os.listdir(directory))


def save_and_load_trusted(directory: str) -> list[str]:
    save_with_warnings(directory, "ignore")
    with chosen():
        refused = verdict_of(dist_checkpointing.load, state_dict(), directory)
    with chosen(trusted="1"):
        loaded = dist_checkpointing.load(state_dict(), directory)
    return [refused.type_name, type(loaded["extra"]).__name__, type(loaded["args"]["deep"]["own"]).__name__]


def test_one_warning_names_common_state_and_objects(tmp_path: Path) -> None:
    (verdict, messages, _), (_, others, _) = values(run_ranks(2, save_with_warnings, str(tmp_path / "c"), "warn"))
    assert verdict.type_name == "" and others == []
    (message,) = messages
    assert "extra/shard_0_1" in message and "Own" in message
    assert "args.deep.own" in message or "common_state" in message  # common.pt, or a ShardedObject (0.19)


def test_as_an_error_nothing_is_left(tmp_path: Path) -> None:
    (one, _, left), (other, _, _) = values(run_ranks(2, save_with_warnings, str(tmp_path / "c"), "error"))
    assert (one.type_name, one.message) == (other.type_name, other.message)
    assert one.type_name == "UnsafeCheckpoint" and left == []


def test_trusted_objects_are_loaded(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_and_load_trusted, str(tmp_path / "c"))) == [["UnsafeCheckpoint", "Own", "Own"]] * 2
