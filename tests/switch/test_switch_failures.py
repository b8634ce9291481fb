"""The switch leaves Ctrl-C and loaders as they are. ``tests/promises/test_switch.py`` has what ends a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import robust_dcp_autoload

FINDER = """
    import sys

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name in ("robust_dcp.installation", "robust_dcp.megatron.installation"):
                raise {error}

    sys.meta_path.insert(0, Finder())
    import torch
"""


def run(script: str, path: Path, error: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which the import of what switches robust_dcp on raises ``error``."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("ROBUST_DCP")}
    source = textwrap.dedent(FINDER).replace("{error}", error) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", source, str(path)],
        env={**own, "ROBUST_DCP": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("module", ["torch.distributed.checkpoint", "megatron"])
def test_ctrl_c_while_it_is_switched_on_ends_the_import(module: str, tmp_path: Path) -> None:
    script = f"""
    try:
        import {module}
    except KeyboardInterrupt:
        print("interrupted")
    """
    done = run(script, tmp_path, "KeyboardInterrupt")
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_ctrl_c_while_arguments_are_looked_at_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arguments(list[str]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", Arguments())
    with pytest.raises(KeyboardInterrupt):
        robust_dcp_autoload.activate()


def test_who_asks_the_loader_for_more_than_the_module_gets_it(tmp_path: Path) -> None:
    script = """
    import importlib.util
    name = "torch.distributed.checkpoint"
    spec = importlib.util.find_spec(name)
    print("Distributed" in spec.loader.get_source(name) or "import" in spec.loader.get_source(name))
    """
    assert run(script, tmp_path, "ImportError").stdout == "True\n"
