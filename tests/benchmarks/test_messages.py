"""What ranks send in a save is counted as it is: the same few frames for each neighbour once the plan is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_messages as benchmark
from robust_dcp.comm.frames import FRAME_NBYTES


def test_a_run_prints_what_the_coordinator_and_the_others_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "messages.json"

    benchmark.main(["--ranks", "3", "--items", "10", "--objects", "0", "--json", str(path)])

    rows = json.loads(path.read_text())
    assert [(row["save"], row["phase"]) for row in rows] == [
        (save, phase) for save in ("first", "repeated") for phase in ("plan", "write", "commit")
    ]
    for row in rows[3:]:
        assert (row["exchanges"], row["payload_nbytes"]) == (1, 0)
        assert 0 < row["others_payload_nbytes"] <= 150 if row["phase"] == "write" else not row["others_payload_nbytes"]
        assert (row["header_nbytes"], row["others_header_nbytes"]) == (2 * FRAME_NBYTES, FRAME_NBYTES)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
