"""Whether the save of a journal is over: a lock is proof where it can be, else the age decides; doubt keeps files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from robust_dcp.storage.committing.journal import Journal, OtherSave, SaveState, journals_in
from robust_dcp.storage.files.mounts import type_in_mounts
from robust_dcp.storage.files.posix_disk import PosixDisk

SAVE_ID = "0123456789abcdef-rest"
MARK = "0123456789abcdef"


class Network(PosixDisk):
    """A file system of several machines."""

    def is_of_this_machine(self, path: str) -> bool:
        return False


def begin(disk: PosixDisk, directory: Path, *, ranks: int = 2, files: int | None = 3, layout: str = "torch") -> Journal:
    present = ["__0_1.distcp", "__1_0.4.distcp", "notes.txt"]
    return Journal.begin(
        disk, str(directory), save_id=SAVE_ID, layout=layout, ranks=ranks, files=files, replaces=[], present=present
    )


def state_of(disk: PosixDisk, journal: Journal, *, age_seconds: float = 0.0, is_locked: bool = True) -> SaveState:
    directory, name = os.path.split(journal.path)
    now_seconds = os.stat(journal.path).st_mtime + age_seconds
    return OtherSave.read(disk, directory, name, now_seconds=now_seconds, is_locked=is_locked).state


def of_another_machine(journal: Journal) -> None:
    record = msgspec.structs.replace(journal.record, boot_id="another")
    Path(journal.path).write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize("disk", [PosixDisk(), Network()])
def test_a_save_of_this_machine_is_over_once_another_holds_the_lock(disk: PosixDisk, tmp_path: Path) -> None:
    assert state_of(disk, begin(disk, tmp_path)) is SaveState.OVER


@pytest.mark.parametrize("is_locked", [True, False])
def test_of_another_machine_on_a_network_only_the_age_tells(is_locked: bool, tmp_path: Path) -> None:
    disk = Network()
    journal = begin(disk, tmp_path)
    of_another_machine(journal)
    assert state_of(disk, journal, age_seconds=23 * 3600, is_locked=is_locked) is SaveState.UNKNOWN
    assert state_of(disk, journal, age_seconds=25 * 3600, is_locked=is_locked) is SaveState.OVER


def test_without_locks_the_save_of_this_machine_is_not_known_to_be_over_either(tmp_path: Path) -> None:
    assert state_of(Network(), begin(Network(), tmp_path), is_locked=False) is SaveState.UNKNOWN


def test_a_journal_that_is_not_whole_answers_for_nothing(tmp_path: Path) -> None:
    journal = begin(PosixDisk(), tmp_path)
    Path(journal.path).write_bytes(Path(journal.path).read_bytes()[:-20])
    found = OtherSave.read(PosixDisk(), str(tmp_path), os.path.basename(journal.path), now_seconds=0.0, is_locked=True)
    assert (found.record, found.state, found.may_have_made(["__0_0.distcp"])) == (None, SaveState.OVER, set())


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_journal_answers_for_the_names_that_its_save_gives_and_no_others(layout: str, tmp_path: Path) -> None:
    record = begin(PosixDisk(), tmp_path, layout=layout).record
    shards = {
        f"shard-00002-model-00001-of-00002.safetensors.{MARK}.part",
        "shard-00001-model-00002-of-00002.safetensors",
    }
    ours = {"__0_0.distcp", f"__0_1.{MARK}.distcp", "__1_2.distcp", f".metadata.{MARK}.tmp"}
    others = {
        "__0_1.distcp",  # was there
        "__1_0.4.distcp",
        "__0_3.distcp",  # three files a rank
        "__2_0.distcp",  # two ranks
        "__0_0.0123456789abcde0.distcp",  # another mark
        "__1_0.6.distcp",
        "optimizer__0_0.distcp",
        ".metadata.tmp",
        ".metadata",
        "notes.txt",
        "shard-00003-model-00001-of-00002.safetensors",
        "shard-00001-model-00001-of-00002.safetensors.3.part",
    }
    found = record.may_have_made(sorted(ours | others | shards))
    assert found == (ours | shards if layout == "safetensors" else ours)


def test_only_names_with_an_id_are_journals() -> None:
    names = [".robust_dcp.saving.0123456789abcdef", ".robust_dcp.saving.mine", ".robust_dcp.saving", "x.saving"]
    assert journals_in(names) == names[:1]


def test_the_file_system_of_a_path_is_that_of_the_nearest_mount_above_it() -> None:
    mounts = [
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n",
        "30 22 0:40 / /mnt/net rw master:1 - nfs4 server:/x rw\n",
        r"31 30 8:2 / /mnt/net/a\040b rw - xfs /dev/sdb rw" + "\n",
    ]
    found = [type_in_mounts(mounts, path) for path in ("/data", "/mnt/net/c", "/mnt/net/a b/c", "/mnt/network")]
    assert found == ["ext4", "nfs4", "xfs", "ext4"]
