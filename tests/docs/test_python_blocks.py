"""Every Python block of every page runs, in the order of the page, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from sybil import Example
from sybil.evaluators.python import PythonEvaluator

from tests.docs.pages import PAGES, blocks_of
from tests.docs.reader import names_at_hand
from tests.harness.ranks import run_ranks, values

N_RANKS = 2


def is_program(block: Example) -> bool:
    """Whether a block has a title. It runs elsewhere: ``test_console_blocks`` lets torchrun start ``train.py``, and
    ``tests/hooks`` has the monitoring systems."""
    return "title=" in block.region.lexemes["title"]


def pages_with_blocks() -> list[Path]:
    return [page for page in PAGES if any(not is_program(block) for block in blocks_of(page, "python"))]


def run_page(page: Path) -> int:
    """Run the blocks of a page on this rank; gives how many there were."""
    blocks = [block for block in blocks_of(page, "python") if not is_program(block)]
    namespace = names_at_hand()
    run = PythonEvaluator()
    for block in blocks:
        block.namespace.clear()
        block.namespace.update(namespace)
        run(block)
        namespace = dict(block.namespace)
        dist.barrier()
    return len(blocks)


@pytest.mark.parametrize("page", pages_with_blocks(), ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = values(run_ranks(N_RANKS, run_page, page))
    assert counts[0] > 0 and len(set(counts)) == 1
