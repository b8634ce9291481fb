"""What ``import torch`` does of robust_dcp: nothing without being asked, the hook if asked, and never an exception.

Megatron's parser is a small one of its shape; where ``megatron.training`` is on the path (``make test-compat``), the
real one. Each test has processes of its own, since importing decides.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

import robust_dcp_autoload
from robust_dcp_autoload import planner_asked_for
from tests.megatron.small_megatron import run_python, write_small_megatron

_WHAT_IS_THERE = """
import sys
old = set(sys.modules)
import robust_dcp_autoload
assert set(sys.modules) - old == {"robust_dcp_autoload"}  # it needs the standard library only
import torch
print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("robust_dcp")])
print("robust_dcp" in sys.modules, "robust_dcp.api" in sys.modules, "megatron" in sys.modules)
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
    assert run_python("-c", _WHAT_IS_THERE, flag, "robust_dcp").stdout == found


@pytest.fixture
def pretrain(tmp_path: Path) -> Path:
    """A script of Megatron-LM up to where it has parsed its arguments."""
    script = write_small_megatron(tmp_path)
    if importlib.util.find_spec("megatron.training") is not None:
        (tmp_path / "megatron").rename(tmp_path / "not_megatron")
    return script


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
    done = run_python(*arguments, environment=variables, cwd=pretrain.parent)
    assert done.stdout.endswith(f"planner {planner}\n"), done.stderr
    assert "  ckpt_writer_threads ............................. 3\n" in done.stdout
    assert "has no" not in done.stderr


def test_unmodified_megatron_refuses_the_options_without_the_flag(pretrain: Path) -> None:
    done = run_python(pretrain, "--ckpt-writer-threads=3", cwd=pretrain.parent)
    assert done.returncode == 2 and "unrecognized arguments: --ckpt-writer-threads=3" in done.stderr


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
        "    print('child', arguments.parse_args().ckpt_planner, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()\n"
    )
    done = run_python(script, "--ckpt-planner", "robust_dcp", path=tmp_path)
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
    root = Path(__file__).parents[2]
    done = run_python("-m", "tests.megatron.attributes", path=root, environment={"RANK": "0"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 2  # one for each install
    assert all(part in line for line in lines for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr
