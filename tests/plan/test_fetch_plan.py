"""Who reads what for ranks that do not see the file, and when."""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from robust_dcp.plan.loading.fetch_plan import WINDOW_NBYTES, FetchBox, Requests, parts_of, plan_fetch
from robust_dcp.plan.loading.readers import BUCKET_NBYTES


def box(name: str, nbytes: int, file: str = "f") -> FetchBox:
    return FetchBox(file, name, (0,), 0, (0,), (nbytes,), "uint8", nbytes)


@pytest.mark.parametrize("lengths", [(), (0, 4), (3,), (7, 5_000_000), (2, 3, 4_000_001), (1, 20_000_000), (9 << 20,)])
def test_the_parts_of_a_tensor_cover_it_once_and_fit_a_bucket(lengths: tuple[int, ...]) -> None:
    whole = torch.zeros(lengths, dtype=torch.uint8)
    for offsets, sizes in parts_of(lengths, 1):
        part = whole
        for axis, (first, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(axis, first, length)
        assert part.numel() <= BUCKET_NBYTES
        part += 1
    assert whole.numel() == math.prod(lengths) and bool((whole == 1).all())


def test_no_rank_has_more_than_a_window_on_its_way_and_readers_share_the_work() -> None:
    """Ranks 0 and 1 see the file. Ranks 2 and 3 want 400 MiB of it, one half both of them."""
    both = [box(f"both{n:03}", 4 << 20) for n in range(50)]
    own = [[box(f"rank{rank}.{n:03}", 4 << 20) for n in range(50)] for rank in (2, 3)]
    requests = [None, None, Requests((*both, *own[0])), Requests((*both, *own[1]))]
    shares = plan_fetch(requests, {"f": [0, 1]})
    filled: Counter[tuple[int, int]] = Counter()
    got: list[list[str]] = [[], [], [], []]
    for rank, share in enumerate(shares):
        for bucket in share.buckets:
            assert bucket.nbytes <= BUCKET_NBYTES and bucket.window < share.n_windows
            filled[rank, bucket.window] += bucket.nbytes
            wanted = requests[rank]
            got[rank] += [each.name for each in bucket.boxes]
            got[rank] += [] if wanted is None else [wanted.boxes[place].name for place in bucket.requests]
    assert max(filled.values()) <= WINDOW_NBYTES
    assert sorted(got[0] + got[1]) == sorted(each.name for each in (*both, *own[0], *own[1]))  # each is read once
    assert sorted(got[2]) == sorted(each.name for each in (*both, *own[0]))
    assert abs(len(got[0]) - len(got[1])) <= 2


def test_an_object_larger_than_a_window_travels_alone() -> None:
    shares = plan_fetch([None, Requests((box("a", 5), box("b", 3 * WINDOW_NBYTES), box("c", 5)))], {"f": [0]})
    windows = {each.boxes[0].name: each.window for each in shares[0].buckets}
    assert len({windows["a"], windows["b"], windows["c"]}) == 3


def test_the_work_of_the_coordinator_grows_with_what_is_sent_and_not_with_the_job() -> None:
    """Each of 256 nodes asks for a few boxes. Eight ranks more on each node, which ask for nothing, cost little."""
    few, many = (steps_of_plan(n_nodes=256, ranks_per_node=each) for each in (1, 9))
    assert many < 2 * few


def steps_of_plan(n_nodes: int, ranks_per_node: int) -> int:
    """How many steps of Python ``plan_fetch`` takes."""
    requests: list[Requests | None] = [None] * (n_nodes * ranks_per_node)
    for node in range(n_nodes):
        requests[node * ranks_per_node] = Requests((box(f"{node:04}", BUCKET_NBYTES, f"file{node}"),))
    holders = {f"file{node}": [(node + 1) % n_nodes * ranks_per_node] for node in range(n_nodes)}
    steps = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        plan_fetch(requests, holders)
    finally:
        sys.settrace(before)
    return steps
