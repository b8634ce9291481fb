"""Memory that copies pass through is aligned, reused, private, and there before it is touched.

Some that the system does not lock is used all the same, and the refusal leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from robust_dcp.staging.blocks import Block, BlockLease, release_blocks
from robust_dcp.staging.staging_buffers import StagingBuffers, TensorForm, cpus_near

DEVICE = torch.device("cuda", 0)


def test_a_later_lease_gets_the_blocks_of_an_earlier_one_if_they_are_as_large() -> None:
    release_blocks()
    with closing(BlockLease(4096, 1)) as lease:
        block = lease.take()
        lease.give_back(block)
        assert lease.take() is block
        lease.give_back(block)
    with closing(BlockLease(4096, 1)) as lease:
        assert lease.take() is block
        lease.give_back(block)
    with closing(BlockLease(8192, 1)) as lease:
        lease.give_back(lease.take())
    with closing(BlockLease(4096, 1)) as lease:
        assert lease.take() is not block


def _flags_of(block: Block) -> set[str]:
    """What the kernel says of a block's memory."""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        begin, end = (int(address, 16) for address in area.split()[0].split("-"))
        if begin <= block.address < end:
            return set(area.partition("VmFlags:")[2].split())
    raise AssertionError("the block is nowhere in memory")


def test_blocks_are_private_memory_that_may_be_in_huge_pages() -> None:
    flags = _flags_of(Block(8 << 20))
    assert "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_blocks_that_devices_read_into_are_not_in_a_forked_process() -> None:
    with closing(BlockLease(2 << 20, 1, of_load=True)) as lease:
        assert "dc" in _flags_of(lease.take())
    assert "dc" not in _flags_of(Block(2 << 20))


class Runtime:
    """Stands in for ``torch.cuda.cudart()``, and keeps the error of a failed call as the CUDA runtime does.

    Args:
        error: what it answers when it is asked to lock memory.
    """

    def __init__(self, error: int) -> None:
        self.error = error
        self.kept_error = 0
        self.calls: list[str] = []
        self.cudaHostRegister = self.register
        self.cudaHostUnregister = self.unregister
        self.cudaGetLastError = self.last_error

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        self.kept_error = self.error
        return self.error

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0

    def last_error(self) -> int:
        error, self.kept_error = self.kept_error, 0
        return error


def test_a_block_that_was_refused_is_asked_for_once_and_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Runtime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    block = Block(4096)
    for _ in range(3):
        block.pin(DEVICE)
        assert block.pinned_by is None and cuda.kept_error == 0
    block.unpin()
    assert cuda.calls == ["register"]
    cuda.error = 0
    block.pin(DEVICE)
    block.unpin()
    assert cuda.calls == ["register", "register", "unregister"]


@pytest.mark.parametrize("of_load", [False, True])
def test_what_a_failed_save_or_load_still_holds_is_locked_no_longer(
    of_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Runtime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with closing(BlockLease(4096, 2, of_load=of_load)) as lease:
        held, given_back = lease.take(), lease.take()
        for block in (held, given_back):
            block.pin(DEVICE)
        lease.give_back(given_back)
    assert held.pinned_by is None and (given_back.pinned_by is None) is of_load
    release_blocks()
    assert cuda.calls == ["register"] * 2 + ["unregister"] * 2


def test_a_process_that_has_not_used_cuda_is_not_made_to() -> None:
    """A look at whether there is a device wakes the driver, and then no forked process can use it."""
    program = """
import tempfile, torch, robust_dcp
asked, is_available = [], torch.cuda.is_available
def asks():
    import traceback
    asked.extend(each for each in traceback.extract_stack()[-2:-1] if "robust_dcp" in each.filename)
    return is_available()
torch.cuda.is_available = asks
with tempfile.TemporaryDirectory() as path:
    state_dict = {"w": torch.ones(3), "o": {"step": 1}}
    robust_dcp.save(state_dict, checkpoint_id=path)
    robust_dcp.async_save(state_dict, checkpoint_id=path).result()
    robust_dcp.load(state_dict, checkpoint_id=path)
assert not asked and not torch.cuda.is_initialized(), asked
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)


FORMS: list[TensorForm] = [
    (torch.uint8, torch.Size([7])),
    (torch.float32, torch.Size([1 << 18])),
    (torch.int64, torch.Size([3, 5])),
    (torch.bfloat16, torch.Size([1 << 20])),
    (torch.float64, torch.Size([])),
]


@pytest.mark.parametrize("are_shared", [False, True])
def test_large_tensors_lie_where_direct_writes_take_them_and_none_overlap(are_shared: bool) -> None:
    tensors = StagingBuffers(are_shared=are_shared).take(FORMS).tensors(FORMS)
    assert [(tensor.dtype, tensor.shape) for tensor in tensors] == FORMS
    assert [tensor.data_ptr() % 4096 for tensor in tensors if tensor.nbytes >= 1 << 20] == [64, 64]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_all_pages_of_shared_memory_are_there_before_anything_is_copied() -> None:
    """Otherwise the first access to a page that the host does not have would kill the process."""
    buffer = StagingBuffers(are_shared=True).take([(torch.uint8, torch.Size([64 << 20]))])
    assert buffer.fd is not None
    assert os.fstat(buffer.fd).st_blocks * 512 == buffer.nbytes
    buffer.release()


@pytest.mark.parametrize("node", ["1", "0", "-1", "what?"])
def test_processors_near_a_device_are_those_of_its_node_that_this_process_may_use(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine with two nodes was there, so they are described as the kernel would."""
    own = frozenset(os.sched_getaffinity(0))
    for number, cpus in enumerate(("9000-9003", f"{min(own)},9004-9007")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    near = cpus_near(torch.device("cuda"), tmp_path)
    assert near == ({min(own)} if node == "1" else own)  # of node 0 this process may use none
    assert cpus_near(None, tmp_path) == own
