"""Every Python block of every page runs, in the order of the page, on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.docs.pages import PAGES, blocks_of
from tests.harness.ranks import run_ranks, values

N_RANKS = 2


def is_program(block: Example) -> bool:
    """Whether a block has a title. It runs elsewhere: ``test_console_blocks`` lets torchrun start ``train.py``, and
    ``tests/hooks`` has the monitoring systems."""
    return "title=" in block.region.lexemes["title"]


def pages_with_blocks() -> list[Path]:
    return [page for page in PAGES if any(not is_program(block) for block in blocks_of(page, "python"))]


class DataLoader:
    """An object with a state dict of its own, as data loaders have."""

    def __init__(self) -> None:
        self.position = 17

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Words(torch.nn.Module):
    """A model whose output has a loss, as many libraries' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()


def names_at_hand() -> dict[str, Any]:
    """What a reader of a page has at hand: names that blocks use without making them, on each rank."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    model = fully_shard(Words(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state_dict = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state_dict, checkpoint_id="checkpoints/stock")  # what a page loads without having saved it
    return {
        "__name__": "__main__",
        "torch": torch,
        "batch": batch,
        "model": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(),
        "state_dict": state_dict,
        "path": "checkpoints/latest",
    }


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
