"""``install`` and ``uninstall``: what differs between them, what does not before and after, and when it happens."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from robust_dcp.switch.patching import Patch
from tests.megatron.small_megatron import run_python

_MODULES = {
    "first.py": """
def plan(): return "stock"
class Strategy:
    def save(self): return "stock"
    @staticmethod
    def name(): return "stock"
    @classmethod
    def kind(cls): return cls.__name__
class Derived(Strategy):
    pass
""",
    "second.py": "from {package}.first import plan\ndef call(): return plan()\n",
    "third.py": "from {package}.first import plan\n",
    "broken.py": "raise ImportError('of its own')\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package with the modules above, not imported yet."""
    name = f"patched_{abs(hash(tmp_path)):x}"
    (tmp_path / name).mkdir()
    for file, text in {"__init__.py": "", **_MODULES}.items():
        (tmp_path / name / file).write_text(text.replace("{package}", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


def _robust(original: Any) -> Any:
    return lambda *args: f"robust over {original(*args)}"


def test_install_refuses_a_planner_that_it_does_not_know() -> None:
    from robust_dcp.megatron import install

    with pytest.raises(ValueError, match=r"install\(planner='mcore'\): expected 'robust_dcp' or 'default'"):
        install("mcore")  # type: ignore[arg-type]


def _run_attributes(order: str, rank: int) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return run_python("-m", "tests.megatron.attributes", order, path=root, environment={"RANK": str(rank)})


def test_every_attribute_of_megatron_is_the_same_object_before_install_and_after_uninstall() -> None:
    done = _run_attributes("megatron_first", rank=0)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr


def test_no_attribute_of_megatron_is_ours_after_uninstall_if_megatron_came_after_install() -> None:
    done = _run_attributes("install_first", rank=1)
    assert done.returncode == 0, done.stderr
    assert "is the planner of" not in done.stderr


def test_the_planner_default_adds_the_arguments_and_replaces_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from robust_dcp.megatron import installation

    monkeypatch.setattr(installation, "_installed", installation._Installed())
    installation.install("default")
    assert set(installation._installed.patches) == {"arguments"}
    installation.uninstall()
    assert installation._installed.patches == {}


def test_the_line_goes_to_the_log_where_there_is_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from robust_dcp.megatron import installation

    monkeypatch.setattr(installation, "_installed", installation._Installed())
    monkeypatch.setenv("RANK", "0")
    caplog.set_level(logging.INFO, "robust_dcp")
    for _ in range(2):
        installation._announce(Patch("megatron.core.dist_checkpointing", "save", _robust))
    assert len([each for each in caplog.records if "is the planner of" in each.getMessage()]) == 1
    assert capsys.readouterr().err == ""
