"""The benchmark for a CUDA device works where the CPU stands in for it, and says that it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch


def test_a_run_says_on_which_device_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--gib", "0.05", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert torch.cuda.is_available() or found["facts"]["device"].startswith("NO GPU")
    assert {row["what"] for row in found["saves"]} >= {"save, ours", "save, stock", "load, ours", "load, stock"}
    assert all(row["seconds"] > 0 for row in found["saves"])
