"""``ls`` says what goes on in each directory; ``prune`` removes what nobody keeps, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

import robust_dcp
from robust_dcp.storage.committing.saving_file import SavingFile, claimed
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from tests.cli.commands import shell
from tests.faults.disk import FaultDisk


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> Path:
    """Checkpoints 1 to 4, the latest is 3, with a metric that is best in 2."""
    for step in range(1, 5):
        path = tmp_path / f"step_{step}"
        shutil.copytree(originals / "ours", path)
        loss = 0.1 if step == 2 else 1.0
        (path / ".robust_dcp.step.json").write_bytes(msgspec.json.encode({"step": step, "metrics": {"loss": loss}}))
    (tmp_path / "latest").write_text("step_3")
    return tmp_path


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def states(root: Path) -> dict[str, str]:
    return {row[1]: row[4] for row in shell("ls", root).rows}


def saving_in(path: Path) -> SavingFile:
    path.mkdir(exist_ok=True)
    return SavingFile.create(Disk(), str(path), save_id="0123456789abcdef0123456789abcdef")


def test_ls_says_what_goes_on_in_each_directory(run: Path, originals: Path) -> None:
    running = [saving_in(run / "step_5"), saving_in(run / "step_1")]
    saving_in(run / "step_6").release()  # as when its process ends
    (run / "step_8").mkdir()
    (run / "step_9").mkdir()
    (run / "step_9" / "__0_0.distcp").write_bytes(b"x")
    os.utime(run / "step_9" / "__0_0.distcp", (0, 0))
    (run / "step_2").rename(run / ".robust_dcp.removing.step_2")
    (run / "step_7").mkdir()
    (run / "step_7" / ".robust_dcp.copying.0123456789abcdef").touch()  # as when a copy is killed
    robust_dcp.convert({"w": torch.ones(3)}, run / "step_10", form="safetensors")
    assert states(run) == {
        "step_1": "committed, saving now",
        "step_10": "a Hugging Face model",
        "step_2": "being removed",
        "step_3": "committed, latest",
        "step_4": "committed",
        "step_5": "saving now",
        "step_6": "crashed save",
        "step_7": "copying or half a copy",
        "step_8": "empty",
        "step_9": "not committed",
    }
    found = shell("ls", run, "--json").json
    assert "this is a checkpoint itself" in shell("ls", run / "step_3").err
    assert "holds the checkpoints megatron, ours" in shell("ls", originals).err
    for each in running:
        each.release()
    assert [each["step"] for each in found["checkpoints"]] == [1, 3, 4]
    assert found["checkpoints"][1]["is_latest"] and found["checkpoints"][0]["metrics"] == {"loss": 1.0}


def test_ls_says_of_a_metadata_that_is_cut_off_that_it_is_damaged(run: Path, originals: Path) -> None:
    """Wherever that was, and whoever has written it. One that is whole is committed."""
    shutil.copytree(originals / "stock", run / "step_5")
    for step in (3, 5):
        metadata = run / f"step_{step}" / ".metadata"
        whole = metadata.read_bytes()
        for nbytes in (0, 1, 10, 100, len(whole) // 2, len(whole) - 21, len(whole) - 19, len(whole) - 1):
            metadata.write_bytes(whole[:nbytes])
            ended = shell("ls", run)
            state = {row[1]: row[4] for row in ended.rows}[f"step_{step}"]
            assert state == "damaged: .metadata is cut off" + ", latest" * (step == 3), (step, nbytes)
            assert "cut off" in shell("verify", run / f"step_{step}").out or nbytes == 0, nbytes
        metadata.write_bytes(whole)
    assert all(state.startswith("committed") for state in states(run).values())


def test_prune_keeps_what_the_rules_say_and_the_latest_and_the_newest(run: Path) -> None:
    saving_in(run / "step_5").release()
    words = ("prune", run, "--keep-best", "loss", "--yes")
    assert [row[1] for row in shell(*words, "--dry-run").rows if "remove" in row[3]] == ["step_5", "step_1"]
    with FaultDisk(run, on={"write:*": OSError(errno.ENOSPC, "")}):
        assert shell(*words).code == 0
    assert names_in(run) == ["step_2", "step_3", "step_4"]  # the best, the latest, the newest
    (run / "latest").unlink()
    (run / "latest").symlink_to("latest")
    os.truncate(run / "step_4" / ".metadata", 100)
    assert shell("prune", run, "--keep-last", 1, "--yes", "--json").json["removed"] == [str(run / "step_2")]
    assert names_in(run) == ["step_3", "step_4"]  # of these two the newer one is damaged


def test_prune_keeps_what_lacks_the_metric_unless_another_rule_decides(run: Path) -> None:
    (run / "step_1" / ".robust_dcp.step.json").write_bytes(b'{"step": 1, "metrics": {"train_loss": 1.0}}')
    words = ("prune", run, "--keep-best", "loss", "--yes")
    assert shell(*words).code == 0 and names_in(run) == ["step_1", "step_2", "step_3", "step_4"]
    assert shell(*words, "--keep-last", 1).code == 0 and names_in(run) == ["step_2", "step_3", "step_4"]


def test_prune_leaves_what_is_being_loaded_or_saved(run: Path) -> None:
    with claimed(Disk(), str(run / "step_2")), needed_for_a_load(Disk(), str(run / "step_1")):
        ended = shell("prune", run, "--keep-last", 1, "--yes", "--json")
    assert sorted(ended.json["in_use"]) == [str(run / "step_1"), str(run / "step_2")]
    assert {"step_1", "step_2"} < set(names_in(run))
    for words in (("diff", "{0}", "{0}", "--values"), ("convert", "{0}", f"{run}/made", "--to=dcp")):
        with FaultDisk(run / "step_1", on={"read:__*#1": lambda call: shell("prune", run, "--keep-last=1", "--yes")}):
            assert shell(*(each.format(run / "step_1") for each in words)).code == 0
    assert names_in(run) == ["made", "step_1", "step_3", "step_4"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what to keep"),
        (("--keep-best", "los"), "no checkpoint has the metric 'los': they have loss"),
        (("--keep-last", "1", "--largest"), "name the metric"),
        (("--keep-last", "0"), "--keep-last"),
    ],
)
def test_prune_refuses_rules_that_would_remove_by_mistake(run: Path, words: tuple[str, ...], said: str) -> None:
    ended = shell("prune", run, *words, "--yes")
    assert ended.code == 2 and said in ended.err and names_in(run) == ["step_1", "step_2", "step_3", "step_4"]
