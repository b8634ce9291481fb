"""Tensors of any kind as bytes, copied to the host together and handed out one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.staging import flat_bytes, to_host_together
from robust_dcp.storage.records.torch_zip import payload_view
from tests.storage.test_torch_zip import DTYPES, shapes, tensor_of


class Tagged(torch.Tensor):
    """A subclass that behaves as a plain tensor does."""


@given(st.sampled_from(DTYPES), shapes, st.integers(0, 99))
def test_the_bytes_of_a_tensor_are_its_payload(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    tensor = tensor_of(dtype, shape, seed)
    assert bytes(payload_view(flat_bytes(tensor))) == bytes(payload_view(tensor))
    assert bytes(payload_view(flat_bytes(tensor.as_subclass(Tagged)))) == bytes(payload_view(tensor))
    turned = tensor.permute(tuple(reversed(range(len(shape)))))
    assert bytes(payload_view(flat_bytes(turned))) == bytes(payload_view(turned.contiguous()))


def test_lazy_conjugation_and_negation_are_carried_out() -> None:
    tensor = torch.randn(5, 3, dtype=torch.complex64)
    for lazy in (tensor.conj(), tensor.conj().imag, tensor[1:].conj()):
        assert bytes(payload_view(flat_bytes(lazy))) == bytes(payload_view(lazy.clone().resolve_conj().resolve_neg()))


def test_a_tensor_that_contiguous_does_not_copy_may_have_odd_strides() -> None:
    tensor = torch.arange(4.0).as_strided((1, 4), (7, 1))
    assert bytes(payload_view(flat_bytes(tensor))) == bytes(payload_view(torch.arange(4.0)))


@given(st.lists(st.integers(0, 300), max_size=12))
def test_each_part_comes_back_in_its_place(lengths: list[int]) -> None:
    parts = [torch.full((length,), n, dtype=torch.uint8) for n, length in enumerate(lengths)]
    copies = to_host_together(parts)
    assert len(copies) == len(parts)
    assert all(torch.equal(copy, part) for copy, part in zip(copies, parts, strict=True))


def test_without_room_on_the_device_parts_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    parts = [torch.arange(3, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]
    monkeypatch.setattr(torch, "cat", full)
    assert all(torch.equal(copy, part) for copy, part in zip(to_host_together(parts), parts, strict=True))
