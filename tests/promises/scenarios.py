"""What users do with checkpoints, each with what may be there when it is cut off: for the matrices of faults.

A scenario works in one directory. ``prepare`` makes what is there before, ``act`` is what is cut off, ``found`` says
which generation is there by all readers, and ``again`` does it once more, and has to make the generation 9.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import robust_dcp
from robust_dcp import CheckpointManager, CopyOptions, CorruptCheckpoint, RobustWriter, StorageError
from tests.cli.commands import shell
from tests.faults.disk import CHANGES, FaultDisk
from tests.harness.fingerprints import differences

__all__ = ["SAVES", "SCENARIOS", "Scenario", "content", "generation", "save", "state", "where"]


def state(value: int, *, more: bool = False) -> dict[str, Any]:
    """A state dict of which every value tells its generation: large and small tensors, a view, an object."""
    made = {
        "w": torch.arange(3000.0) + value,
        "nested": {"b": (torch.arange(40.0) + value).reshape(5, 8).t(), "i": torch.full((7, 3), value)},
        "step": value,
        "words": f"generation {value}",
    }
    return {**made, "more": torch.full((11,), float(value))} if more else made


def save(path: str, value: int, *, layout: str = "torch", more: bool = False, **options: Any) -> None:
    writer = RobustWriter(path, layout=layout)
    robust_dcp.save(state(value, more=more), storage_writer=writer, no_dist=True, **options)


def content(path: str | Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(Path(path).rglob("*")) if each.is_file()}


def generation(path: str) -> int | None:
    """Which generation both readers find, whole; ``None`` if there is no checkpoint, and a load says so."""
    if not os.path.exists(os.path.join(path, ".metadata")):
        with pytest.raises((StorageError, CorruptCheckpoint)):
            robust_dcp.load(state(-1), checkpoint_id=path, no_dist=True)
        return None
    metadata = FileSystemReader(path).read_metadata()
    more = "more" in metadata.state_dict_metadata
    ours = state(-1, more=more)
    robust_dcp.load(ours, checkpoint_id=path, no_dist=True)
    value = int(ours["step"])
    assert is_generation(ours, value), f"robust_dcp loads a mixture: {ours}"
    suffixes = {os.path.splitext(os.fspath(info.relative_path))[1] for info in metadata.storage_data.values()}
    if suffixes == {".distcp"}:
        theirs = state(-1, more=more)
        dcp.load(theirs, storage_reader=FileSystemReader(path), no_dist=True)
        assert is_generation(theirs, value), f"stock loads something else than robust_dcp, generation {value}: {theirs}"
    return value


def is_generation(found: dict[str, Any], value: int) -> bool:
    return differences(state(value, more="more" in found), found) == []


@contextlib.contextmanager
def where(what: str) -> Iterator[None]:
    """Say where it was that a promise was broken."""
    try:
        yield
    except BaseException as error:  # the CheckpointException of torch is no Exception
        raise AssertionError(f"{what}: {error!r}") from error


@dataclass(frozen=True)
class Scenario:
    """See the module.

    Attributes:
        name: for the id of a test.
        prepare: makes what is there before.
        act: is cut off.
        found: the generation that is there.
        again: makes generation 9.
        may_leave: what ``found`` may say afterwards: first what was there before, then what ``act`` makes.
        untouched: whether ``c`` below the directory is the source, of generation 1, which nothing may change.
        counted: the calls at which faults strike.
    """

    name: str
    prepare: Callable[[str], object]
    act: Callable[[str], object]
    found: Callable[[str], int | None]
    again: Callable[[str], object]
    may_leave: tuple[int | None, ...]
    untouched: bool = False
    counted: Collection[str] = CHANGES

    def __str__(self) -> str:
        return self.name

    def check(self, directory: str) -> int | None:
        """That one whole generation is there, and that nothing else was lost; which one."""
        if self.untouched:
            assert generation(f"{directory}/c") == 1, "the source was changed"
        value = self.found(directory)
        assert value in self.may_leave, f"generation {value} is there, and not one of {self.may_leave}"
        return value

    def check_next(self, directory: str, *, is_tidy: bool = True) -> None:
        """That it works the next time, and that nothing is left of the time before."""
        self.again(directory)
        assert self.found(directory) == 9
        if not is_tidy:
            return
        # A killed conversion leaves a directory that tells by its name what it is (docs/cli.md).
        left = [each.name for each in Path(directory).rglob("*") if ".converting-" not in str(each)]
        unfinished = (".robust_dcp.saving", "common.pt.", "integrity.json.", "metadata.json.")
        rest = [name for name in left if name.endswith((".tmp", ".lock")) or name.startswith(unfinished)]
        # What a manager notes is some bytes, and stays if it is killed just then.
        rest = [name for name in rest if not name.startswith(("latest.", ".robust_dcp.step.json."))]
        for each in Path(_checkpoint(directory)).glob("__*.distcp"):
            metadata: Any = FileSystemReader(each.parent).read_metadata()
            rest += [each.name] * all(info.relative_path != each.name for info in metadata.storage_data.values())
        assert rest == [], f"the next one has to tidy up: {rest}"


def _checkpoint(directory: str) -> str:
    return f"{directory}/c"


def _of_save(name: str, *, before: dict[str, Any] | None = None, now: dict[str, Any] | None = None) -> Scenario:
    now = now or {}

    def prepare(directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        if before is not None:
            save(_checkpoint(directory), 1, **before)

    def again(directory: str) -> None:
        # A checkpoint in safetensors does not replace another.
        is_free = not os.path.exists(f"{_checkpoint(directory)}/.metadata")
        save(_checkpoint(directory), 9, **(now if is_free else {}))

    return Scenario(
        name,
        prepare,
        lambda directory: save(_checkpoint(directory), 2, **now),
        lambda directory: generation(_checkpoint(directory)),
        again,
        (None if before is None else 1, 2),
    )


def _save_beside(directory: str) -> None:
    robust_dcp.async_save(state(2), checkpoint_id=_checkpoint(directory), no_dist=True).result()


def _prepare_untidy(directory: str) -> None:
    """What is there could not remove what it has replaced."""
    save(_checkpoint(directory), 0)
    with FaultDisk(directory, on={"unlink:*.distcp": OSError(errno.EACCES, "")}):
        save(_checkpoint(directory), 1)


_OVERWRITE = _of_save("overwrite", before={})

SAVES = (
    _of_save("save"),
    _OVERWRITE,
    _of_save("overwrite-changed", before={"more": True}),
    _of_save("safetensors", now={"layout": "safetensors"}),
    _of_save("other-layout", before={"layout": "safetensors"}),
    replace(_OVERWRITE, name="async", act=_save_beside),
    replace(_OVERWRITE, name="untidy", prepare=_prepare_untidy),
)


_LOAD = Scenario(
    "load",
    _OVERWRITE.prepare,
    lambda directory: robust_dcp.load(state(-1), checkpoint_id=_checkpoint(directory), no_dist=True),
    lambda directory: generation(_checkpoint(directory)),
    lambda directory: save(_checkpoint(directory), 9),
    (1,),
    counted={"open", "read", "lock"},
)


def _manager(directory: str) -> CheckpointManager:
    return CheckpointManager(f"{directory}/root", keep_last=2)


def _save_steps(directory: str, *steps: int) -> None:
    manager = _manager(directory)
    for step in steps:
        manager.save(step, state(step), no_dist=True)


def _latest(directory: str) -> int | None:
    """The latest; and whatever is listed loads as the step that it says."""
    manager = _manager(directory)
    for each in manager.checkpoints():
        assert generation(each.path) == each.step
    latest = manager.latest()
    return None if latest is None else latest.step


_MANAGER = Scenario(
    "manager",
    lambda directory: _save_steps(directory, 1, 2),
    lambda directory: _save_steps(directory, 3),
    _latest,
    lambda directory: _save_steps(directory, 3, 9),  # a step that was cut off is saved anew
    (2, 3),
)


_AT_ONCE = CopyOptions(retries=0)


def _copy(directory: str) -> None:
    robust_dcp.copy_checkpoint(_checkpoint(directory), f"{directory}/copy", options=_AT_ONCE)


def _copy_the_next(directory: str) -> None:
    """Half a copy whose source was saved over is replaced. A whole one is not, and has to be removed first."""
    save(_checkpoint(directory), 9)
    if generation(f"{directory}/copy") is not None:
        with pytest.raises(StorageError, match="there is another checkpoint at"):
            _copy(directory)
        shutil.rmtree(f"{directory}/copy")
    _copy(directory)
    names = [each.name for each in Path(directory, "copy").rglob("*.copying")]
    assert names == [], f"killed copies have left {names}"


_COPY = Scenario(
    "copy",
    _OVERWRITE.prepare,
    _copy,
    lambda directory: generation(f"{directory}/copy"),
    _copy_the_next,
    (None, 1),
    untouched=True,
)


def _of_convert(form: str) -> Scenario:
    def target(directory: str) -> str:
        return f"{directory}/target"

    def convert(directory: str, source: str = "c") -> None:
        words = ("convert", f"{directory}/{source}", target(directory), "--to", form, "--force")
        if code := shell(*words).code:
            raise OSError(f"exit code {code} of {words}")

    def prepare(directory: str) -> None:
        save(f"{directory}/older", 0)
        save(_checkpoint(directory), 1)
        convert(directory, "older")

    def again(directory: str) -> None:
        save(f"{directory}/other", 9)
        convert(directory, "other")

    def found(directory: str) -> int | None:
        if not os.path.exists(target(directory)):
            return None
        if form == "dcp":
            return generation(target(directory))
        wanted = torch.load(target(directory), weights_only=True)
        assert is_generation(wanted, wanted["step"])
        return int(wanted["step"])

    return Scenario(f"convert-{form}", prepare, convert, found, again, (0, 1), untouched=True)


SCENARIOS = (*SAVES, _LOAD, _MANAGER, _COPY, _of_convert("dcp"), _of_convert("torch"))
