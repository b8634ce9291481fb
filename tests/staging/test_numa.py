"""Which processors are near a device, and work that runs on these alone.

No machine with two nodes was there, so two nodes are described as the kernel would, for the processors of this one.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from robust_dcp.staging import StagingBuffers, stay_near
from robust_dcp.staging.numa import cpus_near, run_near

MEGABYTE = 1 << 20
OWN = frozenset(os.sched_getaffinity(0))
FIRST = min(OWN)


def described(root: Path, nodes: dict[int, str], devices: dict[str, str]) -> Path:
    """``/sys`` of a machine with these nodes, by the lists of their processors, and devices, by their nodes."""
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for address, node_of_device in devices.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node_of_device}\n")
    return root


def test_processors_near_a_device_are_those_of_its_node_that_this_process_may_use(tmp_path: Path) -> None:
    root = described(tmp_path, {0: "9000-9003", 1: f"{FIRST},9004-9007"}, {"0000:3b:00.0": "1", "0000:86:00.0": "0"})
    assert cpus_near("0000:3b:00.0", root) == {FIRST}
    assert cpus_near("0000:86:00.0", root) == OWN  # of that node this process may use none


@pytest.mark.parametrize("node", ["-1", "7", "what?"])
def test_a_device_without_a_known_node_is_near_all_processors(tmp_path: Path, node: str) -> None:
    root = described(tmp_path, {0: f"{FIRST}"}, {"0000:3b:00.0": node})
    assert cpus_near("0000:3b:00.0", root) == OWN
    assert cpus_near("0000:ff:00.0", root) == OWN


def test_without_a_device_the_node_is_that_of_the_processor_that_asks(tmp_path: Path) -> None:
    found: list[frozenset[int]] = []

    def ask() -> None:
        stay_near({FIRST})
        found.append(cpus_near(None, described(tmp_path, {0: "9000", 1: f"{FIRST}"}, {})))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [{FIRST}]
    assert cpus_near(None, tmp_path / "nothing") == OWN


def test_work_is_done_once_on_each_part_by_threads_that_run_on_these_processors_alone() -> None:
    done: list[tuple[int, int, frozenset[int]]] = []
    run_near(
        frozenset({FIRST}), lambda begin, end: done.append((begin, end, frozenset(os.sched_getaffinity(0)))), 10, 4
    )
    assert sorted(done) == [(0, 4, {FIRST}), (4, 8, {FIRST}), (8, 10, {FIRST})]
    assert frozenset(os.sched_getaffinity(0)) == OWN


def test_what_the_work_raises_is_raised() -> None:
    def fail(begin: int, end: int) -> None:
        raise OSError(28, "there is no space")

    with pytest.raises(OSError, match="there is no space"):
        run_near(OWN, fail, 10, 4)


@pytest.mark.parametrize("are_shared", [False, True])
def test_all_pages_of_new_memory_are_there_before_anything_is_copied(are_shared: bool) -> None:
    import torch

    buffer = StagingBuffers(are_shared=are_shared).take([(torch.uint8, torch.Size([64 * MEGABYTE - 64]))])
    address = buffer.tensors([(torch.uint8, torch.Size([buffer.nbytes - 64]))])[0].data_ptr()
    if not are_shared:  # pages of a file are there without being mapped
        assert resident_nbytes(address) == buffer.nbytes
    else:
        assert buffer.fd is not None
        assert os.fstat(buffer.fd).st_blocks * 512 == buffer.nbytes
    assert buffer.cpus <= OWN
    buffer.release()


def resident_nbytes(address: int) -> int:
    """Of the mapping that an address lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(number, 16) for number in words[0].split("-"))
            is_inside = begin <= address < end
        elif is_inside and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError(f"{address:#x} is in no mapping")
