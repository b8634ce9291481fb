"""The demo's verdict: evidence that is wrong, or not there, does not pass."""

from __future__ import annotations

from typing import Any

import pytest

from demo.verdict import about_a_changed_tensor, about_loads, about_lost_keys, about_saves


def _save(plan: str, *, added: tuple[str, ...] = (), plans: tuple[str, ...] = ()) -> dict[str, Any]:
    ranks = [{"plan": each} for each in plans or (plan, plan)]
    return {"report": {"plan": plan, "added": list(added), "changed": {}, "ranks": ranks}}


def _load(**changes: Any) -> dict[str, Any]:
    load = {"save": 1, "layout": "4", "n_tensors": 3, "n_keys": 3, "differing": [], "not_loaded": []}
    return {"loads": [{**load, **changes}], "robust_dcp_imported": False}


_GOOD_SAVES = [_save("built"), _save("reused"), _save("rebuilt", added=("ema.weight",))]


def test_three_saves_as_promised_hold() -> None:
    assert all(claim.holds for claim in about_saves("FSDP2", _GOOD_SAVES, "ema"))


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param([_save("built"), _save("rebuilt"), _GOOD_SAVES[2]], id="not reused"),
        pytest.param([_save("built"), _save("reused"), _save("reused")], id="change not noticed"),
        pytest.param([_save("built"), _save("reused"), _save("rebuilt", added=("other",))], id="other key named"),
        pytest.param([_save("built"), _save("reused", plans=("reused", "built")), _GOOD_SAVES[2]], id="ranks differ"),
    ],
)
def test_saves_that_did_something_else_fail(saves: list[dict[str, Any]]) -> None:
    assert not all(claim.holds for claim in about_saves("FSDP2", saves, "ema"))


def test_a_load_that_is_equal_holds() -> None:
    assert all(claim.holds for claim in about_loads("stock", _load(), {(1, "4")}))


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        pytest.param(_load(differing=["weight"]), {(1, "4")}, id="differs"),
        pytest.param(_load(not_loaded=["weight"]), {(1, "4")}, id="key not loaded"),
        pytest.param(_load(n_tensors=0), {(1, "4")}, id="nothing compared"),
        pytest.param(_load(), {(1, "4"), (1, "2 x 2")}, id="a load is missing"),
        pytest.param({**_load(), "robust_dcp_imported": True}, {(1, "4")}, id="robust_dcp in the reader"),
    ],
)
def test_a_load_that_proves_less_fails(evidence: dict[str, Any], expected: set[tuple[int, str]]) -> None:
    assert not all(claim.holds for claim in about_loads("stock", evidence, expected))


def test_only_keys_of_another_layout_may_stay_unread() -> None:
    resharded = _load(layout="TP2", not_loaded=["rng_state/shard_0_2"])
    evidence = {**resharded, "loads": [_load()["loads"][0], resharded["loads"][0]]}
    expected = {(1, "4"), (1, "TP2")}
    assert all(claim.holds for claim in about_loads("stock", evidence, expected, layout_bound=("rng_state",)))
    assert not all(claim.holds for claim in about_loads("stock", evidence, expected))


def test_missing_evidence_is_an_error() -> None:
    with pytest.raises(KeyError):
        about_loads("stock", {"loads": [{}]}, set())


def test_a_key_lost_by_us_or_kept_by_stock_fails() -> None:
    good = about_lost_keys({"robust": [], "stock": ["rerun/0"]}, "rerun")
    ours_lost = about_lost_keys({"robust": ["rerun/0"], "stock": ["rerun/0"]}, "rerun")
    stock_kept = about_lost_keys({"robust": [], "stock": []}, "rerun")
    assert [all(claim.holds for claim in claims) for claims in (good, ours_lost, stock_kept)] == [True, False, False]


def test_a_changed_tensor_must_be_named_and_read_as_saved() -> None:
    save = {"report": {"plan": "rebuilt", "changed": {"loss_weights": "int64 -> float32"}}}
    found = {"saved": [0.5], "robust": [0.5], "stock": [0]}
    assert all(claim.holds for claim in about_a_changed_tensor(save, "loss_weights", found))
    assert not all(c.holds for c in about_a_changed_tensor(save, "loss_weights", {**found, "robust": [0]}))
    assert not all(c.holds for c in about_a_changed_tensor(save, "other", found))
