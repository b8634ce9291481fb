"""Where the switch cannot work, ``import torch`` works all the same, stock code saves, and people are told."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import robust_dcp_autoload
from robust_dcp_autoload import _ModuleIsComing
from tests.switch.test_install import is_ours

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


def test_what_cannot_be_switched_on_is_told_once_and_stock_saves(tmp_path: Path) -> None:
    script = """
    import torch.distributed.checkpoint as dcp
    dcp.save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1])
    """
    done = run(script, tmp_path / "saved", "ImportError('half an update')")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("could not be switched on, so stock code saves and loads checkpoints") == 1
    assert "ImportError: half an update" in done.stderr
    assert (tmp_path / "saved/.metadata").exists() and not is_ours(tmp_path / "saved")


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


def test_a_torch_without_checkpoints_is_left_as_it_is() -> None:
    assert _ModuleIsComing("robust_dcp", True).find_spec("torch.distributed.checkpoint", ["/nowhere"]) is None


def test_it_is_switched_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr("robust_dcp.installation.install", lambda: installed.append("all"))
    waiting = _ModuleIsComing("robust_dcp", True)
    monkeypatch.setattr(sys, "meta_path", [waiting, *sys.meta_path])
    waiting.install()
    waiting.install()
    assert installed == ["all"] and waiting not in sys.meta_path
