"""The exchanges of a repeated save are counted as they are: the same few frames a neighbour, however many the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_messages as benchmark
from robust_dcp.comm.frames import FRAME_NBYTES

_EXCHANGES = 3


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_a_repeated_save_costs_a_rank_the_same_few_bytes_a_neighbour(world_size: int) -> None:
    costs, cpu_seconds = benchmark.measure_exchanges(world_size, rounds=2)

    assert cpu_seconds > 0
    assert sum(cost.neighbours for cost in costs) == 2 * (world_size - 1)
    for cost in costs:
        assert cost.sent_nbytes == cost.received_nbytes == _EXCHANGES * FRAME_NBYTES * cost.neighbours
        assert cost.most_nbytes <= 1024 * cost.neighbours


def test_a_run_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "messages.json"

    benchmark.main(
        ["--threads", "4", "8", "--rounds", "1", "--ranks", "2", "--items", "10", "--objects", "0", "--json", str(path)]
    )

    found = json.loads(path.read_text())
    assert [row["ranks"] for row in found["exchanges"]] == [4, 8]
    assert [row["root_neighbours"] for row in found["exchanges"]] == [2, 3]
    assert {row["save"] for row in found["saves"]} == {"first", "repeated"}
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 + 1 + 2 + len(found["saves"])
