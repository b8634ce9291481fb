"""Ranges of a tensor's bytes, wherever its elements lie, are those of a contiguous copy."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.staging import Block, TensorBytes
from robust_dcp.storage.records.torch_zip import payload_view
from tests.storage.test_engine import tensors


@given(tensors(), st.data())
def test_any_range_is_copied_to_anywhere(tensor: torch.Tensor, data: st.DataObject) -> None:
    expected = bytes(payload_view(tensor.detach().resolve_conj().resolve_neg().contiguous()))
    found = TensorBytes(tensor)
    assert found.nbytes == len(expected)
    begin = data.draw(st.integers(0, found.nbytes))
    end = data.draw(st.integers(begin, found.nbytes))
    at = data.draw(st.integers(0, 70))
    block = Block(at + end - begin + 1)
    block.data[:] = 0xA5
    found.copy(begin, end, block, at)
    assert bytes(block.data) == b"\xa5" * at + expected[begin:end] + b"\xa5"
    in_place = found.in_place()
    assert in_place is None or bytes(in_place) == expected


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.arange(10.0)[2:]
    in_place = TensorBytes(tensor).in_place()
    assert in_place is not None
    assert in_place.ctypes.data == tensor.data_ptr()
