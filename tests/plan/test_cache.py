"""The cache is bounded, keyed by group and signature, and models that alternate both hit."""

from __future__ import annotations

import threading

import numpy as np

from robust_dcp.plan.cache import CachedPlan, PlanCache
from robust_dcp.plan.share import Share, plan_id_of
from tests.plan.structures import table, tensor

GROUP = (0, 1)


def _plan(*signatures: bytes, rank: int = 0, nbytes: int = 0) -> CachedPlan:
    """What ``rank`` keeps of a plan for these signatures, which takes at least ``nbytes``."""
    share = Share(plan_id_of(signatures, [b""] * len(signatures), None), np.zeros(nbytes // 8, dtype=np.intp), None)
    return CachedPlan(share, signatures[rank], table(tensor("w")))


def test_a_plan_is_found_by_this_ranks_signature() -> None:
    cache, plan = PlanCache(), _plan(b"a0", b"a1")
    assert cache.find(GROUP, b"a0") is None
    assert cache.latest(GROUP) is None
    cache.put(GROUP, plan)
    assert cache.find(GROUP, b"a0") is plan
    assert cache.find(GROUP, b"a1") is None
    assert cache.find(GROUP, b"other") is None
    assert cache.latest(GROUP) is plan


def test_plans_that_take_too_much_memory_together_go_and_the_latest_stays() -> None:
    cache = PlanCache(max_nbytes=100_000)
    for name, nbytes in ((b"a", 60_000), (b"b", 40_000), (b"c", 1)):
        cache.put(GROUP, _plan(name, nbytes=nbytes))
    assert [cache.find(GROUP, name) is not None for name in (b"a", b"b", b"c")] == [False, True, True]
    cache.put(GROUP, _plan(b"large", nbytes=1_000_000))
    assert len(cache) == 1
    assert cache.find(GROUP, b"large") is not None


def test_two_models_that_are_saved_in_turn_both_hit() -> None:
    cache, model, ema = PlanCache(max_entries=2), _plan(b"m0", b"m1", rank=1), _plan(b"e0", b"e1", rank=1)
    for _ in range(3):
        for plan in (model, ema):
            cache.put(GROUP, plan)
        for plan in (model, ema):
            assert cache.find(GROUP, plan.signature) is plan
    assert len(cache) == 2


def test_the_plan_used_last_is_the_latest_and_the_one_used_least_goes() -> None:
    cache = PlanCache(max_entries=3)
    plans = [_plan(bytes([n]), b"same", rank=1) for n in range(3)]
    for plan in plans:
        cache.put(GROUP, plan)
    cache.put(GROUP, plans[0])
    assert cache.latest(GROUP) is plans[0]
    assert cache.find(GROUP, b"same") is plans[0]
    new = _plan(b"new", b"same", rank=1)
    cache.put(GROUP, new)
    assert len(cache) == 3
    left = []
    while (latest := cache.latest(GROUP)) is not None:
        left.append(latest)
        cache.forget(GROUP, latest.plan_id)
    assert left == [new, plans[0], plans[2]]


def test_the_bound_holds_over_all_groups() -> None:
    cache = PlanCache(max_entries=4)
    for n in range(50):
        cache.put((n, n + 1), _plan(bytes([n]), b"x"))
    assert len(cache) == 4
    assert cache.latest((0, 1)) is None
    assert cache.latest((49, 50)) is not None


def test_groups_do_not_see_each_others_plans() -> None:
    cache, plan = PlanCache(), _plan(b"a0", b"a1")
    cache.put(GROUP, plan)
    for other in ((1, 0), (0,), (0, 1, 2), (2, 3)):
        assert cache.find(other, b"a0") is None
        assert cache.latest(other) is None


def test_a_newer_plan_of_the_same_signatures_takes_the_place_of_the_older() -> None:
    cache, old, new = PlanCache(), _plan(b"a0", b"a1"), _plan(b"a0", b"a1")
    cache.put(GROUP, old)
    cache.put(GROUP, new)
    assert len(cache) == 1
    assert cache.find(GROUP, b"a0") is new
    cache.clear()
    assert len(cache) == 0
    assert cache.latest(GROUP) is None


def test_threads_may_save_at_the_same_time() -> None:
    cache = PlanCache(max_entries=4)
    failures: list[BaseException] = []

    def save(thread: int) -> None:
        try:
            for n in range(200):
                plan = _plan(bytes([thread, n % 6]), b"x")
                cache.put(GROUP, plan)
                cache.find(GROUP, plan.signature)
                cache.latest((thread,))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(cache) == 4
