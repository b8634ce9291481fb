"""The benchmark of uneven DTensors measures what it says: real cuts, solved rightly, and calls counted one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from benchmarks import bench_uneven_dtensors as benchmark
from robust_dcp.comm import decode
from robust_dcp.megatron.uneven.uneven_offsets import solve
from robust_dcp.megatron.uneven.uneven_shards import ShardColumns


@pytest.mark.parametrize("n_ranks", [1, 2, 7, 128])
def test_ranks_hold_equal_parts_of_a_layer_up_to_whole_rows(n_ranks: int) -> None:
    cuts = list(benchmark.cuts_of(6, n_ranks))

    n_elements = [sum(int(np.prod(cut.local_shape(rank))) for cut in cuts) for rank in range(n_ranks)]
    widest = max(int(np.prod(cut.shape[1:])) for cut in cuts)
    assert all(begin <= end for cut in cuts for begin, end in pairwise(cut.edges))
    assert max(n_elements) - sum(n_elements) / n_ranks <= 2 * widest
    assert all((cut.edges[0], cut.edges[-1]) == (0, cut.shape[0]) for cut in cuts)


def test_the_coordinator_is_told_of_every_part_and_finds_where_it_was_cut() -> None:
    n_ranks, n_tensors = 5, 40
    columns = [decode(message, ShardColumns) for message in benchmark.messages_of(n_ranks, n_tensors)]
    cuts = {cut.key: cut for cut in benchmark.cuts_of(n_tensors, n_ranks)}

    found = 0
    for rank, (held, answer) in enumerate(zip(columns, solve(columns, range(n_ranks)), strict=True)):
        for spread, begins in zip(held.spreads, answer.spreads, strict=True):
            for key, begin in zip(spread.keys, spread.shapes(begins), strict=True):
                assert begin[0] == cuts[key].edges[rank]
                found += 1
    assert found == n_ranks * n_tensors


def test_a_ratio_is_of_medians_of_the_slowest_rank() -> None:
    sample = benchmark.Sample("first", "ours", 1.0, 0, 3, 384, 10)

    def rank(factor: float) -> list[benchmark.Sample]:
        rounds = [(1.0, 8.0), (2.0, 16.0), (100.0, 17.0)]
        return [
            replace(sample, call=call, who=who, seconds=factor * seconds)
            for ours, stock in rounds
            for who, seconds in (("ours", ours), ("stock", stock))
            for call in ("first", "repeated")
        ]

    first, repeated = benchmark.rows_of([rank(1.0), rank(0.5)], 7)

    assert (first["ours_seconds"], first["stock_seconds"], first["ratio"]) == (2.0, 16.0, 8.0)
    assert first["ours_rounds_seconds"] == [1.0, 2.0, 100.0]
    assert (first["call"], repeated["call"], first["ranks"], first["tensors"]) == ("first", "repeated", 2, 7)


def test_a_run_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "uneven.json"

    benchmark.main(["--tensors", "20", "--virtual-ranks", "4", "--rounds", "2", "--json", str(path)])

    found = json.loads(path.read_text())
    first, repeated = found["ranks"]
    assert (first["stock_collectives"], first["ours_collectives"]) == (20, 0)
    assert (first["ours_exchanges"], repeated["ours_exchanges"]) == (3, 1)
    assert first["ours_payload_nbytes"] > 0
    assert repeated["ours_payload_nbytes"] == 0
    (coordinator,) = found["coordinator"]
    assert (coordinator["ranks"], coordinator["tensors"]) == (4, 20)
    titles = capsys.readouterr().out.splitlines()[1]
    assert titles.index("ratio") < titles.index("ours s") < titles.index("stock s")
