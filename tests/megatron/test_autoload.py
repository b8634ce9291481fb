"""What ``import torch`` does of robust_dcp: nothing without being asked, the hook if asked, and never an exception.

Megatron is a small tree of its names and shape, with the parser as all versions have it; where ``megatron.training``
is on the path (``make test-compat``), the real one. Each test has processes of its own, since importing decides.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import robust_dcp_autoload
from robust_dcp_autoload import planner_asked_for

_REPOSITORY = Path(__file__).parents[2]

_ARGUMENTS = """
import argparse
import torch
from megatron.core import package_info

def _add_checkpointing_args(parser):
    group = parser.add_argument_group(title="checkpointing")
    group.add_argument("--save", type=str, default=None)
    return parser

def parse_args():
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    return _add_checkpointing_args(parser).parse_args()

def _print_args(title, args):
    for arg in sorted(vars(args)):
        print("  {} {} {}".format(arg, "." * (48 - len(arg)), getattr(args, arg)), flush=True)
"""

_GLOBAL_VARS = """
_GLOBAL_ARGS = None

def get_args():
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS
"""

_SCRIPT = """
import sys
from megatron.training import arguments, global_vars

if __name__ == "__main__":
    args = global_vars._GLOBAL_ARGS = arguments.parse_args()
    arguments._print_args("arguments", args)
    from robust_dcp.megatron.options import current_options
    print("planner", current_options().planner)
"""
"""A script of Megatron-LM, as unmodified as the tree: it parses its arguments and prints the table of them."""

_FILES = {
    "megatron/core/__init__.py": "__version__ = '0.0'\n",
    "megatron/core/package_info.py": "__version__ = '0.0'\n",
    "megatron/training/__init__.py": "",
    "megatron/training/global_vars.py": _GLOBAL_VARS,
    "megatron/training/arguments.py": _ARGUMENTS,
    "pretrain_gpt.py": _SCRIPT,
}

_WHAT_IS_THERE = """
import sys
old = set(sys.modules)
import robust_dcp_autoload
assert set(sys.modules) - old == {"robust_dcp_autoload"}  # it needs the standard library only
import torch
print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("robust_dcp")])
print("robust_dcp" in sys.modules, "robust_dcp.api" in sys.modules, "megatron" in sys.modules)
"""


def _run_python(
    *arguments: str | Path, cwd: Path = _REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process without the variables that switch robust_dcp or its autoload on or off."""
    left_out = ("ROBUST_DCP", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=variables | environment, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("command_line", "variable", "planner"),
    [
        ("pretrain_gpt.py --save /c", None, None),
        ("pretrain_gpt.py --ckpt-planner robust_dcp", None, "robust_dcp"),
        ("pretrain_gpt.py --ckpt-planner=robust_dcp", None, "robust_dcp"),
        ("pretrain_gpt.py --ckpt-planner default", "1", "default"),
        ("pretrain_gpt.py --ckpt-planner default --ckpt-planner robust_dcp", None, "robust_dcp"),
        ("pretrain_gpt.py --ckpt-planner", None, "default"),
        ("pretrain_gpt.py --ckpt-planner-x robust_dcp", None, None),
        ("pretrain_gpt.py", "1", "robust_dcp"),
        ("pretrain_gpt.py", "0", None),
        ("pretrain_gpt.py --ckpt-planner robust_dcp", "no", "default"),
        ("pretrain_gpt.py", "", None),
    ],
)
def test_who_asks_for_it(command_line: str, variable: str | None, planner: str | None) -> None:
    environment = {} if variable is None else {"ROBUST_DCP": variable}
    assert planner_asked_for(command_line.split(), environment) == planner


@pytest.mark.parametrize(
    ("flag", "found"),
    [("--save", "[]\nFalse False False\n"), ("--ckpt-planner", "['ImportHook']\nTrue False False\n")],
)
def test_importing_torch_changes_nothing_and_with_the_flag_waits_for_megatron(flag: str, found: str) -> None:
    assert _run_python("-c", _WHAT_IS_THERE, flag, "robust_dcp").stdout == found


@pytest.fixture
def pretrain(tmp_path: Path) -> Path:
    """A script of Megatron-LM up to where it has parsed its arguments."""
    for name, text in _FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if importlib.util.find_spec("megatron.training") is not None:
        (tmp_path / "megatron").rename(tmp_path / "not_megatron")
    return path


@pytest.mark.parametrize(
    ("arguments", "variables", "planner"),
    [
        (("pretrain_gpt.py", "--ckpt-planner", "robust_dcp", "--ckpt-writer-threads", "3"), {}, "robust_dcp"),
        (("-m", "pretrain_gpt"), {"ROBUST_DCP": "1", "ROBUST_DCP_WRITER_THREADS": "3"}, "robust_dcp"),
        (("pretrain_gpt.py", "--ckpt-planner=robust_dcp", "--ckpt-writer-threads=3"), {"ROBUST_DCP": "0"}, "default"),
    ],
)
def test_unmodified_megatron_takes_the_flag_or_the_variable_and_prints_the_options(
    arguments: tuple[str, ...], variables: dict[str, str], planner: str, pretrain: Path
) -> None:
    done = _run_python(*arguments, cwd=pretrain.parent, **variables)
    assert done.stdout.endswith(f"planner {planner}\n"), done.stderr
    assert "  ckpt_writer_threads ............................. 3\n" in done.stdout
    assert "has no" not in done.stderr


def test_children_of_multiprocessing_have_the_hook_too(pretrain: Path) -> None:
    pretrain.write_text(
        "import multiprocessing\n"
        "def child():\n"
        "    from megatron.training import arguments\n"
        "    print('child', arguments.parse_args().ckpt_planner, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()\n"
    )
    done = _run_python(pretrain, "--ckpt-planner", "robust_dcp")
    assert done.stdout == "child robust_dcp\n", done.stderr


@pytest.mark.parametrize("argv", [[1, None], None, ["x", "--ckpt-planner", 7], ["x", "--ckpt-planner"]])
def test_nothing_in_sys_argv_makes_it_raise(argv: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    robust_dcp_autoload.activate()


def test_install_refuses_a_planner_that_it_does_not_know() -> None:
    from robust_dcp.megatron import install

    with pytest.raises(ValueError, match=r"install\(planner='mcore'\): expected 'robust_dcp' or 'default'"):
        install("mcore")  # type: ignore[arg-type]


def test_every_attribute_of_megatron_is_stock_s_own_again_after_uninstall_whichever_came_first() -> None:
    done = _run_python("-m", "tests.megatron.attributes", RANK="0")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 2  # one for each install
    assert all(part in line for line in lines for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr
