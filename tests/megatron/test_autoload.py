"""What ``import torch`` does of robust_dcp: nothing without being asked, the hook if asked, and never an exception."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

import robust_dcp_autoload
from robust_dcp_autoload import planner_asked_for
from tests.megatron.small_megatron import run_python, write_small_megatron

_WHAT_IS_THERE = """
import sys
import torch
print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("robust_dcp")])
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("megatron", "robust_dcp")))
"""


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
        ("pretrain_gpt.py", "TRUE", "robust_dcp"),
        ("pretrain_gpt.py", "", None),
    ],
)
def test_who_asks_for_it(command_line: str, variable: str | None, planner: str | None) -> None:
    environment = {} if variable is None else {"ROBUST_DCP": variable}
    assert planner_asked_for(command_line.split(), environment) == planner


def test_the_package_brings_the_entry_point() -> None:
    found = importlib.metadata.entry_points(group="torch.backends", name="robust_dcp")
    assert {entry.value for entry in found} == {"robust_dcp_autoload:activate"}


def test_it_needs_the_standard_library_only() -> None:
    code = "import os, sys; old = set(sys.modules); import robust_dcp_autoload; print(set(sys.modules) - old)"
    assert run_python("-c", code).stdout == "{'robust_dcp_autoload'}\n"


def test_without_the_flag_importing_torch_changes_nothing() -> None:
    assert run_python("-c", _WHAT_IS_THERE, "--save", "/c").stdout == "[]\n[]\n"


def test_with_the_flag_importing_torch_only_waits_for_megatron() -> None:
    done = run_python("-c", _WHAT_IS_THERE, "--ckpt-planner", "robust_dcp")
    finders, modules = done.stdout.splitlines()
    assert finders == "['ImportHook']"
    found = ast.literal_eval(modules)
    assert "robust_dcp.api" not in found and not any(name.startswith("megatron") for name in found)


@pytest.mark.parametrize(
    ("arguments", "variable", "planner"),
    [
        (("pretrain_gpt.py", "--ckpt-planner", "robust_dcp", "--ckpt-writer-threads", "3"), None, "robust_dcp"),
        (("-m", "pretrain_gpt"), "1", "robust_dcp"),
        (("pretrain_gpt.py", "--ckpt-planner=default"), "1", "default"),
        (("pretrain_gpt.py", "--ckpt-planner", "robust_dcp"), "off", "default"),
    ],
)
def test_unmodified_megatron_takes_the_flag_or_the_variable_and_prints_the_options(
    arguments: tuple[str, ...], variable: str | None, planner: str, tmp_path: Path
) -> None:
    write_small_megatron(tmp_path)
    done = run_python(*arguments, environment={} if variable is None else {"ROBUST_DCP": variable}, cwd=tmp_path)
    assert done.stdout.endswith(f"planner {planner}\n"), done.stderr
    if variable is None:
        assert "  ckpt_planner .................................... robust_dcp\n" in done.stdout
        assert "  ckpt_writer_threads ............................. 3\n" in done.stdout


@pytest.mark.parametrize(
    ("option", "environment"),
    [("--ckpt-writer-threads=3", {}), ("--ckpt-planner=robust_dcp", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})],
)
def test_unmodified_megatron_refuses_the_options_without_the_flag_or_where_pytorch_loads_nothing(
    option: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_python(write_small_megatron(tmp_path), option, environment=environment)
    assert done.returncode == 2 and f"unrecognized arguments: {option}" in done.stderr


def test_it_works_where_the_parser_s_module_is_itself_what_imports_torch(tmp_path: Path) -> None:
    """Then the hook comes while that module runs, and sees it again when it is complete."""
    script = write_small_megatron(tmp_path)
    code = "import sys, megatron.training.global_vars; assert 'torch' not in sys.modules; "
    done = run_python("-c", code + script.read_text(), "--ckpt-planner", "robust_dcp", path=tmp_path)
    assert done.stdout.endswith("planner robust_dcp\n"), done.stderr


def test_children_of_multiprocessing_have_the_hook_too(tmp_path: Path) -> None:
    script = write_small_megatron(tmp_path)
    script.write_text(
        "import multiprocessing\n"
        "def child():\n"
        "    from megatron.training import arguments\n"
        "    args = arguments.parse_args()\n"
        "    print('child', args.ckpt_planner, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()\n"
    )
    done = run_python(script, "--ckpt-planner", "robust_dcp")
    assert done.stdout == "child robust_dcp\n", done.stderr


@pytest.mark.parametrize("argv", [[1, None], None, ["x", "--ckpt-planner", 7], ["x", "--ckpt-planner"]])
def test_nothing_in_sys_argv_makes_it_raise(argv: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    robust_dcp_autoload.activate()
