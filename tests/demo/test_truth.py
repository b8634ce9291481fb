"""The demo's comparison: that it would notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from demo.truth import Comparison


def _flip_a_bit(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.uint8)[-1] ^= 1
    return flipped


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_flip_a_bit, id="one bit"),
        pytest.param(lambda tensor: tensor.double(), id="dtype"),
        pytest.param(lambda tensor: tensor.reshape(2, 2), id="shape"),
        pytest.param(lambda tensor: -tensor, id="sign of zero"),
    ],
)
def test_a_tensor_that_is_not_the_same_bits_differs(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = torch.zeros(4)
    comparison = Comparison()
    comparison.tensor("weight", change(expected), expected)
    assert comparison.differing == ["weight"]


def test_nan_is_equal_to_itself() -> None:
    comparison = Comparison()
    comparison.tensor("weight", torch.full((2,), torch.nan), torch.full((2,), torch.nan))
    assert comparison.differing == []
    assert (comparison.n_tensors, comparison.nbytes, comparison.keys) == (1, 8, {"weight"})


def test_objects_are_compared_with_the_tensors_in_them() -> None:
    comparison = Comparison()
    comparison.object("same", {"rng": [torch.ones(2), 3]}, {"rng": [torch.ones(2), 3]})
    comparison.object("other tensor", {"rng": [torch.ones(2), 3]}, {"rng": [torch.zeros(2), 3]})
    comparison.object("other keys", {"rng": 1}, {"rng": 1, "seed": 2})
    assert comparison.differing == ["other tensor", "other keys"]
