"""``doctor`` says what is wrong with an environment, and what to do."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from robust_dcp.cli import doctor
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.kernel import mount_in
from tests.cli.commands import shell

Patch = pytest.MonkeyPatch


def test_an_environment_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    ended = shell("doctor", tmp_path)
    states = {row[1]: row[0] for row in ended.rows}
    assert ended.code == 0 and "0 problems" in ended.err
    assert {states[name] for name in ("python", "torch", "isal", "locks", "direct I/O")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def package(name: str, version: str | None) -> Callable[[Patch], None]:
    """The version of a package that is installed; ``None`` for none."""

    def look_up(asked: str, original: Callable[[str], str] = metadata.version) -> str:
        if asked == name and version is None:
            raise metadata.PackageNotFoundError(asked)
        return version or "" if asked == name else original(asked)

    return lambda patch: patch.setattr(metadata, "version", look_up)


def variables(**values: str) -> Callable[[Patch], None]:
    def set_up(patch: Patch) -> None:
        for name, value in values.items():
            patch.setenv(name, value)

    return set_up


def addresses(*found: str) -> Callable[[Patch], None]:
    """Those that the name of this machine has."""

    def set_up(patch: Patch) -> None:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in found])

    return set_up


def mounted(line: str) -> Callable[[Patch], None]:
    def set_up(patch: Patch) -> None:
        patch.setattr(doctor, "mount_of", functools.partial(mount_in, [f"36 35 0:9 / / rw shared:1 - {line}\n"]))
        patch.setattr(doctor, "is_of_this_machine", lambda _: line.startswith("ext4"))

    return set_up


def no_locks(patch: Patch) -> None:
    patch.setattr(Disk, "lock", lambda *_, **__: None)


CASES: list[tuple[Callable[[Patch], None], str, str, str]] = [
    (package("msgspec", None), "msgspec", "problem", "is not installed"),
    (package("torch", "2.6.1+cu124"), "torch", "problem", "2.6.1"),
    (package("torch", "2.7.0"), "torch", "ok", "2.7.0"),
    (variables(GLOO_SOCKET_IFNAME="nosuch0"), "gloo", "problem", "there is no nosuch0"),
    (variables(GLOO_SOCKET_IFNAME="lo"), "gloo", "ok", "lo"),
    (addresses("127.0.1.1"), "gloo", "warning", "which other nodes cannot reach"),
    (addresses("192.0.2.1"), "gloo", "problem", "where no port can be opened"),
    (mounted("tmpfs none rw"), "file system", "warning", "tmpfs on /"),
    (mounted("ext4 /dev/vda rw"), "file system", "warning", "of this machine alone"),
    (mounted("nfs4 server:/x rw,nolock"), "file system", "warning", "locks are of this machine only"),
    (mounted("nfs4 server:/x rw,local_lock=none"), "file system", "ok", "nfs4 on /"),
    (no_locks, "locks", "warning", "no flock"),
]


@pytest.mark.parametrize(("set_up", "name", "state", "told"), CASES, ids=[f"{each[1]}: {each[3]}" for each in CASES])
def test_what_is_found_is_told_with_what_to_do(
    set_up: Callable[[Patch], None], name: str, state: str, told: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    set_up(monkeypatch)
    ended = shell("doctor", tmp_path, "--json")
    (found,) = [each for each in ended.json["findings"] if each["name"] == name]
    assert found["state"] == state and told in found["found"]
    assert found["advice"] or state == "ok"
    assert ended.code == (1 if ended.json["problems"] else 0)


def test_a_directory_that_cannot_be_written_to_is_a_problem() -> None:
    ended = shell("doctor", "/proc", "--json")  # where nobody can make a directory
    problems = {each["name"] for each in ended.json["findings"] if each["state"] == "problem"}
    assert ended.code == 1 and "writing" in problems
