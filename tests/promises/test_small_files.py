"""The small files beside the data are hints: a damaged, forged or copied one is passed over, and names no place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp import CheckpointManager, RobustCheckpointError, RobustWriter, copy_checkpoint
from robust_dcp.storage.committing.saving_file import SavingFile
from robust_dcp.storage.files.disk import Disk
from tests.cli.commands import shell
from tests.faults.disk import FaultDisk
from tests.harness.verdicts import lines_of_the_log

NOTE, REPORT, RECORD = ".robust_dcp.drain.json", ".robust_dcp.report.json", ".robust_dcp.step.json"
SAVING = ".robust_dcp.saving.0123456789abcdef"


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((9,), float(value))}


def value_at(path: Path | str) -> float:
    found = state(-1)
    robust_dcp.load(found, checkpoint_id=path)
    return found["w"][0].item()


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make_run(root: Path, first: float) -> None:
    """Two steps, and each kind of small file. The copy of step 2 is awaited."""
    manager = CheckpointManager(root, drain_to=f"{root}.far")
    manager.save(1, state(first))
    robust_dcp.finish_async_saves()
    with FaultDisk(Path(f"{root}.far"), on={"create:*step_2*": OSError(13, "")}):
        manager.save(2, state(first + 1))
        with pytest.raises(RobustCheckpointError):
            robust_dcp.finish_async_saves()
    shutil.rmtree(f"{root}.far")
    SavingFile.create(Disk(), str(root / "step_2"), save_id="0123456789abcdef0123456789abcdef").release()
    (root / "step_2/.robust_dcp.nodes").write_text('{"0123456789abcdef": [{"host": "a", "ranks": [0]}]}')


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and that of another job."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "run", 1.0)
    make_run(folder / "other", 31.0)
    return folder


def flipped(path: Path, content: bytes) -> None:
    path.write_bytes(bytes([*content[:-1], content[-1] ^ 1]))


def truncated(nbytes: int) -> Callable[[Path, bytes], None]:
    def truncate(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        os.truncate(path, nbytes)

    return truncate


def written(data: bytes) -> Callable[[Path, bytes], None]:
    return lambda path, content: path.write_bytes(data) and None


def linked(target: str | None) -> Callable[[Path, bytes], None]:
    return lambda path, content: path.symlink_to(path if target is None else target)


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, content: path.touch(),
    "cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "flipped": flipped,
    "nested": written(b'{"x":' * 100_000),
    "nested lists": written(b"[" * 100_000 + b"]" * 100_000),
    "100 MiB": truncated(100 << 20),
    "another type": written(b"[3]"),
    "other fields": written(b'{"step": "x", "target": 3, "save_id": [], "0123456789abcdef": 1, "digest": {}}'),
    "NaN": written(b'{"step": NaN}'),
    "a huge number": written(b'{"step": 1e999, "pid": ' + b"9" * 10_000 + b"}"),
    "a key twice": lambda path, content: path.write_bytes(content.replace(b"{", b'{"digest": "0", "digest": "1",', 1)),
    "no UTF-8": lambda path, content: path.write_bytes(content + b"\xff\xfe"),
    "a NUL": written(b'{"target": "/a\\u0000b", "digest": "", "step": 2, "save_id": "\\u0000", "host": "", "pid": 0}'),
    "half of a character": written(b'{"target": "/a\\ud800b", "digest": "", "step": 2, "save_id": "", "pid": 0}'),
    "a directory": lambda path, content: path.mkdir(),
    "a FIFO": lambda path, content: os.mkfifo(path),
    "a link to a device": linked("/dev/zero"),
    "a link to itself": linked(None),
    "a link to nothing": linked("nothing"),
}


def each_damage(runs: Path, folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """A copy of the run for each damage of a file, also with that file of the other job."""
    content = (runs / "run" / name).read_bytes()
    of_the_other = {"of another job": written((runs / "other" / name).read_bytes())}
    for number, (what, damage) in enumerate({**DAMAGES, **of_the_other}.items()):
        root = folder / str(number) / "run"
        shutil.copytree(runs / "run", root)
        (root / name).unlink()
        damage(root / name, content)
        yield what, root


def refused(call: Callable[[], object]) -> bool:
    """Whether a call raises, which must be an error for people."""
    try:
        call()
    except RobustCheckpointError:
        return True
    return False


@pytest.mark.parametrize("name", ["latest", *(f"step_2/{each}" for each in (RECORD, NOTE, REPORT, SAVING))])
def test_whatever_is_in_one_all_goes_on_with_what_is_there(name: str, runs: Path, memory_path: Path) -> None:
    for what, root in each_damage(runs, memory_path, name):
        far = root.parent / "durable"
        manager = CheckpointManager(root, keep_last=9, drain_to=far)
        loaded = state(-1)
        latest = manager.load_latest(loaded)
        assert latest is not None and (latest.checkpoint.step, loaded["w"][0].item()) == (2, 2.0), what
        assert [each.step for each in manager.checkpoints()] == [1, 2], what
        for command in (
            ["ls", root],
            ["inspect", root / "step_2"],
            ["verify", root / "step_2"],
            ["report", root, "--output", memory_path / "page.html"],
        ):
            ended = shell(*command)
            assert ended.code == 0 and "Traceback" not in ended.err, (what, command, ended)
        assert manager.prune() == [], what
        is_refused = refused(lambda: manager.save(3, state(3.0)))  # noqa: B023 - called at once
        assert is_refused == (name == "latest" and what == "a directory"), what  # it is committed, and not named
        robust_dcp.finish_async_saves()
        assert value_at(root / "step_3") == 3.0 and (is_refused or value_at(far / "step_3") == 3.0), what
        is_refused = refused(lambda: manager.save(2, state(4.0)))  # noqa: B023 - called at once
        assert not is_refused or name.endswith(SAVING) or what == "a directory", what
        refused(robust_dcp.finish_async_saves)
        assert value_at(root / "step_2") in ({2.0, 4.0} if is_refused else {4.0}), what
        assert {each.name for each in root.parent.iterdir()} == {"run", "durable"}, what
        shutil.rmtree(root.parent)


def test_no_flipped_bit_of_latest_makes_another_checkpoint_the_latest(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    manager, path, lines = CheckpointManager(tmp_path / "run"), tmp_path / "run/latest", lines_of_the_log()

    def latest_with(content: bytes) -> int | None:
        path.write_bytes(content)
        return getattr(manager.latest(), "step", None)

    newest = path.read_bytes()
    for step in (2, 3, 1):  # at last the job has gone back
        manager.save(step, state(float(step)))
        content = path.read_bytes()
        for bit in range(8 * (len(content) - 1)):  # the last byte ends the line
            flipped = content[bit // 8] ^ 1 << bit % 8
            assert latest_with(bytes([*content[: bit // 8], flipped, *content[bit // 8 + 1 :]])) == step, bit
            is_told = len([line for line in lines if line.startswith(f"{path} is passed over")]) == 1
            assert is_told or bit // 8 == 16, bit  # between the digest and the name
            lines.clear()
        for end in range(len(content)):
            assert latest_with(content[:end]) == (step if end >= 16 else 3 if step == 1 else step), end
        lines.clear()
    assert latest_with(newest) == 3 and len(lines) == 1  # step 2 was saved again since
    assert latest_with(b"step_2") == 2  # a person goes back
    assert latest_with((runs / "other/latest").read_bytes()) == 3


def test_a_tracker_that_names_an_earlier_checkpoint_than_latest_counts_and_that_is_said(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, name="iter_{step:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    for step in (4, 5):
        manager.save(step, state(step))
    lines = lines_of_the_log()
    assert [each.step for each in (manager.latest(),) if each] == [5] and lines == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")  # by hand, or one flipped bit
    assert [each.step for each in (manager.latest(), manager.latest()) if each] == [4, 4]
    (line,) = lines
    assert line.endswith("names iter_0000005, and latest_checkpointed_iteration.txt an earlier one, iter_0000004")


class TestNotesOfCopies:
    """What a note says of places is never where something goes, and what it says of earlier copies counts at home."""

    def note(self, path: Path) -> dict[str, object]:
        return dict(json.loads((path / NOTE).read_text()))

    def test_a_stranger_names_no_place(self, runs: Path, tmp_path: Path) -> None:
        shutil.copytree(runs / "other/step_1", tmp_path / "others/best")
        shutil.copytree(runs / "other/step_2", tmp_path / "durable/step_0")
        before = content_of(tmp_path)
        (tmp_path / "run").mkdir()
        digests = [self.note(runs / f"other/step_{step}")["digest"] for step in (1, 2)]
        targets = ("new", "others/best", "durable/step_0", "run/step_9")
        for number, target in enumerate(targets):
            stranger = tmp_path / f"run/step_{number}"
            shutil.copytree(runs / "other/step_2" if number else runs / "run/step_2", stranger)
            note = self.note(stranger) | {"target": f"{tmp_path}/{target}", "is_complete": False, "replaces": digests}
            (stranger / NOTE).write_text(json.dumps(note))
        manager = CheckpointManager(tmp_path / "run", drain_to=tmp_path / "durable")
        for step in (10, 11):
            manager.save(step, state(step))
            robust_dcp.finish_async_saves()
        assert before.items() <= content_of(tmp_path).items()
        assert not (tmp_path / "new").exists() and not (tmp_path / "run/step_9").exists()
        there = {each.name for each in (tmp_path / "durable").iterdir()}
        assert there == {"step_0", "step_1", "step_2", "step_3", "step_10", "step_11", "latest"}
        with pytest.raises(RobustCheckpointError, match="another checkpoint"):
            copy_checkpoint(tmp_path / "run/step_1", tmp_path / "others/best")

    def test_a_run_that_was_copied_goes_on_to_its_own_place(self, runs: Path, tmp_path: Path) -> None:
        make_run(tmp_path / "run", 1.0)
        assert self.note(tmp_path / "run/step_2")["is_complete"] is False
        shutil.copytree(tmp_path / "run", tmp_path / "copied")
        manager = CheckpointManager(tmp_path / "copied", keep_last=1, drain_to=tmp_path / "mine")
        manager.save(3, state(3.0))
        robust_dcp.finish_async_saves()
        assert not (tmp_path / "run.far").exists()
        assert value_at(tmp_path / "mine/step_2") == 2.0 and value_at(tmp_path / "mine/step_3") == 3.0
        manager.prune()
        assert [each.step for each in manager.checkpoints()] == [3]  # both have arrived

    def test_an_earlier_save_of_a_copied_directory_is_replaced_at_no_place(self, tmp_path: Path) -> None:
        def save(path: Path, value: float) -> None:
            robust_dcp.save(state(value), storage_writer=RobustWriter(path, drain_to=tmp_path / "durable"))
            robust_dcp.finish_async_saves()

        save(tmp_path / "here", 1.0)
        shutil.copytree(tmp_path / "here", tmp_path / "copied")
        with pytest.raises(RobustCheckpointError, match="another checkpoint"):
            save(tmp_path / "copied", 2.0)
        assert value_at(tmp_path / "durable") == 1.0
        save(tmp_path / "here", 3.0)
        assert value_at(tmp_path / "durable") == 3.0
