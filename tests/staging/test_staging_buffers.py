"""Buffers for copies are kept, and lie where a direct write takes bytes from; shared ones have no name."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from robust_dcp.staging.staging_buffers import StagingBuffers, TensorForm, cpus_near

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
