"""Every command in a ``console`` block is one that works: it runs, or its options are held against what reads them.

Every Python block of every page runs, in the order of the page, on two real ranks.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
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
from torch.distributed.run import get_args_parser

from robust_dcp.cli.app import parse
from robust_dcp.megatron.options import OPTIONS
from tests.docs.pages import PAGES, ROOT, blocks_of
from tests.harness.ranks import run_ranks, values

VARIABLES = {"ROBUST_DCP_RANKS_PER_NODE", *(option.variable for option in OPTIONS)}
ARGUMENTS = {option.argument for option in OPTIONS}
# Programs of others, which start a job: what is ours is the variable before them.
LAUNCHERS = {"./run_train.sh", "accelerate", "megatron"}


def is_program(block: Example) -> bool:
    """Whether a block has a title. It runs elsewhere: torchrun starts ``train.py``, and ``tests/hooks`` has the
    monitoring systems."""
    return "title=" in block.region.lexemes["title"]


def commands_of(block: Example) -> list[str]:
    """The lines after a prompt, joined where they go on; lines without a prompt are output."""
    lines = str(block.parsed).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").partition("   # ")[0].strip() for line in lines if line.startswith("$ ")]


def all_commands() -> list[tuple[str, str]]:
    return sorted(
        {
            (page.name, command)
            for page in PAGES
            for block in blocks_of(page, "console")
            for command in commands_of(block)
        }
    )


def complaint_about(command: str) -> str | None:
    """What is wrong with a command; ``None`` if it can be typed."""
    words = shlex.split(command.replace("…", ""))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        variable = words.pop(0).partition("=")[0]
        if variable.startswith("ROBUST_DCP") and variable not in VARIABLES:
            return f"there is no variable {variable}"
    wrong = [word for word in words if word.startswith("--ckpt-") and word.partition("=")[0] not in ARGUMENTS]
    if wrong:
        return f"there are no arguments {wrong}"
    program, *rest = words
    return COMPLAINTS[program](rest) if program in COMPLAINTS else f"no test knows what {program} takes"


def about_make(words: list[str]) -> str | None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    unknown = [word for word in words if "=" not in word and word not in targets[1].split()]
    return f"make has no target {unknown}" if unknown else None


def about_pip(words: list[str]) -> str | None:
    project = (ROOT / "pyproject.toml").read_text()
    if words == ["uninstall", "robust-dcp"]:
        return None
    if words[:1] != ["install"]:
        return "only pip install"
    for word in words[1:]:
        name, _, extras = word.removesuffix("]").partition("[")
        if name != ".":
            return "no index has the package: it is installed from a checkout"
        for extra in filter(None, extras.split(",")):
            if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
                return f"there is no extra {extra}"
    return None


def about_torchrun(words: list[str]) -> str | None:
    parsed = get_args_parser().parse_args(words)
    return about_python(["-m", parsed.training_script]) if parsed.module else None


def about_python(words: list[str]) -> str | None:
    if words[:1] == ["-m"] and importlib.util.find_spec(words[1]) is None:
        return f"there is no module {words[1]}"
    return None


def about_robust_dcp(words: list[str]) -> str | None:
    try:
        parse(words)
    except Exception as error:
        return str(error)
    return None


COMPLAINTS = {
    "make": about_make,
    "pip": about_pip,
    "torchrun": about_torchrun,
    "python": about_python,
    "robust-dcp": about_robust_dcp,
    **dict.fromkeys(LAUNCHERS, lambda words: None),
}


@pytest.mark.parametrize(("page", "command"), all_commands(), ids=lambda value: str(value)[:60])
def test_a_command_in_a_page_can_be_typed(page: str, command: str) -> None:
    assert complaint_about(command) is None


def programs() -> list[Any]:
    """Each ``train.py`` of the pages, with the command below it that starts it."""
    found = []
    for page in PAGES:
        blocks = sorted(
            [*filter(is_program, blocks_of(page, "python")), *blocks_of(page, "console")], key=lambda block: block.line
        )
        for block, after in itertools.pairwise(blocks):
            if is_program(block):
                # Recipes for monitoring systems are programs that no command of the page starts.
                commands = [each for each in commands_of(after) if each.endswith(" train.py")]
                found += [pytest.param(block.parsed, each, id=f"{page.name}:{block.line}") for each in commands]
    return found


@pytest.mark.parametrize(("program", "command"), programs())
def test_a_program_of_a_page_runs_as_the_page_says(program: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(torchrun, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "plan built" in ran.stdout and "plan reused" in ran.stdout
    assert (tmp_path / "checkpoints" / "step_2" / ".robust_dcp.index").exists()


N_RANKS = 2


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
