"""A tree of modules with Megatron's names and shape, small enough to be imported in a test of who imports what when.

Holds the parser as all versions have it: ``_add_checkpointing_args(parser)``, a strict ``parse_args``, the table of
arguments, the global ones. Its module is the one that imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["SCRIPT", "run_python", "write_small_megatron"]

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

_FILES = {
    "core/__init__.py": "__version__ = '0.0'\n",
    "core/package_info.py": "__version__ = '0.0'\n",
    "training/__init__.py": "",
    "training/global_vars.py": _GLOBAL_VARS,
    "training/arguments.py": _ARGUMENTS,
}

SCRIPT = """
import sys
from megatron.training import arguments, global_vars

if __name__ == "__main__":
    args = global_vars._GLOBAL_ARGS = arguments.parse_args()
    arguments._print_args("arguments", args)
    from robust_dcp.megatron.options import current_options
    print("planner", current_options().planner)
"""
"""A script of Megatron-LM, as unmodified as the tree: it parses its arguments and prints the table of them."""


def write_small_megatron(directory: Path) -> Path:
    """Make the tree and ``pretrain_gpt.py`` in a directory, and return the script."""
    for name, text in _FILES.items():
        path = directory / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = directory / "pretrain_gpt.py"
    script.write_text(SCRIPT)
    return script


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    path: Path | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process without the variables that switch robust_dcp or its autoload on or off.

    Args:
        environment: more variables.
        path: a directory for ``PYTHONPATH``, before those that it has.
        cwd: where it runs.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ROBUST_DCP")}
    variables.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    before = [str(path)] if path is not None else []
    variables["PYTHONPATH"] = os.pathsep.join([*before, variables.get("PYTHONPATH", "")]).strip(os.pathsep)
    variables.update(environment or {})
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=150)
