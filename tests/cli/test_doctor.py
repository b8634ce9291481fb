"""``doctor`` says what is wrong with an environment, and what to do."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.cli import doctor
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error
from robust_dcp.storage.files.kernel import mount_in
from tests.cli.commands import shell

VERSION = metadata.version
PATCH = pytest.MonkeyPatch


def finding(name: str, *words: object) -> dict[str, Any]:
    ended = shell("doctor", *words, "--json")
    (found,) = [each for each in ended.json["findings"] if each["name"] == name]
    assert ended.code == (1 if ended.json["problems"] else 0)
    return dict(found)


def test_an_environment_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    ended = shell("doctor", tmp_path)
    states = {row[1]: row[0] for row in ended.rows}
    assert ended.code == 0 and "0 problems" in ended.err
    assert {states[name] for name in ("python", "torch", "isal", "locks", "commit", "direct I/O")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "version", "state", "told"),
    [
        ("msgspec", None, "problem", "is not installed"),
        ("torch", None, "problem", "is not installed"),
        ("torch", "2.6.1+cu124", "problem", "2.6.1"),
        ("torch", "1.13", "problem", "1.13"),
        ("torch", "2.7.0", "ok", "2.7.0"),
        ("torch", "2.15.0a0+git1", "ok", "2.15"),
        ("torch", "3.0", "ok", "3.0"),
    ],
)
def test_packages_that_are_missing_or_too_old_are_problems(
    name: str, version: str | None, state: str, told: str, monkeypatch: PATCH
) -> None:
    def look_up(asked: str) -> str:
        if asked == name and version is None:
            raise metadata.PackageNotFoundError(asked)
        return version or "" if asked == name else VERSION(asked)

    monkeypatch.setattr(metadata, "version", look_up)
    found = finding(name)
    assert found["state"] == state and told in found["found"] and bool(found["advice"]) == (state != "ok")


@pytest.mark.parametrize(
    ("variables", "name", "state", "told"),
    [
        ({"ROBUST_DCP": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "taken over", "problem", "AUTOLOAD is off"),
        ({"ROBUST_DCP": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "taken over", "ok", "because ROBUST_DCP is set"),
        ({"ROBUST_DCP_LAYOT": "torch"}, "ROBUST_DCP_LAYOT", "warning", "no such option"),
        ({"ROBUST_DCP_SAVE_FAILURE": "log"}, "ROBUST_DCP_SAVE_FAILURE", "problem", "one of raise, warn"),
        ({"ROBUST_DCP_TRUSTED": "1"}, "ROBUST_DCP_TRUSTED", "warning", "whatever code"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "gloo", "problem", "there is no nosuch0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "gloo", "ok", "lo"),
    ],
)
def test_variables_that_do_not_do_what_they_say_are_told(
    variables: dict[str, str], name: str, state: str, told: str, monkeypatch: PATCH
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = finding(name)
    assert found["state"] == state and told in found["found"]


def test_the_switch_needs_an_entry_point_and_a_source_tree_has_none(monkeypatch: PATCH) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("ROBUST_DCP", "1")
    assert "entry point of group torch.backends is missing" in finding("taken over")["found"]


@pytest.mark.parametrize(
    ("addresses", "state", "told"),
    [
        (["127.0.1.1"], "warning", "which other nodes cannot reach"),
        (["::1"], "warning", "which other nodes cannot reach"),
        (["192.0.2.1"], "problem", "where no port can be opened"),
        ([], "warning", "has no address"),
    ],
)
def test_the_address_that_gloo_takes_is_one_that_others_can_reach(
    addresses: list[str], state: str, told: str, monkeypatch: PATCH
) -> None:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = finding("gloo")
    assert found["state"] == state and told in found["found"] and found["advice"]


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_told_with_the_command_that_raises_it(few_files: None) -> None:
    assert "ulimit -n 1024" in finding("open files")["advice"]


@pytest.mark.parametrize(
    ("line", "state", "told"),
    [
        ("tmpfs none rw", "warning", "tmpfs on /"),
        ("overlay none rw", "warning", "overlay on /"),
        ("ext4 /dev/vda rw", "warning", "of this machine alone"),
        ("lustre mds:/fs rw,flock", "ok", "lustre on /"),
        ("nfs4 server:/x rw,nolock", "warning", "locks are of this machine only"),
        ("nfs4 server:/x rw,local_lock=flock", "warning", "locks are of this machine only"),
        ("nfs4 server:/x rw,local_lock=none", "ok", "nfs4 on /"),
    ],
)
def test_a_file_system_that_others_cannot_see_or_that_is_lost_is_told(
    line: str, state: str, told: str, tmp_path: Path, monkeypatch: PATCH
) -> None:
    lines = [f"36 35 0:9 / / rw shared:1 - {line}\n"]
    monkeypatch.setattr(doctor, "mount_of", lambda path: mount_in(lines, path))
    monkeypatch.setattr(doctor, "is_of_this_machine", lambda _: line.startswith("ext4"))
    found = finding("file system", tmp_path)
    assert found["state"] == state and told in found["found"]


def test_little_space_is_told(tmp_path: Path, monkeypatch: PATCH) -> None:
    little = os.statvfs_result((4096, 4096, 1000, 100, 100, 1000, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    assert finding("space", tmp_path)["state"] == "warning"


def test_a_directory_that_cannot_be_written_to_is_a_problem() -> None:
    assert finding("writing", "/proc")["state"] == "problem"  # where nobody can make a directory


class NoDirect(Disk):
    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        return super().open_new(path)


class NoLocks(Disk):
    def lock(self, file: OpenFile, *, shared: bool = False) -> bool | None:
        return None


class NoSync(Disk):
    def fsync(self, file: OpenFile) -> None:
        raise storage_error("fsync", file.path, OSError(5, "Input/output error"))


@pytest.mark.parametrize(
    ("disk", "name", "state", "told"),
    [
        (NoDirect, "direct I/O", "warning", "it is refused"),
        (NoLocks, "locks", "warning", "no flock"),
        (NoSync, "commit", "problem", "Input/output error"),
    ],
)
def test_what_a_disk_cannot_do_is_told(
    disk: Any, name: str, state: str, told: str, tmp_path: Path, monkeypatch: PATCH
) -> None:
    monkeypatch.setattr(doctor, "Disk", disk)
    found = finding(name, tmp_path)
    assert found["state"] == state and told in found["found"]
