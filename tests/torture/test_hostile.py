"""A small part of the campaign that ``make torture`` runs: nothing of it is lost."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from torture import hostile, inputs
from torture.samples import SAMPLES, make_samples
from torture.trials import LOST, run_trial

FORGED = list(inputs.all_forged())
GROUPS = sorted({each.group for each in FORGED})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork
    path = tmp_path_factory.mktemp("samples")
    make_samples(str(path))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_sound_sample_is_loaded(sample: inputs.Sample, root: Path) -> None:
    path = str(root / sample.name)
    canary = str(root / "canary")
    verdict = run_trial(lambda: sample.load(path), path, seconds=20.0, growth_nbytes=512 << 20, canary=canary)
    assert verdict == ("loaded", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_no_forged_input_is_lost(group: str, root: Path) -> None:
    chosen = [each for each in FORGED if each.group == group][::4]
    outcomes = hostile.run(iter(chosen), str(root))
    assert len(outcomes) == len(chosen) and [outcome for outcome in outcomes if outcome[2] == LOST] == []


@pytest.mark.filterwarnings("ignore")
def test_no_damaged_input_is_lost(root: Path) -> None:
    outcomes = hostile.run(inputs.random_inputs(random.Random(3), 30), str(root))
    assert {outcome[2] for outcome in outcomes} == {"loaded", "refused"}


@pytest.mark.filterwarnings("ignore")
def test_a_trial_notices_wrong_data_a_crash_a_foreign_error_and_code_that_ran(root: Path) -> None:
    def fails(load: object) -> tuple[str, str]:
        return run_trial(load, "x", seconds=5.0, growth_nbytes=64 << 20, canary=str(root / "canary"))  # type: ignore[arg-type]

    assert fails(lambda: ctypes.string_at(0)) == (LOST, "killed by SIGSEGV")
    assert fails(lambda: int("x"))[1].startswith("ValueError")
    assert fails(lambda: os.mkdir(root / "canary")) == (LOST, "code of the checkpoint was run")
    blocks = [bytearray(100 << 10) for _ in range(3000)]  # of the heap, which keeps them when they are freed
    last = bytearray(100 << 10)
    blocks.clear()
    assert "MiB" in fails(lambda: bytearray(128 << 20).count(b"x"))[1]
    del last
