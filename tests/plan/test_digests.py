"""Digests of replicas: equal for equal contents however they lie in memory, and none where the bytes cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.rank_plan import checks_of
from robust_dcp.plan.replica_checks import compare, compare_replicas
from robust_dcp.plan.state_dict.digests import replica_digest
from robust_dcp.plan.structure.signature import PlanContext

_UNREADABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda dense: dense.to_sparse(),
    "meta": lambda dense: dense.to("meta"),
    "conjugate": lambda dense: torch.complex(dense, dense).conj(),
    "negative": lambda dense: torch.complex(dense, dense).conj().imag,
    "nested": lambda dense: torch.nested.nested_tensor([dense[0], dense.reshape(-1)]),
    "subclass": lambda dense: dense.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says of some kinds that they are new
@pytest.mark.parametrize("kind", _UNREADABLE)
def test_a_tensor_whose_bytes_cannot_be_read_has_no_digest_and_is_not_compared(kind: str) -> None:
    assert replica_digest(_UNREADABLE[kind](torch.eye(3)), 0, None) == 0


def test_contents_count_and_not_where_they_lie() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    columns = rows.T.contiguous().T
    assert replica_digest(rows, 5, None) == replica_digest(columns, 5, None) != 0
    assert replica_digest(torch.nn.Parameter(rows), 5, 16) == replica_digest(columns, 5, 16) != 0
    assert replica_digest(rows + 1, 5, None) != replica_digest(rows, 5, None)


def _context(**options: str) -> PlanContext:
    return PlanContext((0, 1), {"dedup": "first", **options}, {"layout": "torch"}, {"torch": "2.13"})


def test_what_differs_in_the_options_of_another_rank_is_said_in_words() -> None:
    own, other = _context(), _context(dedup="last")
    assert own.difference(own.encode()) == ""
    assert "dedup is 'last' there and 'first' here" in own.difference(other.encode())


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"planner": 3}', b"\xff\xfe"])
def test_options_of_another_rank_that_cannot_be_read_are_said_to_be_so(damaged: bytes) -> None:
    assert _context().difference(damaged) == "it cannot be read"


def test_digests_and_classes_that_another_rank_cannot_have_sent_are_refused() -> None:
    with pytest.raises(ExchangeError, match="not a whole number of rows"):
        compare([bytes(24), bytes(23)], [], contested=False)
    with pytest.raises(ExchangeError, match="a plan came with 0 classes of replicas"):
        checks_of(b"", 0, b"", 8)


def test_a_comparison_that_goes_wrong_after_the_commit_is_a_warning_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The checkpoint is there, so the save has succeeded."""
    assert compare_replicas([bytes(23)], [], "step_3") == ()
    assert "step_3: its replicas could not be compared: " in caplog.text
