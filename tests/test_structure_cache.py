"""One rule for all that is remembered: what was used least recently goes, and all of it goes with one call."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import robust_dcp
from robust_dcp.structure_cache import CACHE, StructureCache, Table


def _table(max_nbytes: int = 100, max_entries: int | None = None) -> Table[str, str]:
    return Table(lambda key, value: len(value), max_nbytes=max_nbytes, max_entries=max_entries)


def _keys(table: Table[str, str]) -> list[str]:
    return [key for key, _ in table.latest_first()]


def test_what_was_used_least_recently_goes_when_bytes_run_out() -> None:
    table = _table()
    for key in "abc":
        table.put(key, "x" * 40)
    assert (_keys(table), table.nbytes) == (["c", "b"], 80)
    assert table.get("b") == "x" * 40 and table.get("a") is None
    table.put("d", "x" * 40)
    assert _keys(table) == ["d", "b"]


def test_the_latest_stays_whatever_it_takes() -> None:
    table = _table()
    table.put("a", "x")
    table.put("b", "x" * 1000)
    assert (_keys(table), table.nbytes) == (["b"], 1000)


def test_a_value_in_the_place_of_another_is_counted_once() -> None:
    table = _table()
    for nbytes in (90, 10, 50):
        table.put("a", "x" * nbytes)
    assert (_keys(table), table.nbytes) == (["a"], 50)
    table.forget("a")
    table.forget("b")
    assert (len(table), table.nbytes) == (0, 0)


def test_to_look_at_all_entries_uses_none_of_them() -> None:
    table = _table(max_entries=2)
    table.put("a", "1")
    table.put("b", "2")
    assert table.latest_first() == [("b", "2"), ("a", "1")]
    table.put("c", "3")
    assert _keys(table) == ["c", "b"]


def test_the_use_of_bytes_is_told_by_table_and_all_tables_are_cleared_at_once() -> None:
    cache = StructureCache()
    one = cache.table("one", lambda key, value: 3, max_nbytes=10)
    other = cache.table("other", lambda key, value: 5, max_nbytes=10)
    one.put("a", None)
    other.put("a", None)
    assert cache.nbytes == {"one": 3, "other": 5}
    cache.clear()
    assert cache.nbytes == {"one": 0, "other": 0} and not len(one) and not len(other)


def test_threads_may_use_a_table_at_the_same_time() -> None:
    table = _table(max_nbytes=20)

    def use(thread: int) -> None:
        for n in range(500):
            table.put(f"{thread} {n % 7}", "xx")
            table.get(f"{thread} {(n + 3) % 7}")
            table.latest_first()

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(table), table.nbytes) == (10, 20)


def test_a_save_after_all_is_forgotten_is_as_the_first(tmp_path: Path) -> None:
    def save(step: int) -> str:
        state_dict = {"w": torch.full((3,), float(step)), "step": step}
        return robust_dcp.save(state_dict, checkpoint_id=tmp_path / str(step), no_dist=True).plan

    CACHE.clear()
    assert [save(1), save(2)] == ["built", "reused"]
    used = {name for name, nbytes in CACHE.nbytes.items() if nbytes}
    assert used >= {"plans", "structures", "items", "objects", "write orders", "committed"}
    CACHE.clear()
    assert not any(CACHE.nbytes.values())
    assert save(3) == "built"
