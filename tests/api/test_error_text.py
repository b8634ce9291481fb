"""What a user reads when a save or load fails: each thing once, the user's own code and nothing of ours."""

from __future__ import annotations

import errno
import os
import re
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import robust_dcp
from robust_dcp import RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from robust_dcp.comm import patience
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import run_ranks, values

StateDict = dict[str, Any]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def state() -> StateDict:
    return {"w": torch.arange(50_000.0), f"own{rank()}": torch.full((100,), float(rank())), "text": "saved"}


class LosesItsState:
    """A user's ``Stateful``."""

    def __init__(self, ranks: tuple[int, ...], words: str = "the momentum is gone") -> None:
        self.ranks = ranks
        self.words = words

    def state_dict(self) -> StateDict:
        if rank() in self.ranks:
            return self.look_into_optimizer()
        return {"step": 1}

    def look_into_optimizer(self) -> StateDict:
        try:
            return {"step": {}["momentum"]}
        except KeyError:
            raise LookupError(self.words)  # noqa: B904 (what users write)

    def load_state_dict(self, state_dict: StateDict) -> None:
        raise AssertionError


class ChoosyPlanner(RobustPlanner):
    """A user's planner."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        if rank() == 2:
            raise ValueError("not this one")
        return super().lookup_object(index)


class FullDisk(PosixDisk):
    """The calls of the system itself fail, below our code: the quota of this process is used up."""

    def preallocate(self, file: Any, nbytes: int) -> bool:
        os.close(file.fd)
        file.fd = os.open("/dev/full", os.O_WRONLY)
        file.alignment = None
        return True

    def truncate(self, file: Any, nbytes: int) -> None:
        pass


def conflicting() -> StateDict:
    return {**state(), "w": torch.zeros(100 + rank() % 2)}


Save = Callable[..., Any]

SAVES: dict[str, Callable[[Save, str], Any]] = {
    "plan conflict": lambda save, path: save(conflicting(), path),
    "full disk": lambda save, path: save(state(), path, writer=RobustWriter(path, disk=FullDisk())),
    "stateful on one rank": lambda save, path: save({"mine": LosesItsState((1,)), **state()}, path),
    "stateful on all ranks": lambda save, path: save({"mine": LosesItsState((0, 1, 2, 3)), **state()}, path),
    "planner": lambda save, path: save(state(), path, planner=ChoosyPlanner()),
    "two differ": lambda save, path: save({"mine": LosesItsState((1,)), **state()}, path, planner=ChoosyPlanner()),
}

WITH_STATEFUL = {"stateful on one rank", "stateful on all ranks", "two differ"}

WORDS = {
    "plan conflict": "key 'w' is of different global sizes",
    "full disk": "No space left on device",
    "stateful on one rank": "LookupError: the momentum is gone",
    "stateful on all ranks": "LookupError: the momentum is gone",
    "planner": "ValueError: not this one",
    "two differ": "LookupError: the momentum is gone",
    "missing key": "Missing key in checkpoint",
    "other dtype": "is torch.float64 here",
    "no checkpoint": "no checkpoint was committed",
    "no directory": "no checkpoint was committed",
    "damaged metadata": "cannot be used",
}


def ours(state_dict: StateDict, path: str, writer: Any = None, planner: Any = None) -> Any:
    return robust_dcp.save(state_dict, storage_writer=writer or RobustWriter(path), planner=planner, timeout_seconds=20)


def stock(state_dict: StateDict, path: str, writer: Any = None, planner: Any = None, no_dist: bool = False) -> Any:
    writer, planner = writer or RobustWriter(path), planner or RobustPlanner(timeout_seconds=20)
    return dcp.save(state_dict, storage_writer=writer, planner=planner, no_dist=no_dist)


def stock_no_dist(state_dict: StateDict, path: str, **kwargs: Any) -> Any:
    return stock(state_dict, path, no_dist=True, **kwargs)


LOADS: dict[str, Callable[[Callable[..., Any], str], Any]] = {
    "missing key": lambda load, path: load({**state(), "extra": torch.zeros(1)}, path),
    "other dtype": lambda load, path: load({**state(), "w": torch.zeros(50_000, dtype=torch.float64)}, path),
    "no checkpoint": lambda load, path: load(state(), os.path.dirname(path)),
    "no directory": lambda load, path: load(state(), f"{path}/a/b"),
    "damaged metadata": lambda load, path: load(state(), f"{path}-damaged"),
}


def load_ours(state_dict: StateDict, path: str) -> Any:
    return robust_dcp.load(state_dict, checkpoint_id=path, timeout_seconds=20)


def load_stock(state_dict: StateDict, path: str, no_dist: bool = False) -> Any:
    reader, planner = RobustReader(path), RobustLoadPlanner()
    return dcp.load(state_dict, storage_reader=reader, planner=planner, no_dist=no_dist)


def load_stock_no_dist(state_dict: StateDict, path: str) -> Any:
    return load_stock(state_dict, path, no_dist=True)


WAYS: dict[str, tuple[Save, Callable[..., Any]]] = {
    "ours": (ours, load_ours),
    "stock": (stock, load_stock),
    "stock no_dist": (stock_no_dist, load_stock_no_dist),
}


def printed(call: Callable[[], Any]) -> str:
    """What Python prints of the exception, without the lines under it that point at columns."""
    try:
        call()
    except BaseException as error:
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
        return "\n".join(line for line in lines if set(line.strip()) - set("^~ "))
    return "nothing was raised"


def fail_in_every_way(directory: str, way: str) -> dict[str, str]:
    save, load = WAYS[way]
    path = f"{directory}/checkpoint"
    robust_dcp.save(state(), checkpoint_id=path)
    if rank() == 0:
        damaged = Path(f"{path}-damaged", ".metadata")
        damaged.parent.mkdir()
        damaged.write_bytes(b"\x80\x04 not a Metadata")
    if dist.is_initialized():
        dist.barrier()
    found = {}
    for case, attempt in SAVES.items():
        if way != "ours" and case in WITH_STATEFUL:
            continue  # stock calls `state_dict` before anything of ours: it raises there, and the others wait
        found[case] = printed(lambda attempt=attempt, case=case: attempt(save, f"{directory}/{case}"))
    for case, attempt in LOADS.items():
        found[case] = printed(lambda attempt=attempt: attempt(load, path))
    return found


def frames_of(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith("File ") and part in line]


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_each_thing_is_said_once_with_nothing_of_our_stack(n_ranks: int, tmp_path: Path) -> None:
    outcomes = values(run_ranks(n_ranks, fail_in_every_way, str(tmp_path), "ours"))
    for case, text in outcomes[0].items():
        if text == "nothing was raised":
            assert n_ranks == 1 and case not in LOADS
            continue
        for others in outcomes[1:]:
            assert others[case].splitlines()[-1] == text.splitlines()[-1]
        assert text.count("Traceback") == 1 and "above exception" not in text, text
        assert text.count(WORDS[case]) == 1, text
        assert len(frames_of(text, "/robust_dcp/")) == 1, text  # where the user's code calls ours
        assert frames_of(text, "/torch/") == [], text
        assert len(text.splitlines()) < 32, text


@pytest.mark.parametrize("way", ["stock", "stock no_dist"])
def test_through_stock_our_class_and_words_stay_and_are_said_once(way: str, tmp_path: Path) -> None:
    outcomes = values(run_ranks(4, fail_in_every_way, str(tmp_path), way, group_timeout_seconds=30))
    for case, text in outcomes[0].items():
        assert "nothing was raised" not in text, case
        assert "above exception" not in text, text
        assert "robust_dcp.errors." in text and WORDS[case] in text, text
        # One frame of ours in what stock says of each rank.
        assert len(frames_of(text, "/robust_dcp/")) == text.count("(RANK "), text
    planner = outcomes[0]["planner"]
    assert planner.count("in lookup_object") == 1 and planner.count("raised on rank 2") == 1


def test_the_users_own_frames_are_shown_with_what_led_to_them(tmp_path: Path) -> None:
    for found in values(run_ranks(4, fail_in_every_way, str(tmp_path), "ours")):
        text = found["stateful on one rank"]
        assert "failed on rank 1: LookupError: the momentum is gone" in text
        assert text.count("in state_dict") == text.count("raise LookupError(self.words)") == 1
        assert text.count("while handling KeyError: 'momentum'") == 1
        assert "on ranks 0-3" in found["stateful on all ranks"]
        assert found["stateful on all ranks"].count("in state_dict") == 1
        assert "in lookup_object" in found["planner"] and "raised on rank 2" in found["planner"]
        both = found["two differ"]
        assert "failed on ranks 1-2" in both and "rank 1: LookupError" in both and "rank 2: Robust" in both
        assert (
            re.search(r"/__\d_\d\.[0-9a-f]{16}\.distcp: ", found["full disk"])
            and "raised on rank" in found["full disk"]
        )
        assert errno.errorcode[errno.ENOSPC] in found["full disk"] and "free space" in found["full disk"]


def die(directory: str) -> str:
    class Deadly(RobustPlanner):
        def describe(self, *args: Any, **kwargs: Any) -> Any:
            if rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().describe(*args, **kwargs)

    robust_dcp.save(state(), checkpoint_id=f"{directory}/1")
    return printed(lambda: ours(state(), f"{directory}/2", planner=Deadly()))


def save_elsewhere(directory: str) -> str:
    patience.ELSEWHERE_SECONDS = 2.0
    return printed(lambda: ours(state(), f"{directory}/{rank()}"))


@pytest.mark.parametrize(("function", "words"), [(die, "rank 2"), (save_elsewhere, "different operations")])
def test_ranks_that_are_gone_or_elsewhere_are_told_without_our_stack(function: Any, words: str, tmp_path: Path) -> None:
    for outcome in run_ranks(3, function, str(tmp_path)):
        if outcome.exitcode == -signal.SIGKILL:
            continue
        (text,) = values([outcome])
        assert text.count("Traceback") == 1 and words in text, text
        assert len(frames_of(text, "/robust_dcp/")) == 1, text
