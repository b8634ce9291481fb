"""What ``doctor`` says of machines unlike this one: limits, names that nobody knows, containers with little memory."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from robust_dcp.cli.doctoring import machine
from robust_dcp.cli.doctoring.finding import Finding

_GIB = 1 << 30
FILES = {
    "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB",
    "/proc/self/cgroup": "0::/job/step\n",
    "/proc/sys/vm/dirty_ratio": "20",
    "/proc/sys/vm/dirty_bytes": "0",
}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the machine has in ``/proc`` and ``/sys``. Tests add to it."""
    there = dict(FILES)
    monkeypatch.setattr(machine, "_text", there.get)
    return there


def finding(name: str) -> Finding:
    (found,) = [each for each in machine.machine_findings() if each.name == name]
    return found


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a test decide what the lookup of this host's name returns, or raises."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")

    def answer(look_up: Any) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return answer


@pytest.mark.parametrize(
    ("addresses", "state", "told"),
    [
        (["10.1.2.3", "127.0.0.1"], "ok", "node7 is 10.1.2.3"),
        (["fe80::1%eth0"], "ok", "node7 is fe80::1"),
        (["127.0.1.1"], "warning", "node7 is 127.0.1.1, which other nodes cannot reach"),
        (["::1"], "warning", "which other nodes cannot reach"),
        ([], "warning", "node7 has no address"),
    ],
)
def test_the_address_that_gloo_takes_is_one_that_others_can_reach(
    lookup: Any, addresses: list[str], state: str, told: str
) -> None:
    lookup(lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in addresses])
    found = finding("gloo")
    assert found.state == state and told in found.found
    assert ("GLOO_SOCKET_IFNAME" in found.advice) == (state == "warning")


def test_a_name_that_nobody_knows_has_no_address(lookup: Any) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    lookup(unknown)
    assert finding("gloo").found == "node7 has no address"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(machine, "_LOOKUP_SECONDS", 0.01)
    event = threading.Event()
    yield event
    event.set()


def test_a_name_server_that_does_not_answer_is_not_awaited(lookup: Any, answer: threading.Event) -> None:
    lookup(lambda *_, **__: [answer.wait()][:0])
    found = finding("gloo")
    assert found.state == "warning" and "was not looked up within" in found.found and "DNS" in found.advice


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_told_with_the_command_that_raises_it(few_files: None) -> None:
    found = finding("open files")
    assert (found.state, found.found) == ("warning", "1000") and "ulimit -n 1024" in found.advice


def test_no_limit_of_open_files_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (finding("open files").state, finding("open files").found) == ("ok", "unlimited")


@pytest.mark.parametrize(
    ("limits", "state", "told"),
    [
        ({}, "ok", "64.0 GiB, no lower limit by a cgroup"),
        ({"/sys/fs/cgroup/memory.max": "max"}, "ok", "no lower limit"),
        ({"/sys/fs/cgroup/job/memory.max": str(8 * _GIB)}, "ok", "the cgroup allows 8.0 GiB"),
        (
            {"/sys/fs/cgroup/job/memory.max": str(8 * _GIB), "/sys/fs/cgroup/job/step/memory.max": str(_GIB)},
            "warning",
            "the cgroup allows 1.0 GiB",
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,memory:/old\n3:pids:/old\nnonsense\n",
                "/sys/fs/cgroup/memory/old/memory.limit_in_bytes": str(_GIB),
                "/sys/fs/cgroup/pids/old/memory.max": "1",
            },
            "warning",
            "the cgroup allows 1.0 GiB",
        ),
        ({"/proc/meminfo": ""}, "ok", "no limit is known"),
    ],
)
def test_the_memory_is_the_least_that_any_cgroup_above_allows(
    files: dict[str, str], limits: dict[str, str], state: str, told: str
) -> None:
    files.update(limits)
    found = finding("memory")
    assert found.state == state and told in found.found


def test_without_proc_nothing_is_claimed(files: dict[str, str]) -> None:
    files.clear()
    assert (finding("memory").found, finding("page cache").found) == ("no limit is known", "its limits are not known")


def test_much_unwritten_memory_is_a_warning(files: dict[str, str]) -> None:
    assert (finding("page cache").state, finding("page cache").found) == ("ok", "vm.dirty_ratio=20, vm.dirty_bytes=0")
    files["/proc/sys/vm/dirty_ratio"] = "80"
    found = finding("page cache")
    assert found.state == "warning" and "vm.dirty_ratio=80" in found.found and "lower vm.dirty_ratio" in found.advice


def test_a_container_with_little_shared_memory_is_told_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs("/")
    little = os.statvfs_result((4096, 4096, 100, 16, 16, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    found = finding("/dev/shm")
    assert found.state == "warning" and "free" in found.found and "--shm-size" in found.advice


def test_a_machine_without_shared_memory_is_told_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "statvfs", missing)
    found = finding("/dev/shm")
    assert (found.state, found.found) == ("warning", "No such file or directory") and "async saves" in found.advice
