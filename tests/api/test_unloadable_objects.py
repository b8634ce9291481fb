"""What a load would refuse is told by the save that writes it: once for all ranks, or as the same error on all."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, values


class Own:
    """Not data: it could have any code."""


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def state_dict(rank: int) -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        f"own {rank}": Own(),
        f"again {rank}": Own(),
        "common": Own(),
        "plain": (1, "a"),
    }


def save_with_warnings(directory: str, how: str, mode: str) -> list[list[str]]:
    """The warnings of two saves."""
    found = []
    for step in range(2):
        handler = Warnings()
        logging.getLogger("robust_dcp").addHandler(handler)
        planner = RobustPlanner(on_unloadable_object=mode, on_structure_change="quiet", on_replica_mismatch="ignore")  # type: ignore[arg-type]
        path = f"{directory}/{step}"
        if how == "ours":
            robust_dcp.save(state_dict(dist.get_rank()), checkpoint_id=path, planner=planner)
        else:
            dcp.save(state_dict(dist.get_rank()), storage_writer=RobustWriter(path), planner=planner)
        logging.getLogger("robust_dcp").removeHandler(handler)
        found.append([message for message in handler.messages if "refuses" in message])
    return found


@pytest.mark.parametrize("how", ["ours", "stock"])
def test_one_warning_a_save_names_key_class_rank_and_what_to_do(how: str, tmp_path: Path) -> None:
    first, second = values(in_ranks(2, save_with_warnings, str(tmp_path), how, "warn"))
    assert second == [[], []]
    for messages in first:  # the plan of the second save is reused
        (message,) = messages
        for word in ("5 object(s)", "'own 0'", "'own 1'", "'again 1'", "'common'", "Own", "rank 1", "add_safe_globals"):
            assert word in message
        assert "'plain'" not in message and message.count("'common'") == 1


def test_nothing_is_said_if_that_is_asked_for(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_with_warnings, str(tmp_path), "ours", "ignore")) == [[[], []]] * 2


def refuse_to_save(directory: str) -> tuple[Verdict | None, list[str]]:
    mine = {"w": torch.ones(3), "own": Own()} if dist.get_rank() == 1 else {"w": torch.ones(3)}
    planner = RobustPlanner(on_unloadable_object="error")
    verdict = verdict_of(lambda: robust_dcp.save(mine, checkpoint_id=directory, planner=planner))
    dist.barrier()
    return verdict, sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def test_as_an_error_it_is_the_same_on_all_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    (one, left), (other, _) = values(in_ranks(2, refuse_to_save, str(tmp_path / "c")))
    assert one == other and one is not None and left == []
    assert "UnsafeCheckpoint" in str(one) and "'own'" in str(one) and "Own" in str(one)


def test_the_report_says_what_cannot_be_loaded_and_a_registered_class_can(tmp_path: Path) -> None:
    report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert report.unloadable_objects.keys() == {"own"}
    with torch.serialization.safe_globals([Own]):
        report = robust_dcp.save({"own": Own()}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert report.unloadable_objects == {}


def test_a_mode_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="on_unloadable_object"):
        RobustPlanner(on_unloadable_object="maybe")  # type: ignore[arg-type]
