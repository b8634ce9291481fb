"""What was saved one way is loaded every other way, bit for bit, on four real ranks."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.api.ways import LOADERS, SAVERS
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import KINDS

# Who writes the files and who reads them matters for each kind; who calls them only that they fit together.
READ_BY_ALL = ("ours", "stock")
READ_BY_SOME = ("ours", "stock")


def save_and_load_all_kinds(directory: str, saver: str, loaders: tuple[str, ...]) -> list[str]:
    """Every kind through one saver and each loader; what went wrong, in words."""
    problems: list[str] = []
    for kind, make in KINDS.items():
        path = os.path.join(directory, kind)
        expected = make(1)
        try:
            SAVERS[saver](expected, path)
        except Exception:
            problems.append(f"{kind}, saved by {saver}: {traceback.format_exc()}")
            continue
        for loader in loaders:
            state_dict = make(0)
            try:
                LOADERS[loader](state_dict, path)
            except Exception:
                problems.append(f"{kind}, saved by {saver}, loaded by {loader}: {traceback.format_exc()}")
                continue
            problems += [f"{kind}, {saver} to {loader}: {each}" for each in differences(expected, state_dict)]
            dist.barrier()  # so that an error of one combination is not met in the next
    return problems


@pytest.mark.parametrize("saver", SAVERS)
def test_what_is_saved_one_way_is_loaded_every_other_way_bit_for_bit(saver: str, tmp_path: Path) -> None:
    loaders = tuple(LOADERS) if saver in READ_BY_ALL else READ_BY_SOME
    for problems in values(run_ranks(4, save_and_load_all_kinds, str(tmp_path), saver, loaders, timeout_seconds=150)):
        assert problems == []
