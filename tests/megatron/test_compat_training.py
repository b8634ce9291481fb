"""Megatron-LM's real argument parser (``megatron.training``, which only the source packages hold), unmodified.

``make test-compat`` puts the sources on ``PYTHONPATH``. Each test has processes of its own, since importing decides.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.megatron.small_megatron import run_python

pytestmark = pytest.mark.compat

_PRETRAIN = """
import sys
from megatron.training import arguments
import megatron.core

args = arguments.parse_args()
arguments._print_args("arguments", args)
print("version", megatron.core.__version__)
print("of robust_dcp:", any(name.partition(".")[0] == "robust_dcp" for name in sys.modules))
print("parser:", arguments._add_checkpointing_args.__code__.co_filename)
"""

_FLAG = ("--ckpt-planner", "robust_dcp", "--ckpt-writer-threads", "3", "--ckpt-save-failure", "warn")
_TABLE = (
    "  ckpt_exchange_timeout_seconds ................... 300.0\n",
    "  ckpt_planner .................................... robust_dcp\n",
    "  ckpt_save_failure ............................... warn\n",
    "  ckpt_writer_threads ............................. 3\n",
)


@pytest.fixture
def pretrain(tmp_path: Path) -> Path:
    """A script of Megatron-LM up to where it has parsed its arguments."""
    assert importlib.util.find_spec("megatron.training") is not None, "run make test-compat"
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(_PRETRAIN)
    return script


def test_the_parser_accepts_the_flag_by_autoload_and_prints_it(pretrain: Path) -> None:
    done = run_python(pretrain, *_FLAG)
    assert all(line in done.stdout for line in _TABLE), done.stderr


def test_without_the_flag_the_parser_is_megatron_s_own_and_strict(pretrain: Path) -> None:
    done = run_python(pretrain)
    assert "of robust_dcp: False\n" in done.stdout, done.stderr
    assert "megatron/training/arguments.py\n" in done.stdout
    assert "ckpt_planner" not in done.stdout
    refused = run_python(pretrain, "--ckpt-writer-threads", "3")
    assert refused.returncode == 2
    assert "unrecognized arguments: --ckpt-writer-threads 3" in refused.stderr


def test_the_variable_does_what_the_flag_does(pretrain: Path) -> None:
    done = run_python(pretrain, environment={"ROBUST_DCP": "1", "ROBUST_DCP_SAVE_FAILURE": "warn"})
    assert "  ckpt_planner .................................... robust_dcp\n" in done.stdout, done.stderr
    assert "  ckpt_save_failure ............................... warn\n" in done.stdout
    assert "has no" not in done.stderr
