"""Buffers for copies are kept, and lie where a direct write takes bytes from; shared ones have no name."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

from robust_dcp.staging import StagingBuffer, StagingBuffers, TensorForm

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


def test_two_mappings_of_a_shared_buffer_are_the_same_memory() -> None:
    buffer = StagingBuffers(are_shared=True).take(FORMS)
    assert buffer.fd is not None
    other = StagingBuffer(buffer.nbytes, fd=os.dup(buffer.fd))
    for number, tensor in enumerate(buffer.tensors(FORMS)):
        tensor.fill_(number)
    assert [float(tensor.sum()) for tensor in other.tensors(FORMS)] == [
        number * tensor.numel() for number, tensor in enumerate(other.tensors(FORMS))
    ]
    other.release()
    buffer.release()


def test_a_released_buffer_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    buffers = StagingBuffers(are_shared=True)
    buffers.give_back(buffers.take(FORMS))
    buffers.release()
    assert len(os.listdir("/proc/self/fd")) == before
