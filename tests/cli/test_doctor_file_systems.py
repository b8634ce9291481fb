"""What ``doctor`` says of file systems unlike this one: NFS, memory, full ones, ones without locks or direct I/O."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.cli.doctoring import file_system
from robust_dcp.cli.doctoring.finding import Finding
from robust_dcp.storage.files.disk import OpenFile, storage_error
from robust_dcp.storage.files.mounts import mount_in
from robust_dcp.storage.files.posix_disk import PosixDisk


def finding(name: str, path: Path) -> Finding:
    (found,) = [each for each in file_system.file_system_findings(str(path)) if each.name == name]
    assert list(path.iterdir()) == []
    return found


def mounted_as(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths lie on the mount that this line of ``mountinfo`` describes, after its first fields."""
    lines = [f"36 35 0:9 / / rw shared:1 - {line}\n"]
    monkeypatch.setattr(file_system, "mount_of", lambda path: mount_in(lines, path))
    monkeypatch.setattr(file_system, "is_of_this_machine", lambda _: line.startswith("ext4"))


@pytest.mark.parametrize(
    ("line", "state", "told"),
    [
        ("tmpfs none rw", "warning", "gone after a reboot"),
        ("overlay overlay rw", "warning", "mount a volume"),
        ("ext4 /dev/nvme0n1 rw", "warning", "several nodes need a file system that they share"),
        ("lustre mgs@tcp:/scratch rw", "ok", ""),
    ],
)
def test_a_file_system_that_others_cannot_see_or_that_is_lost_is_told(
    line: str, state: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_as(line, monkeypatch)
    found = finding("file system", tmp_path)
    assert found.state == state and line.split()[0] in found.found and told in found.advice


def test_a_kernel_that_tells_no_mounts_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "mount_of", lambda _: None)
    assert finding("file system", tmp_path)[:3] == ("warning", "file system", "unknown")


@pytest.mark.parametrize(
    ("options", "state", "told"),
    [
        ("rw,local_lock=none", "ok", "locks of the server; names are cached for up to 60 s"),
        ("rw,noac,acdirmax=600", "ok", "names are cached for up to 0 s"),
        ("rw,nolock", "warning", "locks are of this machine only"),
        ("rw,local_lock=flock", "warning", "locks are of this machine only"),
        ("rw,acdirmax=600", "warning", "names are cached for up to 600 s"),
    ],
)
def test_options_of_nfs_that_hide_locks_or_names_are_told(
    options: str, state: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_as(f"nfs4 server:/export {options}", monkeypatch)
    found = finding("NFS", tmp_path)
    assert found.state == state and told in found.found and bool(found.advice) == (state == "warning")


def test_little_space_and_few_inodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = os.statvfs_result((4096, 4096, 1 << 30, 1 << 10, 1 << 10, 99_999, 77, 77, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    assert finding("space", tmp_path)[:3] == ("warning", "space", "4.0 MiB of 4.0 TiB are free")
    assert finding("inodes", tmp_path)[:3] == ("warning", "inodes", "77 are free")


def test_a_file_system_that_counts_no_inodes_has_no_line_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: none)
    assert "inodes" not in [each.name for each in file_system.file_system_findings(str(tmp_path))]


class _Without(PosixDisk):
    """A disk that has no direct I/O, no preallocation and no locks."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        file = super().open_new(path)
        file.why_buffered = "refused with EINVAL" if direct else None
        return file

    def preallocate(self, file: OpenFile, nbytes: int) -> bool:
        return False

    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return None


class _LyingAboutLocks(PosixDisk):
    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return True


class _Failing(PosixDisk):
    def rename(self, source: str, target: str) -> None:
        raise storage_error("rename", target, OSError(errno.EIO, os.strerror(errno.EIO)))


class _Forgetting(PosixDisk):
    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        os.truncate(target, 7)


@pytest.mark.parametrize(
    ("disk", "name", "state", "told"),
    [
        (_Without, "direct I/O", "warning", "refused with EINVAL"),
        (_Without, "preallocation", "warning", "no fallocate"),
        (_Without, "locks", "warning", "no flock"),
        (_LyingAboutLocks, "locks", "warning", "a lock does not keep others out"),
        (_Failing, "commit", "problem", os.strerror(errno.EIO)),
        (_Forgetting, "commit", "problem", "a renamed file is not what it was"),
    ],
)
def test_what_a_disk_cannot_do_is_told(
    disk: Any, name: str, state: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "PosixDisk", disk)
    found = finding(name, tmp_path)
    assert found.state == state and told in found.found and found.advice


def test_hard_links_and_shared_extents_that_are_refused_are_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("fcntl.ioctl", refuse)
    assert finding("hard links", tmp_path).state == "warning"
    assert finding("shared extents", tmp_path)[:3] == ("ok", "shared extents", "no: not on this file system")


def test_shared_extents_are_found_where_they_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.ioctl", lambda *_: 0)
    assert finding("shared extents", tmp_path)[:3] == ("ok", "shared extents", "yes")


@pytest.mark.parametrize(("seconds", "told"), [(600.0, "600 s ahead"), (-600.0, "600 s behind")])
def test_a_file_server_with_another_time_is_told(
    seconds: float, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = file_system._write

    def write_at_another_time(path: str) -> None:
        write(path)
        there = os.stat(path).st_mtime + seconds
        os.utime(path, (there, there))

    monkeypatch.setattr(file_system, "_write", write_at_another_time)
    found = finding("clock", tmp_path)
    assert found.state == "warning" and told in found.found and "NTP" in found.advice
