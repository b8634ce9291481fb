"""A structure is compared with the last plan of its own kind, and all that is needed of ranks are sums."""

from __future__ import annotations

import numpy as np
import pytest

from robust_dcp.plan.cache import CachedPlan, PlanCache, kind_called
from robust_dcp.plan.plan import Plan
from robust_dcp.plan.share import Share, plan_id_of
from robust_dcp.plan.structure import StructureTable
from tests.plan.structures import local_of, table, tensor

GROUP = (0, 1)
NONE = np.array([], dtype=np.intp)

Tables = tuple[StructureTable, StructureTable]


def tables(rank_0: str, rank_1: str) -> Tables:
    """One tensor for each word."""
    one, other = (table(*(tensor(name) for name in names.split())) for names in (rank_0, rank_1))
    return one, other


MODEL = tables("w0 w1 w2 step", "w3 w4 w5 step")
LOADER = tables("pos seed step", "")
GROWN = tables("w0 w1 w2 step", "w3 w4 w5 step bias")


class Job:
    """The plans of the coordinator of two ranks."""

    def __init__(self) -> None:
        self.cache = PlanCache()

    def base(self, state: Tables, kind: str | None = None) -> CachedPlan | None:
        return self.cache.last_of_kind(GROUP, kind, state)

    def save(self, state: Tables, kind: str | None = None) -> bytes:
        """A save that commits; returns the identity of its plan."""
        signatures = tuple(local_of(part, ranks=GROUP).signature.value for part in state)
        plan_id = plan_id_of(signatures, [b""] * len(signatures), None)
        base = self.cache.get(GROUP, plan_id) or self.base(state, kind)
        base_kind = plan_id.hex() if base is None else base.kind
        plan = Plan(plan_id, GROUP, state, signatures, (), 0, 0, b"", None, None, False)
        own_kind = base_kind if kind is None else kind_called(kind)
        self.cache.put(GROUP, CachedPlan(Share(plan_id, NONE, None), signatures[0], state[0], plan, kind=own_kind))
        return plan_id


def test_a_structure_of_another_kind_has_no_plan_to_be_compared_with() -> None:
    job = Job()
    assert job.base(MODEL) is None
    model = job.save(MODEL)
    assert job.base(LOADER) is None
    job.save(LOADER)
    base = job.base(GROWN)
    assert base is not None and base.plan_id == model


def test_the_last_plan_of_a_kind_is_the_one_to_compare_with_not_the_most_alike() -> None:
    job = Job()
    job.save(MODEL)
    job.save(LOADER)
    small = job.save(tables("w0 step", "w3 step"))
    job.save(LOADER)
    base = job.base(tables("w0 w1 step", "w3 step"))
    assert base is not None and base.plan_id == small
    # Back to the first structure: that plan is the last of the kind again.
    model = job.save(MODEL)
    base = job.base(tables("w0", "w3"))
    assert base is not None and base.plan_id == model


@pytest.mark.parametrize(
    ("state", "is_model"),
    [
        (tables("w0 w1", "w3 w4"), True),  # a part of it
        (tables("w0 w1 w2 a b c d e f", "w3 w4 w5"), True),  # it, and as much again
        (tables("w0 w1 w2 step", "a b c d"), True),  # half of it
        (tables("w0 w1 w2", "a b c d"), False),
        (tables("w0 w1 a", "w3 b"), False),
        (tables("", "w3 w4 w5 step"), True),  # the coordinator holds nothing
        (tables("", "step"), True),
        (tables("", ""), False),
        (tables("step x y", "z"), False),
    ],
)
def test_most_names_over_all_ranks_tell_the_kind(state: Tables, is_model: bool) -> None:
    job = Job()
    job.save(MODEL)
    assert (job.base(state) is not None) == is_model


def test_a_kind_that_is_named_is_compared_with_the_last_of_that_name_only() -> None:
    job = Job()
    model = job.save(MODEL, "model")
    assert job.base(MODEL, "ema") is None and job.base(GROWN) is None
    ema = job.save(GROWN, "ema")
    for kind, plan_id in (("model", model), ("ema", ema)):
        for state in (MODEL, GROWN, LOADER):
            base = job.base(state, kind)
            assert base is not None and base.plan_id == plan_id
    # One structure under two names: each keeps its own last plan.
    assert job.save(MODEL, "ema") == model
    job.save(LOADER, "ema")
    base = job.base(GROWN, "model")
    assert base is not None and base.plan_id == model


def test_a_first_named_save_goes_on_from_what_was_saved_without_a_name() -> None:
    job = Job()
    model = job.save(MODEL)
    base = job.base(GROWN, "model")
    assert base is not None and base.plan_id == model
    assert job.base(LOADER, "loader") is None
